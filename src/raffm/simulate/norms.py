"""Batch norms as two kernels forward and two backward, for CUDA with Triton; torch's take a dozen.

The kernels of small submodels are so short that a GPU is busy starting them. First every stretch of rows, an image's
places one after another, is summed by itself, then each program joins the sums that it needs.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-not-found"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDE = 64
"""Channels that a program handles, at most."""

TILE = 4096
"""Numbers that a program loads at a time."""

STRETCHES = 32
"""How many parts rows are summed in, at most."""

VECTOR = 8
"""Numbers that are loaded at once where channels are a multiple of it."""


def normalise(
    values: Tensor, weight: Tensor, bias: Tensor, eps: float, is_rectified: bool = False, beside: Tensor | None = None
) -> Tensor:
    """Images normalised by their own statistics; of tables with several weights and biases, by the first rows.

    What is `beside` them is added, and what is negative then becomes 0, if asked for.
    """
    normed: Tensor = _Normed.apply(values, weight, bias, eps, is_rectified, beside)
    return normed


@dataclass(frozen=True)
class _Grid:
    """How the rows and channels of an image batch are dealt to programs."""

    rows: int
    channels: int

    @property
    def wide(self) -> int:
        """Channels of a program."""
        return WIDE // 2 if 2 * self.channels <= WIDE else WIDE

    @property
    def long(self) -> int:
        """Rows that a program loads at a time."""
        return TILE // self.wide

    @property
    def length(self) -> int:
        """Rows of a stretch."""
        return max(self.long, -(-self.rows // STRETCHES))

    @property
    def unit(self) -> int:
        """What channels are known to be a multiple of."""
        return 1 if self.channels % VECTOR else VECTOR

    def programs(self, rows: int) -> tuple[int, int]:
        """One for so many rows, and for its channels."""
        return -(-self.rows // rows), -(-self.channels // self.wide)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """What kernels are told: rows, channels in units, rows of a stretch."""
        return self.rows, self.channels // self.unit, self.length

    @property
    def tile(self) -> tuple[int, int, int]:
        """What kernels are made for."""
        return self.unit, self.long, self.wide


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weight: Tensor, bias: Tensor, eps: float, is_rectified: bool, beside: Tensor | None
    ) -> Tensor:
        values = _laid(values)
        other = values if beside is None else _laid(beside)
        grid = _Grid(values.numel() // values.shape[1], values.shape[1])
        kind = beside is not None, is_rectified
        sums = torch.empty(2, STRETCHES, grid.channels, device=values.device)
        about = torch.empty(2, grid.channels, device=values.device)
        out = torch.empty_like(values)
        _moments[grid.programs(grid.length)](values, sums, *grid.sizes, STRETCHES, *grid.tile)
        _normalise[grid.programs(grid.long)](
            values, other, out, sums, weight, bias, about, eps, *grid.sizes, *kind, STRETCHES, *grid.tile
        )
        ctx.save_for_backward(values, weight, about, out if is_rectified else values)
        ctx.about = grid, kind, bias.dtype
        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, Tensor | None]:
        values, weight, about, result = ctx.saved_tensors
        grid, kind, dtype = ctx.about
        given = _laid(given)
        sums = torch.empty(2, STRETCHES, grid.channels, device=values.device)
        out, of_weight, of_bias = torch.empty_like(values), torch.empty_like(weight), torch.empty_like(weight, dtype=dtype)
        of_other = torch.empty_like(values) if kind[0] else out
        _products[grid.programs(grid.length)](given, result, values, about, sums, *grid.sizes, kind[1], STRETCHES, *grid.tile)
        tables = weight, of_weight, of_bias, weight.numel() // grid.channels - 1
        _spread[grid.programs(grid.long)](
            given, result, values, out, of_other, about, sums, *tables, *grid.sizes, *kind, STRETCHES, *grid.tile
        )
        return out, of_weight, of_bias, None, None, of_other if kind[0] else None


def _laid(images: Tensor) -> Tensor:
    """With channels as the fastest axis: rows of channels."""
    return images.contiguous(memory_format=torch.channels_last)


@triton.jit(do_not_specialize=["rows", "units", "length"])
def _moments(
    values,
    sums,
    rows,
    units,
    length,
    stretches: tl.constexpr,
    unit: tl.constexpr,
    long: tl.constexpr,
    wide: tl.constexpr,
):
    """The mean of every stretch, and the sum of squares around it; numbers are shifted by the first, which rounds less."""
    channels = units * unit
    part = tl.program_id(0)
    column = tl.program_id(1) * wide + tl.arange(0, wide)
    is_channel = column < channels
    begin = part * length
    end = tl.minimum(begin + length, rows)
    shift = tl.load(values + begin * channels + column, mask=is_channel, other=0.0).to(tl.float32)
    total = tl.zeros([wide], dtype=tl.float32)
    squares = tl.zeros([wide], dtype=tl.float32)
    for first in range(begin, end, long):
        row = first + tl.arange(0, long)
        is_there = (row < end)[:, None] & is_channel[None, :]
        found = tl.load(values + row[:, None] * channels + column[None, :], mask=is_there, other=0.0).to(tl.float32)
        moved = tl.where(is_there, found - shift[None, :], 0.0)
        total += tl.sum(moved, 0)
        squares += tl.sum(moved * moved, 0)
    count = (end - begin).to(tl.float32)
    tl.store(sums + part * channels + column, shift + total / count, mask=is_channel)
    tl.store(sums + (stretches + part) * channels + column, squares - total * total / count, mask=is_channel)


@triton.jit(do_not_specialize=["rows", "units", "length"])
def _normalise(
    values,
    beside,
    out,
    sums,
    weight,
    bias,
    about,
    eps,
    rows,
    units,
    length,
    has_beside: tl.constexpr,
    is_rectified: tl.constexpr,
    stretches: tl.constexpr,
    unit: tl.constexpr,
    long: tl.constexpr,
    wide: tl.constexpr,
):
    """Join the moments of all stretches, and normalise some rows by them; rounded where torch's own steps would round."""
    channels = units * unit
    column = tl.program_id(1) * wide + tl.arange(0, wide)
    is_channel = column < channels
    part = tl.arange(0, stretches)
    is_sum = (part * length < rows)[:, None] & is_channel[None, :]
    means = tl.load(sums + part[:, None] * channels + column[None, :], mask=is_sum, other=0.0)
    squares = tl.load(sums + (stretches + part)[:, None] * channels + column[None, :], mask=is_sum, other=0.0)
    counts = tl.maximum(tl.minimum(length, rows - part * length), 0).to(tl.float32)[:, None]
    mean = tl.sum(means * counts, 0) / rows
    apart = means - mean[None, :]
    variance = (tl.sum(squares, 0) + tl.sum(apart * apart * counts, 0)) / rows
    inverse = 1.0 / tl.sqrt(variance + eps)
    if tl.program_id(0) == 0:
        tl.store(about + column, mean, mask=is_channel)
        tl.store(about + channels + column, inverse, mask=is_channel)
    factor = inverse * tl.load(weight + column, mask=is_channel, other=0.0).to(tl.float32)
    offset = tl.load(bias + column, mask=is_channel, other=0.0).to(tl.float32)
    row = tl.program_id(0) * long + tl.arange(0, long)
    place = row[:, None] * channels + column[None, :]
    is_there = (row < rows)[:, None] & is_channel[None, :]
    found = tl.load(values + place, mask=is_there, other=0.0).to(tl.float32)
    normed = (found - mean[None, :]) * factor[None, :] + offset[None, :]
    if has_beside:
        other = tl.load(beside + place, mask=is_there, other=0.0).to(tl.float32)
        normed = (normed.to(out.dtype.element_ty).to(tl.float32) + other).to(out.dtype.element_ty).to(tl.float32)
    if is_rectified:
        normed = tl.where(normed < 0.0, 0.0, normed)
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _gradient(given, result, places, is_there, is_rectified: tl.constexpr):
    """That of what was normalised: nothing where the rectifier cut."""
    gradient = tl.load(given + places, mask=is_there, other=0.0).to(tl.float32)
    if is_rectified:
        gradient = tl.where(tl.load(result + places, mask=is_there, other=0.0).to(tl.float32) <= 0.0, 0.0, gradient)
    return gradient


@triton.jit(do_not_specialize=["rows", "units", "length"])
def _products(
    given,
    result,
    values,
    about,
    sums,
    rows,
    units,
    length,
    is_rectified: tl.constexpr,
    stretches: tl.constexpr,
    unit: tl.constexpr,
    long: tl.constexpr,
    wide: tl.constexpr,
):
    """The sums of every stretch: of gradients, and of gradients times what was normalised."""
    channels = units * unit
    part = tl.program_id(0)
    column = tl.program_id(1) * wide + tl.arange(0, wide)
    is_channel = column < channels
    begin = part * length
    end = tl.minimum(begin + length, rows)
    mean = tl.load(about + column, mask=is_channel, other=0.0)
    inverse = tl.load(about + channels + column, mask=is_channel, other=0.0)
    total = tl.zeros([wide], dtype=tl.float32)
    products = tl.zeros([wide], dtype=tl.float32)
    for first in range(begin, end, long):
        row = first + tl.arange(0, long)
        is_there = (row < end)[:, None] & is_channel[None, :]
        place = row[:, None] * channels + column[None, :]
        gradient = _gradient(given, result, place, is_there, is_rectified)
        found = tl.load(values + place, mask=is_there, other=0.0).to(tl.float32)
        total += tl.sum(gradient, 0)
        products += tl.sum(gradient * (found - mean[None, :]), 0)
    tl.store(sums + part * channels + column, total, mask=is_channel)
    tl.store(sums + (stretches + part) * channels + column, products * inverse, mask=is_channel)


@triton.jit(do_not_specialize=["others", "rows", "units", "length"])
def _spread(
    given,
    result,
    values,
    out,
    of_beside,
    about,
    sums,
    weight,
    of_weight,
    of_bias,
    others,
    rows,
    units,
    length,
    has_beside: tl.constexpr,
    is_rectified: tl.constexpr,
    stretches: tl.constexpr,
    unit: tl.constexpr,
    long: tl.constexpr,
    wide: tl.constexpr,
):
    """Join the sums of all stretches; the gradients of some rows, and once those of weights and biases."""
    channels = units * unit
    column = tl.program_id(1) * wide + tl.arange(0, wide)
    is_channel = column < channels
    part = tl.arange(0, stretches)
    is_sum = (part * length < rows)[:, None] & is_channel[None, :]
    total = tl.sum(tl.load(sums + part[:, None] * channels + column[None, :], mask=is_sum, other=0.0), 0)
    lower = (stretches + part)[:, None] * channels + column[None, :]
    products = tl.sum(tl.load(sums + lower, mask=is_sum, other=0.0), 0)
    if tl.program_id(0) == 0:
        tl.store(of_weight + column, products.to(of_weight.dtype.element_ty), mask=is_channel)
        tl.store(of_bias + column, total.to(of_bias.dtype.element_ty), mask=is_channel)
        for other in range(others):
            below = (other + 1) * channels + column
            nothing = tl.zeros([wide], dtype=tl.float32)
            tl.store(of_weight + below, nothing.to(of_weight.dtype.element_ty), mask=is_channel)
            tl.store(of_bias + below, nothing.to(of_bias.dtype.element_ty), mask=is_channel)
    mean = tl.load(about + column, mask=is_channel, other=0.0)
    inverse = tl.load(about + channels + column, mask=is_channel, other=0.0)
    factor = inverse * tl.load(weight + column, mask=is_channel, other=0.0).to(tl.float32)
    row = tl.program_id(0) * long + tl.arange(0, long)
    place = row[:, None] * channels + column[None, :]
    is_there = (row < rows)[:, None] & is_channel[None, :]
    gradient = _gradient(given, result, place, is_there, is_rectified)
    if has_beside:
        tl.store(of_beside + place, gradient.to(of_beside.dtype.element_ty), mask=is_there)
    found = tl.load(values + place, mask=is_there, other=0.0).to(tl.float32)
    normed = (found - mean[None, :]) * inverse[None, :]
    spread = factor[None, :] * (gradient - (total / rows)[None, :] - normed * (products / rows)[None, :])
    tl.store(out + place, spread.to(out.dtype.element_ty), mask=is_there)
