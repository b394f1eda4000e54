"""What commands print: plain tables that one can grep."""

from __future__ import annotations

from collections.abc import Sequence

import typer


def rows(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """A table of left-aligned columns, two spaces apart."""
    widths = [max(len(line[column]) for line in (heading, *lines)) for column in range(len(heading))]
    for line in (heading, *lines):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def number(value: float | None) -> str:
    """A small number in two digits, or a dash."""
    return "-" if value is None else f"{value:.1e}"


def quiet() -> None:
    """Keep the notices of libraries out of the output."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
