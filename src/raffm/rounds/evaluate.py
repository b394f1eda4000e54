"""Every size on the global test set and on every client's own test examples. The test set never chooses anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from raffm.data.examples import Examples
from raffm.methods.method import Device, Served, Share
from raffm.models.rows import whole as whole_of
from raffm.rounds.average import AVERAGE, Average
from raffm.rounds.backend import Backend
from raffm.rounds.costs import Costs
from raffm.rounds.plan import Plan
from raffm.rounds.predict import Job
from raffm.rounds.results import Evaluation, Metrics, Scores, Size

ClientScores = dict[str, list[float | None]]


@dataclass(frozen=True)
class Entry:
    """One row of an evaluation: a size, one way of serving it."""

    name: str
    device: Device
    served: Served


def entries_of(plan: Plan, round: int) -> list[Entry]:
    """All sizes, each in every way that the method serves it."""
    found = []
    ways = plan.method.serve(plan.server, round, list(plan.served.values()))
    for (name, device), several in zip(plan.served.items(), ways, strict=True):
        for served in several:
            found.append(Entry(f"{name} {served.view}".strip(), device, served))
    return found


def sizes_of(plan: Plan, costs: Costs) -> tuple[Size, ...]:
    """What every served submodel truly costs."""
    whole = plan.server.layout.count(whole_of(plan.server.layout))
    found = []
    for entry in entries_of(plan, 0):
        cost = costs.of(entry.served.shares[0])
        fraction = cost.params / whole
        found.append(
            Size(
                entry.name,
                entry.device.size,
                entry.served.view,
                cost.params,
                fraction,
                cost.bytes_down,
                cost.bytes_up,
                cost.flops,
            )
        )
    averaged = [replace(size, name=f"{size.name} {AVERAGE}", view=f"{size.view} {AVERAGE}".strip()) for size in found]
    return (*found, *averaged) if plan.decay else tuple(found)


def evaluate(plan: Plan, backend: Backend, round: int) -> tuple[Evaluation, ClientScores]:
    """The scores of all sizes after a round, and the main metric of every client."""
    entries = entries_of(plan, round)
    smallest: dict[Share, float] = {}  # the smallest device of each submodel: all that are larger hold it too
    for entry in entries:
        for share in entry.served.shares:
            smallest[share] = min(entry.device.size, smallest.get(share, 1.0))
    jobs = [Job(share, round, size) for share, size in smallest.items()]
    said = dict(zip(smallest, backend.predict(jobs), strict=True))
    served = dict.fromkeys(entry.served.shares for entry in entries)
    found = {shares: _scores(plan, [said[share] for share in shares]) for shares in served}
    scores = {entry.name: found[entry.served.shares][0] for entry in entries}
    return Evaluation(round, scores), {entry.name: found[entry.served.shares][1] for entry in entries}


def evaluate_both(plan: Plan, backend: Backend, round: int, average: Average | None) -> tuple[Evaluation, ClientScores]:
    """The last model's scores, and those of the average beside them, where there is one."""
    last, by_client = evaluate(plan, backend, round)
    if average is None:
        return last, by_client
    with average.in_place_of(plan.server):
        other, of_other = evaluate(plan, backend, round)
    sizes = {**last.sizes, **{f"{name} {AVERAGE}": scores for name, scores in other.sizes.items()}}
    return Evaluation(round, sizes), {**by_client, **{f"{name} {AVERAGE}": scores for name, scores in of_other.items()}}


def _scores(plan: Plan, several: Sequence[Sequence[Tensor]]) -> tuple[Scores, list[float | None]]:
    """Scores from the outputs of one or more submodels, whose metrics are averaged."""
    dataset = plan.data.dataset
    tested = [_Said.of(plan, outputs[0], dataset.test) for outputs in several]
    test = mean_metrics([said.metrics(plan) for said in tested])
    validation: Metrics = {}
    if dataset.validation is not None:
        validation = mean_metrics([_Said.of(plan, outputs[1], dataset.validation).metrics(plan) for outputs in several])
    own = [_Said.of(plan, outputs[-1], dataset.test) for outputs in several] if plan.evaluating.augmented else tested
    each = _by_client(plan, own)
    known = [metrics for metrics in each if metrics is not None]
    main = next(iter(test))
    listed = [None if metrics is None else metrics[main] for metrics in each]
    return Scores(test, validation, mean_metrics(known), _worst_decile(known, main)), listed


@dataclass(frozen=True, eq=False)
class _Said:
    """What a submodel said to some examples, their labels, and the loss of each."""

    outputs: Tensor
    labels: Tensor
    losses: Tensor

    @staticmethod
    def of(plan: Plan, outputs: Tensor, examples: Examples) -> _Said:
        labels = examples.labels.cpu()
        return _Said(outputs, labels, plan.task.losses(outputs, labels))

    def to(self, own: Tensor) -> _Said:
        return _Said(self.outputs[own], self.labels[own], self.losses[own])

    def metrics(self, plan: Plan) -> Metrics:
        return {**plan.task.metrics(self.outputs, self.labels), "loss": float(self.losses.mean())}


def _by_client(plan: Plan, several: Sequence[_Said]) -> list[Metrics | None]:
    """The metrics of every client on its own test examples; None for a client that has none."""
    found: list[Metrics | None] = []
    for client in range(plan.data.clients):
        own = torch.from_numpy(plan.data.split.test[client])
        found.append(mean_metrics([said.to(own).metrics(plan) for said in several]) if len(own) else None)
    return found


def mean_metrics(several: Sequence[Metrics]) -> Metrics:
    """The mean of every metric."""
    return {name: fmean(metrics[name] for metrics in several) for name in several[0]} if several else {}


def _worst_decile(several: Sequence[Metrics], main: str) -> Metrics:
    """The mean metrics of the tenth of the clients, at least one, that score worst by the main metric."""
    worst = sorted(several, key=lambda metrics: metrics[main])[: max(1, len(several) // 10)]
    return mean_metrics(worst)
