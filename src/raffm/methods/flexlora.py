"""FlexLoRA: what adapters do is averaged, not what they are made of; the server factors the mean anew.

Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources", NeurIPS 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from raffm.algebra.tally import Tally
from raffm.methods.lora import LoRA, ranks_of
from raffm.methods.products import ProductTally
from raffm.models.labelled import Labelled


@dataclass(frozen=True)
class FlexLoRA(LoRA):
    """Ranks by size, and the mean of all products, cut to the full rank by singular values."""

    name: ClassVar[str] = "flexlora"

    def tally(self, server: Labelled, sizes: Sequence[float]) -> Tally:
        """Products, all ranks in one part: who lacks ranks counts with 0 for them."""
        return ProductTally(server, [max(server.layout.sizes[name] for name in ranks_of(server))])
