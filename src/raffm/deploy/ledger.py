"""What a server knows of its nodes: how many examples each has, of which classes, and what its device can hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, pairwise
from typing import Any

import numpy as np
import torch

from raffm.algebra.ranking import Ranking
from raffm.data.examples import Dataset, Examples, Federation, Parts, Split
from raffm.deploy.statement import Device, device_from, said_of
from raffm.devices.budget import Budget, Kind
from raffm.devices.cost import CostModel
from raffm.devices.fleet import Fleet, Tier
from raffm.errors import RunError
from raffm.methods.method import Method
from raffm.methods.shapes import sizes_at
from raffm.methods.widths import width_groups
from raffm.models.labelled import Labelled
from raffm.notices import notice
from raffm.rounds.local import Local

MOST = 10_000_000
"""More examples than any node will have."""

UNNUMBERED = -1
"""A node that does not say as which client it takes part."""


@dataclass(frozen=True)
class Known:
    """A node by its number in the network, as which client it takes part, and what it said of itself."""

    node: int
    client: int
    examples: int
    classes: tuple[int, ...]
    device: Device = field(default_factory=Device)

    def to_json(self) -> dict[str, Any]:
        """What it said, and its number."""
        plain = {"node": self.node, "client": self.client, "examples": self.examples, "classes": list(self.classes)}
        return {**plain, "device": said_of(self.device)}


def known_from(node: int, said: Mapping[str, Any]) -> Known:
    """A node's statement, checked: it comes from another machine."""
    try:
        classes = tuple(int(each) for each in said["classes"])
        found = Known(node, int(said.get("client", UNNUMBERED)), int(said["examples"]), classes, device_from(said["device"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RunError(f"node {node} says something that cannot be read: {error!r}.") from None
    if not 1 <= found.examples <= MOST or not classes or not 0 <= min(classes) <= max(classes) <= MOST:
        raise RunError(f"node {node} says that it has {found.examples} examples of the classes {list(classes)[:20]}: no.")
    return found


def numbered(known: Sequence[Known]) -> list[Known]:
    """Nodes as clients 0, 1, 2, ...: by the numbers that they state; who states none gets one that is free.

    Of two that state the same number, the second is left out: they would train on the same data.
    """
    kept: dict[int, Known] = {}
    by_node = sorted(known, key=lambda each: each.node)
    for each in by_node:
        if each.client in kept:
            first = kept[each.client].node
            notice(f"node {each.node} is left out: it takes part as client {each.client}, as node {first} does.")
        elif each.client != UNNUMBERED:
            kept[each.client] = each
    free = (number for number in count() if number not in kept)
    strangers = [each for each in by_node if each.client == UNNUMBERED]
    kept |= dict(zip([next(free) for _ in strangers], strangers, strict=True))
    return [replace(kept[number], client=client) for client, number in enumerate(sorted(kept))]


def returned(before: Sequence[Known], found: Sequence[Known]) -> list[Known]:
    """The clients of a run that goes on: as they were, each with the node that now says it is that client.

    One that has not come back keeps its place, and fails in every round that asks it. One that is new is left out.
    """
    now = {each.client: each.node for each in found if each.client != UNNUMBERED}
    present = {each.node for each in found}
    back = [each if each.node in present else replace(each, node=now.get(each.client, each.node)) for each in before]
    for each in sorted(present - {each.node for each in back}):
        notice(f"node {each} is left out: it was not there when the run began.")
    return back


def ledger(known: Sequence[Known], dataset: Dataset) -> Federation:
    """The nodes as clients: their numbers of examples and their classes, with no example among them.

    The dataset's test and validation examples are the server's own; its training examples are not used.
    """
    for each in known:
        refuse_classes(each, len(dataset.classes))
    counts = [each.examples for each in known]
    labels = [torch.tensor(each.classes)[torch.arange(each.examples) % len(each.classes)] for each in known]
    ends = [0, *accumulate(counts)]
    parts = Parts.of([np.arange(begin, end) for begin, end in pairwise(ends)])
    nobody = Parts.of([np.arange(0) for _ in known])
    return Federation(replace(dataset, train=Examples({}, torch.cat(labels))), Split(parts, nobody))


def refuse_classes(known: Known, classes: int) -> None:
    """Refuse a node that has examples of classes which the run does not have, where it has any."""
    if classes and max(known.classes) >= classes:
        raise RunError(f"node {known.node} has examples of class {max(known.classes)}; there are {classes}.")


# -- what fits ---------------------------------------------------------------------------------------------------------


def fleet_of(known: Sequence[Known], fits: Callable[[Budget], float], method: Method | None = None) -> Fleet:
    """A tier for every kind of device, and who has which: `fits` gives the part of the model that limits leave."""
    tiers = [tier_for(each, fits, method is not None and method.heeds_budgets) for each in known]
    kinds = sorted(set(tiers), key=lambda tier: (-tier.size, repr(tier)))
    return Fleet(tuple(kinds), dealt=tuple(kinds.index(tier) for tier in tiers))


def tier_for(known: Known, fits: Callable[[Budget], float], heeds_budgets: bool = False) -> Tier:
    """What a node's device holds; refused where that is nothing."""
    device = known.device
    try:
        size = device.size if device.size is not None else fits(device.budget) if device.budget is not None else 1.0
    except RunError as error:
        raise RunError(f"node {known.node} (client {known.client}): {error}") from None
    given = {"speed": device.speed, "bandwidth": device.bandwidth, "budget": device.budget if heeds_budgets else None}
    return Tier(size, **{key: entry for key, entry in given.items() if entry is not None})  # type: ignore[arg-type]


NESTED = 1.2
"""Where smaller shapes are trained inside a client's own, memory grows by less than this (docs/methods/nested.md)."""


def fitting(server: Labelled, sizes: Sequence[float], local: Local, method: Method | None = None) -> Callable[[Budget], float]:
    """Gives the largest of some sizes whose submodel, in the method's shape, keeps all limits of a budget."""
    shapes = getattr(method, "shapes", "uniform")
    spare = NESTED if getattr(method, "steps", "none") != "none" else 1.0
    optimizer = "sgd-momentum" if local.optimizer == "sgd" and local.momentum else local.optimizer
    cost = CostModel(server.model, server.layout, server.table, local.batch, optimizer, width_groups(server.layout))

    def needed(size: float, kind: Kind) -> int:
        cut = Ranking().cut(server.layout, sizes_at(server, size, sizes, shapes))
        found: int = getattr(cost, kind)(server.layout.sizes_of(cut))
        return int(spare * found) if kind == "memory" else found

    def fits(budget: Budget) -> float:
        for size in sorted(sizes, reverse=True):
            if all(needed(size, kind) <= limit for kind, limit in budget.limits.items()):
                return size
        needs = ", ".join(f"{needed(min(sizes), kind):,} {kind}" for kind in budget.limits)
        limits = ", ".join(f"{limit:,} {kind}" for kind, limit in budget.limits.items())
        raise RunError(f"it holds {limits}; the smallest submodel, {min(sizes):g} of the model, takes {needs}.")

    return fits
