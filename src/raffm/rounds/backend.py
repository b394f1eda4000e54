"""Where clients train. `Serial` is the reference: one after another, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from raffm.algebra.tally import Tally
from raffm.methods.method import Share
from raffm.models.rounding import Precision
from raffm.rounds.plan import Order, Plan
from raffm.rounds.predict import Job, predicted
from raffm.rounds.workshop import Outcome, Workshop

Tick = Callable[[], None]
"""Called after every step of every client; may raise to stop the round."""


class Backend(Protocol):
    """Two ways of running clients give the same sums to 1e-6, and the same sums every time."""

    def train(self, orders: Sequence[Order], tally: Tally, done: Callable[[Outcome], None], tick: Tick) -> list[Outcome]:
        """Train all clients and add their updates to the tally; `done` hears of each client as it ends."""
        ...

    def predict(self, jobs: Sequence[Job]) -> list[list[Tensor]]:
        """What submodels of the server's current model say to the test and validation examples; see `predict.predicted`."""
        ...

    def close(self) -> None:
        """Give back what the backend holds."""
        ...


class Serial:
    """Clients one after another. Those with equal submodels follow each other, which is cheapest to tally."""

    def __init__(self, plan: Plan, precision: Precision = "float32") -> None:
        self._plan = plan
        self._workshop = Workshop(plan, precision)

    def train(self, orders: Sequence[Order], tally: Tally, done: Callable[[Outcome], None], tick: Tick) -> list[Outcome]:
        """Train all clients in this process."""
        outcomes = []
        for order in by_shape(orders):
            outcomes.append(self._workshop.train(order, tally, tick))
            done(outcomes[-1])
        return outcomes

    def predict(self, jobs: Sequence[Job]) -> list[list[Tensor]]:
        """One submodel after another."""
        return [predicted(self._plan, self._workshop, job) for job in jobs]

    def close(self) -> None:
        """Nothing is held."""


def by_shape(orders: Sequence[Order]) -> list[Order]:
    """Orders with equal shares next to each other; otherwise as they came."""
    first: dict[Share, int] = {}
    for place, order in enumerate(orders):
        first.setdefault(order.share, place)
    return sorted(orders, key=lambda order: first[order.share])
