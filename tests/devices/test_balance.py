"""Balanced shapes: nested, within budgets, and none that fits has a greater product of widths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ResNetConfig as Config
from transformers import ResNetForImageClassification, ViTConfig, ViTForImageClassification

from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.data.task import ImageClassification
from raffm.devices.balance import Widths
from raffm.devices.budget import Budget, Kind
from raffm.errors import BudgetError, RunError, SpaceError
from raffm.methods import method_of
from raffm.methods.method import Client, Device
from raffm.methods.shapes import sizes_at
from raffm.methods.widths import scaled_modules
from raffm.models.exits import with_exits
from raffm.models.labelled import Labelled
from raffm.models.load import tiny, trainable
from raffm.models.resnet import ResNet, ResNetConfig

QUARTERS = (1.0, 1 / 4, 1 / 16, 1 / 64)


@cache
def widths_of(name: str, **changes: object) -> Widths:
    shape = (3, 32, 32) if "resnet" in name else (3, 16, 16)
    return Widths(Labelled.of(trainable(name, "image", 10, shape, changes=dict(changes))))


def resnet(*widths: int) -> Widths:
    return widths_of("resnet18", widths=widths, depths=(1,) * len(widths))


def test_the_shapes_of_resnet18_are_those_of_the_rule() -> None:
    widths = widths_of("resnet18")
    found = widths.chain([None, *(widths.budget(size) for size in QUARTERS[1:])])
    assert found == [(64, 128, 256, 512), (64, 128, 168, 176), (64, 72, 72, 64), (32, 40, 32, 32)]
    whole = widths.server.layout.count(Selection())
    for shape, size in zip(found[1:], QUARTERS[1:], strict=True):
        kept = widths.server.layout.count(Ranking().cut(widths.server.layout, widths.sizes(shape)))
        assert 0.9 * size < kept / whole <= size


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([4, 8, 16, 24, 32, 40]), min_size=2, max_size=4),
    st.lists(st.floats(0.05, 0.95), min_size=1, max_size=3),
    st.integers(0, 99),
)
def test_shapes_of_a_chain_are_nested_fit_and_none_that_fits_is_greater(full: list[int], parts: list[float], seed: int) -> None:
    widths = resnet(*full)
    parts = sorted(parts, reverse=True)
    try:
        shapes = widths.chain([None, *map(widths.budget, parts)])
    except BudgetError:
        return
    for (large, small), part in zip(pairwise(shapes), parts, strict=True):
        limit = widths.budget(part).limits["params"]
        assert all(one <= most for one, most in zip(small, large, strict=True))
        assert widths.costs("params", np.array([small], float))[0] <= limit
        steps = [8 if most >= 16 else 1 for most in full]
        every = list(product(*(sorted({*range(step, most + 1, step), most}) for step, most in zip(steps, large, strict=True))))
        costs = widths.costs("params", np.array(every, float))
        fitting = [shape for shape, cost in zip(every, costs, strict=True) if cost <= limit]
        best = max(map(prod, fitting))
        assert prod(small) == best
        equal = [shape for shape in fitting if prod(shape) == best]
        work = widths.costs("flops", np.array(equal, float))
        assert small == max(shape for shape, flops in zip(equal, work, strict=True) if flops == work.max())


LIMITS: tuple[dict[Kind, float], ...] = ({"params": 1.0}, {"params": 1.0, "flops": 0.9}, {"bytes": 1.0, "memory": 0.9})
"""What binds, each as a part of the full model's cost times the link's; the second of two binds, too."""


@pytest.mark.parametrize("limits", LIMITS, ids="-".join)
def test_many_widths_leave_no_step_and_no_random_shape_inside_the_next_larger_one_is_greater(
    limits: Mapping[Kind, float],
) -> None:
    config = {"intermediate_size": 48, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 4}
    widths = widths_of("vit:tiny", **config)
    whole = np.array([widths.whole], float)
    draw = np.random.default_rng(0)

    def budget(part: float, kinds: Iterable[Kind]) -> Budget:
        return Budget(**{f"max_{kind}": int(part * limits[kind] * widths.costs(kind, whole)[0]) for kind in kinds})  # type: ignore[arg-type]

    large = widths.whole
    for part in (0.8, 0.6):
        within = budget(part, limits)
        shape = widths.balanced(within, large)

        def fits(shapes: np.ndarray, within: Budget = within) -> np.ndarray:
            return np.all([widths.costs(kind, shapes) <= most for kind, most in within.limits.items()], axis=0)  # type: ignore[no-any-return]

        assert fits(np.array([shape], float))[0]
        assert len(limits) == 1 or widths.balanced(budget(part, list(limits)[:1]), large) != shape, "the second limit binds"
        pairs = list(enumerate(zip(shape, large, strict=True)))
        raised = [[*shape[:at], min(size + 8, most), *shape[at + 1 :]] for at, (size, most) in pairs if size < most]
        assert not fits(np.array(raised, float)).any()
        others = np.stack([8 * draw.integers(1, most // 8 + 1, 10_000) for most in large], 1).astype(float)
        assert fits(others).any()
        assert np.log(others[fits(others)]).sum(1).max() <= np.log(shape).sum() + 1e-9
        large = shape


def test_a_size_that_nobody_was_dealt_lies_between_those_that_some_were() -> None:
    server = widths_of("resnet18").server
    fleet = (1.0, 1 / 4, 1 / 16)
    large, middle, small = (sizes_at(server, size, fleet, "balanced") for size in (1 / 4, 1 / 8, 1 / 16))
    assert all(small[group] <= middle[group] <= large[group] for group in middle)
    assert middle not in (large, small)
    assert sizes_at(server, 1.0, fleet, "balanced") == widths_of("resnet18").sizes((64, 128, 256, 512))


def test_methods_that_cut_widths_take_balanced_and_given_shapes() -> None:
    server = resnet(16, 32).server
    devices = [Device(place, size, place, fleet=(1.0, 1 / 4)) for place, size in enumerate((1.0, 1 / 4))]
    for name in ("heterofl", "fedrolex", "federated-dropout", "smallest-for-all"):
        for shapes in ("balanced", {"1/4": [16, 8]}):
            method = method_of(name, shapes=shapes)
            method.refuse(server, devices)
            share = method.choose(server, 0, devices, 0)[1]
            assert share is not None
            held = server.layout.sizes_of(share.selection)
            expected = sizes_at(server, 1 / 4, (1.0, 1 / 4), shapes)
            assert {group: held[group] for group in expected} == expected
            served = method.serve(server, 1, devices)[1][0].shares[0].selection
            assert server.layout.sizes_of(served) == held


def test_the_scaler_divides_what_every_layer_gives_by_its_own_ratio() -> None:
    server = resnet(16, 32).server
    method = method_of("heterofl", shapes={"1/4": [16, 8]}, masked_loss=False)
    share = method.choose(server, 0, [Device(0, 1 / 4, fleet=(1.0, 1 / 4))], 0)[0]
    assert share is not None
    ratios = scaled_modules(server.layout, share.selection)
    assert ratios["stages.1.0.conv2"] == 8 / 32
    assert set(ratios.values()) == {8 / 32}, "maps that read the whole first stage are not scaled"
    learn = method.learn(server, share, share.selection, Client(ImageClassification(), server.tensors["head.bias"] > 0))
    assert learn.scaling is not None
    assert learn.scaling.factors == dict.fromkeys(ratios, 4.0)


def test_what_makes_no_shape_is_refused_in_words() -> None:
    server = resnet(16, 32).server
    devices = [Device(0, size, fleet=(1.0, 1 / 4)) for size in (1.0, 1 / 4)]
    with pytest.raises(RunError, match='"uniform", "balanced"'):
        method_of("heterofl", shapes="round").refuse(server, devices)
    with pytest.raises(RunError, match=r"not for 0\.25"):
        method_of("heterofl", shapes={"1/2": [8, 8]}).refuse(server, devices)
    with pytest.raises(RunError, match=r"does not fit; .* stages.0 16, stages.1 32"):
        method_of("heterofl", shapes={"1/4": [8, 64]}).refuse(server, devices)
    with pytest.raises(RunError, match="does not lie inside"):
        method_of("heterofl", shapes={"1": [8, 8], "1/4": [8, 16]}).refuse(server, devices)
    with pytest.raises(BudgetError, match="no shape fits"):
        resnet(16, 32).balanced(Budget(max_params=10))
    with pytest.raises(SpaceError, match="names no widths"):
        _ = Widths(with_exits(Labelled.of(tiny("vit")), (1,))).groups
    with pytest.raises(RunError, match="has no switch 'shapes'"):
        method_of("fiarse", shapes="balanced")


def test_a_chain_goes_from_large_to_small() -> None:
    widths = resnet(16, 32)
    whole = widths.cost.params(widths.server.layout.sizes)
    half, quarter = Budget(max_params=whole // 2), Budget(max_params=whole // 4)
    assert widths.chain([None, half, quarter])[0] == widths.whole
    with pytest.raises(BudgetError, match=r"params .* comes after"):
        widths.chain([None, quarter, half])
    with pytest.raises(BudgetError, match="are equal"):
        widths.chain([half, half])
    with pytest.raises(BudgetError, match="whole model comes after"):
        widths.chain([half, None])
    with pytest.raises(BudgetError, match="no shape fits"):
        widths.chain([half, Budget(max_params=50)])


def test_work_may_bind_beside_parameters() -> None:
    widths = resnet(16, 32)
    params = widths.budget(1 / 2)
    alone = widths.balanced(params)
    flops = widths.costs("flops", np.array([alone], dtype=float))[0]
    both = widths.balanced(Budget(max_params=params.max_params, max_flops=int(0.7 * flops)))
    assert widths.costs("flops", np.array([both], dtype=float))[0] <= 0.7 * flops
    assert np.prod(both) < np.prod(alone)


def test_widths_of_other_resnets_are_cut_by_the_same_rule() -> None:
    with torch.device("meta"):
        basic = Config(layer_type="basic", embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2])
        widths = Widths(Labelled.of(ResNetForImageClassification(basic)))
        bottlenecks = Widths(Labelled.of(ResNetForImageClassification(Config())))
        grouped = Widths(Labelled.of(ResNet(ResNetConfig(norm="group"))))
    assert widths.whole == (64, 128, 256, 512)
    assert widths.balanced(widths.budget(1 / 16)) == (64, 72, 72, 64)
    assert bottlenecks.whole == (64, 256, 512, 128, 1024, 256, 2048, 512), "what a bottleneck gives is a width of its own"
    assert grouped.balanced(grouped.budget(1 / 64)) == (4, 5, 4, 4), "groups of 8 channels: (32, 40, 32, 32)"


def test_a_width_is_never_less_than_its_groups_may_be() -> None:
    widths = Widths(Labelled.of(tiny("sam_vision_model")))
    found = widths.sizes(widths.balanced(widths.budget(0.8)))
    assert min(size for group, size in found.items() if group.endswith("qk")) >= 2
    Ranking().cut(widths.server.layout, found)


def test_filling_many_widths_ends_where_the_long_search_does() -> None:
    """Of six layers at a quarter: three keep 16 dimensions a head and three 8, which no trade between two widths finds."""
    config = ViTConfig(image_size=32, patch_size=4, hidden_size=192, num_hidden_layers=6, num_attention_heads=6)
    config.intermediate_size = 768
    with torch.device("meta"):
        widths = Widths(Labelled.of(ViTForImageClassification(config)))
    half = widths.balanced(widths.budget(1 / 2))
    found = widths.balanced(widths.budget(1 / 4), half)
    assert found == (16, 16, 16, 8, 8, 8, 136, 136, 136, 136, 128, 128)
