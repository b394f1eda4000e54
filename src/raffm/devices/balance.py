"""Balanced shapes: few widths a model, cut so that their product is as great as a budget allows, each inside the next larger.

A width is what a family's table calls one: a stage of a ResNet, the FFN or the head dimensions of a layer. Maximising the
product spends about equal parameters on every width until one is whole, so that the parts that have the most are cut first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import lcm, prod

import numpy as np
from torch import nn

from raffm.algebra.axis import monomials
from raffm.algebra.layout import PARAMETERS, Layout
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.devices.basis import Array
from raffm.devices.budget import Budget, Kind
from raffm.devices.cost import CostModel
from raffm.devices.filling import filled, trades
from raffm.devices.rows import Rows
from raffm.devices.search import Field, Levels, climbed, solve
from raffm.errors import BudgetError, SpaceError
from raffm.models.labelled import Labelled
from raffm.models.table import fill, instances

STEP = 8
"""Widths are multiples of so many channels, but for those that are smaller than two of it."""

EVERY = 1 << 20
"""So many shapes are all looked at."""

FEW = 8
"""With no more widths than this, the search of `fit` looks for the best shape; with more, it would take minutes."""

SAME = 1e-9
"""Products whose logarithms differ by less are equal."""

Shape = tuple[int, ...]
"""A size for every width, in the order of the table."""


@dataclass(frozen=True)
class Step:
    """By how many indices a width grows, what its groups need at least for that, and the least that it may be."""

    of_width: int
    of_group: int
    least: int

    @staticmethod
    def of(layout: Layout, groups: Sequence[str]) -> Step:
        """Of groups that have one size: `STEP` channels are fewer indices where an index is a whole norm group."""
        own = lcm(*(layout.groups[group].step for group in groups))
        channels = min(_channels(layout, group) for group in groups)
        wanted = max(1, STEP // channels)
        return Step(lcm(own, wanted), own, max(layout.groups[group].least for group in groups))


def _channels(layout: Layout, group: str) -> int:
    """How many numbers of an axis an index of a group stands for, where these are fewest."""
    axes = (layout.labels[name].axes[axis] for name, axis in layout.uses(group))
    terms = [(several, times) for axis in axes for several, times in monomials(axis) if group in several]
    pinned = {name: each.size for name, each in layout.groups.items() if each.pinned}
    return min(times * prod(pinned.get(name, 1) for name in several) for several, times in terms)


@dataclass(frozen=True, eq=False)
class Widths:
    """The widths of a model, and what its submodels of any widths cost."""

    server: Labelled
    batch: int = 16
    optimizer: str = "adamw"

    @cached_property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The groups of every width; all of them get its size."""
        layout, found = self.server.layout, dict[str, list[str]]()
        for title, templates in self.server.table.widths.items():
            for template in templates:
                for group, numbers in instances(template, layout.groups).items():
                    found.setdefault(fill(title, numbers, {}), []).append(group)
        if not found:
            raise SpaceError(
                f"the table of {self.server.table.family!r} names no widths, so that no balanced shapes can be made. Add a "
                "section [widths] to it, or use uniform shapes."
            )
        places = {group: place for place, group in enumerate(layout.groups)}
        apart = {part: several for name in found for part, several in self._of_one_size(name, found[name]).items()}
        return dict(sorted(apart.items(), key=lambda entry: min(places[group] for group in entry[1])))

    def _of_one_size(self, name: str, groups: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """The groups of a width; those of another size, as what a bottleneck gives, are a width of their own."""
        by_size = dict[int, dict[str, None]]()
        for group in groups:
            by_size.setdefault(self.server.layout.groups[group].size, {})[group] = None
        first = next(iter(by_size))
        return {name if size == first else f"{name} ({size})": tuple(several) for size, several in by_size.items()}

    @cached_property
    def whole(self) -> Shape:
        """The full size of every width."""
        return tuple(self.server.layout.groups[groups[0]].size for groups in self.groups.values())

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """What every width goes by."""
        return tuple(Step.of(self.server.layout, groups) for groups in self.groups.values())

    def sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """A shape as sizes of groups."""
        return {group: size for groups, size in zip(self.groups.values(), shape, strict=True) for group in groups}

    @cached_property
    def cost(self) -> CostModel:
        """What submodels cost."""
        server, free = self.server, tuple(group for groups in self.groups.values() for group in groups)
        return CostModel(server.model, server.layout, server.table, self.batch, self.optimizer, free=free)

    def costs(self, kind: Kind, shapes: Array) -> Array:
        """One cost of many shapes, a row each."""
        columns = {group: shapes[:, place] for place, several in enumerate(self.groups.values()) for group in several}
        return np.rint(self.cost.many(kind, self._rows.of({}, columns)))

    @cached_property
    def _rows(self) -> Rows:
        return Rows(self.server.layout, self.cost.basis, Ranking(), tuple(self.sizes(self.whole)))

    def budget(self, size: float) -> Budget:
        """The parameters of a part of the model; embedding tables are not among those that are divided."""
        layout = self.server.layout
        tables = {f"{name}.weight" for name, child in self.server.model.named_modules() if isinstance(child, nn.Embedding)}
        held = sum(
            prod(layout.labels[name].shape(layout.sizes))
            for name in layout.tensors(*PARAMETERS)
            if name in tables and not set(layout.labels[name].groups()) & self.cost.basis.varying
        )
        return Budget(max_params=max(1, int(held + size * (layout.count(Selection()) - held))))

    # -- one shape -----------------------------------------------------------------------------------------------

    def balanced(self, limits: Budget, inside: Sequence[int] | None = None, around: Sequence[int] | None = None) -> Shape:
        """The shape with the greatest product of widths within the limits, inside a larger one and around a smaller one.

        Of equal products that with more multiply-adds, then the one whose first widths are greater.
        """
        bounds = zip(self.steps, self.whole, inside or self.whole, around or (1,) * len(self.whole), strict=True)
        levels = [_levels(step, full, most, least) for step, full, most, least in bounds]
        field = self._field(levels, limits)
        if not field.fits(field.bottom[None])[0]:
            self._refuse(limits, [float(each[0]) for each in levels])
        if np.prod(field.top + 1.0) <= EVERY:
            found = self._best_of_all(field, levels)
        else:
            found = self._settled(field, levels, solve(field) if len(levels) <= FEW else filled(field))
        return tuple(int(each[level]) for each, level in zip(levels, found, strict=True))

    def _field(self, levels: Sequence[Array], limits: Budget) -> Field:
        values = np.full((len(levels), max(map(len, levels))), -np.inf)
        for row, each in zip(values, levels, strict=True):
            row[: len(each)] = np.log(each)

        def usage(choices: Levels) -> Array:
            shapes = _shapes(levels, choices)
            return np.stack([self.costs(kind, shapes) / limit for kind, limit in limits.limits.items()], 1)

        return Field(values, usage)

    def _best_of_all(self, field: Field, levels: Sequence[Array]) -> Levels:
        every = np.indices((field.top + 1).tolist(), dtype=np.int64).reshape(len(levels), -1).T
        fitting = every[field.fits(every)]
        values = field.value(fitting)
        return self._first(levels, fitting[values >= values.max() - SAME])

    def _first(self, levels: Sequence[Array], choices: Levels) -> Levels:
        """Of choices with equal products the one with the most work, then the greatest."""
        if len(choices) > 1:
            work = self.costs("flops", _shapes(levels, choices))
            choices = choices[work == work.max()]
        return np.asarray(max(choices.tolist()), dtype=np.int64)

    def _settled(self, field: Field, levels: Sequence[Array], found: Levels) -> Levels:
        """A choice, traded until none is better, or equal and comes first."""
        while True:
            choices = trades(field, found, SAME)
            choices = choices[field.fits(choices)]
            values = field.value(choices)
            best = climbed(field, self._first(levels, choices[values >= values.max() - SAME]))
            if (best == found).all():
                return found
            found = best

    def _refuse(self, limits: Budget, least: Sequence[float]) -> None:
        costs = {kind: self.costs(kind, np.array([least]))[0] for kind in limits.limits}
        kind = next(kind for kind, limit in limits.limits.items() if costs[kind] > limit)
        raise BudgetError(
            f"no shape fits: with the smallest widths the model has {kind} {costs[kind]:,.0f}, above the limit "
            f"{limits.limits[kind]:,}. Leave out the smallest device, or raise its limit."
        )

    # -- a chain -------------------------------------------------------------------------------------------------

    def chain(self, budgets: Sequence[Budget | None]) -> list[Shape]:
        """A shape for every budget, from the largest to the smallest, each inside the one before; None: the whole model."""
        _refuse_order(budgets)
        shapes: list[Shape] = []
        for budget in budgets:
            shapes.append(self.whole if budget is None else self.balanced(budget, shapes[-1] if shapes else None))
        return shapes


def _refuse_order(budgets: Sequence[Budget | None]) -> None:
    """Each budget must be smaller than the one before; one that nothing fits is refused where a shape is looked for."""
    for larger, smaller in pairwise(budgets):
        if smaller is None:
            raise BudgetError("a chain goes from large to small, but the whole model comes after a budget.")
        before = {} if larger is None else larger.limits
        grown = [kind for kind, limit in smaller.limits.items() if kind in before and limit > before[kind]]
        if grown:
            was, now = before[grown[0]], smaller.limits[grown[0]]
            raise BudgetError(f"a chain goes from large to small, but {grown[0]} {now:,} comes after {was:,}.")
        if larger is not None and smaller.limits == before:
            raise BudgetError(f"two budgets of the chain are equal: {smaller}. Leave one of them out.")


def _levels(step: Step, full: int, most: int, least: int) -> Array:
    """The sizes that a width may have: multiples of its step, and where it begins or ends."""
    by = step.of_width if full >= 2 * step.of_width else step.of_group
    every = {size for size in range(by, most + 1, by) if size >= max(least, step.least)} | {most}
    return np.array(sorted(every | ({least} if least > 1 else set())), dtype=np.float64)


def _shapes(levels: Sequence[Array], choices: Levels) -> Array:
    return np.stack([each[choices[:, place]] for place, each in enumerate(levels)], 1)
