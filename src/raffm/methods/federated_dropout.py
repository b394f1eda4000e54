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
from raffm.methods.widths import cut_share, width_groups
from raffm.models.labelled import Labelled
from raffm.seeds import generator


@dataclass(frozen=True)
class FederatedDropout(Windowed):
    """Random indices of every width; inside every head, and the same ones along a residual stream.

    `scaler` and `masked_loss` as in HeteroFL, `windows` as in FedRolex.
    """

    name: ClassVar[str] = "federated-dropout"

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share]:
        """For every device indices of its own."""
        draws = [generator(seed, "dropped units", round, device.client) for device in devices]
        rankings = [shuffled(server.layout, draw) for draw in draws]
        return [cut_share(server, ranking, device.size) for ranking, device in zip(rankings, devices, strict=True)]


def shuffled(layout: Layout, draw: torch.Generator) -> Ranking:
    """Every width in a random order; in every head an order of its own."""
    order = {}
    for name in width_groups(layout):
        base = layout.bases.get(name)
        rows = () if base is None else (layout.groups[base].size,)
        order[name] = torch.rand((*rows, layout.groups[name].size), generator=draw).argsort(-1)
    return Ranking(order)
