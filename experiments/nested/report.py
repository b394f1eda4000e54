"""Tables and plots of the experiment, from what lies in `results`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from experiments.nested.catalogue import ABLATION, METHODS, RATES
from experiments.running import Content, is_average, tail_mean
from raffm.models.files import read_json
from raffm.report.drawing import COLOURS, figure_of, look_of, save

Found = Mapping[str, Content]
"""The results of runs, by name."""

MARKS = "<!-- results -->\n", "<!-- end of results -->\n"

TITLES = {
    "nested": "nested",
    "fiarse": "FIARSE",
    "smallest-balanced": "smallest for all, balanced",
    "heterofl": "HeteroFL (no scaler, no label mask)",
    "smallest-uniform": "smallest for all, uniform",
    "fedavg": "FedAvg, full model",
    "fedavg-capable": "FedAvg among the capable",
    "raffm": "RaFFM",
}

WITHOUT = {
    "uniform": "uniform shapes",
    "alone": "no nested steps",
    "shared-norms": "shared norms",
    "labels": "no teacher (a = 0)",
    "teacher": "the teacher alone (a = 1)",
    "one": "one drawn shape a step",
    "spp": "indices ranked by SPP",
}

LEVELS = (0.4, 0.5, 0.6, 0.7, 0.75, 0.8)
"""Accuracies, means over sizes, that a run takes some time to reach."""


def write(results: Path, out: Path, note: str = "") -> None:
    """Write `table.md`, the plots, and the results' part of the README, where there is one."""
    found = {path.stem: read_json(path) for path in sorted(results.glob("*.json"))}
    text = "\n\n".join(part for part in (note, *_parts(found)) if part) + "\n"
    (out / "table.md").write_text(text, encoding="utf-8")
    for name, figure in _figures(found).items():
        save(figure, out / f"{name}.png")
    readme = out / "README.md"
    if readme.is_file():
        whole = readme.read_text(encoding="utf-8")
        inside = re.compile(f"{re.escape(MARKS[0])}.*{re.escape(MARKS[1])}", re.DOTALL)
        readme.write_text(inside.sub(lambda _: f"{MARKS[0]}\n{text}\n{MARKS[1]}", whole), encoding="utf-8")
    print(text)


def _parts(found: Found) -> list[str]:
    finals = {method: _seeds(found, method) for method in METHODS}
    beside = {method: _seeds(found, f"{method}-at0.1") for method in METHODS}
    return [
        _rates(found),
        _accuracies("CIFAR-10", finals),
        _accuracies("The same at the rate 0.1, where another was found", beside),
        _costs(found),
        _differences(finals),
        _times(finals),
        _single("Nested without one of its ideas, or with another in its place (seed 0)", _ablation(found)),
        _single("Equal work, and work that binds (seed 0)", _compute(found)),
        *(_single(title, _beyond(found, prefix)) for prefix, title in BEYOND.items()),
    ]


BEYOND = {
    "cifar100": "CIFAR-100, ResNet-18, 50 rounds (seed 0)",
    "vit": "CIFAR-10, a ViT pretrained on CIFAR-100, 50 rounds (seed 0)",
    "texts": "AG News subset, MiniLM, 50 rounds (seed 0)",
}


def _seeds(found: Found, name: str) -> list[Content]:
    return [found[f"{name}-seed{seed}"] for seed in (0, 1, 2) if f"{name}-seed{seed}" in found]


def _ablation(found: Found) -> dict[str, Content]:
    runs = {"nested": found.get("nested-seed0"), **{WITHOUT[name]: found.get(f"ablation-{name}") for name in ABLATION}}
    return {title: run for title, run in runs.items() if run is not None} if "ablation-uniform" in found else {}


def _compute(found: Found) -> dict[str, Content]:
    runs = {
        "nested on uniform shapes, 100 steps": found.get("ablation-uniform"),
        "HeteroFL, 132 steps": found.get("heterofl-longer"),
        "nested, at most the FLOPs of uniform shapes": found.get("nested-bound"),
    }
    return {title: run for title, run in runs.items() if run is not None} if "heterofl-longer" in found else {}


def _beyond(found: Found, prefix: str) -> dict[str, Content]:
    runs = {title: found.get(f"{prefix}-{name}") for name, title in TITLES.items()}
    return {title: run for title, run in runs.items() if run is not None}


# -- tables ----------------------------------------------------------------------------------------------------------


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return f"### {title}\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _rates(found: Found) -> str:
    rows = []
    for method in METHODS:
        runs = {rate: found.get(f"rate-{method}-{rate}") for rate in RATES}
        if all(runs.values()):
            scores = {rate: _mean(run, part="validation") for rate, run in runs.items() if run is not None}
            best = max(scores, key=lambda rate: scores[rate])
            rows.append(
                [TITLES[method], *(f"**{each:.1f}**" if rate == best else f"{each:.1f}" for rate, each in scores.items())]
            )
    title = "Rates: mean over sizes on held-out examples after 50 rounds, last model"
    return _table(title, ["rate", *map(str, RATES)], rows) if rows else ""


def _sizes(run: Content, averaged: bool) -> list[str]:
    return [size["name"] for size in run["sizes"] if is_average(size["name"]) is averaged]


def _scores(run: Content, averaged: bool, part: str = "test") -> list[float]:
    return [100 * tail_mean(run, size, part=part) for size in _sizes(run, averaged)]


def _mean(run: Content, averaged: bool = False, part: str = "test") -> float:
    return fmean(_scores(run, averaged, part))


def _accuracies(title: str, by_method: Mapping[str, Sequence[Content]]) -> str:
    known = {method: runs for method, runs in by_method.items() if runs}
    if not known:
        return ""
    widest = max((_sizes(runs[0], False) for runs in known.values()), key=len)
    rows = []
    for method, runs in known.items():
        for run in runs:
            rows.append(
                [f"{TITLES[method]}, seed {run['run']['seed']}", f"{run['run']['local']['lr']:g}", *_cells(run, widest)]
            )
        if len(runs) > 1:
            means = [_averaged(runs, widest, averaged) for averaged in (False, True)]
            rows.append([f"**{TITLES[method]}, mean**", "", *means[0], *means[1]])
    sizes = [*widest, "mean", *(f"{size} avg" for size in widest), "mean avg"]
    return _table(f"{title}: test accuracy in percent, mean of the last evaluations", ["", "rate", *sizes], rows)


def _cells(run: Content, widest: Sequence[str]) -> list[str]:
    """The accuracies of a run by size, and their mean; then those of the average."""
    found = []
    for averaged in (False, True):
        by_size = _by_size(run, averaged)
        found += [f"{by_size[size]:.1f}" if size in by_size else "" for size in widest]
        found.append(f"{fmean(by_size.values()):.1f}" if by_size else "")
    return found


def _by_size(run: Content, averaged: bool) -> dict[str, float]:
    return dict(zip(_plain_names(run, averaged), _scores(run, averaged), strict=True))


def _plain_names(run: Content, averaged: bool) -> list[str]:
    return [size.removesuffix(" average").partition(" within")[0] for size in _sizes(run, averaged)]


def _averaged(runs: Sequence[Content], widest: Sequence[str], averaged: bool) -> list[str]:
    """Means over seeds by size, and over sizes; with the least and the greatest mean of a seed."""
    columns = []
    for size in widest:
        each = [_by_size(run, averaged).get(size) for run in runs]
        columns.append(f"{fmean(score for score in each if score is not None):.1f}" if None not in each else "")
    means = [_mean(run, averaged) for run in runs if _sizes(run, averaged)]
    return [*columns, f"**{fmean(means):.1f}** ({min(means):.1f} to {max(means):.1f})" if means else ""]


def _single(title: str, runs: Mapping[str, Content]) -> str:
    """Runs of one seed, a row each, with what their clients take."""
    if not runs:
        return ""
    widest = max((_plain_names(run, False) for run in runs.values()), key=len)
    rows = [[name, f"{run['run']['local']['lr']:g}", *_cells(run, widest), _taken(run)] for name, run in runs.items()]
    sizes = [*widest, "mean", *(f"{size} avg" for size in widest), "mean avg"]
    return _table(title, ["", "rate", *sizes, "MB down, GFLOP an example, by size"], rows)


def _taken(run: Content) -> str:
    each = run.get("clients", {}).values()
    return ", ".join(f"{cost['bytes_down'] / 1e6:.1f} / {cost['training_flops'] / 1e9:.2f}" for cost in each)


def _costs(found: Found) -> str:
    rows = []
    for method in METHODS:
        run = found.get(f"{method}-seed0")
        for size, cost in (run or {}).get("clients", {}).items():
            served = next((each for each in run["sizes"] if each["name"] == size), None) if run else None
            deployed = [f"{served['params']:,}", f"{served['flops'] / 2e6:,.1f}"] if served else ["", ""]
            down, up = (f"{cost[key] / 1e6:.2f}" for key in ("bytes_down", "bytes_up"))
            rows.append([TITLES[method], size, down, up, f"{cost['training_flops'] / 2e6:,.0f}", *deployed])
    head = [
        "",
        "size",
        "MB down",
        "MB up",
        "M multiply-adds to train an example",
        "parameters deployed",
        "M multiply-adds deployed",
    ]
    return _table("What a client of every size takes in a round", head, rows) if rows else ""


# -- differences -----------------------------------------------------------------------------------------------------


def _differences(finals: Mapping[str, Sequence[Content]]) -> str:
    rows = []
    for other in ("fiarse", "smallest-balanced", "heterofl"):
        for mine, theirs in zip(finals["nested"], finals[other], strict=False):
            seed = mine["run"]["seed"]
            if theirs["run"]["seed"] == seed:
                cells = [_difference(mine, theirs, averaged) for averaged in (False, True)]
                rows.append([f"nested against {TITLES[other]}, seed {seed}", *cells])
    title = "Differences at the last evaluation, in points: clients' means over sizes, 95 % by bootstrap over clients"
    return _table(title, ["", "last model", "average"], rows) if rows else ""


def _difference(mine: Content, theirs: Content, averaged: bool) -> str:
    gaps = np.array([_by_client(mine, averaged), _by_client(theirs, averaged)])
    gap = 100 * (gaps[0] - gaps[1])
    draws = np.random.default_rng(0).integers(0, len(gap), (10_000, len(gap)))
    low, high = np.percentile(gap[draws].mean(1), [2.5, 97.5])
    return f"{gap.mean():+.1f} ({low:+.1f} to {high:+.1f})"


def _by_client(run: Content, averaged: bool) -> list[float]:
    """Every client's own test accuracy, mean over sizes."""
    columns = [run["client_scores"][size] for size in _sizes(run, averaged)]
    return [fmean(scores) for scores in zip(*columns, strict=True)]


def _times(finals: Mapping[str, Sequence[Content]]) -> str:
    rows = []
    for method, runs in finals.items():
        for run in runs[:1]:
            rows.append([TITLES[method], *(_hours(run, level) for level in LEVELS)])
    title = "Virtual hours until the mean over sizes, last model, is so accurate (seed 0; every device 10 GFLOP/s, 1 MB/s)"
    return _table(title, ["", *(f"{100 * level:g} %" for level in LEVELS)], rows) if rows else ""


def _hours(run: Content, level: float) -> str:
    seconds = np.cumsum([entry["seconds"] for entry in run["rounds"]])
    for entry in run["evaluations"]:
        if fmean(entry["sizes"][size]["test"]["accuracy"] for size in _sizes(run, False)) >= level:
            return f"{seconds[entry['round'] - 1] / 3600:.1f}"
    return "-"


# -- plots -----------------------------------------------------------------------------------------------------------


def _figures(found: Found) -> dict[str, Any]:
    runs = {method: found[f"{method}-seed0"] for method in METHODS if f"{method}-seed0" in found}
    return {"by_round": _by_round(runs), "by_work": _by_work(runs)} if runs else {}


def _by_round(runs: Mapping[str, Content]) -> Any:
    """Accuracy by round, mean over sizes, of the last model and of the average."""
    with figure_of(4.2, 9.6) as figure:
        for axes, averaged in zip(figure.subplots(1, 2, sharey=True), (False, True), strict=True):
            for place, (method, run) in enumerate(runs.items()):
                look = look_of(place, place // len(COLOURS))
                points = [(entry["round"], 100 * _at(entry, _sizes(run, averaged))) for entry in run["evaluations"]]
                axes.plot(*zip(*points, strict=True), color=look.colour, linestyle=look.line, label=TITLES[method])
            axes.set_title("average of the server's models" if averaged else "last model")
            axes.set_xlabel("round")
        figure.axes[0].set_ylabel("test accuracy, mean over sizes (%)")
        figure.axes[1].legend(fontsize=8)
    return figure


def _at(entry: Mapping[str, Any], sizes: Sequence[str]) -> float:
    return fmean(entry["sizes"][size]["test"]["accuracy"] for size in sizes)


def _by_work(runs: Mapping[str, Content]) -> Any:
    """Accuracy of every size against the work of the submodel that is deployed."""
    with figure_of(4.2) as figure:
        axes = figure.subplots()
        for place, (method, run) in enumerate(runs.items()):
            look = look_of(place, place // len(COLOURS))
            sizes = [size for size in run["sizes"] if not is_average(size["name"])]
            points = [(size["flops"] / 2e6, 100 * tail_mean(run, size["name"])) for size in sizes]
            axes.plot(
                *zip(*points, strict=True), color=look.colour, marker=look.marker, linestyle=look.line, label=TITLES[method]
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("multiply-adds of the deployed submodel, one image (millions)")
        axes.set_ylabel("test accuracy, last model (%)")
        axes.legend(fontsize=8)
    return figure
