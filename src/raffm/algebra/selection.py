"""A Selection: the indices kept of every group that is cut. A submodel is a value, not a state."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raffm.algebra.axis import Where, positions

if TYPE_CHECKING:
    from raffm.algebra.layout import Layout

Indices = int | list[int] | list[list[int]]


@dataclass(frozen=True, eq=False)
class Selection:
    """The sorted indices kept per group; groups that are not named are whole.

    Made and checked by `Layout.select`. Comparable and hashable by its contents. A fibred group has a row of indices
    for every kept index of its base.
    """

    kept: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ordered = {group: self.kept[group] for group in sorted(self.kept)}
        object.__setattr__(self, "kept", MappingProxyType(ordered))

    @cached_property
    def digest(self) -> str:
        """A fingerprint of the contents, equal in every process."""
        content = hashlib.sha256()
        for group, indices in self.kept.items():
            content.update(f"{group}{tuple(indices.shape)}".encode())
            content.update(indices.numpy().tobytes())
        return content.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Selection) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        counts = ", ".join(f"{group}: {indices.shape[-1]}" for group, indices in self.kept.items())
        return f"Selection({counts or 'everything'})"

    def __reduce__(self) -> tuple[type[Selection], tuple[dict[str, Tensor]]]:
        return Selection, (dict(self.kept),)

    @property
    def is_everything(self) -> bool:
        """Whether nothing is cut."""
        return not self.kept

    def coverage(self, layout: Layout, name: str) -> Tensor:
        """Which elements of a full tensor the submodel holds."""
        shape = layout.labels[name].shape(layout.sizes)
        held = torch.tensor([True])
        return reduce(lambda rows, axis: (rows[:, None] & axis).flatten(), self.factors(layout, name), held).view(shape)

    def factors(self, layout: Layout, name: str) -> list[Tensor]:
        """The same, axis by axis: an element is held where every axis holds its position. A scalar has one axis of 1."""
        label = layout.labels[name]
        lengths = label.shape(layout.sizes)
        if not label.axes or not layout.is_held(self, name):
            return [torch.full((length,), layout.is_held(self, name)) for length in lengths or (1,)]
        where = [positions(axis, layout.sizes, self.kept, layout.bases) for axis in label.axes]
        return [indicator(length, place) for length, place in zip(lengths, where, strict=True)]

    def to_json(self) -> dict[str, Indices]:
        """Plain integers: a number for "the first n", a list otherwise."""
        return {group: _plain(indices) for group, indices in self.kept.items()}


def _plain(indices: Tensor) -> Indices:
    first = torch.arange(indices.shape[-1])
    if indices.dim() == 1 and torch.equal(indices, first):
        return len(indices)
    listed: list[int] | list[list[int]] = indices.tolist()
    return listed


def indicator(length: int, where: Where) -> Tensor:
    """Which positions of an axis are among these."""
    held = torch.zeros(length, dtype=torch.bool)
    held[slice(None) if where is None else where] = True
    return held
