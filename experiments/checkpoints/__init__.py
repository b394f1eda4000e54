"""The federated checkpoints that several experiments begin with: RaFFM, with salient parameters first and without.

The small ViT on CIFAR-10 (`vit-spp`, `vit-plain`) and MiniLM on SST-2 (`sst2-spp`, `sst2-plain`), the same but for the ranking.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.options import Options
from experiments.preparing import TINY_BERT, arranged, few, minilm
from experiments.running import Content, Runs, changed
from raffm.settings import read_file

HERE = Path(__file__).parent

RANKINGS: Mapping[str, Content] = {"spp": {"name": "raffm"}, "plain": {"name": "raffm", "metric": "none"}}

_SMALL: Content = {
    "rounds": 2,
    "local": {"steps": 2},
    "participation": {"clients": 4},
    "evaluate": {"every": 1, "last": 1},
    "backend": {"name": "serial", "precision": "float32"},
}

_ON_CPU: Content = {"backend": {"name": "serial", "precision": "float32"}, "save": {"every": 5}}

CHANGES: Mapping[tuple[str, str], tuple[Content, ...]] = {
    ("vit", "full"): (),
    ("vit", "cpu"): (
        _ON_CPU,
        {"rounds": 12, "local": {"steps": 8}, "data": {"validation": 0.02}},
        {"evaluate": {"every": 4, "batch": 250, "sizes": [1.0, 0.5, 0.25]}},
    ),
    ("vit", "smoke"): (_SMALL, {"model": {"name": "vit-small"}, "data": {"source": "digits", "clients": 12}}),
    ("sst2", "full"): (),
    ("sst2", "cpu"): (
        _ON_CPU,
        {"rounds": 8, "local": {"steps": 10}, "data": {"validation": 0.0}, "evaluate": {"every": 2, "batch": 250}},
    ),
    ("sst2", "smoke"): (_SMALL, {"data": {"clients": 12}}),
}

TESTED = 2000
"""Test images on a CPU."""


def runs_of(options: Options) -> Runs:
    """Where they and their results are, for an experiment; tiny ones stay with its own."""
    if options.scale == "smoke":
        return Runs(options.runs.folder / "checkpoints", options.runs.folder / "checkpoints")
    return Runs(Path("runs") / f"checkpoints-{options.scale}", {"cpu": HERE / "cpu", "full": HERE}[options.scale] / "results")


def contents(scale: str, folder: Path, model: str) -> dict[str, dict[str, Any]]:
    """The settings of a model's two runs: `vit` or `sst2`."""
    base = {"vit": _vit, "sst2": _sst2}[model](scale, folder)
    return {f"{model}-{ranking}": changed(base, {"method": method}) for ranking, method in RANKINGS.items()}


def _vit(scale: str, folder: Path) -> dict[str, Any]:
    base = changed(read_file(HERE / "vit.toml"), *CHANGES["vit", scale])
    if scale == "cpu":
        base["data"]["source"] = few("cifar10", folder, train=50_000, test=TESTED)
    return base


def _sst2(scale: str, folder: Path) -> dict[str, Any]:
    base = changed(read_file(HERE / "sst2.toml"), *CHANGES["sst2", scale])
    if scale == "smoke":
        base["data"] |= {"source": few("sst2", folder, train=300, validation=100), "tokenizer": minilm()}
        base["model"] = dict(TINY_BERT)
    else:
        place = arranged(folder / "minilm", minilm(), "text", 2)
        base["data"]["tokenizer"], base["model"] = place, {"name": place}
    return base
