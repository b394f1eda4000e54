"""What a run found: a plain value that `results.json` holds. The same run always gives the same one, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite, nan
from statistics import fmean
from typing import Any

Metrics = Mapping[str, float]

FORMAT = 1


@dataclass(frozen=True)
class Size:
    """One submodel that devices are given, and what it truly costs."""

    name: str
    """Unique: "1/4", or with a view, "1/4 windows"."""
    size: float
    """The nominal fraction of the full model's parameters."""
    view: str
    """How the method serves it: "" where there is one way, else "prefix", "windows"."""
    params: int
    fraction: float
    """The true fraction of the full model's parameters."""
    bytes_down: int
    bytes_up: int
    flops: int
    """Of the forward pass of one example."""


@dataclass(frozen=True)
class Round:
    """What one round did. `loss` is the mean training loss of the clients that came back.

    It is None where nobody did, or where it is not finite.
    """

    round: int
    loss: float | None
    clients: tuple[int, ...]
    dropped: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    flops: int = 0
    seconds: float = 0.0
    """Virtual: of the slowest client that was waited for."""
    joules: float = 0.0
    """Virtual: the power of every client's device times the seconds it took."""


@dataclass(frozen=True)
class Scores:
    """Metrics of one size after one round: on the test set, on the validation set (none: empty), over clients."""

    test: Metrics
    validation: Metrics
    clients_mean: Metrics
    clients_worst_decile: Metrics


@dataclass(frozen=True)
class Evaluation:
    """All sizes after one round, by their names."""

    round: int
    sizes: Mapping[str, Scores]

    @property
    def metric(self) -> str:
        """The main metric: the one that the task names first."""
        return next(iter(next(iter(self.sizes.values())).test))


@dataclass(frozen=True)
class Results:
    """A whole run. `client_scores` holds the main metric of every client at the last evaluation, by size."""

    run: Mapping[str, Any]
    """The run's settings as its TOML file has them."""
    method: str
    model: Mapping[str, Any]
    """`class`, `family`, `params`, `layout`."""
    data: Mapping[str, Any]
    """`name`, `classes`, `clients`, `train`, `test`, `validation` (numbers of examples)."""
    metric: str
    """The main metric: the first that the task gives."""
    sizes: Sequence[Size]
    rounds: Sequence[Round] = ()
    evaluations: Sequence[Evaluation] = ()
    client_scores: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    last: int = 5
    """How many of the last evaluations the mean is taken over."""

    @property
    def last_round(self) -> Evaluation | None:
        """The last evaluation."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def best_on_validation(self) -> Evaluation | None:
        """The evaluation whose validation metric, mean over sizes, is best; the first of equals. The test has no say."""
        judged = [entry for entry in self.evaluations if isfinite(self._validated(entry))]
        return max(judged, key=self._validated, default=None)

    def _validated(self, evaluation: Evaluation) -> float:
        """The mean over sizes; not a number where one was not validated."""
        found = [scores.validation.get(self.metric, nan) for scores in evaluation.sizes.values()]
        return fmean(found) if found else nan

    def mean_of_last(self, size: str, metric: str) -> float:
        """The mean of a test metric over the last evaluations."""
        return fmean(entry.sizes[size].test[metric] for entry in self.evaluations[-self.last :])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, with a summary for people who read the file."""
        content = {"format": FORMAT, **asdict(self)}
        content["summary"] = self.summary() if self.evaluations else {}
        plain: dict[str, Any] = without_nan(content)
        return plain

    def summary(self) -> dict[str, Any]:
        """Last round, mean of the last rounds and best on validation, apart."""
        last, best = self.evaluations[-1], self.best_on_validation
        return {
            "last_round": {"round": last.round, **{name: scores.test[self.metric] for name, scores in last.sizes.items()}},
            "mean_of_last": {
                "evaluations": len(self.evaluations[-self.last :]),
                **{name: self.mean_of_last(name, self.metric) for name in last.sizes},
            },
            "best_on_validation": {}
            if best is None
            else {"round": best.round, **{name: scores.test[self.metric] for name, scores in best.sizes.items()}},
            "total": {
                "bytes_up": sum(entry.bytes_up for entry in self.rounds),
                "bytes_down": sum(entry.bytes_down for entry in self.rounds),
                "flops": sum(entry.flops for entry in self.rounds),
                "seconds_virtual": sum(entry.seconds for entry in self.rounds),
                "joules_virtual": sum(entry.joules for entry in self.rounds),
            },
        }


def without_nan(content: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for both."""
    if isinstance(content, Mapping):
        return {key: without_nan(entry) for key, entry in content.items()}
    if isinstance(content, list | tuple):
        return [without_nan(entry) for entry in content]
    return None if isinstance(content, float) and not isfinite(content) else content


def _scores(entry: Mapping[str, Mapping[str, float | None]]) -> Scores:
    filled = {key: {name: nan if value is None else value for name, value in part.items()} for key, part in entry.items()}
    return Scores(**filled)


def from_json(content: Mapping[str, Any]) -> Results:
    """The value that `to_json` wrote."""
    known = {key: entry for key, entry in content.items() if key not in ("format", "summary")}
    known["sizes"] = tuple(Size(**entry) for entry in content["sizes"])
    known["rounds"] = tuple(_round(entry) for entry in content["rounds"])
    known["evaluations"] = tuple(
        Evaluation(entry["round"], {name: _scores(scores) for name, scores in entry["sizes"].items()})
        for entry in content["evaluations"]
    )
    return Results(**known)


def _round(entry: Mapping[str, Any]) -> Round:
    lists = {key: tuple(entry[key]) for key in ("clients", "dropped", "late")}
    return Round(**{**entry, **lists})
