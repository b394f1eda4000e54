"""A backend whose clients live elsewhere: letters go out, replies are tallied one by one as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from raffm.algebra.tally import Tally
from raffm.deploy.letters import Letter, Reply, letter_of, update_of
from raffm.errors import UpdateError
from raffm.methods.method import Held, Share, Update
from raffm.rounds.backend import Tick, by_shape
from raffm.rounds.plan import Order, Plan
from raffm.rounds.predict import Job, predicted
from raffm.rounds.workshop import Outcome, Workshop, merged

Post = Callable[[Mapping[int, Letter]], Iterator[tuple[int, Reply | str]]]
"""Letters by client; gives every client's reply as it comes, or why there is none."""


class Posted:
    """Clients on other machines, reached by `post`."""

    def __init__(self, plan: Plan, post: Post) -> None:
        self._plan, self._post = plan, post
        self._workshop = Workshop(plan)

    def train(self, orders: Sequence[Order], tally: Tally, done: Callable[[Outcome], None], tick: Tick) -> list[Outcome]:
        """Write to all clients, and tally whoever answers."""
        held: dict[Share, Held] = {}
        for order in orders:
            if order.share not in held:
                held[order.share] = self._plan.method.held(self._plan.server, order.share)
        asked = {order.client: order for order in by_shape(orders)}
        letters = {client: letter_of(self._plan, order, held[order.share]) for client, order in asked.items()}
        outcomes = []
        for client, reply in self._post(letters):
            outcomes.append(self._outcome(asked[client], held[asked[client].share], reply, tally))
            done(outcomes[-1])
            tick()
        return outcomes

    def _outcome(self, order: Order, held: Held, reply: Reply | str, tally: Tally) -> Outcome:
        if isinstance(reply, str):
            return Outcome(order.client, float("nan"), f"client {order.client}: {reply}")
        try:
            tensors = update_of(reply, order, held)
        except UpdateError as error:
            return Outcome(order.client, float("nan"), str(error))
        present = self._plan.present(order.client)
        update = Update(order.client, order.share, held, tensors, order.weight, present)
        return merged(self._plan, tally, update, float(reply.about.get("loss", "nan")))

    def predict(self, jobs: Sequence[Job]) -> list[list[Tensor]]:
        """On the server, with its own examples."""
        return [predicted(self._plan, self._workshop, job) for job in jobs]

    def close(self) -> None:
        """Nothing is held."""
