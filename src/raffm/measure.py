"""A trained run at any sizes: what they score, what they cost, how long they take here, with and without SPP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from raffm.devices.timing import Timing
from raffm.methods.method import Device, Served, Share, Usual
from raffm.methods.raffm import RaFFM
from raffm.models.labelled import Labelled
from raffm.models.rows import with_plain_norms
from raffm.rounds.backend import Serial
from raffm.rounds.costs import Costs
from raffm.rounds.evaluate import entries_of, evaluate, sizes_of
from raffm.rounds.plan import Plan
from raffm.rounds.predict import Job, served
from raffm.rounds.results import Evaluation, Size
from raffm.rounds.workshop import Workshop
from raffm.search.price import latency

WITH, WITHOUT = "with SPP", "without SPP"


@dataclass(frozen=True)
class Prioritized(Usual):
    """RaFFM's submodels, each twice: of the most salient indices, and of the first ones."""

    name: ClassVar[str] = "prioritized"
    raffm: RaFFM

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share]:
        """Those of RaFFM."""
        return self.raffm.choose(server, round, devices, seed)

    def serve(self, server: Labelled, round: int, devices: Sequence[Device]) -> list[list[Served]]:
        """Both, but for the whole model, where there is nothing to choose."""
        salient = self.raffm.serve(server, round, devices)
        first = replace(self.raffm, metric="none").serve(server, round, devices)
        both = zip(devices, salient, first, strict=True)
        return [
            [] if device.size == 1 else [Served(one.shares, WITH), Served(other.shares, WITHOUT)]
            for device, (one,), (other,) in both
        ]


@dataclass(frozen=True, eq=False)
class Measured:
    """The scores of every size, what it costs, and the time of one example on this machine."""

    evaluation: Evaluation
    sizes: dict[str, Size]
    latency: dict[str, Timing]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers; seconds for one example."""
        costs = {name: {"params": size.params, "flops": size.flops} for name, size in self.sizes.items()}
        taken = {name: asdict(timing) for name, timing in self.latency.items()}
        return {**asdict(self.evaluation), "costs": costs, "latency": taken}


def measured(plan: Plan, round: int, metric: str | None = None, is_timed: bool = True) -> Measured:
    """Test a trained plan at all its sizes; with a metric, also RaFFM's submodels of these sizes, with SPP and without."""
    found = _measured(plan, round, is_timed)
    if metric is None:
        return found
    own = plan.method if isinstance(plan.method, RaFFM) else RaFFM()
    server = with_plain_norms(plan.server)
    other = _measured(replace(plan, server=server, method=Prioritized(replace(own, metric=metric))), round, is_timed)
    return Measured(
        replace(found.evaluation, sizes={**found.evaluation.sizes, **other.evaluation.sizes}),
        {**found.sizes, **other.sizes},
        {**found.latency, **other.latency},
    )


def _measured(plan: Plan, round: int, is_timed: bool) -> Measured:
    evaluation, _ = evaluate(plan, Serial(plan), round)
    sizes = {size.name: size for size in sizes_of(plan, Costs(plan)) if size.name in evaluation.sizes}
    taken = {}
    for entry in entries_of(plan, round) if is_timed else ():
        module = served(plan, Workshop(plan), Job(entry.served.shares[0], round, entry.device.size))
        taken[entry.name] = latency(plan, module)
    return Measured(evaluation, sizes, taken)
