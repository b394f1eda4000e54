"""A run in four pictures. A size has the same colour and marker in each; a second view of it has another line style."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import ceil, isfinite, log10
from typing import TYPE_CHECKING

from raffm.report.drawing import (
    MUTED,
    Look,
    edges_of,
    figure_of,
    histogram,
    known,
    look_of,
    panels_of,
    remark,
    time_unit,
    titled,
    whole_numbers,
)
from raffm.report.tables import count, name_of
from raffm.rounds.results import Evaluation, Results, Size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def looks(results: Results) -> dict[str, Look]:
    """How each size is drawn: colour and marker by its nominal size, line style by its view."""
    nominal = sorted({size.size for size in results.sizes}, reverse=True)
    views = list(dict.fromkeys(size.view for size in results.sizes))
    return {size.name: look_of(nominal.index(size.size), views.index(size.view)) for size in results.sizes}


def by_round(results: Results) -> Figure:
    """The main metric of each size by round, above the training loss."""
    with figure_of(5.6) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        _curves(above, results, [entry.round for entry in results.evaluations])
        titled(above, f"Test {name_of(results.metric)} by round")
        rounds = [entry.round for entry in results.rounds]
        losses = [float("nan") if entry.loss is None else entry.loss for entry in results.rounds]
        below.plot(rounds, losses, color=MUTED, marker="." if len(rounds) == 1 else "")
        titled(below, "Training loss, mean of clients", x="round")
        whole_numbers(below)
        if not rounds:
            remark(below, "no rounds yet")
    return figure


def by_time(results: Results) -> Figure:
    """The main metric of each size by the virtual time that had passed: time to accuracy."""
    seconds = dict(
        zip((entry.round for entry in results.rounds), accumulate(entry.seconds for entry in results.rounds), strict=True)
    )
    times = [_passed(seconds, entry) for entry in results.evaluations]
    unit, length = time_unit(max(times, default=0.0))
    with figure_of(3.8) as figure:
        axes = figure.subplots()
        _curves(axes, results, [time / length for time in times])
        titled(axes, f"Test {name_of(results.metric)} by virtual time", x=f"virtual time ({unit})")
        if times and not max(times):
            remark(axes, "this run kept no virtual time")
        axes.set_xlim(left=0)
    return figure


def by_parameters(results: Results) -> Figure:
    """The main metric of each size, in the last round, against its number of parameters."""
    points = _points(results)
    with figure_of(3.8) as figure:
        axes = figure.subplots()
        axes.set_xscale("log" if points else "linear")
        for size, value in points:
            look = looks(results)[size.name]
            fill = look.colour if look.line == "-" else "none"
            axes.plot(
                size.params, value, look.marker, color=look.colour, markerfacecolor=fill, markersize=8, markeredgewidth=1.8
            )
        axes.margins(x=0.16, y=0.22)
        titled(axes, f"Test {name_of(results.metric)} by size", x="parameters (log scale)")
        if points:
            _label(axes, points)
            _log_ticks(axes, [size.params for size, _ in points])
        else:
            remark(axes, "no evaluations yet")
    return figure


def by_client(results: Results) -> Figure:
    """How the clients' main metric is spread at the last evaluation, one small histogram a size."""
    scores = {size.name: known(results.client_scores.get(size.name, ())) for size in results.sizes}
    metric, edges = name_of(results.metric), edges_of(scores.values())
    nothing = "no client\nwith test data" if results.evaluations else "no evaluations yet"
    with figure_of(0.9 + 2.1 * max(1, ceil(len(scores) / 3))) as figure:
        for axes, (name, values) in zip(panels_of(figure, len(scores)), scores.items(), strict=True):
            if values:
                histogram(axes, values, edges, looks(results)[name])
            else:
                remark(axes, nothing)
            axes.set_title(name, weight="normal")
            axes.locator_params(axis="x", nbins=3)
            whole_numbers(axes, "y")
        figure.suptitle(f"Clients' {metric} by size", x=0.01, ha="left", fontsize=10.5, weight="bold")
        figure.supxlabel(f"{metric} of a client (line: mean)", fontsize=10)
        figure.supylabel("clients", fontsize=10)
    return figure


FIGURES: Mapping[str, Callable[[Results], Figure]] = {
    "by_round": by_round,
    "by_parameters": by_parameters,
    "by_client": by_client,
    "by_time": by_time,
}
"""All pictures, by the names of their files."""


def _curves(axes: Axes, results: Results, places: Sequence[float]) -> None:
    every = max(1, len(places) // 20)  # markers that touch hide the line
    for name, look in looks(results).items():
        values = [_score(entry, name, results.metric) for entry in results.evaluations]
        axes.plot(places, values, color=look.colour, marker=look.marker, linestyle=look.line, markevery=every, label=name)
    if not places:
        remark(axes, "no evaluations yet")
    elif len(results.sizes) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), title="size", alignment="left", handlelength=2.6)


def _points(results: Results) -> list[tuple[Size, float]]:
    last = results.last_round
    points = [(size, _score(last, size.name, results.metric)) for size in results.sizes] if last else []
    return [(size, value) for size, value in points if isfinite(value)]


def _score(evaluation: Evaluation, size: str, metric: str) -> float:
    return evaluation.sizes[size].test.get(metric, float("nan")) if size in evaluation.sizes else float("nan")


def _passed(seconds: Mapping[int, float], evaluation: Evaluation) -> float:
    return max((time for number, time in seconds.items() if number <= evaluation.round), default=0.0)


def _label(axes: Axes, points: Sequence[tuple[Size, float]]) -> None:
    """Write names above points; of those that stand close together, the lowest has its name below."""
    near = _NEAR * log10(max(size.params for size, _ in points) / min(size.params for size, _ in points))
    for size, value in points:
        close = [entry for entry in points if abs(log10(entry[0].params / size.params)) <= near]
        rank = [entry[0] for entry in sorted(close, key=lambda entry: -entry[1])].index(size)
        offset, across, along = _ABOVE if rank == 0 else _BELOW if rank == len(close) - 1 else _BESIDE
        axes.annotate(size.name, (size.params, value), offset, textcoords="offset points", ha=across, va=along)


_NEAR = 0.13  # of the width of the plot: closer names would touch
_ABOVE, _BELOW, _BESIDE = ((0, 9), "center", "bottom"), ((0, -9), "center", "top"), ((9, 0), "left", "center")


def _log_ticks(axes: Axes, params: Sequence[int]) -> None:
    """Ticks at the sizes themselves, as many as do not touch."""
    chosen: list[int] = []
    for place in sorted(set(params)):
        if not chosen or log10(place / chosen[-1]) > _NEAR * log10(max(params) / min(params)):
            chosen.append(place)
    if len(chosen) == 1:
        axes.set_xlim(chosen[0] / 2, chosen[0] * 2)
    axes.set_xticks(chosen, [count(place) for place in chosen])
    axes.minorticks_off()


def by_cost(evaluation: Evaluation, sizes: Mapping[str, Size], seconds: Mapping[str, float]) -> Figure:
    """The main metric of every size by parameters, FLOPs and, where it was measured, the time of one example."""
    costs: dict[str, Mapping[str, float]] = {
        "parameters": {name: size.params for name, size in sizes.items()},
        "FLOPs of one example": {name: size.flops for name, size in sizes.items()},
    }
    if seconds:
        costs["milliseconds of one example, here"] = {name: 1000 * taken for name, taken in seconds.items()}
    views = list(dict.fromkeys(size.view for size in sizes.values()))
    with figure_of(3.4, 3.4 * len(costs)) as figure:
        panels = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
        for axes, (title, values) in zip(panels, costs.items(), strict=True):
            for place, view in enumerate(views):
                names = [name for name in values if sizes[name].view == view]
                scores = [evaluation.sizes[name].test[evaluation.metric] for name in names]
                look = look_of(place)
                label = view or "as the method serves it"
                axes.plot([values[name] for name in names], scores, color=look.colour, marker=look.marker, label=label)
            axes.set_xlim(left=0)
            axes.locator_params(axis="x", nbins=4)
            axes.xaxis.set_major_formatter(lambda value, _: count(value))
            titled(axes, "", x=title)
        panels[0].set_ylabel(f"test {name_of(evaluation.metric)}")
        if len(views) > 1:
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(views))
    return figure
