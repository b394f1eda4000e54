"""An inset: a smaller submodel that a lane trains beside its own, in copies of its numbers.

Views would need no memory of their own, but hundreds of small copies and additions a step; here both are one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from raffm.algebra.inside import inside
from raffm.algebra.move import extract, part_of
from raffm.models.labelled import Labelled
from raffm.models.smaller import Smaller
from raffm.models.surgery import assembled
from raffm.simulate.sheet import Sheet, Style


class Inset(nn.Module):
    """Runs in the place of a smaller submodel: fetches its numbers from the larger sheet, and gives gradients back there."""

    def __init__(self, server: Labelled, smaller: Smaller, larger: Sheet, style: Style) -> None:
        """Make room for the copies."""
        super().__init__()
        layout, outer, inner = smaller.where
        self.module = assembled(server.model, layout, inner, extract(server.tensors, layout, inner)).train()
        self.sheet, self._larger = Sheet(self.module, style), larger
        self.spoken: torch.cuda.Event | None = None
        numbers = torch.arange(len(larger.values), device=larger.device)
        self._from = numbers[: len(self.sheet.values)].clone()  # what lies between tensors may come from anywhere
        for name, move in inside(layout, outer, inner).items():
            if move.name in self.sheet.slots:
                self.sheet.slots[move.name].view(self._from).copy_(part_of(larger.slots[name].view(numbers), move.where))

    def forward(self, *values: Any, **inputs: Any) -> Any:
        """What the submodel says with the numbers that the larger sheet has now.

        It speaks beside the larger one, from the batch alone; what comes after it, such as being taught, waits for that.
        """
        with torch.no_grad():
            torch.index_select(self._larger.values, 0, self._from, out=self.sheet.values)
        self.sheet.show()
        said = self.module(*values, **inputs)
        if self.spoken is not None:
            torch.cuda.current_stream().wait_event(self.spoken)
        return said

    @torch.no_grad()
    def collect(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Put gradients into their places."""
        pairs = zip(gradients, self.sheet.parameters, strict=True)
        self.sheet.collect([torch.zeros_like(own) if given is None else given for given, own in pairs])

    @torch.no_grad()
    def give_back(self) -> None:
        """Add what was collected to the gradients of the larger sheet."""
        self._larger.gradients.index_add_(0, self._from, self.sheet.gradients)
