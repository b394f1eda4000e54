"""Runs that take milliseconds: real digits, a few of them, and models of a few thousand parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raffm.algebra.tally import Tally
from raffm.data.examples import Dataset, Federation, Parts, Split
from raffm.data.sources import load
from raffm.data.splits import split
from raffm.data.task import ImageClassification, Task
from raffm.devices.fleet import Fleet, fleet_of
from raffm.methods import method_of
from raffm.methods.method import Method
from raffm.models.labelled import Labelled
from raffm.models.load import trainable
from raffm.rounds.backend import Backend, Serial
from raffm.rounds.local import Local
from raffm.rounds.loop import Keeping, Watcher, train
from raffm.rounds.plan import Evaluating, Merging, Participation, Plan
from raffm.rounds.results import Results

METHODS = ("fedavg", "fedrolex", "fiarse", "fiarse-structured", "heterofl", "raffm", "scalefl")
VIT, RESNET = "vit:tiny", "raffm_resnet:tiny"


@cache
def _digits() -> Dataset:
    return load("digits")


def digits(train: int = 48, test: int = 24, validation: int = 12) -> Dataset:
    """Some of the digits."""
    whole = _digits()
    held = whole.train.take(torch.arange(train, train + validation)) if validation else None
    return Dataset("digits", whole.train.take(torch.arange(train)), whole.test.take(torch.arange(test)), whole.classes, held)


def federation(clients: int = 4, how: str = "iid", **parameters: Any) -> Federation:
    """Some of the digits, divided among clients."""
    dataset = digits()
    return Federation(dataset, split(dataset, clients, how, 0, **parameters))


def dealt(dataset: Dataset, train: Sequence[Sequence[int]], test: Sequence[Sequence[int]]) -> Federation:
    """A data set divided by hand."""
    parts = [Parts.of([np.array(part, np.int64) for part in listed]) for listed in (train, test)]
    return Federation(dataset, Split(*parts))


def plan(
    method: str | Method = "raffm",
    *,
    model: str = VIT,
    config: dict[str, Any] | None = None,
    data: Federation | None = None,
    fleet: str | Fleet = "1, 1/4",
    rounds: int = 1,
    seed: int = 0,
    task: Task | None = None,
    local: Local | None = None,
    participation: Participation | None = None,
    merging: Merging | None = None,
    evaluating: Evaluating | None = None,
) -> Plan:
    """A run in which all clients take part in every round, unless it is told otherwise."""
    data = data or federation()
    classes = len(data.dataset.classes)
    return Plan(
        server=Labelled.of(trainable(model, "image", classes, (1, 8, 8), seed, config)),
        method=method_of(method) if isinstance(method, str) else method,
        task=task or ImageClassification(),
        data=data,
        fleet=fleet_of(fleet) if isinstance(fleet, str) else fleet,
        rounds=rounds,
        seed=seed,
        local=local or Local(lr=1e-2, batch=6),
        participation=participation or Participation(clients=data.clients),
        merging=merging or Merging(),
        evaluating=evaluating or Evaluating(every=1),
    )


def run(made: Plan, backend: Backend | None = None, keeping: Keeping | None = None, watcher: Watcher | None = None) -> Results:
    """Run a plan, and give back what its backend holds."""
    backend = backend or Serial(made)
    try:
        return train(made, backend, keeping or Keeping(), {}, watcher)
    finally:
        backend.close()


def values(made: Plan) -> dict[str, Tensor]:
    """A copy of the server's tensors."""
    return {name: tensor.detach().clone() for name, tensor in made.server.tensors.items()}


def are_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether all tensors are the same, bit for bit."""
    return left.keys() == right.keys() and all(
        torch.equal(_bits(left[name]), _bits(right[name])) and left[name].dtype == right[name].dtype for name in left
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def assert_near(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    """All tensors are the same to a tolerance, relative to the largest number of each."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        largest = max(1.0, float(tensor.abs().max())) if tensor.numel() else 1.0
        torch.testing.assert_close(
            tensor, right[name], rtol=0, atol=tolerance * largest, msg=lambda text, name=name: name + text
        )


def tally_of(made: Plan) -> Tally:
    """A fresh tally of a plan's server."""
    return made.tally()


def nothing(*_: object) -> None:
    """Hear, and do nothing."""
