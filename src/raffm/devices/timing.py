"""How long a call takes on this machine, and how much memory a process needs for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

WARM_UP, REPEATS, SECONDS = 3, 30, 2.0


@dataclass(frozen=True)
class Timing:
    """Seconds of a call: the median, and the tenth and ninetieth percentile."""

    median: float
    low: float
    high: float
    repeats: int


def timed(call: Callable[[], object], repeats: int = REPEATS, seconds: float = SECONDS, warm_up: int = WARM_UP) -> Timing:
    """Time a call, after some that do not count: so many times, or as often as fits into so many seconds, at least 3."""
    for _ in range(warm_up):
        call()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < 3 or (len(taken) < repeats and time.perf_counter() < end):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    low, median, high = np.percentile(taken, (10, 50, 90)).tolist()
    return Timing(median, low, high, len(taken))
