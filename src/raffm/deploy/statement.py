"""What a node says of itself: its examples, and what its device can hold.

It stands in the node's config (`flower-supernode --node-config "max-params='45M' speed='20G'"`):

    size          a part of the model, '1/4'; or limits, from which the server finds the part:
    max-params    numbers of a submodel
    max-memory    bytes of a training step
    max-flops     FLOPs of one example
    speed         FLOP/s in training, bandwidth    bytes/s: for the virtual clock
    auto          true: what is not stated is measured
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from raffm.devices.budget import Budget
from raffm.errors import RunError

UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}

LIMITS = ("max-params", "max-memory", "max-flops")

MEASURED_PART = 0.5
"""The part of the free memory that a node that measures itself gives to training."""


@dataclass(frozen=True)
class Device:
    """What a node's device can hold: a part of the model, or limits; without either, all of it."""

    size: float | None = None
    budget: Budget | None = None
    speed: float | None = None
    bandwidth: float | None = None


def stated(config: Mapping[str, Any]) -> dict[str, Any]:
    """A node's statement about its device, in plain values, from its config."""
    found: dict[str, Any] = {}
    if "size" in config:
        found["size"] = _part(config["size"])
    for key in (*LIMITS, "speed", "bandwidth"):
        if key in config:
            found[key] = quantity(config[key], key)
    return {**measured(found), **found} if config.get("auto") else found


def measured(known: Mapping[str, Any]) -> dict[str, Any]:
    """What this machine can do, as far as it is not known."""
    from raffm.devices.machine import measure

    machine = measure()
    found: dict[str, Any] = {"speed": machine.speed}
    if "size" not in known and not any(key in known for key in LIMITS):
        found["max-memory"] = MEASURED_PART * machine.memory
    return found


def device_from(said: Mapping[str, Any]) -> Device:
    """What was stated, checked: it comes from another machine."""
    numbers = {key: quantity(said[key], key) for key in (*LIMITS, "speed", "bandwidth") if key in said}
    limits = {key.replace("-", "_"): int(numbers[key]) for key in LIMITS if key in numbers}
    size = _part(said["size"]) if "size" in said else None
    return Device(size, Budget(**limits) if limits else None, numbers.get("speed"), numbers.get("bandwidth"))


def quantity(text: Any, what: str) -> float:
    """A number as people write it: 45M, 1.5G, 2e9.

    >>> quantity("45M", "max-params")
    45000000.0
    """
    plain = str(text).strip().lower()
    unit = UNITS.get(plain[-1:], 1.0)
    try:
        found = float(plain[:-1] if unit > 1 else plain) * unit
    except ValueError:
        found = float("nan")
    if not 0 < found < float("inf"):
        raise RunError(f"`{what}` is {text!r}; it is a number above 0, such as 45M or 2e9.")
    return found


def _part(text: Any) -> float:
    try:
        found = float(Fraction(str(text)))
    except (ValueError, ZeroDivisionError):
        found = 0.0
    if not 0 < found <= 1:
        raise RunError(f"`size` is {text!r}; it is a part of the model, such as 1/4.")
    return found
