"""A Median: the tally for clients that may be wrong. Every element moves by the median change of those who held it.

It must hold all updates of a round: memory is one model, and at most one more for coverage, for every client. Weights do
not count, but for 0, which leaves a client out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raffm.algebra.layout import Layout
from raffm.algebra.mask import Mask
from raffm.algebra.move import Tensors
from raffm.algebra.selection import Selection
from raffm.algebra.tally import Change, Tally, Total
from raffm.errors import UpdateError


class Median(Tally):
    """Keeps clients' updates until `step` moves the server by their median, element by element."""

    def __init__(self, layout: Layout, server: Tensors) -> None:
        """Tally against these server tensors, which must not change before the round ends."""
        super().__init__(layout, server)
        self._each: list[dict[str, Total]] = []

    @torch.no_grad()
    def add(
        self,
        update: Tensors,
        held: Selection | Mask,
        weight: float = 1.0,
        sent: Tensors | None = None,
        client: object = "?",
        counted: Tensors | None = None,
    ) -> None:
        """Keep one client's update, as `Tally.add` would count it; a refused one changes nothing."""
        alone = Tally(self._layout, self._server)
        alone.add(update, held, float(weight > 0) if 0 <= weight < float("inf") else weight, sent, client, counted)
        self._each.append(alone.totals())
        for name, counter in alone.counters().items():
            self._counters[name] = torch.maximum(self._counters.get(name, counter), counter)

    @torch.no_grad()
    def changes(self) -> dict[str, Change]:
        """The median change of every tensor that somebody held; the median of two is their mean."""
        each, self._each = self._each, []
        names = dict.fromkeys(name for totals in each for name in totals)
        return {name: _median([totals[name] for totals in each if name in totals]) for name in names}

    def totals(self) -> dict[str, Total]:
        """A median is no sum."""
        raise UpdateError("medians cannot be added up: every update must come to one place.")

    def absorb(self, totals: Mapping[str, Total], counters: Tensors) -> None:
        """A median is no sum."""
        raise UpdateError("medians cannot be added up: every update must come to one place.")


def _median(several: list[Total]) -> Change:
    held = torch.stack([(total.coverage > 0).expand_as(total.sum) for total in several])
    changes = torch.stack([total.sum for total in several]).masked_fill_(~held, torch.inf).sort(0).values
    count = held.sum(0, keepdim=True)
    middle = [_at(changes, ((count - 1 + up) // 2).clamp(min=0)) for up in (0, 1)]
    return Change(torch.where(count[0] > 0, (middle[0] + middle[1]) / 2, 0.0), count[0].to(changes))


def _at(changes: Tensor, place: Tensor) -> Tensor:
    return changes.gather(0, place)[0]
