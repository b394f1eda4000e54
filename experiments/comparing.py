"""Runs of several methods side by side: tables by size, differences over clients, time to accuracy, plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.running import Content, is_average, tail_mean
from experiments.tables import plain_table, table
from raffm.devices.fleet import fleet_of
from raffm.report.drawing import COLOURS, figure_of, look_of

Found = Mapping[str, Content]
"""The results of runs, by name."""

Scores = Callable[..., dict[str, float]]
"""What a run scored by size, without the average or with it: `scores(run, averaged)`."""

TITLES = {
    "nested": "nested",
    "nested-finer": "nested, shapes by 2 channels",
    "fiarse": "FIARSE",
    "smallest-balanced": "smallest for all, balanced",
    "heterofl": "HeteroFL (no scaler, no label mask)",
    "heterofl-both": "HeteroFL (scaler and label mask)",
    "fedrolex": "FedRolex (no scaler, no label mask)",
    "scalefl": "ScaleFL",
    "fiarse-stages": "FIARSE, a threshold a stage",
    "pruning-greedy": "pruning-greedy",
    "fiarse-structured": "structured FIARSE",
    "smallest-uniform": "smallest for all, uniform",
    "fedavg": "FedAvg, full model",
    "fedavg-capable": "FedAvg among the capable",
    "raffm": "RaFFM",
}
"""What runs are called in tables, by the names of their methods."""

RESAMPLES = 10_000
"""How often a bootstrap draws."""

LEVELS = 6
"""How many accuracies, means over sizes and five points apart, tables of time have."""


def seeds_of(found: Found, name: str) -> list[Content]:
    """The runs of a name, one a seed."""
    return [found[f"{name}-seed{seed}"] for seed in (0, 1, 2) if f"{name}-seed{seed}" in found]


def first_of(finals: Mapping[str, Sequence[Content]]) -> dict[str, Content]:
    """The first run of every method, by what tables call it."""
    return {TITLES[method]: runs[0] for method, runs in finals.items() if runs}


def known(runs: Mapping[str, Content | None]) -> dict[str, Content]:
    """Those that are there."""
    return {title: run for title, run in runs.items() if run is not None}


# -- accuracies --------------------------------------------------------------------------------------------------------


def rates(found: Found, methods: Sequence[str], given: Sequence[float]) -> str:
    """What every rate scored on held-out examples."""
    rows = []
    for method in methods:
        runs = known({str(rate): found.get(f"rate-{method}-{rate}") for rate in given})
        scores = {rate: mean_of(run, part="validation") for rate, run in runs.items()}
        best = max(scores.values()) if len(scores) == len(given) else None  # not known before all are there
        cells = {rate: f"**{each:.1f}**" if each == best else f"{each:.1f}" for rate, each in scores.items()}
        if cells:
            rows.append([TITLES[method], *(cells.get(str(rate), "-") for rate in given)])
    title = "Rates: mean over sizes on held-out examples, evaluations at rounds 40, 45 and 50, without the average"
    return table(title, ["rate", *map(str, given)], rows) if rows else ""


def sizes_of(run: Content, averaged: bool) -> dict[str, str]:
    """The sizes of a run, largest first, by what tables call them; of several ways to serve one the first."""
    found: dict[float, tuple[str, str]] = {}
    for size in run["sizes"]:
        if is_average(size["name"]) is averaged:
            plain = size["name"].removesuffix(size["view"]).strip().partition(" within")[0]
            found.setdefault(size["size"], (plain, size["name"]))
    return dict(found.values())


def by_size(run: Content, averaged: bool = False, part: str = "test") -> dict[str, float]:
    """Accuracies in percent on the test set, or another `part`, means over the last evaluations."""
    return {plain: 100 * tail_mean(run, name, part=part) for plain, name in sizes_of(run, averaged).items()}


def local_by_size(run: Content, averaged: bool = False) -> dict[str, float]:
    """The mean over the clients whose devices are of a size, each on its own test examples, at the last evaluation.

    Where the test set is divided evenly, the mean over all clients would be that on the test set.
    """
    fleet = fleet_of(run["run"]["fleet"]["tiers"])
    dealt = fleet.tiers_of(run["data"]["clients"], run["run"]["seed"]).tolist()
    of_size = [fleet.tiers[place].label for place in dealt]
    found = {}
    for plain, name in sizes_of(run, averaged).items():
        pairs = zip(run["client_scores"][name], of_size, strict=True)
        scores = [score for score, own in pairs if own == plain and score is not None]
        if scores:
            found[plain] = 100 * fmean(scores)
    return found


def last_by_size(run: Content, averaged: bool = False) -> dict[str, float]:
    """Accuracies in percent on the test set at the last evaluation."""
    last = run["evaluations"][-1]["sizes"]
    return {plain: 100 * last[name]["test"]["accuracy"] for plain, name in sizes_of(run, averaged).items()}


def mean_of(run: Content, averaged: bool = False, part: str = "test") -> float:
    """The mean over sizes."""
    return fmean(by_size(run, averaged, part).values())


def said(name: str, run: Content) -> str:
    """The accuracies of a run by size, and their mean, without and with the average: in one line."""
    both = [by_size(run, averaged) for averaged in (False, True)]
    words = [
        f"{' '.join(f'{each:.1f}' for each in scores.values())} mean {fmean(scores.values()):.2f}" for scores in both if scores
    ]
    return f"{name}: {' | average '.join(words)}"


def accuracies(title: str, by_method: Mapping[str, Sequence[Content]], scores: Scores = by_size) -> str:
    """A row for every method and seed, and their means."""
    there = {method: runs for method, runs in by_method.items() if runs}
    if not there:
        return ""
    widest = max((list(sizes_of(runs[0], False)) for runs in there.values()), key=len)
    rows = []
    for method, runs in there.items():
        for run in runs:
            named = f"{TITLES[method]}, seed {run['run']['seed']}"
            rows.append([named, f"{run['run']['local']['lr']:g}", *_cells(run, widest, scores)])
        if len(runs) > 1:
            means = [_averaged(runs, widest, averaged, scores) for averaged in (False, True)]
            rows.append([f"**{TITLES[method]}, mean**", "", *means[0], *means[1]])
    sizes = [*widest, "mean", *(f"{size} avg" for size in widest), "mean avg"]
    return table(title, ["", "rate", *sizes], rows)


def glance(by_method: Mapping[str, Sequence[Content]]) -> str:
    """A row for every method, the best first: means over seeds, and the work of what devices of every size are served."""
    there = {method: runs for method, runs in by_method.items() if runs}
    if not there:
        return ""
    widest = max((list(sizes_of(runs[0], False)) for runs in there.values()), key=len)
    rows: list[tuple[float, list[str]]] = []
    for method, runs in there.items():
        wholes = [fmean(mean_of(run, averaged) for run in runs) for averaged in (False, True)]
        least = [fmean(by_size(run, averaged)[widest[-1]] for run in runs) for averaged in (False, True)]
        scores = [f"{each:.1f}" for each in (*wholes, *least)]
        rows.append((wholes[0], [TITLES[method], str(len(runs)), *scores, _deployed(runs[0])]))
    head = [
        "",
        "seeds",
        "mean of all sizes",
        "mean, avg",
        f"at {widest[-1]}",
        f"at {widest[-1]}, avg",
        f"M multiply-adds deployed at {', '.join(widest)}",
    ]
    return plain_table(head, [row for _, row in sorted(rows, key=lambda entry: -entry[0])])


def _deployed(run: Content) -> str:
    """The work of what devices are served, from the largest size to the smallest."""
    flops = {size["name"]: size["flops"] for size in run["sizes"]}
    return ", ".join(f"{flops[name] / 2e6:.0f}" for name in sizes_of(run, False).values())


def _cells(run: Content, widest: Sequence[str], scores: Scores = by_size) -> list[str]:
    """The accuracies of a run by size, and their mean; then those of the average."""
    found = []
    for averaged in (False, True):
        known = scores(run, averaged)
        found += [f"{known[size]:.1f}" if size in known else "" for size in widest]
        found.append(f"{fmean(known.values()):.1f}" if len(known) == len(widest) else "")
    return found


def _averaged(runs: Sequence[Content], widest: Sequence[str], averaged: bool, scores: Scores) -> list[str]:
    """Means over seeds by size, and over sizes; with the least and the greatest mean of a seed."""
    columns = []
    for size in widest:
        each = [scores(run, averaged).get(size) for run in runs]
        columns.append(f"{fmean(score for score in each if score is not None):.1f}" if None not in each else "")
    means = [fmean(scores(run, averaged).values()) for run in runs if sizes_of(run, averaged)]
    return [*columns, f"**{fmean(means):.1f}** ({min(means):.1f} to {max(means):.1f})" if means else ""]


def single(title: str, runs: Mapping[str, Content], scores: Scores = by_size) -> str:
    """Runs of one seed, a row each."""
    if not runs:
        return ""
    widest = max((list(sizes_of(run, False)) for run in runs.values()), key=len)
    rows = [[name, f"{run['run']['local']['lr']:g}", *_cells(run, widest, scores)] for name, run in runs.items()]
    sizes = [*widest, "mean", *(f"{size} avg" for size in widest), "mean avg"]
    return table(title, ["", "rate", *sizes], rows)


def costs(title: str, runs: Mapping[str, Content]) -> str:
    """Bytes and work of clients by size, and of what is deployed, a row a run."""
    there = {name: run for name, run in runs.items() if run.get("clients")}
    if not there:
        return ""
    rows = []
    for name, run in there.items():
        clients = run["clients"].values()
        bytes_each = [_by_size_of(clients, key, 1e6) for key in ("bytes_down", "bytes_up")]
        sizes = {size["name"]: size for size in run["sizes"]}
        served = [sizes[each] for each in sizes_of(run, False).values()]
        deployed = [_by_size_of(served, "params", 1e6), _by_size_of(served, "flops", 2e6)]
        rows.append([name, *bytes_each, _by_size_of(clients, "training_flops", 2e6), *deployed])
    widest = max((list(run["clients"]) for run in there.values()), key=len)
    work, deployed_work = "M multiply-adds to train an example", "M multiply-adds deployed"
    head = ["", "MB down", "MB up", work, "M parameters deployed", deployed_work]
    return table(f"{title}, by size: {' / '.join(widest)}", head, rows)


def _by_size_of(entries: Iterable[Content], key: str, unit: float) -> str:
    numbers = [entry[key] / unit for entry in entries]
    return " / ".join(f"{number:,.0f}" if number >= 100 else f"{number:.3g}" for number in numbers)


# -- differences -----------------------------------------------------------------------------------------------------


def differences(method: str, finals: Mapping[str, Sequence[Content]], others: Iterable[str], of: str = "") -> str:
    """A method against others, seed by seed; `of` says in which runs."""
    rows = []
    for other in others:
        theirs = {run["run"]["seed"]: run for run in finals.get(other, ())}
        for mine in finals.get(method, ()):
            seed = mine["run"]["seed"]
            if seed in theirs:
                cells = [difference(mine, theirs[seed], *asked) for asked in ASKED.values()]
                rows.append([f"{TITLES[method]} against {TITLES[other]}, seed {seed}", *cells])
    title = f"Differences at the last evaluation{of}, in points: clients' means over sizes, 95 % by bootstrap over clients"
    return table(title, ["", *ASKED], rows) if rows else ""


ASKED = {
    "last model": (False, False),
    "average": (True, False),
    "last model, smallest size": (False, True),
    "average, smallest size": (True, True),
}
"""Whether a difference is that of the average, and of the smallest size alone."""


def difference(mine: Content, theirs: Content, averaged: bool, smallest: bool) -> str:
    """The mean difference over clients, and the middle 95 % of it when clients are drawn again."""
    pairs = zip(_by_client(mine, averaged, smallest), _by_client(theirs, averaged, smallest), strict=True)
    gap = 100 * np.array([ours - other for ours, other in pairs if ours is not None and other is not None])
    mean, low, high = interval(gap)
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def interval(gap: NDArray[np.float64]) -> tuple[float, float, float]:
    """The mean of paired differences, and the middle 95 % of it when they are drawn again."""
    draws = np.random.default_rng(0).integers(0, len(gap), (RESAMPLES, len(gap)))
    low, high = np.percentile(gap[draws].mean(1), [2.5, 97.5])
    return float(gap.mean()), float(low), float(high)


def _by_client(run: Content, averaged: bool, smallest: bool) -> list[float | None]:
    """Every client's own test accuracy, mean over sizes, or at the smallest; None for a client without tests."""
    names = list(sizes_of(run, averaged).values())
    columns = [run["client_scores"][name] for name in (names[-1:] if smallest else names)]
    return [None if None in scores else fmean(scores) for scores in zip(*columns, strict=True)]


def times(title: str, runs: Mapping[str, Content]) -> str:
    """Virtual hours to accuracies, a row a run: of the last model, and of the average."""
    if not runs:
        return ""
    paths = {name: [_path(run, averaged) for averaged in (False, True)] for name, run in runs.items()}
    best = max(score for both in paths.values() for path in both for _, score in path)
    levels = [level for level in range(5, 100, 5) if level / 100 <= best][-LEVELS:]
    rows = [
        [name, *(" / ".join(_hours(path, level / 100) for path in both if path) for level in levels)]
        for name, both in paths.items()
    ]
    return table(f"{title}: last model / average", ["", *(f"{level} %" for level in levels)], rows)


def _path(run: Content, averaged: bool) -> list[tuple[float, float]]:
    """The virtual hours that had passed at every evaluation, and the mean accuracy over sizes there."""
    hours = np.cumsum([entry["seconds"] for entry in run["rounds"]]) / 3600
    names = sizes_of(run, averaged).values()
    return [(float(hours[entry["round"] - 1]), _at(entry, names)) for entry in run["evaluations"]] if names else []


def _hours(path: Sequence[tuple[float, float]], level: float) -> str:
    return next((f"{hours:.1f}" for hours, score in path if score >= level), "-")


# -- plots -----------------------------------------------------------------------------------------------------------


def by_round(runs: Mapping[str, Content]) -> Any:
    """Accuracy by round, mean over sizes, of the last model and of the average."""
    with figure_of(4.2, 9.6) as figure:
        for axes, averaged in zip(figure.subplots(1, 2, sharey=True), (False, True), strict=True):
            for place, (method, run) in enumerate(runs.items()):
                look = look_of(place, place // len(COLOURS))
                points = [(entry["round"], 100 * _at(entry, sizes_of(run, averaged).values())) for entry in run["evaluations"]]
                axes.plot(*zip(*points, strict=True), color=look.colour, linestyle=look.line, label=TITLES[method])
            axes.set_title("average of the server's models" if averaged else "last model")
            axes.set_xlabel("round")
        figure.axes[0].set_ylabel("test accuracy, mean over sizes (%)")
        figure.legend(handles=figure.axes[0].get_lines(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _at(entry: Mapping[str, Any], sizes: Iterable[str]) -> float:
    return fmean(entry["sizes"][size]["test"]["accuracy"] for size in sizes)


def by_work(runs: Mapping[str, Content]) -> Any:
    """Accuracy of every size against the work of the submodel that is deployed."""
    with figure_of(4.2) as figure:
        axes = figure.subplots()
        for place, (method, run) in enumerate(runs.items()):
            look = look_of(place, place // len(COLOURS))
            names = set(sizes_of(run, False).values())
            sizes = [size for size in run["sizes"] if size["name"] in names]
            points = [(size["flops"] / 2e6, 100 * tail_mean(run, size["name"])) for size in sizes]
            axes.plot(
                *zip(*points, strict=True), color=look.colour, marker=look.marker, linestyle=look.line, label=TITLES[method]
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("multiply-adds of the deployed submodel, one image (millions)")
        axes.set_ylabel("test accuracy, last model (%)")
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
