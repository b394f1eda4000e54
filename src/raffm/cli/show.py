"""What commands print: plain tables that one can grep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isnan

import typer

from raffm.errors import RaffmError, RunError


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
    """An error that raffm raises on purpose, or that files and folders do, becomes one message and exit code 2."""
    try:
        yield
    except BrokenPipeError:
        raise  # whoever reads what is printed has had enough
    except (RaffmError, OSError) as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise SystemExit(2) from None


def counted(text: str | None, option: str) -> float | None:
    """A number as people write it: 45M, 2.5G, 300k, 1200."""
    if text is None:
        return None
    from raffm.deploy.statement import number_in

    found = number_in(text)
    if isnan(found):
        raise RunError(f"{option} is {text!r}; give a number, as in 1200, 300k, 45M or 2.5G.")
    if not 0 < found < float("inf"):
        raise RunError(f"{option} is {text!r}; give a number above 0.")
    return found


@contextmanager
def ticking(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of progress on the error stream, where someone watches; told how many are done, and of how many."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def busy() -> None:
    """Say so where other programs kept the machine busy: times are too long then."""
    import os

    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores + 0.5:
        typer.echo(f"This machine is busy (load {load:.1f} on {cores} cores): its times are too long.", err=True)


def quiet() -> None:
    """Keep the notices of libraries out of the output."""
    import logging

    import transformers

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
