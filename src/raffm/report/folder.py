"""The files of a run's results. A program that is killed on the way leaves each file old or new, never half written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from raffm.errors import CheckpointError
from raffm.models.files import read_json
from raffm.report import comparison, comparison_html, comparison_plots, plots, tables
from raffm.report.comparison import Compared
from raffm.report.drawing import is_available, rendered
from raffm.report.explorer import explorer_in
from raffm.report.html import as_html
from raffm.rounds.results import FORMAT, Results, from_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = "results.json"


def write_results(results: Results, folder: str | Path) -> None:
    """Write results.json, metrics.csv, metrics.md, report.html, and, where matplotlib is installed, plots."""
    folder = Path(folder)
    write_file(folder / "metrics.csv", tables.as_csv(results).encode())
    write_file(folder / "metrics.md", tables.as_markdown(results).encode())
    drawings = _draw(plots.FIGURES, results, folder / "plots") if is_available() else None
    write_file(folder / "report.html", as_html(results, drawings, explorer_in(folder)).encode())
    write_file(folder / RESULTS, _json(results))  # the last: it says that a run is finished


def read_results(folder: str | Path) -> Results:
    """The results that `write_results` left in a folder."""
    path = Path(folder) / RESULTS
    content = read_json(path)
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{str(path)!r} has format {content.get('format')!r}; this raffm reads format {FORMAT}.")
    try:
        return from_json(content)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{str(path)!r} is damaged: {error!r}. Restore it from a copy, or run again.") from None


def _json(results: Results) -> bytes:
    """The results in the order they came, so that settings read as their author wrote them."""
    return (json.dumps(results.to_json(), indent=1, default=str, allow_nan=False) + "\n").encode()


def write_comparison(compared: Sequence[Compared], folder: str | Path) -> None:
    """Write comparison.json, comparison.md, report.html and, where matplotlib is installed, plots."""
    folder = Path(folder)
    content = json.dumps(comparison.as_json(compared), indent=1, allow_nan=False) + "\n"
    write_file(folder / "comparison.json", content.encode())
    write_file(folder / "comparison.md", comparison.as_markdown(compared).encode())
    runs = {entry.method: entry.runs for entry in compared}
    drawings = _draw(comparison_plots.FIGURES, runs, folder / "plots") if is_available() else None
    write_file(folder / "report.html", comparison_html.as_html(compared, drawings).encode())


Shown = TypeVar("Shown")


def _draw(figures: Mapping[str, Callable[[Shown], Figure]], shown: Shown, folder: Path) -> Mapping[str, str]:
    """Write all plots, and give the SVG of each by its name."""
    drawings = {}
    for name, draw in figures.items():
        figure = draw(shown)
        vector = rendered(figure, "svg")
        write_file(folder / f"{name}.png", rendered(figure, "png"))
        write_file(folder / f"{name}.svg", vector)
        drawings[name] = vector.decode()
    return drawings


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
