"""A fleet: how many clients have which device. Sizes are parts of the full model's parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor, inf

import torch
from torch import Tensor

from raffm.devices.budget import Budget
from raffm.devices.profiles import FLEETS, PROFILES
from raffm.errors import RunError
from raffm.seeds import generator

SPEED = 1e10
"""FLOP/s that a device computes with, unless its tier says otherwise: assumed."""

BANDWIDTH = 1e6
"""Bytes/s that a device sends and receives, unless its tier says otherwise: assumed."""

POWER = 10.0
"""Watts that a device draws while it trains and sends, unless its tier says otherwise: assumed."""


@dataclass(frozen=True)
class Tier:
    """Devices of one kind. `share` counts relative to the other tiers' shares."""

    size: float
    share: float = 1.0
    name: str = ""
    speed: float = SPEED
    bandwidth: float = BANDWIDTH
    budget: Budget | None = None
    power: float = POWER

    def __post_init__(self) -> None:
        if not 0 < self.size <= 1:
            raise RunError(f"a device's size is a part of the full model, above 0 and at most 1, but was given {self.size!r}.")
        if not 0 <= self.share < inf:
            raise RunError(f"the share of the devices of size {self.size!r} is {self.share!r}; it is a number of at least 0.")
        if self.speed <= 0 or self.bandwidth <= 0 or not 0 <= self.power < inf:
            raise RunError(f"devices of size {self.size!r} need a speed and a bandwidth above 0, and a power of at least 0.")

    @property
    def label(self) -> str:
        """Its name, or its size as people write it: 1/4; with its limits, where it has some."""
        limits = self.budget.limits if self.budget is not None else {}
        within = ", ".join(f"{limit:,} {kind}" for kind, limit in limits.items())
        return (self.name or size_name(self.size)) + (f" within {within}" if within else "")


@dataclass(frozen=True)
class Fleet:
    """Tiers, and whether clients keep theirs (`redraw` False) or draw one anew each round, as published tables do.

    `dealt` gives the tier of every client, by its place, where it is known; otherwise tiers are dealt by their shares.
    """

    tiers: tuple[Tier, ...]
    redraw: bool = False
    dealt: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.tiers or not sum(tier.share for tier in self.tiers):
            raise RunError("a fleet needs at least one tier with a share above 0.")

    @property
    def sizes(self) -> tuple[float, ...]:
        """The different sizes, largest first."""
        return tuple(sorted({tier.size for tier in self.tiers}, reverse=True))

    def tiers_of(self, clients: int, seed: int, round: int = 0) -> Tensor:
        """The tier of every client, by its place in `tiers`: dealt in exact shares, in a random order.

        The largest remainders get the clients that do not divide evenly; of equal ones the first tiers.
        """
        if self.dealt:
            return torch.tensor(self.dealt)
        counts = _dealt(clients, [tier.share for tier in self.tiers])
        places = torch.repeat_interleave(torch.arange(len(self.tiers)), torch.tensor(counts))
        purpose = ("fleet", round) if self.redraw else ("fleet",)
        return places[torch.randperm(clients, generator=generator(seed, *purpose))]


def _dealt(count: int, shares: Sequence[float]) -> list[int]:
    exact = [count * Fraction(share) / sum(map(Fraction, shares)) for share in shares]  # equal remainders must be equal
    dealt = [floor(part) for part in exact]
    by_remainder = sorted(range(len(shares)), key=lambda place: dealt[place] - exact[place])
    for place in by_remainder[: count - sum(dealt)]:
        dealt[place] += 1
    return dealt


def size_name(size: float) -> str:
    """1/4 for 0.25, 0.36 for 0.36."""
    nearest = Fraction(size).limit_denominator(4096)
    if nearest.numerator == 1 and abs(float(nearest) - size) < 1e-9:
        return str(nearest)
    return f"{size:g}"


# -- fleets by name ------------------------------------------------------------------------------------------------

LEVELS = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125, "e": 0.0625}
"""HeteroFL's widths; a level's size is its square."""

NAMED: Mapping[str, tuple[float, ...]] = {
    "full": (1.0,),
    "quarters": (1.0, 1 / 4, 1 / 16, 1 / 64),
    "fifths": (1.0, 0.64, 0.36, 0.16, 0.04),
    "a-e": tuple(width**2 for width in LEVELS.values()),
}
"""FIARSE's two fleets, HeteroFL's levels a to e, and everybody full; shares are equal."""

_LEVELS_NOTATION = re.compile(r"[a-e]\d+(-[a-e]\d+)*")


def fleet_of(text: str, redraw: bool = False) -> Fleet:
    """A fleet from what a person types: a name, `a1-b1-e2` (levels and shares), or `1:10, 1/4:30` (sizes and shares)."""
    text = text.strip()
    if text in NAMED:
        return Fleet(tuple(Tier(size) for size in NAMED[text]), redraw)
    if text in FLEETS:
        return Fleet(tuple(tier_of(name, share) for name, share in FLEETS[text].items()), redraw)
    if _LEVELS_NOTATION.fullmatch(text):
        entries = [(LEVELS[part[0]] ** 2, float(part[1:])) for part in text.split("-")]
        return Fleet(tuple(Tier(size, share) for size, share in entries), redraw)
    try:
        pairs = [part.partition(":") for part in text.split(",")]
        tiers = tuple(Tier(float(Fraction(size.strip())), float(share or 1)) for size, _, share in pairs)
    except (ValueError, ZeroDivisionError):
        raise RunError(
            f"there is no fleet {text!r}. Fleets by name: {', '.join([*NAMED, *FLEETS])}; levels with shares: a1-b1-c1-d1-e1; "
            "sizes with shares: 1:10, 1/4:30, 1/16:60."
        ) from None
    return Fleet(tiers, redraw)


def tier_of(name: str, share: float = 1.0) -> Tier:
    """Devices of a kind that `profiles.py` knows."""
    if name not in PROFILES:
        raise RunError(f"there is no device {name!r}. The devices are: {', '.join(PROFILES)}.")
    about = PROFILES[name]
    return Tier(about.size.value, share, about.title, about.speed, about.bandwidth.value, power=about.power.value)
