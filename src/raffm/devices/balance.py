"""Balanced shapes: few widths a model, cut so that their product is as great as a budget allows, each inside the next larger.

A width is what a family's table calls one: a stage of a ResNet, the FFN or the head dimensions of a layer. Maximising the
product spends about equal parameters on every width until one is whole, so that the parts that have the most are cut first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np
from torch import nn

from raffm.algebra.layout import PARAMETERS
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.devices.basis import Array
from raffm.devices.budget import Budget, Kind
from raffm.devices.cost import CostModel
from raffm.devices.rows import Rows
from raffm.devices.search import Field, Levels, climbed, solve
from raffm.errors import BudgetError, SpaceError
from raffm.models.labelled import Labelled
from raffm.models.table import fill, instances

STEP = 8
"""Widths are multiples of it, but for those that are smaller than two of it."""

EVERY = 1 << 20
"""So many shapes are all looked at."""

SAME = 1e-9
"""Products whose logarithms differ by less are equal."""

Shape = tuple[int, ...]
"""A size for every width, in the order of the table."""


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
        ordered = sorted(found, key=lambda name: min(list(layout.groups).index(group) for group in found[name]))
        for name in ordered:
            if len({layout.groups[group].size for group in found[name]}) > 1:
                raise SpaceError(f"the groups of the width `{name}` have different sizes: {', '.join(found[name])}.")
        return {name: tuple(dict.fromkeys(found[name])) for name in ordered}

    @cached_property
    def whole(self) -> Shape:
        """The full size of every width."""
        return tuple(self.server.layout.groups[groups[0]].size for groups in self.groups.values())

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
        levels = [
            _levels(full, most, least)
            for full, most, least in zip(self.whole, inside or self.whole, around or (1,) * len(self.whole), strict=True)
        ]
        field = self._field(levels, limits)
        if not field.fits(field.bottom[None])[0]:
            self._refuse(limits, [float(each[0]) for each in levels])
        if np.prod(field.top + 1.0) <= EVERY:
            found = self._best_of_all(field, levels)
        else:
            found = self._settled(field, levels, solve(field))
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
        """A choice, exchanged, a width down and another up, until none is better, or equal and comes first."""
        while True:
            moved = []
            for down in np.flatnonzero(found > 0):
                for up in range(len(found)):
                    for steps in range(1, int(field.top[up] - found[up]) + 1) if up != down else ():
                        choice = found.copy()
                        choice[down] -= 1
                        choice[up] += steps
                        moved.append(choice)
            choices = np.array([found, *moved])
            choices = choices[field.value(choices) >= field.value(found[None]) - SAME]
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


def _levels(full: int, most: int, least: int) -> Array:
    """The sizes that a width may have: multiples of the step, and where it begins or ends."""
    step = STEP if full >= 2 * STEP else 1
    every = {size for size in range(step, most + 1, step) if size >= least} | {most} | ({least} if least > 1 else set())
    return np.array(sorted(every), dtype=np.float64)


def _shapes(levels: Sequence[Array], choices: Levels) -> Array:
    return np.stack([each[choices[:, place]] for place, each in enumerate(levels)], 1)
