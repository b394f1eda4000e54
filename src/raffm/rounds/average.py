"""The server's average: the mean of its models after every round so far, in which older ones count less.

It costs nothing on the wire. What is trained is the last model; what is served, where the average is on, is the average.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raffm.algebra.layout import TRAVELLING
from raffm.models.labelled import Labelled

AVERAGE = "average"
"""The view of a size that the average is served at."""


@dataclass(frozen=True, eq=False)
class Average:
    """The mean of the models after rounds 1 to t; that of round s weighs `decay` ** (t - s). Kept in float32.

    Whole numbers are those of the last model. Before the first round there is nothing in it.
    """

    decay: float
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def note(self, server: Labelled, rounds: int) -> None:
        """Take in the model after so many rounds."""
        part = (1 - self.decay) / (1 - self.decay**rounds)
        for name in server.layout.tensors(*TRAVELLING):
            tensor = server.tensors[name].detach()
            if name not in self.tensors or not tensor.is_floating_point():
                self.tensors[name] = tensor.float().clone() if tensor.is_floating_point() else tensor.clone()
            else:
                self.tensors[name].lerp_(tensor.float(), part)

    def restore(self, tensors: Mapping[str, Tensor], server: Labelled) -> None:
        """Take up what was saved."""
        self.tensors.clear()
        self.tensors.update({name: tensor.to(server.tensors[name].device) for name, tensor in tensors.items()})

    @torch.no_grad()
    def fill(self, server: Labelled) -> None:
        """Put the average into the server's tensors."""
        for name, tensor in self.tensors.items():
            server.tensors[name].copy_(tensor)

    @contextmanager
    def in_place_of(self, server: Labelled) -> Iterator[None]:
        """The server has the average's weights for a while."""
        last = {name: server.tensors[name].detach().clone() for name in self.tensors}
        self.fill(server)
        try:
            yield
        finally:
            Average(self.decay, last).fill(server)
