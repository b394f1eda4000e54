"""Several methods in five pictures. A method has the same colour and marker in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from raffm.devices.fleet import size_name
from raffm.report.comparison import first_views, mean_path
from raffm.report.drawing import (
    COLOURS,
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
)
from raffm.report.tables import name_of
from raffm.rounds.results import Results, Round, Scores

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs = Mapping[str, Sequence[Results]]
"""The runs of every method, one a seed."""


def looks(runs: Runs) -> dict[str, Look]:
    """How each method is drawn; those beyond the colours begin anew with another line."""
    return {method: look_of(place, place // len(COLOURS)) for place, method in enumerate(runs)}


def sizes_of(runs: Runs) -> list[float]:
    """The nominal sizes that some method serves, largest first."""
    return sorted({size for several in runs.values() for size in first_views(several[0])}, reverse=True)


def by_size(runs: Runs) -> Figure:
    """The test metric of every method by size, mean over seeds; a bar reaches one standard deviation to each side."""
    return _by_size(runs, lambda scores: scores.test, "Test {metric} by size and method")


def worst_decile(runs: Runs) -> Figure:
    """The same for the tenth of the clients that fares worst."""
    return _by_size(runs, lambda scores: scores.clients_worst_decile, "Clients' {metric}: the worst tenth, by size and method")


def _by_size(runs: Runs, part: Callable[[Scores], Mapping[str, float]], title: str) -> Figure:
    metric = _metric(runs)
    with figure_of(4.2) as figure:
        axes = figure.subplots()
        axes.set_xscale("log")
        for place, (method, several) in enumerate(runs.items()):
            look, names = looks(runs)[method], first_views(several[0])
            found = {size: _values(several, name, part, metric) for size, name in names.items()}
            found = {size: values for size, values in found.items() if values}
            spread = [stdev(values) if len(values) > 1 else 0.0 for values in found.values()]
            places = [size * 1.03 ** (place - (len(runs) - 1) / 2) for size in found]  # beside each other
            means = [fmean(values) for values in found.values()]
            axes.errorbar(places, means, yerr=spread, capsize=2, elinewidth=0.9, label=method, **_drawn(look))
        nominal = sizes_of(runs)
        axes.set_xticks(nominal, [size_name(size) for size in nominal], minor=False)
        axes.set_xticks([], minor=True)
        titled(axes, title.format(metric=name_of(metric)), x="size (part of the full model, log scale)")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _values(several: Sequence[Results], name: str, part: Callable[[Scores], Mapping[str, float]], metric: str) -> list[float]:
    return known([part(run.evaluations[-1].sizes[name]).get(metric) for run in several])


def by_client(runs: Runs) -> Figure:
    """How the clients' metric is spread after the last round, a row of histograms for every method, all seeds together."""
    sizes, metric = sizes_of(runs), name_of(_metric(runs))
    scores = {(method, size): _of_clients(several, size) for method, several in runs.items() for size in sizes}
    edges = edges_of(scores.values())
    names = max(1.4, 0.6 + 0.075 * max(map(len, runs)))
    with figure_of(0.8 + 0.75 * len(runs), names + 1.25 * len(sizes)) as figure:
        grid = figure.subplots(len(runs), len(sizes), sharex=True, sharey=True, squeeze=False)
        for row, method in zip(grid, runs, strict=True):
            for axes, size in zip(row, sizes, strict=True):
                if scores[method, size]:
                    histogram(axes, scores[method, size], edges, looks(runs)[method])
                else:
                    remark(axes, "not served")
                axes.locator_params(axis="x", nbins=3)
                axes.tick_params(labelleft=False, left=False)
            row[0].set_ylabel(method, rotation=0, ha="right", va="center")
        for axes, size in zip(grid[0], sizes, strict=True):
            axes.set_title(size_name(size), weight="normal", loc="center")
        figure.supxlabel(f"{metric} of a client (line: mean)\nhigher bars: more clients", fontsize=10)
    return figure


def _of_clients(several: Sequence[Results], size: float) -> list[float]:
    names = [first_views(run).get(size) for run in several]
    return [
        value
        for run, name in zip(several, names, strict=True)
        if name is not None
        for value in known(run.client_scores.get(name, ()))
    ]


def by_bytes(runs: Runs) -> Figure:
    """The test metric by what had been sent to and from all clients, a panel for every size."""
    return _by_cost(runs, lambda entry: (entry.bytes_up + entry.bytes_down) / 1e6, "MB sent to and from clients")


def by_time(runs: Runs) -> Figure:
    """The test metric by the virtual time that had passed, a panel for every size."""
    longest = max((sum(entry.seconds for entry in run.rounds) for several in runs.values() for run in several), default=0.0)
    unit, length = time_unit(longest)
    return _by_cost(runs, lambda entry: entry.seconds / length, f"virtual time ({unit})")


def _by_cost(runs: Runs, cost: Callable[[Round], float], title: str) -> Figure:
    metric, sizes = _metric(runs), sizes_of(runs)
    with figure_of(0.7 + 0.22 * ceil(len(runs) / 3) + 2.3 * ceil(len(sizes) / 3)) as figure:
        for axes, size in zip(panels_of(figure, len(sizes)), sizes, strict=True):
            for method, several in runs.items():
                if size in first_views(several[0]):
                    _curve(axes, several, size, cost, method, looks(runs)[method])
            axes.set_title(size_name(size), weight="normal")
            axes.locator_params(axis="x", nbins=4)
        handles = {method: _handle(method, look) for method, look in looks(runs).items()}
        figure.legend(handles=list(handles.values()), loc="outside upper center", ncols=3)
        figure.supxlabel(title, fontsize=10)
        figure.supylabel(f"test {name_of(metric)}", fontsize=10)
    return figure


def _curve(
    axes: Axes, several: Sequence[Results], size: float, cost: Callable[[Round], float], method: str, look: Look
) -> None:
    """The mean over seeds of what was reached and of what it had cost."""
    costs, values = zip(*mean_path(several, size, cost), strict=True)
    every = max(1, len(values) // 6)
    axes.plot(costs, values, label=method, markevery=every, **{**_drawn(look), "markersize": 3.5, "linewidth": 1.4})


def _handle(method: str, look: Look) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=method, **_drawn(look))


def _drawn(look: Look) -> dict[str, Any]:
    return {"color": look.colour, "marker": look.marker, "linestyle": look.line}


def _metric(runs: Runs) -> str:
    return next(iter(runs.values()))[0].metric


FIGURES: Mapping[str, Callable[[Runs], Figure]] = {
    "by_size": by_size,
    "worst_decile": worst_decile,
    "by_client": by_client,
    "by_bytes": by_bytes,
    "by_time": by_time,
}
"""All pictures, by the names of their files."""
