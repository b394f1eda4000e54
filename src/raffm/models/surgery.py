"""From a model and a Selection to a real, smaller, runnable module of the same class."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raffm.algebra.axis import names, value
from raffm.algebra.layout import Layout, is_place
from raffm.algebra.move import extract
from raffm.algebra.selection import Selection
from raffm.models.label import named_tensors


@dataclass(frozen=True)
class Record:
    """What a submodel knows of its origin; it stands in `module.raffm` and survives copies, `.to` and files."""

    fingerprint: str
    selection: Selection
    version: int = 0
    config: tuple[tuple[str, int], ...] = ()
    """What the full model's config says where the submodel's differs."""


def submodel(model: nn.Module, layout: Layout, selection: Selection, version: int = 0) -> nn.Module:
    """A module of the model's own class that holds only the selected weights.

    The model is not changed and never copied: its structure is, with the smaller tensors in the place of its own.
    """
    tensors, _ = named_tensors(model)
    return assembled(model, layout, selection, extract(tensors, layout, selection), version)


def skeleton(model: nn.Module, layout: Layout, selection: Selection) -> nn.Module:
    """The same submodel on the meta device: shapes, no weights."""
    tensors = {name: torch.empty_like(tensor, device="meta") for name, tensor in named_tensors(model)[0].items()}
    return assembled(model, layout, selection, extract(tensors, layout, selection))


def assembled(
    model: nn.Module, layout: Layout, selection: Selection, parts: Mapping[str, Tensor], version: int = 0
) -> nn.Module:
    """A copy of the model's structure around other tensors, by their names in the submodel."""
    stand_ins: dict[int, Any] = {}
    for name, tensor in named_tensors(model)[0].items():
        if name in layout.labels_of(selection):
            stand_ins[id(tensor)] = _like(tensor, parts[layout.name_in(selection, name)])
    modules = dict(model.named_modules())
    for depth, kept in _cut_depths(layout, selection).items():
        blocks = list(modules[depth].children())
        stand_ins.update({id(block): None for place, block in enumerate(blocks) if place not in kept})
    module = copy.deepcopy(model, stand_ins)
    for path in _cut_depths(layout, selection):
        _close_gaps(module.get_submodule(path))
    _refresh_attributes(module, layout, selection)
    module.raffm = Record(layout.fingerprint, selection, version, _config_of(layout))  # type: ignore[assignment]
    return module


def _like(tensor: Tensor, part: Tensor) -> Tensor:
    return nn.Parameter(part, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part


def _cut_depths(layout: Layout, selection: Selection) -> dict[str, set[int]]:
    return {
        str(depth.path): set(selection.kept[depth.name].tolist())
        for depth in layout.depths.values()
        if depth.name in selection.kept
    }


def _close_gaps(container: nn.Module) -> None:
    """Number the blocks of a list anew, without those that were left out."""
    blocks = [block for block in container._modules.values() if block is not None]
    container._modules.clear()
    container._modules.update({str(place): block for place, block in enumerate(blocks)})


def _refresh_attributes(module: nn.Module, layout: Layout, selection: Selection) -> None:
    """Bring every integer that modules store in line with the new shapes."""
    for child in module.modules():
        kind = next((kind for kind in type(child).__mro__ if kind in _SHAPED), None)
        if kind is not None:
            _SHAPED[kind](child)
    sizes = layout.sizes_of(selection)
    for name, expression in layout.attributes_of(selection).items():
        new = layout.name_in(selection, name)
        owner, _, attribute = new.rpartition(".")
        places = {group: _place(new, layout, group[1:]) for group in names(expression) if is_place(group)}
        target = module.config if owner == "config" else module.get_submodule(owner)
        setattr(target, attribute, value(expression, {**sizes, **places}))


def _config_of(layout: Layout) -> tuple[tuple[str, int], ...]:
    """The integers in the full model's config that a cut changes."""
    owned = {name: expression for name, expression in (layout.attributes or {}).items() if name.startswith("config.")}
    return tuple((name.removeprefix("config."), value(expression, layout.sizes)) for name, expression in owned.items())


def _place(name: str, layout: Layout, depth: str) -> int:
    return int(name[len(f"{layout.groups[depth].path}.") :].split(".", maxsplit=1)[0])


def _linear(module: Any) -> None:
    module.out_features, module.in_features = module.weight.shape


def _convolution(module: Any) -> None:
    module.out_channels, module.in_channels = module.weight.shape[0], module.weight.shape[1] * module.groups


def _embedding(module: Any) -> None:
    module.num_embeddings, module.embedding_dim = module.weight.shape


def _layer_norm(module: Any) -> None:
    if module.weight is not None:
        module.normalized_shape = tuple(module.weight.shape)


def _batch_norm(module: Any) -> None:
    shaped = module.weight if module.weight is not None else module.running_mean
    if shaped is not None:
        module.num_features = len(shaped)


def _group_norm(module: Any) -> None:
    if module.weight is not None:
        module.num_channels = len(module.weight)


_SHAPED: dict[type[nn.Module], Callable[[Any], None]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.GroupNorm: _group_norm,
}
