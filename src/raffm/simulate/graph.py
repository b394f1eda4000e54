"""The step of a lane as a CUDA graph: recorded once, compared with the plain step, replayed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from raffm.notices import notice
from raffm.simulate.lane import Lane
from raffm.simulate.sheet import Passes

TINY = 1e-30
"""Below this a length is nothing."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """The graph of a step, and the tables on the device that it reads, which must live as long."""

    graph: torch.cuda.CUDAGraph
    tables: object


def with_kernels(lane: Lane, with_norms: bool) -> list[Any]:
    """Give a lane the passes that are single kernels, where Triton is installed; those that collect have tables to fill."""
    if not _has_triton():
        return []
    from raffm.simulate import kernels, norms

    collectors = [kernels.Collector(sheet.slots, len(sheet.values), sheet.device) for sheet in lane.sheets]
    for sheet, collector in zip(lane.sheets, collectors, strict=True):
        sheet.passes = Passes(collector, kernels.publish, norms.normalise if with_norms else None)
    return collectors


@cache
def _has_triton() -> bool:
    """Whether kernels can be made; says so once if not."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        notice(f"Triton cannot be imported ({error}): the passes of a captured step are torch's own, which are more.")
        return False
    return True


def recorded(lane: Lane, collectors: Sequence[Any], turn: int) -> torch.cuda.CUDAGraph:
    """The graph of a lane's step."""
    graph = torch.cuda.CUDAGraph()
    with _own_workspace():
        graph.capture_begin()
        try:
            lane.step(turn)
        except BaseException:
            with suppress(RuntimeError):  # says that the capture is broken
                graph.capture_end()
            raise
        graph.capture_end()
    for collector in collectors:
        collector.write_table()
    return graph


@contextmanager
def _own_workspace() -> Iterator[None]:
    """Have cuBLAS take new memory to work in, and forget it afterwards.

    It keeps one piece a stream. Graphs captured on the same stream would share it, and be replayed beside each other: products
    that count their parts in there come out wrong, or wait for good.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def apart_when_replayed(lane: Lane, graph: torch.cuda.CUDAGraph, before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """How far a replayed step ends from the plain one: weights relative to how far they moved, all else to its length."""
    torch._foreach_copy_(lane.state(), list(before))
    graph.replay()
    lengths = [after[0] - before[0], *after[1:]]
    weighed = [after[1].abs() if lane.is_sign_like else None, *(None for _ in after[1:])]
    compared = zip(lane.state(), after, lengths, weighed, strict=True)
    return max(_apart(found - plain, length, weights) for found, plain, length, weights in compared)


def _apart(gap: Tensor, length: Tensor, weights: Tensor | None) -> float:
    """How long a gap is next to a length; elements count by their weights."""
    gap, length = (each.float() if weights is None else each.float() * weights for each in (gap, length))
    found = float(gap.norm() / length.norm().clamp_min(TINY))
    return math.inf if math.isnan(found) else found  # `max` passes over what is no number
