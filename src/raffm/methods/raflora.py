"""raFLoRA: as FlexLoRA, but ranks are counted in parts, each among the clients that have it.

Wu et al., "Preventing Rank Collapse in Federated Low-Rank Adaptation with Client Heterogeneity", arXiv 2602.13486: in
FlexLoRA's mean the ranks that only large devices train are divided by everybody, and fade from round to round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from raffm.algebra.tally import Tally
from raffm.errors import RunError
from raffm.methods.lora import LoRA, rank_at, ranks_of
from raffm.methods.method import Device
from raffm.methods.products import ProductTally
from raffm.models.labelled import Labelled


@dataclass(frozen=True)
class RaFLoRA(LoRA):
    """Ranks by size; a part ends where the ranks of a size of the fleet end."""

    name: ClassVar[str] = "raflora"

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """Parts are stretches of ranks in their own order, which singular values give them."""
        super().refuse(server, devices)
        if self.metric != "none":
            raise RunError("raflora takes ranks as their singular values order them: metric = 'none'.")
        ranks = {server.layout.sizes[name] for name in ranks_of(server)}
        if len(ranks) > 1:
            raise RunError(f"raflora divides the ranks of all adapters alike, and these have {sorted(ranks)}. Use flexlora.")

    def tally(self, server: Labelled, sizes: Sequence[float]) -> Tally:
        """Products, in a part for every rank that somebody ends at."""
        group = ranks_of(server)[0]
        return ProductTally(server, sorted({server.layout.sizes[group], *(rank_at(server, group, size) for size in sizes)}))
