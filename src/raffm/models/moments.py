"""Statistics of batch norms from moments that clients compute on their own data: no example leaves its client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Run = Iterable[None]


@dataclass(frozen=True, eq=False)
class Moments:
    """Of what one batch norm saw: how many values a channel, their sum and the sum of their squares (float64)."""

    count: float
    total: Tensor
    squares: Tensor

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> Tensor:
        """The mean of every channel."""
        return self.total / self.count

    @property
    def variance(self) -> Tensor:
        """The variance of every channel, over all values together."""
        return (self.squares / self.count - self.mean.square()).clamp(min=0)


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """The batch norms of a module that keep statistics, by name."""
    named = module.named_modules()
    return {name: child for name, child in named if isinstance(child, _BatchNorm) and child.running_mean is not None}


@torch.no_grad()
def moments(module: nn.Module, runs: Run, parts: int = 1) -> dict[str, Moments]:
    """What every batch norm sees while `runs` runs the module.

    A batch consists of so many equal parts, one after the other, each of which is normalised by its own statistics, as if
    it had come alone. All else is in evaluation mode, and nothing in the module changes.
    """
    seen: dict[str, Moments] = {}
    with _watching(module, seen, parts):
        for _ in runs:
            pass
    return seen


@contextmanager
def _watching(module: nn.Module, seen: dict[str, Moments], parts: int) -> Iterator[None]:
    norms = batch_norms(module)
    was_training = module.training
    module.eval()
    for name, norm in norms.items():
        norm.forward = _recorder(name, norm, seen, parts)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for norm in norms.values():
            del norm.forward
        module.train(was_training)


def _recorder(name: str, norm: _BatchNorm, seen: dict[str, Moments], parts: int) -> Any:
    """Note sums, and normalise every part by its own statistics."""

    def forward(values: Tensor) -> Tensor:
        split = values.reshape(parts, -1, *values.shape[1:])  # (parts, examples, channels, ...)
        wide = split if values.dtype == torch.float64 else split.float()
        seen_together = (1, *range(3, split.dim()))
        mean = wide.mean(seen_together, keepdim=True)
        centred = wide - mean
        variance = centred.square().mean(seen_together, keepdim=True)  # in two passes: `var` is many times slower on a CPU
        count = wide.numel() // mean.numel()
        own, spread = mean.double().flatten(1), variance.double().flatten(1)
        found = Moments(float(parts * count), (own * count).sum(0), ((spread + own.square()) * count).sum(0))
        seen[name] = seen[name] + found if name in seen else found
        normed = (centred * torch.rsqrt(variance + norm.eps)).to(values.dtype).flatten(0, 1)
        if norm.affine:
            by_channel = (-1, *(1 for _ in values.shape[2:]))
            normed = normed * norm.weight.view(by_channel) + norm.bias.view(by_channel)
        return normed

    return forward


def pooled(parts: Iterable[Mapping[str, Moments]]) -> dict[str, Moments]:
    """The moments of all clients' data together."""
    total: dict[str, Moments] = {}
    for part in parts:
        for name, found in part.items():
            total[name] = total[name] + found if name in total else found
    return total


@torch.no_grad()
def calibrate(module: nn.Module, found: Mapping[str, Moments]) -> None:
    """Put pooled moments into the batch norms as their running statistics."""
    for name, norm in batch_norms(module).items():
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean.copy_(found[name].mean)
        norm.running_var.copy_(found[name].variance)
