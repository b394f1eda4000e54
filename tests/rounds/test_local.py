"""What happens inside one client: rates, order, clipping, and where randomness comes from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from raffm.data.task import Batch, ImageClassification
from raffm.errors import RunError
from raffm.methods.method import Learn, plain_loss
from raffm.rounds.backend import Serial
from raffm.rounds.local import Local, batches_of, order_of, train
from rounds.made import METHODS, RESNET, are_equal, digits, federation, nothing, plan, run, tally_of, values

# -- rates ---------------------------------------------------------------------------------------------------------


def test_the_rate_decays_by_rounds() -> None:
    local = Local(lr=0.5, decay=0.1, decay_every=3)
    assert [local.rate(round, 0, 4) for round in range(7)] == pytest.approx([0.5, 0.5, 0.5, 0.05, 0.05, 0.05, 0.005])


def test_the_rate_falls_at_milestones() -> None:
    local = Local(lr=1.0, decay=0.5, milestones=(2, 5))
    assert [local.rate(round, 3, 4) for round in (0, 1, 2, 4, 5, 90)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_a_linear_schedule_goes_down_to_zero_within_a_round_and_starts_anew() -> None:
    local = Local(lr=1.0, schedule="linear", decay=0.5)
    assert [local.rate(0, step, 4) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert [local.rate(1, step, 4) for step in range(4)] == [0.5, 0.375, 0.25, 0.125]


def test_a_constant_rate_is_constant() -> None:
    assert {Local(lr=0.3).rate(round, step, 9) for round in range(5) for step in range(9)} == {0.3}


@given(st.integers(1, 200), st.integers(1, 40), st.floats(0.1, 4), st.integers(0, 9))
def test_a_client_makes_its_steps_or_those_of_its_epochs(examples: int, batch: int, epochs: float, steps: int) -> None:
    local = Local(batch=batch, epochs=epochs, steps=steps)
    expected = steps or max(1, math.ceil(int(epochs * examples) / batch))
    assert local.steps_of(examples) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"lr": 0.0},
        {"lr": -1.0},
        {"lr": math.nan},
        {"batch": 0},
        {"decay": 0.0},
        {"decay_every": 0},
        {"optimizer": "adam"},
        {"schedule": "cosine"},
        {"steps": -1},
        {"epochs": 0},
    ],
)
def test_local_training_that_makes_no_sense_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RunError):
        Local(**given)


@pytest.mark.parametrize("given", [{"weight_decay": -1.0}, {"optimizer": "sgd", "momentum": -1.0}, {"betas": (0.9, 2.0)}])
def test_settings_of_the_optimizer_that_make_no_sense_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RunError):
        Local(**given).build([torch.zeros(1, requires_grad=True)], 0.1)


# -- the order of examples -----------------------------------------------------------------------------------------


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 7), st.floats(0.3, 3))
def test_every_batch_is_full_and_every_example_comes_before_any_comes_again(
    count: int, batch: int, steps: int, epochs: float
) -> None:
    own = np.arange(100, 100 + count)
    local = Local(batch=batch, steps=steps, epochs=epochs)
    order = order_of(own, local, 0, 2, 5)
    assert tuple(order.shape) == (local.steps_of(count), batch)
    assert set(order.flatten().tolist()) <= set(own.tolist())
    for shuffle in torch.split(order.flatten(), count):
        assert len(set(shuffle.tolist())) == len(shuffle)


def test_the_order_differs_by_seed_round_and_client_and_is_the_same_again() -> None:
    own, local = np.arange(30), Local(batch=10)

    def order(*key: int) -> list[int]:
        return order_of(own, local, *key).flatten().tolist()

    assert order(0, 1, 2) == order(0, 1, 2)
    assert len({tuple(order(*key)) for key in ((0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3), (0, 2, 1))}) == 5


def test_without_shuffling_examples_come_in_one_order_in_every_epoch_and_round() -> None:
    """As published (D-FI4)."""
    own, local = np.array([7, 3, 9, 5]), Local(batch=3, steps=3, shuffle=False)
    for round in range(3):
        assert order_of(own, local, 0, round, 1).tolist() == [[7, 3, 9], [5, 7, 3], [9, 5, 7]]


def test_augmentation_is_drawn_by_seed_round_and_client_too() -> None:
    task, data, local = ImageClassification(crop=2, flip=True), digits(), Local(batch=8, steps=2)

    def pixels(*key: int) -> Tensor:
        order = order_of(np.arange(16), local, 0, 0, 0)
        return torch.cat([batch.inputs["pixel_values"] for batch in batches_of(task, data.train, order, *key)])

    assert torch.equal(pixels(0, 1, 2), pixels(0, 1, 2))
    for key in ((1, 1, 2), (0, 2, 2), (0, 1, 3)):
        assert not torch.equal(pixels(0, 1, 2), pixels(*key))


# -- steps ---------------------------------------------------------------------------------------------------------


class Line(nn.Module):
    """Two weights whose gradients are chosen by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0]))


def pulls(*factors: float) -> Iterator[Batch]:
    for factor in factors:
        yield Batch({}, torch.tensor([3.0, 4.0]) * factor)


PULLED = Learn(lambda module, batch: (module.weight * batch.labels).sum())


def test_plain_steps_are_those_of_gradient_descent() -> None:
    module = Line()
    loss = train(module, PULLED, Local(optimizer="sgd", lr=0.1), pulls(1, 1), 0, 2, nothing)
    torch.testing.assert_close(module.weight.detach(), torch.tensor([1 - 0.6, -2 - 0.8]))
    assert float(loss) == pytest.approx(((3 - 8) + (3 * 0.7 - 4 * 2.4)) / 2)
    assert module.weight.grad is None


def test_momentum_and_weight_decay_reach_the_optimizer() -> None:
    module = Line()
    train(module, PULLED, Local(optimizer="sgd", lr=0.1, momentum=0.5), pulls(1, 1), 0, 2, nothing)
    torch.testing.assert_close(module.weight.detach(), torch.tensor([1 - 0.3 * 2.5, -2 - 0.4 * 2.5]))
    module = Line()
    train(module, PULLED, Local(optimizer="sgd", lr=0.1, weight_decay=0.5), pulls(0), 0, 1, nothing)
    torch.testing.assert_close(module.weight.detach(), torch.tensor([0.95, -1.9]))


def test_the_first_step_of_adamw_has_the_length_of_the_rate() -> None:
    module = Line()
    train(module, PULLED, Local(lr=0.01), pulls(5), 0, 1, nothing)
    torch.testing.assert_close(module.weight.detach(), torch.tensor([1 - 0.01, -2 - 0.01]), rtol=0, atol=1e-6)


def test_the_optimizer_takes_the_rate_of_every_step() -> None:
    module = Line()
    train(module, PULLED, Local(optimizer="sgd", lr=0.1, schedule="linear"), pulls(1, 1), 0, 2, nothing)
    torch.testing.assert_close(module.weight.detach()[0], torch.tensor(1 - 3 * (0.1 + 0.05)))


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=4), st.floats(0.1, 3))
@settings(max_examples=30)
def test_clipping_bounds_the_norm_of_every_gradient(factors: list[float], clip: float) -> None:
    moved = []
    module = Line()
    before = module.weight.detach().clone()

    def tick() -> None:
        moved.append(float((module.weight.detach() - before).norm()))
        before.copy_(module.weight.detach())

    train(module, PULLED, Local(optimizer="sgd", lr=1.0, clip=clip), pulls(*factors), 0, len(factors), tick)
    for factor, length in zip(factors, moved, strict=True):
        assert length == pytest.approx(min(clip, abs(factor) * 5), rel=1e-3, abs=1e-4)


def test_a_tick_is_heard_after_every_step() -> None:
    heard = []
    train(Line(), PULLED, Local(), pulls(1, 2, 3), 0, 3, lambda: heard.append(1))
    assert len(heard) == 3


# -- randomness ----------------------------------------------------------------------------------------------------

DROPOUT = {"hidden_dropout_prob": 0.4, "attention_probs_dropout_prob": 0.4}


def trained_alone(clients: list[int], noise: int, method: str = "heterofl") -> dict[int, float]:
    """The loss of every client where these train after another, with a global generator in some state."""
    made = plan(method, config=DROPOUT)
    torch.manual_seed(noise)
    torch.rand(noise)
    outcomes = Serial(made).train(made.orders(0, clients), tally_of(made), nothing, nothing)
    return {outcome.client: outcome.loss for outcome in outcomes}


def test_dropout_is_the_same_for_a_client_whatever_ran_before() -> None:
    together = trained_alone([0, 1, 2, 3], 1)
    for clients, noise in (([3], 5), ([2, 3], 7), ([3, 1, 0], 0)):
        for client, loss in trained_alone(clients, noise).items():
            assert loss == together[client]
    assert len(set(together.values())) == 4


def test_dropout_differs_by_round() -> None:
    made = plan("fedavg", config=DROPOUT, local=Local(lr=1e-9, steps=1, batch=12))
    serial = Serial(made)
    losses = {serial.train(made.orders(round, [0]), tally_of(made), nothing, nothing)[0].loss for round in range(4)}
    assert len(losses) == 4, "all examples in one batch, so nothing but dropout differs"


@pytest.mark.parametrize("method", METHODS)
def test_a_run_draws_nothing_from_a_global_generator(method: str) -> None:
    import random

    made = plan(method, config=DROPOUT, fleet="1, 1/4", task=ImageClassification(crop=1, flip=True))
    torch.manual_seed(11)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    run(made)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]


@pytest.mark.parametrize("method", METHODS)
def test_two_runs_of_one_seed_are_the_same_bit_for_bit(method: str) -> None:
    found = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        made = plan(method, config=DROPOUT)
        found.append((run(made), values(made)))
    assert found[0][0] == found[1][0]
    assert are_equal(found[0][1], found[1][1])


def test_another_seed_gives_another_run() -> None:
    left, right = (run(plan("fedavg", seed=seed)).rounds[0].loss for seed in (0, 1))
    assert left != right


@pytest.mark.parametrize("model", ["vit:tiny", RESNET])
def test_a_resident_module_keeps_nothing_of_the_client_before(model: str) -> None:
    made = plan("fedavg", model=model, fleet="full")
    alone, after = tally_of(made), tally_of(made)
    orders = made.orders(0, range(4))
    Serial(made).train(orders[3:], alone, nothing, nothing)
    serial = Serial(made)
    serial.train(orders[:3], tally_of(made), nothing, nothing)
    serial.train(orders[3:], after, nothing, nothing)
    left, right = alone.totals(), after.totals()
    assert all(torch.equal(left[name].sum, right[name].sum) for name in left)


# -- one round is what it says it is -------------------------------------------------------------------------------


def test_a_round_of_fedavg_is_the_weighted_mean_of_plainly_trained_models() -> None:
    """The whole loop once more, without any of raffm's machinery."""
    from copy import deepcopy

    data = federation(3, "dirichlet", alpha=1.0, least=3)
    made = plan("fedavg", data=data, fleet="full", local=Local(optimizer="sgd", lr=0.1, batch=4))
    weights = data.split.train.counts / data.split.train.counts.sum()
    expected = {name: torch.zeros_like(tensor) for name, tensor in made.server.model.named_parameters()}
    for client in range(3):
        model = deepcopy(made.server.model).train()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for picks in order_of(data.split.train[client], made.local, 0, 0, client):
            batch = made.task.batch(data.dataset.train, picks)
            optimizer.zero_grad()
            plain_loss(made.task)(model, batch).backward()
            optimizer.step()
        for name, parameter in model.named_parameters():
            expected[name] += parameter.detach() * float(weights[client])
    run(made)
    for name, parameter in made.server.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "scalefl"])  # trains other names, and all exits
@pytest.mark.parametrize("model", ["vit:tiny", RESNET])
def test_a_run_of_full_clients_is_that_of_fedavg_for_every_method(method: str, model: str) -> None:
    from raffm.methods import method_of

    switches = {"masked_loss": False} if method in ("heterofl", "fedrolex") else {}
    made = plan(method_of(method, **switches), model=model, fleet="full")
    fedavg = plan("fedavg", model=model, fleet="full")
    run(made)
    run(fedavg)
    for name, tensor in fedavg.server.tensors.items():
        torch.testing.assert_close(made.server.tensors[name], tensor, rtol=1e-4, atol=2e-5)
