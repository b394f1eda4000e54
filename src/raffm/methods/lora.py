"""LoRA of every rank: a device trains as many ranks of every adapter as it can hold; A and B are averaged each for itself.

The rule of Cho et al., "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models" (HetLoRA, EMNLP 2024),
with counting in the place of padding by zeros. `docs/methods/lora.md` says what that leaves out: the mean of A times the mean
of B is not the mean of B A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from raffm.algebra.ranking import Ranking
from raffm.devices.budget import Budget
from raffm.errors import RunError
from raffm.methods.method import Device, Served, Share, Usual
from raffm.methods.raffm import RaFFM
from raffm.models.adapters import rank_groups
from raffm.models.labelled import Labelled
from raffm.models.salience import METRICS, rank


@dataclass(frozen=True)
class LoRA(Usual):
    """The first ranks of every adapter, as many as a device's size says: half of them at size 1/2, at least one.

    `metric` orders ranks anew each round ("none": as they are). `base` says what else is cut: nothing ("whole"), or the frozen
    weights to the device's size, as RaFFM cuts them ("fitted").
    """

    name: ClassVar[str] = "lora"
    heeds_budgets: ClassVar[bool] = True
    metric: str = "none"
    base: Literal["whole", "fitted"] = "whole"

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """It needs adapters, a known metric, and with `base` submodels that fit."""
        if not ranks_of(server):
            raise RunError(f"{self.name} trains adapters, and the model has none: `with_lora(model)`, or lora.rank = 8.")
        if self.metric not in ("none", *METRICS):
            raise RunError(f"{self.name} ranks by {', '.join(METRICS)} or none, not by {self.metric!r}.")
        if self.base not in ("whole", "fitted"):
            raise RunError(f"{self.name} leaves the base 'whole' or has it 'fitted', not {self.base!r}.")
        if self.base == "whole" and any(device.budget is not None for device in devices):
            raise RunError(f"{self.name} holds the whole base and does not read limits. Have it cut: base = 'fitted'.")
        self._shares(server, devices)

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share]:
        """The ranks of every device, and its part of the base."""
        return self._shares(server, devices)

    def serve(self, server: Labelled, round: int, devices: Sequence[Device]) -> list[list[Served]]:
        """What a device would train."""
        return [[Served((share,))] for share in self._shares(server, devices)]

    @cached_property
    def _raffm(self) -> RaFFM:
        """What fits the base; it remembers the shapes that it found."""
        return RaFFM()

    def _shares(self, server: Labelled, devices: Sequence[Device]) -> list[Share]:
        ranking = Ranking() if self.metric == "none" else rank(server.model, server.layout, self.metric)
        known: dict[tuple[float, Budget | None], Share] = {}
        for device in devices:
            if (device.size, device.budget) not in known:
                sizes = {name: rank_at(server, name, device.size) for name in ranks_of(server)}
                base = self._raffm.shape_for(server, device) if self.base == "fitted" else {}
                known[device.size, device.budget] = Share(ranking.cut(server.layout, {**base, **sizes}))
        return [known[device.size, device.budget] for device in devices]


def ranks_of(server: Labelled) -> list[str]:
    """The groups of ranks: the inner axes of all adapters."""
    return rank_groups(server.layout)


def rank_at(server: Labelled, group: str, size: float) -> int:
    """How many ranks a device of a size trains."""
    return max(1, round(size * server.layout.sizes[group]))
