"""Aggregation: every law of a counted mean, against an oracle of plain loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laws import oracle
from laws.oracle import Client, assert_same_bits
from laws.strategies import World, cuts, seeds, weights, worlds
from raffm.algebra.layout import Layout
from raffm.algebra.mask import Mask
from raffm.algebra.move import extract
from raffm.algebra.selection import Selection
from raffm.algebra.tally import FOLD, Tally
from raffm.errors import UpdateError


def saved(world: World, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random values of all tensors that take part in updates."""
    tensors = world.values(seed, dtype)
    return {name: tensors[name] for name in world.names("parameter", "buffer")}


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def trained(tensors: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The same tensors after some training; counters move on, some elements stay."""
    random = torch.Generator().manual_seed(seed)
    after = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            moved = (tensor + torch.randn(tensor.shape, generator=random)).to(tensor.dtype)
            after[name] = torch.where(torch.rand(tensor.shape, generator=random) < 0.2, tensor, moved)
        else:
            after[name] = tensor + torch.randint(0, 5, (), generator=random)
    return after


def client(layout: Layout, server: Mapping[str, Tensor], kept: dict, weight: float, seed: int) -> Client:
    return Client(trained(extract(server, layout, layout.select(kept)), seed), kept, weight)


@st.composite
def cohorts(draw: st.DrawFn, world: World, layout: Layout, server: Mapping[str, Tensor], most: int = 5) -> list[Client]:
    """Some clients of some sizes, several of one size among them, in any order."""
    pool = draw(st.lists(cuts(world), min_size=1, max_size=3))
    drawn = draw(st.lists(st.tuples(st.sampled_from(pool), weights, seeds), min_size=1, max_size=most))
    return [client(layout, server, *one) for one in drawn]


def add(tally: Tally, layout: Layout, one: Client) -> None:
    held = layout.select(one.kept) if one.masks is None else Mask(one.masks)
    tally.add(one.update, held, one.weight)


def tallied(layout: Layout, server: Mapping[str, Tensor], clients: Sequence[Client]) -> dict[str, Tensor]:
    """The server after one round."""
    after = copied(server)
    tally = Tally(layout, after)
    for one in clients:
        add(tally, layout, one)
    tally.step()
    return after


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, object], tolerance: float = 2e-6) -> None:
    assert set(found) == set(expected)
    for name, tensor in found.items():
        array = np.asarray(expected[name], dtype=float)
        np.testing.assert_allclose(tensor.to(torch.float64).numpy(), array, rtol=tolerance, atol=tolerance, err_msg=name)


def assert_unchanged_elsewhere(
    world: World, found: Mapping[str, Tensor], server: Mapping[str, Tensor], kept: list[dict]
) -> None:
    for name, tensor in server.items():
        if tensor.is_floating_point():
            covered = np.logical_or.reduce([oracle.coverage(world, name, one) for one in kept])
            untouched = ~torch.from_numpy(np.asarray(covered))
            bits = {"now": found[name][untouched].clone(), "before": tensor[untouched].clone()}
            assert_same_bits({name: bits["now"]}, {name: bits["before"]})


# -- the invariants ------------------------------------------------------------------------------------------------


@given(st.data(), worlds(), seeds, st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_clients_that_change_nothing_change_nothing(data: st.DataObject, world: World, seed: int, dtype: torch.dtype) -> None:
    layout, server = world.layout(), saved(world, seed, dtype)
    drawn = data.draw(st.lists(st.tuples(cuts(world), weights), min_size=1, max_size=4))
    idle = [Client(extract(server, layout, layout.select(kept)), kept, weight) for kept, weight in drawn]
    assert_same_bits(tallied(layout, server, idle), server)


@given(worlds(), seeds)
def test_a_round_without_clients_changes_nothing(world: World, seed: int) -> None:
    server = saved(world, seed)
    assert_same_bits(tallied(world.layout(), server, []), server)


@given(st.data(), worlds(), seeds)
def test_identical_updates_arrive_where_somebody_held_them(data: st.DataObject, world: World, seed: int) -> None:
    layout, server = world.layout(), saved(world, seed)
    goal = trained(server, seed + 1)
    drawn = data.draw(st.lists(st.tuples(cuts(world), weights), min_size=1, max_size=4))
    clients = [Client(extract(goal, layout, layout.select(kept)), kept, weight) for kept, weight in drawn]
    after = tallied(layout, server, clients)
    for name in server:
        covered = np.logical_or.reduce([oracle.coverage(world, name, kept) for kept, _ in drawn])
        if server[name].is_floating_point():
            expected = np.where(covered, goal[name].numpy(), server[name].numpy())
            np.testing.assert_allclose(after[name].numpy(), expected, rtol=1e-6, atol=1e-6, err_msg=name)
    assert_unchanged_elsewhere(world, after, server, [kept for kept, _ in drawn])


@given(st.data(), worlds(), seeds, weights)
def test_one_client_alone_leaves_its_values(data: st.DataObject, world: World, seed: int, weight: float) -> None:
    layout, server = world.layout(), saved(world, seed)
    only = client(layout, server, data.draw(cuts(world)), weight, seed)
    after = tallied(layout, server, [only])
    part = extract(after, layout, layout.select(only.kept))
    values = {name: tensor for name, tensor in only.update.items() if tensor.is_floating_point()}
    assert_close({name: part[name] for name in values}, values, 1e-6)
    assert_unchanged_elsewhere(world, after, server, [only.kept])


@given(st.integers(1, 4), st.integers(1, 4), seeds, weights, weights)
def test_disjoint_clients_leave_their_union(first: int, second: int, seed: int, one: float, other: float) -> None:
    world = World()
    world.group("n", first + second)
    world.tensor("w", "n", 3)
    layout, server = world.layout(), saved(world, seed)
    low = client(layout, server, {"n": list(range(first))}, one, seed + 1)
    high = client(layout, server, {"n": list(range(first, first + second))}, other, seed + 2)
    expected = torch.cat([low.update["w"], high.update["w"]])
    assert_close(tallied(layout, server, [low, high]), {"w": expected.numpy()}, 1e-6)


@given(st.data(), worlds(), seeds)
def test_streaming_equals_the_batch_oracle(data: st.DataObject, world: World, seed: int) -> None:
    layout, server = world.layout(), saved(world, seed)
    before = copied(server)
    clients = data.draw(cohorts(world, layout, server))
    sent_back = [copied(one.update) for one in clients]
    after = tallied(layout, server, clients)
    assert_close(after, oracle.merged(world, server, clients))
    assert_unchanged_elsewhere(world, after, server, [one.kept for one in clients])
    assert_same_bits(server, before)
    for one, update in zip(clients, sent_back, strict=True):
        assert_same_bits(one.update, update)


@given(st.data(), worlds(), seeds)
def test_the_order_of_arrival_changes_nothing(data: st.DataObject, world: World, seed: int) -> None:
    layout, server = world.layout(), saved(world, seed)
    clients = data.draw(cohorts(world, layout, server))
    shuffled = data.draw(st.permutations(clients))
    assert_close(tallied(layout, server, shuffled), {k: v.numpy() for k, v in tallied(layout, server, clients).items()}, 1e-6)


@given(st.data(), worlds(), seeds)
def test_doubling_a_weight_equals_listing_the_client_twice(data: st.DataObject, world: World, seed: int) -> None:
    layout, server = world.layout(), saved(world, seed)
    clients = data.draw(cohorts(world, layout, server))
    chosen = data.draw(st.sampled_from(clients))
    rest = [one for one in clients if one is not chosen]
    double = Client(chosen.update, chosen.kept, 2 * chosen.weight)
    twice = tallied(layout, server, [chosen, *rest, chosen])
    assert_close(tallied(layout, server, [*rest, double]), {name: tensor.numpy() for name, tensor in twice.items()}, 1e-6)


@given(st.data(), worlds(), seeds)
def test_a_client_of_weight_zero_is_absent(data: st.DataObject, world: World, seed: int) -> None:
    layout, server = world.layout(), saved(world, seed)
    clients = data.draw(cohorts(world, layout, server))
    nobody = client(layout, server, data.draw(cuts(world)), 0.0, seed)
    place = data.draw(st.integers(0, len(clients)))
    with_nobody = [*clients[:place], nobody, *clients[place:]]
    assert_same_bits(tallied(layout, server, with_nobody), tallied(layout, server, clients))


@given(st.data(), worlds(), seeds)
def test_full_clients_are_averaged_as_in_fedavg(data: st.DataObject, world: World, seed: int) -> None:
    layout, server = world.layout(), saved(world, seed)
    drawn = data.draw(st.lists(st.tuples(weights, seeds), min_size=1, max_size=4))
    clients = [client(layout, server, {}, weight, number) for weight, number in drawn]
    after = tallied(layout, server, clients)
    for name, tensor in after.items():
        if tensor.is_floating_point():
            updates = np.stack([one.update[name].numpy() for one in clients])
            mean = np.average(updates, axis=0, weights=[one.weight for one in clients])
            np.testing.assert_allclose(tensor.numpy(), mean, rtol=1e-6, atol=2e-6, err_msg=name)


@given(st.data(), worlds(), seeds)
def test_counters_take_the_largest_value_and_other_integers_stay(data: st.DataObject, world: World, seed: int) -> None:
    world.tensor("counter", kind="buffer", dtype=torch.int64)
    world.tensor("table", 2, "residual", kind="buffer", dtype=torch.int64)
    layout, server = world.layout(), saved(world, seed)
    clients = data.draw(cohorts(world, layout, server))
    after = tallied(layout, server, clients)
    assert after["counter"].item() == max(server["counter"].item(), *(one.update["counter"].item() for one in clients))
    assert torch.equal(after["table"], server["table"])
    assert after["counter"].dtype == torch.int64
    low = [Client({**one.update, "counter": torch.tensor(-1)}, one.kept, one.weight) for one in clients]
    assert tallied(layout, server, low)["counter"] == server["counter"], "a counter never goes back"


@given(st.data(), worlds(), seeds)
def test_a_half_precision_server_is_summed_in_float32_and_keeps_its_type(data: st.DataObject, world: World, seed: int) -> None:
    layout, server = world.layout(), saved(world, seed, torch.bfloat16)
    clients = data.draw(cohorts(world, layout, server))
    after = tallied(layout, server, clients)
    exact = oracle.merged(world, server, clients)
    for name, tensor in after.items():
        assert tensor.dtype == server[name].dtype
        if tensor.is_floating_point():
            rounded = torch.from_numpy(np.asarray(exact[name])).to(torch.bfloat16)
            torch.testing.assert_close(tensor, rounded, rtol=2**-8, atol=1e-6)


@given(st.data(), worlds(), seeds)
def test_a_double_precision_server_is_summed_in_double_precision(data: st.DataObject, world: World, seed: int) -> None:
    layout, server = world.layout(), saved(world, seed, torch.float64)
    clients = data.draw(cohorts(world, layout, server))
    assert_close(tallied(layout, server, clients), oracle.merged(world, server, clients), 1e-12)


@settings(max_examples=20)
@given(st.data(), worlds(), seeds, st.integers(FOLD, FOLD + 6))
def test_more_selections_than_are_remembered_are_tallied_all_the_same(
    data: st.DataObject, world: World, seed: int, count: int
) -> None:
    world.group("wide", 16)
    world.tensor("wide", "wide", "residual")
    layout, server = world.layout(), saved(world, seed)
    random = Random(seed)
    clients = []
    for number in range(count):
        kept = data.draw(cuts(world)) if number % 4 == 0 else dict(random.choice(clients).kept)
        kept["wide"] = random.sample(range(16), 5)
        clients.append(client(layout, server, kept, random.choice([0.5, 1.0, 3.0]), seed + number))
    clients += random.sample(clients, 3)
    assert len({layout.select(one.kept) for one in clients}) >= min(FOLD, count - 1)
    assert_close(tallied(layout, server, clients), oracle.merged(world, server, clients))


@pytest.mark.parametrize("first_deep", range(FOLD + 4))
def test_a_block_may_be_held_for_the_first_time_by_any_client(first_deep: int) -> None:
    """The clients before `first_deep` drop the second block, the others hold it."""
    world = World()
    world.group("wide", 16)
    world.group("layers", 2, told=2, path="layers")
    world.tensor("wide", "wide")
    for index in range(2):
        world.group(f"layers.{index}.n", 3)
        world.tensor(f"layers.{index}.w", f"layers.{index}.n", guard=("layers", index))
    layout, server = world.layout(), saved(world, 0)
    kept = [{"wide": [number, number + 1]} | ({"layers": [0]} if number < first_deep else {}) for number in range(FOLD + 4)]
    clients = [client(layout, server, one, 1.0 + number, number) for number, one in enumerate(kept)]
    assert_close(tallied(layout, server, clients), oracle.merged(world, server, clients))


@given(seeds, weights, weights)
def test_clients_without_a_common_block_are_averaged_in_what_serves_the_stack(seed: int, one: float, other: float) -> None:
    world = World()
    world.group("layers", 2, told=2, path="layers")
    world.group("heads", 3)
    world.tensor("layers.0.table", "heads", stack="layers")
    for index in range(2):
        world.tensor(f"layers.{index}.w", "heads", guard=("layers", index))
    layout, server = world.layout(), saved(world, seed)
    first = client(layout, server, {"layers": [0], "heads": [0, 1]}, one, seed)
    second = client(layout, server, {"layers": [1], "heads": [1, 2]}, other, seed + 1)
    (a, b), (c, d) = first.update["layers.0.table"], second.update["layers.0.table"]
    after = tallied(layout, server, [first, second])
    assert_close(after, oracle.merged(world, server, [first, second]))
    torch.testing.assert_close(after["layers.0.table"], torch.stack([a, (one * b + other * c) / (one + other), d]))


@settings(max_examples=30)
@given(st.data(), worlds(), seeds)
def test_a_selection_that_comes_back_is_added_to_what_it_brought_before(data: st.DataObject, world: World, seed: int) -> None:
    layout, server = world.layout(), saved(world, seed)
    first, second = data.draw(cuts(world)), data.draw(cuts(world))
    order = [first, second, first, first, second, second, first]
    clients = [client(layout, server, kept, 1.0 + number, seed + number) for number, kept in enumerate(order)]
    assert_close(tallied(layout, server, clients), oracle.merged(world, server, clients))


@settings(max_examples=25)
@given(st.data(), worlds(), seeds)
def test_a_tally_may_be_used_round_after_round(data: st.DataObject, world: World, seed: int) -> None:
    layout, server = world.layout(), saved(world, seed)
    once, again = copied(server), copied(server)
    tally = Tally(layout, once)
    for _ in range(3):
        clients = data.draw(cohorts(world, layout, once, most=3))
        for one in clients:
            add(tally, layout, one)
        tally.step()
        again = tallied(layout, again, clients)
        assert_same_bits(once, again)
        tally.step()
        assert_same_bits(once, again)


@given(st.data(), worlds(), seeds)
def test_changes_are_the_mean_change_and_the_weight_over_every_element(data: st.DataObject, world: World, seed: int) -> None:
    layout, server = world.layout(), saved(world, seed)
    before = copied(server)
    clients = data.draw(cohorts(world, layout, server))
    tally = Tally(layout, server)
    for one in clients:
        add(tally, layout, one)
    changes = tally.changes()
    after = oracle.merged(world, server, clients)
    held = [name for name in server if any(world.is_alive(world.tensors[name].guard, one.kept) for one in clients)]
    assert set(changes) == {name for name in held if server[name].is_floating_point()}
    for name, change in changes.items():
        expected = np.zeros(world.shape(name))
        for one in clients:
            expected += one.weight * oracle.coverage(world, name, one.kept)
        found = change.coverage.expand(change.mean.shape).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(change.mean.numpy(), after[name] - server[name].numpy(), rtol=1e-5, atol=2e-6, err_msg=name)
        assert change.mean.shape == server[name].shape
    assert tally.changes() == {}, "changes are read once"
    assert_same_bits(server, before)


@given(st.data(), worlds(), seeds)
def test_a_change_is_counted_from_what_was_sent(data: st.DataObject, world: World, seed: int) -> None:
    """A client that started from older values moves the server by as much as it moved itself."""
    layout, server, old = world.layout(), saved(world, seed), saved(world, seed + 1)
    kept = data.draw(cuts(world))
    selection = layout.select(kept)
    sent = extract(old, layout, selection)
    update = trained(sent, seed)
    after = copied(server)
    tally = Tally(layout, after)
    for _ in range(2):
        tally.add(update, selection, 2.0, sent=sent)
    tally.step()
    for name in server:
        if server[name].is_floating_point() and world.is_alive(world.tensors[name].guard, kept):
            inner = world.name_after(name, kept)
            expected = server[name].numpy().copy()
            expected[oracle.index_of(world, name, kept)] += update[inner].numpy() - sent[inner].numpy()
            np.testing.assert_allclose(after[name].numpy(), expected, rtol=1e-5, atol=1e-6, err_msg=name)
    idle = copied(server)
    tally = Tally(layout, idle)
    tally.add(sent, selection, sent=sent)
    tally.step()
    floating = {name: tensor for name, tensor in idle.items() if tensor.is_floating_point()}
    assert_same_bits(floating, {name: server[name] for name in floating})


# -- masks ---------------------------------------------------------------------------------------------------------


def masked(world: World, server: Mapping[str, Tensor], weight: float, seed: int) -> Client:
    """A client that held random elements of most tensors, and the others whole."""
    random = torch.Generator().manual_seed(seed)
    masks = {
        name: torch.rand(tensor.shape, generator=random) < 0.6
        for name, tensor in server.items()
        if tensor.is_floating_point() and torch.rand((), generator=random) < 0.8
    }
    return Client(trained(server, seed), {}, weight, masks)


@given(st.data(), worlds(), seeds)
def test_masks_and_selections_may_be_mixed(data: st.DataObject, world: World, seed: int) -> None:
    layout, server = world.layout(), saved(world, seed)
    clients = data.draw(cohorts(world, layout, server, most=3))
    hidden = [masked(world, server, weight, seed + weight) for weight in (1, 3)]
    mixed = data.draw(st.permutations([*clients, *hidden]))
    after = tallied(layout, server, mixed)
    assert_close(after, oracle.merged(world, server, mixed))
    for mask in hidden[0].masks or {}:
        nobody = ~(torch.stack([(one.masks or {}).get(mask, torch.ones_like(server[mask]) > 0) for one in hidden]).any(0))
        for one in clients:
            nobody &= ~torch.from_numpy(np.asarray(oracle.coverage(world, mask, one.kept)))
        assert_same_bits({mask: after[mask][nobody].clone()}, {mask: server[mask][nobody].clone()})


@given(worlds(), seeds)
def test_masks_alone_are_averaged_over_those_who_held_an_element(world: World, seed: int) -> None:
    layout, server = world.layout(), saved(world, seed)
    clients = [masked(world, server, weight, seed + weight) for weight in (1, 2, 5)]
    assert_close(tallied(layout, server, clients), oracle.merged(world, server, clients))


@given(worlds(), seeds)
def test_a_mask_of_everything_equals_the_selection_of_everything(world: World, seed: int) -> None:
    layout, server = world.layout(), saved(world, seed)
    clients = [client(layout, server, {}, weight, seed) for weight in (1.0, 2.0)]
    hidden = [Client(one.update, {}, one.weight, {}) for one in clients]
    plain = tallied(layout, server, clients)
    assert_close(tallied(layout, server, hidden), {name: tensor.numpy() for name, tensor in plain.items()}, 1e-6)


@given(worlds(), seeds)
def test_masked_clients_that_change_nothing_change_nothing(world: World, seed: int) -> None:
    layout, server = world.layout(), saved(world, seed)
    idle = [Client(server, {}, 2.0, masked(world, server, 1.0, seed).masks) for _ in range(2)]
    assert_same_bits(tallied(layout, server, idle), server)


@given(worlds(), seeds)
def test_a_masked_change_is_counted_from_what_was_sent(world: World, seed: int) -> None:
    layout, server, old = world.layout(), saved(world, seed), saved(world, seed + 1)
    one = masked(world, old, 2.0, seed)
    after = copied(server)
    tally = Tally(layout, after)
    tally.add(one.update, Mask(one.masks or {}), sent=old)
    tally.step()
    for name, tensor in server.items():
        if tensor.is_floating_point():
            held = (one.masks or {}).get(name, torch.ones_like(tensor) > 0)
            expected = tensor + (one.update[name] - old[name]) * held
            torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-6)


# -- refused updates -----------------------------------------------------------------------------------------------


def spoiled(update: Mapping[str, Tensor], how: str, name: str) -> dict[str, Tensor]:
    """The update with one fault."""
    tensor = update[name].clone()
    if how in ("nan", "inf", "-inf"):
        tensor.view(-1)[-1] = float(how)
    elif how == "longer":
        tensor = torch.cat([tensor, tensor])
    elif how == "deeper":
        tensor = tensor[None]
    elif how == "whole numbers":
        tensor = tensor.to(torch.int64)
    spoiled = {**update, name: tensor}
    if how == "missing":
        del spoiled[name]
    elif how == "unknown":
        spoiled["stranger"] = tensor
    return spoiled


FAULTS = {
    "nan": "holds a NaN or an infinity",
    "inf": "holds a NaN or an infinity",
    "-inf": "holds a NaN or an infinity",
    "longer": "has shape",
    "deeper": "has shape",
    "whole numbers": "is torch.int64; the server's is torch.float32",
    "missing": "lacks `",
    "unknown": "has the unknown tensors `stranger`",
}


@pytest.mark.parametrize("how", FAULTS)
@settings(max_examples=20)
@given(st.data(), worlds(), seeds)
def test_a_refused_update_names_its_client_and_leaves_no_trace(how: str, data: st.DataObject, world: World, seed: int) -> None:
    layout, server = world.layout(), saved(world, seed)
    clients = data.draw(cohorts(world, layout, server))
    victim = data.draw(st.sampled_from([*clients, client(layout, server, data.draw(cuts(world)), 1.0, seed)]))
    candidates = [name for name, tensor in victim.update.items() if tensor.is_floating_point() and tensor.dim()]
    name = data.draw(st.sampled_from(candidates))
    after = copied(server)
    tally = Tally(layout, after)
    place = data.draw(st.integers(0, len(clients)))
    for one in clients[:place]:
        add(tally, layout, one)
    with pytest.raises(UpdateError) as refusal:
        tally.add(spoiled(victim.update, how, name), layout.select(victim.kept), 2.0, client="phone 7")
    assert "client 'phone 7'" in str(refusal.value)
    assert FAULTS[how] in str(refusal.value)
    assert how == "unknown" or f"`{name}`" in str(refusal.value)
    for one in clients[place:]:
        add(tally, layout, one)
    tally.step()
    assert_same_bits(after, tallied(layout, server, clients))


@pytest.mark.parametrize("how", FAULTS)
@settings(max_examples=10)
@given(st.data(), worlds(), seeds)
def test_a_refused_masked_update_leaves_no_trace(how: str, data: st.DataObject, world: World, seed: int) -> None:
    layout, server = world.layout(), saved(world, seed)
    clients = [masked(world, server, 1.0, seed), *data.draw(cohorts(world, layout, server, most=2))]
    name = data.draw(st.sampled_from([name for name, tensor in server.items() if tensor.is_floating_point() and tensor.dim()]))
    after = copied(server)
    tally = Tally(layout, after)
    for one in clients:
        add(tally, layout, one)
    with pytest.raises(UpdateError, match="client 7"):
        tally.add(spoiled(trained(server, seed), how, name), Mask({}), client=7)
    tally.step()
    assert_same_bits(after, tallied(layout, server, clients))


@pytest.mark.parametrize("weight", [-1.0, -1e-9, float("nan"), float("inf"), float("-inf")])
@settings(max_examples=10)
@given(st.data(), worlds(), seeds)
def test_a_weight_that_is_no_count_is_refused(weight: float, data: st.DataObject, world: World, seed: int) -> None:
    layout, server = world.layout(), saved(world, seed)
    one = client(layout, server, data.draw(cuts(world)), 1.0, seed)
    after = copied(server)
    tally = Tally(layout, after)
    add(tally, layout, one)
    with pytest.raises(UpdateError, match=f"client 'c': the weight {weight!r} is not a finite number of at least 0"):
        tally.add(one.update, layout.select(one.kept), weight, client="c")
    tally.step()
    assert_same_bits(after, tallied(layout, server, [one]))


@given(worlds(), seeds)
def test_a_client_that_sends_transient_tensors_is_refused(world: World, seed: int) -> None:
    world.tensor("cache", "residual", kind="transient")
    layout, server = world.layout(), saved(world, seed)
    with pytest.raises(UpdateError, match=r"unknown tensors .*`cache`"):
        Tally(layout, copied(server)).add(world.values(seed), Selection())
