"""The pieces a Tally is made of: memory that is used again, sums over many small tensors, coverage along axes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from raffm.algebra.axis import Where
from raffm.algebra.layout import Layout
from raffm.algebra.move import Tensors, moves
from raffm.algebra.selection import Selection, indicator

SMALL = 1 << 14
"""Elements of a tensor that is added in one call with others (64 KiB of float32)."""

PIECE = 1 << 18
"""Elements handled at a time (1 MiB of float32)."""


@lru_cache(maxsize=64)
def shapes_of(layout: Layout, selection: Selection) -> dict[str, tuple[int, ...]]:
    """The shapes of a submodel's tensors, by their names in the full model."""
    sizes = layout.sizes_of(selection)
    return {name: label.shape(sizes) for name, label in layout.labels_of(selection).items()}


@dataclass(frozen=True, eq=False)
class Outline:
    """Who holds what of a tensor, as two factors: weigh the columns of the first, and their product is the coverage."""

    rows: Tensor
    """(length of the first axis, submodels)."""
    columns: Tensor
    """(submodels, all positions of the other axes)."""
    shape: list[int]
    """Of the coverage; 1 along axes that nobody cut."""


@lru_cache(maxsize=128)
def outline_of(layout: Layout, held: tuple[Selection, ...], name: str, device: torch.device) -> Outline:
    """The outline of a tensor in several submodels: bits, or on a GPU float64, since it may round the factors of products."""
    axes = [torch.stack(rows) for rows in zip(*(_factors(layout, selection, name) for selection in held), strict=True)]
    axes = [rows[:, :1] if bool(rows.all()) else rows for rows in axes]
    columns = axes[0].new_ones(len(held), 1)
    for rows in axes[1:]:
        columns = (columns[:, :, None] & rows[:, None, :]).flatten(1)
    shape = [rows.shape[1] for rows in axes] if layout.labels[name].axes else []
    dtype = torch.bool if device.type == "cpu" else torch.float64
    return Outline(axes[0].T.to(device, dtype), columns.to(device, dtype), shape)


@lru_cache(maxsize=512)
def _factors(layout: Layout, selection: Selection, name: str) -> list[Tensor]:
    """Who holds what along every axis, as `selection.factors` has it, from positions that are known already."""
    lengths = layout.labels[name].shape(layout.sizes)
    move = moves(layout, selection).get(name)
    if move is None or not lengths:
        return [torch.full((length,), move is not None) for length in lengths or (1,)]
    return [indicator(length, place) for length, place in zip(lengths, move.where, strict=True)]


def count_at(place: Where, length: int) -> int:
    """How many positions of an axis are kept."""
    if place is None:
        return length
    return place.stop - place.start if isinstance(place, slice) else len(place)


def added(total: Tensor | None, more: Tensor) -> Tensor:
    """The sum of two coverages that may have length 1 along some axes, in the memory of the first where it has room."""
    if total is None:
        return more
    has_room = all(mine >= others for mine, others in zip(total.shape, more.shape, strict=True))
    return total.add_(more) if has_room else total + more


class Memory:
    """Named tensors of changing shape in memory that is used again: fresh memory costs a page fault every 4 KiB."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, str], Tensor] = {}
        self._taken: dict[tuple[str, str], Tensor] = {}

    def take(self, name: tuple[str, str], shape: torch.Size, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of a shape, with whatever its memory held before."""
        dtype = dtype or like.dtype
        taken = self._taken.get(name)
        if taken is not None and taken.shape == shape and taken.dtype == dtype:
            return taken
        block = self._blocks.get(name)
        if block is None or block.numel() < shape.numel() or block.dtype != dtype:
            block = self._blocks[name] = torch.empty(shape.numel(), dtype=dtype, device=like.device)
        self._taken[name] = block[: shape.numel()].view(shape)
        return self._taken[name]


def pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """A contiguous tensor in pieces that stay in a core's cache between two operations."""
    return torch.split(tensor.contiguous().view(-1), PIECE) if tensor.dim() else (tensor,)


def largest_of(tensors: Tensors) -> dict[str, float]:
    """The largest magnitudes of many tensors, none of them empty: one read for all of them."""
    if not tensors:
        return {}
    return dict(zip(tensors, torch.stack(torch._foreach_norm(list(tensors.values()), torch.inf)).tolist(), strict=True))


def largest_in(tensor: Tensor) -> float:
    """The largest magnitude, a NaN if there is one, in one quick read; 0 for an empty tensor."""
    if tensor.numel() == 0:
        return 0.0
    least, most = torch.aminmax(tensor)
    return max(-float(least), float(most))
