"""What a node says of itself: its examples, and what its device can hold.

It stands in the node's config (`flower-supernode --node-config "max-params='45M' speed='20G'"`):

    size          a part of the model, '1/4'; or limits, from which the server finds the part:
    max-params    numbers of a submodel
    max-memory    bytes of a training step
    max-flops     FLOPs of one example
    speed         FLOP/s in training, bandwidth    bytes/s: for the virtual clock
    auto          true: what is not stated is measured
    data          where its examples are; or, in a trial, partition-id and num-partitions

Other keys are refused, so that a slip of the pen does not give a small device the full model; those that begin with `x-` are
left to others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from typing import Any

from raffm.devices.budget import Budget
from raffm.errors import RunError

UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}

LIMITS = ("max-params", "max-memory", "max-flops")

KEYS = ("size", *LIMITS, "speed", "bandwidth", "auto", "data", "partition-id", "num-partitions")

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
    for key in config:
        if key not in KEYS and not key.startswith("x-"):
            near = get_close_matches(key, KEYS, 1)
            hint = f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(KEYS)}."
            raise RunError(f"the node's config has the unknown key {key!r}.{hint}")
    found: dict[str, Any] = {}
    if "size" in config:
        found["size"] = part(config["size"])
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


def said_of(device: Device) -> dict[str, Any]:
    """What `device_from` reads: the statement of a device."""
    limits = {} if device.budget is None else {f"max-{kind}": limit for kind, limit in device.budget.limits.items()}
    plain = {"size": device.size, "speed": device.speed, "bandwidth": device.bandwidth, **limits}
    return {key: entry for key, entry in plain.items() if entry is not None}


def device_from(said: Mapping[str, Any]) -> Device:
    """What was stated, checked: it comes from another machine."""
    numbers = {key: quantity(said[key], key) for key in (*LIMITS, "speed", "bandwidth") if key in said}
    limits = {key.replace("-", "_"): int(numbers[key]) for key in LIMITS if key in numbers}
    size = part(said["size"]) if "size" in said else None
    return Device(size, Budget(**limits) if limits else None, numbers.get("speed"), numbers.get("bandwidth"))


def quantity(text: Any, what: str) -> float:
    """A number as people write it: 45M, 1.5G, 2e9.

    >>> quantity("45M", "max-params")
    45000000.0
    """
    found = number_in(text)
    if not 0 < found < float("inf"):
        raise RunError(f"`{what}` is {text!r}; it is a number above 0, such as 45M or 2e9.")
    return found


def number_in(text: Any) -> float:
    """The number that a text with a unit stands for; not a number where it is none."""
    plain = str(text).strip().lower()
    unit = UNITS.get(plain[-1:], 1.0)
    try:
        return float(plain[:-1] if unit > 1 else plain) * unit
    except ValueError:
        return float("nan")


def part(text: Any) -> float:
    """A part of the model: 1/4, 0.25."""
    try:
        found = float(Fraction(str(text)))
    except (ValueError, ZeroDivisionError):
        found = 0.0
    if not 0 < found <= 1:
        raise RunError(f"`size` is {text!r}; it is a part of the model, such as 1/4.")
    return found
