"""Seconds and CPU seconds of every round, by one rule for all contenders.

A contender's processes are those whose environment carries its mark, and their children. CPU seconds come from their
CPU clocks in nanoseconds, those of ended threads included. Reading the clocks is not counted in the seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TextIO

MARK = "RAFFM_BENCH_MARK"
WARM = 3
"""Rounds that are not counted. The last round is not counted either: some contenders finish the run in it."""


class Clock:
    """Call `tick` at the end of every round, and `report` at the end of the run."""

    def __init__(self) -> None:
        self._rounds: list[tuple[float, float, float]] = []  # (seconds at the end, CPU seconds, seconds when read)
        self._cpu: dict[int, float] = {}

    def tick(self) -> None:
        """A round has ended."""
        end = time.perf_counter()
        if len(self._rounds) + 1 == WARM:
            self._cpu = dict.fromkeys(marked(os.environ[MARK]), 0.0)
        for process in self._cpu:
            with suppress(OSError):  # one that has ended keeps what it had
                self._cpu[process] = time.clock_gettime((~process << 3) | 2)  # clock_getcpuclockid(3)
        self._rounds.append((end, sum(self._cpu.values()), time.perf_counter()))

    def report(self, loss: float, stream: TextIO = sys.stdout) -> None:
        """One JSON line for every counted round, and one with the loss at the end."""
        counted = self._rounds[WARM - 1 : -1]
        for (_, cpu_before, begin), (end, cpu, _) in pairwise(counted):
            stream.write(json.dumps({"seconds": end - begin, "cpu": cpu - cpu_before}) + "\n")
        stream.write(json.dumps({"loss": loss, "processes": len(self._cpu)}) + "\n")
        stream.flush()


def marked(mark: str) -> list[int]:
    """All processes that carry a mark, and their descendants (some overwrite their environment)."""
    parents = dict(filter(None, map(_parent, Path("/proc").glob("[0-9]*"))))
    found = {process for process in parents if _carries(process, mark)}
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def _parent(folder: Path) -> tuple[int, int] | None:
    try:
        return int(folder.name), int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _carries(process: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def options() -> argparse.Namespace:
    """What every contender is told: `samples` a client, `rounds` altogether, and how many `workers`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--workers", type=int, default=1)
    return parser.parse_args()
