"""From a few measured submodels to a polynomial that predicts all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raffm.algebra.axis import Expression, Name, names
from raffm.algebra.layout import Layout
from raffm.algebra.ranking import Ranking, complete
from raffm.algebra.selection import Selection
from raffm.devices.basis import Array, Basis, Guard
from raffm.devices.probe import Reading
from raffm.seeds import generator

Measure = Callable[[Selection], list[Reading]]

EXACT, SMOOTH = 1e-10, 1e-2
_DRAWS = 48


@dataclass(frozen=True, eq=False)
class Regression:
    """Coefficients (terms, stretches, values) for the stretches of a run, and how far off they are."""

    guards: tuple[Guard, ...]
    coefficients: Array
    error: float
    """The largest relative error of a stretch's first value on submodels that were not used to find the coefficients."""


def regress(basis: Basis, measure: Measure, held_out: int = 0, cutoffs: Sequence[float] = (EXACT,)) -> Regression:
    """Measure as many submodels as it takes, and solve for the coefficients.

    `cutoffs` has an entry for each value of a reading: `EXACT` where that is a polynomial, `SMOOTH` where it is only
    near one, so that what the polynomial cannot follow is not amplified.

    Blocks of one kind share their coefficients, so that one submodel with other sizes in every block says as much as
    many: ViT-base takes two or three. A number of further ones are held out and tell the error.
    """
    draws = [{}, *_draws(basis)]
    full = basis.features(basis.rows([basis.layout.sizes]))
    features = basis.features(basis.rows([{**basis.layout.sizes, **sizes} for sizes in draws])) / full
    first = measure(Selection())
    kinds = _kinds(basis, first)
    count = max(_enough(np.stack([features[:, places] for places in kind.places], 1)) for kind in kinds)
    chosen = [Ranking().cut(basis.layout, sizes) for sizes in draws[1 : count + held_out]]
    readings = [first, *map(measure, chosen)]
    values = np.array([[reading.values for reading in every] for every in readings])  # (submodels, stretches, values)
    coefficients = np.zeros((len(basis.terms), *values.shape[1:]))
    error = 0.0
    for kind in kinds:
        used = np.stack([features[: len(readings), places] for places in kind.places], 1)  # (submodels, members, terms)
        solved = _solved(used[:count], values[:count, kind.stretches], cutoffs)
        error = max(error, _error(used[count:] @ solved, values[count:, kind.stretches]))
        for stretch, places in zip(kind.stretches, kind.places, strict=True):
            coefficients[places, stretch] = solved
    coefficients /= full[0][:, None, None]
    return Regression(tuple(reading.guard for reading in first), coefficients, error)


def _solved(features: Array, values: Array, cutoffs: Sequence[float]) -> Array:
    """The coefficients (terms, values) that fit best; directions weaker than the cutoff are left out."""
    flat = features.reshape(-1, features.shape[-1])
    every = values.reshape(len(flat), -1)
    return np.stack([np.linalg.lstsq(flat, every[:, place], rcond=cutoff)[0] for place, cutoff in enumerate(cutoffs)], 1)


def _error(predicted: Array, measured: Array) -> float:
    missed = np.abs(predicted - measured) / np.maximum(measured, 1)
    return float(missed[..., 0].max(initial=0.0))


def _enough(features: Array) -> int:
    """How many of the submodels (submodels, members, terms) say all that the terms can tell."""
    most = _rank(features)
    return next(count for count in range(1, len(features) + 1) if _rank(features[:count]) == most)


def _rank(features: Array) -> int:
    return int(np.linalg.matrix_rank(features.reshape(-1, features.shape[-1]), tol=1e-7))


# -- stretches of one kind -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """Stretches that behave alike, and where the terms of each stand in the basis, in one order."""

    stretches: list[int]
    places: list[list[int]]


def _kinds(basis: Basis, readings: Sequence[Reading]) -> list[_Kind]:
    """Blocks of one depth group are of one kind when their terms, and their readings in the full model, are the same."""
    found: dict[object, _Kind] = {}
    for stretch, reading in enumerate(readings):
        terms = {
            _relative(reading.guard, groups): basis.places[guard, groups] for guard, groups in _terms(basis, reading.guard)
        }
        key = (stretch,) if reading.guard is None else (reading.guard[0], frozenset(terms), reading.values[0])
        kind = found.setdefault(key, _Kind([], []))
        kind.stretches.append(stretch)
        kind.places.append([terms[groups] for groups in sorted(terms)])
    return list(found.values())


def _terms(basis: Basis, guard: Guard) -> tuple[tuple[Guard, tuple[str, ...]], ...]:
    return basis.by_guard.get(guard, ((None, ()),))


def _relative(guard: Guard, groups: tuple[str, ...]) -> tuple[str, ...]:
    """The groups of a term without the number of their block."""
    own = "" if guard is None else f"{guard[0]}.{guard[1]}."
    return tuple(sorted(f".{group.removeprefix(own)}" if own and group.startswith(own) else group for group in groups))


# -- submodels to measure ------------------------------------------------------------------------------------------


def _draws(basis: Basis) -> Iterator[dict[str, int]]:
    """Random sizes of the groups that vary; all blocks are kept."""
    draw = generator(0, "cost")
    independent = sorted(_independent(basis.layout, basis.varying))
    for _ in range(_DRAWS):
        yield complete(basis.layout, {name: _size(basis.layout, name, draw) for name in independent})


def _size(layout: Layout, name: str, draw: torch.Generator) -> int:
    group = layout.groups[name]
    choices = [size for size in range(group.least, group.size + 1) if size % group.step == 0 or size == group.size]
    return choices[int(torch.randint(len(choices), (1,), generator=draw))]


def _independent(layout: Layout, varying: frozenset[str]) -> set[str]:
    """The varying groups whose sizes can be drawn; ties give those of the others."""
    given = {group for tie in layout.ties for group in _given_by(tie.left, tie.right)}
    return {group for group in varying if group in layout.free and group not in layout.depths} - given


def _given_by(left: Expression, right: Expression) -> Iterator[str]:
    """The group that a tie determines from the others."""
    for side, other in ((left, right), (right, left)):
        if isinstance(side, Name) and side.group not in names(other):
            yield side.group
            return
