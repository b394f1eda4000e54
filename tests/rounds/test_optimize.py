"""What the server makes of the mean: against formulas written by hand, and nothing at all where nobody was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from algebra.small import small_layout
from raffm.algebra.tally import Change, Tally
from raffm.errors import RunError
from raffm.methods.method import Device
from raffm.rounds import checkpoint
from raffm.rounds.loop import Keeping
from raffm.rounds.optimize import ServerOptimizer
from raffm.rounds.plan import Merging
from rounds.made import RESNET, are_equal, plan, run, values

LAYOUT = small_layout({"w": "n @ 4", "mean": "n @ 4"}, kinds={"mean": "buffer"})
ROUNDS = ([1.0, -2.0, 0.5, 3.0], [0.5, 0.0, 1.0, -1.0], [2.0, 1.0, -1.0, 0.25])
COVERED = ([1.0, 1.0, 0.0, 2.0], [1.0, 0.0, 0.0, 1.0], [0.0, 3.0, 0.0, 1.0])


def moved(merging: Merging) -> tuple[list[list[float]], ServerOptimizer]:
    """What the optimizer moves the parameter by in three rounds; uncovered elements of the mean are 0."""
    optimizer = ServerOptimizer(LAYOUT, merging)
    found = []
    for mean, covered in zip(ROUNDS, COVERED, strict=True):
        coverage = torch.tensor(covered)
        found.append(optimizer.move("w", Change(torch.where(coverage > 0, torch.tensor(mean), 0.0), coverage)).tolist())
    return found, optimizer


def by_hand(step: object) -> list[list[float]]:
    """One element after another; `step(memory, mean)` gives the move and changes the memory."""
    memories: list[dict[str, float]] = [{} for _ in range(4)]
    found = []
    for mean, covered in zip(ROUNDS, COVERED, strict=True):
        found.append([step(memories[i], mean[i]) if covered[i] else 0.0 for i in range(4)])  # type: ignore[operator]
    return found


def test_plain_moves_by_the_mean_times_the_rate() -> None:
    assert moved(Merging())[0] == [[m if c else 0 for m, c in zip(*r, strict=True)] for r in zip(ROUNDS, COVERED, strict=True)]
    assert moved(Merging(lr=0.5))[0][0] == [0.5, -1.0, 0.0, 1.5]


def test_momentum_is_the_formula() -> None:
    def step(memory: dict[str, float], mean: float) -> float:
        memory["m"] = memory.get("m", 0.0) * 0.8 + mean
        return 0.5 * memory["m"]

    found, _ = moved(Merging(optimizer="momentum", momentum=0.8, lr=0.5))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(by_hand(step)))


def test_adam_is_the_formula() -> None:
    def step(memory: dict[str, float], mean: float) -> float:
        memory["m"] = memory.get("m", 0.0) * 0.9 + 0.1 * mean
        memory["v"] = memory.get("v", 0.0) * 0.99 + 0.01 * mean * mean
        return 0.1 * memory["m"] / (memory["v"] ** 0.5 + 1e-3)

    found, _ = moved(Merging(optimizer="adam", lr=0.1))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(by_hand(step)))


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_state_does_not_move_where_nobody_covered(optimizer: str) -> None:
    made = ServerOptimizer(LAYOUT, Merging(optimizer=optimizer))  # type: ignore[arg-type]
    made.move("w", Change(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(1)))
    before = {name: tensor.clone() for name, tensor in made.state.items()}
    move = made.move("w", Change(torch.tensor([5.0, 0.0, 0.0, 5.0]), torch.tensor([1.0, 0.0, 0.0, 1.0])))
    assert move[1:3].tolist() == [0, 0]
    assert before
    for name, tensor in made.state.items():
        assert torch.equal(tensor.view(torch.int32)[1:3], before[name].view(torch.int32)[1:3])
        assert (tensor[[0, 3]] != before[name][[0, 3]]).all()


@pytest.mark.parametrize("optimizer", ["plain", "momentum", "adam"])
def test_buffers_take_the_mean_itself(optimizer: str) -> None:
    made = ServerOptimizer(LAYOUT, Merging(optimizer=optimizer, lr=0.1))  # type: ignore[arg-type]
    change = Change(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(1))
    for _ in range(2):
        assert torch.equal(made.move("mean", change), change.mean)
    assert made.state == {}


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_values_keep_their_bits_where_nobody_covered_even_if_there_is_momentum(optimizer: str) -> None:
    server = {"w": torch.tensor([1.0, -0.0, 3.0, 4.0]), "mean": torch.zeros(4)}
    tally, made = Tally(LAYOUT, server), ServerOptimizer(LAYOUT, Merging(optimizer=optimizer))  # type: ignore[arg-type]
    everybody, half = LAYOUT.select({}), LAYOUT.select({"n": [0, 3]})

    def round(held: object, update: dict[str, Tensor]) -> Tensor:
        before = server["w"].clone()
        tally.add(update, held)  # type: ignore[arg-type]
        tally.step(made.move)
        return before

    round(everybody, {"w": torch.tensor([2.0, 1.0, 5.0, 9.0]), "mean": torch.zeros(4)})
    before = round(half, {"w": torch.tensor([9.0, 9.0]), "mean": torch.zeros(2)})
    assert torch.equal(server["w"].view(torch.int32)[1:3], before.view(torch.int32)[1:3])
    assert (server["w"][[0, 3]] != before[[0, 3]]).all()


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("model", ["vit:tiny", RESNET])
def test_what_no_client_of_a_run_holds_keeps_its_bits(optimizer: str, model: str) -> None:
    made = plan(
        "heterofl",
        model=model,
        fleet="1/4, 1/16",
        rounds=2,
        merging=Merging(optimizer=optimizer),  # type: ignore[arg-type]
    )
    before = values(made)
    run(made)
    layout = made.server.layout
    widest = made.method.serve(made.server, 0, [Device(-1, 0.25)])[0][0].shares[0].selection
    untouched = 0
    for name in layout.tensors("parameter"):
        outside = ~widest.coverage(layout, name).expand_as(before[name])
        now = made.server.tensors[name].detach()
        assert torch.equal(now[outside], before[name][outside]), name
        untouched += int(outside.sum())
    assert untouched > 1000


def test_the_memory_of_the_optimizer_is_restored_where_the_model_lies() -> None:
    optimizer = ServerOptimizer(LAYOUT, Merging(optimizer="momentum"))
    optimizer.restore({"momentum/w": torch.ones(4)}, torch.device("meta"))
    change = Change(torch.ones(4, device="meta"), torch.ones(4, device="meta"))
    assert optimizer.move("w", change).device.type == "meta"


def test_the_memory_of_the_optimizer_is_saved_and_restored(tmp_path: Path) -> None:
    made = plan("heterofl", rounds=2, merging=Merging(optimizer="adam", lr=0.01))
    run(made, keeping=Keeping(tmp_path / "checkpoint"))
    saved = checkpoint.load(tmp_path / "checkpoint", None)
    names = made.server.layout.tensors("parameter")
    assert set(saved.optimizer) == {f"{kind}/{name}" for kind in ("mean", "squares") for name in names}
    fresh = ServerOptimizer(made.server.layout, made.merging)
    fresh.restore(saved.optimizer, made.server.device)
    assert are_equal(dict(fresh.state), dict(saved.optimizer))


@pytest.mark.parametrize("given", [{"optimizer": "sgd"}, {"weighting": "size"}, {"lr": 0.0}, {"max_norm": -1.0}])
def test_merging_that_makes_no_sense_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(RunError):
        Merging(**given)  # type: ignore[arg-type]
