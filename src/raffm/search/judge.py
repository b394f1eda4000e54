"""How good a submodel is, without further training: on validation examples, which the test set is no part of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.data.examples import Examples
from raffm.data.task import Batch
from raffm.errors import RunError
from raffm.methods.method import Share
from raffm.models.moments import batch_norms, calibrate
from raffm.models.rows import plain_submodel
from raffm.models.salience import METRICS, rank
from raffm.models.surgery import submodel
from raffm.rounds.plan import Plan
from raffm.rounds.predict import Job, of_clients, outputs_of
from raffm.search.front import Sizes
from raffm.seeds import generator

RANKINGS = (*METRICS, "taylor", "fisher", "none")

GRADIENT_BATCHES = 8
"""Training batches whose gradients make a ranking by Taylor or Fisher."""


@dataclass(frozen=True, eq=False)
class Judge:
    """Makes submodels of a trained model and scores them."""

    plan: Plan
    ranking: Ranking
    validation: Examples
    few: int
    seed: int = 0

    def selection(self, sizes: Sizes) -> Selection:
        """The indices that the ranking keeps at these sizes."""
        plan, server = self.plan, self.plan.server
        return plan.method.completed(server, plan.dealt, self.ranking.cut(server.layout, sizes))

    def module(self, sizes: Sizes) -> nn.Module:
        """The submodel in evaluation mode; batch norms are calibrated by clients."""
        server, selection = self.plan.server, self.selection(sizes)
        module = submodel(server.model, server.layout, selection).eval()
        if batch_norms(module):
            with torch.no_grad():
                calibrate(module, of_clients(self.plan, module, Job(Share(selection), self.plan.rounds)))
        return plain_submodel(server, module)

    def score(self, sizes: Sizes, examples: int) -> float:
        """The main metric on the first so many validation examples, in an order that the seed gives."""
        return next(iter(self.scores(self.module(sizes), self._some(examples)).values()))

    @torch.no_grad()
    def scores(self, module: nn.Module, examples: Examples) -> dict[str, float]:
        """All metrics of a module on examples."""
        return self.plan.task.metrics(outputs_of(self.plan, module, examples), examples.labels.cpu())

    def main_metric(self) -> str:
        """What the score is called."""
        return next(iter(self.scores(self.plan.server.model.eval(), self._some(1))))

    def _some(self, count: int) -> Examples:
        if count >= len(self.validation):
            return self.validation
        order = torch.randperm(len(self.validation), generator=generator(self.seed, "search", "examples"))
        return self.validation.take(order[:count])


def judge_of(plan: Plan, metric: str | None = None, few: int = 512, seed: int = 0) -> Judge:
    """A judge for a trained plan, who ranks by a metric, or as the plan's method did.

    Where no validation examples were held out, training examples judge.
    """
    if few < 1:
        raise RunError(f"submodels are judged on at least 1 example, not on {few!r}.")
    _refuse_folded(plan)
    metric = metric or own_metric(plan)
    validation = plan.data.dataset.validation or plan.data.dataset.train
    return Judge(plan, ranking_of(plan, metric), validation, min(few, len(validation)), seed)


def _refuse_folded(plan: Plan) -> None:
    """Refuse methods whose weights are divided by a factor of their own sizes: for others there is none."""
    for several in plan.method.serve(plan.server, plan.rounds, list(plan.served.values())):
        if any(plan.method.folded(plan.server, share) for served in several for share in served.shares):
            raise RunError(
                f"{plan.method.name} divides weights by a factor of its own sizes, so other submodels cannot be judged. `raffm "
                "evaluate RUN --sizes` and `raffm export RUN --size` take any size; trained with method.scaler = false it can "
                "be searched."
            )


def ranking_of(plan: Plan, metric: str) -> Ranking:
    """A ranking of the trained model's indices; "none" keeps their order."""
    if metric not in RANKINGS:
        raise RunError(f"indices are ranked by {', '.join(RANKINGS)}, not by {metric!r}.")
    if metric == "none":
        return Ranking()
    batches = _batches(plan) if metric in ("taylor", "fisher") else []
    return rank(plan.server.model, plan.server.layout, metric, batches, lambda module, batch: _loss(plan, module, batch))


def own_metric(plan: Plan) -> str:
    """That of RaFFM; methods that cut prefixes keep the order, and so do those that cut by other rules."""
    return str(getattr(plan.method, "metric", "none"))


def _batches(plan: Plan) -> list[Batch]:
    train = plan.data.dataset.train
    order = torch.randperm(len(train), generator=generator(plan.seed, "search", "gradients"))
    size = plan.local.batch
    picks = [order[begin : begin + size] for begin in range(0, min(GRADIENT_BATCHES * size, len(order)), size)]
    return [plan.task.batch(train, each) for each in picks]


def _loss(plan: Plan, module: nn.Module, batch: Batch) -> torch.Tensor:
    outputs = plan.task.forward(module, batch)
    return plan.task.losses(outputs, batch.labels).mean()
