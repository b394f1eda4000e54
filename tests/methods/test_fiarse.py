"""FIARSE: which elements a size keeps, what their gradient is multiplied by, and what leaves the submodel."""

import copy
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from methods.runs import CLASSES, FAMILIES, labelled, module_of, plan_of, rounds_of, same_bits, snapshot
from raffm.algebra.mask import Mask
from raffm.methods import method_of
from raffm.methods.fiarse import factors, mask_of, maskable, thresholds
from raffm.methods.method import Client, Device, Share
from raffm.models.labelled import Labelled
from raffm.models.table import read
from raffm.rounds.local import Local, batches_of, order_of, train
from raffm.rounds.plan import Plan

TABLE = read(
    """
family = "two_maps"
[groups]
classes = { pinned = true }
pixels = { pinned = true }
[tensors]
"first" = "pixels -> hidden"
"norm" = "hidden"
"second" = "hidden -> classes"
"""
)


class TwoMaps(nn.Module):
    def __init__(self, weights: list[float]) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)
        values = torch.tensor(weights)
        with torch.no_grad():
            for name in ("first.weight", "first.bias", "second.weight", "second.bias"):
                tensor = self.get_parameter(name)
                tensor.copy_(values[: tensor.numel()].view(tensor.shape))
                values = values[tensor.numel() :]


COUNT = 12 + 4 + 8 + 2
"""Elements that can be masked: two weights and two biases; the norm is not among them."""

few = st.lists(st.sampled_from([-2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 3.0]), min_size=COUNT, max_size=COUNT)
many = st.lists(st.floats(-10, 10, width=32), min_size=COUNT, max_size=COUNT)
sizes = st.one_of(st.sampled_from([1 / 64, 1 / 16, 1 / 4, 0.36, 0.5]), st.floats(0.001, 0.999))


def flat(server: Labelled, size: float) -> tuple[Tensor, Tensor]:
    """All elements that can be masked, and which of them a size keeps."""
    mask = mask_of(server, thresholds(server, [size])[size])
    assert list(mask.kept) == list(maskable(server.layout))
    return (
        torch.cat([server.tensors[name].detach().flatten() for name in mask.kept]),
        torch.cat([kept.flatten() for kept in mask.kept.values()]),
    )


@settings(max_examples=40)
@given(weights=st.one_of(few, many), size=sizes)
def test_exactly_k_elements_are_kept_whatever_the_ties_and_none_that_is_dropped_is_larger(
    weights: list[float], size: float
) -> None:
    """Invariants 29 and 31."""
    values, kept = flat(Labelled.of(TwoMaps(weights), TABLE), size)
    assert int(kept.sum()) == max(1, round(size * COUNT))
    assert bool(kept.all()) or values[kept].abs().min() >= values[~kept].abs().max()


@pytest.mark.parametrize("size", [0.0001, 1 / 64, 0.5, 0.97])
def test_of_equal_weights_the_first_are_kept(size: float) -> None:
    _, kept = flat(Labelled.of(TwoMaps([0.5] * COUNT), TABLE), size)
    count = max(1, round(size * COUNT))
    assert kept.tolist() == [True] * count + [False] * (COUNT - count)


@settings(max_examples=30)
@given(weights=st.one_of(few, many), first=sizes, second=sizes, together=st.booleans())
def test_smaller_sizes_are_contained_in_larger_ones(weights: list[float], first: float, second: float, together: bool) -> None:
    """Invariant 30; and it does not matter which sizes are asked for together."""
    server = Labelled.of(TwoMaps(weights), TABLE)
    small, large = min(first, second), max(first, second)
    if together:
        assert thresholds(server, [first, second]) == {size: thresholds(server, [size])[size] for size in (first, second)}
    assert bool((flat(server, small)[1] <= flat(server, large)[1]).all())


@settings(max_examples=20)
@given(weights=few, size=sizes, power=st.integers(-6, 6))
def test_a_scale_leaves_the_mask(weights: list[float], size: float, power: int) -> None:
    """Invariant 36; powers of two, so that no rounding makes or breaks a tie."""
    scaled = [weight * 2.0**power for weight in weights]
    one, other = (flat(Labelled.of(TwoMaps(each), TABLE), size)[1] for each in (weights, scaled))
    assert torch.equal(one, other)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1 / 4, 1 / 64])
def test_of_every_family_exactly_k_are_kept_and_norms_whole(family: str, size: float) -> None:
    server = labelled(family)
    values, kept = flat(server, size)
    assert int(kept.sum()) == round(size * len(values))
    assert bool(kept.all()) or values[kept].abs().min() >= values[~kept].abs().max()
    norms = set(server.layout.tensors("parameter")) - set(maskable(server.layout))
    assert norms and all(part in name.lower() for name in norms for part in ("norm",))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_model_has_no_mask_and_no_threshold(family: str) -> None:
    """Invariant 30, second half: nothing can leave in a round."""
    plan = plan_of(family, "fiarse")
    (share,) = plan.method.choose(plan.server, 0, [Device(0, 1.0)], 0)
    assert share == Share()
    assert not isinstance(plan.method.held(plan.server, share), Mask)


# -- the gradient --------------------------------------------------------------------------------------------------


def factor(weight: Tensor, threshold: float) -> Tensor:
    return factors([weight], [threshold])[0]


@settings(max_examples=40)
@given(weight=st.floats(1e-3, 1e3), threshold=st.floats(1e-3, 1e3), sign=st.sampled_from([-1, 1]))
def test_the_factor_is_the_derivative_of_w_times_its_smooth_mask(weight: float, threshold: float, sign: int) -> None:
    """Invariant 32: 1 for the kept weight, and the mask's own part by autograd."""
    magnitude = torch.tensor(weight, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad((magnitude - threshold) / (magnitude + threshold), magnitude)
    found = factor(torch.tensor(sign * weight, dtype=torch.float64), threshold)
    assert torch.allclose(found, 1 + magnitude.detach() * slope, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("multiple", "expected"), [(1, "3/2"), (2, "13/9"), (3, "11/8"), (5, "23/18"), (7, "39/32"), (20, "481/441")]
)
@pytest.mark.parametrize("threshold", [1.0, 2.0**-7, 8.0])
def test_the_factor_is_known_at_multiples_of_the_threshold(multiple: int, expected: str, threshold: float) -> None:
    """1 + 2n / (n + 1)^2 at n times the threshold: 1.5, 1.444, 1.375, 1.278, 1.219, 1.091."""
    for sign in (1, -1):
        found = factor(torch.tensor(sign * multiple * threshold), threshold)
        assert float(found) == pytest.approx(float(Fraction(expected)), rel=1e-6)


@settings(max_examples=30)
@given(beyond=st.floats(1, 100), threshold=st.floats(1e-3, 1e3))
def test_the_factor_lies_above_1_and_is_at_most_one_and_a_half(beyond: float, threshold: float) -> None:
    found = float(factor(torch.tensor(beyond * threshold, dtype=torch.float64), threshold))
    assert 1 < found <= 1.5 + 1e-12
    assert float(factor(torch.tensor(beyond), 0.0)) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_one_step_of_sgd_is_the_hand_formula_on_kept_weights_and_nothing_on_others(family: str) -> None:
    """Invariant 32, of the client's own loop: w - lr * g * (1 + 2|w|th / (|w| + th)^2), g taken at the masked weights."""
    plan = plan_of(family, "fiarse", local=Local("sgd", lr=0.125, batch=5, steps=1))
    plan.server.model.eval()
    size = 1 / 4
    (share,) = plan.method.choose(plan.server, 0, [Device(0, size)], 0)
    held, threshold = plan.method.held(plan.server, share), share.numbers["threshold"]
    assert isinstance(held, Mask)
    module = module_of(plan, share)
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
    picks = order_of(plan.data.split.train[0], plan.local, 0, 0, 0)
    batches = list(batches_of(plan.task, plan.data.dataset.train, picks, 0, 0, 0))

    server = {name: tensor.detach() for name, tensor in module.named_parameters()}
    masked = {name: (plan.server.tensors[name].detach() * held.coverage(plan.server.layout, name)) for name in server}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in masked.items()}
    reference = copy.deepcopy(module).train()
    output = functional_call(reference, leaves, (), dict(batches[0].inputs))
    loss = nn.functional.cross_entropy(output.logits, batches[0].labels)
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))

    learn = plan.method.learn(plan.server, share, held, Client(plan.task, torch.ones(CLASSES, dtype=torch.bool)))
    train(module, learn, plan.local, batches, 0, 1, lambda: None)
    for name, parameter in module.named_parameters():
        gradient, before = gradients[name], masked[name]
        if gradient is None:
            assert torch.equal(parameter, before)
            continue
        if name in held.kept:
            magnitude = before.abs()
            gradient = gradient * (1 + 2 * magnitude * threshold / (magnitude + threshold) ** 2) * held.kept[name]
        assert torch.allclose(parameter, before - 0.125 * gradient, atol=1e-6), name
        if name in held.kept:
            assert bool((parameter[~held.kept[name]] == 0).all())


# -- what leaves ---------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": Local("sgd", lr=0.5, batch=5, steps=6),
    "momentum and decay": Local("sgd", lr=0.2, batch=5, steps=6, momentum=0.9, weight_decay=0.1),
    "adamw": Local("adamw", lr=0.02, batch=5, steps=6, weight_decay=0.1),
}


def active_sets(plan: Plan, size: float) -> tuple[Mask, list[dict[str, Tensor]], dict[str, Tensor]]:
    """The mask of a client, which of its weights are not 0 after every step, and what it sends back."""
    (share,) = plan.method.choose(plan.server, 0, [Device(0, size)], 0)
    held = plan.method.held(plan.server, share)
    assert isinstance(held, Mask)
    module = module_of(plan, share)
    learn = plan.method.learn(plan.server, share, held, Client(plan.task, torch.ones(CLASSES, dtype=torch.bool)))
    picks = order_of(plan.data.split.train[0], plan.local, 0, 0, 0)
    batches = batches_of(plan.task, plan.data.dataset.train, picks, 0, 0, 0)
    seen: list[dict[str, Tensor]] = []

    def tick() -> None:
        seen.append({name: parameter.detach().clone() for name, parameter in module.named_parameters() if name in held.kept})

    train(module, learn, plan.local, batches, 0, len(picks), tick)
    return held, seen, {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_active_set_only_shrinks_and_what_leaves_keeps_its_last_value(family: str, optimizer: str) -> None:
    """Invariant 33."""
    plan = plan_of(family, "fiarse", local=OPTIMIZERS[optimizer])
    held, seen, sent = active_sets(plan, 1 / 4)
    threshold = thresholds(plan.server, [1 / 4])[1 / 4].numbers["threshold"]
    left = 0
    for name, kept in held.kept.items():
        active = kept
        for weights in seen:
            now = weights[name] != 0
            assert bool((now <= active).all()), name
            assert bool((weights[name][now].abs() >= threshold).all())
            active = now
        assert torch.equal(sent[name][active], seen[-1][name][active])
        gone = kept & ~active
        left += int(gone.sum())
        assert bool((sent[name][gone].abs() < threshold).all())
        assert bool((sent[name][~kept] == 0).all())
    assert left, "nothing left the submodel, so nothing was tested"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_that_nobody_held_keep_their_bits_on_the_server(family: str, optimizer: str) -> None:
    """Invariant 33: also under weight decay and momentum."""
    plan = plan_of(family, "fiarse", "1/4, 1/16", local=OPTIMIZERS[optimizer])
    before = snapshot(plan.server)
    shares = [order.share for order in plan.orders(0, range(4))]
    held = [plan.method.held(plan.server, share) for share in shares]
    rounds_of(plan)
    for name in maskable(plan.server.layout):
        anybody = torch.stack([mask.kept[name] for mask in held if isinstance(mask, Mask)]).any(0)
        assert same_bits(plan.server.tensors[name][~anybody], before[name][~anybody]), name
    changed = [name for name, tensor in plan.server.tensors.items() if not torch.equal(tensor, before[name])]
    assert set(changed) & set(maskable(plan.server.layout))


def test_at_full_size_weights_may_cross_zero_and_still_train() -> None:
    """Invariant 30: nothing is masked, though decay takes weights below every threshold there was."""
    plan = plan_of("vit", "fiarse", "1", local=Local("sgd", lr=1.0, batch=5, steps=3, weight_decay=0.9))
    reference = plan_of("vit", "fedavg", "1", local=plan.local)
    rounds_of(plan)
    rounds_of(reference)
    for name, tensor in reference.server.tensors.items():
        assert same_bits(plan.server.tensors[name], tensor)


def test_a_threshold_of_zero_keeps_what_it_kept() -> None:
    """More elements are kept than differ from 0: the first zeros are held, and trained with the plain gradient."""
    weights = [1.0] * 4 + [0.0] * (COUNT - 4)
    server = Labelled.of(TwoMaps(weights), TABLE)
    share = thresholds(server, [0.5])[0.5]
    assert share.numbers["threshold"] == 0
    mask = mask_of(server, share)
    assert int(sum(kept.sum() for kept in mask.kept.values())) == 13
    module = copy.deepcopy(server.model)
    learn = method_of("fiarse").learn(
        server, share, mask, Client(plan_of("vit", "fiarse").task, torch.ones(2, dtype=torch.bool))
    )
    learn.prepare(module)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    learn.after_backward(module)
    for name, kept in mask.kept.items():
        assert torch.equal(module.get_parameter(name).grad, kept.float()), name


def test_a_server_in_bfloat16_is_masked_like_any_other() -> None:
    server = Labelled.of(TwoMaps([float(place) for place in range(COUNT)]).bfloat16(), TABLE)
    values, kept = flat(server, 0.5)
    assert int(kept.sum()) == COUNT // 2
    assert values[kept].abs().min() >= values[~kept].abs().max()
