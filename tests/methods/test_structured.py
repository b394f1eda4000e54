"""Structured FIARSE: the most important indices, and a gradient that knows the edge of the cut."""

import pytest
import torch
from torch import Tensor

from methods.runs import FAMILIES, examples, labelled, plan_of, rounds_of, same_bits, snapshot, task_of
from raffm.algebra.layout import Layout
from raffm.algebra.ranking import Ranking
from raffm.errors import RunError
from raffm.methods import method_of
from raffm.methods.fiarse_structured import importances, pulls
from raffm.methods.method import Client, Device
from raffm.methods.widths import cut_share, width_groups
from raffm.models.surgery import submodel


@pytest.mark.parametrize("family", FAMILIES)
def test_the_most_important_indices_are_kept_in_nested_widths(family: str) -> None:
    server = labelled(family)
    large, small = method_of("fiarse-structured").choose(server, 0, [Device(0, 1 / 4), Device(1, 1 / 16)], 0)
    assert server.layout.sizes_of(small.selection) == server.layout.sizes_of(cut_share(server, Ranking(), 1 / 16).selection)
    for name, importance in importances(server).items():
        kept, inner = large.selection.kept[name], small.selection.kept[name]
        for row in range(len(kept)) if name in server.layout.bases else [...]:
            held = torch.zeros(server.layout.groups[name].size, dtype=torch.bool)
            held[kept[row]] = True
            own = importance[row]
            assert own[held].min() >= own[~held].max()
            assert set(inner[row].tolist()) <= set(kept[row].tolist())


def test_the_importance_of_a_neuron_is_the_sum_of_its_weights() -> None:
    server = labelled("vit")
    fc1, fc2 = (server.model.vit.layers[1].mlp.get_submodule(name) for name in ("fc1", "fc2"))
    by_hand = fc1.weight.abs().sum(1) + fc1.bias.abs() + fc2.weight.abs().sum(0)
    torch.testing.assert_close(importances(server)["layers.1.ffn"], by_hand.detach())


def soft(layout: Layout, group: str, slope: Tensor, weights: dict[str, Tensor]) -> dict[tuple[str, int], Tensor]:
    """A factor 1 for every position along a group, whose derivative is that of the index's soft mask; by plain loops."""
    base, count = layout.bases.get(group), layout.sizes[group]
    rows = layout.sizes[base] if base else 1
    sums = [[torch.zeros(()) for _ in range(count)] for _ in range(rows)]
    where: dict[tuple[str, int], list[tuple[int, int] | None]] = {}
    for name, axis in layout.uses(group):
        if name in weights:
            text = str(layout.labels[name].axes[axis])
            length = weights[name].shape[axis]
            assert text in (group, f"{base}*{group}"), text
            where[name, axis] = [(at // count, at % count) for at in range(length)]
            for at, (row, index) in enumerate(where[name, axis]):
                sums[row][index] = sums[row][index] + weights[name].select(axis, at).abs().sum()
    slope = slope[:-1].view(rows, count)  # the last is nobody's
    factor = [[1 + slope[row, index] * (s - s.detach()) for index, s in enumerate(own)] for row, own in enumerate(sums)]
    return {key: torch.stack([factor[row][index] for row, index in places]) for key, places in where.items()}


@pytest.mark.parametrize("family", ["vit", "bert"])
def test_the_gradient_is_that_of_weights_times_their_soft_masks(family: str) -> None:
    server = labelled(family)
    method = method_of("fiarse-structured")
    (share,) = method.choose(server, 0, [Device(0, 1 / 4)], 0)
    module = submodel(server.model, server.layout, share.selection).eval()  # without dropout
    layout, task = server.layout.cut(share.selection), task_of(family)
    batch = task.batch(examples(family, torch.tensor([0, 1, 2]), 1), torch.arange(3))
    learn = method.learn(server, share, share.selection, Client(task, torch.ones(5, dtype=torch.bool)))
    learn.prepare(module)
    learn.loss(module, batch).backward()
    learn.after_backward(module)
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in module.named_parameters()}
    masked = dict(weights)
    for group, slope in pulls(server, share.selection).items():
        for (name, axis), factor in soft(layout, group, slope, weights).items():
            shape = [1] * weights[name].dim()
            shape[axis] = -1
            masked[name] = masked[name] * factor.view(shape)
    outputs = torch.func.functional_call(module, masked, kwargs=dict(batch.inputs)).logits
    expected = torch.autograd.grad(task.losses(outputs, batch.labels).mean(), list(weights.values()), allow_unused=True)
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        if gradient is not None and parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plain_gradient_is_another(family: str) -> None:
    trained = []
    for gradient in ("importance", "plain"):
        plan = plan_of(family, "fiarse-structured", "1/4", switches={"gradient": gradient})
        before = snapshot(plan.server)
        rounds_of(plan)
        trained.append(snapshot(plan.server))
        held = plan.method.choose(labelled(family), 0, [Device(0, 1 / 4)], 0)[0].selection
        for name in plan.server.layout.tensors("parameter"):
            outside = ~held.coverage(plan.server.layout, name)
            assert same_bits(plan.server.tensors[name][outside], before[name][outside])
    assert any(not same_bits(tensor, trained[1][name]) for name, tensor in trained[0].items())


def test_every_width_is_cut_and_heads_are_not() -> None:
    server = labelled("vit")
    (share,) = method_of("fiarse-structured").choose(server, 0, [Device(0, 1 / 4)], 0)
    assert set(share.selection.kept) == set(width_groups(server.layout))


def test_an_unknown_gradient_is_refused() -> None:
    with pytest.raises(RunError, match="not by 'none'"):
        method_of("fiarse-structured", gradient="none").refuse(labelled("vit"), [])
