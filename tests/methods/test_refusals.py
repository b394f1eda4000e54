"""What makes no sense is refused before a round is run, in words that say what to do."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from methods.runs import NAMES, federation, labelled, plan_of, rounds_of
from raffm.devices.budget import Budget
from raffm.devices.fleet import Fleet, Tier
from raffm.errors import BudgetError, RunError, SpaceError
from raffm.methods import METHODS, method_of
from raffm.methods.method import Device
from raffm.models.labelled import Labelled
from raffm.models.table import read

UNNAMED = read(
    """
family = "unnamed"
[groups]
answers = { pinned = true }
pixels = { pinned = true }
[tensors]
"first" = "pixels -> hidden"
"second" = "hidden -> answers"
[inputs]
x = ["pixels = 6"]
"""
)

PINNED = read(
    """
family = "pinned"
[groups]
classes = { pinned = true }
pixels = { pinned = true }
hidden = { pinned = true }
[tensors]
"first" = "pixels -> hidden"
"second" = "hidden -> classes"
"""
)

VECTOR = read(
    """
family = "vector"
[groups]
pixels = { pinned = true }
[tensors]
"scale" = "pixels"
"""
)


class Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))


def words_of(caught: pytest.ExceptionInfo[Exception], *words: str) -> None:
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_method_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(RunError) as caught:
        method_of("fedprox")
    words_of(caught, "'fedprox'", *NAMES)
    expected = "fedavg fedavg-capable federated-dropout fedrolex fiarse fiarse-structured heterofl nested pruning-greedy "
    expected += "raffm scalefl smallest-for-all"
    assert list(METHODS) == expected.split()
    assert [method_of(name).name for name in NAMES] == list(NAMES)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fedavg", ["fedavg has no switch 'scalar'", "none"]),
        ("fiarse", ["fiarse has no switch 'scalar'", "scope, gradient"]),
        ("heterofl", ["'scalar'", "scaler, masked_loss"]),
        ("fedrolex", ["'scalar'", "scaler, masked_loss, shapes, windows"]),
        ("raffm", ["'scalar'", "metric, sizes, space"]),
    ],
)
def test_a_switch_that_a_method_has_not_is_refused_with_those_it_has(name: str, words: list[str]) -> None:
    with pytest.raises(RunError) as caught:
        method_of(name, scalar=True)
    words_of(caught, *words)


@pytest.mark.parametrize("name", ["heterofl", "fedrolex"])
def test_a_masked_loss_needs_a_group_of_classes(name: str) -> None:
    server = Labelled.of(Answers(), UNNAMED)
    with pytest.raises(RunError) as caught:
        method_of(name).refuse(server, [Device(-1, 1.0)])
    words_of(caught, name, "Answers", "`classes`", "masked_loss = false")
    method_of(name, masked_loss=False).refuse(server, [Device(-1, 1.0)])


@pytest.mark.parametrize("name", ["heterofl", "fedrolex"])
def test_a_model_without_widths_is_refused(name: str) -> None:
    with pytest.raises(RunError) as caught:
        method_of(name).refuse(Labelled.of(Answers(), PINNED), [Device(-1, 1.0)])
    words_of(caught, name, "Answers", "cut")


def test_a_model_without_maps_has_nothing_for_fiarse_to_mask() -> None:
    with pytest.raises(RunError) as caught:
        method_of("fiarse").refuse(Labelled.of(Scale(), VECTOR), [Device(-1, 1.0)])
    words_of(caught, "fiarse", "Scale")


@pytest.mark.parametrize("windows", [0, -3])
def test_fedrolex_is_served_over_at_least_one_window(windows: int) -> None:
    with pytest.raises(RunError) as caught:
        plan_of("vit", "fedrolex", switches={"windows": windows})
    words_of(caught, "windows", str(windows), "at least 1")


@pytest.mark.parametrize("metric", ["taylor", "l3_norm"])
def test_raffm_refuses_metrics_that_it_cannot_rank_by_in_training(metric: str) -> None:
    with pytest.raises(RunError) as caught:
        plan_of("vit", "raffm", switches={"metric": metric})
    words_of(caught, metric, "l1_norm", "l2_norm")


def test_raffm_refuses_sizes_that_are_neither_fitted_nor_a_sandwich() -> None:
    with pytest.raises(RunError) as caught:
        plan_of("vit", "raffm", switches={"sizes": "random"})
    words_of(caught, "'random'", "fitted", "sandwich")


@pytest.mark.parametrize("family", ["vit", "raffm_resnet", "bert"])
def test_raffm_refuses_a_space_in_which_nothing_fits_the_smallest_device(family: str) -> None:
    group = "stages.0.blocks.0.inner" if family == "raffm_resnet" else "layers.0.ffn"
    with pytest.raises(BudgetError) as caught:
        plan_of(family, "raffm", "1, 1/64", switches={"space": {group: [4, 8]}})
    words_of(caught, "parameters")
    plan_of(family, "raffm", "1, 1/64", switches={"space": {group: [4, 8]}, "sizes": "sandwich"})


def test_raffm_refuses_a_space_of_groups_that_there_are_not() -> None:
    with pytest.raises(SpaceError) as caught:
        plan_of("vit", "raffm", "1, 1/4", switches={"space": {"layers.*.fnn": [4]}})
    words_of(caught, "layers.*.fnn")


def test_raffm_refuses_a_budget_of_a_device_that_nothing_fits() -> None:
    server = labelled("vit")
    with pytest.raises(BudgetError):
        method_of("raffm").choose(server, 0, [Device(0, 1.0, 0, Budget(max_params=1))], 0)


def test_raffm_refuses_a_fleet_whose_budgets_nothing_fits_before_the_first_round() -> None:
    plan = plan_of("vit", "raffm")
    with pytest.raises(BudgetError):
        replace(plan, fleet=Fleet((Tier(1.0), Tier(0.5, budget=Budget(max_params=1)))))


@pytest.mark.parametrize("name", ["heterofl", "fedrolex"])
def test_a_head_may_have_more_classes_than_the_data(name: str) -> None:
    data = federation("vit", [[0, 1, 2] * 2] * 2, tests=3)
    plan = plan_of("vit", name, data=replace(data, dataset=replace(data.dataset, classes=("a", "b", "c"))))
    before = plan.server.tensors["classifier.weight"].detach().clone()
    rounds_of(plan)
    changed = (plan.server.tensors["classifier.weight"] != before).any(1)
    assert changed.tolist() == [True, True, True, False, False]


def test_a_head_may_not_have_fewer_classes_than_the_data() -> None:
    data = federation("vit", [[0, 1, 2] * 2] * 2, tests=3)
    wider = replace(data, dataset=replace(data.dataset, classes=tuple("abcdefg")))
    with pytest.raises(RunError) as caught:
        plan_of("vit", "fedavg", data=wider)
    words_of(caught, "7 classes", "head has 5")
