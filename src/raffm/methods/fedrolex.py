"""FedRolex: HeteroFL's widths as windows that roll on by one index a round, so that every index is trained in turn.

Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", NeurIPS 2022.
`docs/methods/fedrolex.md` says where we differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from raffm.algebra.layout import Layout
from raffm.algebra.ranking import Ranking
from raffm.errors import RunError
from raffm.methods.method import Device, Served, Share
from raffm.methods.widths import Widths, cut_share, width_groups
from raffm.models.labelled import Labelled


@dataclass(frozen=True)
class Windowed(Widths):
    """Methods that train no choice of indices more than another: what they serve is averaged over windows."""

    windows: int = 4

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """It needs windows, widths, and classes to mask."""
        if self.windows < 1:
            raise RunError(f"{self.name} is served over windows = {self.windows!r}; there must be at least 1.")
        super().refuse(server, devices)

    def serve(self, server: Labelled, round: int, devices: Sequence[Device]) -> list[list[Served]]:
        """The prefix, and the mean over windows."""
        return [served_windows(server, device.size, self.windows) for device in devices]


@dataclass(frozen=True)
class FedRolex(Windowed):
    """Rolling windows over every width; inside every head, and the same one along a residual stream.

    `scaler` and `masked_loss` as in HeteroFL. `windows` is how many windows, evenly spaced, the served submodels are
    averaged over.
    """

    name: ClassVar[str] = "fedrolex"

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share]:
        """The round's window of every width; windows of one round are nested by size."""
        shares = {size: window(server, round, size) for size in {device.size for device in devices}}
        return [shares[device.size] for device in devices]


def window(server: Labelled, begin: int, size: float) -> Share:
    """The window of every width that begins at an index, sqrt(size) of it wide."""
    return cut_share(server, rolled(server.layout, begin), size)


def served_windows(server: Labelled, size: float, count: int) -> list[Served]:
    """The prefix, and windows that begin at evenly spaced indices; at size 1 they are all the same."""
    longest = max(server.layout.groups[name].size for name in width_groups(server.layout))
    begins = [place * longest // count for place in range(count)]
    windows = tuple(window(server, begin, size) for begin in begins)
    return [Served(windows[:1])] if size == 1 else [Served(windows[:1], "prefix"), Served(windows, "windows")]


def rolled(layout: Layout, begin: int) -> Ranking:
    """Every width in the order `begin, begin + 1, ...`, modulo its size; inside every head alike."""
    order = {}
    for name in width_groups(layout):
        size = layout.groups[name].size
        indices = (torch.arange(size) + begin) % size
        base = layout.bases.get(name)
        order[name] = indices if base is None else indices.expand(layout.groups[base].size, -1)
    return Ranking(order)
