"""Nested against masks, prefixes and the small model alone: CIFAR-10 with ResNet-18, and beyond.

python -m experiments.nested --scale smoke                               # minutes on a CPU: all of it, tiny
python -m experiments.nested --scale cpu                                 # hours on two cores: four methods, a small ResNet
python -m experiments.nested                                             # hours on a GPU; what is in `results` is not run again
python -m experiments.nested --what final --methods nested fiarse        # a part of it
python -m experiments.nested --what report                               # tables and plots from `results`, without a run
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.comparing import said
from experiments.nested import report
from experiments.nested.catalogue import LINES, PRETRAINED, Scale
from experiments.options import options_of, parser_of
from experiments.running import Content
from experiments.setting import COMPARED, finals, rate_of

HERE = Path(__file__).parent

RUNS = ("rates", "final", "beside", "ablation", "compute", "cifar100", "vit", "texts")

METHODS = tuple(dict.fromkeys((*LINES, *PRETRAINED)))


def main() -> None:
    """Run what is asked for and missing, then write tables and plots."""
    parser = parser_of(__doc__, RUNS)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, help="whose runs (default: all)")
    given = parser.parse_args()
    options = options_of(given, HERE)
    scale, runs = Scale(options.scale, options.runs.folder), options.runs
    tuned_parts = set(options.what) & {"rates", "final", "beside", "ablation", "compute", "cifar100"}
    tuned = [method for method in given.methods if method in (COMPARED if scale.name == "cpu" else LINES)]
    rates = {method: rate_of(runs, scale.name, method) for method in tuned} if tuned_parts else {}
    parts = options.what if options.scale != "cpu" else ["final", "finer", "slower"]
    for name, content in asked_for(scale, rates, parts, given.methods).items():
        print(said(name, runs.of(name, content)), flush=True)
    if "report" in options.what:
        report.write(options)


def asked_for(scale: Scale, rates: Mapping[str, float], parts: Sequence[str], methods: Sequence[str]) -> dict[str, Content]:
    """The runs of some parts of the experiment: of methods whose rates are known, and of methods on pretrained models."""
    found: dict[str, Content] = {}
    for method, rate in rates.items():
        found |= finals(scale.name, method, rate) if "final" in parts else {}
        found |= scale.beside(method, rate) if "beside" in parts else {}
        found |= scale.slower(method) if "slower" in parts else {}
    if "finer" in parts and "nested" in rates:
        found |= scale.finer(rates["nested"])
    if "ablation" in parts and "nested" in rates:
        found |= scale.ablation(rates["nested"])
    if "compute" in parts:
        found |= scale.bound(rates["nested"]) if "nested" in rates else {}
        found |= scale.longer(rates["heterofl"]) if "heterofl" in rates else {}
    found |= scale.cifar100(rates) if "cifar100" in parts else {}
    found |= scale.vit(methods) if "vit" in parts else {}
    return found | (scale.texts(methods) if "texts" in parts else {})


if __name__ == "__main__":
    main()
