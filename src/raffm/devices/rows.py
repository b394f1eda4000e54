"""Configs of a space as rows of numbers, which a cost model reads without any submodel being made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from raffm.algebra.axis import Expression, Name, names, value
from raffm.algebra.layout import Layout
from raffm.algebra.ranking import Ranking
from raffm.devices.basis import Array, Basis

Depth = Mapping[str, int]
"""The sizes of depth groups."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Makes rows of sizes from the sizes of chosen groups; which blocks a depth drops is the ranking's choice."""

    layout: Layout
    basis: Basis
    ranking: Ranking
    groups: Collection[str]
    _known: dict[tuple[tuple[str, int], ...], dict[str, int]] = field(default_factory=dict, init=False, repr=False)

    def left(self, depth: Depth) -> dict[str, int]:
        """The full sizes of the groups that a choice of depth leaves."""
        key = tuple(depth.items())
        if key not in self._known:
            self._known[key] = self.layout.sizes_of(self.ranking.cut(self.layout, depth))
        return self._known[key]

    def of(self, depth: Depth, sizes: Mapping[str, Array]) -> Array:
        """A row for each of several configs of one depth, given the sizes of their groups; other groups stay whole."""
        count = len(next(iter(sizes.values()))) if sizes else 1
        left = self.left(depth)
        columns = {group: np.full(count, float(size)) for group, size in left.items()}
        columns |= {group: every for group, every in sizes.items() if group in left}
        for group, expression in self.followers.items():
            if group in columns:
                columns[group] = np.asarray(value(expression, columns))  # type: ignore[arg-type]
        rows = np.repeat(self.basis.rows([left]), count, 0)
        for group in self.basis.varying & columns.keys():
            rows[:, self.basis.columns[group]] = columns[group]
        return rows

    @cached_property
    def followers(self) -> dict[str, Expression]:
        """The groups that ties bind to the chosen ones, and the sizes they must have."""
        found: dict[str, Expression] = {}
        for _ in self.layout.ties:
            for tie in self.layout.ties:
                for side, other in ((tie.left, tie.right), (tie.right, tie.left)):
                    if isinstance(side, Name) and side.group not in self.groups and set(names(other)) & {*self.groups, *found}:
                        found.setdefault(side.group, other)
        return found
