"""Random inputs that a model accepts, as its family's table describes them."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from raffm.errors import LabelError
from raffm.models.entries import entry
from raffm.models.table import Table


def sample_inputs(
    model: nn.Module,
    table: Table,
    batch: int = 2,
    tokens: int = 16,
    device: str | torch.device = "cpu",
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Normal pixels and uniform ids, by the names of the model's arguments.

    An entry of the table is a list of axes after the batch: a number, the name of a config value (`image_size`), with
    `= 224` where the config may lack it, or `tokens`. `tokens < vocab_size` stands for ids below that config value. There
    are never more tokens than the model has positions. Inputs that the model's `forward` does not take are left out;
    pixels have the model's dtype.
    """
    if not table.inputs:
        raise LabelError(f"the table of {table.family!r} has no section [inputs], so the model cannot be run.")
    config = getattr(model, "config", None)
    tokens = min(tokens, getattr(config, "max_position_embeddings", tokens))
    taken = set(signature(model.forward).parameters)
    inputs = {name: axes for name, axes in table.inputs.items() if name in taken} or table.inputs
    drawn = {name: _drawn(axes, config, batch, tokens, generator) for name, axes in inputs.items()}
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    made = {name: tensor.to(dtype) if tensor.is_floating_point() else _ended(tensor, config) for name, tensor in drawn.items()}
    return {name: tensor.to(device) for name, tensor in made.items()}


def with_padding(model: nn.Module) -> nn.Module:
    """A copy of a model, made to be tried: classifiers that write need some token for padding."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    return model


def _drawn(axes: list[str], config: Any, batch: int, tokens: int, generator: torch.Generator | None) -> Tensor:
    limits = [axis.partition("<")[2].strip() for axis in axes if "<" in axis]
    lengths = [_length(axis.partition("<")[0].strip(), config, tokens, place) for place, axis in enumerate(axes)]
    if limits:
        return torch.randint(_length(limits[0], config, tokens, 0), (batch, *lengths), generator=generator)
    return torch.randn((batch, *lengths), generator=generator)


def _ended(drawn: Tensor, config: Any) -> Tensor:
    """Ids that end with the config's end-of-text token and have it nowhere else: some heads look for it."""
    end = getattr(config, "eos_token_id", None)
    if not isinstance(end, int) or end >= getattr(config, "vocab_size", 0):
        return drawn
    return torch.where(drawn == end, (end + 1) % 2, drawn).index_fill(1, torch.tensor([drawn.shape[1] - 1]), end)


def _length(axis: str, config: Any, tokens: int, place: int) -> int:
    """The length of an axis; of a config value that is a pair (height, width), the last two axes take one each."""
    name, _, default = (part.strip() for part in axis.partition("="))
    if name == "tokens":
        return tokens
    if name.isdigit():
        return int(name)
    found = entry(config, name)
    if found is None and default:
        found = int(default)
    if isinstance(found, list | tuple):
        found = found[place - 1]
    if not isinstance(found, int):
        raise LabelError(f"the inputs need the config value {name!r}, which the model's config does not have.")
    return found
