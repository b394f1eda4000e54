"""Measure one federated round side by side: `make bench-others`. Prints tables and writes JSON.

In every pass each contender runs once, in a process of its own, in an order that rotates from pass to pass.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.others.clock import MARK, WARM
from benchmarks.others.workload import BATCH, WORKERS

ROOT = Path(__file__).parents[2]
OURS, OTHERS = sys.executable, str(ROOT / ".venv-others" / "bin" / "python")
TORCHRUN = (OTHERS, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORKERS}")
SEVERAL = ("--workers", str(WORKERS))
CONTENDERS: Mapping[str, tuple[str, ...]] = {
    "plain loop": (OURS, "-m", "benchmarks.others.plain"),
    "two bare workers": (OURS, "-m", "benchmarks.others.bare", *SEVERAL),
    "raffm serial": (OURS, "-m", "benchmarks.others.ours"),
    "raffm pooled": (OURS, "-m", "benchmarks.others.ours", *SEVERAL),
    "pfl": (OTHERS, "-m", "benchmarks.others.pfl"),
    "pfl, 2 workers": (*TORCHRUN, "-m", "benchmarks.others.pfl", *SEVERAL),
    "Flower, 1 actor": (OTHERS, "-m", "benchmarks.others.flower"),
    "Flower, 2 actors": (OTHERS, "-m", "benchmarks.others.flower", *SEVERAL),
}
WORKLOADS = {"(a) 5 steps a client": 5 * BATCH, "(b) 1 step a client": BATCH}
BURNT = 0.5
BURN = f"import time\nwhile time.process_time() < {BURNT}: pass"
QUIET = 0.85
"""The share of the workers' cores that must be free for seconds to be judged."""

SPREAD = 0.1
"""How far apart, as a share, the contenders' losses may lie."""


@dataclass
class Taken:
    """What one contender took: a list of rounds for every pass, and the cores that were free before it."""

    seconds: list[list[float]] = field(default_factory=list)
    cpu: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)

    def middle(self, what: str) -> float:
        """The median of all rounds of all passes."""
        return statistics.median(value for rounds in getattr(self, what) for value in rounds)


@dataclass(frozen=True)
class Claim:
    """A ratio of two contenders' medians, and what it should be; `passes` holds the same ratio pass by pass."""

    what: str
    measured: float
    limit: float
    at_most: bool
    passes: list[float]
    is_quiet: bool

    @property
    def holds(self) -> bool | None:
        """Whether it is as it should be; None where other work on the machine forbids to say."""
        if not self.is_quiet:
            return None
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=3, help="passes over all contenders (default 3)")
    parser.add_argument("--rounds", type=int, default=30, help="counted rounds of every run (default 30)")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="some contenders alone")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/others/results.json"), help="where the JSON goes")
    options = parser.parse_args()

    console, found = Console(), {name: {contender: Taken() for contender in options.only} for name in WORKLOADS}
    for turn in range(options.passes):
        for name, samples in WORKLOADS.items():
            for contender in rotated(options.only, turn * 3):
                console.print(f"pass {turn + 1}, {name}: {contender}")
                run(CONTENDERS[contender], samples, options.rounds, found[name][contender])
    claims = {name: claims_of(taken, samples) for (name, samples), taken in zip(WORKLOADS.items(), found.values(), strict=True)}
    for name, taken in found.items():
        show(console, name, taken, claims[name])
    options.out.write_text(json.dumps(content(options, found, claims), indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {options.out}")


def rotated(contenders: Sequence[str], by: int) -> list[str]:
    """The same contenders, beginning elsewhere."""
    by %= len(contenders)
    return [*contenders[by:], *contenders[:by]]


def run(command: Sequence[str], samples: int, rounds: int, taken: Taken) -> None:
    """Run one contender and add what it took."""
    environment = {
        **os.environ,
        MARK: uuid.uuid4().hex,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    taken.cores.append(free_cores())
    told = ["--samples", str(samples), "--rounds", str(WARM + rounds + 1)]
    for _ in range(3):  # torchrun's processes abort now and then while they end
        done = subprocess.run([*command, *told], env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        if not done.returncode:
            break
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    taken.seconds.append([line["seconds"] for line in lines[:-1]])
    taken.cpu.append([line["cpu"] for line in lines[:-1]])
    taken.losses.append(lines[-1]["loss"])


def free_cores() -> float:
    """How many cores two busy processes of this session get together: what forked workers can hope for.

    The load average does not tell. Linux shares cores between sessions (`sched_autogroup`): beside a busy one, all forked
    workers of ours get one core together, but those that torchrun and Flower detach get a share each.
    """
    begin = time.perf_counter()
    burners = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(WORKERS)]
    for burner in burners:
        burner.wait()
    return WORKERS * BURNT / (time.perf_counter() - begin)


def claims_of(found: Mapping[str, Taken], samples: int) -> list[Claim]:
    """The ratios that we promise, of those that ran."""
    far = 1.7 if samples > BATCH else 3.0
    wanted = [
        ("raffm serial", "pfl", "seconds", 1.05, True),
        ("raffm pooled", "pfl, 2 workers", "seconds", 1.05, True),
        ("Flower, 1 actor", "raffm serial", "seconds", far, False),
        ("Flower, 2 actors", "raffm pooled", "seconds", far, False),
        ("raffm serial", "plain loop", "cpu", 1.05, True),
        ("raffm pooled", "two bare workers", "cpu", 1.1, True),
        ("raffm pooled", "two bare workers", "seconds", 1.1, True),
    ]
    return [
        claim(found[one], found[other], f"{one} / {other}, {what}", what, limit, at_most)
        for one, other, what, limit, at_most in wanted
        if one in found and other in found
    ]


def claim(one: Taken, other: Taken, name: str, what: str, limit: float, at_most: bool) -> Claim:
    """One ratio, over all passes and in each."""
    pairs = zip(getattr(one, what), getattr(other, what), strict=True)
    each = [statistics.median(mine) / statistics.median(theirs) for mine, theirs in pairs]
    is_quiet = what == "cpu" or min(*one.cores, *other.cores) >= QUIET * WORKERS
    return Claim(name, one.middle(what) / other.middle(what), limit, at_most, each, is_quiet)


def apart(found: Mapping[str, Taken]) -> float:
    """How far apart the contenders' final losses lie, as a share of the least."""
    means = [statistics.fmean(taken.losses) for taken in found.values()]
    return max(means) / min(means) - 1


def show(console: Console, name: str, found: Mapping[str, Taken], claims: Sequence[Claim]) -> None:
    """Two tables: what was taken, and the ratios."""
    table = Table("contender", "median s", "least s", "CPU s", "final loss", title=f"one round of 10 clients, {name}")
    for contender, taken in found.items():
        least = min(min(rounds) for rounds in taken.seconds)
        numbers = (taken.middle("seconds"), least, taken.middle("cpu"), statistics.fmean(taken.losses))
        table.add_row(contender, *(f"{number:.4f}" for number in numbers))
    console.print(table)
    table = Table("ratio", "measured", "limit", "passes", "")
    for entry in claims:
        limit = f"{'<=' if entry.at_most else '>='} {entry.limit:.2f}"
        passes = " ".join(f"{value:.2f}" for value in entry.passes)
        verdict = {True: "holds", False: "MISSED", None: "not judged: the machine was busy"}[entry.holds]
        table.add_row(entry.what, f"{entry.measured:.2f}", limit, passes, verdict)
    console.print(table)
    console.print(f"losses lie {apart(found):.1%} apart: {'the same work' if apart(found) <= SPREAD else 'NOT THE SAME WORK'}")


def content(
    options: argparse.Namespace, found: Mapping[str, Mapping[str, Taken]], claims: Mapping[str, Sequence[Claim]]
) -> dict[str, object]:
    """Everything, for the JSON file."""
    return {
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "passes": options.passes,
        "rounds": options.rounds,
        "workloads": {
            name: {
                "contenders": {
                    contender: {
                        "median_seconds": taken.middle("seconds"),
                        "least_seconds": min(min(rounds) for rounds in taken.seconds),
                        "median_cpu_seconds": taken.middle("cpu"),
                        **asdict(taken),
                    }
                    for contender, taken in taken_by.items()
                },
                "ratios": [{**asdict(entry), "holds": entry.holds} for entry in claims[name]],
                "losses_apart": apart(taken_by),
            }
            for name, taken_by in found.items()
        },
    }


if __name__ == "__main__":
    main()
