"""A backend whose clients live elsewhere: letters go out, replies are tallied one by one as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from torch import Tensor, nn

from raffm.algebra.tally import Tally
from raffm.deploy.letters import Letter, Parcel, Reply, inquiry_of, letter_of, loss_of, moments_of, parcel_of, update_of
from raffm.deploy.node import KEPT
from raffm.errors import RunError, UpdateError
from raffm.methods.method import Held, Share, Update
from raffm.models.moments import Moments, batch_norms, pooled
from raffm.notices import notice
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
        self._keeps: dict[int, deque[str]] = {}
        self._seen: dict[tuple[int, Share], dict[str, Moments]] = {}
        self._last: dict[tuple[int, float], dict[str, Moments]] = {}

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
        elif reply.about.get("keeps") and isinstance(reply.about["keeps"], str):
            self._keeps.setdefault(client, deque(maxlen=KEPT // 2)).append(reply.about["keeps"])

    # -- evaluation ----------------------------------------------------------------------------------------------

    def predict(self, jobs: Sequence[Job]) -> list[list[Tensor]]:
        """On the server, with its own examples; the statistics of batch norms come from clients."""
        if batch_norms(self._plan.server.model):
            self._seen = self._asked(jobs)
        return [predicted(self._plan, self._workshop, job, statistics=self.statistics) for job in jobs]

    def statistics(self, plan: Plan, module: nn.Module, job: Job) -> Mapping[str, Moments]:
        """What the batch norms of a submodel see on clients' data: as of the last evaluation, if it was of this round."""
        return self._seen[_key(job)] if _key(job) in self._seen else self._asked([job])[_key(job)]

    def _asked(self, jobs: Sequence[Job]) -> dict[tuple[int, Share], dict[str, Moments]]:
        """Ask clients for moments of all submodels at once; where nobody answers for one, others are asked."""
        found: dict[tuple[int, Share], dict[str, Moments]] = {}
        for clients in zip(*(self._calibrating(job) for job in jobs), strict=True):
            left = [(job, several) for job, several in zip(jobs, clients, strict=True) if _key(job) not in found]
            found |= self._answers([(job, client) for job, several in left for client in several])
        for place, job in enumerate(jobs):
            if _key(job) not in found:
                found[_key(job)] = self._earlier(place, job)
            self._last[place, job.size] = found[_key(job)]
        return found

    def _earlier(self, place: int, job: Job) -> dict[str, Moments]:
        """The statistics of the last evaluation for a submodel of the same shape."""
        before = self._last.get((place, job.size), {})
        if self._channels(job) != {name: len(each.total) for name, each in before.items()}:
            raise RunError(f"nobody gave the statistics of batch norms that an evaluation of size {job.size:g} needs.")
        notice(f"nobody gave the statistics of batch norms of size {job.size:g}; those of an earlier evaluation are used.")
        return before

    def _answers(self, pairs: Sequence[tuple[Job, int]]) -> dict[tuple[int, Share], dict[str, Moments]]:
        """The moments of submodels, each from some clients."""

        def letters() -> Iterator[tuple[int, Letter]]:
            for share, several in groupby(pairs, key=lambda pair: pair[0].share):
                held = self._plan.method.held(self._plan.server, share)
                parcel = parcel_of(self._plan, share, held, self._plan.method.folded(self._plan.server, share))
                for _, client in several:
                    yield client, inquiry_of(self._plan, client, parcel, self._has(client, parcel))

        found: dict[tuple[int, Share], list[dict[str, Moments]]] = {}
        for place, reply in self._post(letters()):
            job, client = pairs[place]
            self._note(client, reply)
            try:
                if isinstance(reply, str):
                    raise UpdateError(f"client {client}: {reply}")
                given = moments_of(reply, client, self._channels(job))
                found.setdefault(_key(job), []).append(given)
            except UpdateError as error:
                notice(f"the statistics of batch norms come without those of {error}")
        return {key: pooled(several) for key, several in found.items()}

    def _calibrating(self, job: Job) -> list[list[int]]:
        """Who is asked for moments, and who if none of them answers, and so on.

        First the round's calibrating clients whose device holds the submodel; then others that hold it; then the largest of
        those that do not.
        """
        plan = self._plan
        sizes = {client: plan.tier_of(client, job.round).size for client in range(plan.data.clients)}
        chosen = set(calibrating(plan, job.round))
        holding = [client for client, size in sizes.items() if size >= job.size]
        others = sorted(set(sizes) - set(holding), key=lambda client: -sizes[client])
        largest = [client for client in others if sizes[client] == sizes[others[0]]]
        stages = [
            [client for client in holding if client in chosen],
            [client for client in holding if client not in chosen],
            largest,
            [client for client in others if client not in set(largest)],
        ]
        return [stage[: plan.evaluating.calibration_clients] for stage in stages]

    def _channels(self, job: Job) -> dict[str, int]:
        module = self._workshop.loaded(job.share, self._plan.method.held(self._plan.server, job.share)).module
        return {name: norm.num_features for name, norm in batch_norms(module).items()}

    def close(self) -> None:
        """Nothing is held."""


def _key(job: Job) -> tuple[int, Share]:
    return job.round, job.share
