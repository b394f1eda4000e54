"""The statements of docs/convergence.md, on quadratics that can be solved by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from algebra.small import small_layout
from raffm.algebra.mask import Mask
from raffm.algebra.tally import Change, Tally
from raffm.rounds.optimize import ServerOptimizer
from raffm.rounds.plan import Merging

RATE = 0.5


def optima(*rows: list[float]) -> list[Tensor]:
    return [torch.tensor(row) for row in rows]


def federated(
    curvature: Tensor,
    targets: list[Tensor],
    held: list[list[bool]],
    rounds: int,
    weights: tuple[float, ...] = (1.0, 1.0),
    present: tuple[tuple[int, ...], ...] = ((0, 1),),
) -> Tensor:
    """One gradient step a round on 1/2 (x - a)' A (x - a) with what a client lacks set to 0, and the counted mean."""
    layout = small_layout({"x": "n @ 2"})
    server = {"x": torch.zeros(2)}
    tally = Tally(layout, server)
    for round in range(rounds):
        for client in present[round % len(present)]:
            mask = torch.tensor(held[client])
            own = server["x"] * mask
            gradient = curvature @ (own - targets[client])
            tally.add({"x": server["x"] - RATE * gradient * mask}, Mask({"x": mask}), weights[client], client=client)
        tally.step()
    return server["x"]


def test_a_coordinate_that_does_not_interact_fits_the_optima_of_its_holders() -> None:
    found = federated(torch.eye(2), optima([1.0, 2.0], [3.0, 8.0]), [[True, True], [True, False]], 60, (1.0, 3.0))
    assert found.tolist() == pytest.approx([2.5, 2.0])  # (1*1 + 3*3) / 4; the second coordinate is the first client's alone


def test_a_shared_optimum_is_reached_whatever_is_covered() -> None:
    found = federated(torch.diag(torch.tensor([1.0, 0.5])), optima([1.0, 2.0], [1.0, 2.0]), [[True, True], [True, False]], 120)
    assert found.tolist() == pytest.approx([1.0, 2.0])


def test_a_coordinate_that_nobody_holds_does_not_move() -> None:
    found = federated(torch.eye(2), optima([1.0, 2.0], [3.0, 8.0]), [[True, False], [True, False]], 10)
    assert found[1].item() == 0


def test_a_coordinate_held_every_other_round_takes_twice_as_many() -> None:
    held = [[True, True], [True, False]]
    every = federated(torch.eye(2), optima([1.0, 2.0], [1.0, 2.0]), held, 5)
    other = federated(torch.eye(2), optima([1.0, 2.0], [1.0, 2.0]), held, 10, present=((0,), (1,)))
    assert other[1].item() == every[1].item() == pytest.approx(2 * (1 - RATE**5))


def test_interacting_coordinates_pull_a_submodel_to_another_optimum_for_good() -> None:
    """The fixed point is where the mean of submodel gradients vanishes: solved here as a linear system."""
    curvature = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
    target = torch.tensor([1.0, 1.0])
    found = federated(curvature, [target, target], [[True, True], [True, False]], 400)
    # client 0: x0 + x1/2 = 1.5 and x0/2 + x1 = 1.5; client 1, with x1 = 0: x0 = 1.5
    expected = np.linalg.solve([[2.0, 0.5], [0.5, 1.0]], [3.0, 1.5])
    assert found.tolist() == pytest.approx(expected.tolist())
    assert abs(found[0].item() - 1) > 0.2


def test_there_is_no_such_pull_where_the_cut_coordinate_is_zero_at_the_optimum() -> None:
    curvature = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
    target = torch.tensor([1.0, 0.0])
    found = federated(curvature, [target, target], [[True, True], [True, False]], 400)
    assert found.tolist() == pytest.approx([1.0, 0.0], abs=1e-6)


def test_dividing_by_the_number_of_clients_shrinks_what_few_hold() -> None:
    """The published mean of RaFFM, beside the counted one; nobody learns anything."""
    model = torch.tensor([1.0, 1.0])
    held = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert ((held * model).sum(0) / len(held)).tolist() == [1, 0.5]
    assert federated(torch.zeros(2, 2), optima([0.0, 0.0], [0.0, 0.0]), [[True, True], [True, False]], 1).tolist() == [0, 0]


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_server_optimizer_does_not_carry_what_nobody_held(optimizer: str) -> None:
    layout = small_layout({"x": "n @ 2"})
    server = ServerOptimizer(layout, Merging(optimizer=optimizer))  # type: ignore[arg-type]
    server.move("x", Change(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0])))
    before = {name: state.clone() for name, state in server.state.items()}
    moved = server.move("x", Change(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0])))
    assert moved[1].item() == 0
    assert moved[0].item() != 0
    assert all(state[1] == before[name][1] for name, state in server.state.items())
