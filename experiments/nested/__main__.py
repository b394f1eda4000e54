"""Nested against masks, prefixes and the small model alone, on CIFAR-10 with ResNet-18.

python -m experiments.nested --scale smoke      # minutes on a CPU
python -m experiments.nested --scale full       # hours on a GPU; what is in `results` is not run again
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.running import Runs, changed, tail_mean
from raffm.settings import read_file

HERE = Path(__file__).parent
RATES = (0.03, 0.1, 0.3)
SEEDS = (0, 1, 2)

METHODS: dict[str, dict[str, Any]] = {
    "fiarse": {"name": "fiarse"},
    "heterofl": {"name": "heterofl", "scaler": False, "masked_loss": False},
    "smallest-balanced": {"name": "smallest-for-all", "shapes": "balanced"},
    "smallest-uniform": {"name": "smallest-for-all"},
}

SMOKE = {
    "rounds": 2,
    "model": {"widths": [16, 32], "depths": [1, 1]},
    "data": {"clients": 8},
    "fleet": {"tiers": "1, 1/4"},
    "local": {"steps": 2},
    "participation": {"clients": 4},
    "evaluate": {"every": 1, "last": 1},
    "backend": {"name": "serial", "precision": "float32"},
}


def main() -> None:
    """Find the rates, then run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=("smoke", "full"), default="smoke")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--what", nargs="+", default=["rates", "final"], choices=("rates", "final"))
    parser.add_argument("--runs", type=Path, default=None, help="where runs go (default runs/nested-SCALE)")
    parser.add_argument("--results", type=Path, default=None, help="where results go (default: beside this file)")
    options = parser.parse_args()
    folder = options.runs or Path("runs") / f"nested-{options.scale}"
    is_smoke = options.scale == "smoke"
    runs = Runs(folder, options.results or (folder / "results" if is_smoke else HERE / "results"))
    base = changed(read_file(HERE / "base.toml"), SMOKE if is_smoke else {})
    for method in options.methods:
        rate = best_rate(runs, base, method, 1 if is_smoke else 50)
        print(f"{method}: rate {rate}", flush=True)
        for seed in options.seeds[: 1 if is_smoke else None] if "final" in options.what else ():
            content = changed(base, {"method": METHODS[method], "seed": seed, "local": {"lr": rate}})
            print(line(method, seed, runs.of(f"{method}-seed{seed}", content)), flush=True)


def best_rate(runs: Runs, base: dict[str, Any], method: str, rounds: int) -> float:
    """The rate whose last model is best on held-out examples after some rounds, in the mean over sizes and evaluations."""
    scores = {}
    for rate in RATES:
        held = {"rounds": rounds, "data": {"validation": 0.1}, "evaluate": {"last": 3, "every": min(5, rounds)}}
        content = changed(base, held, {"method": METHODS[method], "local": {"lr": rate}})
        found = runs.of(f"rate-{method}-{rate}", content)
        plain = [size["name"] for size in found["sizes"] if not size["name"].endswith("average")]
        scores[rate] = fmean(tail_mean(found, size, part="validation") for size in plain)
        print(f"  {method} at {rate}: {100 * scores[rate]:.2f} on held-out examples", flush=True)
    return max(scores, key=lambda rate: scores[rate])


def line(method: str, seed: int, found: dict[str, Any]) -> str:
    """The accuracies of a run by size, and their means without and with the average."""
    names = [size["name"] for size in found["sizes"]]
    last = [100 * tail_mean(found, name) for name in names if not name.endswith("average")]
    other = [100 * tail_mean(found, name) for name in names if name.endswith("average")]
    both = (f"{' '.join(f'{each:.1f}' for each in several)} mean {fmean(several):.2f}" for several in (last, other))
    return f"{method} seed {seed}: {' | average '.join(both)}"


if __name__ == "__main__":
    main()
