"""Which sizes fit a budget, and keep the most of the ranking's score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod, sqrt

import numpy as np
import torch
from torch import Tensor

from raffm.algebra.axis import Label, names
from raffm.algebra.layout import PARAMETERS, Layout
from raffm.algebra.ranking import Ranking
from raffm.devices.basis import Array
from raffm.devices.budget import Budget, Kind
from raffm.devices.cost import CostModel
from raffm.devices.rows import Rows
from raffm.devices.search import Field, Levels, climbed, first_guess, solve
from raffm.errors import BudgetError, SpaceError

Space = Mapping[str, Sequence[int]]
Shares = Mapping[str, Sequence[float]]
"""For every group, the share of its score that its best n indices hold, for n = 0 up to its size."""

_SEARCHED = 3
"""So many choices of depth, the best at first sight, are searched in full."""

_WORDS: dict[Kind, str] = {
    "params": "has {:,} parameters",
    "bytes": "takes {:,} bytes",
    "flops": "takes {:,} FLOPs for one example",
    "memory": "needs {:,} bytes to train",
}


def fit(
    layout: Layout, cost: CostModel, budget: Budget, space: Space, shares: Shares, ranking: Ranking | None = None
) -> dict[str, int]:
    """The sizes that keep the most score among all configs of a space that fit.

    The objective is the mean share of score over the groups of the space, each weighted by the parameters that it, with
    the groups tied to it, touches in the full model; groups of dropped blocks keep nothing. No size of the result can be
    raised by one step of the space without breaking a limit. Which blocks a depth group drops is the ranking's choice;
    the groups of dropped blocks are left out of the result. The same arguments always give the same sizes.
    """
    _refuse_space(layout, cost, space, shares)
    levels = {group: tuple(sorted(set(sizes))) for group, sizes in space.items()}
    problem = Problem(layout, cost, budget, levels, shares, ranking or Ranking())
    _refuse_too_small(problem)
    promising = sorted(_guesses(problem), key=lambda guess: -guess[1])[:_SEARCHED]
    found = [part.config(solve(part.field)) for part, _ in promising]
    return _deepened(problem, max(found, key=problem.objective))


def _guesses(problem: Problem) -> Iterator[tuple[Part, float]]:
    """Choices of depth with what they keep at first sight; those that cannot beat another are passed over."""
    best = -1.0
    for part in sorted(problem.parts(), key=lambda part: -part.bound):
        if part.bound > best and part.field.fits(part.field.bottom[None])[0]:
            kept = problem.objective(part.config(first_guess(part.field)))
            best = max(best, kept)
            yield part, kept


def _deepened(problem: Problem, config: dict[str, int]) -> dict[str, int]:
    """The config with every depth raised that can be; restored blocks come back whole."""
    for group in problem.depths:
        for size in [size for size in problem.space[group] if size > config[group]][:1]:
            part = Part(problem, {**{depth: config[depth] for depth in problem.depths}, group: size})
            levels = part.levels(config)
            if part.field.fits(levels[None])[0]:
                return _deepened(problem, part.config(climbed(part.field, levels)))
    return config


# -- the problem ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Problem:
    """What `fit` was asked; the sizes of every group in rising order."""

    layout: Layout
    cost: CostModel
    budget: Budget
    space: Mapping[str, tuple[int, ...]]
    shares: Shares
    ranking: Ranking

    @cached_property
    def depths(self) -> tuple[str, ...]:
        """The depth groups of the space."""
        return tuple(group for group in self.space if group in self.layout.depths)

    @cached_property
    def weights(self) -> dict[str, float]:
        """How much every group counts: the parameters that it and its followers touch, as a share of all."""
        touched = {group: _touched(self.layout, {group, *self._following(group)}) for group in self.space}
        return {group: count / max(sum(touched.values()), 1) for group, count in touched.items()}

    def worth(self, group: str, size: int) -> float:
        """What a group adds to the objective at a size."""
        return self.weights[group] * self.shares[group][size]

    def objective(self, config: Mapping[str, int]) -> float:
        """The mean share kept, weighted."""
        return sum(self.worth(group, size) for group, size in config.items())

    def parts(self) -> list[Part]:
        """The problem at every choice of depth; one where depth is not in the space."""
        choices = product(*(self.space[group] for group in self.depths))
        return [Part(self, dict(zip(self.depths, choice, strict=True))) for choice in choices]

    def _following(self, group: str) -> set[str]:
        return {follower for follower, size in self.rows.followers.items() if group in names(size)}

    @cached_property
    def rows(self) -> Rows:
        """What turns sizes into rows that the cost model reads."""
        return Rows(self.layout, self.cost.basis, self.ranking, self.space)


@dataclass(frozen=True, eq=False)
class Part:
    """The problem at one choice of depth: every other group that is left is a knob of the search."""

    problem: Problem
    depth: Mapping[str, int]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The full sizes of the groups that are left."""
        return self.problem.rows.left(self.depth)

    @cached_property
    def knobs(self) -> tuple[str, ...]:
        """The groups to choose sizes for."""
        return tuple(group for group in self.problem.space if group in self.sizes and group not in self.problem.depths)

    @cached_property
    def field(self) -> Field:
        """The search over levels: the places of sizes in the space."""
        most = max((len(self.problem.space[group]) for group in self.knobs), default=0)
        values = np.full((len(self.knobs), most), -np.inf)
        for row, group in zip(values, self.knobs, strict=True):
            worths = [self.problem.worth(group, size) for size in self.problem.space[group]]
            row[: len(worths)] = worths
        shared = [place for place, group in enumerate(self.knobs) if self.problem.layout.groups[group].guard is None]
        return Field(values, self._usage, tuple(shared))

    @property
    def bound(self) -> float:
        """The objective if all fitted."""
        return self.problem.objective(self.config(self.field.top))

    def config(self, levels: Levels) -> dict[str, int]:
        """The sizes at these levels, in the order of the space."""
        sizes = {group: self.problem.space[group][level] for group, level in zip(self.knobs, levels, strict=True)}
        return {group: {**sizes, **self.depth}[group] for group in self.problem.space if group in sizes or group in self.depth}

    def levels(self, config: Mapping[str, int]) -> Levels:
        """The levels of a config's sizes; the highest of groups that it does not name."""
        space = self.problem.space
        return np.array([space[group].index(config.get(group, space[group][-1])) for group in self.knobs], dtype=np.int64)

    def _usage(self, choices: Levels) -> Array:
        rows = self._rows(choices)
        limits = self.problem.budget.limits
        return np.stack([np.rint(self.problem.cost.many(kind, rows)) / limit for kind, limit in limits.items()], 1)

    def _rows(self, choices: Levels) -> Array:
        """The rows of sizes that the cost model reads."""
        levels = {group: np.array(self.problem.space[group], dtype=np.float64) for group in self.knobs}
        sizes = {group: levels[group][choices[:, place]] for place, group in enumerate(self.knobs)}
        return self.problem.rows.of(self.depth, sizes)


def _touched(layout: Layout, groups: set[str]) -> int:
    """The number of parameters in the tensors that these groups run through, or that their blocks hold."""
    labels = [label for name, label in layout.labels.items() if layout.kind(name) in PARAMETERS]
    chosen = [label for label in labels if groups & {*label.groups(), *_depth_of(label)}]
    return sum(prod(label.shape(layout.sizes)) for label in chosen)


def _depth_of(label: Label) -> list[str]:
    return [] if label.guard is None else [label.guard[0]]


# -- what is refused -----------------------------------------------------------------------------------------------


def _refuse_space(layout: Layout, cost: CostModel, space: Space, shares: Shares) -> None:
    for group, sizes in space.items():
        if group not in layout.groups:
            raise SpaceError(f"the space names the group {group!r}, which the model does not have.")
        full = layout.groups[group].size
        if not sizes or not all(0 < size <= full for size in sizes):
            raise SpaceError(f"the sizes of `{group}` must lie between 1 and {full}, but the space has {list(sizes)!r}.")
        if group not in shares or len(shares[group]) != full + 1:
            raise SpaceError(f"the shares of `{group}` must have an entry for every size from 0 to {full}.")
        if group not in cost.basis.varying and group not in layout.depths and set(sizes) != {full}:
            raise SpaceError(f"the space cuts `{group}`, but the cost model was made for other groups. Name it in `free`.")
    for tie in layout.ties:
        tied = {*names(tie.left), *names(tie.right)}
        if tied <= set(space) and any(len(space[group]) > 1 for group in tied):
            raise SpaceError(f"the tie `{tie}` gives one size from the other. Leave `{max(tied)}` out of the space.")


def _refuse_too_small(problem: Problem) -> None:
    """Refuse a budget that not even the smallest config fits."""
    smallest = Part(problem, {group: problem.space[group][0] for group in problem.depths})
    rows = smallest._rows(smallest.field.bottom[None])
    for kind, limit in problem.budget.limits.items():
        least = round(float(problem.cost.many(kind, rows)[0]))
        if least > limit:
            raise BudgetError(
                f"max_{kind} is {limit:,}, but even the smallest submodel of the space {_WORDS[kind].format(least)}. "
                "Raise the limit, or add smaller sizes to the space."
            )


# -- shares of a ranking -------------------------------------------------------------------------------------------


def kept_shares(layout: Layout, ranking: Ranking, space: Space) -> dict[str, list[float]]:
    """The share of its score that every group of a space keeps, by size; equal steps for a group without scores."""
    return {name: _curve(layout, ranking, name) for name in space}


def even_shares(layout: Layout, space: Space) -> dict[str, list[float]]:
    """What the first n indices of a group count: the square root of their share, so that no group is emptied for another."""
    sizes = {name: layout.groups[name].size for name in space}
    return {name: [sqrt(count / size) for count in range(size + 1)] for name, size in sizes.items()}


def _curve(layout: Layout, ranking: Ranking, name: str) -> list[float]:
    ordered = _ordered_scores(layout, ranking, name)
    total = float(ordered.sum())
    if total <= 0:
        ordered, total = torch.ones_like(ordered), float(len(ordered))
    return [0.0, *(ordered.cumsum(0) / total).clamp(max=1.0).tolist()]


def _ordered_scores(layout: Layout, ranking: Ranking, name: str) -> Tensor:
    """The scores from the best index to the last; those of a fibred group are summed over its rows."""
    group = layout.groups[name]
    if name not in ranking.scores:
        return torch.ones(group.size, dtype=torch.float64)
    scores = ranking.scores[name].double()
    scores = scores - scores.min().clamp(max=0.0)
    order = ranking.order.get(name)
    if group.base is not None:
        return (scores if order is None else scores.gather(1, order)).sum(0)
    order = torch.arange(group.size) if order is None else order
    is_required = torch.isin(order, torch.tensor(group.required, dtype=torch.int64))
    return scores[torch.cat([order[is_required], order[~is_required]])]
