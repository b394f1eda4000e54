"""Letters to nodes and their replies: all methods train across machines as they do in one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from methods.runs import ALL, FAMILIES, NAMES, labelled, plan_of
from raffm.algebra.mask import Mask
from raffm.algebra.tally import Tally
from raffm.deploy.letters import Letter, Reply, letter_of, to_array, update_of
from raffm.deploy.node import Node
from raffm.deploy.posted import Posted
from raffm.errors import RunError, UpdateError
from raffm.rounds.backend import Backend, Serial
from raffm.rounds.costs import Costs
from raffm.rounds.local import Local
from raffm.rounds.loop import train
from raffm.rounds.plan import Merging, Plan
from raffm.rounds.workshop import Outcome

LABELS = [[0, 1, 2], ALL * 2, ALL, [3, 4, 1]]


def nodes_of(plan: Plan) -> dict[int, Node]:
    """Every client as a machine of its own, with nothing but its own examples."""
    train, parts = plan.data.dataset.train, plan.data.split.train
    return {client: Node.of(plan.server, train.take(parts[client]), plan.task) for client in range(plan.data.clients)}


def by_wire(letter: Letter) -> Letter:
    """A letter as it arrives: JSON, and bytes."""
    arrays = {name: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape) for name, array in letter.arrays.items()}
    return Letter(json.loads(json.dumps(letter.about)), arrays)


Change = Callable[[int, Reply], Reply | str]
Post = Callable[[Mapping[int, Letter]], Iterator[tuple[int, Reply | str]]]


def post(
    plan: Plan, change: Change = lambda client, reply: reply
) -> Callable[[Mapping[int, Letter]], Iterator[tuple[int, Reply | str]]]:
    nodes = nodes_of(plan)

    def posted(letters: Mapping[int, Letter]) -> Iterator[tuple[int, Reply | str]]:
        for client, letter in reversed(letters.items()):  # the last answers first
            yield client, change(client, nodes[client].answer(by_wire(letter)))

    return posted


def rounds(plan: Plan, backend: Backend) -> list[Outcome]:
    tally, outcomes = Tally(plan.server.layout, plan.server.tensors), []
    for round in range(2):
        outcomes += backend.train(plan.orders(round, range(plan.data.clients)), tally, lambda _: None, lambda: None)
        tally.step()
    return outcomes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_nodes_give_the_server_that_one_process_gives(family: str, name: str) -> None:
    local = Local("sgd", lr=0.05, batch=5, steps=2)
    plans = [plan_of(family, name, "1, 1/4", labels=LABELS, local=local) for _ in range(2)]
    outcomes = rounds(plans[0], Posted(plans[0], post(plans[0])))
    assert not [outcome.refused for outcome in outcomes if outcome.refused]
    expected = rounds(plans[1], Serial(plans[1]))
    for tensor, value in plans[1].server.tensors.items():
        assert torch.allclose(plans[0].server.tensors[tensor], value, atol=1e-6), tensor
    losses = {outcome.client: outcome.loss for outcome in expected}
    assert {outcome.client: outcome.loss for outcome in outcomes} == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize("name", ["scalefl", "heterofl"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_node_that_knows_nothing_learns_model_and_task_from_the_letter(family: str, name: str) -> None:
    plan = plan_of(family, name, "1/4")
    order = plan.orders(0, [0])[0]
    letter = by_wire(letter_of(plan, order, order.share.selection))
    own = plan.data.dataset.train.take(plan.data.split.train[0])
    one, other = Node(own).answer(letter), Node.of(plan.server, own, plan.task).answer(letter)
    assert set(one.arrays) == set(other.arrays)
    assert all(np.array_equal(one.arrays[key], other.arrays[key]) for key in one.arrays)


@pytest.mark.parametrize("name", ["heterofl", "fiarse", "raffm"])
def test_a_letter_has_the_bytes_of_the_submodel_and_no_more(name: str) -> None:
    plan = plan_of("vit", name, "1/4")
    order = plan.orders(0, [0])[0]
    held = plan.method.held(plan.server, order.share)
    letter = letter_of(plan, order, held)
    tensors = {key: array for key, array in letter.arrays.items() if not key.startswith("constant/")}
    assert sum(array.nbytes for array in tensors.values()) == Costs(plan).of(order.share).bytes_down
    reply = nodes_of(plan)[0].answer(by_wire(letter))
    assert sum(array.nbytes for array in reply.arrays.values()) == Costs(plan).of(order.share).bytes_up
    assert not any(key.startswith("mask/") for key in reply.arrays)  # the server knows it


def test_a_node_is_told_sizes_and_never_which_indices_it_has() -> None:
    plan = plan_of("vit", "federated-dropout", "1/4")
    order = plan.orders(0, [0])[0]
    sizes = letter_of(plan, order, order.share.selection).about["sizes"]
    assert all(isinstance(size, int) for size in sizes.values())


def test_bfloat16_travels_bit_for_bit() -> None:
    tensor = torch.randn(7, 3).bfloat16()
    assert torch.equal(torch.from_numpy(to_array(tensor)).view(torch.bfloat16), tensor)


# -- what goes wrong -------------------------------------------------------------------------------------------------


def altered(about: dict[str, object] | None = None, **arrays: object) -> Change:
    def change(client: int, reply: Reply) -> Reply | str:
        if client != 1:
            return reply
        fresh = {**reply.arrays, **{f"tensor/{name.replace('__', '.')}": value for name, value in arrays.items()}}
        return Reply({**reply.about, **(about or {})}, fresh)  # type: ignore[arg-type]

    return change


BAD = {
    "another round": (altered({"round": 7}), "its reply has the round 7; 0 was asked for"),
    "another client": (altered({"client": 2}), "its reply has the client 2; 1 was asked for"),
    "a wrong shape": (altered(vit__layernorm__weight=np.zeros(3, np.float32)), "has shape (3,)"),
    "no number": (altered(vit__layernorm__weight=np.full(16, np.nan, np.float32)), "holds a NaN"),
    "other numbers": (altered(vit__layernorm__weight=np.zeros(16)), "cannot be read"),
    "no kinds": (altered({"dtypes": {}}), "cannot be read"),
    "an unknown tensor": (altered({"dtypes": None}), "cannot be read"),
    "silence": (lambda client, reply: "did not answer in time" if client == 1 else reply, "client 1: did not answer in time"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_reply_costs_its_own_contribution_and_is_named(case: str) -> None:
    change, words = BAD[case]
    plans = [plan_of("vit", "fedavg", labels=LABELS) for _ in range(2)]
    backend = Posted(plans[0], post(plans[0], change))
    tally = Tally(plans[0].server.layout, plans[0].server.tensors)
    outcomes = backend.train(plans[0].orders(0, range(4)), tally, lambda _: None, lambda: None)
    tally.step()
    (refused,) = [outcome for outcome in outcomes if outcome.refused]
    assert refused.client == 1
    assert words in refused.refused
    others = Tally(plans[1].server.layout, plans[1].server.tensors)
    Serial(plans[1]).train(plans[1].orders(0, [0, 2, 3]), others, lambda _: None, lambda: None)
    others.step()
    for name, tensor in plans[1].server.tensors.items():
        assert torch.allclose(plans[0].server.tensors[name], tensor, atol=1e-6)


@pytest.mark.parametrize("combine", ["mean", "median"])
def test_a_round_that_nobody_answered_is_repeated_and_leaves_no_trace(combine: str) -> None:
    """Half of the nodes are silent at first; what the others sent then is forgotten."""
    asked: list[int] = []

    def forgetful(client: int, reply: Reply) -> Reply | str:
        asked.append(client)
        return "is asleep" if len(asked) <= 4 and client < 2 else reply

    plans = [plan_of("vit", "heterofl", "1, 1/4", labels=LABELS, merging=Merging(combine=combine)) for _ in range(2)]  # type: ignore[arg-type]
    made = replace(plans[0], participation=replace(plans[0].participation, minimum=3))
    train(made, Posted(made, post(made, forgetful)))
    train(plans[1], Serial(plans[1]))
    assert len(asked) == 8
    for name, tensor in plans[1].server.tensors.items():
        assert torch.allclose(made.server.tensors[name], tensor, atol=1e-6)


def test_a_masked_reply_of_another_length_is_refused() -> None:
    plan = plan_of("vit", "fiarse", "1/4")
    order = plan.orders(0, [0])[0]
    held = plan.method.held(plan.server, order.share)
    assert isinstance(held, Mask)
    name = next(iter(held.kept))
    reply = nodes_of(plan)[0].answer(letter_of(plan, order, held))
    short = Reply(reply.about, {**reply.arrays, f"tensor/{name}": reply.arrays[f"tensor/{name}"][:-1]})
    with pytest.raises(UpdateError, match="its mask keeps"):
        update_of(short, order, held)


def test_a_node_with_another_model_says_so() -> None:
    plan = plan_of("vit", "fedavg")
    order = plan.orders(0, [0])[0]
    letter = letter_of(plan, order, order.share.selection)
    other = Node.of(labelled("raffm_resnet"), plan.data.dataset.train, plan.task)
    with pytest.raises(RunError, match="their configs or versions differ"):
        other.answer(letter)
    with pytest.raises(RunError, match="letters of format 99"):
        nodes_of(plan)[0].answer(replace(letter, about={**letter.about, "format": 99}))
