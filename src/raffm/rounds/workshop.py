"""Where submodels are made and trained: resident modules, one a shape, into which weights are copied.

Fresh memory costs page faults and fresh modules cost construction, so both are kept and used again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from raffm.algebra.mask import Mask
from raffm.algebra.move import extract, travelling
from raffm.algebra.selection import Selection
from raffm.algebra.tally import Tally
from raffm.errors import UpdateError
from raffm.methods.method import Client, Held, Learn, Share, Update
from raffm.models.label import named_tensors
from raffm.models.rounding import Precision, rounded
from raffm.models.smaller import Smaller
from raffm.models.surgery import assembled
from raffm.rounds.local import batches_of, dropout_seed, order_of, train
from raffm.rounds.plan import Order, Plan

RESIDENT = 16
"""Shapes whose modules are kept."""


@dataclass(frozen=True)
class Outcome:
    """What became of one order: the mean loss, or why the update was refused."""

    client: int
    loss: float
    refused: str = ""


@dataclass(frozen=True)
class Resident:
    """A module that waits for weights, and its tensors by name."""

    module: nn.Module
    tensors: dict[str, Tensor]


class Workshop:
    """Makes and trains submodels of the plan's server; every backend has one, or one in each of its workers.

    They compute in float32, or in bfloat16 with all that is kept in float32.
    """

    def __init__(self, plan: Plan, precision: Precision = "float32") -> None:
        self._plan = plan
        self._is_rounded = precision == "bfloat16"
        self._residents: OrderedDict[object, Resident] = OrderedDict()

    def train(self, order: Order, tally: Tally, tick: Callable[[], None] = lambda: None) -> Outcome:
        """Train one client and add its update to a tally. An update that is refused leaves no trace there."""
        update, loss = self.trained(order, tick)
        return merged(self._plan, tally, update, loss)

    def trained(self, order: Order, tick: Callable[[], None]) -> tuple[Update, float]:
        """What one client sends back, which lies in a module until that trains the next, and the mean loss of its steps."""
        plan, server = self._plan, self._plan.server
        held = plan.method.held(server, order.share)
        resident = self.loaded(order.share, held)
        client = Client(plan.task, plan.present(order.client))
        learn = self._computing(plan.method.learn(server, order.share, held, client))
        own = plan.data.split.train[order.client]
        table = order_of(own, plan.local, plan.seed, order.round, order.client)
        batches = batches_of(plan.task, plan.data.dataset.train, table, plan.seed, order.round, order.client)
        with seeded(plan, order):
            loss = train(resident.module, learn, plan.local, batches, order.round, len(table), tick)
        tensors = travelling(resident.tensors, server.layout, order.share.selection)
        return Update(order.client, order.share, held, tensors, order.weight, client.present), float(loss)

    def loaded(self, share: Share, held: Held) -> Resident:
        """The module of a share's shape, with the server's current weights in it."""
        server = self._plan.server
        resident = self._resident(share.selection)
        extract(server.tensors, server.layout, share.selection, resident.tensors)
        if isinstance(held, Mask):
            with torch.no_grad():
                for name, kept in held.kept.items():
                    resident.tensors[name].mul_(kept)
        return resident

    def _computing(self, learn: Learn) -> Learn:
        """What a method does, with the smaller submodels that it runs computing as all do."""
        if not self._is_rounded:
            return learn

        def prepare(module: nn.Module) -> Sequence[Smaller]:
            smaller = learn.prepare(module)
            for each in smaller:
                rounded(each, self._plan.server.device.type)
            return smaller

        return replace(learn, prepare=prepare)

    def _resident(self, selection: Selection) -> Resident:
        key = shape_of(self._plan, selection)
        if key not in self._residents:
            server = self._plan.server
            module = assembled(server.model, server.layout, selection, extract(server.tensors, server.layout, selection))
            if self._is_rounded:
                rounded(module, server.device.type)
            self._residents[key] = Resident(module, named_tensors(module)[0])
            if len(self._residents) > RESIDENT:
                self._residents.popitem(last=False)
        self._residents.move_to_end(key)
        return self._residents[key]


def merged(plan: Plan, tally: Tally, update: Update, loss: float) -> Outcome:
    """Add an update to a tally, unless it is refused."""
    try:
        refuse_long(plan, update)
        plan.method.merge(tally, plan.server, update)
    except UpdateError as error:
        return Outcome(update.client, loss, str(error))
    return Outcome(update.client, loss)


def shape_of(plan: Plan, selection: Selection) -> object:
    """What a resident module depends on: the sizes of its groups, and which blocks it has."""
    layout = plan.server.layout
    blocks = tuple((name, tuple(selection.kept[name].tolist())) for name in layout.depths if name in selection.kept)
    return tuple(sorted(layout.sizes_of(selection).items())), blocks


@contextmanager
def seeded(plan: Plan, order: Order) -> Iterator[None]:
    """Dropout draws from the device's own generator: it is seeded for one client and put back afterwards."""
    device = plan.server.device
    source = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
    before = source.get_state()
    source.manual_seed(dropout_seed(plan.seed, order.round, order.client))
    try:
        yield
    finally:
        source.set_state(before)


@torch.no_grad()
def refuse_long(plan: Plan, update: Update) -> None:
    """Refuse an update whose change is longer than the bound."""
    bound = plan.merging.max_norm
    if not bound:
        return
    sent = extract(plan.server.tensors, plan.server.layout, update.share.selection)
    total = 0.0
    for name, tensor in update.tensors.items():
        if name not in sent or tensor.shape != sent[name].shape:
            raise UpdateError(f"client {update.client}: `{name}` is no tensor of its submodel, or has another shape.")
        if tensor.is_floating_point():
            change = tensor - sent[name]
            held = update.held
            change = change * held.kept[name] if isinstance(held, Mask) and name in held.kept else change
            total += float(change.double().square().sum())
    if not total**0.5 <= bound:
        raise UpdateError(f"client {update.client}: its change has norm {total**0.5:.4g}; the bound is {bound:g}.")
