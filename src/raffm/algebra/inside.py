"""One submodel inside another: where its tensors lie in those of the larger one, and differentiable views of them there."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from raffm.algebra.axis import Where, as_stretch
from raffm.algebra.layout import Layout
from raffm.algebra.move import Move, Tensors, moves, part_of
from raffm.algebra.selection import Selection
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
    order = known.argsort()
    places = torch.searchsorted(known[order], wanted).clamp(max=len(known) - 1)
    if not torch.equal(known[order][places], wanted):
        raise SelectionError(f"the smaller submodel has positions of `{name}` that the larger one lacks.")
    return None if len(wanted) == len(known) and torch.equal(wanted, known) else as_stretch(order[places])


def _listed(where: Where, length: int) -> Tensor:
    if where is None:
        return torch.arange(length)
    return torch.arange(where.start, where.stop) if isinstance(where, slice) else where


def views(tensors: Tensors, layout: Layout, outer: Selection, inner: Selection) -> dict[str, Tensor]:
    """The tensors of a smaller submodel as parts of those of a larger one, which gradients pass through.

    A stretch is a view, without memory of its own; scattered positions are gathered for as long as they are used.
    """
    plan = inside(layout, outer, inner)
    return {move.name: part_of(tensors[name], move.where) for name, move in plan.items() if name in tensors}
