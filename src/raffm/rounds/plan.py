"""A Plan: everything that stays the same during a run. Who takes part in a round, and with what, follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from raffm.algebra.tally import Tally
from raffm.data.examples import Examples, Federation
from raffm.data.task import Task
from raffm.devices.fleet import Fleet, Tier
from raffm.errors import DataError, RunError
from raffm.methods.method import Device, Method, Share
from raffm.models.labelled import Labelled
from raffm.rounds.local import Local
from raffm.seeds import generator


@dataclass(frozen=True)
class Participation:
    """Who is asked in a round.

    `clients` is a whole number, a share of all (0.1; 1.0 is all of them), or 0 for all. `by`: "uniform", by "data" (chances
    grow with a client's number of examples), or by "availability" (each client is reachable with a chance of its own,
    `availability` on average).
    `dropout` is the chance that an asked client never answers; `deadline` the virtual seconds after which nobody is
    waited for (0: no deadline). A round with fewer than `minimum` good updates is not counted: it is tried again, up to
    `tries` times in all, and then the run stops.
    """

    clients: int | float = 0.1
    by: Literal["uniform", "data", "availability"] = "uniform"
    availability: float = 0.5
    dropout: float = 0.0
    deadline: float = 0.0
    minimum: int = 0
    tries: int = 3

    def __post_init__(self) -> None:
        if self.by not in ("uniform", "data", "availability"):
            raise RunError(f"clients are sampled uniform, by data or by availability, not by {self.by!r}.")
        if self.clients < 0:
            raise RunError(f"a round needs clients, but {self.clients!r} were asked for.")
        if self.clients > 1 and self.clients != int(self.clients):
            raise RunError(f"participation.clients is {self.clients!r}; give a whole number, or a share of at most 1.0.")
        if not 0 <= self.dropout < 1 or not 0 < self.availability < 1 or self.deadline < 0:
            raise RunError("dropout lies in [0, 1), availability in (0, 1), and a deadline is not negative.")
        if self.minimum < 0 or self.tries < 1:
            raise RunError(f"a round needs a minimum of at least 0 and 1 try, not {self.minimum!r} and {self.tries!r}.")

    def count(self, clients: int) -> int:
        """How many of all clients a round asks."""
        if not self.clients:
            return clients
        is_share = isinstance(self.clients, float) and self.clients <= 1
        asked = round(self.clients * clients) if is_share else int(self.clients)
        if asked > clients:
            raise RunError(f"a round asks {asked} clients, but there are {clients}.")
        return max(1, asked)


@dataclass(frozen=True)
class Merging:
    """How updates join and move the server.

    `weighting`: a client counts by its training "examples", or "equal"ly, as published. `combine`: their counted "mean",
    or, where some may be wrong, the "median" of those who held an element (all updates are held, none weighs more; the
    serial backend alone). `optimizer`: "plain" (the
    counted mean itself), "momentum" or "adam" over it. `max_norm` refuses an update whose change is longer (0: none is).
    With `strict` a refused update ends the run; otherwise the round goes on without it. `average` keeps the mean of the
    server's models beside it, those of n rounds ago weighing `average` ** n; it is evaluated too, and served (0: off; None:
    as the method has it).
    """

    weighting: Literal["examples", "equal"] = "examples"
    combine: Literal["mean", "median"] = "mean"
    optimizer: Literal["plain", "momentum", "adam"] = "plain"
    lr: float = 1.0
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.99)
    epsilon: float = 1e-3
    max_norm: float = 0.0
    strict: bool = False
    average: float | None = None

    def __post_init__(self) -> None:
        if self.weighting not in ("examples", "equal"):
            raise RunError(f"clients are weighted by examples or equal, not by {self.weighting!r}.")
        if self.combine not in ("mean", "median"):
            raise RunError(f"updates are combined by mean or median, not by {self.combine!r}.")
        if self.optimizer not in ("plain", "momentum", "adam"):
            raise RunError(f"there is no server optimizer {self.optimizer!r}; there are plain, momentum and adam.")
        if self.lr <= 0 or min(self.max_norm, self.momentum, self.epsilon) < 0 or not all(0 <= beta < 1 for beta in self.betas):
            raise RunError("the server's lr must be above 0, max_norm, momentum and epsilon at least 0, and betas in [0, 1).")
        if self.average is not None and not 0 <= self.average < 1:
            raise RunError(f"the average's weights fall by a factor from 0 (off) to below 1, but it is {self.average!r}.")


@dataclass(frozen=True)
class Evaluating:
    """When and how the model is evaluated: after every `every` rounds and after the last.

    `sizes` are the parts of the model that are served and tested (none: the fleet's). Batch norms get their statistics
    from `calibration_clients` clients, each from at most `calibration_examples` of its own examples; with `norms` =
    "test-batches" from the test examples themselves, a batch of one client's after the other, as published code has it.
    `augmented` moves the images of clients' own tests as training does, which published code has too.
    """

    every: int = 10
    batch: int = 500
    last: int = 5
    sizes: tuple[float, ...] = ()
    calibration_clients: int = 20
    calibration_examples: int = 100
    norms: Literal["clients", "test-batches"] = "clients"
    augmented: bool = False

    def __post_init__(self) -> None:
        for name in ("every", "batch", "last", "calibration_clients", "calibration_examples"):
            if getattr(self, name) < 1:
                raise RunError(f"evaluation needs {name} of at least 1, but it is {getattr(self, name)!r}.")
        if self.norms not in ("clients", "test-batches"):
            raise RunError(f"batch norms are calibrated by clients or by test-batches, not by {self.norms!r}.")
        for size in self.sizes:
            if not 0 < size <= 1:
                raise RunError(f"a size to evaluate lies above 0 and is at most 1, but one is {size!r}.")


@dataclass(frozen=True)
class Cohort:
    """The clients of one round: those that were asked, and those of them that dropped out."""

    asked: tuple[int, ...]
    dropped: tuple[int, ...] = ()

    @property
    def present(self) -> tuple[int, ...]:
        """Those that train."""
        gone = set(self.dropped)
        return tuple(client for client in self.asked if client not in gone)


@dataclass(frozen=True, eq=False)
class Order:
    """What one client is asked to do in one round."""

    client: int
    round: int
    share: Share
    weight: float


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that stays the same during a run. `server` is the given model as the method adapts it."""

    server: Labelled
    method: Method
    task: Task
    data: Federation
    fleet: Fleet
    rounds: int
    seed: int = 0
    local: Local = field(default_factory=Local)
    participation: Participation = field(default_factory=Participation)
    merging: Merging = field(default_factory=Merging)
    evaluating: Evaluating = field(default_factory=Evaluating)
    given: Labelled | None = None
    """The model before it was adapted; None until then."""

    def __post_init__(self) -> None:
        if self.given is None:
            object.__setattr__(self, "given", self.server)
            object.__setattr__(self, "server", self.method.adapt(self.server, self.seed, self.dealt))
        if self.rounds < 1:
            raise RunError(f"a run needs at least one round, but was given {self.rounds!r}.")
        _refuse_narrow(self.server)
        empty = (self.data.split.train.counts == 0).nonzero()[0]
        if len(empty):
            raise DataError(f"client {empty[0]} has no training data. Use fewer clients or another split.")
        head = self.server.layout.sizes.get("classes", len(self.data.dataset.classes))
        if head < len(self.data.dataset.classes):
            raise RunError(f"the data have {len(self.data.dataset.classes)} classes, but the model's head has {head}.")
        self.participation.count(self.data.clients)
        budgets = [tier for tier in self.fleet.tiers if tier.budget is not None]
        if budgets and not self.method.heeds_budgets:
            raise RunError(
                f"{self.method.name} cuts by size and does not read limits such as those of {budgets[0].label!r}. Leave them "
                "out, or choose raffm."
            )
        self.method.refuse(self.server, [*self.served.values(), *(device for _, device in self._trained)])
        if self.merging.combine == "median" and type(self.tally()) is not Tally:
            raise RunError(f"{self.method.name} counts in a way of its own, which has no median. Leave merging.combine out.")

    @property
    def decay(self) -> float:
        """By what the weights of the server's average fall from round to round; 0 where there is none."""
        return self.method.average if self.merging.average is None else self.merging.average

    def tally(self) -> Tally:
        """What counts the updates of a round."""
        return self.method.tally(self.server, self.dealt)

    @cached_property
    def dealt(self) -> tuple[float, ...]:
        """The different sizes that clients were dealt, largest first."""
        places = set(self.fleet.tiers_of(self.data.clients, self.seed).tolist())
        return tuple(sorted({self.fleet.tiers[place].size for place in places}, reverse=True))

    @property
    def served(self) -> dict[str, Device]:
        """The devices that submodels are made for, by name, largest first: the whole, the fleet's, and those asked for."""
        devices = {Tier(size).label: Device(-1, size, fleet=self.dealt) for size in (1.0, *self.evaluating.sizes)}
        for label, device in self._trained if not self.evaluating.sizes else ():
            is_taken = devices.get(label, device) != device
            if device != devices["1"]:
                devices[f"{label} ({device.size:g})" if is_taken else label] = device
        return dict(sorted(devices.items(), key=lambda entry: -entry[1].size))

    @property
    def _trained(self) -> list[tuple[str, Device]]:
        """The devices of the fleet, by name."""
        return [(tier.label, Device(-1, tier.size, 0, tier.budget, self.dealt)) for tier in self.fleet.tiers if tier.share]

    # -- who ------------------------------------------------------------------------------------------------------

    def cohort(self, round: int) -> Cohort:
        """Who is asked in a round, and who of them drops out."""
        asked = self._sampled(round)
        chances = torch.rand(len(asked), generator=generator(self.seed, "dropout", round))
        dropped = asked[chances < self.participation.dropout]
        return Cohort(tuple(asked.tolist()), tuple(dropped.tolist()))

    def _sampled(self, round: int) -> Tensor:
        count = self.participation.count(self.data.clients)
        draw = generator(self.seed, "sample", round)
        if self.participation.by == "uniform":
            return torch.randperm(self.data.clients, generator=draw)[:count]
        if self.participation.by == "data":
            chances = torch.from_numpy(self.data.split.train.counts).double()
            return _weighted(chances, count, draw)
        reachable = (torch.rand(self.data.clients, generator=draw) < self._availability).nonzero().flatten()
        return reachable[torch.randperm(len(reachable), generator=draw)[:count]]

    @cached_property
    def _availability(self) -> Tensor:
        """A chance for every client, drawn once from a Beta distribution with the given mean."""
        mean = self.participation.availability
        return torch.rand(self.data.clients, generator=generator(self.seed, "availability")) ** ((1 - mean) / mean)

    # -- what -----------------------------------------------------------------------------------------------------

    def orders(self, round: int, clients: Sequence[int]) -> list[Order]:
        """What every client of a round gets: the method's choice for its device."""
        tiers = [self.tier_of(client, round) for client in clients]
        devices = [
            Device(client, tier.size, place, tier.budget, self.dealt)
            for place, (client, tier) in enumerate(zip(clients, tiers, strict=True))
        ]
        shares = self.method.choose(self.server, round, devices, self.seed)
        taken = [(client, share) for client, share in zip(clients, shares, strict=True) if share is not None]
        return [Order(client, round, share, self.weight(client)) for client, share in taken]

    def tier_of(self, client: int, round: int) -> Tier:
        """A client's device in a round."""
        return self.fleet.tiers[int(self._tiers(round if self.fleet.redraw else 0)[client])]

    def _tiers(self, round: int) -> Tensor:
        known = self.__dict__.setdefault("_known_tiers", {})
        if round not in known:
            known.clear()
            known[round] = self.fleet.tiers_of(self.data.clients, self.seed, round)
        tiers: Tensor = known[round]
        return tiers

    def weight(self, client: int) -> float:
        """How much a client's update counts."""
        return float(self.data.split.train.counts[client]) if self.merging.weighting == "examples" else 1.0

    def present(self, client: int) -> Tensor:
        """Which classes a client's training examples have."""
        known: dict[int, Tensor] = self.__dict__.setdefault("_known_classes", {})
        if client not in known:
            known[client] = self._classes_of(client)
        return known[client]

    def _classes_of(self, client: int) -> Tensor:
        labels = self.data.dataset.train.labels
        own = labels[torch.from_numpy(self.data.split.train[client]).to(labels.device)]
        head = self.server.layout.sizes.get("classes", 0)  # may have more rows than the data have classes
        return Examples({}, own).present(max(head, len(self.data.dataset.classes)))


def _refuse_narrow(server: Labelled) -> None:
    """Refuse trained weights in which the small changes of many rounds would be lost one by one."""
    trained = set(server.layout.tensors("parameter"))
    for name, tensor in server.tensors.items():
        if name in trained and tensor.dtype.itemsize < 4:
            raise RunError(
                f"`{name}` is {tensor.dtype}, too coarse for the small changes of rounds to add up. Call `model.float()` "
                'first; backend.precision = "bfloat16" still computes in bfloat16.'
            )


def _weighted(chances: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """A sample without replacement whose chances grow with these numbers (Gumbel's trick: any number of clients)."""
    noise = -torch.log(-torch.log(torch.rand(len(chances), generator=draw, dtype=torch.float64)))
    return (chances.log() + noise).topk(count).indices
