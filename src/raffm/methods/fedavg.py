"""FedAvg: everybody trains the whole model, whatever their device can hold. The upper reference.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from raffm.algebra.selection import Selection
from raffm.algebra.tally import Tally
from raffm.methods.method import Client, Device, Held, Learn, Served, Share, Update, counted_mean, plain_loss
from raffm.models.labelled import Labelled


@dataclass(frozen=True)
class FedAvg:
    """The whole model for every client."""

    name: ClassVar[str] = "fedavg"
    heeds_budgets: ClassVar[bool] = True  # it gives everybody everything, and says so

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """Every model will do."""

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share]:
        """Everything."""
        return [Share() for _ in devices]

    def held(self, server: Labelled, share: Share) -> Held:
        """Everything."""
        return Selection()

    def learn(self, server: Labelled, share: Share, held: Held, client: Client) -> Learn:
        """By the task's own loss."""
        return Learn(plain_loss(client.task))

    def merge(self, tally: Tally, server: Labelled, update: Update) -> None:
        """The weighted mean."""
        counted_mean(tally, update, Selection())

    def serve(self, server: Labelled, round: int, devices: Sequence[Device]) -> list[list[Served]]:
        """The whole model to those who can hold it; nothing to smaller devices."""
        return [[Served((Share(),))] if device.size == 1 else [] for device in devices]
