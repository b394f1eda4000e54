"""`raffm label`: draft a table for a family that raffm does not know."""

from __future__ import annotations

from typing import Annotated

import typer


def label(
    model: Annotated[
        str, typer.Argument(help="A model type (gpt2), a folder, also in $RAFFM_MODELS, a Hugging Face name, or family:tiny.")
    ],
) -> None:
    """Draft a table for a model by building it in several sizes. Complete it, then run `raffm verify --table`."""
    from raffm.cli.show import quiet
    from raffm.models.draft import draft
    from raffm.models.load import config_of_type, model_from

    quiet()
    typer.echo(draft(config_of_type(model) or model_from(model, device="meta")))
