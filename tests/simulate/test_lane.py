"""Lanes: the same steps as everywhere, in buffers that never move. What a GPU captures is proved here on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from methods.runs import ALL, FAMILIES, NAMES, labelled, plan_of
from raffm.algebra.mask import Mask
from raffm.algebra.move import extract
from raffm.data.task import TextClassification
from raffm.errors import RunError
from raffm.federate import backend_of
from raffm.methods.fiarse import factors
from raffm.methods.method import Client, Held, Learn
from raffm.models.labelled import Labelled
from raffm.models.load import tiny
from raffm.rounds.backend import Serial
from raffm.rounds.local import Local, dropout_seed
from raffm.rounds.plan import Order, Plan
from raffm.rounds.workshop import Workshop
from raffm.simulate import flat
from raffm.simulate.lane import Lane, limits_are_usable
from raffm.simulate.sheet import Style

LOCALS = {
    "sgd": Local("sgd", lr=0.1, batch=5, steps=3),
    "momentum": Local("sgd", lr=0.1, momentum=0.9, batch=5, steps=3, clip=1.0, schedule="linear"),
    "adamw": Local("adamw", lr=0.001, batch=5, steps=3, weight_decay=0.1),
}
LABELS = [[0, 1, 2], ALL * 2, ALL, [3, 4, 1]]


def learn_of(plan: Plan, order: Order) -> tuple[Held, Learn]:
    held = plan.method.held(plan.server, order.share)
    return held, plan.method.learn(plan.server, order.share, held, Client(plan.task, plan.present(order.client)))


class Caught:
    """A tally that keeps the last update."""

    def __init__(self) -> None:
        self.update: dict[str, Tensor] = {}

    def add(self, update: Mapping[str, Tensor], *_: object, **__: object) -> None:
        self.update = {name: tensor.clone() for name, tensor in update.items()}


def run(lane: Lane, order: Order, held: Held, learn: Learn) -> dict[str, Tensor]:
    """All steps of a client on a lane."""
    torch.manual_seed(dropout_seed(lane.plan.seed, order.round, order.client))
    lane.load(order, held, learn)
    begin = 0
    while begin < lane.steps:
        count = lane.fill(begin)
        for at in range(count):
            lane.step(lane.turn(begin + at))
        begin += count
    return lane.update(order)


@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_lane_trains_every_client_as_the_serial_backend_does(family: str, name: str, local: str) -> None:
    """One lane serves all clients of its shape, one after another, also those that hold other indices."""
    plan = plan_of(family, name, "1, 1/4", labels=LABELS, local=LOCALS[local])
    workshop, lanes = Workshop(plan), {}
    for order in plan.orders(0, range(4)):
        expected = Caught()
        workshop.train(order, expected)  # type: ignore[arg-type]
        held, learn = learn_of(plan, order)
        key = tuple(sorted(plan.server.layout.sizes_of(order.share.selection).items())), learn.key, learn.fading is None
        if key not in lanes:
            lanes[key] = Lane(plan, order, learn_of(plan, order)[1], Style())
        found = run(lanes[key], order, held, learn)
        assert set(found) == set(expected.update)
        for tensor, value in found.items():
            if local == "adamw" and tensor.endswith(("k_proj.bias", "key.bias")):
                continue  # softmax cancels them: their gradients are rounding errors, of which AdamW makes whole steps
            assert torch.allclose(value, expected.update[tensor], atol=2e-5, rtol=1e-4), tensor
    assert len(lanes) < 4


@pytest.mark.parametrize("style", [Style(), Style(channels_last=True), Style("bfloat16")], ids=str)
def test_a_lane_takes_the_turns_of_every_client_and_adds_up_what_smaller_shapes_learn(style: Style) -> None:
    is_rounded = style.dtype == torch.bfloat16  # a plain step of this model in bfloat16 is 16 % off
    local = Local("sgd", lr=0.05, batch=5, steps=1 if is_rounded else 4)
    plan = plan_of("raffm_resnet", "nested", "1, 1/2, 1/4", labels=LABELS[:1] * 6, local=local, switches={"steps": "one"})
    largest = [client for client in range(6) if plan.tier_of(client, 0).size == 1]
    workshop, lane = Workshop(plan), None
    for order in plan.orders(0, largest):
        expected = Caught()
        workshop.train(order, expected)  # type: ignore[arg-type]
        held, learn = learn_of(plan, order)
        lane = lane or Lane(plan, order, learn_of(plan, order)[1], style)
        found = run(lane, order, held, learn)
        sent = extract(plan.server.tensors, plan.server.layout, order.share.selection)
        moved = torch.cat([(expected.update[name] - sent[name]).flatten().float() for name in found])
        gap = torch.cat([(found[name] - expected.update[name]).flatten().float() for name in found])
        assert gap.norm() <= (0.3 if is_rounded else 1e-4) * moved.norm()
    assert len(largest) == 2


@pytest.mark.parametrize(("size", "is_folded"), [("1/4", True), ("1/16", True), ("1/9", False), ("1", False)])
def test_a_scaler_is_folded_into_weights_where_that_rounds_nothing(size: str, is_folded: bool) -> None:
    plan = plan_of("raffm_resnet", "heterofl", size, labels=LABELS)
    order = plan.orders(0, [0])[0]
    held, learn = learn_of(plan, order)
    lane = Lane(plan, order, learn, Style())
    assert (lane.sheet.factors is not None) == is_folded
    assert (learn.scaling is not None) == (size != "1")
    expected = Caught()
    Workshop(plan).train(order, expected)  # type: ignore[arg-type]
    for tensor, value in run(lane, order, held, learn_of(plan, order)[1]).items():
        assert torch.allclose(value, expected.update[tensor], atol=2e-5, rtol=1e-4), tensor


def test_a_scaler_divides_what_frozen_weights_give_too() -> None:
    """Only the head and the norms are trained, as with a pretrained model: the other weights cannot take the scaler on."""
    plan = plan_of("vit", "heterofl", "1/4", labels=LABELS, local=LOCALS["sgd"])
    for name, parameter in plan.server.model.named_parameters():
        parameter.requires_grad_("layernorm" in name or "classifier" in name)
    order = plan.orders(0, [0])[0]
    held, learn = learn_of(plan, order)
    expected = Caught()
    Workshop(plan).train(order, expected)  # type: ignore[arg-type]
    sent = extract(plan.server.tensors, plan.server.layout, order.share.selection)
    for tensor, value in run(Lane(plan, order, learn, Style()), order, held, learn_of(plan, order)[1]).items():
        assert torch.allclose(value, expected.update[tensor], atol=2e-5, rtol=1e-4), tensor
    assert not all(torch.equal(sent[tensor], value) for tensor, value in expected.update.items()), "something was trained"


def test_inputs_are_made_a_few_steps_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("vit", "heterofl", "1, 1/4", local=Local("sgd", lr=0.1, batch=5, steps=7, schedule="linear"))
    order = plan.orders(0, [0])[0]
    held, learn = learn_of(plan, order)
    whole = {name: tensor.clone() for name, tensor in run(Lane(plan, order, learn, Style()), order, held, learn).items()}
    monkeypatch.setattr("raffm.simulate.lane.FILL", 3 * 5 * 3 * 8 * 8 * 4)
    lane = Lane(plan, order, learn_of(plan, order)[1], Style())
    assert lane.fill_steps == 3
    parts = run(lane, order, held, learn_of(plan, order)[1])
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_bfloat16_is_close_and_its_weights_stay_wide() -> None:
    plan = plan_of("vit", "fiarse", "1, 1/4", local=Local("sgd", lr=0.05, batch=5, steps=4))
    for order in plan.orders(0, range(4)):
        exact, rough = (
            {name: tensor.clone() for name, tensor in run(Lane(plan, order, learn, style), order, held, learn).items()}
            for style in (Style(), Style("bfloat16"))
            for held, learn in [learn_of(plan, order)]
        )
        before = {name: tensor.detach() for name, tensor in plan.server.tensors.items()}
        moved = sum(float((exact[name] - before[name]).square().sum()) for name in exact) ** 0.5
        apart = sum(float((exact[name] - rough[name]).square().sum()) for name in exact) ** 0.5
        assert 0 < apart < 0.3 * moved
        assert all(tensor.dtype == torch.float32 for tensor in rough.values() if tensor.is_floating_point())


def test_batch_norms_are_not_rounded() -> None:
    plan = plan_of("raffm_resnet", "fedavg")
    order = plan.orders(0, [0])[0]
    lane = Lane(plan, order, learn_of(plan, order)[1], Style("bfloat16"))
    kinds = {name: parameter.dtype for name, parameter in lane.module.named_parameters()}
    assert kinds["stem.conv.weight"] == kinds["head.weight"] == torch.bfloat16
    assert kinds["stem.norm.weight"] == torch.float32


def test_a_limit_of_zero_cannot_say_what_is_seen() -> None:
    """Half of the weights are 0: which of them a client holds is a matter of order, not of magnitude."""
    model = tiny("vit")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_((torch.arange(parameter.numel()) % 4 == 0).view(parameter.shape))
    plan = plan_of("vit", "fiarse", "1, 1/2", server=Labelled.of(model))
    usable = [
        limits_are_usable(learn.fading, held) for held, learn in (learn_of(plan, order) for order in plan.orders(0, range(4)))
    ]
    assert not all(usable)


# -- flat memory -----------------------------------------------------------------------------------------------------

SHAPES = st.lists(st.lists(st.integers(1, 5), min_size=0, max_size=4).map(torch.Size), min_size=1, max_size=5)


@settings(max_examples=40)
@given(SHAPES, st.booleans())
def test_every_tensor_has_a_place_of_its_own(shapes: list[torch.Size], channels_last: bool) -> None:
    slots, length = flat.arranged({str(place): shape for place, shape in enumerate(shapes)}, channels_last)
    memory = torch.zeros(length)
    for number, slot in enumerate(slots.values(), start=1):
        view = slot.view(memory)
        assert view.shape == slot.shape
        assert bool((view == 0).all())
        view.fill_(number)
    for number, slot in enumerate(slots.values(), start=1):
        assert bool((slot.view(memory) == number).all())
    blocks = flat.by_block(slots, length, {str(place): float(place + 1) for place in range(len(shapes))})
    for number, slot in enumerate(slots.values(), start=1):
        assert blocks[slot.begin // flat.BLOCK] == number


@settings(max_examples=40)
@given(st.integers(0, 1000), st.floats(0.01, 2.0), st.booleans())
def test_fading_is_the_rule_of_fiarse(seed: int, limit: float, aware: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(2 * flat.BLOCK, generator=draw)
    gradients = torch.randn(2 * flat.BLOCK, generator=draw)
    limits = torch.tensor([limit, 0.0])
    before, found = gradients.clone(), gradients.clone()
    flat.fade_gradients(found, values, limits, aware)
    first, second = values.split(flat.BLOCK)
    kept = (first.abs() >= limit).float()
    factor = factors([first], [limit])[0] if aware else 1.0
    assert torch.allclose(found[: flat.BLOCK], before[: flat.BLOCK] * kept * factor, atol=1e-6)
    assert torch.equal(found[flat.BLOCK :], before[flat.BLOCK :])  # without a limit everything moves
    seen = torch.full((2 * flat.BLOCK,), 7.0)
    flat.publish(values, seen, limits, None)
    assert torch.equal(seen, torch.cat([first * kept, second]))
    moved = values + 1
    flat.keep_faded(moved, values, limits)
    assert torch.equal(moved, torch.cat([torch.where(kept.bool(), first + 1, first), second + 1]))


def test_all_steps_of_a_client_have_one_shape_and_clients_with_texts_as_long_share_their_place() -> None:
    plan = replace(plan_of("bert", "heterofl", "1", labels=[ALL] * 3, local=LOCALS["sgd"]), task=TextClassification(multiple=1))
    lengths, own = plan.data.dataset.train.inputs["lengths"], [plan.data.split.train[client] for client in range(3)]
    lengths.fill_(3)
    for client, longest in enumerate((5, 8, 5)):
        lengths[own[client][-1]] = longest
    orders = plan.orders(0, range(3))
    lane, places = Lane(plan, orders[0], learn_of(plan, orders[0])[1], Style()), []
    lane.fill_steps = 1
    for order in orders:
        lane.load(order, *learn_of(plan, order))
        lane.fill(0)
        places.append(lane.where())
        for step in range(1, lane.steps):
            lane.fill(step)
            assert lane.where() == places[-1]
    assert places[0] == places[2] != places[1]


def test_clients_with_more_steps_than_those_before_use_the_same_room() -> None:
    """A graph knows where its inputs lie, so room that grows would have it captured anew."""
    local = Local("sgd", lr=0.1, batch=5, epochs=3)
    plan = plan_of("vit", "heterofl", "1", labels=LABELS, local=local)
    orders = sorted(plan.orders(0, range(len(LABELS))), key=lambda order: len(plan.data.split.train[order.client]))
    lane, places, steps = Lane(plan, orders[0], learn_of(plan, orders[0])[1], Style()), [], []
    for order in orders:
        lane.load(order, *learn_of(plan, order))
        lane.fill(0)
        places.append(lane.where())
        steps.append(lane.steps)
    assert steps == sorted(steps) and steps[0] < steps[-1]
    assert places == places[:1] * len(orders)


# -- the backend -----------------------------------------------------------------------------------------------------


def test_without_a_gpu_clients_train_one_after_another_and_a_notice_says_so(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_of("vit", "heterofl", "1, 1/4")
    assert isinstance(backend_of("captured", plan), Serial)
    assert caplog.messages == ["raffm: there is no GPU to capture on; clients train one after another."]


def test_a_backend_that_there_is_not_is_refused() -> None:
    with pytest.raises(RunError, match="serial, pooled, captured"):
        backend_of("cuda", plan_of("vit", "heterofl", server=labelled("vit")))


def test_masks_reach_the_lane() -> None:
    plan = plan_of("vit", "fiarse", "1/4")
    order = plan.orders(0, [0])[0]
    held, learn = learn_of(plan, order)
    assert isinstance(held, Mask)
    lane = Lane(plan, order, learn, Style())
    lane.load(order, held, learn)
    for name, kept in held.kept.items():
        parameter = dict(lane.module.named_parameters())[name]
        assert torch.equal(parameter.detach(), plan.server.tensors[name].detach() * kept)
