"""Rows that only some clients count, tallies that absorb others, and what a server optimizer may do to a step."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from algebra.small import small_layout
from raffm.algebra.layout import Layout
from raffm.algebra.mask import Mask
from raffm.algebra.move import extract
from raffm.algebra.selection import Selection
from raffm.algebra.tally import Change, Tally, Total
from raffm.errors import UpdateError

CLASSES, WIDTH = 4, 5


def head() -> tuple[Layout, dict[str, Tensor]]:
    """A layer and a head over it; the counter is an integer buffer."""
    layout = small_layout(
        {
            "body": f"3 -> width @ {WIDTH}, 3",
            "head": f"width -> classes @ {CLASSES}, {WIDTH}",
            "bias": f"classes @ {CLASSES}",
            "seen": "scalar @",
        },
        kinds={"seen": "buffer"},
    )
    draw = torch.Generator().manual_seed(3)
    shapes = {"body": (WIDTH, 3), "head": (CLASSES, WIDTH), "bias": (CLASSES,)}
    server = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    return layout, {**server, "seen": torch.tensor(7)}


@dataclass(frozen=True)
class Told:
    """One client: which part of the width it holds, which classes it counts (None: all), its weight, its noise."""

    width: tuple[int, ...] | None
    counts: tuple[bool, ...] | None
    weight: float
    noise: int
    seen: int = 0

    def held(self, layout: Layout) -> Selection:
        return Selection() if self.width is None else layout.select({"width": list(self.width)})

    def update(self, layout: Layout, server: dict[str, Tensor]) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(self.noise)
        full = {
            name: tensor + torch.randn(tensor.shape, generator=draw) if tensor.is_floating_point() else tensor + self.seen
            for name, tensor in server.items()
        }
        return extract(full, layout, self.held(layout))

    def counted(self) -> dict[str, Tensor] | None:
        return None if self.counts is None else {"classes": torch.tensor(self.counts)}

    def add_to(self, tally: Tally, layout: Layout, server: dict[str, Tensor]) -> None:
        tally.add(self.update(layout, server), self.held(layout), self.weight, counted=self.counted())


told = st.builds(
    Told,
    width=st.none() | st.sets(st.integers(0, WIDTH - 1), min_size=1).map(lambda kept: tuple(sorted(kept))),
    counts=st.none() | st.tuples(*[st.booleans()] * CLASSES),
    weight=st.sampled_from([0.0, 1.0, 0.5, 3.0, 17.0]),
    noise=st.integers(0, 99),
    seen=st.integers(0, 5),
)


def dense(clients: list[Told], layout: Layout, server: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The mean change and the coverage of every tensor, element by element, in float64."""
    found = {}
    for name in ("body", "head", "bias"):
        total, covered = (torch.zeros(server[name].shape, dtype=torch.float64) for _ in range(2))
        for client in clients:
            width = list(range(WIDTH) if client.width is None else client.width)
            rows = [row for row in range(CLASSES) if client.counts is None or client.counts[row]]
            update = client.update(layout, server)[name].double()
            if name == "body":
                total[width] += client.weight * (update - server[name].double()[width])
                covered[width] += client.weight
            elif name == "head":
                for row in rows:
                    total[row, width] += client.weight * (update[row] - server[name].double()[row, width])
                    covered[row, width] += client.weight
            else:
                total[rows] += client.weight * (update[rows] - server[name].double()[rows])
                covered[rows] += client.weight
        found[name] = torch.where(covered > 0, total / covered.clamp(min=1e-30), 0.0), covered
    return found


def assert_is(changes: dict[str, Change], expected: dict[str, tuple[Tensor, Tensor]]) -> None:
    for name, (mean, covered) in expected.items():
        if name not in changes:
            assert not covered.any()
            continue
        torch.testing.assert_close(changes[name].mean.double(), mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(changes[name].coverage.double().expand_as(covered), covered, rtol=1e-6, atol=0)


# -- counted rows --------------------------------------------------------------------------------------------------


def test_a_row_moves_by_the_mean_of_those_who_count_it() -> None:
    layout, server = small_layout({"head": "width -> classes @ 3, 2"}), {"head": torch.zeros(3, 2)}
    tally = Tally(layout, server)
    for value, weight, counts in ((1.0, 1.0, [True, True, False]), (4.0, 2.0, [True, False, False])):
        tally.add({"head": torch.full((3, 2), value)}, Selection(), weight, counted={"classes": torch.tensor(counts)})
    tally.step()
    assert server["head"].tolist() == [[3, 3], [1, 1], [0, 0]]


def test_a_row_that_nobody_counts_keeps_its_bits() -> None:
    layout, server = head()
    server["head"][2] = -0.0
    server["bias"][2] = -0.0
    before = {name: tensor.clone() for name, tensor in server.items()}
    tally = Tally(layout, server)
    for client in (Told(None, (True, True, False, False), 2.0, 1), Told((0, 2), (False, True, False, True), 1.0, 2)):
        client.add_to(tally, layout, server)
    tally.step()
    assert server["bias"].view(torch.int32)[2] == before["bias"].view(torch.int32)[2]
    assert torch.equal(server["head"].view(torch.int32)[2], before["head"].view(torch.int32)[2])
    assert not torch.equal(server["body"], before["body"])


def test_counting_every_class_is_not_counting_apart() -> None:
    layout, server = head()
    plain, gated = Tally(layout, server), Tally(layout, server)
    for noise, weight in ((1, 1.0), (2, 5.0)):
        Told((0, 1, 3), None, weight, noise).add_to(plain, layout, server)
        Told((0, 1, 3), (True,) * CLASSES, weight, noise).add_to(gated, layout, server)
    left, right = plain.changes(), gated.changes()
    for name in left:
        torch.testing.assert_close(left[name].mean, right[name].mean, rtol=1e-6, atol=1e-6)


@given(st.lists(told, min_size=1, max_size=12))
@settings(max_examples=60)
def test_counted_and_uncounted_clients_in_any_order_give_the_dense_mean(clients: list[Told]) -> None:
    layout, server = head()
    tally = Tally(layout, server)
    for client in clients:
        client.add_to(tally, layout, server)
    assert_is(tally.changes(), dense(clients, layout, server))


@given(st.lists(told, min_size=1, max_size=5), st.lists(told, min_size=1, max_size=5))
@settings(max_examples=20)
def test_a_tally_that_was_gated_in_one_round_begins_the_next_anew(first: list[Told], second: list[Told]) -> None:
    layout, server = head()
    tally = Tally(layout, server)
    for client in first:
        client.add_to(tally, layout, server)
    tally.step()
    for client in second:
        client.add_to(tally, layout, server)
    assert_is(tally.changes(), dense(second, layout, server))


@pytest.mark.parametrize("which", ["kept", "head"])
def test_a_masked_client_may_follow_one_that_counts_some_classes(which: str) -> None:
    layout, server = small_layout({"head": "width -> classes @ 2, 2"}), {"head": torch.zeros(2, 2)}
    tally = Tally(layout, server)
    tally.add({"head": torch.full((2, 2), 2.0)}, Selection(), counted={"classes": torch.tensor([True, False])})
    mask = Mask({"head": torch.tensor([[True, False], [True, True]])} if which == "kept" else {})
    tally.add({"head": torch.full((2, 2), 4.0)}, mask)
    tally.step()
    assert server["head"].tolist() == ([[3, 2], [4, 4]] if which == "kept" else [[3, 3], [4, 4]])


@pytest.mark.parametrize(
    ("counted", "found"),
    [
        ({"classes": torch.ones(3, dtype=torch.bool)}, "a bool for each of its 4 indices"),
        ({"classes": torch.ones(4)}, "must be a bool"),
        ({"nobody": torch.ones(4, dtype=torch.bool)}, "what counts of `nobody`"),
        ({"width": torch.ones(WIDTH, dtype=torch.bool)}, "`width` is cut, so its indices cannot be counted apart"),
    ],
)
def test_counts_that_do_not_fit_are_refused_and_leave_no_trace(counted: dict[str, Tensor], found: str) -> None:
    layout, server = head()
    tally = Tally(layout, server)
    client = Told((0, 1), None, 1.0, 5)
    with pytest.raises(UpdateError, match="client 'phone'") as error:
        tally.add(client.update(layout, server), client.held(layout), counted=counted, client="phone")
    assert found in str(error.value)
    assert tally.changes() == {}
    assert tally.counters() == {}


def test_a_mask_cannot_be_counted_apart() -> None:
    layout, server = head()
    with pytest.raises(UpdateError, match="`classes` is cut"):
        Tally(layout, server).add(server, Mask({}), counted={"classes": torch.ones(CLASSES, dtype=torch.bool)})


# -- tallies of tallies --------------------------------------------------------------------------------------------


@given(st.lists(st.lists(told, max_size=5), min_size=1, max_size=4))
@settings(max_examples=40)
def test_a_tally_of_tallies_is_the_tally_of_all_clients(parts: list[list[Told]]) -> None:
    layout, server = head()
    together, absorbing, worker = (Tally(layout, server) for _ in range(3))
    for part in parts:
        for client in part:
            client.add_to(together, layout, server)
            client.add_to(worker, layout, server)
        absorbing.absorb(worker.totals(), worker.counters())
    left, right = together.changes(), absorbing.changes()
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name].mean, right[name].mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(*(c[name].coverage.expand_as(server[name]) for c in (left, right)), rtol=1e-6, atol=0)
    assert {name: int(counter) for name, counter in together.counters().items()} == {
        name: int(counter) for name, counter in absorbing.counters().items()
    }


@given(st.lists(told, max_size=4), st.lists(told, min_size=1, max_size=4), st.lists(told, max_size=4))
@settings(max_examples=30)
def test_clients_may_be_added_before_and_after_a_tally_is_absorbed(
    before: list[Told], within: list[Told], after: list[Told]
) -> None:
    layout, server = head()
    tally, other = Tally(layout, server), Tally(layout, server)
    for client in before:
        client.add_to(tally, layout, server)
    for client in within:
        client.add_to(other, layout, server)
    tally.absorb(other.totals(), other.counters())
    for client in after:
        client.add_to(tally, layout, server)
    assert_is(tally.changes(), dense([*before, *within, *after], layout, server))


def test_a_tally_begins_anew_once_its_totals_were_read() -> None:
    layout, server = head()
    tally = Tally(layout, server)
    Told(None, None, 1.0, 1, seen=3).add_to(tally, layout, server)
    assert tally.totals()["head"].sum.abs().sum() > 0
    assert int(tally.counters()["seen"]) == 10
    assert tally.totals() == {}
    assert tally.counters() == {}


def test_absorbing_does_not_hold_on_to_what_it_absorbed() -> None:
    layout, server = head()
    tally, other = Tally(layout, server), Tally(layout, server)
    client = Told(None, None, 2.0, 1)
    client.add_to(other, layout, server)
    totals = {name: Total(total.sum.clone(), total.coverage.clone()) for name, total in other.totals().items()}
    tally.absorb(totals, {})
    for total in totals.values():
        total.sum.fill_(1e9)
        total.coverage.fill_(1e9)
    assert_is(tally.changes(), dense([client], layout, server))


def test_counters_take_the_largest_that_anybody_reported() -> None:
    layout, server = head()
    tally = Tally(layout, server)
    for seen in (3, 9, 1):
        tally.absorb({}, {"seen": torch.tensor(seen)})
    tally.step()
    assert int(server["seen"]) == 9


# -- step(move) ----------------------------------------------------------------------------------------------------


def test_a_step_moves_by_what_the_optimizer_makes_of_the_mean() -> None:
    layout, server = head()
    before = {name: tensor.clone() for name, tensor in server.items()}
    tally = Tally(layout, server)
    client = Told((1, 4), None, 3.0, 8, seen=2)
    client.add_to(tally, layout, server)
    heard = {}

    def move(name: str, change: Change) -> Tensor:
        heard[name] = change.coverage.expand_as(change.mean).clone()
        return change.mean * -2

    tally.step(move)
    expected = dense([client], layout, before)
    for name, (mean, covered) in expected.items():
        assert torch.equal(heard[name].double(), covered)
        torch.testing.assert_close(server[name].double(), before[name].double() - 2 * mean, rtol=1e-5, atol=1e-5)
        assert torch.equal(server[name][covered == 0], before[name][covered == 0])
    assert int(server["seen"]) == 9, "counters are not moved by the optimizer"


def test_a_step_in_which_nobody_took_part_asks_the_optimizer_nothing() -> None:
    layout, server = head()
    before = {name: tensor.clone() for name, tensor in server.items()}

    def move(name: str, _: Change) -> Tensor:
        raise AssertionError(name)

    Tally(layout, server).step(move)
    assert all(torch.equal(server[name], before[name]) for name in server)
