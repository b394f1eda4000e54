"""Everybody trains the model that the smallest device can hold. The reference line that submodels must beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from raffm.methods.method import Device, Served, Share, Usual
from raffm.methods.widths import prefix, refuse_widths
from raffm.models.labelled import Labelled


@dataclass(frozen=True)
class SmallestForAll(Usual):
    """One small model: the first sqrt(g) of every width, g the smallest size in the fleet. Nothing else is trained."""

    name: ClassVar[str] = "smallest-for-all"

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """It needs widths to cut."""
        refuse_widths(server, self.name, scaler=False, masked_loss=False)

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share]:
        """The same for everybody."""
        shares = {size: prefix(server, size) for size in {min(device.fleet) for device in devices}}
        return [shares[min(device.fleet)] for device in devices]

    def serve(self, server: Labelled, round: int, devices: Sequence[Device]) -> list[list[Served]]:
        """The small model to all that can hold it."""
        least = [min(device.fleet) for device in devices]
        return [
            [Served((prefix(server, size),))] if device.size >= size else []
            for device, size in zip(devices, least, strict=True)
        ]
