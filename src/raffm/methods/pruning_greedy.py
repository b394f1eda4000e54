"""Pruning-greedy: FIARSE's masks with the ordinary gradient. The ablation of FIARSE's paper, as its code allows it.

Its definition was not published; the same masks without the importance-aware factor is the natural reading.
`docs/methods/pruning-greedy.md` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from raffm.methods.fiarse import Fiarse


@dataclass(frozen=True)
class PruningGreedy(Fiarse):
    """The largest weights, trained by their plain gradient. `scope` as in FIARSE."""

    name: ClassVar[str] = "pruning-greedy"
    gradient: Literal["importance", "plain"] = "plain"
