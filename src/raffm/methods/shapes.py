"""Which widths a device of a size gets: all by one ratio ("uniform"), "balanced" under its budget, or as somebody says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

from raffm.devices.balance import Shape, Widths
from raffm.devices.fleet import size_name
from raffm.errors import BudgetError, RunError
from raffm.methods.method import Device
from raffm.methods.widths import ratio_of, width_sizes
from raffm.models.labelled import Labelled

Shapes = str | Mapping[str, Sequence[int]]
"""`uniform`, `balanced`, or for every size its widths, in the order of the family's table: {"1/4": [64, 128, 160, 160]}."""


def sizes_at(server: Labelled, size: float, fleet: Sequence[float], shapes: Shapes) -> dict[str, int]:
    """The sizes of the groups of a submodel for devices of a size; `fleet` are all sizes that devices were dealt."""
    if shapes == "uniform":
        return width_sizes(server.layout, ratio_of(size))
    widths = Widths(server)
    return widths.sizes(shape_of(widths, size, tuple(sorted(set(fleet), reverse=True)), shapes))


def refuse_shapes(server: Labelled, devices: Sequence[Device], shapes: Shapes) -> None:
    """Every device needs a shape, and one that was given must lie inside those of larger devices."""
    found = [(device.size, sizes_at(server, device.size, device.fleet, shapes)) for device in devices]
    ordered = sorted(found, key=lambda entry: -entry[0])
    for (larger, large), (smaller, small) in pairwise(ordered):
        if any(size > large[group] for group, size in small.items()):
            raise RunError(f"the shape of size {smaller:g} does not lie inside that of size {larger:g}.")


def shape_of(widths: Widths, size: float, fleet: tuple[float, ...], shapes: Shapes) -> Shape:
    """A size for every width. That of a size which nobody was dealt lies between those that some were."""
    if isinstance(shapes, str):
        if shapes != "balanced":
            raise RunError(f'shapes are "uniform", "balanced", or widths for every size, not {shapes!r}.')
        return _balanced(widths, size, fleet)
    known = {_size_in(label): tuple(given) for label, given in shapes.items()}
    if size == 1 and 1.0 not in known:
        return widths.whole
    if size not in known:
        raise RunError(f"shapes are given for the sizes {', '.join(shapes)}, but not for {size:g}.")
    shape = known[size]
    is_whole = all(isinstance(one, int) for one in shape) and len(shape) == len(widths.whole)
    if not is_whole or not all(0 < one <= most for one, most in zip(shape, widths.whole, strict=True)):
        names = ", ".join(f"{name} {most}" for name, most in zip(widths.groups, widths.whole, strict=True))
        raise RunError(f"the shape {list(shape)} of size {size:g} does not fit; the widths, and their most, are: {names}.")
    return shape


def _size_in(label: str) -> float:
    try:
        return float(Fraction(label))
    except (ValueError, ZeroDivisionError):
        raise RunError(f"shapes are given for sizes such as 1/4, but one is for {label!r}.") from None


_KNOWN: dict[tuple[str, float, tuple[float, ...]], Shape] = {}
"""Balanced shapes by layout, size and fleet: they follow from these alone, and finding one takes up to seconds."""

MANY = 1024
"""Shapes that are remembered."""


def _balanced(widths: Widths, size: float, fleet: tuple[float, ...]) -> Shape:
    """In a fleet: inside the next larger shape of the fleet. Others also around the next smaller one."""
    if size >= 1:
        return widths.whole
    key = widths.server.layout.fingerprint, size, fleet
    if key not in _KNOWN:
        found = _found(widths, size, fleet)
        if len(_KNOWN) >= MANY:
            _KNOWN.clear()
        _KNOWN[key] = found
    return _KNOWN[key]


def _found(widths: Widths, size: float, fleet: tuple[float, ...]) -> Shape:
    larger = min((each for each in fleet if each > size), default=1.0)
    smaller = max((each for each in fleet if each < size), default=None)
    around = None if smaller is None or size in fleet else _balanced(widths, smaller, fleet)
    inside = _balanced(widths, larger, fleet)
    try:
        return widths.balanced(widths.budget(size), inside, around)
    except BudgetError as error:
        raise BudgetError(f'size {size_name(size)}: {error} Or cut all widths alike: method.shapes = "uniform".') from None
