"""A Ranking: an order per group. A submodel is a ranking cut to size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from raffm.algebra.axis import names
from raffm.algebra.check import refuse_order
from raffm.algebra.layout import Layout
from raffm.algebra.selection import Selection
from raffm.errors import SelectionError


@dataclass(frozen=True, eq=False)
class Ranking:
    """The indices of every group from the most to the least important; unnamed groups keep their own order.

    A fibred group has one order per index of its base: an array (base, size). `scores` holds, where known, what the
    order was made from, by index.
    """

    order: Mapping[str, Tensor] = field(default_factory=dict)
    scores: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", MappingProxyType(dict(self.order)))
        object.__setattr__(self, "scores", MappingProxyType(dict(self.scores)))

    @staticmethod
    def by_scores(scores: Mapping[str, Tensor]) -> Ranking:
        """The descending order of the scores; equal ones keep their order."""
        order = {name: score.argsort(dim=-1, descending=True, stable=True) for name, score in scores.items()}
        return Ranking(order, scores)

    def cut(self, layout: Layout, sizes: Mapping[str, int]) -> Selection:
        """The best `sizes[group]` indices of every group; unnamed groups follow their ties or stay whole."""
        refuse_ranking(layout, self)
        full = complete(layout, sizes)
        kept: dict[str, Tensor] = {}
        for name in sorted(full, key=lambda name: name in layout.bases):
            kept[name] = self._best(layout, name, full[name], kept)
        return layout.select(dict(kept))

    def _best(self, layout: Layout, name: str, count: int, kept: Mapping[str, Tensor]) -> Tensor:
        group = layout.groups[name]
        order = self.order.get(name)
        if group.base is None:
            order = torch.arange(group.size) if order is None or group.ordered else order
            is_required = torch.isin(order, torch.tensor(group.required, dtype=torch.int64))
            return torch.cat([order[is_required], order[~is_required]])[:count]
        rows = kept.get(group.base)
        rows = torch.arange(layout.groups[group.base].size) if rows is None else rows
        return torch.arange(count).expand(len(rows), -1) if order is None else order[rows, :count]


def refuse_ranking(layout: Layout, ranking: Ranking) -> None:
    """Refuse a ranking of groups that the layout does not have, or whose orders are no permutations of them."""
    for name, order in ranking.order.items():
        if name not in layout.groups:
            raise SelectionError(f"the ranking orders the group {name!r}, which there is not; `raffm inspect` lists them.")
        base = layout.bases.get(name)
        refuse_order(layout.groups[name], order, None if base is None else layout.groups[base].size)


def complete(layout: Layout, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the groups to cut, with the groups that count ties bind to them."""
    for name, size in sizes.items():
        if name not in layout.groups:
            raise SelectionError(f"there is no group {name!r}; `raffm inspect` lists them.")
        if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= layout.groups[name].size:
            raise SelectionError(f"group `{name}` has {layout.groups[name].size} indices and cannot be cut to {size!r}.")
    known = dict(sizes)
    for _ in layout.ties:  # a chain of ties is at most this long
        for tie in layout.ties:
            unknown = [name for side in (tie.left, tie.right) for name in names(side) if name not in known]
            if len(unknown) == 1:
                solved = tie.solved({**layout.sizes, **known}, unknown[0])
                if solved is not None and solved != layout.sizes[unknown[0]]:
                    known[unknown[0]] = solved
    return known
