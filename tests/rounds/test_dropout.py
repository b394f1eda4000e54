"""Dropout on a CPU: what is dropped, how much of it, and that clients draw nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils._python_dispatch import TorchDispatchMode

from methods.runs import ALL, plan_of
from raffm.rounds.backend import Serial
from raffm.rounds.dropout import STEPS, SixteenBits, in_sixteen_bits
from raffm.rounds.local import Local
from rounds.made import are_equal, nothing, values

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@given(SHAPES, st.floats(0, 1), st.booleans(), st.booleans(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_every_number_is_dropped_or_grows_by_the_inverse_of_its_chance(
    shape: tuple[int, ...], chance: float, training: bool, inplace: bool, dtype: torch.dtype
) -> None:
    given = torch.randn(shape).to(dtype)
    with SixteenBits():
        found = dropout(given.clone(), chance, training, inplace)
    assert found.shape == given.shape
    assert found.dtype == dtype
    grown = given / (1 - round(chance * STEPS) / STEPS) if training else given
    is_kept = torch.isclose(found.float(), grown.float(), rtol=0.01 if dtype == torch.bfloat16 else 1e-4)
    assert bool(((found == 0) | is_kept).all())
    if not training or chance == 0:
        assert torch.equal(found, given)


@pytest.mark.parametrize("chance", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_for_wherever_they_lie(chance: float) -> None:
    torch.manual_seed(0)
    ones = torch.ones(100_000, 8)
    with SixteenBits():
        found = dropout(ones, chance)
    spread = (chance * (1 - chance) / 100_000) ** 0.5
    assert bool(((found == 0).float().mean(0) - chance).abs().max() < 5 * spread)
    assert abs(float(found.double().mean()) - 1) < 5 * spread / (1 - chance)
    pairs = (found[:, :-1] == 0) & (found[:, 1:] == 0)
    assert bool((pairs.float().mean(0) - chance**2).abs().max() < 5 * (chance**2 / 100_000) ** 0.5)


def test_gradients_pass_where_numbers_did() -> None:
    given = torch.rand(4, 50, dtype=torch.float64).t().add(1).requires_grad_()  # not in the order of memory
    with SixteenBits():
        found = dropout(given, 0.3)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert given.grad is not None
    assert torch.allclose(given.grad * given, found)
    assert 0 < int((found == 0).sum()) < found.numel()


def test_what_it_does_not_do_is_left_to_torch() -> None:
    with SixteenBits(), pytest.raises(ValueError, match="between 0 and 1"):
        dropout(torch.ones(2), 1.5)
    assert isinstance(in_sixteen_bits(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))), SixteenBits)
    assert not isinstance(in_sixteen_bits(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))), SixteenBits)


class Draws(TorchDispatchMode):
    """How often numbers were drawn, and by what."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            self.found.add(function.overloadpacket.__name__)
        return function(*given, **(named or {}))


def trained(method: str) -> tuple[dict[str, Tensor], set[str]]:
    made = plan_of("bert", method, "1, 1/4", [ALL * 2, ALL], local=Local("sgd", lr=0.01, batch=5, steps=2))
    backend, tally = Serial(made, "bfloat16"), made.tally()
    with Draws() as draws:
        backend.train(made.orders(0, range(2)), tally, nothing, nothing)
    tally.step()
    return values(made), draws.found


@pytest.mark.parametrize("method", ["fedavg", "nested", "scalefl"])
def test_clients_draw_bits_and_the_order_of_examples_the_same_every_time(method: str) -> None:
    (first, drawn), (second, _) = trained(method), trained(method)
    assert drawn == {"random_", "randperm"}
    assert are_equal(first, second)
