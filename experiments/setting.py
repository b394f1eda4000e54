"""FIARSE's published setting, tested honestly: CIFAR-10, ResNet-18, four sizes; methods, rates to choose from, final runs.

At scale "cpu" with a small ResNet and three sizes, at "smoke" so small that runs only show that they run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.comparing import mean_of
from experiments.options import SMOKE_NOTE
from experiments.running import Content, Runs, changed
from raffm.settings import read_file

HERE = Path(__file__).parent

RATES = (0.03, 0.1, 0.3)
PUBLISHED_RATE = 0.1
"""Run beside the one that the rule picks, and by the runs that do as the published code does."""

PLAIN = {"scaler": False, "masked_loss": False}

METHODS: Mapping[str, Content] = {
    "nested": {"name": "nested"},
    "fiarse": {"name": "fiarse"},
    "smallest-balanced": {"name": "smallest-for-all", "shapes": "balanced"},
    "heterofl": {"name": "heterofl", **PLAIN},
    "smallest-uniform": {"name": "smallest-for-all"},
    "fedavg": {"name": "fedavg"},
    "fedavg-capable": {"name": "fedavg-capable"},
    "heterofl-both": {"name": "heterofl"},
    "fedrolex": {"name": "fedrolex", **PLAIN},
    "scalefl": {"name": "scalefl"},
    "fiarse-stages": {"name": "fiarse", "scope": "part"},
    "pruning-greedy": {"name": "pruning-greedy"},
    "fiarse-structured": {"name": "fiarse-structured"},
}

COMPARED = ("nested", "fiarse", "smallest-balanced", "heterofl")
"""Those that run with three seeds."""

REFERENCES = ("smallest-uniform", "fedavg", "fedavg-capable")
"""Lines to compare with."""

RATED_AS = {"fiarse-stages": "fiarse", "pruning-greedy": "fiarse", "fiarse-structured": "fiarse", "heterofl-both": "heterofl"}
"""Variants take the rate of what they vary."""

SMOKE: Content = {
    "rounds": 2,
    "model": {"widths": [16, 32], "depths": [1, 1]},
    "data": {"source": "digits", "clients": 12},
    "fleet": {"tiers": "1, 1/4"},
    "local": {"steps": 2},
    "participation": {"clients": 6},
    "evaluate": {"every": 1, "last": 1, "batch": 500},
    "backend": {"name": "serial", "precision": "float32"},
}

CPU: Content = {
    "model": {"widths": [16, 32, 64, 128], "depths": [1, 1, 1, 1]},
    "fleet": {"tiers": "1, 1/4, 1/16"},
    "local": {"steps": 40},
    "evaluate": {"every": 10},
    "backend": {"name": "pooled", "precision": "float32"},
}

NOTES = {
    "smoke": SMOKE_NOTE,
    "cpu": "A ResNet of a quarter of the widths and half of the blocks, three sizes, 40 local steps, one rate.",
    "full": "",
}
"""What tables begin with."""

CHANGES: Mapping[str, Content] = {"full": {}, "cpu": CPU, "smoke": SMOKE}

MOST_SEEDS = {"full": 3, "cpu": 2, "smoke": 1}


def base_of(scale: str) -> dict[str, Any]:
    """What all runs share."""
    return changed(read_file(HERE / "setting.toml"), CHANGES[scale])


def with_method(method: Content, rate: float) -> dict[str, Any]:
    """A method at a rate."""
    return {"method": dict(method), "local": {"lr": rate}}


def grid(scale: str, method: str) -> dict[float, tuple[str, Content]]:
    """A run for every rate, with a tenth of the examples held out."""
    rounds = 1 if scale == "smoke" else 50
    held = {"rounds": rounds, "data": {"validation": 0.1}, "evaluate": {"last": 3, "every": min(5, rounds)}}
    base = changed(base_of(scale), held)
    return {rate: (f"rate-{method}-{rate}", changed(base, with_method(METHODS[method], rate))) for rate in RATES}


def seeds(scale: str, method: str) -> Sequence[int]:
    """Three for what is compared, one for the rest; fewer at smaller scales."""
    return range(MOST_SEEDS[scale] if method in COMPARED else 1)


def finals(scale: str, method: str, rate: float) -> dict[str, Content]:
    """The runs of a method, at the rate that was found for it."""
    base = changed(base_of(scale), with_method(METHODS[method], rate))
    return {f"{method}-seed{seed}": changed(base, {"seed": seed}) for seed in seeds(scale, method)}


def rate_of(runs: Runs, scale: str, method: str) -> float:
    """The rate that is best on held-out examples after some rounds: last models, mean over sizes and evaluations.

    On a CPU nothing is tried: it is the published one.
    """
    if scale == "cpu":
        return PUBLISHED_RATE
    scores = {}
    for rate, (name, content) in grid(scale, RATED_AS.get(method, method)).items():
        scores[rate] = mean_of(runs.of(name, content), part="validation")
        print(f"{name}: {scores[rate]:.2f} on held-out examples", flush=True)
    return max(scores, key=lambda rate: scores[rate])
