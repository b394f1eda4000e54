"""Letters to nodes and their replies: all methods train across machines as they do in one process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from methods.runs import ALL, FAMILIES, NAMES, labelled, plan_of
from raffm.algebra.mask import Mask
from raffm.algebra.tally import Tally
from raffm.deploy.ledger import Known, ledger
from raffm.deploy.letters import Letter, Reply, letter_of, parcel_of, to_array, update_of
from raffm.deploy.node import KEPT, Node
from raffm.deploy.posted import Post, Posted
from raffm.errors import RunError, UpdateError
from raffm.federate import run_plan
from raffm.methods import ADAPTING, method_of
from raffm.methods.method import Held
from raffm.models import families
from raffm.models.checkpoint import load_submodel
from raffm.models.labelled import Labelled
from raffm.models.lora import with_lora
from raffm.models.moments import batch_norms
from raffm.rounds import checkpoint
from raffm.rounds.backend import Backend, Serial
from raffm.rounds.costs import Costs
from raffm.rounds.evaluate import evaluate
from raffm.rounds.local import Local
from raffm.rounds.loop import Keeping, train
from raffm.rounds.plan import Evaluating, Merging, Order, Plan
from raffm.rounds.workshop import Outcome

LABELS = [[0, 1, 2], ALL * 2, ALL, [3, 4, 1]]


def nodes_of(plan: Plan) -> dict[int, Node]:
    """Every client as a machine of its own, with nothing but its own examples."""
    train, parts = plan.data.dataset.train, plan.data.split.train
    return {client: Node.of(plan.server, train.take(parts[client]), plan.task) for client in range(plan.data.clients)}


def by_wire(letter: Letter) -> Letter:
    """A letter as it arrives: JSON, and bytes."""
    came = [
        {name: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape) for name, array in arrays.items()}
        for arrays in (letter.arrays, letter.frozen, letter.own)
    ]
    return Letter(json.loads(json.dumps(letter.about)), *came)


def first_letter(plan: Plan) -> tuple[Order, Held, Letter]:
    order = plan.orders(0, [0])[0]
    held = plan.method.held(plan.server, order.share)
    return order, held, letter_of(plan, order, held, parcel_of(plan, order.share, held))


Change = Callable[[int, Reply], Reply | str]


def post(plan: Plan, change: Change = lambda client, reply: reply, seen: list[Letter] | None = None) -> Post:
    nodes = nodes_of(plan)

    def posted(letters: Iterable[tuple[int, Letter]]) -> Iterator[tuple[int, Reply | str]]:
        for place, (client, letter) in reversed(list(enumerate(letters))):  # the last answers first
            if seen is not None:
                seen.append(letter)
            try:
                yield place, change(client, nodes[client].answer(by_wire(letter)))
            except RunError as error:
                yield place, f"it failed: {error}"

    return posted


def rounds(plan: Plan, backend: Backend) -> list[Outcome]:
    tally, outcomes = plan.tally(), []
    for round in range(2):
        outcomes += backend.train(plan.orders(round, range(plan.data.clients)), tally, lambda _: None, lambda: None)
        tally.step()
    return outcomes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_nodes_give_the_server_that_one_process_gives(family: str, name: str) -> None:
    rate = 0.04 if name == "nested" else 0.05  # at 0.05 a ReLU of `nested` is at its kink, where rounding decides
    local = Local("sgd", lr=rate, batch=5, steps=2)
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
    letter = by_wire(first_letter(plan)[2])
    own = plan.data.dataset.train.take(plan.data.split.train[0])
    one, other = Node(own).answer(letter), Node.of(plan.server, own, plan.task).answer(letter)
    assert set(one.arrays) == set(other.arrays)
    assert all(np.array_equal(one.arrays[key], other.arrays[key]) for key in one.arrays)


@pytest.mark.parametrize("name", ["heterofl", "fiarse", "raffm"])
def test_a_letter_has_the_bytes_of_the_submodel_and_no_more(name: str) -> None:
    plan = plan_of("vit", name, "1/4")
    order, _, letter = first_letter(plan)
    assert sum(array.nbytes for array in letter.arrays.values()) == Costs(plan).of(order.share).bytes_down
    reply = nodes_of(plan)[0].answer(by_wire(letter))
    assert sum(array.nbytes for array in reply.arrays.values()) == Costs(plan).of(order.share).bytes_up
    assert not any(key.startswith("mask/") for key in reply.arrays)  # the server knows it


def test_a_node_is_told_sizes_and_never_which_indices_it_has() -> None:
    plan = plan_of("vit", "federated-dropout", "1/4")
    sizes = first_letter(plan)[2].about["sizes"]
    assert all(isinstance(size, int) for size in sizes.values())


def test_bfloat16_travels_bit_for_bit() -> None:
    tensor = torch.randn(7, 3).bfloat16()
    assert torch.equal(torch.from_numpy(to_array(tensor)).view(torch.bfloat16), tensor)


def test_equal_submodels_are_made_once() -> None:
    plan = plan_of("vit", "heterofl", "1, 1/4", labels=LABELS)
    seen: list[Letter] = []
    rounds(plan, Posted(plan, post(plan, seen=seen)))
    assert len({id(letter.arrays) for letter in seen[:4]}) == 2


# -- what is not trained ---------------------------------------------------------------------------------------------


def half_frozen(name: str = "heterofl") -> Plan:
    """All but the head and the last norm stay as they are."""
    plan = plan_of("vit", name, "1, 1/4", labels=LABELS)
    for key, parameter in plan.server.model.named_parameters():
        parameter.requires_grad_("classifier" in key or key.startswith("vit.layernorm"))
    return replace(plan, server=Labelled.of(plan.server.model, plan.server.table))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAFFM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", ["heterofl", "fiarse", "scalefl"])
def test_frozen_weights_travel_once_and_the_server_is_that_of_one_process(cache: Path, name: str) -> None:
    plan, other = half_frozen(name), half_frozen(name)
    seen: list[Letter] = []
    backend = Posted(plan, post(plan, seen=seen))
    outcomes = rounds(plan, backend)
    assert not [outcome.refused for outcome in outcomes if outcome.refused]
    rounds(other, Serial(other))
    for tensor, value in other.server.tensors.items():
        assert torch.allclose(plan.server.tensors[tensor], value, atol=1e-6), tensor
    assert all(letter.frozen for letter in seen[:4])
    assert not any(letter.frozen for letter in seen[4:])
    trained = {key for key, parameter in plan.server.model.named_parameters() if parameter.requires_grad}
    reply = nodes_of(plan)[0].answer(by_wire(seen[-1]))
    assert {key.removeprefix("tensor/") for key in reply.arrays} == trained


@pytest.mark.parametrize("name", ADAPTING)
def test_of_a_model_with_adapters_the_base_travels_once_and_then_adapters_alone(cache: Path, name: str) -> None:
    pytest.importorskip("peft")

    def adapted() -> Plan:
        plan = plan_of("vit", "fedavg", "1, 1/4", labels=LABELS)
        return replace(plan, server=Labelled.of(with_lora(plan.server.model, 4)), method=method_of(name))

    plan, other = adapted(), adapted()
    seen: list[Letter] = []
    outcomes = rounds(plan, Posted(plan, post(plan, seen=seen)))
    assert not [outcome.refused for outcome in outcomes if outcome.refused]
    rounds(other, Serial(other))
    for tensor, value in other.server.tensors.items():
        assert torch.allclose(plan.server.tensors[tensor], value, atol=1e-5), tensor
    assert all(letter.frozen for letter in seen[:4])
    for letter in seen[4:]:
        assert not letter.frozen
        assert all(".lora_" in key or "classifier" in key for key in letter.arrays)


def test_a_node_that_lost_its_frozen_weights_gets_them_again(cache: Path) -> None:
    plan = half_frozen()
    seen: list[Letter] = []
    backend = Posted(plan, post(plan, seen=seen))
    tally = Tally(plan.server.layout, plan.server.tensors)

    def refused(round: int) -> list[str]:
        outcomes = backend.train(plan.orders(round, [0]), tally, lambda _: None, lambda: None)
        return [outcome.refused for outcome in outcomes if outcome.refused]

    assert not refused(0)
    shutil.rmtree(cache)
    (words,) = refused(1)
    assert "are not here any more" in words
    assert not refused(2)
    assert [bool(letter.frozen) for letter in seen] == [True, False, True]


def test_a_node_without_a_disk_gets_its_frozen_weights_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAFFM_CACHE", "/dev/null/x")
    plan = half_frozen()
    seen: list[Letter] = []
    outcomes = rounds(plan, Posted(plan, post(plan, seen=seen)))
    assert not [outcome.refused for outcome in outcomes if outcome.refused]
    assert all(letter.frozen for letter in seen)


def test_a_disk_keeps_the_newest_frozen_weights_alone(cache: Path) -> None:
    plan = half_frozen("federated-dropout")  # other indices in every round
    backend = Posted(plan, post(plan))
    tally = Tally(plan.server.layout, plan.server.tensors)
    for round in range(2 * KEPT):
        outcomes = backend.train(plan.orders(round, [1]), tally, lambda _: None, lambda: None)
        assert not [outcome.refused for outcome in outcomes if outcome.refused]
    assert len(list((cache / "frozen").iterdir())) <= KEPT + 1


# -- batch norms -----------------------------------------------------------------------------------------------------


ASKED = Evaluating(calibration_clients=4)


def scores(plan: Plan, backend: Backend) -> dict[str, float]:
    return {name: size.test["loss"] for name, size in evaluate(plan, backend, 1)[0].sizes.items()}


@pytest.mark.parametrize("name", ["heterofl", "fiarse", "scalefl"])
def test_nodes_give_the_statistics_of_batch_norms_that_one_process_finds(name: str) -> None:
    plan = plan_of("raffm_resnet", name, "1", labels=LABELS, evaluating=Evaluating(sizes=(1.0, 1 / 4)))
    found, expected = scores(plan, Posted(plan, post(plan))), scores(plan, Serial(plan))
    assert found == pytest.approx(expected, rel=1e-4)


def _numbers(letter: Letter) -> int:
    return sum(array.size for array in letter.arrays.values())


def test_a_node_calibrates_no_submodel_that_it_does_not_hold_unless_nobody_does() -> None:
    plan = plan_of("raffm_resnet", "heterofl", "1, 1/4", labels=LABELS, evaluating=ASKED)
    sizes = {client: plan.tier_of(client, 0).size for client in range(4)}
    seen: list[Letter] = []
    scores(plan, Posted(plan, post(plan, seen=seen)))
    whole = max(_numbers(letter) for letter in seen)
    asked = sorted((letter.about["client"], _numbers(letter) < whole) for letter in seen)
    assert asked == sorted([(client, True) for client in sizes] + [(client, False) for client in sizes if sizes[client] == 1])
    small = plan_of("raffm_resnet", "heterofl", "1/4", labels=LABELS)
    assert set(scores(small, Posted(small, post(small)))) == {"1", "1/4"}


def test_a_server_without_a_single_example_trains_evaluates_and_saves_a_model_with_batch_norms(tmp_path: Path) -> None:
    plan = plan_of("raffm_resnet", "heterofl", "1, 1/4", labels=LABELS, evaluating=ASKED)
    known = [Known(client, client, 9, (0, 1)) for client in range(4)]
    blind = replace(plan, data=ledger(known, plan.data.dataset))
    seen: list[Letter] = []
    trained = run_plan(blind, lambda made: Posted(made, post(plan, seen=seen)), folder=tmp_path)
    kinds = [letter.about["kind"] for letter in seen]
    assert kinds.count("train") == 4
    assert kinds.count("moments") == len(trained.results.sizes) * 4 - 2 * (len(trained.results.sizes) - 1)
    whole = load_submodel(tmp_path / "submodels" / "1").eval()
    assert all(norm.running_var.sum() > 0 for norm in batch_norms(whole).values())  # type: ignore[union-attr]


def test_moments_that_make_no_sense_are_left_out_and_where_all_do_the_run_says_so(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_of("raffm_resnet", "fedavg", labels=LABELS, evaluating=ASKED)

    def broken(*clients: int) -> Change:
        def change(client: int, reply: Reply) -> Reply:
            spoilt = {name: array * np.nan for name, array in reply.arrays.items()}
            return replace(reply, arrays=spoilt) if client in clients else reply

        return change

    assert scores(plan, Posted(plan, post(plan, broken(1)))) != pytest.approx(scores(plan, Serial(plan)), rel=1e-6)
    with pytest.raises(RunError, match=r"nobody gave the statistics of batch norms that an evaluation of size 1 needs"):
        scores(plan, Posted(plan, post(plan, broken(0, 1, 2, 3))))
    assert "client 0: its moments of `" in caplog.text


def test_without_the_large_nodes_others_give_the_statistics_and_without_any_the_last_ones_are_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = plan_of("raffm_resnet", "heterofl", "1, 1/4", labels=LABELS, evaluating=ASKED)
    large = [client for client in range(4) if plan.tier_of(client, 0).size == 1]
    gone: list[int] = []
    backend = Posted(plan, post(plan, lambda client, reply: "is gone" if client in gone else reply))
    first = scores(plan, backend)
    gone += large
    second = scores(plan, backend)
    assert second["1/4"] != pytest.approx(first["1/4"], rel=1e-9)
    assert np.isfinite(list(second.values())).all()
    gone += range(4)
    assert scores(plan, backend) == pytest.approx(second, rel=1e-6)
    assert "those of an earlier evaluation are used" in caplog.text


def test_a_round_is_kept_though_its_evaluation_fails(tmp_path: Path) -> None:
    plan = plan_of("raffm_resnet", "heterofl", "1, 1/4", labels=LABELS, evaluating=ASKED)
    dead = Posted(plan, post(plan, lambda client, reply: "is gone" if "counts" in reply.about else reply))
    with pytest.raises(RunError, match="nobody gave the statistics"):
        train(plan, dead, Keeping(tmp_path / "checkpoint"))
    assert checkpoint.load(tmp_path / "checkpoint", identity=None).round == 1


# -- what goes wrong -------------------------------------------------------------------------------------------------


def altered(about: dict[str, object] | None = None, **arrays: object) -> Change:
    def change(client: int, reply: Reply) -> Reply | str:
        if client != 1:
            return reply
        fresh = {**reply.arrays, **{f"tensor/{name.replace('__', '.')}": value for name, value in arrays.items()}}
        return Reply({**reply.about, **(about or {})}, fresh)  # type: ignore[arg-type]

    return change


class Everything(dict[str, str]):
    """Says of every tensor that it is of float32."""

    def __missing__(self, name: str) -> str:
        return "float32"


BAD = {
    "another round": (altered({"round": 7}), "its reply has the round 7; 0 was asked for"),
    "another client": (altered({"client": 2}), "its reply has the client 2; 1 was asked for"),
    "a wrong shape": (altered(vit__layernorm__weight=np.zeros(3, np.float32)), "has shape (3,)"),
    "no number": (altered(vit__layernorm__weight=np.full(16, np.nan, np.float32)), "holds a NaN"),
    "other numbers": (altered(vit__layernorm__weight=np.zeros(16)), "cannot be read"),
    "no kinds": (altered({"dtypes": {}}), "cannot be read"),
    "a loss that is no number": (altered({"loss": "x"}), "cannot be read: its loss is 'x'"),
    "a loss beyond all bounds": (altered({"loss": 10**400}), "cannot be read"),
    "an unknown tensor": (altered({"dtypes": None}), "cannot be read"),
    "a loss that is not a number": (altered({"loss": float("nan")}), "cannot be read: its loss is 'nan'"),
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "change",
    [altered(vit__layernorm__weight=np.zeros(3, np.float32)), altered({"dtypes": Everything()}, door=np.zeros(3, np.float32))],
)
def test_a_bound_on_updates_refuses_what_does_not_fit_at_all(name: str, change: Change) -> None:
    plan = plan_of("vit", name, labels=LABELS, merging=Merging(max_norm=100.0))
    backend = Posted(plan, post(plan, change))
    tally = Tally(plan.server.layout, plan.server.tensors)
    outcomes = backend.train(plan.orders(0, range(4)), tally, lambda _: None, lambda: None)
    refused = [outcome.client for outcome in outcomes if outcome.refused]
    assert refused == ([1] if 1 in {outcome.client for outcome in outcomes} else [])


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
    order, held, letter = first_letter(plan)
    assert isinstance(held, Mask)
    name = next(iter(held.kept))
    reply = nodes_of(plan)[0].answer(letter)
    short = Reply(reply.about, {**reply.arrays, f"tensor/{name}": reply.arrays[f"tensor/{name}"][:-1]})
    with pytest.raises(UpdateError, match="its mask keeps"):
        update_of(short, order, held, plan.server)


def test_a_node_reads_labels_from_the_table_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    shipped = Path(families.__file__).with_name("vit.toml").read_text()
    file.write_text(shipped.replace(".heads", ".chiefs"))
    plan = plan_of("vit", "heterofl", "1, 1/4")
    plan = replace(plan, server=Labelled.of(plan.server.model, file), given=None)
    letter = first_letter(plan)[2]
    with pytest.raises(RunError, match="their configs or versions differ"):
        Node(plan.data.dataset.train).answer(letter)
    assert Node(plan.data.dataset.train, table=str(file)).answer(letter).arrays


def test_a_node_with_another_model_says_so() -> None:
    plan = plan_of("vit", "fedavg")
    letter = first_letter(plan)[2]
    other = Node.of(labelled("raffm_resnet"), plan.data.dataset.train, plan.task)
    with pytest.raises(RunError, match="their configs or versions differ"):
        other.answer(letter)
    with pytest.raises(RunError, match="letters of format 99"):
        nodes_of(plan)[0].answer(replace(letter, about={**letter.about, "format": 99}))
