"""What names become when blocks are dropped: those that are kept are numbered anew."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Kept = Mapping[str, Tensor]


def is_place(name: str) -> bool:
    """Whether a name in an attribute speaks of a block's place among the kept ones, and is no group.

    `#layers` is the place itself; `first#layers` is 1 in the first block and 0 in all others.
    """
    return "#" in name


def place_value(name: str, place: int) -> int:
    """What such a name stands for in a block."""
    return int(place == 0) if name.startswith("first#") else place


def depth_of(name: str) -> str:
    """The depth group that such a name speaks of."""
    return name.partition("#")[2]


def renumbered(name: str, stacks: Mapping[str, str], kept: Kept) -> str:
    """A name with the number of its block among the kept ones; `stacks` gives the path of every depth group."""
    for depth, path in stacks.items():
        index, rest = block_of(name, path)
        if depth in kept and index is not None:
            return f"{path}.{kept[depth].tolist().index(index)}{rest}"
    return name


def in_first_block(name: str, path: str) -> str:
    """A name in the first block of a stack."""
    return f"{path}.0{block_of(name, path)[1]}"


def is_dropped(name: str, stacks: Mapping[str, str], kept: Kept) -> bool:
    """Whether something stands in a block that is not kept."""
    for depth, path in stacks.items():
        index, _ = block_of(name, path)
        if depth in kept and index is not None and index not in kept[depth].tolist():
            return True
    return False


def block_of(name: str, path: str) -> tuple[int | None, str]:
    """The number of the block that a name begins with, and what follows; what serves the stack may be named after it."""
    if not name.startswith(f"{path}."):
        return None, ""
    index, dot, rest = name[len(path) + 1 :].partition(".")
    return (int(index), dot + rest) if index.isdigit() else (None, "")
