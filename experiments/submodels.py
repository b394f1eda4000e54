"""Submodels of a trained run, without further training: drawn at random or fitted to a size, then tested."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from raffm.algebra.selection import Selection
from raffm.data.examples import Examples
from raffm.methods.method import Device
from raffm.methods.raffm import RaFFM
from raffm.models.space import Space
from raffm.prepare import reopened
from raffm.rounds.costs import Costs
from raffm.search.front import Sizes
from raffm.search.judge import Judge, judge_of
from raffm.search.price import Prices
from raffm.seeds import generator


@dataclass(frozen=True, eq=False)
class Subject:
    """A trained run whose submodels are tested, its indices ranked by a metric, on some of its test examples."""

    judge: Judge
    test: Examples

    @staticmethod
    def of(run: Path, metric: str, most: int = 0, batch: int = 0) -> Subject:
        """The run of a folder; of its test examples the first `most` (0: all), in batches of `batch` (0: the run's)."""
        plan, _ = reopened(run)
        if batch:
            plan = replace(plan, evaluating=replace(plan.evaluating, batch=batch))
        test = plan.data.dataset.test
        return Subject(judge_of(plan, metric), test.take(torch.arange(min(most, len(test)))) if most else test)

    @property
    def whole(self) -> int:
        """The parameters of the full model."""
        return self.judge.plan.server.layout.count(Selection())

    def tested(self, several: Iterable[Sizes], words: str) -> list[dict[str, Any]]:
        """What submodels of some sizes take, and what they score."""
        costs = Costs(self.judge.plan)
        return [self._tested(sizes, costs) for sizes in track(list(several), words)]

    def _tested(self, sizes: Sizes, costs: Costs) -> dict[str, Any]:
        selection = self.judge.selection(sizes)
        scores = self.judge.scores(self.judge.module(sizes), self.test)
        params = self.judge.plan.server.layout.count(selection)
        return {"params": params, "fraction": params / self.whole, "flops": costs.flops(selection), **scores}

    def fitted(self, sizes: Iterable[float]) -> list[Sizes]:
        """RaFFM's shapes for parts of the model."""
        method = self.judge.plan.method
        method = method if isinstance(method, RaFFM) else RaFFM()
        return [dict(method.shape_for(self.judge.plan.server, Device(-1, size))) for size in sizes]

    def drawn(self, space: Space, count: int, low: float = 0.0, high: float = 1.0, seed: int = 0) -> Iterator[Sizes]:
        """Different random shapes that have from `low` to `high` of the parameters."""
        draw, seen = generator(seed, "experiment", "submodels"), set[tuple[int, ...]]()
        prices = Prices(self.judge, space, ("params",))
        while len(seen) < count:
            sizes = drawn(space, draw)
            is_new = tuple(sizes.values()) not in seen
            if is_new and low <= prices.of(sizes)["params"] / self.whole <= high:
                seen.add(tuple(sizes.values()))
                yield sizes


def drawn(space: Space, draw: torch.Generator) -> Sizes:
    """A share that all groups tend to, and for each group a binomial draw around it."""
    share = float(torch.rand((), generator=draw))
    found = {}
    for group, sizes in space.sizes.items():
        picks = torch.rand(len(sizes) - 1, generator=draw) < share
        found[group] = sizes[len(sizes) - 1 - int(picks.sum())]
    return found
