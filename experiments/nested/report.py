"""Tables and plots of the experiment, from what lies in `results`."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.comparing import (
    TITLES,
    Found,
    accuracies,
    by_round,
    by_work,
    costs,
    differences,
    first_of,
    known,
    rates,
    seeds_of,
    single,
    times,
)
from experiments.nested.catalogue import ABLATION, LINES
from experiments.options import Options
from experiments.running import Content, found_in
from experiments.setting import COMPARED, NOTES, PUBLISHED_RATE, RATES
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
    early = {
        method: [run] for method, run in known({each: found.get(f"rate-{each}-{PUBLISHED_RATE}") for each in LINES}).items()
    }
    seeds = {f"{TITLES[method]}, seed {run['run']['seed']}": run for method, runs in finals.items() for run in runs}
    return [
        rates(found, LINES, RATES),
        accuracies(
            f"After 50 rounds at the rate {PUBLISHED_RATE}, a tenth of the examples held out: accuracy on the test set", early
        ),
        accuracies("CIFAR-10: accuracy in percent on the test set, mean of the last evaluations", finals | finer),
        *(part for rate in RATES for part in _at_another(found, rate)),
        costs("What a client takes in a round", first_of(finals)),
        differences("nested", finals, COMPARED[1:]),
        times(f"Virtual hours until the mean over sizes is so accurate ({ASSUMED})", seeds),
        *(part for title, runs in _single(found).items() for part in _with_costs(f"{title} (seed 0)", runs)),
    ]


def _at_another(found: Found, rate: float) -> list[str]:
    """Final runs at a rate that is not the one that was found, and what is then between nested and masks."""
    runs = {method: seeds_of(found, f"{method}-at{rate}") for method in LINES}
    return [accuracies(f"The same at the rate {rate}", runs), differences("nested", runs, ["fiarse"], f", rate {rate}")]


ASSUMED = "every device 10 GFLOP/s, 1 MB/s: assumed"


def _with_costs(title: str, runs: Mapping[str, Content]) -> list[str]:
    """What runs of one seed reach, what their clients take, and how long it takes."""
    return [
        single(title, runs),
        costs(f"{title}: what a client takes in a round", runs),
        times(f"{title}: virtual hours", runs),
    ]


def _single(found: Found) -> dict[str, dict[str, Content]]:
    """The runs of one seed, by what they are about."""
    return {
        "Nested without one of its ideas, or with another in its place": _ablation(found),
        "Equal work, and work that binds": _compute(found),
        **{title: _beyond(found, prefix) for prefix, title in BEYOND.items()},
    }


BEYOND = {
    "cifar100": "CIFAR-100, ResNet-18, 50 rounds",
    "vit": "CIFAR-10, a ViT pretrained on CIFAR-100, 50 rounds",
    "texts": "AG News subset, MiniLM, 50 rounds",
}


def _ablation(found: Found) -> dict[str, Content]:
    switched = known({WITHOUT[name]: found.get(f"ablation-{name}") for name in ABLATION})
    return known({"nested": found.get("nested-seed0")}) | switched if switched else {}


def _compute(found: Found) -> dict[str, Content]:
    runs = {
        "nested on uniform shapes, 100 steps": found.get("ablation-uniform"),
        "HeteroFL, 100 steps": found.get("heterofl-seed0"),
        "HeteroFL, 132 steps": found.get("heterofl-longer"),
        "nested, at most the FLOPs of uniform shapes (so nearly uniform)": found.get("nested-bound"),
    }
    return known(runs) if {"heterofl-longer", "nested-bound"} & set(found) else {}


def _beyond(found: Found, prefix: str) -> dict[str, Content]:
    return known({title: found.get(f"{prefix}-{name}") for name, title in TITLES.items()})
