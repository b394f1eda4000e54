"""Tables and plots of FIARSE's table, from what lies in `results` and in those of `experiments.nested`."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from experiments.comparing import (
    TITLES,
    Found,
    accuracies,
    by_round,
    costs,
    differences,
    known,
    local_by_size,
    mean_of,
    rates,
    seeds_of,
    single,
)
from experiments.fiarse_table.catalogue import HABITS
from experiments.options import SMOKE_NOTE, Options
from experiments.running import Content, found_in
from experiments.setting import METHODS, RATES
from experiments.tables import joined, table, write_report
from raffm.report.comparison_plots import by_client
from raffm.report.drawing import COLOURS, figure_of, look_of
from raffm.rounds.results import Results, from_json

SHARED = ("nested",)
"""Experiments whose runs are taken where they are the same."""

NOTES = {
    "smoke": SMOKE_NOTE,
    "cpu": "A ResNet of a quarter of the widths and half of the blocks, three sizes, 40 steps, 60 rounds, one rate.",
    "full": "",
}

PUBLISHED = {
    "cifar10": {"heterofl": (68.88, 66.05), "fedrolex": (67.18, 65.98), "scalefl": (72.10, 67.37), "fiarse": (77.04, 73.75)},
    "cifar100": {"heterofl": (31.75, 30.67), "fedrolex": (31.67, 29.89), "scalefl": (39.69, 37.56), "fiarse": (41.76, 38.63)},
    "texts": {"heterofl": (87.59, 86.88), "fedrolex": (87.43, 87.19), "scalefl": (88.02, 87.66), "fiarse": (90.03, 89.61)},
}
"""Local and global accuracy after 800 rounds (texts: RoBERTa, 300), read from the figure in FIARSE's repository."""

SOURCES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "texts": "AG News"}

UNSEEN_AT_256 = {"heterofl": 18.0, "fedrolex": 12.0, "scalefl": 33.0, "fiarse": 47.0}
"""Published global accuracy at 1/256, read from a figure, within a point."""

WORDS = {
    "none": "none: tested honestly",
    "split": "clients' tests unrelated to their training data",
    "transform": "test images cropped and mirrored",
    "order": "batches in one order",
    "norms": "norms by test batches",
    "all": "all four",
}


def write(options: Options) -> None:
    """Write the tables and plots of what is there."""
    write_report(options.out, text(options), _figures(_found(options)))


def text(options: Options) -> str:
    """All tables."""
    found = _found(options)
    finals = {method: seeds_of(found, method) for method in METHODS}
    parts = [
        NOTES[options.scale],
        rates(found, tuple(METHODS), RATES),
        accuracies("CIFAR-10, global: accuracy in percent on the test set, mean of the last evaluations", finals),
        accuracies(
            "CIFAR-10, local: mean over the clients of a size on their own tests, last evaluation", finals, local_by_size
        ),
        *(_published(found, source) for source in PUBLISHED),
        differences("fiarse", finals, [method for method in METHODS if method != "fiarse"]),
        single("800 rounds (seed 0)", known({TITLES[name]: found.get(f"long-{name}") for name in METHODS})),
        single("CIFAR-100, 200 rounds (seed 0)", known({TITLES[name]: found.get(f"cifar100-{name}") for name in METHODS})),
        _habits(found),
        _unseen(found),
        costs(found, tuple(METHODS)),
    ]
    return joined(parts)


def _found(options: Options) -> Found:
    """The results of the experiment, and those that it shares with others, whose CIFAR-100 has fewer rounds."""
    shared = {name: run for folder in options.runs.others for name, run in found_in(folder).items()}
    return {name: run for name, run in shared.items() if not name.startswith("cifar100")} | found_in(options.runs.results)


def _published(found: Found, source: str) -> str:
    """The published means next to ours."""
    columns = {"ours, honest": f"{source}-{{}}"}
    if source == "cifar10":
        columns = {
            "ours, honest": "{}-seed0",
            "ours, honest, 800 rounds": "long-{}",
            "ours, as published, 800 rounds": "published-{}",
        }
    rows = []
    for method, (local, whole) in PUBLISHED[source].items():
        runs = [found.get(name.format(method)) for name in columns.values()]
        if any(runs):
            rows.append([TITLES[method], f"{local:.2f} / {whole:.2f}", *map(_local_and_global, runs)])
    title = f"{SOURCES[source]}: local / global accuracy, means over sizes, next to the published ones"
    return table(title, ["", "published", *columns], rows) if rows else ""


def _local_and_global(run: Content | None) -> str:
    return "" if run is None else f"{_local(run):.2f} / {mean_of(run):.2f}"


def _local(run: Content) -> float:
    return fmean(local_by_size(run).values())


def _habits(found: Found) -> str:
    runs = {name: found.get(f"habit-{name}") for name in ("none", *HABITS, "all")}
    runs["none"] = runs["none"] or found.get("fiarse-at0.1-seed0")
    there = {name: run for name, run in runs.items() if run is not None}
    if not {"none"} < set(there):
        return ""
    honest = there["none"]
    rows = []
    for name, run in there.items():
        gaps = [f"{score(run) - score(honest):+.1f}" for score in (_local, mean_of)]
        rows.append([WORDS[name], _local_and_global(run), *gaps])
    title = f"Habits of the published code, each alone: FIARSE, {len(honest['rounds'])} rounds, rate 0.1 (seed 0)"
    return table(title, ["habit", "local / global", "effect on local", "effect on global"], rows)


def _unseen(found: Found) -> str:
    entries = {method: found[f"unseen-{method}"] for method in METHODS if f"unseen-{method}" in found}
    if not entries:
        return ""
    sizes = max((_by_size(entry) for entry in entries.values()), key=len)
    rows = []
    for method, entry in entries.items():
        scores = _by_size(entry)
        published = UNSEEN_AT_256.get(method)
        cells = [f"{100 * scores[size]:.1f}" if size in scores else "-" for size in sizes]
        rows.append([TITLES[method], *cells, "" if published is None else f"{published:.0f}"])
    title = "Sizes that nobody trained, and those that were: global accuracy of the last model after 200 rounds (seed 0)"
    return table(title, ["", *sizes, "published at 1/256, 800 rounds"], rows)


def _by_size(entry: Content) -> dict[str, float]:
    """The global accuracy at every size; of several ways to serve one the first."""
    found: dict[str, float] = {}
    for name, scores in entry["sizes"].items():
        found.setdefault(name.partition(" ")[0], scores["test"]["accuracy"])
    return found


# -- plots -----------------------------------------------------------------------------------------------------------


def _figures(found: Found) -> dict[str, Any]:
    first = known({method: found.get(f"{method}-seed0") for method in METHODS})
    longest = known({method: found.get(f"long-{method}") for method in METHODS})
    results = {TITLES[method]: [_results(run)] for method, run in first.items()}
    unseen = {method: found[f"unseen-{method}"] for method in METHODS if f"unseen-{method}" in found}
    return {
        **({"by_round": by_round(first), "by_client": by_client(results)} if first else {}),
        **({"long": by_round(longest)} if longest else {}),
        **({"unseen": _by_fraction(unseen)} if unseen else {}),
    }


def _results(run: Content) -> Results:
    return from_json({key: entry for key, entry in run.items() if key not in ("where", "clients")})


def _by_fraction(unseen: Mapping[str, Content]) -> Any:
    """Global accuracy by size, also at sizes that nobody trained."""
    with figure_of(4.2) as figure:
        axes = figure.subplots()
        for place, (method, entry) in enumerate(unseen.items()):
            look = look_of(place, place // len(COLOURS))
            points = [(_number(size), 100 * score) for size, score in _by_size(entry).items()]
            drawn = {"color": look.colour, "marker": look.marker, "linestyle": look.line}
            axes.plot(*zip(*points, strict=True), label=TITLES[method], **drawn)
        sizes = max((list(_by_size(entry)) for entry in unseen.values()), key=len)
        axes.set_xscale("log")
        axes.set_xticks([_number(size) for size in sizes], sizes)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("size (part of the parameters, log scale)")
        axes.set_ylabel("test accuracy, last model (%)")
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _number(size: str) -> float:
    above, _, below = size.partition("/")
    return float(above) / float(below or 1)
