"""Batch norms as kernels, run by Triton's interpreter on the CPU: `make test-kernels`."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from methods.runs import plan_of
from raffm.rounds.local import Local
from raffm.simulate.lane import Lane
from raffm.simulate.sheet import Style
from simulate.test_lane import LABELS, learn_of, run

if os.environ.get("TRITON_INTERPRET") != "1":  # it must be so before anything imports Triton
    pytest.skip("run by `make test-kernels`", allow_module_level=True)


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(st.integers(3, 9), st.integers(1, 150), st.integers(2, 9), st.integers(2, 9)),
    st.integers(0, 4),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(["plain", "rectified", "added"]),
    st.integers(0, 1 << 20),
)
def test_images_are_normalised_as_torch_does(
    shape: tuple[int, ...], rows: int, dtype: torch.dtype, kind: str, seed: int
) -> None:
    """Against float64; with tables of weights and biases the first rows count, and the others have gradients of 0."""
    from raffm.simulate.norms import normalise

    draw = torch.Generator().manual_seed(seed)
    images = (torch.randn(shape, generator=draw) * 2 + 3).to(dtype).contiguous(memory_format=torch.channels_last)
    size = (rows, shape[1]) if rows else (shape[1],)
    weight, bias, beside, given_back = (torch.randn(each, generator=draw) for each in (size, size, shape, shape))
    given = [images, weight, bias, beside.to(dtype)][: 4 if kind == "added" else 3]
    mine, exact = (
        [tensor.to(to).clone().requires_grad_() for tensor, to in zip(given, kinds, strict=True)]
        for kinds in ([tensor.dtype for tensor in given], [torch.float64] * len(given))
    )
    found = normalise(*mine[:3], 1e-5, kind != "plain", *mine[3:])
    first = [table[0] if rows else table for table in exact[1:3]]
    expected = functional.batch_norm(exact[0], None, None, *first, training=True, momentum=0.0, eps=1e-5)
    expected = expected + exact[3] if kind == "added" else expected
    near = expected.detach().abs() < 0.05  # rounding may put these on the other side of 0
    given_back[near] = 0
    expected = expected if kind == "plain" else functional.relu(expected)
    assert found.dtype == dtype
    gradients = torch.autograd.grad(found, mine, given_back.to(dtype))
    wanted = torch.autograd.grad(expected, exact, given_back.to(dtype).double())
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for one, other in zip((found, *gradients), (expected, *wanted), strict=True):
        scale = other.abs().max().clamp_min(1.0)
        assert (one.double() - other).abs().max() <= tolerance * scale
    assert all(not bool(gradient[1:].any()) for gradient in gradients[1:3] if rows)


def test_a_step_of_nested_is_the_same_with_these_norms() -> None:
    from raffm.simulate.norms import normalise

    local = Local("sgd", lr=0.05, batch=5, steps=2)
    plan = plan_of("raffm_resnet", "nested", "1, 1/4", labels=LABELS, local=local)
    order = next(order for order in plan.orders(0, range(4)) if order.share.inner)
    held, learn = learn_of(plan, order)
    lane = Lane(plan, order, learn, Style(channels_last=True))
    plain = {name: tensor.clone() for name, tensor in run(lane, order, held, learn).items()}
    for sheet in lane.sheets:
        sheet.passes = replace(sheet.passes, normalise=normalise)
    for name, tensor in run(lane, order, held, learn).items():
        assert torch.allclose(tensor, plain[name], atol=1e-5, rtol=1e-4), name
