"""A backend whose clients live elsewhere: letters go out, replies are tallied one by one as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from torch import Tensor, nn

from raffm.algebra.tally import Tally
from raffm.deploy.letters import Letter, Parcel, Reply, inquiry_of, letter_of, loss_of, moments_of, parcel_of, update_of
from raffm.errors import RunError, UpdateError
from raffm.methods.method import Held, Share, Update
from raffm.models.moments import Moments, batch_norms, pooled
from raffm.rounds.backend import Tick, by_shape
from raffm.rounds.plan import Order, Plan
from raffm.rounds.predict import Job, calibrating, predicted
from raffm.rounds.workshop import Outcome, Workshop, merged

Post = Callable[[Iterable[tuple[int, Letter]]], Iterator[tuple[int, Reply | str]]]
"""Takes clients and their letters, made as they are asked for; gives replies as they come, or why there is none, each with
the place of its letter."""


class Posted:
    """Clients on other machines, reached by `post`."""

    def __init__(self, plan: Plan, post: Post) -> None:
        self._plan, self._post = plan, post
        self._workshop = Workshop(plan)
        self._keeps: dict[int, set[str]] = {}
        self._seen: dict[tuple[int, Share], dict[str, Moments]] = {}

    def train(self, orders: Sequence[Order], tally: Tally, done: Callable[[Outcome], None], tick: Tick) -> list[Outcome]:
        """Write to all clients, and tally whoever answers."""
        asked = by_shape(orders)
        held: dict[Share, Held] = {}

        def letters() -> Iterator[tuple[int, Letter]]:
            for share, several in groupby(asked, key=lambda order: order.share):  # one parcel is in memory at a time
                held[share] = self._plan.method.held(self._plan.server, share)
                parcel = parcel_of(self._plan, share, held[share])
                for order in several:
                    yield order.client, letter_of(self._plan, order, held[share], parcel, self._has(order.client, parcel))

        outcomes = []
        for place, reply in self._post(letters()):
            order = asked[place]
            self._note(order.client, reply)
            outcomes.append(self._outcome(order, held[order.share], reply, tally))
            done(outcomes[-1])
            tick()
        return outcomes

    def _outcome(self, order: Order, held: Held, reply: Reply | str, tally: Tally) -> Outcome:
        if isinstance(reply, str):
            return Outcome(order.client, float("nan"), f"client {order.client}: {reply}")
        try:
            tensors, loss = update_of(reply, order, held, self._plan.server), loss_of(reply, order)
        except UpdateError as error:
            return Outcome(order.client, float("nan"), str(error))
        present = self._plan.present(order.client)
        update = Update(order.client, order.share, held, tensors, order.weight, present)
        return merged(self._plan, tally, update, loss)

    # -- what is not trained travels once ------------------------------------------------------------------------

    def _has(self, client: int, parcel: Parcel) -> bool:
        return parcel.about["frozen"] in self._keeps.get(client, ())

    def _note(self, client: int, reply: Reply | str) -> None:
        """Who answers keeps what came; of who fails nothing is taken for granted."""
        if isinstance(reply, str):
            self._keeps.pop(client, None)
        elif isinstance(reply.about.get("keeps"), str):
            self._keeps.setdefault(client, set()).add(reply.about["keeps"])

    # -- evaluation ----------------------------------------------------------------------------------------------

    def predict(self, jobs: Sequence[Job]) -> list[list[Tensor]]:
        """On the server, with its own examples; the statistics of batch norms come from clients."""
        if batch_norms(self._plan.server.model):
            self._seen = self._asked(jobs)
        return [predicted(self._plan, self._workshop, job, statistics=self.statistics) for job in jobs]

    def statistics(self, plan: Plan, module: nn.Module, job: Job) -> Mapping[str, Moments]:
        """What the batch norms of a submodel see on clients' data: as of the last evaluation, if it was of this round."""
        key = job.round, job.share
        return self._seen[key] if key in self._seen else self._asked([job])[key]

    def _asked(self, jobs: Sequence[Job]) -> dict[tuple[int, Share], dict[str, Moments]]:
        """Ask clients for moments of all submodels at once."""
        pairs = [(job, client) for job in jobs for client in self._calibrating(job)]

        def letters() -> Iterator[tuple[int, Letter]]:
            for share, several in groupby(pairs, key=lambda pair: pair[0].share):
                held = self._plan.method.held(self._plan.server, share)
                parcel = parcel_of(self._plan, share, held, self._plan.method.folded(self._plan.server, share))
                for _, client in several:
                    yield client, inquiry_of(self._plan, client, parcel, self._has(client, parcel))

        found: dict[tuple[int, Share], list[dict[str, Moments]]] = {}
        reasons: list[str] = []
        for place, reply in self._post(letters()):
            job, client = pairs[place]
            self._note(client, reply)
            try:
                if isinstance(reply, str):
                    raise UpdateError(f"client {client}: {reply}")
                given = moments_of(reply, client, self._channels(job))
                found.setdefault((job.round, job.share), []).append(given)
            except UpdateError as error:
                reasons.append(str(error))
        for job in jobs:
            if (job.round, job.share) not in found:
                raise RunError("nobody gave the statistics of batch norms that an evaluation needs: " + " ".join(reasons))
        return {key: pooled(several) for key, several in found.items()}

    def _calibrating(self, job: Job) -> list[int]:
        """Of the round's calibrating clients those whose device holds the submodel; where none does, the largest."""
        plan = self._plan
        sizes = {client: plan.tier_of(client, job.round).size for client in calibrating(plan, job.round)}
        needed = min(job.size, max(sizes.values()))
        return [client for client, size in sizes.items() if size >= needed]

    def _channels(self, job: Job) -> dict[str, int]:
        module = self._workshop.loaded(job.share, self._plan.method.held(self._plan.server, job.share)).module
        return {name: norm.num_features for name, norm in batch_norms(module).items()}

    def close(self) -> None:
        """Nothing is held."""
