"""FedAvg among the clients whose devices hold the whole model; all others sit out. A reference line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from raffm.errors import RunError
from raffm.methods.fedavg import FedAvg
from raffm.methods.method import Device, Share
from raffm.models.labelled import Labelled


@dataclass(frozen=True)
class FedAvgCapable(FedAvg):
    """The whole model for those who can hold it; the data of the others are never used."""

    name: ClassVar[str] = "fedavg-capable"

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """Somebody must be able to hold the model."""
        if any(1 not in device.fleet for device in devices):
            raise RunError("fedavg-capable trains on devices of size 1, but the fleet has none. Leave it out.")

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share | None]:  # type: ignore[override]
        """Everything, or nothing."""
        return [Share() if device.size == 1 and device.budget is None else None for device in devices]
