"""Memory that processes share: one anonymous map, inherited by fork, cut into tensors."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

ALIGNED = 64
"""Bytes: tensors begin where vector instructions like them to."""


class Block:
    """A shared block with room for tensors of given shapes, by name."""

    def __init__(self, like: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        needed = sum(_rounded(tensor.numel() * (dtype or tensor.dtype).itemsize) for tensor in like.values())
        self._memory = mmap.mmap(-1, max(needed, ALIGNED))
        self.tensors: dict[str, Tensor] = {}
        begin = 0
        for name, tensor in like.items():
            self.tensors[name] = self._cut(begin, tensor.shape, dtype or tensor.dtype)
            begin += _rounded(tensor.numel() * (dtype or tensor.dtype).itemsize)

    def _cut(self, begin: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if not shape.numel():
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=shape.numel(), offset=begin).view(shape)


def _rounded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


@torch.no_grad()
def move_into(block: Block, tensors: Mapping[str, Tensor]) -> None:
    """Let a model's own tensors live in a shared block from now on, values kept."""
    for name, tensor in tensors.items():
        block.tensors[name].copy_(tensor)
        tensor.data = block.tensors[name]


@torch.no_grad()
def move_out(tensors: Iterable[Tensor]) -> None:
    """Give tensors memory of their own again."""
    for tensor in tensors:
        tensor.data = tensor.data.clone()
