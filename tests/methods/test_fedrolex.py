"""FedRolex: windows that roll on by one index a round."""

from fractions import Fraction
from math import ceil, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from families.cases import logits, named
from methods.runs import FAMILIES, labelled, module_of, plan_of, rounds_of
from raffm.algebra.move import permute
from raffm.methods import method_of
from raffm.methods.fedrolex import rolled, rounds_apart
from raffm.methods.method import Device
from raffm.methods.widths import width_groups
from raffm.models.labelled import Labelled
from raffm.models.load import trainable
from raffm.rounds.plan import Merging

SERVERS = {family: labelled(family) for family in FAMILIES}
INPUTS = {"raffm_resnet": named("resnet-cifar"), "vit": named("vit"), "bert": named("bert")}

rounds = st.integers(0, 200)
sizes = st.sampled_from([0.64, 0.36, 1 / 4, 0.16, 1 / 16, 1 / 64, 0.5, 0.9])


def windows(server: Labelled, round: int, *given: float) -> list[dict[str, list[int]]]:
    """For every size, the indices that a round keeps of every width; of a head's, those of the first head."""
    shares = method_of("fedrolex").choose(server, round, [Device(0, size) for size in given], 0)
    kept = [share.selection.kept for share in shares]

    def indices(name: str, part: Tensor | None) -> list[int]:
        if part is None:
            return list(range(server.layout.sizes[name]))
        return (part if part.dim() == 1 else part[0]).tolist()

    return [{name: indices(name, one.get(name)) for name in width_groups(server.layout)} for one in kept]


@settings(max_examples=20)
@given(family=st.sampled_from(FAMILIES), round=rounds, size=sizes)
def test_a_window_is_ceil_k_s_indices_that_follow_each_other_modulo_k(family: str, round: int, size: float) -> None:
    """Invariant 18; in every head alike (invariant 21)."""
    server = SERVERS[family]
    (found,) = windows(server, round, size)
    for name, window in found.items():
        full = server.layout.sizes[name]
        count = ceil(full * sqrt(size) - 1e-9)
        assert window == sorted((round + place) % full for place in range(count)), name
        assert window == windows(server, round + full, size)[0][name]
    (share,) = method_of("fedrolex").choose(server, round, [Device(0, size)], 0)
    for name, kept in share.selection.kept.items():
        assert kept.dim() == 1 or bool((kept == kept[0]).all()), name


@settings(max_examples=12)
@given(family=st.sampled_from(FAMILIES), begin=rounds, size=sizes)
def test_over_k_rounds_every_index_is_kept_as_often_and_all_are_after_k_minus_n_plus_1(
    family: str, begin: int, size: float
) -> None:
    """Invariant 19."""
    server = SERVERS[family]
    longest = max(server.layout.sizes[name] for name in width_groups(server.layout))
    found = [windows(server, begin + round, size)[0] for round in range(longest)]
    for name in width_groups(server.layout):
        full, count = server.layout.sizes[name], len(found[0][name])
        times = [sum(index in found[round][name] for round in range(full)) for index in range(full)]
        assert times == [count] * full
        covered = {index for round in range(full - count + 1) for index in found[round][name]}
        assert covered == set(range(full))


@settings(max_examples=15)
@given(family=st.sampled_from(FAMILIES), round=rounds, first=sizes, second=sizes)
def test_windows_of_one_round_are_nested_and_equal_widths_share_them(
    family: str, round: int, first: float, second: float
) -> None:
    """Invariant 20."""
    server = SERVERS[family]
    small, large = windows(server, round, min(first, second), max(first, second))
    by_size: dict[int, set[tuple[int, ...]]] = {}
    for name, window in small.items():
        assert set(window) <= set(large[name])
        by_size.setdefault(server.layout.sizes[name], set()).add(tuple(window))
    assert all(len(shared) == 1 for shared in by_size.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_at_full_rate_every_round_gives_the_servers_own_function(family: str) -> None:
    """Invariants 1 and 21."""
    server = SERVERS[family]
    plan = plan_of(family, "fedrolex", server=server)
    inputs = INPUTS[family].inputs(server.model)
    expected = logits(server.model.eval(), inputs)
    for round in range(26):
        (share,) = plan.method.choose(server, round, [Device(0, 1.0)], 0)
        assert share.selection.is_everything
        if round < 3:
            assert torch.equal(logits(module_of(plan, share).eval(), inputs), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_rolling_all_indices_of_the_server_leaves_its_function_at_every_round(family: str) -> None:
    """Invariants 1 and 21, of the order itself: all widths, queries and keys inside every head, within 1e-5."""
    server = SERVERS[family]
    inputs = INPUTS[family].inputs(server.model)
    expected = logits(server.model.eval(), inputs)
    before = {name: tensor.detach().clone() for name, tensor in server.tensors.items()}
    try:
        for round in range(1, 25):
            moved = permute(before, server.layout, rolled(server.layout, round))
            with torch.no_grad():
                for name, tensor in server.tensors.items():
                    tensor.copy_(moved[name])
            assert torch.allclose(logits(server.model, inputs), expected, atol=1e-5, rtol=1e-5), round
            query = next((name for name in before if name.endswith(("q_proj.weight", "query.weight"))), None)
            assert query is None or round % 4 == 0 or not torch.equal(server.tensors[query], before[query])
    finally:
        with torch.no_grad():
            for name, tensor in server.tensors.items():
                tensor.copy_(before[name])


@pytest.mark.parametrize("weighting", ["equal", "examples"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_mean_does_not_depend_on_the_order_of_clients(family: str, weighting: str) -> None:
    """Invariant 22."""
    plans = [plan_of(family, "fedrolex", "1, 1/4, 1/16", merging=Merging(weighting)) for _ in range(2)]  # type: ignore[arg-type]
    rounds_of(plans[0], [0, 1, 2, 3])
    rounds_of(plans[1], [2, 3, 1, 0])
    for name, tensor in plans[0].server.tensors.items():
        assert torch.allclose(tensor, plans[1].server.tensors[name], rtol=1e-6, atol=1e-6), name


@given(st.sets(st.integers(1, 96), min_size=1, max_size=4), st.integers(2, 5))
def test_served_windows_lie_as_far_apart_as_rounds_allow(widths: set[int], windows: int) -> None:
    def gap(rounds: int) -> Fraction:
        ahead = [(width, later * rounds % width) for width in widths for later in range(1, windows)]
        return min(Fraction(min(far, width - far), width) for width, far in ahead)

    found = rounds_apart(frozenset(widths), windows)
    assert gap(found) == max(map(gap, range(1, max(widths) + 1)))
    if len(widths) == 1:
        assert gap(found) == Fraction(max(widths) // windows, max(widths))


def test_served_windows_differ_in_every_width_and_the_prefix_is_the_first() -> None:
    server = Labelled.of(trainable("resnet18", "image", 10, (3, 32, 32)))
    ((prefix, several),) = method_of("fedrolex").serve(server, 5, [Device(-1, 1 / 16)])
    assert (prefix.view, several.view) == ("prefix", "windows")
    for group in width_groups(server.layout):
        assert len({share.selection.kept[group].tolist()[0] for share in several.shares}) > 1, group
        assert len({tuple(share.selection.kept[group].tolist()) for share in several.shares}) == 4, group
    assert prefix.shares == several.shares[:1]
    ((whole,),) = method_of("fedrolex").serve(server, 5, [Device(-1, 1)])
    assert (whole.view, len(whole.shares)) == ("", 1)
    assert whole.shares[0].selection.is_everything
