"""The step of a lane as a CUDA graph: recorded once, compared with the plain step, replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from raffm.models.rounding import Precision
from raffm.notices import notice
from raffm.simulate.lane import Lane
from raffm.simulate.room import is_full, make_sure_of, taken
from raffm.simulate.sheet import Passes

TINY = 1e-30
"""Below this a length is nothing."""

CHECKED = 3
"""Steps of a graph that are compared with the plain step, each from where the plain one began."""

SPARE = 1.5
"""Room that is asked for before a capture, in what plain steps took: memory that runs out during a capture breaks it."""

TOLERANCE: Mapping[Precision, float] = {"float32": 1e-3, "tf32": 1e-2, "bfloat16": 5e-2}
"""How far the two may be apart after a step, relative to how far the weights moved."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """The graph of a step, and the tables on the device that it reads, which must live as long."""

    graph: torch.cuda.CUDAGraph
    tables: object
    draws: bool
    """Whether the step draws random numbers: those of several graphs would mix."""


class Refused(Exception):  # noqa: N818
    """A step is not captured, for a reason; said with what was found."""

    def __init__(self, reason: str, found: str = "") -> None:
        super().__init__(f"{reason} ({found})" if found else reason)
        self.reason = reason


class Recorder:
    """Records the steps of lanes, and gives out no graph that was not compared with the step run plainly."""

    def __init__(self, precision: Precision) -> None:
        """Compare as strictly as steps are precise."""
        self._tolerance = TOLERANCE[precision]
        self._has_norms = True  # kernels of our own, for as long as they agree with torch's

    def record(self, lane: Lane, turn: int, again: Callable[[], None]) -> Recorded:
        """The graph of a lane's step at a turn; `again` brings the lane to where its client begins."""
        found, apart = self._tried(lane, turn, again)
        if apart > self._tolerance and self._has_norms and lane.sheet.has_simple_norms:
            notice(f"a captured step differs from the plain one ({_worded(apart)}): batch norms are torch's own from now on.")
            self._has_norms = False
            del found  # its memory is wanted
            found, apart = self._tried(lane, turn, again)
        if apart > self._tolerance:
            raise Refused("a captured step differs from the plain one", _worded(apart))
        return found

    def _tried(self, lane: Lane, turn: int, again: Callable[[], None]) -> tuple[Recorded, float]:
        """A graph, and how far over a few steps it ends from the plain step."""
        source = torch.cuda.default_generators[torch.cuda.current_device()]
        for sheet in lane.sheets:
            sheet.passes = Passes()
        torch.cuda.synchronize()  # nobody may run beside
        before = taken()
        plain = _run_plainly(lane, turn, again)
        collectors = with_kernels(lane, self._has_norms)
        again()
        drawn = source.get_offset()
        lane.step(turn)  # has the kernels compiled
        make_sure_of(int(SPARE * before.most_since()))
        draws = source.get_offset() != drawn
        try:
            graph = recorded(lane, collectors, turn)
        except RuntimeError as error:
            if is_full(error):
                raise
            raise Refused("it cannot be captured", str(error).splitlines()[0]) from error
        again()
        apart = max(apart_when_replayed(lane, graph, old, new) for old, new in pairwise(plain))
        return Recorded(graph, collectors, draws), apart


def _worded(apart: float) -> str:
    return f"by {apart:.1e} of its length"


def _run_plainly(lane: Lane, turn: int, again: Callable[[], None]) -> list[list[Tensor]]:
    """All that the first steps of a client change, before the first and after each."""
    again()
    found = [[tensor.clone() for tensor in lane.state()]]
    for _ in range(min(CHECKED, lane.fill_steps, lane.steps)):
        lane.step(turn)
        found.append([tensor.clone() for tensor in lane.state()])
    return found


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
