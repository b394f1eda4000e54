"""Adapters put into a model, found in one, and added to its weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from raffm.algebra.axis import names
from raffm.algebra.layout import Layout
from raffm.errors import LabelError
from raffm.libraries import library
from raffm.models.adapters import is_adapted, is_transposed, part_of
from raffm.models.label import head_names, layout_of

NEEDS_PEFT = LabelError("adapters need peft: pip install 'raffm[lora]'.")


@dataclass(frozen=True)
class Recipe:
    """What makes a model's adapters again: their rank, alpha, dropout, and the layers that have one, by name."""

    rank: int
    alpha: float
    layers: tuple[str, ...]
    dropout: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "layers": list(self.layers)}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Recipe:
        """What `to_json` gave."""
        return Recipe(**{**content, "layers": tuple(content["layers"])})


def with_lora(
    model: nn.Module,
    rank: int = 8,
    alpha: float | None = None,
    targets: Sequence[str] | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> nn.Module:
    """The same model with adapters in it; they and the head are trained from now on, nothing else.

    `targets` are the last names of the linear layers that get one, by default those that make queries, keys and values;
    `alpha` is twice the rank. New adapters change nothing: their second half is 0.
    """
    if rank < 1:
        raise LabelError(f"an adapter has a rank of at least 1, but was given {rank!r}.")
    return injected(model, Recipe(rank, alpha or 2.0 * rank, tuple(_chosen(model, targets)), dropout), seed)


def injected(model: nn.Module, recipe: Recipe, seed: int = 0) -> nn.Module:
    """The same model with the adapters of a recipe."""
    peft = library("peft", NEEDS_PEFT)
    config = peft.LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.layers),
        lora_dropout=recipe.dropout,
        fan_in_fan_out=is_transposed(model.get_submodule(recipe.layers[0])),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model)
    heads = head_names(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part_of(name) is not None or name in heads)
    model.raffm_lora = recipe  # type: ignore[assignment]
    return model


def recipe_of(model: nn.Module) -> Recipe | None:
    """The recipe of a model's adapters; it is that of the full model in submodels, too. None where there are none."""
    own = getattr(model, "raffm_lora", None)
    if isinstance(own, Recipe):
        return own
    layers = {name: module for name, module in model.named_modules() if is_adapted(module)}
    if not layers:
        return None
    kinds = {(next(iter(each.r.values())), next(iter(each.scaling.values()))) for each in layers.values()}
    if len(kinds) > 1:
        raise LabelError(f"the adapters have different ranks or scales ({sorted(kinds)}), which no file of ours holds.")
    ((rank, scale),) = kinds
    drops = [float(getattr(drop, "p", 0.0)) for each in layers.values() for drop in each.lora_dropout.values()]
    return Recipe(rank, rank * scale, tuple(layers), max(drops, default=0.0))


def _chosen(model: nn.Module, targets: Sequence[str] | None) -> list[str]:
    modules = {name for name, module in model.named_modules() if getattr(module, "weight", None) is not None}
    if targets is None:
        found = [name for name in _attentive(layout_of(model)) if name in modules]
    else:
        found = [name for name in sorted(modules) if name.rpartition(".")[2] in targets]
    if not found:
        wanted = "that makes queries, keys or values" if targets is None else f"named {' or '.join(targets)}"
        raise LabelError(f"{type(model).__name__} has no layer {wanted}. Say which get an adapter: `targets=[...]`.")
    return found


def _attentive(layout: Layout) -> list[str]:
    """The linear layers whose outputs are divided among heads."""
    return [
        name.removesuffix(".weight")
        for name, label in layout.labels.items()
        if label.source is not None
        and label.target is not None
        and len(label.axes) == 2
        and set(names(label.axes[label.target])) & set(layout.heads)
        and name.endswith(".weight")
    ]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside PEFT's own wrapper, adapters and all; any other model as it is.

    Of a layer that PEFT trains in a copy (`modules_to_save`) the copy takes the place.
    """
    inside: Any = getattr(model, "get_base_model", None)
    if not callable(inside) or not hasattr(model, "peft_config"):
        return model
    found: nn.Module = inside()
    for name, module in list(found.named_modules()):
        copies: Any = getattr(module, "modules_to_save", None)
        if isinstance(copies, nn.ModuleDict) and len(copies) == 1:
            parent, _, child = name.rpartition(".")
            setattr(found.get_submodule(parent), child, next(iter(copies.values())))
    found.raffm_lora = recipe_of(found)  # type: ignore[assignment]
    return found


def merged(model: nn.Module) -> nn.Module:
    """A copy without adapters: each is added to the weight that it stood beside."""
    made = copy.deepcopy(model)
    for name, module in list(made.named_modules()):
        if is_adapted(module):
            layer: Any = module
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(made.get_submodule(parent), child, layer.get_base_layer())
    made.raffm_lora = None  # type: ignore[assignment]
    return made
