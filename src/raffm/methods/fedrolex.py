"""FedRolex: HeteroFL's widths as windows that roll on by one index a round, so that every index is trained in turn.

Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", NeurIPS 2022.
`docs/methods/fedrolex.md` says where we differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import ClassVar

import torch

from raffm.algebra.layout import Layout
from raffm.algebra.ranking import Ranking
from raffm.errors import RunError
from raffm.methods.method import Device, Served, Share
from raffm.methods.shaped import Shaped
from raffm.methods.widths import width_groups
from raffm.models.labelled import Labelled


@dataclass(frozen=True)
class Windowed(Shaped):
    """Methods that train no choice of indices more than another: what they serve is averaged over windows."""

    windows: int = 4

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """It needs windows, widths, and classes to mask."""
        if self.windows < 1:
            raise RunError(f"{self.name} is served over windows = {self.windows!r}; there must be at least 1.")
        super().refuse(server, devices)

    def serve(self, server: Labelled, round: int, devices: Sequence[Device]) -> list[list[Served]]:
        """The prefix, and the mean over windows."""
        return [self._windows(server, device) for device in devices]

    def _windows(self, server: Labelled, device: Device) -> list[Served]:
        """The prefix, and windows of rounds that lie apart; at size 1 they are all the same."""
        apart = rounds_apart(frozenset(server.layout.groups[name].size for name in width_groups(server.layout)), self.windows)
        rankings = [rolled(server.layout, place * apart) for place in range(self.windows)]
        windows = tuple(self.share(server, device.size, device.fleet, ranking) for ranking in rankings)
        return [Served(windows[:1])] if device.size == 1 else [Served(windows[:1], "prefix"), Served(windows, "windows")]


@dataclass(frozen=True)
class FedRolex(Windowed):
    """Rolling windows over every width; inside every head, and the same one along a residual stream.

    `scaler` and `masked_loss` as in HeteroFL. `windows` is how many windows the served submodels are averaged over;
    `shapes` as in HeteroFL.
    """

    name: ClassVar[str] = "fedrolex"

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share]:
        """The round's window of every width; windows of one round are nested by size."""
        ranking = rolled(server.layout, round)
        sizes = {device.size for device in devices}
        shares = {size: self.share(server, size, devices[0].fleet, ranking) for size in sizes}
        return [shares[device.size] for device in devices]


@cache
def rounds_apart(widths: frozenset[int], windows: int) -> int:
    """The number of rounds that lies between windows which, in every width, begin as far apart as they can.

    In a single width they are evenly spaced. Widths roll on together, so in several they cannot all be.
    """
    numbers = torch.arange(1, max(widths) + 1)
    least = torch.full(numbers.shape, torch.inf)
    for width, later in product(sorted(widths), range(1, windows)):
        ahead = numbers * later % width
        least = torch.minimum(least, torch.minimum(ahead, width - ahead) / width)
    return int(numbers[least.argmax()])


def rolled(layout: Layout, begin: int) -> Ranking:
    """Every width in the order `begin, begin + 1, ...`, modulo its size; inside every head alike."""
    order = {}
    for name in width_groups(layout):
        size = layout.groups[name].size
        indices = (torch.arange(size) + begin) % size
        base = layout.bases.get(name)
        order[name] = indices if base is None else indices.expand(layout.groups[base].size, -1)
    return Ranking(order)
