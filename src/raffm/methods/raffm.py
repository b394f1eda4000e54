"""RaFFM: submodels that keep the most salient parameters, of sizes fitted to each device's budget.

Yu et al., "Bridging the Gap Between Foundation Models and Heterogeneous Federated Learning", arXiv 2310.00247.
`docs/methods/raffm.md` says where we differ.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import ClassVar, Literal

from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.devices.budget import Budget
from raffm.devices.cost import CostModel
from raffm.devices.fit import even_shares, fit
from raffm.devices.fleet import size_name
from raffm.errors import BudgetError, RunError
from raffm.methods.method import Device, Served, Share, Usual
from raffm.methods.widths import width_groups
from raffm.models.labelled import Labelled
from raffm.models.salience import METRICS, rank
from raffm.models.space import Space, read_space
from raffm.seeds import generator

Sizes = dict[str, int]

FINE = 64
"""The parts of a width that submodels too small for the space are cut by."""


@dataclass(frozen=True)
class RaFFM(Usual):
    """Salient parameter prioritization, and elastic submodels.

    `metric` ranks the indices of every group anew each round ("none": no prioritization, prefixes). `sizes` says how
    large a client's submodel is: "fitted" to its budget, or the published "sandwich", which ignores the device: the
    first client of a round trains the full model, the second the smallest, all others a random one. `space` holds the
    sizes to choose from (by default: eighths of FFN and head dimensions, of inner channels in a ResNet).
    """

    name: ClassVar[str] = "raffm"
    heeds_budgets: ClassVar[bool] = True
    metric: str = "l1_norm"
    sizes: Literal["fitted", "sandwich"] = "fitted"
    space: Mapping[str, Sequence[int]] | None = field(default=None, hash=False)

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """It needs a known metric, and submodels that fit the smallest device."""
        if self.metric not in ("none", *METRICS):
            raise RunError(f"raffm ranks by {', '.join(METRICS)} or none while it trains, not by {self.metric!r}.")
        if self.sizes not in ("fitted", "sandwich"):
            raise RunError(f"raffm's sizes are 'fitted' or 'sandwich', not {self.sizes!r}.")
        if self.sizes == "fitted":
            for device in devices:
                self._shapes.fitted(server, device)

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share]:
        """The round's ranking, cut to every device's sizes."""
        if self.sizes == "fitted":
            shapes = [self._shapes.fitted(server, device) for device in devices]
        else:
            shapes = [self._layer_of_sandwich(server, round, device, seed) for device in devices]
        return _cut(server, self._ranking(server), shapes)

    def trained_space(self, server: Labelled) -> Space:
        """The sizes that submodels are chosen from."""
        return self._shapes.space(server)

    def shape_for(self, server: Labelled, device: Device) -> Sizes:
        """The sizes that fit a device."""
        return self._shapes.fitted(server, device)

    def _ranking(self, server: Labelled) -> Ranking:
        return Ranking() if self.metric == "none" else rank(server.model, server.layout, self.metric)

    def _layer_of_sandwich(self, server: Labelled, round: int, device: Device, seed: int) -> Sizes:
        space = self._shapes.space(server)
        if device.place == 0:
            return {}
        return space.smallest() if device.place == 1 else space.draw(generator(seed, "sandwich", round, device.client))

    @cached_property
    def _shapes(self) -> _Shapes:
        return _Shapes(self.space)

    def serve(self, server: Labelled, round: int, devices: Sequence[Device]) -> list[list[Served]]:
        """The current ranking, cut to the sizes that fit."""
        shapes = [self._shapes.fitted(server, device) for device in devices]
        return [[Served((share,))] for share in _cut(server, self._ranking(server), shapes)]


def _cut(server: Labelled, ranking: Ranking, shapes: Sequence[Sizes]) -> list[Share]:
    """A ranking cut to every shape; equal shapes get one share."""
    shares: dict[frozenset[tuple[str, int]], Share] = {}
    for shape in shapes:
        key = frozenset(shape.items())
        if key not in shares:
            shares[key] = Share(ranking.cut(server.layout, shape))
    return [shares[frozenset(shape.items())] for shape in shapes]


class _Shapes:
    """Sizes that fit budgets, computed once: they follow from the layout alone."""

    def __init__(self, given: Mapping[str, Sequence[int]] | None) -> None:
        self._given = given
        self._spaces: dict[str, Space] = {}
        self._fitted: dict[tuple[str, Budget], Sizes] = {}
        self._costs: dict[str, CostModel] = {}

    def space(self, server: Labelled) -> Space:
        """The sizes to choose from."""
        key = server.layout.fingerprint
        if key not in self._spaces:
            self._spaces[key] = read_space(server.layout, server.table, self._given or _eighths(server))
        return self._spaces[key]

    def fitted(self, server: Labelled, device: Device) -> Sizes:
        """The sizes for a device: whole where everything fits."""
        budget = device.budget or Budget(max_params=max(1, int(device.size * server.layout.count(Selection()))))
        if device.budget is None and device.size == 1:
            return {}
        key = server.layout.fingerprint, budget
        if key not in self._fitted:
            try:
                self._fitted[key] = self._fit(server, budget)
            except BudgetError as error:
                part = f"size {size_name(device.size)} is {budget.max_params:,} parameters: " if device.budget is None else ""
                raise BudgetError(f"{part}{error}") from None
        return self._fitted[key]

    def _fit(self, server: Labelled, budget: Budget) -> Sizes:
        """Fit inside the space; where it has nothing small enough and is our own, all other widths shrink too."""
        space = self.space(server)
        try:
            return self._fit_at(server, budget, space, FINE)
        except BudgetError:
            if self._given is not None:
                raise
        widest = bisect_left(range(FINE), True, 1, key=lambda width: not self._is_balanced(server, budget, space, width)) - 1
        return self._fit_at(server, budget, space, max(widest, 1))

    def _is_balanced(self, server: Labelled, budget: Budget, space: Space, width: int) -> bool:
        """Whether what fits is at least as wide, on the mean, in the groups of the space as in all others."""
        try:
            found = self._fit_at(server, budget, space, width)
        except BudgetError:
            return False
        return fmean(found[name] / server.layout.groups[name].size for name in space.sizes) >= width / FINE

    def _fit_at(self, server: Labelled, budget: Budget, space: Space, width: int) -> Sizes:
        """Fit with all widths outside of the space at so many parts of `FINE`."""
        others = [
            name for name in width_groups(server.layout) if name not in space.sizes and name not in server.layout.followers
        ]
        levels: dict[str, Sequence[int]] = dict(space.sizes)
        levels.update({name: [server.layout.groups[name].narrowed(width / FINE)] for name in others if width < FINE})
        return fit(
            server.layout, self._cost(server, (*space.sizes, *others)), budget, levels, even_shares(server.layout, levels)
        )

    def _cost(self, server: Labelled, free: tuple[str, ...]) -> CostModel:
        key = server.layout.fingerprint
        if key not in self._costs:
            self._costs[key] = CostModel(server.model, server.layout, server.table, free=free)
        return self._costs[key]


def _eighths(server: Labelled) -> dict[str, list[int]]:
    """Eighths of what the family's table cuts by default, without whole heads."""
    cut = read_space(server.layout, server.table, None).sizes
    groups = [name for name in cut if name not in server.layout.heads]
    return {name: sorted({server.layout.groups[name].narrowed(place / 8) for place in range(1, 9)}) for name in groups}
