"""The command `raffm`: verb, object, few flags.

Exit 0; 1 where a claim does not hold; 2 for wrong use; 130 after Ctrl-C.
"""

from __future__ import annotations

import sys

import typer

from raffm.cli import evaluate, inspect, label, train, verify
from raffm.errors import RaffmError

app = typer.Typer(
    help="Train one foundation model across devices of every size, and give each device the submodel it can run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("inspect")(inspect.inspect)
app.command("verify")(verify.verify)
app.command("label")(label.label)
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)


def main() -> None:
    """Run a command; an error that raffm raises on purpose becomes one message and exit code 2."""
    try:
        app()
    except RaffmError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(2)
