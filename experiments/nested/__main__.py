"""Nested against masks, prefixes and the small model alone: CIFAR-10 with ResNet-18, and beyond.

python -m experiments.nested --scale smoke                               # minutes on a CPU: all of it, tiny
python -m experiments.nested --scale cpu                                 # an hour on two cores: four methods, a small ResNet
python -m experiments.nested                                             # hours on a GPU; what is in `results` is not run again
python -m experiments.nested --what final --methods nested fiarse        # a part of it
python -m experiments.nested --what report                               # tables and plots from `results`, without a run
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from experiments.nested import report
from experiments.nested.catalogue import COMPARED, METHODS, PROTOTYPE, Scale
from experiments.running import Content, Runs, is_average, tail_mean

HERE = Path(__file__).parent

NOTES = {
    "smoke": "Tiny models, a few rounds on digits: these figures show that everything runs, and nothing else.",
    "cpu": "A ResNet of a quarter of the widths and half of the blocks, three sizes, 40 steps, 60 rounds, one rate.",
    "full": "",
}

RUNS = ("rates", "final", "beside", "ablation", "compute", "cifar100", "vit", "texts")


def main() -> None:
    """Run what is asked for and missing, then write tables and plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=("smoke", "cpu", "full"), default="full")
    parser.add_argument("--what", nargs="+", default=(*RUNS, "report"), choices=(*RUNS, "report"))
    parser.add_argument("--methods", nargs="+", default=tuple(METHODS), choices=tuple(METHODS), help="whose rates and finals")
    parser.add_argument("--runs", type=Path, default=None, help="where runs go (default runs/nested-SCALE)")
    parser.add_argument("--results", type=Path, default=None, help="where results go (default: beside this file)")
    options = parser.parse_args()
    folder = options.runs or Path("runs") / f"nested-{options.scale}"
    out = options.results or {"smoke": folder, "cpu": HERE / "cpu", "full": HERE}[options.scale]
    scale, runs = Scale(options.scale, folder), Runs(folder, out / "results")
    is_tuned = set(options.what) & {"rates", "final", "beside", "ablation", "compute", "cifar100"}
    methods = [method for method in options.methods if scale.name != "cpu" or method in COMPARED]
    rates = {method: rate_of(runs, scale, method) for method in methods} if is_tuned else {}
    parts = options.what if options.scale != "cpu" else ["final"]
    for name, content in asked_for(scale, rates, parts).items():
        print(line(name, runs.of(name, content)), flush=True)
    if "report" in options.what:
        report.write(runs.results, out, NOTES[options.scale])


def rate_of(runs: Runs, scale: Scale, method: str) -> float:
    """The rate that was found for a method; on a CPU the prototype's."""
    return PROTOTYPE if scale.name == "cpu" else best_rate(runs, scale, method)


def best_rate(runs: Runs, scale: Scale, method: str) -> float:
    """The rate whose last model is best on held-out examples after some rounds, in the mean over sizes and evaluations."""
    scores = {}
    for rate, (name, content) in scale.grid(method).items():
        found = runs.of(name, content)
        sizes = [size["name"] for size in found["sizes"] if not is_average(size["name"])]
        scores[rate] = fmean(tail_mean(found, size, part="validation") for size in sizes)
        print(f"{name}: {100 * scores[rate]:.2f} on held-out examples", flush=True)
    return max(scores, key=lambda rate: scores[rate])


def asked_for(scale: Scale, rates: Mapping[str, float], parts: Sequence[str]) -> dict[str, Content]:
    """The runs of some parts of the experiment, for the methods whose rates are known."""
    found: dict[str, Content] = {}
    for method, rate in rates.items():
        found |= scale.finals(method, rate) if "final" in parts else {}
        found |= scale.beside(method, rate) if "beside" in parts else {}
    if "ablation" in parts and "nested" in rates:
        found |= scale.ablation(rates["nested"])
    if "compute" in parts:
        found |= scale.bound(rates["nested"]) if "nested" in rates else {}
        found |= scale.longer(rates["heterofl"]) if "heterofl" in rates else {}
    found |= scale.cifar100(rates) if "cifar100" in parts else {}
    found |= scale.vit() if "vit" in parts else {}
    return found | (scale.texts() if "texts" in parts else {})


def line(name: str, found: Content) -> str:
    """The accuracies of a run by size, and their means without and with the average."""
    sizes = [size["name"] for size in found["sizes"]]
    both = []
    for wanted in (False, True):
        scores = [100 * tail_mean(found, size) for size in sizes if is_average(size) is wanted]
        if scores:
            both.append(f"{' '.join(f'{each:.1f}' for each in scores)} mean {fmean(scores):.2f}")
    return f"{name}: {' | average '.join(both)}"


if __name__ == "__main__":
    main()
