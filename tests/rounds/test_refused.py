"""A client that sends nonsense: the round goes on without it, and the server never knows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from raffm.data.examples import Examples
from raffm.data.task import Batch, ImageClassification
from raffm.errors import RunError, UpdateError
from raffm.rounds.backend import Serial
from raffm.rounds.local import Local
from raffm.rounds.plan import Merging, Plan
from raffm.simulate.pooled import Pooled
from rounds.made import METHODS, RESNET, VIT, are_equal, federation, nothing, plan, run, tally_of, values


@dataclass(frozen=True)
class Poisoned(ImageClassification):
    """Some training examples are not numbers."""

    bad: frozenset[int] = frozenset()

    def batch(self, examples: Examples, picks: Tensor, moves: Tensor | None = None) -> Batch:
        made = super().batch(examples, picks, moves)
        is_bad = torch.tensor([moves is not None and int(pick) in self.bad for pick in picks])
        pixels = torch.where(is_bad[:, None, None, None], float("nan"), made.inputs["pixel_values"])
        return Batch({"pixel_values": pixels}, made.labels)


def poisoned(method: str, model: str, clients: Collection[int], **merging: object) -> Plan:
    data = federation()
    bad = frozenset(int(index) for client in clients for index in data.split.train[client])
    return plan(method, model=model, data=data, task=Poisoned(bad=bad), merging=Merging(**merging))  # type: ignore[arg-type]


def without(made: Plan, clients: Collection[int]) -> None:
    """A round in which some of the asked clients do not take part."""
    tally = tally_of(made)
    orders = [order for order in made.orders(0, made.cohort(0).present) if order.client not in clients]
    Serial(made).train(orders, tally, nothing, nothing)
    tally.step()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", [VIT, RESNET])
def test_a_round_goes_on_without_a_client_whose_update_is_no_number(method: str, model: str) -> None:
    made, alone = (poisoned(method, model, [2]) for _ in range(2))
    (entry,) = run(made).rounds
    assert list(entry.refused) == ["2"]
    assert entry.refused["2"].startswith("client 2: `")
    assert "NaN or an infinity" in entry.refused["2"]
    assert entry.clients == (0, 1, 2, 3)
    assert entry.loss is not None
    assert entry.loss == entry.loss
    without(alone, [2])
    assert all(tensor.isfinite().all() for tensor in made.server.tensors.values())
    assert are_equal(values(made), values(alone))


@pytest.mark.parametrize("backend", ["serial", "pooled"])
def test_with_strict_a_refused_update_ends_the_run_and_the_server_stays(backend: str) -> None:
    made = poisoned("heterofl", VIT, [1], strict=True)
    before = values(made)
    with pytest.raises(UpdateError, match="client 1: "):
        run(made, Pooled(made, 2) if backend == "pooled" else None)
    assert are_equal(values(made), before)


def test_where_everybody_is_refused_the_server_does_not_move() -> None:
    made = poisoned("raffm", VIT, range(4))
    before = values(made)
    results = run(made)
    assert sorted(results.rounds[0].refused) == ["0", "1", "2", "3"]
    assert results.rounds[0].loss is None
    assert are_equal(values(made), before)
    assert results.evaluations, "it is evaluated all the same"


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_where_everybody_is_refused_momentum_does_not_move_the_server(optimizer: str) -> None:
    made = poisoned("fedavg", VIT, range(4), optimizer=optimizer)
    before = values(made)
    run(made)
    assert are_equal(values(made), before)


def test_a_learning_rate_that_explodes_is_refused_and_harms_nothing() -> None:
    made = plan("fedavg", local=Local(lr=1e30, batch=6, optimizer="sgd"))
    before = values(made)
    results = run(made)
    assert len(results.rounds[0].refused) == 4
    assert are_equal(values(made), before)


def lengths(method: str) -> dict[int, float]:
    """How long the change of every client is."""
    found = {}
    for client in range(4):
        made = plan(method)
        tally = tally_of(made)
        (order,) = made.orders(0, [client])
        Serial(made).train([order], tally, nothing, nothing)
        sums = [float((total.sum / order.weight).double().square().sum()) for total in tally.totals().values()]
        found[client] = sum(sums) ** 0.5
    return found


@pytest.mark.parametrize("method", ["fedavg", "fiarse"])
def test_changes_that_are_too_long_are_refused(method: str) -> None:
    found = lengths(method)
    bound = sum(sorted(found.values())[1:3]) / 2
    made, alone = (plan(method, merging=Merging(max_norm=limit)) for limit in (bound, 0.0))
    (entry,) = run(made).rounds
    long = {client for client, length in found.items() if length > bound}
    assert len(long) == 2
    assert {int(client) for client in entry.refused} == long
    assert all("its change has norm" in reason for reason in entry.refused.values())
    without(alone, long)
    assert are_equal(values(made), values(alone))


def test_a_bound_that_nobody_passes_changes_nothing() -> None:
    made, free = (plan("heterofl", merging=Merging(max_norm=limit)) for limit in (1e6, 0.0))
    run(made)
    run(free)
    assert are_equal(values(made), values(free))


def test_a_change_that_is_no_number_is_longer_than_any_bound() -> None:
    made = poisoned("fedavg", VIT, [3], max_norm=1e9)
    (entry,) = run(made).rounds
    assert list(entry.refused) == ["3"]


def test_a_strict_bound_names_the_client_and_the_norm() -> None:
    made = plan("fedavg", merging=Merging(max_norm=1e-9, strict=True))
    with pytest.raises(UpdateError, match=r"client \d: its change has norm .*; the bound is 1e-09"):
        run(made)


@pytest.mark.parametrize("backend", ["serial", "pooled"])
def test_both_backends_refuse_the_same_clients(backend: str) -> None:
    made = poisoned("fedrolex", VIT, [0, 3])
    (entry,) = run(made, Pooled(made, 2) if backend == "pooled" else None).rounds
    assert sorted(entry.refused) == ["0", "3"]


@pytest.mark.parametrize("combine", ["mean", "median"])
def test_a_round_with_too_few_good_updates_is_tried_again_and_then_the_run_stops(combine: str) -> None:
    made = poisoned("fedavg", VIT, range(4), combine=combine)
    made = replace(made, participation=replace(made.participation, minimum=1, tries=2))
    before = values(made)
    with pytest.raises(RunError, match=r"round 1 had 0 good updates; 1 are needed, and it was tried 2 times\. client"):
        run(made)
    assert are_equal(before, values(made))


def test_a_minimum_that_is_met_changes_nothing() -> None:
    plain, careful = plan("fedavg"), plan("fedavg")
    careful = replace(careful, participation=replace(careful.participation, minimum=2))
    run(plain)
    run(careful)
    assert are_equal(values(plain), values(careful))


def test_what_was_refused_is_written_down() -> None:
    import json

    results = run(poisoned("fedavg", VIT, [2]))
    content = json.loads(json.dumps(results.to_json(), allow_nan=False))
    assert "2" in content["rounds"][0]["refused"]


class Infinite(ImageClassification):
    """A loss that is infinite, and whose gradient is not."""

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return super().losses(outputs, labels) + float("inf")


def test_a_loss_that_is_not_finite_is_none() -> None:
    (entry,) = run(plan("fedavg", task=Infinite())).rounds
    assert not entry.refused
    assert entry.loss is None
