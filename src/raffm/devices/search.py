"""The search behind `fit`: a level for every knob, the greatest value, and costs that must stay within limits.

It knows nothing of models. Values add up over the knobs; costs are any functions that rise with the levels. Many
choices are judged at once, as rows of an integer array (choices, knobs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, combinations

import numpy as np
import torch
from numpy.typing import NDArray

from raffm.devices.basis import Array
from raffm.seeds import generator

Levels = NDArray[np.int64]

_EXHAUSTIVE = 1 << 18
_CHUNK, _TRIED = 1 << 12, 1 << 11
_RANDOM = 1000
_REFINED = 3
_SHAKES, _SHAKEN = 12, 4
_GAIN = 1e-12
_SLACK = 0.005
"""How much the costs of moves made together may differ from the sum of their costs."""


@dataclass(frozen=True, eq=False)
class Field:
    """What is searched: the value of every level of every knob, and what choices use of each limit (1 is all of it).

    Levels that a knob does not have are worth minus infinity. `wide` knobs change the cost of most others.
    """

    values: Array  # (knobs, levels)
    usage_of: Callable[[Levels], Array]  # (choices, knobs) -> (choices, limits)
    wide: tuple[int, ...] = ()

    @cached_property
    def top(self) -> Levels:
        """The highest level of every knob."""
        highest: Levels = np.isfinite(self.values).sum(1) - 1
        return highest

    @cached_property
    def bottom(self) -> Levels:
        """The lowest level of every knob."""
        return np.zeros_like(self.top)

    def value(self, choices: Levels) -> Array:
        """The summed value of every choice."""
        worth: Array = self.values[np.arange(len(self.values)), choices].sum(-1)
        return worth

    def usage(self, choices: Levels) -> Array:
        """The share of every limit that every choice uses."""
        if not len(choices):
            return np.empty((0, 1))
        parts = [self.usage_of(choices[start : start + _CHUNK]) for start in range(0, len(choices), _CHUNK)]
        return np.concatenate(parts)

    def fits(self, choices: Levels) -> NDArray[np.bool_]:
        """Whether each choice is within all limits."""
        return np.asarray((self.usage(choices) <= 1).all(1))

    def best(self, choices: Levels) -> Levels | None:
        """The first of the most valuable choices that fit."""
        fitting = choices[self.fits(choices)]
        return fitting[int(self.value(fitting).argmax())] if len(fitting) else None


def solve(field: Field) -> Levels:
    """The best choice that can be found; the lowest one must fit. No level of it can be raised by one."""
    if not len(field.top):
        return field.top
    if np.prod(field.top + 1.0) <= _EXHAUSTIVE:
        every = np.indices((field.top + 1).tolist(), dtype=np.int64).reshape(len(field.top), -1).T
        found = field.best(every)
        return climbed(field, field.bottom if found is None else found)
    starts = sorted(_starts(field), key=lambda choice: -float(field.value(choice)))
    refined = [exchanged(field, choice) for choice in _distinct(starts)[:_REFINED]]
    return _shaken(field, max(refined, key=lambda choice: float(field.value(choice))))


def first_guess(field: Field) -> Levels:
    """A good choice at little expense."""
    return climbed(field, descended(field, field.top))


def _starts(field: Field) -> Iterator[Levels]:
    """Descents from the top, from equal levels, from every level of a wide knob; and the best of many random choices."""
    yield first_guess(field)
    for level in range(int(field.top.max())):
        yield climbed(field, descended(field, np.minimum(field.top, level)))
    for knob in field.wide:
        for level in range(int(field.top[knob])):
            start = field.top.copy()
            start[knob] = level
            yield climbed(field, descended(field, start))
    draw = torch.rand((_RANDOM, len(field.top)), generator=generator(0, "fit"), dtype=torch.float64).numpy()
    found = field.best((draw * (field.top + 1)).astype(np.int64))
    if found is not None:
        yield climbed(field, found)


def _distinct(choices: list[Levels]) -> list[Levels]:
    return list({choice.tobytes(): choice for choice in choices}.values())


def _shaken(field: Field, choice: Levels) -> Levels:
    """Move a few knobs at random and search again from there; keep what is better."""
    draw = generator(0, "fit", "shake")
    for _ in range(_SHAKES):
        knobs = torch.randperm(len(choice), generator=draw)[:_SHAKEN].numpy()
        moved = choice.copy()
        moved[knobs] = (torch.rand(len(knobs), generator=draw).numpy() * (field.top[knobs] + 1)).astype(np.int64)
        moved = exchanged(field, descended(field, moved))
        if field.value(moved) > field.value(choice) + _GAIN:
            choice = moved
    return choice


def descended(field: Field, choice: Levels) -> Levels:
    """Lower one knob after another, always the one that loses least for what it saves, until the choice fits."""
    while True:
        before = field.usage(choice[None])[0]
        if (before <= 1).all():
            return choice
        lower = _steps(field, choice, -1)
        after = field.usage(lower)
        lost = np.maximum(field.value(choice) - field.value(lower), 0.0)
        saved = _excess(before) - _excess(after)
        if not (saved > 0).any():  # a peak that no single step lowers
            saved = before.sum() - after.sum(1)
        choice = lower[int(np.argmin((lost + 1e-12) / np.maximum(saved, 1e-15)))]


def _excess(usage: Array) -> Array:
    above: Array = np.maximum(usage - 1, 0).sum(-1)
    return above


def climbed(field: Field, choice: Levels) -> Levels:
    """Raise one knob after another, always the one that gains most, until none can be raised."""
    while True:
        found = field.best(_steps(field, choice, +1))
        if found is None:
            return choice
        choice = found


def _steps(field: Field, choice: Levels, step: int) -> Levels:
    """All choices with one knob a level higher or lower."""
    knobs = np.flatnonzero((choice + step >= 0) & (choice + step <= field.top))
    moved = np.repeat(choice[None], len(knobs), 0)
    moved[np.arange(len(knobs)), knobs] += step
    return moved


# -- exchanges -----------------------------------------------------------------------------------------------------


def exchanged(field: Field, choice: Levels) -> Levels:
    """Trade levels between two or three knobs as long as that gains."""
    while True:
        choice = climbed(field, choice)
        found = _trade(field, choice, 2, reach=int(field.top.max()))
        if found is None:
            found = _trade(field, choice, 3, reach=1)
        if found is None:
            return choice
        choice = found


def _trade(field: Field, choice: Levels, count: int, reach: int) -> Levels | None:
    """The best choice that fits and differs in so many knobs, each by at most `reach` levels."""
    knobs, targets = _moves(field, choice, reach)
    gains = field.values[knobs, targets] - field.values[knobs, choice[knobs]]
    alone = np.repeat(choice[None], len(knobs), 0)
    alone[np.arange(len(knobs)), knobs] = targets
    before = field.usage(choice[None])[0]
    extra = field.usage(alone) - before
    picks = _picks(len(knobs), count)
    picks = picks[gains[picks].sum(1) > _GAIN]
    picks = picks[_are_distinct(knobs[picks])]
    picks = picks[(before + extra[picks].sum(1) <= 1 + _SLACK).all(1)]
    picks = picks[np.argsort(-gains[picks].sum(1), kind="stable")][:_TRIED]
    moved = np.repeat(choice[None], len(picks), 0)
    np.put_along_axis(moved, knobs[picks], targets[picks], 1)
    return field.best(moved)


def _moves(field: Field, choice: Levels, reach: int) -> tuple[Levels, Levels]:
    """Every knob with every other level it may take."""
    pairs = [
        (knob, level)
        for knob, (now, top) in enumerate(zip(choice.tolist(), field.top.tolist(), strict=True))
        for level in range(max(0, now - reach), min(top, now + reach) + 1)
        if level != now
    ]
    made = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return made[:, 0], made[:, 1]


@lru_cache(maxsize=16)
def _picks(total: int, count: int) -> Levels:
    """All ways to pick so many of a total, an array (ways, count)."""
    every = chain.from_iterable(combinations(range(total), count))
    return np.fromiter(every, dtype=np.int64).reshape(-1, count)


def _are_distinct(knobs: Levels) -> NDArray[np.bool_]:
    ordered = np.sort(knobs, 1)
    return np.asarray((ordered[:, 1:] != ordered[:, :-1]).all(1))
