"""A model with what its axes mean: what everything above this layer works on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from raffm.algebra.layout import Layout
from raffm.models.label import layout_of, named_tensors, table_of
from raffm.models.table import Table


@dataclass(frozen=True, eq=False)
class Labelled:
    """A model, its layout, its family's table, and its tensors by name, tied ones once."""

    model: nn.Module
    layout: Layout
    table: Table
    tensors: Mapping[str, Tensor]

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""
        return next(iter(self.tensors.values())).device

    @staticmethod
    def of(model: nn.Module, table: Table | str | Path | None = None) -> Labelled:
        """Label a model by its family's table, or by a given one."""
        found = table_of(model, table)
        return Labelled(model, layout_of(model, found), found, named_tensors(model)[0])
