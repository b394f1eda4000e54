"""What a share truly costs: parameters, bytes on the wire, FLOPs, and by the virtual clock, seconds."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from raffm.algebra.coding import encode
from raffm.algebra.layout import TRAVELLING
from raffm.algebra.mask import Mask
from raffm.algebra.selection import Selection
from raffm.data.examples import Examples
from raffm.data.task import Batch, Task
from raffm.devices.fleet import Tier
from raffm.devices.probe import LOOKED, countable, taken_apart
from raffm.methods.method import Held, Share
from raffm.models.surgery import skeleton
from raffm.rounds.plan import Order, Plan

KNOWN = 1000
"""Costs that are remembered."""

TRAINING = 3
"""Training takes three times the work of the forward pass: the backward one takes two."""


@dataclass(frozen=True)
class Cost:
    """Of one share: parameters held, bytes to send to a client and back, FLOPs of one example's forward pass.

    `inner` are the FLOPs of the forward passes of smaller submodels that training takes besides.
    """

    params: int
    bytes_down: int
    bytes_up: int
    flops: int
    inner: int = 0

    def work(self, examples: int) -> int:
        """FLOPs of training on so many examples."""
        return TRAINING * (self.flops + self.inner) * examples

    def seconds(self, tier: Tier, examples: int) -> float:
        """Virtual seconds that a device needs to receive, train on so many examples, and send."""
        return self.work(examples) / tier.speed + (self.bytes_down + self.bytes_up) / tier.bandwidth


class Costs:
    """The cost of every share of a run; equal ones are looked at once.

    Masks that keep as many elements cost the same, but for a few bytes that say which: those of the first are taken.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known: dict[object, Cost] = {}
        self._flops: dict[object, int] = {}

    def of(self, share: Share) -> Cost:
        """What a share costs."""
        key = self._shape(share.selection), share.counts, tuple(map(self._shape, share.inner)), share.drawn is None
        if key not in self._known:
            if len(self._known) > KNOWN:
                self._known.clear()
            self._known[key] = self._cost(share, self._plan.method.held(self._plan.server, share))
        return self._known[key]

    def flops(self, selection: Selection) -> int:
        """FLOPs of one example's forward pass."""
        key = self._shape(selection)
        if key not in self._flops:
            if len(self._flops) > KNOWN:
                self._flops.clear()
            self._flops[key] = self._counted(selection)
        return self._flops[key]

    def _shape(self, selection: Selection) -> tuple[tuple[str, int], ...]:
        return tuple(sorted(self._plan.server.layout.sizes_of(selection).items()))

    def _cost(self, share: Share, held: Held) -> Cost:
        layout, tensors = self._plan.server.layout, self._plan.server.tensors
        flops = self.flops(share.selection)
        if isinstance(held, Mask):
            kept = {name: int(mask.sum()) for name, mask in held.kept.items()}
            sent = {name: kept.get(name, tensors[name].numel()) for name in layout.tensors(*TRAVELLING)}
            values = sum(count * tensors[name].element_size() for name, count in sent.items())
            params = sum(sent[name] for name in layout.tensors("parameter")) + layout.count(share.selection, "frozen")
            return Cost(params, values + coded_bytes(held), values, flops)
        sizes = layout.sizes_of(share.selection)
        labels = layout.labels_of(share.selection)
        travelling = [name for name in layout.tensors(*TRAVELLING) if name in labels]
        values = sum(int(np.prod(labels[name].shape(sizes))) * tensors[name].element_size() for name in travelling)
        return Cost(layout.count(share.selection), values, values, flops, self._inner(share))

    def _inner(self, share: Share) -> int:
        """FLOPs of the smaller submodels' forward passes; where one of them is drawn for a step, on average."""
        every = [self.flops(inner) for inner in share.inner]
        return sum(every) if share.drawn is None else round(fmean(every))

    def training_flops(self, share: Share) -> int:
        """FLOPs of all forward passes that one example takes in training."""
        return self.flops(share.selection) + self._inner(share)

    def _counted(self, selection: Selection) -> int:
        """Counted on a skeleton with a batch of one: shapes are followed, nothing is computed."""
        plan = self._plan
        module = countable(skeleton(plan.server.model, plan.server.layout, selection))
        batch = plan.task.batch(plan.data.dataset.test, torch.tensor([_typical(plan.data.dataset.test)]))
        try:
            return _flops(plan.task, module, batch, "meta")
        except LOOKED:
            return _flops(plan.task, module.to_empty(device="cpu"), batch, "cpu")


@dataclass(frozen=True, eq=False)
class Clock:
    """Virtual time and energy: what the devices of clients take for what they are asked to do."""

    plan: Plan
    costs: Costs

    def examples(self, order: Order) -> int:
        """How many examples a client trains on, each counted as often as it is seen."""
        own = len(self.plan.data.split.train[order.client])
        return self.plan.local.steps_of(own) * self.plan.local.batch

    def seconds(self, order: Order) -> float:
        """Until a client has answered."""
        tier = self.plan.tier_of(order.client, order.round)
        return self.costs.of(order.share).seconds(tier, self.examples(order))

    def joules(self, order: Order) -> float:
        """What a client's device draws until it has answered, or until nobody waits any more."""
        deadline, seconds = self.plan.participation.deadline, self.seconds(order)
        return self.plan.tier_of(order.client, order.round).power * (min(seconds, deadline) if deadline else seconds)


def _flops(task: Task, module: nn.Module, batch: Batch, device: str) -> int:
    """The FLOPs of a forward pass.

    One text alone has nothing to mask, and the values of its mask would be read.
    """
    inputs = {name: tensor.to(device) for name, tensor in batch.inputs.items() if name != "attention_mask"}
    with torch.no_grad(), taken_apart(), FlopCounterMode(display=False) as counter:
        task.forward(module, Batch(inputs, batch.labels.to(device)))
    return int(counter.get_total_flops())


def _typical(examples: Examples) -> int:
    """An example to count the work of: of texts, one of median length."""
    lengths = examples.inputs.get("lengths")
    return 0 if lengths is None else int(lengths.argsort()[len(lengths) // 2])


def coded_bytes(mask: Mask) -> int:
    """The bytes that say which elements are kept."""
    return sum(len(encode(kept)) for kept in mask.kept.values())
