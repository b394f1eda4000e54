"""Tables and plots of FIARSE's table, from what lies in `results` and in those of `experiments.nested`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from experiments.comparing import (
    TITLES,
    Found,
    accuracies,
    by_round,
    costs,
    differences,
    first_of,
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
from experiments.setting import METHODS, NOTES, PUBLISHED_RATE, RATES
from experiments.tables import joined, table, write_report
from raffm.report.comparison_plots import by_client
from raffm.report.drawing import COLOURS, figure_of, look_of
from raffm.rounds.results import Results, from_json

SHARED = ("nested",)
"""Experiments whose runs are taken where they are the same."""


@dataclass(frozen=True)
class Published:
    """What a method's row says: local and global accuracy, means over sizes, and by size from 1 to 1/64 where printed."""

    local: float
    whole: float
    local_by_size: tuple[float, ...] = ()
    global_by_size: tuple[float, ...] = ()
    """Read from curves, within a point."""

    def cells(self, sizes: Sequence[str]) -> list[str]:
        """Local / global, by size and in the mean."""
        local, about = (dict(zip(PRINTED, figures, strict=False)) for figures in (self.local_by_size, self.global_by_size))
        known = [(local.get(size), about.get(size)) for size in sizes]
        cells = [" / ".join(f"{each:g}" for each in pair if each is not None) for pair in known]
        return [*cells, f"{self.local:.2f} / {self.whole:.2f}"]


PRINTED = ("1", "1/4", "1/16", "1/64")
"""Sizes whose accuracies were published."""

PUBLISHED = {
    "cifar10": {
        "heterofl": Published(68.88, 66.05, (73.76, 72.18, 69.32, 60.24), (66, 71, 67, 60)),
        "fedrolex": Published(67.18, 65.98, (79.08, 70.08, 64.96, 54.60), (72.5, 71, 66, 54)),
        "scalefl": Published(72.10, 67.37, (77.64, 70.08, 71.64, 69.04), (67, 69.5, 68, 64)),
        "fiarse": Published(77.04, 73.75, (82.04, 77.24, 77.20, 73.12), (73.5, 76.5, 75, 70)),
    },
    "cifar100": {
        "heterofl": Published(31.75, 30.67, (36.44, 33.52, 29.80, 27.24)),
        "fedrolex": Published(31.67, 29.89, (38.40, 36.44, 30.84, 21.00)),
        "scalefl": Published(39.69, 37.56, (39.56, 42.56, 40.48, 36.16)),
        "fiarse": Published(41.76, 38.63, (40.96, 43.72, 43.24, 39.12)),
    },
    "texts": {
        "heterofl": Published(87.59, 86.88),
        "fedrolex": Published(87.43, 87.19),
        "scalefl": Published(88.02, 87.66),
        "fiarse": Published(90.03, 89.61),
    },
}
"""Accuracy after 800 rounds (texts: RoBERTa, 300), read from figures in FIARSE's repository."""

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
        *(part for prefix, title in BEYOND.items() for part in _beyond(found, prefix, title)),
        _habits(found),
        _unseen(found),
        costs("What a client takes in a round", first_of(finals)),
    ]
    return joined(parts)


BEYOND = {"long": "800 rounds", "cifar100": "CIFAR-100, 200 rounds"}
"""Runs of one seed besides the final ones."""


def _beyond(found: Found, prefix: str, title: str) -> list[str]:
    """Global and local accuracies, and differences."""
    runs = _first(found, prefix)
    named = {TITLES[method]: run for method, run in runs.items()}
    others = [method for method in runs if method not in ("fiarse", *FULL_ONLY)]
    return [
        single(f"{title}, global (seed 0)", named),
        single(f"{title}, local (seed 0)", named, local_by_size),
        costs(f"{title}: what a client takes in a round", named),
        differences("fiarse", {method: [run] for method, run in runs.items()}, others, f", {title}"),
    ]


def _first(found: Found, prefix: str) -> dict[str, Content]:
    """The runs of one part, by their methods."""
    return known({method: found.get(f"{prefix}-{method}") for method in METHODS})


def _found(options: Options) -> Found:
    """The results of the experiment, and those that it shares with others, whose CIFAR-100 has fewer rounds."""
    shared = {name: run for folder in options.runs.others for name, run in found_in(folder).items()}
    return {name: run for name, run in shared.items() if not name.startswith("cifar100")} | found_in(options.runs.results)


def _published(found: Found, source: str) -> str:
    """The published figures, and under each method's ours, which are means over the seeds that are there."""
    title, columns = COLUMNS[source]
    ours = {method: {name: _runs(found, pattern.format(method)) for name, pattern in columns.items()} for method in METHODS}
    there = [runs for several in ours.values() for runs in several.values() if runs]
    if not there:
        return ""
    sizes = max((list(local_by_size(runs[0])) for runs in there), key=len)
    rows = []
    for method, several in ours.items():
        printed = PUBLISHED[source].get(method)
        if printed is not None and any(several.values()):
            rows.append([f"{TITLES[method].partition(' (')[0]}, published", *printed.cells(sizes)])
            rows += [[f"{name}{_seeds(runs)}", *_by_size_and_mean(runs, sizes)] for name, runs in several.items() if runs]
    words = f"{title}: local / global accuracy, published and ours (means over seeds, last evaluation)"
    return table(words, ["", *sizes, "mean"], rows) if rows else ""


def _runs(found: Found, name: str) -> list[Content]:
    return [found[name]] if name in found else seeds_of(found, name)


def _seeds(runs: Sequence[Content]) -> str:
    return f" ({len(runs)} seeds)" if len(runs) > 1 else ""


def _by_size_and_mean(runs: Sequence[Content], sizes: Sequence[str]) -> list[str]:
    """Local / global, by size and in the mean, over runs of several seeds."""
    both = [[scores(run) for run in runs] for scores in (local_by_size, last_by_size)]
    cells = [" / ".join(f"{fmean(each[size] for each in found):.1f}" for found in both) for size in sizes]
    return [*cells, _local_and_global(runs)]


def _local_and_global(runs: Sequence[Content]) -> str:
    return f"{fmean(map(_local, runs)):.2f} / {fmean(map(_global, runs)):.2f}"


def _local(run: Content) -> float:
    return fmean(local_by_size(run).values())


def _global(run: Content) -> float:
    return fmean(last_by_size(run).values())


def _habits(found: Found) -> str:
    honest = _honest(found)
    there = known({name: found.get(f"habit-{name}") for name in HABITS})
    if honest is None or not there:
        return ""
    rows = []
    for name, run in {"none": honest, **there}.items():
        gaps = [f"{score(run) - score(honest):+.1f}" for score in (_local, _global)]
        rows.append([WORDS[name], _local_and_global([run]), *gaps])
    title = f"Habits of the published code, each alone: FIARSE, {len(honest['rounds'])} rounds, rate {PUBLISHED_RATE} (seed 0)"
    return table(title, ["habit", "local / global, last evaluation", "effect on local", "effect on global"], rows)


def _honest(found: Found) -> Content | None:
    """FIARSE at the published rate: a run of its own, or one that another experiment has."""
    several = (found.get(name) for name in ("habit-none", f"fiarse-at{PUBLISHED_RATE}-seed0", "fiarse-seed0"))
    return next((run for run in several if run is not None and run["run"]["local"]["lr"] == PUBLISHED_RATE), None)


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
        rounds = str(entry["about"]["run"]["rounds"])
        rows.append([TITLES[method], rounds, *cells, "" if published is None else f"{published:.0f}"])
    title = "Sizes that nobody trained, and those that were: global accuracy of the last model (seed 0)"
    return table(title, ["", "rounds", *sizes, "published at 1/256, 800 rounds"], rows)


def _by_size(entry: Content) -> dict[str, float]:
    """The global accuracy at every size; of several ways to serve one the first."""
    found: dict[str, float] = {}
    for name, scores in entry["sizes"].items():
        found.setdefault(name.partition(" ")[0], scores["test"]["accuracy"])
    return found


# -- plots -----------------------------------------------------------------------------------------------------------


def _figures(found: Found) -> dict[str, Any]:
    first = known({method: found.get(f"{method}-seed0") for method in METHODS})
    parts = {"by_round": first, **{prefix: _first(found, prefix) for prefix in BEYOND}}
    unseen = {method: found[f"unseen-{method}"] for method in METHODS if f"unseen-{method}" in found}
    return {
        **{name: by_round(runs) for name, runs in parts.items() if runs},
        **{_histograms(name): by_client(_titled(runs)) for name, runs in parts.items() if runs},
        **({"unseen": _by_fraction(unseen)} if unseen else {}),
    }


def _histograms(name: str) -> str:
    return "by_client" if name == "by_round" else f"{name}_by_client"


def _titled(runs: Mapping[str, Content]) -> dict[str, list[Results]]:
    return {TITLES[method]: [_results(run)] for method, run in runs.items()}


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
