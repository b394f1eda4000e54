"""Controlled rounding: a table of fractions rounded so that every cell, row and column is rounded up or down."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from raffm.data.examples import Integers

Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]


def proportional(counts: Integers, totals: Integers, draw: Generator) -> Integers:
    """A table in the proportions of `counts` whose columns sum to `totals`, every cell and row sum rounded up or down.

    Such a table always exists (controlled rounding): the fractions are a flow from classes to clients, so there is a
    whole one. Rows are first filled to their lower whole number and then to the upper one.
    """
    weights = np.where(counts.any(0), counts, 1)  # a class that nobody trains on has no better owner
    whole, rest = np.divmod(weights * totals, weights.sum(0))
    fractions = rest / weights.sum(0)
    placed = np.zeros(rest.shape, np.bool_)
    sums = fractions.sum(1)
    for limit in (np.floor(sums + 1e-6), np.ceil(sums - 1e-6)):
        lack = totals - (whole + placed).sum(0)
        place(fractions, placed, lack, limit.astype(np.int64) - placed.sum(1), draw)
    return whole + placed


def place(fractions: Floats, placed: Flags, lack: Integers, room: Integers, draw: Generator) -> None:
    """Add units to `placed`: as `lack` says by class, at most `room` by client; largest fractions first."""
    clients, labels = np.nonzero((fractions > 0) & ~placed)
    order = draw.permutation(len(clients))
    order = order[np.argsort(-fractions[clients[order], labels[order]], kind="stable")]
    for client, label in zip(clients[order].tolist(), labels[order].tolist(), strict=True):
        if lack[label] and room[client]:
            placed[client, label] = True
            lack[label] -= 1
            room[client] -= 1
    for label in np.flatnonzero(lack).tolist():
        while lack[label] and room.any() and _augmented(fractions, placed, room, label):
            lack[label] -= 1


def _augmented(fractions: Floats, placed: Flags, room: Integers, start: int) -> bool:
    """Place one more unit of class `start` by moving others along a shortest path to a client with room."""
    came: dict[int, tuple[int, int]] = {}  # from which client, and which class before it, a class was reached
    seen = np.zeros(len(room), np.bool_)
    queue = [start]
    for label in queue:
        clients = np.flatnonzero((fractions[:, label] > 0) & ~placed[:, label] & ~seen)
        roomy = clients[room[clients] > 0]
        if len(roomy):
            end = int(roomy[fractions[roomy, label].argmax()])
            room[end] -= 1
            _flip(placed, came, end, label)
            return True
        seen[clients] = True
        for other in np.flatnonzero(placed[clients].any(0)).tolist():
            if other != start and other not in came:
                came[other] = (int(clients[placed[clients, other].argmax()]), label)
                queue.append(other)
    return False


def _flip(placed: Flags, came: Mapping[int, tuple[int, int]], client: int, label: int) -> None:
    """Place a unit at the end of a path, and move every unit on the way to it."""
    placed[client, label] = True
    while label in came:
        client, before = came[label]
        placed[client, label], placed[client, before] = False, True
        label = before
