"""HeteroFL: a device of size g trains the first sqrt(g) of every width.

Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients", ICLR 2021. `docs/methods/heterofl.md` says where we differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from raffm.algebra.tally import Tally
from raffm.methods.method import Client, Device, Held, Learn, Served, Share, Update
from raffm.methods.widths import (
    learn_widths,
    merge_by_class,
    prefix,
    refuse_widths,
)
from raffm.models.labelled import Labelled


@dataclass(frozen=True)
class HeteroFL:
    """Static prefixes of every width.

    `scaler` divides what a cut map gives by the width's ratio, in training. `masked_loss` leaves the classes that a
    client does not have out of its loss, and their rows of the head out of the mean.
    """

    name: ClassVar[str] = "heterofl"
    scaler: bool = True
    masked_loss: bool = True

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """It needs widths, and classes to mask."""
        refuse_widths(server, self.name, self.scaler, self.masked_loss)

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share]:
        """The prefix of every width, by the device's size."""
        shares = {size: prefix(server, size) for size in {device.size for device in devices}}
        return [shares[device.size] for device in devices]

    def held(self, server: Labelled, share: Share) -> Held:
        """The selected indices."""
        return share.selection

    def learn(self, server: Labelled, share: Share, held: Held, client: Client) -> Learn:
        """With scaler and masked loss."""
        return learn_widths(server, share, client, self.scaler, self.masked_loss)

    def merge(self, tally: Tally, server: Labelled, update: Update) -> None:
        """The counted mean, by class in the head."""
        merge_by_class(tally, update, self.masked_loss)

    def serve(self, server: Labelled, round: int, devices: Sequence[Device]) -> list[list[Served]]:
        """The same prefix."""
        return [[Served((prefix(server, device.size),))] for device in devices]
