"""Devices by name: what they hold, compute, send and draw, each figure with its source or the word *assumed*.

The five kinds are those of RaFFM's published fleets. Which part of a model each of them trains was not published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

ASSUMED = "assumed"
SUSTAINED = 0.25
"""The part of its peak that a device reaches in training: assumed."""


@dataclass(frozen=True)
class Figure:
    """A number, and where it comes from."""

    value: float
    source: str = ASSUMED


@dataclass(frozen=True)
class Profile:
    """One kind of device."""

    title: str
    size: Figure
    """The part of the full model that it trains."""
    memory: Figure
    """Bytes."""
    peak: Figure
    """FLOP/s in float32."""
    bandwidth: Figure
    """Bytes/s to and from the server."""
    power: Figure
    """Watts while it trains and sends."""

    @property
    def speed(self) -> float:
        """FLOP/s that it computes with in training."""
        return SUSTAINED * self.peak.value

    def figures(self) -> dict[str, Figure]:
        """All figures by name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "title"}


GIGABYTE = 1e9
WIFI, ETHERNET, DATACENTRE = Figure(5e6), Figure(50e6), Figure(500e6)

PROFILES: Mapping[str, Profile] = {
    "pi4": Profile(
        "Raspberry Pi 4",
        size=Figure(1 / 4),
        memory=Figure(8 * GIGABYTE, "product brief: up to 8 GB"),
        peak=Figure(4 * 1.8e9 * 8, "4 Cortex-A72 cores x 1.8 GHz x one 128-bit multiply-add (8 operations) a cycle"),
        bandwidth=WIFI,
        power=Figure(7.0),
    ),
    "pi5": Profile(
        "Raspberry Pi 5",
        size=Figure(1 / 2),
        memory=Figure(8 * GIGABYTE, "product brief: the 8 GB model"),
        peak=Figure(4 * 2.4e9 * 16, "4 Cortex-A76 cores x 2.4 GHz x two 128-bit multiply-adds (16 operations) a cycle"),
        bandwidth=WIFI,
        power=Figure(10.0),
    ),
    "xps15": Profile(
        "Dell XPS 15",
        size=Figure(3 / 4),
        memory=Figure(16 * GIGABYTE),
        peak=Figure(4e12),
        bandwidth=Figure(10e6),
        power=Figure(90.0),
    ),
    "agx-orin": Profile(
        "Jetson AGX Orin",
        size=Figure(1.0),
        memory=Figure(64 * GIGABYTE, "data sheet: 64 GB module"),
        peak=Figure(2048 * 1.3e9 * 2, "data sheet: 2048 CUDA cores x 1.3 GHz x one multiply-add a cycle"),
        bandwidth=ETHERNET,
        power=Figure(60.0, "data sheet: up to 60 W"),
    ),
    "v100": Profile(
        "Tesla V100",
        size=Figure(1.0),
        memory=Figure(16 * GIGABYTE, "data sheet: 16 GB"),
        peak=Figure(5120 * 1.38e9 * 2, "data sheet: 5120 CUDA cores x 1.38 GHz (PCIe) x one multiply-add a cycle"),
        bandwidth=DATACENTRE,
        power=Figure(250.0, "data sheet (PCIe): 250 W"),
    ),
}

FLEETS: Mapping[str, Mapping[str, float]] = {
    "xsmall": {"pi4": 80, "pi5": 20},
    "small": {"pi4": 40, "pi5": 40, "xps15": 20},
    "medium": {"pi5": 30, "xps15": 40, "agx-orin": 30},
    "large": {"xps15": 20, "agx-orin": 40, "v100": 40},
    "xlarge": {"agx-orin": 10, "v100": 90},
}
"""RaFFM's system settings: how many of 100 clients have which device (README of its folder `system_heterogeneous`)."""
