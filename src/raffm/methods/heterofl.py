"""HeteroFL: a device of size g trains the first sqrt(g) of every width.

Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients", ICLR 2021. `docs/methods/heterofl.md` says where we differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from raffm.methods.method import Device, Served, Share
from raffm.methods.shaped import Shaped
from raffm.models.labelled import Labelled


@dataclass(frozen=True)
class HeteroFL(Shaped):
    """Static prefixes of every width.

    `scaler` divides what a cut map gives by the width's ratio, in training. `masked_loss` leaves the classes that a
    client does not have out of its loss, and their rows of the head out of the mean. `shapes`: "uniform", "balanced", or
    widths for every size.
    """

    name: ClassVar[str] = "heterofl"

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share]:
        """The prefix of every width, by the device's size."""
        shares = {size: self.share(server, size, devices[0].fleet) for size in {device.size for device in devices}}
        return [shares[device.size] for device in devices]

    def serve(self, server: Labelled, round: int, devices: Sequence[Device]) -> list[list[Served]]:
        """The same prefix."""
        return [[Served((self.share(server, device.size, device.fleet),))] for device in devices]
