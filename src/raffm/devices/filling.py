"""The search behind balanced shapes of many widths: fill all of them alike, then trade.

Values are concave and costs nearly add up, so the best choice is close to where a level of every knob gains the same for what
it costs. Finding that takes one table of costs and a bisection; trades with what was left over do the rest.
"""

from __future__ import annotations

import numpy as np

from raffm.devices.basis import Array
from raffm.devices.search import Field, Levels, climbed

TURNS = 4
"""How often costs are looked at anew, since they depend on the other knobs a little."""

FREE = 1e-15
"""What a level costs at least, of all limits."""

SMALLER = 0.999
"""What costs less than this part of something is smaller than it."""


def filled(field: Field) -> Levels:
    """Every knob raised as long as a level gains enough for what it costs, by the lowest such price that fits; then climbed."""
    found = field.bottom
    for _ in range(TURNS):
        new = _at_lowest_price(field, _gains(field, found))
        if (new == found).all():
            break
        found = new
    return climbed(field, found)


def _gains(field: Field, found: Levels) -> list[Array]:
    """What the levels of every knob gain for what they cost, beside the others as they are; never more than one before."""
    gains = []
    for knob, top in enumerate(field.top):
        every = np.repeat(found[None], top + 1, 0)
        every[:, knob] = np.arange(top + 1)
        costs = np.maximum(np.diff(field.usage(every).sum(1)), FREE)
        gains.append(np.minimum.accumulate(np.diff(field.values[knob][: top + 1]) / costs))
    return gains


def _at_lowest_price(field: Field, gains: list[Array]) -> Levels:
    """The levels that gain at least a price, the lowest at which they fit together."""
    prices = np.unique(np.concatenate(gains))

    def at(place: int) -> Levels:
        price = prices[place] if place < len(prices) else np.inf
        return np.array([int((each >= price).sum()) for each in gains], dtype=np.int64)

    low, high = 0, len(prices)
    while low < high:
        middle = (low + high) // 2
        if field.fits(at(middle)[None])[0]:
            high = middle
        else:
            low = middle + 1
    return at(low)


def trades(field: Field, found: Levels, same: float) -> Levels:
    """The choice itself, and others of at least its value that it can be traded for, whether they fit or not.

    A level of one knob for some of another; some of one knob for a level of another; and a level of one knob for smaller ones
    of several.
    """
    own = field.values[np.arange(len(found)), found]
    moved = [found, *_small_for_large(field, found)]
    for one in range(len(found)):
        gains = field.values[one][found[one] + 1 : field.top[one] + 1] - own[one]
        for other in map(int, np.flatnonzero(found > 0)):
            losses = own[other] - field.values[other][: found[other]][::-1]
            if other == one or not len(gains):
                continue
            up = int(np.searchsorted(gains, losses[0] - same)) + 1
            down = int(np.searchsorted(losses, gains[0] + same, side="right"))
            moved += [_moved(found, one, up, other, 1)] if up <= len(gains) else []
            moved += [_moved(found, one, 1, other, down)] if down else []
    choices = np.array(moved)
    return choices[field.value(choices) >= field.value(found[None]) - same]


def _moved(found: Levels, one: int, up: int, other: int, down: int) -> Levels:
    choice = found.copy()
    choice[one] += up
    choice[other] -= down
    return choice


def _small_for_large(field: Field, found: Levels) -> list[Levels]:
    """Every knob a level higher, and others, whose levels cost less, lower until that fits."""
    raised = []
    for knob in np.flatnonzero(found < field.top):
        choice = found.copy()
        choice[knob] += 1
        lower = _lowered(field, choice, float((field.usage(choice[None]) - field.usage(found[None])).sum()))
        raised += [] if lower is None else [climbed(field, lower)]
    return raised


def _lowered(field: Field, choice: Levels, cost: float) -> Levels | None:
    """A choice that fits, by lowering what loses least for what it frees; no level that costs as much as this."""
    while True:
        used = field.usage(choice[None])
        if (used <= 1).all():
            return choice
        knobs = np.flatnonzero(choice > 0)
        lower = np.repeat(choice[None], len(knobs), 0)
        lower[np.arange(len(knobs)), knobs] -= 1
        freed = (used - field.usage(lower)).sum(1)
        is_small = freed < SMALLER * cost
        if not is_small.any():
            return None
        losses = (field.value(choice[None]) - field.value(lower[is_small])) / np.maximum(freed[is_small], FREE)
        choice = lower[is_small][int(losses.argmin())]
