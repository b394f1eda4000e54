"""The server's optimizer: what it makes of the counted mean. Where nobody held an element, its state does not move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raffm.algebra.layout import Layout
from raffm.algebra.tally import Change
from raffm.rounds.plan import Merging


@dataclass(frozen=True, eq=False)
class ServerOptimizer:
    """Moves parameters by the counted mean, by momentum over it, or by Adam over it; buffers take the mean itself.

    Adam is that of Reddi et al., "Adaptive Federated Optimization" (ICLR 2021): no correction of the first steps.
    `state` holds what it remembers, by kind and tensor; it is saved and restored with the run.
    """

    layout: Layout
    merging: Merging
    state: dict[str, Tensor] = field(default_factory=dict)

    def move(self, name: str, change: Change) -> Tensor:
        """What a tensor moves by; 0 where nobody held it."""
        if self.layout.kind(name) != "parameter":
            return change.mean
        if self.merging.optimizer == "plain":
            return change.mean if self.merging.lr == 1 else change.mean * self.merging.lr
        is_covered = (change.coverage > 0).expand_as(change.mean)
        step = (
            self._momentum(name, change, is_covered)
            if self.merging.optimizer == "momentum"
            else self._adam(name, change, is_covered)
        )
        return torch.where(is_covered, step * self.merging.lr, 0.0)

    def _momentum(self, name: str, change: Change, is_covered: Tensor) -> Tensor:
        return self._remember(
            f"momentum/{name}", is_covered, change.mean, lambda old: old * self.merging.momentum + change.mean
        )

    def _adam(self, name: str, change: Change, is_covered: Tensor) -> Tensor:
        first, second = self.merging.betas
        mean = self._remember(f"mean/{name}", is_covered, change.mean, lambda old: old * first + change.mean * (1 - first))
        squares = self._remember(
            f"squares/{name}", is_covered, change.mean, lambda old: old * second + change.mean.square() * (1 - second)
        )
        return mean / (squares.sqrt() + self.merging.epsilon)

    def _remember(self, key: str, is_covered: Tensor, like: Tensor, renew: Callable[[Tensor], Tensor]) -> Tensor:
        old = self.state.get(key)
        old = torch.zeros_like(like) if old is None else old
        self.state[key] = torch.where(is_covered, renew(old), old)
        return self.state[key]

    def restore(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Take up what was saved."""
        self.state.clear()
        self.state.update({key: tensor.to(device) for key, tensor in state.items()})
