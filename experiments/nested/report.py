"""Tables and plots of the experiment, from what lies in `results`."""

from __future__ import annotations

from experiments.comparing import (
    TITLES,
    Found,
    accuracies,
    by_round,
    by_work,
    costs,
    differences,
    known,
    rates,
    seeds_of,
    single,
    times,
)
from experiments.nested.catalogue import ABLATION, LINES
from experiments.options import Options
from experiments.running import Content, found_in
from experiments.setting import COMPARED, NOTES, RATES
from experiments.tables import joined, write_report

WITHOUT = {
    "uniform": "uniform shapes",
    "alone": "no nested steps",
    "shared-norms": "shared norms",
    "labels": "no teacher (a = 0)",
    "teacher": "the teacher alone (a = 1)",
    "one": "one drawn shape a step",
    "spp": "indices ranked by SPP",
}


def write(options: Options) -> None:
    """Write the tables and plots of what is there."""
    found = found_in(options.runs.results)
    runs = known({method: found.get(f"{method}-seed0") for method in LINES})
    write_report(options.out, text(options), {"by_round": by_round(runs), "by_work": by_work(runs)} if runs else {})


def text(options: Options) -> str:
    """All tables."""
    return joined([NOTES[options.scale], *_parts(found_in(options.runs.results))])


def _parts(found: Found) -> list[str]:
    finals = {method: seeds_of(found, method) for method in LINES}
    finer = {"nested-finer": seeds_of(found, "nested-finer")}
    beside = {method: seeds_of(found, f"{method}-at0.1") for method in LINES}
    early = {method: [run] for method, run in known({each: found.get(f"rate-{each}-0.1") for each in LINES}).items()}
    return [
        rates(found, LINES, RATES),
        accuracies("After 50 rounds at the rate 0.1, a tenth of the examples held out: accuracy on the test set", early),
        accuracies("CIFAR-10: accuracy in percent on the test set, mean of the last evaluations", finals | finer),
        accuracies("The same at the rate 0.1, where another was found", beside),
        costs(found, LINES),
        differences("nested", finals, COMPARED[1:]),
        times(finals),
        single("Nested without one of its ideas, or with another in its place (seed 0)", _ablation(found)),
        single("Equal work, and work that binds (seed 0)", _compute(found)),
        *(single(title, _beyond(found, prefix)) for prefix, title in BEYOND.items()),
    ]


BEYOND = {
    "cifar100": "CIFAR-100, ResNet-18, 50 rounds (seed 0)",
    "vit": "CIFAR-10, a ViT pretrained on CIFAR-100, 50 rounds (seed 0)",
    "texts": "AG News subset, MiniLM, 50 rounds (seed 0)",
}


def _ablation(found: Found) -> dict[str, Content]:
    runs = {"nested": found.get("nested-seed0"), **{WITHOUT[name]: found.get(f"ablation-{name}") for name in ABLATION}}
    return known(runs) if "ablation-uniform" in found else {}


def _compute(found: Found) -> dict[str, Content]:
    runs = {
        "nested on uniform shapes, 100 steps": found.get("ablation-uniform"),
        "HeteroFL, 100 steps": found.get("heterofl-seed0"),
        "HeteroFL, 132 steps": found.get("heterofl-longer"),
        "nested, at most the FLOPs of uniform shapes": found.get("nested-bound"),
    }
    return known(runs) if "heterofl-longer" in found else {}


def _beyond(found: Found, prefix: str) -> dict[str, Content]:
    return known({title: found.get(f"{prefix}-{name}") for name, title in TITLES.items()})
