"""The passes of `flat.py` as single kernels, for CUDA with Triton.

A lane's first steps with them are compared with its plain ones.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-not-found"

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from raffm.simulate.flat import BLOCK, SMALL, Slot


@triton.jit
def _collect_kernel(
    wheres,
    counts,
    halves,
    values,
    limits,
    factors,
    out,
    has_limits: tl.constexpr,
    aware: tl.constexpr,
    has_factors: tl.constexpr,
    small: tl.constexpr,
    size: tl.constexpr,
):
    block = tl.program_id(0)
    lane = tl.arange(0, size)
    count = tl.load(counts + block)
    inside = lane < count
    where = tl.load(wheres + block)
    if tl.load(halves + block) != 0:
        gradient = tl.load(where.to(tl.pointer_type(tl.bfloat16)) + lane, mask=inside, other=0.0).to(tl.float32)
    else:
        gradient = tl.load(where.to(tl.pointer_type(tl.float32)) + lane, mask=inside, other=0.0)
    if has_limits:
        limit = tl.load(limits + block)
        magnitude = tl.abs(tl.load(values + block * size + lane))
        factor = tl.where(magnitude >= limit, 1.0, 0.0)
        if aware:
            total = magnitude + limit
            factor *= 1.0 + 2.0 * magnitude * limit / tl.maximum(total * total, small)
        gradient *= factor
    if has_factors:
        gradient *= tl.load(factors + block)
    tl.store(out + block * size + lane, gradient)


@triton.jit
def _publish_kernel(values, seen, limits, factors, has_limits: tl.constexpr, has_factors: tl.constexpr, size: tl.constexpr):
    block = tl.program_id(0)
    places = block * size + tl.arange(0, size)
    value = tl.load(values + places)
    if has_limits:
        value = tl.where(tl.abs(value) >= tl.load(limits + block), value, 0.0)
    if has_factors:
        value *= tl.load(factors + block)
    tl.store(seen + places, value.to(seen.dtype.element_ty))


class Collector:
    """Gathers gradients from wherever autograd left them; their addresses are written down once a graph is captured."""

    def __init__(self, slots: Mapping[str, Slot], length: int, device: torch.device) -> None:
        """A table for these tensors, with nothing in it."""
        self._slots = list(slots.values())
        blocks = length // BLOCK
        self._wheres = torch.zeros(blocks, dtype=torch.int64, device=device)
        self._counts = torch.zeros(blocks, dtype=torch.int32, device=device)
        self._halves = torch.zeros(blocks, dtype=torch.int32, device=device)
        self._found: list[tuple[int, bool]] = []

    def __call__(
        self,
        gradients: Sequence[Tensor],
        values: Tensor,
        limits: Tensor | None,
        aware: bool,
        factors: Tensor | None,
        out: Tensor,
    ) -> None:
        """Queue the pass; the table of addresses must be written before it runs."""
        self._found = [(gradient.data_ptr(), gradient.dtype == torch.bfloat16) for gradient in gradients]
        _collect_kernel[(len(out) // BLOCK,)](
            self._wheres,
            self._counts,
            self._halves,
            values,
            values if limits is None else limits,
            values if factors is None else factors,
            out,
            has_limits=limits is not None,
            aware=aware,
            has_factors=factors is not None,
            small=SMALL,
            size=BLOCK,
        )

    def write_table(self) -> None:
        """Write down the addresses that the last call saw, if there was one."""
        if not self._found:
            return
        wheres = torch.zeros(len(self._wheres), dtype=torch.int64)
        counts = torch.zeros(len(self._wheres), dtype=torch.int32)
        halves = torch.zeros(len(self._wheres), dtype=torch.int32)
        for slot, (address, is_half) in zip(self._slots, self._found, strict=True):
            count = slot.shape.numel()
            first, blocks = slot.begin // BLOCK, -(-count // BLOCK)
            places = torch.arange(blocks)
            wheres[first : first + blocks] = address + places * BLOCK * (2 if is_half else 4)
            counts[first : first + blocks] = (count - places * BLOCK).clamp(max=BLOCK).int()
            halves[first : first + blocks] = int(is_half)
        self._wheres.copy_(wheres)
        self._counts.copy_(counts)
        self._halves.copy_(halves)


def publish(values: Tensor, seen: Tensor, limits: Tensor | None, factors: Tensor | None) -> None:
    """As `flat.publish`."""
    _publish_kernel[(len(seen) // BLOCK,)](
        values,
        seen,
        values if limits is None else limits,
        values if factors is None else factors,
        has_limits=limits is not None,
        has_factors=factors is not None,
        size=BLOCK,
    )
