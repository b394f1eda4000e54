"""The captured backend on a GPU that is not there: whatever runs beside what, clients train as in the serial backend."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from methods.runs import ALL, labelled, plan_of
from raffm.errors import RunError
from raffm.methods.heterofl import HeteroFL
from raffm.methods.method import Client, Held, Learn, Share
from raffm.models.labelled import Labelled
from raffm.models.load import tiny
from raffm.rounds.backend import Serial, Tick
from raffm.rounds.local import Local
from raffm.rounds.loop import train
from raffm.rounds.plan import Evaluating, Merging, Plan
from raffm.rounds.workshop import Outcome
from raffm.simulate import captured
from raffm.simulate.captured import Captured
from raffm.simulate.lane import Lane
from simulate.gpu import FULL, Graph, pretended

LABELS = [[0, 1, 2], ALL * 2, ALL, [3, 4, 1], ALL * 3, [0, 0]]
LOCALS = {
    "sgd": Local("sgd", lr=0.05, batch=5, steps=5),
    "momentum": Local("sgd", lr=0.05, momentum=0.9, weight_decay=0.01, batch=5, clip=1.0, epochs=3, schedule="linear"),
}


@pytest.fixture(autouse=True)
def pretending(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    pretended(monkeypatch)
    monkeypatch.setattr(captured, "REPAY", 0)
    return monkeypatch


def trained(plan: Plan, backend: Any) -> dict[str, Tensor]:
    """The server after one round of all clients."""
    tally = plan.tally()
    backend.train(plan.orders(0, range(plan.data.clients)), tally, lambda _: None, lambda: None)
    tally.step()
    return {name: tensor.detach().clone() for name, tensor in plan.server.tensors.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.allclose(tensor, expected[name], atol=2e-5, rtol=1e-4), name


CASES = [
    ("raffm_resnet", "heterofl", "sgd"),
    ("raffm_resnet", "nested", "sgd"),
    ("vit", "fiarse", "momentum"),
    ("vit", "scalefl", "momentum"),
    ("vit", "nested", "momentum"),
    ("bert", "raffm", "momentum"),
    ("bert", "fedrolex", "sgd"),
]


@pytest.mark.parametrize(("family", "method", "local"), CASES)
def test_whole_runs_are_those_of_the_serial_backend(
    family: str, method: str, local: str, pretending: pytest.MonkeyPatch
) -> None:
    """Two rounds on three lanes; the first clients of every shape train alone, until capturing pays."""
    pretending.setattr(captured, "REPAY", 7)

    def plan() -> Plan:
        rest = {"evaluating": Evaluating(calibration_clients=2), "merging": Merging(average=0.5), "local": LOCALS[local]}
        return plan_of(family, method, "1, 1/4", labels=LABELS, rounds=2, **rest)

    one, other = plan(), plan()
    backend = Captured(other, lanes=3)
    results, expected = train(other, backend), train(one, Serial(one))
    assert_equal(*({name: tensor.detach() for name, tensor in each.server.tensors.items()} for each in (other, one)))
    for found, scores in zip(results.evaluations, expected.evaluations, strict=True):
        for name, size in scores.sizes.items():
            assert found.sizes[name].test["loss"] == pytest.approx(size.test["loss"], rel=1e-4)
    losses = [[round.loss for round in each.rounds] for each in (results, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert sum(len(kind.tracks) for kind in backend._kinds.values()) > 1
    assert not [kind.refused for kind in backend._kinds.values() if kind.refused]


def test_a_graph_that_does_something_else_is_not_used(pretending: pytest.MonkeyPatch) -> None:
    one, other = (plan_of("vit", "heterofl", "1, 1/4", labels=LABELS) for _ in range(2))
    replay = Graph.replay

    def forgetful(graph: Graph) -> None:
        graph.done = [entry for entry in graph.done if "_fused_sgd_" not in str(entry[0])]
        replay(graph)

    pretending.setattr(Graph, "replay", forgetful)
    backend = Captured(other, lanes=3)
    assert_equal(trained(other, backend), trained(one, Serial(one)))
    assert {kind.refused for kind in backend._kinds.values()} == {"a captured step differs from the plain one"}


def test_a_graph_that_spoils_a_later_step_is_not_used(pretending: pytest.MonkeyPatch) -> None:
    """What is no number is apart from everything, whenever it comes."""
    replay, replays = Graph.replay, iter(range(1000))

    def spoiling(graph: Graph) -> None:
        replay(graph)
        if next(replays) % 3 == 1:
            lane.sheet.values.fill_(float("nan"))

    made = Lane.__init__

    def remembered(each: Lane, *given: Any) -> None:
        nonlocal lane
        made(each, *given)
        lane = each

    lane: Lane
    pretending.setattr(Lane, "__init__", remembered)
    pretending.setattr(Graph, "replay", spoiling)
    one, other = (plan_of("vit", "heterofl", "full", labels=[ALL] * 2) for _ in range(2))
    backend = Captured(other, lanes=1)
    assert_equal(trained(other, backend), trained(one, Serial(one)))
    assert {kind.refused for kind in backend._kinds.values()} == {"a captured step differs from the plain one"}


@dataclass(frozen=True)
class Finishing(HeteroFL):
    """A method that changes the module once more, after a client's last step."""

    def learn(self, server: Labelled, share: Share, held: Held, client: Client) -> Learn:
        @torch.no_grad()
        def finish(module: torch.nn.Module) -> None:
            for parameter in module.parameters():
                parameter.mul_(0.5)

        return replace(super().learn(server, share, held, client), finish=finish)


def test_a_method_that_finishes_by_itself_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    one, other = (plan_of("vit", "heterofl", "1, 1/4", labels=LABELS) for _ in range(2))
    one, other = (replace(each, method=Finishing(scaler=False)) for each in (one, other))
    assert_equal(trained(other, Captured(other)), trained(one, Serial(one)))
    said = [record.getMessage() for record in caplog.records]
    assert said == ["raffm: steps of heterofl run plainly: its method does something after the last step."]


def test_shapes_that_draw_random_numbers_take_turns() -> None:
    """Also where a shape is captured for the first time, and nobody knows yet that it draws."""

    def plan() -> Plan:
        model = tiny("bert", hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
        local = Local("sgd", lr=0.1, batch=5, steps=25)
        return plan_of("bert", "raffm", "1, 1/4", labels=[ALL] * 4, server=Labelled.of(model), local=local)

    one, other = plan(), plan()
    before = torch.get_rng_state()
    found = trained(other, Captured(other))
    assert torch.equal(before, torch.get_rng_state())
    assert_equal(found, trained(one, Serial(one)))


# -- memory --------------------------------------------------------------------------------------------------------


def test_a_client_that_ran_out_of_memory_is_trained_anew(pretending: pytest.MonkeyPatch) -> None:
    """Its module is as it was: without the hooks of the scaler that the failed try put there."""
    pretending.setattr(captured, "REPAY", 41)  # so many steps are those of two clients; the third trains alone, as the first

    def plan() -> Plan:
        return plan_of("vit", "heterofl", "1, 1/9", labels=[ALL] * 4, local=Local("sgd", lr=0.1, batch=5, steps=40))

    one, other = plan(), plan()
    sizes = {client: one.tier_of(client, 0).size for client in range(4)}
    clients = sorted(sizes, key=lambda client: -sizes[client])[:3]
    assert [sizes[client] for client in clients] == [1, 1, pytest.approx(1 / 9)]
    backend, ticks = Captured(other), iter(range(10_000))
    ticking = backend._alone.trained

    def failing(order: Any, tick: Tick) -> Any:
        def once() -> None:
            if next(ticks) == 7:
                raise FULL

        return ticking(order, once)

    pretending.setattr(backend._alone, "trained", failing)
    found = round_of(other, backend, clients)
    assert next(ticks) > 48, "it was tried twice"
    assert_equal(found, round_of(one, Serial(one), clients))


def round_of(plan: Plan, backend: Any, clients: list[int]) -> dict[str, Tensor]:
    tally = plan.tally()
    backend.train(plan.orders(0, clients), tally, lambda _: None, lambda: None)
    tally.step()
    return {name: tensor.detach().clone() for name, tensor in plan.server.tensors.items()}


@pytest.fixture
def room(pretending: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets there be room for so many lanes."""
    alive = weakref.WeakSet[Lane]()
    made = Lane.__init__

    def limit(most: int) -> None:
        def counted(lane: Lane, *given: Any) -> None:
            if len(alive) >= most:
                raise RuntimeError(str(FULL))
            made(lane, *given)
            alive.add(lane)

        pretending.setattr(Lane, "__init__", counted)

    return limit


@pytest.mark.parametrize("most", [1, 2, 3, 4])
@pytest.mark.parametrize("family", ["raffm_resnet", "vit"])
def test_shapes_share_what_room_there_is(family: str, most: int, room: Callable[[int], None]) -> None:
    """A lane that is given up is free at once, whoever looked at it before."""
    one, other = (plan_of(family, "raffm", "1, 1/4", labels=[ALL] * 6) for _ in range(2))
    room(most)
    gc.collect()
    gc.disable()
    try:
        found = trained(other, Captured(other))
    finally:
        gc.enable()
    assert_equal(found, trained(one, Serial(one)))


def test_what_lies_idle_is_given_up_before_fewer_clients_run(room: Callable[[int], None]) -> None:
    """Lanes of small clients do not keep large ones of the next round from running beside each other."""
    plan = plan_of("vit", "heterofl", "1, 1/4", labels=[ALL] * 8)
    sizes = {client: plan.tier_of(client, 0).size for client in range(8)}
    small, large = ([client for client, size in sizes.items() if size == each] for each in (1 / 4, 1))
    room(4)
    backend = Captured(plan, lanes=4)
    for clients in (small, large):
        assert len(clients) == 4
        round_of(plan, backend, clients)
        (full,) = [kind for kind in backend._kinds.values() if kind.tracks]
        assert len(full.tracks) == 4


@pytest.mark.parametrize("family", ["raffm_resnet", "vit"])
def test_a_lane_that_is_let_go_is_freed_at_once(family: str) -> None:
    plan = plan_of(family, "nested", "1, 1/4", labels=[ALL] * 2)
    backend = Captured(plan)
    trained(plan, backend)
    lanes = [track.lane for kind in backend._kinds.values() for track in kind.tracks]
    kept = [weakref.ref(sheet.values) for lane in lanes for sheet in lane.sheets]
    gc.collect()
    gc.disable()
    try:
        lanes.clear()
        backend.close()
        assert kept
        assert not any(each() is not None for each in kept)
    finally:
        gc.enable()


def test_no_room_for_a_single_client_is_said(room: Callable[[int], None]) -> None:
    plan = plan_of("vit", "heterofl", "1, 1/4", labels=LABELS)
    room(0)
    with pytest.raises(RunError, match="the GPU's memory does not hold a single client: CUDA out of memory"):
        trained(plan, Captured(plan))


def outcomes_of(plan: Plan, backend: Any) -> list[Outcome]:
    found: list[Outcome] = backend.train(plan.orders(0, range(plan.data.clients)), plan.tally(), lambda _: None, lambda: None)
    return sorted(found, key=lambda outcome: outcome.client)


def test_a_client_whose_numbers_ran_away_spoils_no_other() -> None:
    """All that it left in its lane is no number; those that use the lane after it train as ever."""
    plan = plan_of("vit", "fiarse", "full", labels=[ALL] * 4, local=LOCALS["momentum"], server=labelled("vit"))
    plan = replace(plan, local=replace(plan.local, lr=1.0))
    first = plan.orders(0, [0])[0]
    backend = Captured(plan, lanes=1)
    expected = {outcome.client: outcome.loss for outcome in outcomes_of(plan, Serial(plan))}
    backend.train([first], plan.tally(), lambda _: None, lambda: None)
    (kind,) = backend._kinds.values()
    for tensor in kind.tracks[0].lane.state():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
    assert {outcome.client: outcome.loss for outcome in outcomes_of(plan, backend)} == pytest.approx(expected, rel=1e-4)
