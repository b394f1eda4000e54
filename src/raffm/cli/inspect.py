"""`raffm inspect`: the groups of a model and what can be cut."""

from __future__ import annotations

from typing import Annotated

import typer


def inspect(
    model: Annotated[str, typer.Argument(help="A folder, also in $RAFFM_MODELS, a Hugging Face name, or family:tiny.")],
    table: Annotated[str | None, typer.Option(help="A table of your own for a family that raffm does not know.")] = None,
    labels: Annotated[bool, typer.Option(help="Also list the label of every tensor.")] = False,
) -> None:
    """Show the groups of a model, how large they are, and what can be cut. Needs no weights."""
    from raffm.cli.show import quiet, rows
    from raffm.models.inspect import inspect as inspected
    from raffm.models.load import model_from

    quiet()
    found = inspected(model_from(model, device="meta"), table)
    typer.echo(f"{found.model} ({found.family}), {found.params:,} parameters, layout {found.layout}")
    rows(
        ["group", "size", "kind", "parameters touched", "default sizes"],
        [
            [row.name, str(row.size), row.kind, f"{row.touched:,}", " ".join(map(str, row.default_sizes))]
            for row in found.groups
        ],
    )
    if labels:
        rows(["tensor", "label"], [[name, label] for name, label in found.labels.items()])
