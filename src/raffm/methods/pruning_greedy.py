"""Pruning-greedy: FIARSE's masks with the ordinary gradient. The ablation of FIARSE's paper, as its code allows it.

Its definition was not published; the same masks without the importance-aware factor is the natural reading.
`docs/methods/pruning-greedy.md` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from raffm.errors import RunError
from raffm.methods.fiarse import Fiarse
from raffm.methods.method import Device
from raffm.models.labelled import Labelled


@dataclass(frozen=True)
class PruningGreedy(Fiarse):
    """The largest weights, trained by their plain gradient. `scope` as in FIARSE."""

    name: ClassVar[str] = "pruning-greedy"
    gradient: Literal["plain"] = "plain"

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """As FIARSE, but without its gradient."""
        if self.gradient != "plain":
            raise RunError("pruning-greedy is FIARSE with the plain gradient. For the other, choose fiarse.")
        super().refuse(server, devices)
