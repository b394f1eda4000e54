"""A Mask keeps elements, not indices. It shrinks nothing by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from raffm.algebra.layout import Layout


@dataclass(frozen=True, eq=False)
class Mask:
    """For each masked tensor a boolean tensor of its shape; tensors that are not named are held whole."""

    kept: Mapping[str, Tensor]

    def coverage(self, layout: Layout, name: str) -> Tensor:
        """Which elements of a full tensor are held."""
        held = self.kept.get(name)
        return torch.ones(layout.labels[name].shape(layout.sizes), dtype=torch.bool) if held is None else held
