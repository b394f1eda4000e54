"""What a server knows of its nodes' data: how many examples each has, and which classes. More never leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from raffm.data.examples import Dataset, Examples, Federation, Parts, Split
from raffm.devices.fleet import Fleet, Tier
from raffm.errors import RunError


@dataclass(frozen=True)
class Known:
    """A node by its number in the network, as which client it takes part, and what it said of itself."""

    node: int
    client: int
    examples: int
    classes: tuple[int, ...]
    size: float = 1.0


def ledger(known: Sequence[Known], dataset: Dataset) -> Federation:
    """The nodes as clients: their numbers of examples and their classes, with no example among them.

    The dataset's test examples are the server's own; its training examples are not used.
    """
    counts = [each.examples for each in known]
    labels = [torch.tensor(each.classes)[torch.arange(each.examples) % len(each.classes)] for each in known]
    ends = [0, *accumulate(counts)]
    parts = Parts.of([np.arange(begin, end) for begin, end in pairwise(ends)])
    nobody = Parts.of([np.arange(0) for _ in known])
    train = Examples({}, torch.cat(labels))
    return Federation(Dataset(dataset.name, train, dataset.test, dataset.classes), Split(parts, nobody))


def fleet_of(known: Sequence[Known]) -> Fleet:
    """A tier for every size that a node stated, and who has which."""
    sizes = sorted({each.size for each in known}, reverse=True)
    return Fleet(tuple(Tier(size) for size in sizes), dealt=tuple(sizes.index(each.size) for each in known))


def numbered(known: Sequence[Known]) -> list[Known]:
    """Nodes by their numbers as clients, which must be 0, 1, 2, ...: each once."""
    ordered = sorted(known, key=lambda each: each.client)
    for place, each in enumerate(ordered):
        if each.client != place:
            found = [other.client for other in ordered]
            raise RunError(f"{len(ordered)} nodes take part as clients 0 to {len(ordered) - 1}, but they say they are {found}.")
    return ordered
