"""All trained numbers of a submodel in one piece of memory, so that a step moves them in a few passes, not in hundreds.

    values      float32, what the optimizer moves
    gradients   float32, as they lie
    seen        what the module computes with, where that is something else: rounded to bfloat16, faded or multiplied

Every tensor begins at a multiple of `BLOCK`, so that a block belongs to one tensor and has one limit and one factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 1024
"""Numbers that one program of a kernel handles."""


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies: its first number, its shape, and whether its channels are the fastest axis."""

    begin: int
    shape: torch.Size
    channels_last: bool

    def view(self, flat: Tensor) -> Tensor:
        """The tensor inside a flat one."""
        count = self.shape.numel()
        piece = flat[self.begin : self.begin + count]
        if not self.channels_last:
            return piece.view(self.shape)
        outputs, inputs, height, width = self.shape
        return piece.view(outputs, height, width, inputs).permute(0, 3, 1, 2)


def arranged(shapes: Mapping[str, torch.Size], channels_last: bool) -> tuple[dict[str, Slot], int]:
    """A place for every tensor, and how many numbers that takes."""
    slots, begin = {}, 0
    for name, shape in shapes.items():
        slots[name] = Slot(begin, shape, channels_last and len(shape) == 4)
        begin += -(-shape.numel() // BLOCK) * BLOCK
    return slots, begin


def by_block(slots: Mapping[str, Slot], length: int, numbers: Mapping[str, float], other: float = 0.0) -> Tensor:
    """A number for every block: that of its tensor."""
    found = torch.full((length // BLOCK,), other)
    for name, slot in slots.items():
        end = slot.begin + slot.shape.numel()
        found[slot.begin // BLOCK : -(-end // BLOCK)] = numbers.get(name, other)
    return found


# -- in plain torch --------------------------------------------------------------------------------------------------


@torch.no_grad()
def collect(gradients: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Gradients as they came, into their places."""
    for gradient, place in zip(gradients, into, strict=True):
        place.copy_(gradient)


@torch.no_grad()
def fade_gradients(gradients: Tensor, values: Tensor, limits: Tensor, aware: bool) -> None:
    """Gradients by the importance of their values, 0 where those are below their limits."""
    blocks, limit = values.view(-1, BLOCK), limits[:, None]
    magnitude = blocks.abs()
    kept = (magnitude >= limit).to(values.dtype)
    if aware:
        kept *= 1 + 2 * magnitude * limit / (magnitude + limit).square().clamp_min(SMALL)
    gradients.view(-1, BLOCK).mul_(kept)


@torch.no_grad()
def scale_gradients(gradients: Tensor, factors: Tensor) -> None:
    """Gradients of what is seen become those of the values behind it."""
    gradients.view(-1, BLOCK).mul_(factors[:, None])


@torch.no_grad()
def publish(values: Tensor, seen: Tensor, limits: Tensor | None, factors: Tensor | None) -> None:
    """What the module sees of its values: rounded, 0 below their limits, times their factors."""
    blocks = values[: len(seen)].view(-1, BLOCK)
    if limits is not None:
        blocks = torch.where(blocks.abs() >= limits[: len(blocks), None], blocks, 0.0)
    if factors is not None:
        blocks = blocks * factors[: len(blocks), None]
    seen.view(-1, BLOCK).copy_(blocks)


@torch.no_grad()
def keep_faded(values: Tensor, before: Tensor, limits: Tensor) -> None:
    """Values that were below their limits before a step stay as they were, whatever momentum or decay made of them."""
    old, new = before.view(-1, BLOCK), values.view(-1, BLOCK)
    new.copy_(torch.where(old.abs() >= limits[:, None], new, old))


SMALL = 1e-38
"""What a square of magnitudes is at least, so that 0 / 0 is 0."""
