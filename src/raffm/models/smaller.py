"""A smaller submodel that runs on a module's own parameters: no weights, gradients or optimizer memory beside them."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.func import functional_call

from raffm.algebra.inside import views
from raffm.algebra.selection import Selection
from raffm.models.label import named_tensors
from raffm.models.labelled import Labelled
from raffm.models.moments import batch_norms
from raffm.models.surgery import skeleton

_FRAMES: WeakKeyDictionary[nn.Module, dict[Selection, nn.Module]] = WeakKeyDictionary()
"""The structures of smaller submodels, for as long as the module lives that they run inside of."""


class Smaller(nn.Module):
    """A submodel inside another: called as a module of its size is, it computes on slices of the larger one's parameters.

    `host` is a submodel of `server`, cut by `outer`; its tensors may change, but must stay where they are. The gradients of
    what this says are added to those of the host's parameters where their slices lie. Statistics that batch norms gather in
    training are its own. Where there is a `stand_in`, that is run instead.
    """

    def __init__(self, host: nn.Module, server: Labelled, outer: Selection, inner: Selection) -> None:
        """See into a module."""
        super().__init__()
        self.frame = _frame(host, server, inner).train()
        self.stand_in: nn.Module | None = None
        self.where = server.layout, outer, inner
        statistics = _statistics(host)
        self._tensors = {name: tensor for name, tensor in named_tensors(host)[0].items() if name not in statistics}

    def forward(self, *values: Any, **inputs: Any) -> Any:
        """What the smaller submodel says."""
        if self.stand_in is not None:
            return self.stand_in(*values, **inputs)
        return functional_call(self.frame, views(self._tensors, *self.where), values, inputs)


def _frame(host: nn.Module, server: Labelled, inner: Selection) -> nn.Module:
    """Made once for a module: copying structure takes longer than a small step."""
    known = _FRAMES.setdefault(host, {})
    if inner not in known:
        known[inner] = skeleton(server.model, server.layout, inner)
        device = next(host.parameters()).device
        for norm in batch_norms(known[inner]).values():
            for name, buffer in list(norm.named_buffers(recurse=False)):
                setattr(norm, name, torch.zeros_like(buffer, device=device))
    return known[inner]


def _statistics(module: nn.Module) -> set[str]:
    """The names of what batch norms gather."""
    return {f"{path}.{name}" for path, norm in batch_norms(module).items() for name, _ in norm.named_buffers(recurse=False)}
