"""What a method is: which part a client gets, how it trains, how updates join, which submodel a device is served.

    adapt     (server, seed, fleet)      the model that is trained: nearly always the given one
    choose    (server, round, devices)   a Share for every device of the round; None for one that sits it out
    learn     (server, share, client)    what happens in a client's steps; the backend owns the loop
    tally     (server, sizes)            what counts the updates of a round: nearly always a plain Tally
    merge     (tally, server, update)    how one client's update is counted
    serve     (server, round, devices)   the submodels that devices receive afterwards
    folded    (server, share)            factors of their tensors, where training scaled what modules give
    completed (server, fleet, selection) a submodel that somebody else chose, as the method would serve it

`Usual` has what most of them do. A method is a frozen dataclass whose fields are its switches. It keeps no state: what
it decides follows from the server's model, the round and the seed, so a run can be stopped and resumed anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor, nn

from raffm.algebra.mask import Mask
from raffm.algebra.selection import Selection
from raffm.algebra.tally import Tally
from raffm.data.task import Batch, Task
from raffm.devices.budget import Budget
from raffm.models.labelled import Labelled
from raffm.models.smaller import Smaller

Held = Selection | Mask
Step = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Device:
    """A client's device as a method sees it. `size` is the part of the full model's parameters it can hold."""

    client: int
    size: float
    place: int = 0
    """Its place among the clients of the round."""
    budget: Budget | None = None
    """Its limits, where the fleet states more than a size."""
    fleet: tuple[float, ...] = (1.0,)
    """The sizes that clients of the fleet were dealt."""


@dataclass(frozen=True, eq=False)
class Share:
    """What a device is given, in plain values: the indices it holds, and numbers that its method needs.

    `counts` says how many elements a mask keeps, where there is one: shares with equal shapes and counts cost the same.
    `inner` are smaller submodels, inside of this one, that are trained with it: all of them in every step, or, where `drawn`
    is not None, one of them, drawn step by step from a generator with that seed.
    """

    selection: Selection = field(default_factory=Selection)
    numbers: Mapping[str, float] = field(default_factory=dict)
    counts: tuple[int, ...] = ()
    inner: tuple[Selection, ...] = ()
    drawn: int | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Share) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def _content(self) -> object:
        return self.selection, tuple(sorted(self.numbers.items())), self.inner, self.drawn


@dataclass(frozen=True, eq=False)
class Client:
    """What a method may know about a client's data while it trains: which classes occur in them."""

    task: Task
    present: Tensor
    """A bool for every class."""


@dataclass(frozen=True, eq=False)
class Update:
    """What a client sends back: its tensors, and what it was given: the share, and the elements that it stands for."""

    client: int
    share: Share
    held: Held
    tensors: Mapping[str, Tensor]
    weight: float
    present: Tensor


@dataclass(frozen=True)
class Served:
    """Submodels for one size; of several (windows), their scores are averaged. `view` names the way of cutting."""

    shares: tuple[Share, ...]
    view: str = ""


def nothing(module: nn.Module) -> None:
    """Leave the module as it is."""


@dataclass(frozen=True)
class Fading:
    """A parameter is seen where its magnitude is at least its limit, and moves there alone; elsewhere the module has 0.

    With `aware`, gradients are multiplied by `1 + 2 |w| limit / (|w| + limit)^2`. Parameters without a limit always move.
    """

    limits: Mapping[str, float]
    aware: bool


@dataclass(frozen=True)
class Scaling:
    """What modules give, biases included, is multiplied by a factor, each by its own."""

    factors: Mapping[str, float]


Loss = Callable[[nn.Module, Batch], Tensor | Iterable[Tensor]]
"""The loss of a batch, or its terms one by one: each is backpropagated before the next is asked for, and gradients add up."""


@dataclass(frozen=True)
class Turns:
    """Losses that take turns: a step takes the one whose place `turn` gives for its number."""

    losses: tuple[Loss, ...]
    turn: Callable[[int], int]


def alone(module: nn.Module) -> Sequence[Smaller]:
    """Leave the module as it is; no other is run beside it."""
    return ()


@dataclass(frozen=True)
class Learn:
    """What a method does in a client's training. None of these may wait for the device.

    `loss` is what every step takes, unless there are `turns`. What a client reports is the mean of its first term.
    `prepare` runs once before the steps, and gives the smaller submodels that the loss runs inside of the client's own:
    a term after the first begins with running one on the batch, before it looks at what another term said;
    `finish` runs once after them. The module belongs to the backend and is used again.
    `constants` are the tensors that belong to this client and that the functions read, `key` whatever else differs between
    clients: a backend that keeps a step for the next client of the same shape and key writes its constants into these.
    `fading` and `scaling` say what the hooks do, where they do just that, so that a backend may do it in one pass.
    """

    loss: Loss
    prepare: Callable[[nn.Module], Sequence[Smaller]] = alone
    after_backward: Step = nothing
    after_step: Step = nothing
    finish: Step = nothing
    constants: tuple[Tensor, ...] = ()
    key: tuple[float, ...] = ()
    fading: Fading | None = None
    scaling: Scaling | None = None
    turns: Turns | None = None

    def turn(self, step: int) -> int:
        """Which of its losses a step takes."""
        return 0 if self.turns is None else self.turns.turn(step)

    def terms(self, turn: int, module: nn.Module, batch: Batch) -> Iterable[Tensor]:
        """The terms of the loss that a turn takes."""
        loss = self.loss if self.turns is None else self.turns.losses[turn]
        found = loss(module, batch)
        return (found,) if isinstance(found, Tensor) else found


class Method(Protocol):
    """See the head of this file."""

    @property
    def name(self) -> str:
        """The name by which users pick the method."""
        ...

    @property
    def average(self) -> float:
        """By what the weights of the server's average fall from round to round, unless a run says; 0 for no average."""
        ...

    @property
    def heeds_budgets(self) -> bool:
        """Whether it reads the limits of devices, besides their sizes."""
        ...

    def adapt(self, server: Labelled, seed: int, fleet: Sequence[float]) -> Labelled:
        """The model to train, from the given one, whose tensors it shares; `fleet` are the sizes that clients have."""
        ...

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """Raise an error that says why where the method makes no sense for this model or these devices."""
        ...

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> Sequence[Share | None]:
        """A Share for every device of the round, None for one that sits it out."""
        ...

    def held(self, server: Labelled, share: Share) -> Held:
        """The elements of the server's model that a Share stands for."""
        ...

    def learn(self, server: Labelled, share: Share, held: Held, client: Client) -> Learn:
        """How a client trains its share."""
        ...

    def tally(self, server: Labelled, sizes: Sequence[float]) -> Tally:
        """What counts updates; `sizes` are those of the fleet."""
        ...

    def merge(self, tally: Tally, server: Labelled, update: Update) -> None:
        """Add one client's update to the round's tally."""
        ...

    def serve(self, server: Labelled, round: int, devices: Sequence[Device]) -> list[list[Served]]:
        """What every device receives after a round: one entry for each way of serving it."""
        ...

    def folded(self, server: Labelled, share: Share) -> Mapping[str, float]:
        """By what the tensors of a served submodel are multiplied, by their names there; others stay as they are."""
        ...

    def completed(self, server: Labelled, fleet: Sequence[float], selection: Selection) -> Selection:
        """A submodel of any sizes, as the method would serve it."""
        ...


class Usual:
    """What most methods do: they train the given model, by the task's loss, and count what was held."""

    average: ClassVar[float] = 0.0
    heeds_budgets: ClassVar[bool] = False

    def adapt(self, server: Labelled, seed: int, fleet: Sequence[float]) -> Labelled:
        """The model as it is."""
        return server

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """Every model will do."""

    def held(self, server: Labelled, share: Share) -> Held:
        """The selected indices."""
        return share.selection

    def learn(self, server: Labelled, share: Share, held: Held, client: Client) -> Learn:
        """By the task's own loss."""
        return Learn(plain_loss(client.task))

    def tally(self, server: Labelled, sizes: Sequence[float]) -> Tally:
        """Every element by itself."""
        return Tally(server.layout, server.tensors)

    def merge(self, tally: Tally, server: Labelled, update: Update) -> None:
        """The counted mean."""
        counted_mean(tally, update)

    def folded(self, server: Labelled, share: Share) -> Mapping[str, float]:
        """No factors."""
        return {}

    def completed(self, server: Labelled, fleet: Sequence[float], selection: Selection) -> Selection:
        """As it is."""
        return selection


def plain_loss(task: Task) -> Callable[[nn.Module, Batch], Tensor]:
    """The mean of the task's losses."""
    return lambda module, batch: task.losses(task.forward(module, batch), batch.labels).mean()


def counted_mean(tally: Tally, update: Update) -> None:
    """The rule of all methods: every element moves by the weighted mean of those who held it."""
    tally.add(update.tensors, update.held, update.weight, client=update.client)
