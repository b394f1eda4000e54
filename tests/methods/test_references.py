"""Federated Dropout, and the reference lines that every comparison carries."""

from dataclasses import replace

import pytest
import torch

from methods.runs import ALL, FAMILIES, labelled, plan_of, rounds_of, run, same_bits, snapshot
from raffm.algebra.ranking import Ranking
from raffm.devices.budget import Budget
from raffm.devices.fleet import Fleet, Tier
from raffm.errors import RunError
from raffm.methods import method_of
from raffm.methods.method import Device
from raffm.methods.widths import cut_share, width_groups, width_sizes
from raffm.rounds.plan import Merging
from raffm.simulate.pooled import Pooled

# -- federated dropout ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0.5, 1 / 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_keeps_as_many_indices_as_heterofl_inside_every_head(family: str, size: float) -> None:
    server = labelled(family)
    (share,) = method_of("federated-dropout").choose(server, 3, [Device(7, size)], 0)
    expected = cut_share(server, Ranking(), size)
    assert server.layout.sizes_of(share.selection) == server.layout.sizes_of(expected.selection)
    assert share.selection != expected.selection
    for name in width_groups(server.layout):
        base = server.layout.bases.get(name)
        if base is not None and name in share.selection.kept:
            assert len(share.selection.kept[name]) == server.layout.groups[base].size


def test_dropout_draws_for_every_client_and_round_and_repeats_itself() -> None:
    server = labelled("vit")
    method = method_of("federated-dropout")
    devices = [Device(client, 1 / 4) for client in range(4)]
    first, again, later = (method.choose(server, round, devices, 0) for round in (0, 0, 1))
    other = method.choose(server, 0, devices[::-1], 0)[::-1]
    assert first == again == other  # in any order of calls
    assert len({*first, *later}) == 8
    assert method.choose(server, 0, devices, 1) != first


def test_dropout_trains_every_index_as_often_in_the_mean() -> None:
    server = labelled("raffm_resnet")
    method = method_of("federated-dropout")
    group = width_groups(server.layout)[0]
    shares = method.choose(server, 0, [Device(client, 1 / 4) for client in range(400)], 0)
    counts = torch.bincount(torch.cat([share.selection.kept[group] for share in shares]))
    expected = 400 * width_sizes(server.layout, 0.5)[group] / server.layout.groups[group].size
    assert (counts - expected).abs().max() < 5 * expected**0.5


# -- reference lines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_only_those_who_hold_the_whole_model_train_it(family: str) -> None:
    plan = plan_of(family, "fedavg-capable", "1:1, 1/4:1", rounds=2, labels=[ALL, ALL * 2, ALL, ALL])
    capable = {client for client in range(4) if plan.tier_of(client, 0).size == 1}
    assert 0 < len(capable) < 4
    results = run(plan)
    assert all(set(entry.clients) == capable for entry in results.rounds)
    alone = plan_of(family, "fedavg", rounds=2, labels=[ALL, ALL * 2, ALL, ALL])
    rounds_of(alone, sorted(capable, key=list(plan.cohort(0).present).index))
    for name, tensor in alone.server.tensors.items():
        torch.testing.assert_close(plan.server.tensors[name], tensor, rtol=1e-4, atol=1e-6)


def test_a_round_without_capable_clients_changes_nothing() -> None:
    plan = plan_of("vit", "fedavg-capable", "1:1, 1/4:3")
    weak = [client for client in range(4) if plan.tier_of(client, 0).size < 1]
    before = snapshot(plan.server)
    assert plan.orders(0, weak) == []
    rounds_of(plan, weak)
    assert all(same_bits(tensor, before[name]) for name, tensor in plan.server.tensors.items())


def test_a_fleet_in_which_nobody_holds_the_whole_model_is_refused() -> None:
    with pytest.raises(RunError, match="size 1, but the fleet has none"):
        plan_of("vit", "fedavg-capable", "1/2, 1/4")


def test_a_fleet_whose_few_full_devices_nobody_was_dealt_is_refused_too() -> None:
    with pytest.raises(RunError, match="size 1, but the fleet has none"):
        plan_of("vit", "fedavg-capable", "1:1, 1/4:9")


@pytest.mark.parametrize("name", ["heterofl", "smallest-for-all", "fiarse"])
def test_limits_that_a_method_does_not_read_are_refused(name: str) -> None:
    fleet = Fleet((Tier(1.0), Tier(0.5, budget=Budget(max_params=4000))))
    with pytest.raises(RunError, match=f"{name} cuts by size and does not read limits"):
        replace(plan_of("vit", name), fleet=fleet)


@pytest.mark.parametrize("family", FAMILIES)
def test_everybody_trains_the_smallest_model_and_nothing_else_moves(family: str) -> None:
    plan = plan_of(family, "smallest-for-all", "1, 1/4, 1/16", rounds=2)
    before = snapshot(plan.server)
    smallest = cut_share(plan.server, Ranking(), 1 / 16).selection
    assert {order.share.selection for order in plan.orders(0, range(4))} == {smallest}
    results = run(plan)
    for name in plan.server.layout.tensors("parameter"):
        held = smallest.coverage(plan.server.layout, name)
        assert same_bits(plan.server.tensors[name][~held], before[name][~held]), name
    sizes = {size.name: size.params for size in results.sizes}
    assert set(sizes) == {"1", "1/4", "1/16"}
    assert set(sizes.values()) == {plan.server.layout.count(smallest)}


# -- merging by the median -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "heterofl", "fiarse", "raffm"])
def test_any_method_can_be_merged_by_the_median(name: str) -> None:
    moved = []
    for combine in ("mean", "median"):
        plan = plan_of("raffm_resnet", name, "1, 1/4", merging=Merging(combine=combine), rounds=2)
        before = snapshot(plan.server)
        results = run(plan)
        assert not any(entry.refused for entry in results.rounds)
        moved.append(snapshot(plan.server))
        assert any(not torch.equal(before[key], tensor) for key, tensor in moved[-1].items())
    assert any(not torch.equal(moved[0][key], tensor) for key, tensor in moved[1].items())


def test_the_median_is_not_for_workers_that_send_sums() -> None:
    plan = plan_of("vit", "fedavg", merging=Merging(combine="median"))
    with pytest.raises(RunError, match="Use the serial backend"):
        Pooled(plan, 2)
    with pytest.raises(RunError, match="mean or median"):
        Merging(combine="mode")
