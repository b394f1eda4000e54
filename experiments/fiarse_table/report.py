"""Tables and plots of FIARSE's table, from what lies in `results` and in those of `experiments.nested`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from experiments.comparing import (
    TITLES,
    Found,
    accuracies,
    by_round,
    costs,
    differences,
    glance,
    known,
    last_by_size,
    local_by_size,
    rates,
    seeds_of,
    single,
)
from experiments.fiarse_table.catalogue import HABITS
from experiments.options import Options
from experiments.running import Content, found_in
from experiments.setting import METHODS, NOTES, PROTOTYPE, RATES
from experiments.tables import joined, table, write_report
from raffm.report.comparison_plots import by_client
from raffm.report.drawing import COLOURS, figure_of, look_of
from raffm.rounds.results import Results, from_json

SHARED = ("nested",)
"""Experiments whose runs are taken where they are the same."""

PUBLISHED = {
    "cifar10": {"heterofl": (68.88, 66.05), "fedrolex": (67.18, 65.98), "scalefl": (72.10, 67.37), "fiarse": (77.04, 73.75)},
    "cifar100": {"heterofl": (31.75, 30.67), "fedrolex": (31.67, 29.89), "scalefl": (39.69, 37.56), "fiarse": (41.76, 38.63)},
    "texts": {"heterofl": (87.59, 86.88), "fedrolex": (87.43, 87.19), "scalefl": (88.02, 87.66), "fiarse": (90.03, 89.61)},
}
"""Local and global accuracy after 800 rounds (texts: RoBERTa, 300), read from the figure in FIARSE's repository."""

COLUMNS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "cifar10": (
        "CIFAR-10",
        {
            "ours, honest, 200 rounds": "{}",
            "ours, honest, 800 rounds": "long-{}",
            "ours, as published, 800 rounds": "published-{}",
        },
    ),
    "cifar100": ("CIFAR-100", {"ours, honest, 200 rounds": "cifar100-{}"}),
    "texts": ("AG News", {"ours, honest: MiniLM, the subset, three sizes, 50 rounds": "texts-{}"}),
}
"""Our runs that stand next to published figures."""

FULL_ONLY = ("fedavg", "fedavg-capable")
"""Methods that serve one size alone: their means are those of others' largest size."""

UNSEEN_AT_256 = {"heterofl": 18.0, "fedrolex": 12.0, "scalefl": 33.0, "fiarse": 47.0}
"""Published global accuracy at 1/256, read from a figure, within a point."""

WORDS = {
    "none": "none: tested honestly",
    "split": "clients' tests unrelated to their training data",
    "transform": "images of clients' tests cropped and mirrored",
    "order": "examples in one order in training",
    "norms": "norms by test batches",
    "all": "all four",
}


def write(options: Options) -> None:
    """Write the tables and plots of what is there."""
    write_report(options.out, text(options), _figures(_found(options)))


def overview(options: Options) -> str:
    """A row for every method on CIFAR-10."""
    found = _found(options)
    return glance({method: seeds_of(found, method) for method in METHODS if method not in FULL_ONLY})


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
        differences("fiarse", finals, [method for method in METHODS if method not in ("fiarse", *FULL_ONLY)]),
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
    """The published means next to ours, which are means over the seeds that are there."""
    title, columns = COLUMNS[source]
    rows = []
    for method, (local, whole) in PUBLISHED[source].items():
        cells = [_local_and_global(_runs(found, name.format(method))) for name in columns.values()]
        if any(cells):
            rows.append([TITLES[method], f"{local:.2f} / {whole:.2f}", *cells])
    words = f"{title}: local / global accuracy next to the published ones (means over sizes and seeds, last evaluation)"
    return table(words, ["", "published", *columns], rows) if rows else ""


def _runs(found: Found, name: str) -> list[Content]:
    return [found[name]] if name in found else seeds_of(found, name)


def _local_and_global(runs: Sequence[Content]) -> str:
    if not runs:
        return ""
    several = f" ({len(runs)} seeds)" if len(runs) > 1 else ""
    return f"{fmean(map(_local, runs)):.2f} / {fmean(map(_global, runs)):.2f}{several}"


def _local(run: Content) -> float:
    return fmean(local_by_size(run).values())


def _global(run: Content) -> float:
    return fmean(last_by_size(run).values())


def _habits(found: Found) -> str:
    honest = _honest(found)
    there = known({name: found.get(f"habit-{name}") for name in (*HABITS, "all")})
    if honest is None or not there:
        return ""
    rows = []
    for name, run in {"none": honest, **there}.items():
        gaps = [f"{score(run) - score(honest):+.1f}" for score in (_local, _global)]
        rows.append([WORDS[name], _local_and_global([run]), *gaps])
    title = f"Habits of the published code, each alone: FIARSE, {len(honest['rounds'])} rounds, rate {PROTOTYPE} (seed 0)"
    return table(title, ["habit", "local / global, last evaluation", "effect on local", "effect on global"], rows)


def _honest(found: Found) -> Content | None:
    """FIARSE at the published rate: a run of its own, or one that another experiment has."""
    several = (found.get(name) for name in ("habit-none", f"fiarse-at{PROTOTYPE}-seed0", "fiarse-seed0"))
    return next((run for run in several if run is not None and run["run"]["local"]["lr"] == PROTOTYPE), None)


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
    title = "Sizes that nobody trained, and those that were: global accuracy of the last model (seed 0)"
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
