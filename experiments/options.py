"""What every experiment is asked: how large, which parts of it, and where runs and results go."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.running import Runs

SCALES = ("smoke", "cpu", "full")

SMOKE_NOTE = "Tiny models, a few rounds on digits: these figures show that everything runs, and nothing else."


@dataclass(frozen=True)
class Options:
    """A scale ("smoke": tiny, "cpu": an hour or two on two cores, "full"), parts by name, and where things go."""

    scale: str
    what: tuple[str, ...]
    runs: Runs
    out: Path


def parser_of(about: str | None, parts: Sequence[str]) -> argparse.ArgumentParser:
    """The options that all experiments have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="full", help="how large (default full)")
    every = (*parts, "report")
    parser.add_argument("--what", nargs="+", default=every, choices=every, help="parts of it (default: all, then the report)")
    parser.add_argument("--runs", type=Path, default=None, help="where runs go (default runs/NAME-SCALE)")
    parser.add_argument("--results", type=Path, default=None, help="where results go (default: beside the experiment)")
    return parser


def options_of(given: argparse.Namespace, here: Path, others: Sequence[str] = ()) -> Options:
    """What was asked for."""
    usual = options_at(here, given.scale, others, given.runs)
    out = given.results or usual.out
    return Options(given.scale, tuple(given.what), replace(usual.runs, results=out / "results"), out)


def options_at(here: Path, scale: str, others: Sequence[str] = (), folder: Path | None = None) -> Options:
    """Everything of an experiment at a scale; tiny runs leave nothing in the repository, a CPU's have a folder of their own.

    `others` are experiments beside it whose results are taken where they are the same.
    """
    folder = folder or Path("runs") / f"{here.name}-{scale}"
    inside = {"smoke": folder, "cpu": here / "cpu", "full": here}
    known = (
        () if scale == "smoke" else tuple(here.parent / name / inside[scale].relative_to(here) / "results" for name in others)
    )
    return Options(scale, (), Runs(folder, inside[scale] / "results", known), inside[scale])
