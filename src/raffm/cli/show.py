"""What commands print: plain tables that one can grep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

from raffm.errors import RaffmError


def rows(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """A table of left-aligned columns, two spaces apart."""
    widths = [max(len(line[column]) for line in (heading, *lines)) for column in range(len(heading))]
    for line in (heading, *lines):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def number(value: float | None) -> str:
    """A small number in two digits, or a dash."""
    return "-" if value is None else f"{value:.1e}"


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """An error that raffm raises on purpose becomes one message and exit code 2."""
    try:
        yield
    except RaffmError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise SystemExit(2) from None


def quiet() -> None:
    """Keep the notices of libraries out of the output."""
    import logging

    import transformers

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
