"""The command `raffm`: verb, object, few flags.

Exit 0; 1 where a claim does not hold; 2 for wrong use; 130 after Ctrl-C.
"""

from __future__ import annotations

import typer

from raffm.cli import compare, edge, evaluate, export, inspect, label, search, train, verify
from raffm.cli.show import errors_in_one_line

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
app.command("compare")(compare.compare)
app.command("search")(search.search)
app.command("export")(export.export)
app.command("probe")(edge.probe)
app.add_typer(edge.app, name="edge")


def main() -> None:
    """Run a command."""
    with errors_in_one_line():
        app()
