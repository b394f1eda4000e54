"""Several methods side by side: the same data, cohorts and learning-rate grid, one folder a run, one table.

    folder/<method>/lr-0.01-seed-0/     a run, as `raffm train` leaves it
    folder/comparison.json              what was chosen, and the table in plain numbers
    folder/comparison.md, report.html   the same for people
    folder/plots                        the pictures

Runs that are finished are read, runs that were stopped go on: a comparison may be killed at any moment.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from raffm.errors import CheckpointError, RunError
from raffm.prepare import plan_of, run_as
from raffm.report.comparison import Compared
from raffm.report.folder import RESULTS, read_results, write_comparison
from raffm.rounds import checkpoint
from raffm.rounds.loop import Watcher
from raffm.rounds.results import Results
from raffm.settings import Settings

Look = Callable[[str, int], AbstractContextManager[Watcher | None]]
"""Who looks on while a run goes: is told its name and its number of rounds."""


@dataclass(frozen=True)
class Contest:
    """What is compared: methods (with their switches), seeds, and learning rates to choose from."""

    settings: Settings
    methods: Mapping[str, Mapping[str, Any]]
    seeds: tuple[int, ...] = (0,)
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.methods or not self.seeds:
            raise RunError("a comparison needs at least one method and one seed.")
        if len(set(self.seeds)) < len(self.seeds) or len(set(self.rates)) < len(self.rates):
            raise RunError("a seed or a learning rate is given twice.")
        if self.settings.data.validation <= 0 and len(self.rates) > 1:
            raise RunError(
                "learning rates are chosen on validation data, but data.validation is 0. Hold some out, or give one."
            )

    def settings_of(self, method: str, rate: float, seed: int) -> Settings:
        """One run."""
        local = replace(self.settings.local, lr=rate)
        return replace(self.settings, method=dict(self.methods[method]), seed=seed, local=local)


def compare(contest: Contest, folder: str | Path, look: Look = lambda name, rounds: nullcontext()) -> list[Compared]:
    """Run everything that is not there yet, and write the comparison."""
    folder = Path(folder)
    for method in contest.methods:  # what makes no sense is refused before anything runs
        plan_of(contest.settings_of(method, contest.settings.local.lr, contest.seeds[0]))
    compared = [_compared(contest, method, folder, look) for method in contest.methods]
    write_comparison(compared, folder)
    return compared


def _compared(contest: Contest, method: str, folder: Path, look: Look) -> Compared:
    """A method at the learning rate that is best on validation with the first seed, then with all seeds."""
    rates = contest.rates or (contest.settings.local.lr,)
    tried = {rate: _ran(contest, method, rate, contest.seeds[0], folder, look) for rate in rates}
    scores = {rate: validated(results) for rate, results in tried.items()}
    chosen = max(rates, key=lambda rate: scores[rate]) if len(rates) > 1 else rates[0]
    runs = [tried[chosen], *(_ran(contest, method, chosen, seed, folder, look) for seed in contest.seeds[1:])]
    return Compared(method, chosen, scores, tuple(runs))


def validated(results: Results) -> float:
    """The main metric on validation data after the last round, mean over sizes; the worst there is where it is no number."""
    last = results.last_round
    found = [scores.validation.get(results.metric, -1.0) for scores in last.sizes.values()] if last is not None else []
    mean = fmean(found) if found else -1.0
    return mean if isfinite(mean) else -1.0


def _ran(contest: Contest, method: str, rate: float, seed: int, folder: Path, look: Look) -> Results:
    """A run: read, taken up again, or begun."""
    settings = contest.settings_of(method, rate, seed)
    place = folder / method / f"lr-{rate:g}-seed-{seed}"
    if (place / RESULTS).is_file():
        results = read_results(place)
        if _compared_by(results.run) != _compared_by(json.loads(json.dumps(settings.to_json()))):
            raise CheckpointError(f"{str(place)!r} holds a run with other settings. Choose another folder for this comparison.")
        return results
    with look(f"{method}, lr {rate:g}, seed {seed}", settings.rounds) as watcher:
        trained = run_as(settings, plan_of(settings), place, checkpoint.exists(place / "checkpoint"), watcher)
    return trained.results


def _compared_by(run: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a run the one that is asked for: not where it ran, nor how often it was saved."""
    return {key: entry for key, entry in run.items() if key not in ("backend", "save")}
