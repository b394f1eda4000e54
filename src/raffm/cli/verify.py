"""`raffm verify`: prove by running a model that its axis labels are right."""

from __future__ import annotations

from typing import Annotated

import typer


def verify(
    model: Annotated[
        str,
        typer.Argument(help="A folder, also in $RAFFM_MODELS, a Hugging Face name, or family:tiny; random weights are enough."),
    ],
    table: Annotated[str | None, typer.Option(help="A table of your own for a family that raffm does not know.")] = None,
    tolerance: Annotated[float, typer.Option(help="Largest relative change of outputs that is still called equal.")] = 1e-4,
    seed: Annotated[int, typer.Option(help="Seed of the random weights, permutations and cuts.")] = 0,
) -> None:
    """Prove by running the model that its axis labels are right. One row per group; exits 1 if a claim fails."""
    from raffm.cli.show import number, quiet, rows
    from raffm.errors import RunError
    from raffm.models.load import model_from
    from raffm.models.verify import verify as verified

    if not 0 < tolerance < 1:
        raise RunError(f"--tolerance is {tolerance!r}; give a relative change above 0 and below 1.")
    quiet()
    found = verified(model_from(model), table, tolerance, seed)
    rows(
        ["group", "size", "permuted", "cut", "verdict"],
        [
            [row.group, str(row.size), number(row.permuted), number(row.cut), f"{row.verdict} {row.note and f'({row.note})'}"]
            for row in found.rows
        ],
    )
    if not found.holds:
        raise typer.Exit(1)
