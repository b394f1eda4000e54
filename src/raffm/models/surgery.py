"""From a model and a Selection to a real, smaller, runnable module of the same class."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from raffm.algebra.axis import names, value
from raffm.algebra.blocks import block_of, depth_of, is_place, place_value
from raffm.algebra.layout import Layout
from raffm.algebra.move import extract
from raffm.algebra.selection import Selection
from raffm.models.adapters import is_adapted, refresh
from raffm.models.label import named_tensors


@dataclass(frozen=True)
class Record:
    """What a submodel knows of its origin; it stands in `module.raffm` and survives copies, `.to` and files."""

    fingerprint: str
    selection: Selection
    version: int = 0
    config: tuple[tuple[str, Any], ...] = ()
    """What the full model's config says where the submodel's differs, by the path of the entry."""
    origin: str = ""
    """The layout of the full model, where this was cut from a submodel of it."""


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
    held = layout.labels_of(selection)
    for name, tensor in named_tensors(model)[0].items():
        if name in held:
            stand_ins[id(tensor)] = _like(tensor, parts[layout.name_in(selection, name)])
    modules = dict(model.named_modules())
    for depth, kept in _cut_depths(layout, selection).items():
        blocks = list(modules[depth].children())
        stand_ins.update({id(block): None for place, block in enumerate(blocks) if place not in kept})
    module = copy.deepcopy(model, stand_ins)
    for path in _cut_depths(layout, selection):
        _close_gaps(module.get_submodule(path))
    _bring_along(module, model, layout, selection, stand_ins)
    _refresh_attributes(module, layout, selection)
    _shorten_lists(module, layout, selection)
    _change_classes(module, layout, selection)
    before = getattr(model, "raffm", None)
    origin = before.fingerprint if isinstance(before, Record) and not before.selection.is_everything else ""
    module.raffm = Record(layout.fingerprint, selection, version, _config_of(model, layout), origin)  # type: ignore[assignment]
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


def _bring_along(module: nn.Module, model: nn.Module, layout: Layout, selection: Selection, stand_ins: dict[int, Any]) -> None:
    """Put what serves a whole stack, and stood in a dropped block, into the first kept one: a tensor, or its module."""
    for name, label in layout.labels.items():
        if label.stack not in selection.kept or int(selection.kept[label.stack][0]) == 0:
            continue
        owner, _, leaf = name.rpartition(".")
        new = layout.name_in(selection, name).rpartition(".")[0]
        if new in dict(module.named_modules()):
            _put(module.get_submodule(new), leaf, stand_ins[id(attrgetter(name)(model))], model.get_submodule(owner))
        else:
            parent, _, child = new.rpartition(".")
            module.get_submodule(parent).add_module(child, copy.deepcopy(model.get_submodule(owner), stand_ins))


def _put(owner: nn.Module, name: str, tensor: Tensor, before: nn.Module) -> None:
    """Give a module a tensor, as the kind that it was where it stood before."""
    if isinstance(tensor, nn.Parameter):
        owner.register_parameter(name, tensor)
    else:
        owner.register_buffer(name, tensor, persistent=name not in before._non_persistent_buffers_set)


def _refresh_attributes(module: nn.Module, layout: Layout, selection: Selection) -> None:
    """Bring every integer that modules store in line with the new shapes."""
    for child in module.modules():
        kind = next((kind for kind in type(child).__mro__ if kind in _SHAPED), None)
        if kind is not None:
            _SHAPED[kind](child)
        if is_adapted(child):
            refresh(child)
    sizes = layout.sizes_of(selection)
    for name, expression in layout.attributes_of(selection).items():
        new = layout.name_in(selection, name)
        owner, _, attribute = new.rpartition(".")
        places = {group: _place(new, layout, group) for group in names(expression) if is_place(group)}
        target = attrgetter(owner)(module) if owner else module
        kind = type(getattr(target, attribute))  # a flag stays one
        setattr(target, attribute, kind(value(expression, {**sizes, **places})))


def _shorten_lists(module: nn.Module, layout: Layout, selection: Selection) -> None:
    """Keep the entries of the kept blocks in lists that have one for every block, and new numbers in lists of blocks."""
    for name, depth in layout.lists.items():
        group = depth_of(depth) if is_place(depth) else depth
        if group not in selection.kept:
            continue
        places = selection.kept[group].tolist()
        owner, _, attribute = name.rpartition(".")
        target = attrgetter(owner)(module)
        entries = getattr(target, attribute)
        renewed = (
            [places.index(block) for block in entries if block in places]
            if is_place(depth)
            else [entries[place] for place in places]
        )
        setattr(target, attribute, type(entries)(renewed))


def _change_classes(module: nn.Module, layout: Layout, selection: Selection) -> None:
    """Give modules the class that they need once a group is cut: one that theirs is derived from."""
    for name, (group, wanted) in layout.when_cut_in(selection).items():
        if group in selection.kept:
            child = module.get_submodule(layout.name_in(selection, name))
            child.__class__ = next(kind for kind in type(child).__mro__ if kind.__name__ == wanted)


def _config_of(model: nn.Module, layout: Layout) -> tuple[tuple[str, Any], ...]:
    """The entries of the full model's config that a cut changes."""
    found = {}
    for name in (*(layout.attributes or {}), *layout.lists):
        owner, is_there, key = f".{name}".partition(".config.")
        if is_there and attrgetter(f"{owner}.config".lstrip("."))(model) is model.config:  # a stack may have a copy of its own
            found[key] = attrgetter(name)(model)
    return tuple((key, tuple(entry) if isinstance(entry, list) else entry) for key, entry in found.items())


def _place(name: str, layout: Layout, group: str) -> int:
    place, _ = block_of(name, str(layout.groups[depth_of(group)].path))
    assert place is not None
    return place_value(group, place)


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
