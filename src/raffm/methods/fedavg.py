"""FedAvg: everybody trains the whole model, whatever their device can hold. The upper reference.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from raffm.methods.method import Device, Served, Share, Usual
from raffm.models.labelled import Labelled


@dataclass(frozen=True)
class FedAvg(Usual):
    """The whole model for every client."""

    name: ClassVar[str] = "fedavg"
    heeds_budgets: ClassVar[bool] = True  # it gives everybody everything, and says so

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share]:
        """Everything."""
        return [Share() for _ in devices]

    def serve(self, server: Labelled, round: int, devices: Sequence[Device]) -> list[list[Served]]:
        """The whole model to those who can hold it; nothing to smaller devices."""
        return [[Served((Share(),))] if device.size == 1 else [] for device in devices]
