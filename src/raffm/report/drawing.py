"""What all pictures share: colours, markers and lines, panels, and how a figure becomes a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from math import ceil, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raffm.errors import RunError

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


def look_of(place: int, style: int = 0) -> Look:
    """How the thing at a place is drawn."""
    return Look(COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)], LINES[style % len(LINES)])


KINDS = (".png", ".svg", ".pdf")
"""What names of pictures end with."""


def refuse_kind(path: Path) -> None:
    """Refuse a picture that could not be written, before the work that it is to show."""
    if path.suffix not in KINDS:
        raise RunError(f"a picture is a file that ends with {', '.join(KINDS)}, not {path.name!r}.")
    if not path.parent.is_dir():
        raise RunError(f"there is no folder {str(path.parent)!r} for the picture.")


def save(figure: Figure, path: str | Path) -> None:
    """Write a PNG at 150 dpi, an SVG or a PDF, as the name of the file ends."""
    path = Path(path)
    path.write_bytes(rendered(figure, path.suffix.removeprefix(".")))


def rendered(figure: Figure, kind: str) -> bytes:
    """The figure as a file: `png` on white, or `svg` without a background."""
    content = BytesIO()
    vector = kind == "svg"
    with style_of_all():
        figure.savefig(content, format=kind, dpi=DPI, transparent=vector, metadata={"Date": None} if vector else None)
    return content.getvalue()


def style_of_all() -> AbstractContextManager[None]:
    """Within this, matplotlib draws as we do."""
    import matplotlib

    style: AbstractContextManager[None] = matplotlib.rc_context(SETTINGS)
    return style


@contextmanager
def figure_of(height: float, width: float = 6.4) -> Iterator[Figure]:
    """A figure to draw on; at 6.4 inches it still reads on a phone."""
    with style_of_all():
        from matplotlib.figure import Figure

        yield Figure(figsize=(width, height), layout="constrained")


def time_unit(longest: float) -> tuple[str, float]:
    """The unit in which times up to this one read well, and its seconds."""
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))
    return next(((name, length) for name, length in units if longest >= 3 * length), ("seconds", 1.0))


def known(values: Sequence[float | None]) -> list[float]:
    """Those that are finite numbers."""
    return [value for value in values if value is not None and isfinite(value)]


def edges_of(groups: Iterable[Sequence[float]]) -> list[float]:
    """Twelve bins over what all sizes have; from 0 to 1 where everything lies there."""
    values = [value for group in groups for value in group]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    return [low + (high - low or 1.0) * step / 12 for step in range(13)]


def histogram(axes: Axes, values: Sequence[float], edges: Sequence[float], look: Look) -> None:
    """Bars, and a line at the mean; hatched where the line style is not plain."""
    hatch = "" if look.line == "-" else "////"
    axes.hist(values, bins=edges, color=look.colour, alpha=0.75, edgecolor=look.colour, hatch=hatch, fill=not hatch)
    axes.axvline(sum(values) / len(values), color=INK, linewidth=1.2)


def panels_of(figure: Figure, number: int) -> list[Axes]:
    """So many panels, up to three in a row, with the same axes; the lowest of each column has its numbers."""
    wide = min(3, max(1, number))
    panels = list(figure.subplots(max(1, ceil(number / 3)), wide, sharex=True, sharey=True, squeeze=False).flat)
    for axes in panels[number:]:
        axes.set_axis_off()
    for axes in panels[max(0, number - wide) : number]:
        axes.tick_params(labelbottom=True)
    return panels[:number]


def titled(axes: Axes, title: str, x: str = "") -> None:
    """A title, and what runs along the x axis."""
    axes.set_title(title)
    axes.set_xlabel(x)


def whole_numbers(axes: Axes, which: str = "x") -> None:
    """Ticks at whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))


def remark(axes: Axes, words: str) -> None:
    """Words where there is nothing to draw."""
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=MUTED)
    axes.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
    axes.grid(False)
