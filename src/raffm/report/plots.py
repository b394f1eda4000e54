"""A run in four pictures. A size has the same colour and marker in each; a second view of it has another line style."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from itertools import accumulate
from math import ceil, isfinite, log10
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from raffm.devices.fleet import size_name
from raffm.report.tables import count, name_of
from raffm.rounds.results import Evaluation, Results, Size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
INK, GRID, MUTED = "#1b2330", "#dfe3ea", "#667085"
"""Colours of text, grid and remarks: unlike all others, so that the HTML report can swap them in dark mode."""

# Okabe and Ito (2008): told apart by people with any common colour blindness. The darkest on white come first.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", (0, (4, 1.6)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))

SETTINGS: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",  # text stays text: it can be searched and takes the page's font
    "svg.hashsalt": "raffm",  # the same run gives the same file
    "text.parse_math": False,  # names are shown as they are, dollar signs too
}


@dataclass(frozen=True)
class Look:
    """How a size is drawn."""

    colour: str
    marker: str
    line: str | tuple[int, tuple[float, ...]]


def is_available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def looks(results: Results) -> dict[str, Look]:
    """How each size is drawn: colour and marker by its nominal size, line style by its view."""
    nominal = sorted({size.size for size in results.sizes}, reverse=True)
    views = list(dict.fromkeys(size.view for size in results.sizes))
    return {size.name: _look(nominal.index(size.size), views.index(size.view)) for size in results.sizes}


def _look(size: int, view: int) -> Look:
    return Look(COLOURS[size % len(COLOURS)], MARKERS[size % len(MARKERS)], LINES[view % len(LINES)])


def by_round(results: Results) -> Figure:
    """The main metric of each size by round, above the training loss."""
    with _figure(5.6) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        _curves(above, results, [entry.round for entry in results.evaluations])
        _titled(above, f"Test {name_of(results.metric)} by round")
        rounds = [entry.round for entry in results.rounds]
        losses = [float("nan") if entry.loss is None else entry.loss for entry in results.rounds]
        below.plot(rounds, losses, color=MUTED, marker="." if len(rounds) == 1 else "")
        _titled(below, "Training loss, mean of clients", x="round")
        _whole_numbers(below)
        if not rounds:
            _remark(below, "no rounds yet")
    return figure


def by_time(results: Results) -> Figure:
    """The main metric of each size by the virtual time that had passed: time to accuracy."""
    seconds = dict(
        zip((entry.round for entry in results.rounds), accumulate(entry.seconds for entry in results.rounds), strict=True)
    )
    times = [_passed(seconds, entry) for entry in results.evaluations]
    unit, length = _time_unit(max(times, default=0.0))
    with _figure(3.8) as figure:
        axes = figure.subplots()
        _curves(axes, results, [time / length for time in times])
        _titled(axes, f"Test {name_of(results.metric)} by virtual time", x=f"virtual time ({unit})")
        if times and not max(times):
            _remark(axes, "this run kept no virtual time")
        axes.set_xlim(left=0)
    return figure


def by_parameters(results: Results) -> Figure:
    """The main metric of each size, in the last round, against its number of parameters."""
    points = _points(results)
    with _figure(3.8) as figure:
        axes = figure.subplots()
        axes.set_xscale("log" if points else "linear")
        for size, value in points:
            look = looks(results)[size.name]
            fill = look.colour if look.line == "-" else "none"
            axes.plot(
                size.params, value, look.marker, color=look.colour, markerfacecolor=fill, markersize=8, markeredgewidth=1.8
            )
        axes.margins(x=0.16, y=0.22)
        _titled(axes, f"Test {name_of(results.metric)} by size", x="parameters (log scale)")
        if points:
            _label(axes, points)
            _log_ticks(axes, [size.params for size, _ in points])
        else:
            _remark(axes, "no evaluations yet")
    return figure


def by_client(results: Results) -> Figure:
    """How the clients' main metric is spread at the last evaluation, one small histogram a size."""
    scores = {size.name: _known(results.client_scores.get(size.name, ())) for size in results.sizes}
    metric, edges = name_of(results.metric), _edges(scores.values())
    nothing = "no client\nwith test data" if results.evaluations else "no evaluations yet"
    with _figure(0.9 + 2.1 * max(1, ceil(len(scores) / 3))) as figure:
        for axes, (name, values) in zip(_panels(figure, len(scores)), scores.items(), strict=True):
            if values:
                _histogram(axes, values, edges, looks(results)[name])
            else:
                _remark(axes, nothing)
            axes.set_title(name, weight="normal")
            axes.locator_params(axis="x", nbins=3)
            _whole_numbers(axes, "y")
        figure.suptitle(f"Clients' {metric} by size", x=0.01, ha="left", fontsize=10.5, weight="bold")
        figure.supxlabel(f"{metric} of a client (line: mean)", fontsize=10)
        figure.supylabel("clients", fontsize=10)
    return figure


def by_method(runs: Mapping[str, Sequence[Results]]) -> Figure:
    """The main metric of several methods by size, mean over their runs; a bar reaches one standard deviation to each side."""
    metric = next(iter(runs.values()))[0].metric
    with _figure(4.2) as figure:
        axes = figure.subplots()
        axes.set_xscale("log")
        nominal = sorted({size.size for several in runs.values() for size in several[0].sizes})
        for place, (method, several) in enumerate(runs.items()):
            look = _look(place, place // len(COLOURS))
            sizes = {size.size: size.name for size in reversed(several[0].sizes)}  # of several views the first
            found = [[run.evaluations[-1].sizes[name].test[metric] for run in several] for name in sizes.values()]
            spread = [stdev(values) if len(values) > 1 else 0.0 for values in found]
            style: dict[str, Any] = {"color": look.colour, "marker": look.marker, "linestyle": look.line, "label": method}
            places = [size * 1.03 ** (place - (len(runs) - 1) / 2) for size in sizes]  # beside each other
            axes.errorbar(places, [fmean(values) for values in found], yerr=spread, capsize=2, elinewidth=0.9, **style)
        axes.set_xticks(nominal, [size_name(size) for size in nominal], minor=False)
        axes.set_xticks([], minor=True)
        _titled(axes, f"Test {name_of(metric)} by size and method", x="size (part of the full model, log scale)")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


FIGURES: Mapping[str, Callable[[Results], Figure]] = {
    "by_round": by_round,
    "by_parameters": by_parameters,
    "by_client": by_client,
    "by_time": by_time,
}
"""All pictures, by the names of their files."""


def save(figure: Figure, path: str | Path) -> None:
    """Write a PNG at 150 dpi or an SVG, as the name of the file ends."""
    path = Path(path)
    path.write_bytes(rendered(figure, path.suffix.removeprefix(".")))


def rendered(figure: Figure, kind: str) -> bytes:
    """The figure as a file: `png` on white, or `svg` without a background."""
    content = BytesIO()
    vector = kind == "svg"
    with _style():
        figure.savefig(content, format=kind, dpi=DPI, transparent=vector, metadata={"Date": None} if vector else None)
    return content.getvalue()


def _style() -> AbstractContextManager[None]:
    import matplotlib

    style: AbstractContextManager[None] = matplotlib.rc_context(SETTINGS)
    return style


@contextmanager
def _figure(height: float) -> Iterator[Figure]:
    """A figure to draw on, 6.4 inches wide: what still reads on a phone."""
    with _style():
        from matplotlib.figure import Figure

        yield Figure(figsize=(6.4, height), layout="constrained")


def _curves(axes: Axes, results: Results, places: Sequence[float]) -> None:
    every = max(1, len(places) // 20)  # markers that touch hide the line
    for name, look in looks(results).items():
        values = [_score(entry, name, results.metric) for entry in results.evaluations]
        axes.plot(places, values, color=look.colour, marker=look.marker, linestyle=look.line, markevery=every, label=name)
    if not places:
        _remark(axes, "no evaluations yet")
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


def _time_unit(longest: float) -> tuple[str, float]:
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))
    return next(((name, length) for name, length in units if longest >= 3 * length), ("seconds", 1.0))


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


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and isfinite(value)]


def _edges(groups: Iterable[Sequence[float]]) -> list[float]:
    """Twelve bins over what all sizes have; from 0 to 1 where everything lies there."""
    values = [value for group in groups for value in group]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    return [low + (high - low or 1.0) * step / 12 for step in range(13)]


def _histogram(axes: Axes, values: Sequence[float], edges: Sequence[float], look: Look) -> None:
    hatch = "" if look.line == "-" else "////"
    axes.hist(values, bins=edges, color=look.colour, alpha=0.75, edgecolor=look.colour, hatch=hatch, fill=not hatch)
    axes.axvline(sum(values) / len(values), color=INK, linewidth=1.2)


def _panels(figure: Figure, number: int) -> list[Axes]:
    """So many panels, up to three in a row, with the same axes; the lowest of each column has its numbers."""
    wide = min(3, max(1, number))
    panels = list(figure.subplots(max(1, ceil(number / 3)), wide, sharex=True, sharey=True, squeeze=False).flat)
    for axes in panels[number:]:
        axes.set_axis_off()
    for axes in panels[max(0, number - wide) : number]:
        axes.tick_params(labelbottom=True)
    return panels[:number]


def _titled(axes: Axes, title: str, x: str = "") -> None:
    axes.set_title(title)
    axes.set_xlabel(x)


def _whole_numbers(axes: Axes, which: str = "x") -> None:
    from matplotlib.ticker import MaxNLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))


def _remark(axes: Axes, words: str) -> None:
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=MUTED)
    axes.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
    axes.grid(False)
