"""Everybody trains the model that the smallest device can hold. The reference line that submodels must beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from raffm.methods.method import Device, Served, Share, Usual
from raffm.methods.shaped import shaped_share
from raffm.methods.shapes import Shapes, refuse_shapes
from raffm.methods.widths import refuse_widths
from raffm.models.labelled import Labelled


@dataclass(frozen=True)
class SmallestForAll(Usual):
    """One small model: the shape of the smallest size in the fleet, uniform or balanced. Nothing else is trained."""

    name: ClassVar[str] = "smallest-for-all"
    shapes: Shapes = "uniform"

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """It needs widths to cut."""
        refuse_widths(server, self.name, scaler=False, masked_loss=False)
        refuse_shapes(server, devices, self.shapes)

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share]:
        """The same for everybody."""
        return [self._smallest(server, device) for device in devices]

    def serve(self, server: Labelled, round: int, devices: Sequence[Device]) -> list[list[Served]]:
        """The small model to all that can hold it."""
        return [[Served((self._smallest(server, device),))] if device.size >= min(device.fleet) else [] for device in devices]

    def _smallest(self, server: Labelled, device: Device) -> Share:
        return shaped_share(server, min(device.fleet), device.fleet, self.shapes)
