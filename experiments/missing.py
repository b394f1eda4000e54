"""What is still to come of the experiments in full, by name: `python -m experiments.missing`; the page of results has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from experiments.checkpoints import RANKINGS
from experiments.fiarse_table.__main__ import TRAINED
from experiments.fiarse_table.catalogue import FURTHER, Catalogue
from experiments.fiarse_table.report import SHARED
from experiments.nested.__main__ import asked_for
from experiments.nested.catalogue import LINES, PRETRAINED, Scale
from experiments.options import options_at
from experiments.running import Content, Runs, essential
from experiments.salient_parameters.catalogue import ARRANGED, CLASSES
from experiments.setting import METHODS, PUBLISHED_RATE, RATED_AS, grid, rate_of
from experiments.tables import plain_table
from raffm.devices.profiles import FLEETS

HERE = Path(__file__).parent

SHARING: Mapping[str, tuple[str, ...]] = {"nested": (), "fiarse_table": SHARED}
"""Experiments with ResNet-18, and those whose runs they take where they are the same."""

CHECKPOINTS = tuple(f"{model}-{ranking}" for model in ("vit", "sst2") for ranking in RANKINGS)

BY_NAME: Mapping[str, tuple[str, ...]] = {
    "nested": tuple(f"{model}-{method}" for model in ("vit", "texts") for method in PRETRAINED),
    "fiarse_table": tuple(f"unseen-{method}" for method in FURTHER),
    "checkpoints": CHECKPOINTS,
    "salient_parameters": (
        *(f"{source}-{name}" for source in CLASSES for name in ARRANGED),
        *("sizes-before", "sizes-after", "random"),
    ),
    "post_training": ("vit", "sst2", "half"),
    "system_heterogeneity": tuple(FLEETS),
}
"""Results that are known by their names; what they were made from is read where it is needed."""


def main() -> None:
    """Print the table."""
    print(table())


def table() -> str:
    """A row for every experiment of which something is missing."""
    rows = [[name, str(len(names)), ", ".join(names)] for name, names in missing().items() if names]
    return plain_table(["", "results to come", "by name"], rows) if rows else "Nothing: all results are there."


def missing() -> dict[str, list[str]]:
    """The results that are asked for and not there, by experiment."""
    asked = {name: _asked(name) for name in SHARING}
    return {name: [*_not_found(name, asked), *_not_there(name, names)] for name, names in BY_NAME.items()}


def _not_there(experiment: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if not (HERE / experiment / "results" / f"{name}.json").is_file()]


def _not_found(experiment: str, asked: Mapping[str, Mapping[str, Content]]) -> list[str]:
    """The runs of ResNet-18 that are not there; those that another experiment is asked for are missing there."""
    if experiment not in asked:
        return []
    runs = _runs(experiment)
    elsewhere = [essential(content) for other in SHARING[experiment] for content in asked[other].values()]
    left = {name: content for name, content in asked[experiment].items() if essential(content) not in elsewhere}
    return [name for name, content in left.items() if not runs.has(name, content)]


def _runs(experiment: str) -> Runs:
    return options_at(HERE / experiment, "full", SHARING[experiment]).runs


def _asked(experiment: str) -> dict[str, Content]:
    """All runs of ResNet-18 that an experiment is asked for."""
    runs, methods = _runs(experiment), LINES if experiment == "nested" else tuple(METHODS)
    asked = {name: content for method in methods if method not in RATED_AS for name, content in grid("full", method).values()}
    rates = {method: _rate(runs, method) for method in methods}
    return asked | (_of_nested(rates) if experiment == "nested" else _of_the_table(rates))


def _rate(runs: Runs, method: str) -> float:
    """The rate that was found for a method; the published one where that is not known yet."""
    if not all(runs.has(name, content) for name, content in grid("full", RATED_AS.get(method, method)).values()):
        return PUBLISHED_RATE
    with redirect_stdout(StringIO()):
        return rate_of(runs, "full", method)


def _of_nested(rates: Mapping[str, float]) -> dict[str, Content]:
    return asked_for(Scale("full", HERE), rates, ("final", "beside", "ablation", "compute", "cifar100"), ())


def _of_the_table(rates: Mapping[str, float]) -> dict[str, Content]:
    catalogue = Catalogue("full", rates)
    return {name: content for part in TRAINED.values() for name, content in part(catalogue).items()}


if __name__ == "__main__":
    main()
