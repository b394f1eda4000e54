"""Groups: the dimensions that tensors share, and the counts that must agree between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from raffm.algebra.axis import Expression, value


@dataclass(frozen=True)
class Group:
    """A dimension that several tensors share, such as `layers.3.ffn`.

    A free group may be cut to any subset; a pinned one (vocabulary, classes) never is. A fibred group has a `base`
    and keeps its own indices in every index of it, the same number in each: `qk` per head. A depth group has a
    `path`: the blocks `path.0`, `path.1`, ... of the model are its indices, and `required` blocks always stay; of an
    `ordered` one only the last can be dropped. One that is `apart` is no width: a method alone chooses its indices.
    """

    name: str
    size: int
    pinned: bool = False
    base: str | None = None
    step: int = 1
    least: int = 1
    path: str | None = None
    required: tuple[int, ...] = ()
    ordered: bool = False
    guard: tuple[str, int] | None = None
    apart: bool = False
    approximate: str = ""
    """Why cutting this group is not the same as zeroing it; empty where it is."""

    def narrowed(self, ratio: float) -> int:
        """`ceil(size * ratio)`, rounded up to the group's step; at least `least`."""
        size = max(self.least, ceil(self.size * ratio - 1e-9))
        return min(self.size, -(-size // self.step) * self.step)


@dataclass(frozen=True)
class Tie:
    """Two counts that must stay equal, such as |vo| = |qk|, however the groups are cut."""

    left: Expression
    right: Expression

    def __str__(self) -> str:
        return f"{self.left} = {self.right}"

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether both sides count the same."""
        return value(self.left, sizes) == value(self.right, sizes)

    def solved(self, sizes: Mapping[str, int], unknown: str) -> int | None:
        """The size that `unknown` must have for the tie to hold; None where no whole number does."""

        def gap(size: int) -> int:
            known = {**sizes, unknown: size}
            return value(self.left, known) - value(self.right, known)

        slope = gap(1) - gap(0)
        return None if slope == 0 or gap(0) % slope else -gap(0) // slope
