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
def moments(module: nn.Module, runs: Run) -> dict[str, Moments]:
    """What every batch norm sees while `runs` runs the module; each batch is normalised by its own statistics.

    All else is in evaluation mode, and nothing in the module changes.
    """
    seen: dict[str, Moments] = {}
    with _watching(module, seen):
        for _ in runs:
            pass
    return seen


@contextmanager
def _watching(module: nn.Module, seen: dict[str, Moments]) -> Iterator[None]:
    norms = batch_norms(module)
    was_training = module.training
    before = {name: (norm.momentum, norm.num_batches_tracked) for name, norm in norms.items()}
    module.eval()
    hooks = []
    for name, norm in norms.items():
        norm.train()
        norm.momentum, norm.num_batches_tracked = 0.0, None  # batch statistics, and none of them kept
        hooks.append(norm.register_forward_pre_hook(_recorder(name, seen)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for name, norm in norms.items():
            norm.momentum, norm.num_batches_tracked = before[name]
        module.train(was_training)


def _recorder(name: str, seen: dict[str, Moments]) -> Any:
    def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        values = inputs[0].transpose(0, 1).flatten(1).double()  # (channels, values)
        found = Moments(float(values.shape[1]), values.sum(1), values.square().sum(1))
        seen[name] = seen[name] + found if name in seen else found

    return record


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
