import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import MODELS, cost_of, model_of, random_selection, real_bytes, real_flops, real_params
from torch import nn

from raffm.algebra.selection import Selection
from raffm.devices.cost import CostModel
from raffm.errors import BudgetError, LabelError
from raffm.models import table as tables
from raffm.models.label import layout_of, table_of
from raffm.models.surgery import submodel

seeds = st.integers(0, 9999)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8)
@given(seed=seeds)
def test_predicted_parameters_bytes_and_flops_are_those_of_the_submodel(name, seed):
    cost = cost_of(name)
    selection = random_selection(cost.layout, seed)
    module, sizes = submodel(cost.model, cost.layout, selection), cost.layout.sizes_of(selection)
    assert cost.params(sizes) == real_params(module)
    assert cost.bytes(sizes) == real_bytes(module)
    assert cost.flops(sizes) == real_flops(module)


@pytest.mark.parametrize("name", ["vit", "our resnet with group norm"])
@settings(max_examples=5)
@given(many=st.lists(seeds, min_size=1, max_size=5))
def test_many_costs_at_once_are_the_costs_of_each(name, many):
    cost = cost_of(name)
    sizes = [cost.layout.sizes_of(random_selection(cost.layout, seed)) for seed in many]
    rows = cost.basis.rows(sizes)
    for kind, one in (("params", cost.params), ("bytes", cost.bytes), ("flops", cost.flops), ("memory", cost.memory)):
        assert [round(found) for found in cost.many(kind, rows).tolist()] == [one(entry) for entry in sizes]


def test_a_model_in_half_precision_takes_half_the_bytes():
    whole, model = cost_of("vit"), copy.deepcopy(model_of("vit")).to(torch.bfloat16)
    half = CostModel(model, layout_of(model), table_of(model), batch=4)
    assert 2 * half.bytes(whole.layout.sizes) == whole.bytes(whole.layout.sizes)
    assert half.flops(whole.layout.sizes) == whole.flops(whole.layout.sizes)


def test_flops_of_text_are_stated_for_as_many_tokens_as_the_model_has_positions():
    cost = cost_of("bert")  # 20 positions
    attention = 3 * 2 * 2 * 20 * 20 * 24
    linear = 3 * 2 * 20 * (4 * 24 * 24 + 2 * 24 * 40) + 2 * 24 * 24 + 2 * 24 * 5
    assert cost.flops(cost.layout.sizes) == attention + linear


def test_naming_the_groups_that_vary_changes_no_cost():
    cost = cost_of("vit")
    free = [group for group in cost.layout.free if group.endswith((".ffn", ".heads", ".qk"))]
    narrow = CostModel(cost.model, cost.layout, cost.table, batch=4, free=free)
    sizes = cost.layout.sizes_of(
        cost.layout.select({"layers.0.ffn": 7, "layers.1.heads": 2, "layers.2.qk": 3, "layers.2.vo": 3})
    )
    assert narrow.flops(sizes) == cost.flops(sizes)
    assert narrow.bytes(sizes) == cost.bytes(sizes)
    assert narrow.memory(sizes) == pytest.approx(cost.memory(sizes), rel=0.02)


def test_a_group_that_was_not_to_vary_has_no_cost():
    cost = cost_of("vit")
    narrow = CostModel(cost.model, cost.layout, cost.table, free=["layers.0.ffn"])
    with pytest.raises(BudgetError, match=r"`layers.1.ffn` is 5, but it is not in `free`\."):
        narrow.flops({**cost.layout.sizes, "layers.1.ffn": 5})


def test_measuring_leaves_the_model_and_the_global_randomness_alone():
    model = copy.deepcopy(model_of("bert"))
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    cost = CostModel(model, layout_of(model), table_of(model), batch=2, free=["layers.0.ffn"])
    cost.flops(cost.layout.sizes), cost.memory(cost.layout.sizes)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model.training or model_of("bert").training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_unknown_optimizer_is_refused():
    cost = cost_of("vit")
    with pytest.raises(BudgetError, match=r"'lion' is not known. Known are adamw, sgd, sgd-momentum\."):
        CostModel(cost.model, cost.layout, cost.table, optimizer="lion")
    with pytest.raises(BudgetError, match=r"a batch of at least 1, but was given 0\."):
        CostModel(cost.model, cost.layout, cost.table, batch=0)


class _Repeating(nn.Module):
    """A map whose input is as long as its number of rows: work that the label of its weight does not tell."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6, bias=False)

    def forward(self, x):
        return self.linear(x.expand(len(self.linear.weight) ** 2, -1))


def test_flops_that_do_not_follow_from_the_labels_are_refused():
    table = tables.read('family = "odd"\n[tensors]\nlinear = "4 -> rows"\n[inputs]\nx = ["width = 4"]\n')
    model = _Repeating()
    cost = CostModel(model, layout_of(model, table), table)
    assert cost.params(cost.layout.sizes_of(Selection())) == 24
    with pytest.raises(LabelError, match=r"the FLOPs of _Repeating do not follow from its group sizes"):
        cost.flops(cost.layout.sizes)
