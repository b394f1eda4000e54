"""What a model is made of: its groups, how large they are, and what can be cut."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from torch import nn

from raffm.algebra.group import Group
from raffm.algebra.layout import PARAMETERS
from raffm.algebra.selection import Selection
from raffm.models.label import layout_of, table_of
from raffm.models.space import default_sizes
from raffm.models.table import Table


@dataclass(frozen=True)
class GroupRow:
    """One group of a model."""

    name: str
    size: int
    kind: str
    """"free", "pinned", "depth", or "per" and the group that it is fibred over."""
    touched: int
    """Parameters in all tensors that the group runs through."""
    default_sizes: tuple[int, ...]
    """The sizes that the default space draws; empty where it leaves the group whole."""


@dataclass(frozen=True)
class Inspection:
    """A model's class, family, size, groups and labels."""

    model: str
    family: str
    params: int
    layout: str
    groups: tuple[GroupRow, ...]
    labels: dict[str, str]


def inspect(model: nn.Module, table: Table | str | Path | None = None) -> Inspection:
    """Look at a model's groups and labels; a model on the meta device will do."""
    family = table_of(model, table)
    layout = layout_of(model, family)
    sizes = default_sizes(layout, family)
    counts = {name: label.shape(layout.sizes) for name, label in layout.labels.items()}
    rows = []
    for name, group in layout.groups.items():
        tensors = {tensor for tensor, _ in layout.uses(name) if layout.kind(tensor) in PARAMETERS}
        tensors |= {tensor for tensor, label in layout.labels.items() if label.guard and label.guard[0] == name}
        touched = sum(prod(counts[tensor]) for tensor in tensors)
        rows.append(GroupRow(name, group.size, _kind(group), touched, sizes.get(name, ())))
    labels = {name: str(label) for name, label in layout.labels.items()}
    return Inspection(type(model).__name__, family.family, layout.count(Selection()), layout.fingerprint, tuple(rows), labels)


def _kind(group: Group) -> str:
    if group.pinned:
        return "pinned"
    if group.path is not None:
        return "depth"
    return f"per {group.base}" if group.base else "free"
