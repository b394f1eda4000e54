"""One submodel inside another: where its tensors lie in those of the larger one, and differentiable views of them there."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from raffm.algebra.axis import Where, as_stretch
from raffm.algebra.layout import Layout
from raffm.algebra.move import Move, Tensors, moves, part_of, scatter
from raffm.algebra.selection import Indices, Selection
from raffm.errors import SelectionError


@lru_cache(maxsize=64)
def inside(layout: Layout, outer: Selection, inner: Selection) -> dict[str, Move]:
    """For every tensor of the inner submodel, by its name in the outer one: its own name, and its positions there."""
    there, found = moves(layout, outer), {}
    for name, move in moves(layout, inner).items():
        if name not in there:
            raise SelectionError(f"the smaller submodel has `{name}`, which the larger one lacks.")
        shape = layout.labels[name].shape(layout.sizes)
        places = zip(there[name].where, move.where, shape, strict=True)
        found[there[name].name] = Move(move.name, tuple(_relative(name, *each) for each in places))
    return found


def _relative(name: str, outer: Where, inner: Where, length: int) -> Where:
    """The places of some positions among others."""
    if inner is None and outer is None:
        return None
    known, wanted = _listed(outer, length), _listed(inner, length)
    if torch.equal(wanted, known):
        return None
    order = known.argsort()
    return as_stretch(order[_places(name, known[order], wanted)])


def _listed(where: Where, length: int) -> Tensor:
    if where is None:
        return torch.arange(length)
    return torch.arange(where.start, where.stop) if isinstance(where, slice) else where


def within(layout: Layout, outer: Selection, inner: Selection) -> Selection:
    """The inner submodel for whoever has the first indices of every group, but for blocks, in place of the outer one's."""
    chosen: dict[str, Tensor | Indices] = {}
    for name, kept in outer.kept.items():  # what only the outer one cuts is whole for the inner one, or in a dropped block
        chosen[name] = kept if name in layout.depths else kept.shape[-1]
    for name, kept in inner.kept.items():
        base, given = layout.bases.get(name), outer.kept.get(name)
        if name in layout.depths:
            chosen[name] = kept
        elif base is None:
            chosen[name] = kept if given is None else _places(name, given, kept)
        else:
            known = _rows(outer, layout, base)
            rows = [known.index(row) for row in _rows(inner, layout, base)]
            pairs = zip(rows, kept, strict=True)
            chosen[name] = torch.stack([own if given is None else _places(name, given[row], own) for row, own in pairs])
    return layout.select(chosen)


def _places(name: str, known: Tensor, wanted: Tensor) -> Tensor:
    """The places of some numbers among sorted ones."""
    places = torch.searchsorted(known, wanted).clamp(max=len(known) - 1)
    if not torch.equal(known[places], wanted):
        raise SelectionError(f"the smaller submodel has positions of `{name}` that the larger one lacks.")
    return places


def _rows(selection: Selection, layout: Layout, base: str) -> list[int]:
    kept = selection.kept.get(base)
    rows: list[int] = list(range(layout.groups[base].size)) if kept is None else kept.tolist()
    return rows


def views(tensors: Tensors, layout: Layout, outer: Selection, inner: Selection) -> dict[str, Tensor]:
    """The tensors of a smaller submodel as parts of those of a larger one, which gradients pass through.

    A stretch is a view, without memory of its own; scattered positions are gathered for as long as they are used. What comes
    back is added to the tensors' gradients, where the parts lie.
    """
    plan, found = inside(layout, outer, inner), {}
    for name, move in plan.items():
        if name in tensors:
            tensor = tensors[name]
            is_trained = tensor.requires_grad and torch.is_grad_enabled()
            found[move.name] = _part(tensor, move.where) if is_trained else part_of(tensor, move.where)
    return found


def _part(tensor: Tensor, where: tuple[Where, ...]) -> Tensor:
    part: Tensor = _Part.apply(tensor, where)  # type: ignore[no-untyped-call]
    return part


class _Part(torch.autograd.Function):
    """A part of a tensor. Its gradient is added where it lies: one as large as the tensor, nearly all 0, is never made."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, where: tuple[Where, ...]) -> Tensor:
        ctx.about = tensor, where
        return part_of(tensor, where)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[None, None]:
        tensor, where = ctx.about
        if tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
        scatter(given.to(tensor.grad.dtype), tensor.grad, where)
        return None, None
