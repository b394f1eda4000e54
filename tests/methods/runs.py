"""Small federations and plans that the tests of methods run: random data, real tiny models, the serial backend."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raffm.data.examples import Dataset, Examples, Federation, Parts, Split
from raffm.data.task import ImageClassification, Task, TextClassification
from raffm.devices.fleet import fleet_of
from raffm.methods import METHODS, method_of
from raffm.methods.method import Held, Share
from raffm.models.exits import ExitLogits
from raffm.models.labelled import Labelled
from raffm.models.load import tiny
from raffm.models.rows import give_back
from raffm.rounds.backend import Serial
from raffm.rounds.local import Local
from raffm.rounds.loop import train
from raffm.rounds.plan import Evaluating, Merging, Participation, Plan
from raffm.rounds.results import Results
from raffm.rounds.workshop import Outcome, Workshop

CLASSES = 5
FAMILIES = ("raffm_resnet", "vit", "bert")
NAMES = tuple(METHODS)


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def examples(family: str, labels: Tensor, seed: int) -> Examples:
    """Random images or texts with these labels."""
    if family == "bert":
        ids = torch.randint(0, 50, (len(labels), 8), generator=drawn(seed))
        return Examples({"input_ids": ids, "lengths": torch.randint(3, 9, (len(labels),), generator=drawn(seed + 1))}, labels)
    side = 8 if family == "vit" else 16
    pixels = torch.randint(0, 256, (len(labels), 3, side, side), generator=drawn(seed), dtype=torch.uint8)
    return Examples({"pixel_values": pixels}, labels)


def task_of(family: str) -> Task:
    return TextClassification() if family == "bert" else ImageClassification()


def federation(family: str, labels: Sequence[Sequence[int]], tests: int = 10, validation: bool = False) -> Federation:
    """One client for every list of labels, and test examples of all classes, dealt in turn."""
    counts = np.cumsum([0, *map(len, labels)])
    parts = Parts.of([np.arange(begin, end) for begin, end in pairwise(counts)])
    trained = torch.tensor([label for own in labels for label in own])
    tested = torch.arange(tests) % CLASSES
    own_tests = Parts.of([np.arange(tests)[client :: len(labels)] for client in range(len(labels))])
    held_out = examples(family, tested, 5) if validation else None
    dataset = Dataset(
        "random", examples(family, trained, 1), examples(family, tested, 3), tuple("abcde"), held_out, owners=None
    )
    return Federation(dataset, Split(parts, own_tests))


ALL = [0, 1, 2, 3, 4]
"""The labels of a client that has every class."""


def labelled(family: str, seed: int = 0) -> Labelled:
    """A tiny model in which no number is special."""
    model = tiny(family, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=drawn(seed + 7)) * 0.1)
    return Labelled.of(model)


USUAL: dict[str, dict[str, Any]] = {"nested": {"shapes": "uniform"}}
"""Tiny models are too small for balanced shapes of a quarter: their residual streams stay whole."""


def plan_of(family: str, method: str, fleet: str = "full", labels: Sequence[Sequence[int]] | None = None, **rest: Any) -> Plan:
    """A plan of one round in which every client takes part; `switches` are the method's."""
    data = rest.pop("data", None) or federation(family, labels or [ALL, ALL * 2, ALL, ALL])
    settings: dict[str, Any] = {
        "task": task_of(family),
        "rounds": 1,
        "local": Local("sgd", lr=0.1, batch=5, steps=2),
        "participation": Participation(data.clients),
        "evaluating": Evaluating(every=100, calibration_clients=2),
        "fleet": fleet_of(fleet),
        "server": rest.pop("server", None) or labelled(family),
        "method": method_of(method, **{**USUAL.get(method, {}), **rest.pop("switches", {})}),
        "merging": Merging(average=0.0),
        **rest,
    }
    return Plan(data=data, **settings)


def run(plan: Plan) -> Results:
    return train(plan, Serial(plan))


def rounds_of(plan: Plan, clients: Sequence[int] | None = None) -> list[Outcome]:
    """The rounds alone, without costs and evaluations; of these clients, in this order, or of all that are asked."""
    backend, tally, outcomes = Serial(plan), plan.tally(), []
    for round in range(plan.rounds):
        orders = plan.orders(round, plan.cohort(round).present if clients is None else clients)
        outcomes += backend.train(orders, tally, lambda _: None, lambda: None)
        tally.step()
    if plan.given is not None:
        give_back(plan.server, plan.given)
    assert not [outcome.refused for outcome in outcomes if outcome.refused]
    return outcomes


def snapshot(server: Labelled) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in server.tensors.items()}


def module_of(plan: Plan, share: Share) -> nn.Module:
    """The module that a client with this share trains, with the server's weights in it."""
    held: Held = plan.method.held(plan.server, share)
    return copy.deepcopy(Workshop(plan).loaded(share, held).module)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal as bits: -0.0 is not 0.0."""
    return one.dtype == other.dtype and bool((torch.signbit(one) == torch.signbit(other)).all()) and torch.equal(one, other)


class Says(nn.Module):
    """A model whose exits say its own parameter, whatever it is asked."""

    def __init__(self, exits: Tensor) -> None:
        super().__init__()
        self.exits = nn.Parameter(exits)

    def forward(self, **_: Tensor) -> ExitLogits:
        return ExitLogits(self.exits)
