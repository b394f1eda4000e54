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
from raffm.algebra.tally import Tally
from raffm.errors import RunError
from raffm.methods.fedrolex import served_windows
from raffm.methods.method import Client, Device, Held, Learn, Served, Share, Update
from raffm.methods.widths import learn_widths, merge_by_class, ratio_of, refuse_widths, width_groups, width_sizes
from raffm.models.labelled import Labelled
from raffm.seeds import generator


@dataclass(frozen=True)
class FederatedDropout:
    """Random indices of every width; inside every head, and the same ones along a residual stream.

    `scaler` and `masked_loss` as in HeteroFL, `windows` as in FedRolex.
    """

    name: ClassVar[str] = "federated-dropout"
    scaler: bool = True
    masked_loss: bool = True
    windows: int = 4

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """It needs widths, and classes to mask."""
        if self.windows < 1:
            raise RunError(f"federated-dropout is served over windows = {self.windows!r}; there must be at least 1.")
        refuse_widths(server, self.name, self.scaler, self.masked_loss)

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share]:
        """For every device indices of its own."""
        return [self._drawn(server, device, generator(seed, "dropped units", round, device.client)) for device in devices]

    def _drawn(self, server: Labelled, device: Device, draw: torch.Generator) -> Share:
        ratio = ratio_of(device.size)
        ranking = shuffled(server.layout, draw)
        return Share(ranking.cut(server.layout, width_sizes(server.layout, ratio)), {"ratio": ratio})

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
        """The prefix, and the mean over windows: no choice was trained more than another."""
        return [served_windows(server, device.size, self.windows) for device in devices]


def shuffled(layout: Layout, draw: torch.Generator) -> Ranking:
    """Every width in a random order; in every head an order of its own."""
    order = {}
    for name in width_groups(layout):
        base = layout.bases.get(name)
        rows = () if base is None else (layout.groups[base].size,)
        order[name] = torch.rand((*rows, layout.groups[name].size), generator=draw).argsort(-1)
    return Ranking(order)
