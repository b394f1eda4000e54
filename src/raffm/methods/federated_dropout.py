"""Federated Dropout: every client trains random indices of every width, drawn anew in every round.

Caldas et al., "Expanding the Reach of Federated Learning by Reducing Client Resource Requirements", 2018.
`docs/methods/federated-dropout.md` says where we differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from raffm.algebra.layout import Layout
from raffm.algebra.ranking import Ranking
from raffm.methods.fedrolex import Windowed
from raffm.methods.method import Device, Share
from raffm.methods.widths import width_groups
from raffm.models.labelled import Labelled
from raffm.seeds import generator


@dataclass(frozen=True)
class FederatedDropout(Windowed):
    """Random indices of every width; inside every head, and the same ones along a residual stream.

    `scaler`, `masked_loss` and `shapes` as in HeteroFL, `windows` as in FedRolex.
    """

    name: ClassVar[str] = "federated-dropout"

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share]:
        """For every device indices of its own."""
        draws = [generator(seed, "dropped units", round, device.client) for device in devices]
        rankings = [shuffled(server.layout, draw) for draw in draws]
        pairs = zip(devices, rankings, strict=True)
        return [self.share(server, device.size, device.fleet, ranking) for device, ranking in pairs]


def shuffled(layout: Layout, draw: torch.Generator) -> Ranking:
    """Every width in a random order; in every head an order of its own."""
    order = {}
    for name in width_groups(layout):
        base = layout.bases.get(name)
        rows = () if base is None else (layout.groups[base].size,)
        order[name] = torch.rand((*rows, layout.groups[name].size), generator=draw).argsort(-1)
    return Ranking(order)
