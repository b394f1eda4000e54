"""The products of group sizes that costs are sums of.

The number of parameters, the FLOPs and the bytes of activations are polynomials in the group sizes. Their monomials
are known from the labels: those of all tensors, and their divisors (a layer's activations have one axis of its weight).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import prod

import numpy as np
from numpy.typing import NDArray

from raffm.algebra.axis import Label, Number, Product, monomials, names
from raffm.algebra.layout import Layout

Guard = tuple[str, int] | None
"""A block, or None for what lies outside all blocks."""

Term = tuple[Guard, tuple[str, ...]]
"""A product of group sizes that counts while its block is kept."""

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Basis:
    """All terms of a layout in which some groups vary; the sizes of the others are plain numbers."""

    layout: Layout
    varying: frozenset[str]

    @cached_property
    def of_labels(self) -> dict[str, dict[Term, int]]:
        """The number of elements of every tensor as a polynomial."""
        return {name: self._polynomial(label) for name, label in self.layout.labels.items()}

    @cached_property
    def by_guard(self) -> dict[Guard, tuple[Term, ...]]:
        """The terms of every block and of what lies outside: those of its labels, and their divisors."""
        found: dict[Guard, set[tuple[str, ...]]] = {None: {()} | {(group,) for group in self.varying if self._is_shared(group)}}
        for polynomial in self.of_labels.values():
            for guard, groups in polynomial:
                found.setdefault(guard, set()).update(_divisors(groups))
        return {guard: tuple((guard, groups) for groups in sorted(every)) for guard, every in found.items()}

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """All terms, in the order of a vector of coefficients."""
        return tuple(term for terms in self.by_guard.values() for term in terms)

    @cached_property
    def places(self) -> dict[Term, int]:
        """Where a term stands among all."""
        return {term: place for place, term in enumerate(self.terms)}

    @cached_property
    def columns(self) -> dict[str | Guard, int]:
        """Where a group's size, and whether a block is kept, stand in a row of sizes; None stands for 1."""
        return {key: place for place, key in enumerate([*self.by_guard, *sorted(self.varying)])}

    def vector(self, *polynomials: tuple[Mapping[Term, int], float]) -> Array:
        """The coefficients of a weighted sum of polynomials."""
        made = np.zeros(len(self.terms))
        for polynomial, weight in polynomials:
            for term, times in polynomial.items():
                made[self.places[term]] += times * weight
        return made

    def rows(self, every: Sequence[Mapping[str, int]]) -> Array:
        """Sizes as rows of numbers. Groups that are missing there belong to dropped blocks."""
        made = np.ones((len(every), len(self.columns)))
        for row, sizes in zip(made, every, strict=True):
            for group in self.varying:
                row[self.columns[group]] = sizes.get(group, 0)
            for guard, owned in self._owned.items():
                row[self.columns[guard]] = any(group in sizes for group in owned)
        return made

    def features(self, rows: Array) -> Array:
        """The value of every term, for every row of sizes."""
        made = rows[:, self._factors[0]]
        for factor in self._factors[1:]:
            made *= rows[:, factor]
        return made

    @cached_property
    def _factors(self) -> NDArray[np.int64]:
        """The columns to multiply, an array (factors, terms); short products are filled up with 1."""
        chosen = [[self.columns[guard], *(self.columns[group] for group in groups)] for guard, groups in self.terms]
        most = max(map(len, chosen))
        return np.array([columns + [self.columns[None]] * (most - len(columns)) for columns in chosen]).T.copy()

    @cached_property
    def _owned(self) -> dict[Guard, list[str]]:
        """The groups of every block that has some."""
        found: dict[Guard, list[str]] = {}
        for name, group in self.layout.groups.items():
            if group.guard is not None:
                found.setdefault(group.guard, []).append(name)
        return found

    def _polynomial(self, label: Label) -> dict[Term, int]:
        counts: Counter[Term] = Counter()
        for groups, times in monomials(Product(label.axes) if label.axes else Number(1)):
            fixed = prod(self.layout.sizes[group] for group in groups if group not in self.varying)
            counts[label.guard, tuple(group for group in groups if group in self.varying)] += times * fixed
        return counts

    def _is_shared(self, group: str) -> bool:
        return self.layout.groups[group].guard is None


def _divisors(groups: tuple[str, ...]) -> set[tuple[str, ...]]:
    return {part for count in range(len(groups) + 1) for part in combinations(groups, count)}


def varying_groups(layout: Layout, free: Iterable[str] | None = None) -> frozenset[str]:
    """The groups whose sizes change when these are cut (by default: all that can be), with those tied to them."""
    chosen = set(layout.free if free is None else free)
    for _ in layout.ties:
        for tie in layout.ties:
            tied = {*names(tie.left), *names(tie.right)}
            if tied & chosen:
                chosen |= {group for group in tied if not layout.groups[group].pinned}
    return frozenset(group for group in chosen if group not in layout.depths or layout.uses(group))
