"""Times taken side by side: every repeat runs every contender once, in turn, so that load falls on all alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.progress import track


@dataclass(frozen=True)
class Times:
    """Milliseconds of one contender, one for each repeat."""

    name: str
    milliseconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.milliseconds)


def interleaved(contenders: Mapping[str, Callable[[], object]], repeats: int, title: str) -> dict[str, Times]:
    """Run all contenders in turn, `repeats` times, after one round of warming up."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in track(range(repeats + 1), title, transient=True):
        for name, run in contenders.items():
            gc.collect()
            begin = time.perf_counter()
            result = run()
            elapsed = (time.perf_counter() - begin) * 1e3
            del result
            if repeat:
                taken[name].append(elapsed)
    return {name: Times(name, tuple(times)) for name, times in taken.items()}


def ratio(times: Mapping[str, Times], first: str, second: str) -> float:
    """The median over repeats of first / second, each pair taken in the same repeat."""
    pairs = zip(times[first].milliseconds, times[second].milliseconds, strict=True)
    return statistics.median(one / other for one, other in pairs)
