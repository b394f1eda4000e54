"""`raffm inspect`: the groups of a model and what can be cut."""

from __future__ import annotations

from typing import Annotated

import typer


def inspect(
    model: Annotated[str, typer.Argument(help="A folder, a Hugging Face name, or family:tiny.")],
    table: Annotated[str | None, typer.Option(help="A table of your own for a family that raffm does not know.")] = None,
    labels: Annotated[bool, typer.Option(help="Also list the label of every tensor.")] = False,
) -> None:
    """Show the groups of a model, how large they are, and what can be cut. Needs no weights."""
    from raffm.algebra.selection import Selection
    from raffm.cli.show import quiet, rows
    from raffm.models.label import layout_of, table_of
    from raffm.models.load import model_from
    from raffm.models.space import default_sizes

    quiet()
    built = model_from(model, device="meta")
    family = table_of(built, table)
    layout = layout_of(built, family)
    sizes = default_sizes(layout, family)
    total = layout.count(Selection())
    typer.echo(f"{type(built).__name__} ({family.family}), {total:,} parameters, layout {layout.fingerprint}")
    rows(
        ["group", "size", "kind", "default sizes"],
        [
            [
                name,
                str(group.size),
                "pinned" if group.pinned else "depth" if group.path else f"per {group.base}" if group.base else "free",
                " ".join(map(str, sizes.get(name, ()))),
            ]
            for name, group in layout.groups.items()
        ],
    )
    if labels:
        rows(["tensor", "label"], [[name, str(label)] for name, label in layout.labels.items()])
