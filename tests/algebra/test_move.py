from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from algebra.small import small_layout
from raffm.algebra.axis import Where
from raffm.algebra.group import Group
from raffm.algebra.move import Move, extract, gather, moves, permute, put, scatter
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection

PLACES: list[Where] = [None, slice(1, 3), torch.tensor([0, 2, 3]), torch.tensor([3, 1])]


def indices(place: Where, length: int) -> Tensor:
    whole = torch.arange(length)
    return whole if place is None else whole[place]


def expected_part(tensor: Tensor, where: tuple[Where, ...]) -> Tensor:
    for axis, place in enumerate(where):
        tensor = torch.stack([tensor.select(axis, int(index)) for index in indices(place, tensor.shape[axis])], dim=axis)
    return tensor


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_gathering_takes_every_mixture_of_stretches_and_lists(rank: int) -> None:
    tensor = torch.randn([4] * rank)
    for where in itertools.product(PLACES, repeat=rank):
        expected = expected_part(tensor, where)
        part = gather(tensor, where)
        assert torch.equal(part, expected)
        assert part.is_contiguous()
        assert part.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        room = torch.full_like(expected, 7.0)
        assert gather(tensor, where, room) is room
        assert torch.equal(room, expected)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_scattering_adds_where_gathering_took(rank: int) -> None:
    tensor, ground = torch.randn([4] * rank), torch.randn([4] * rank)
    for where in itertools.product(PLACES, repeat=rank):
        into, held = ground.clone(), torch.zeros([4] * rank)
        part = gather(tensor, where)
        scatter(part, into, where)
        scatter(torch.ones_like(part), held, where)
        assert set(held.unique().tolist()) <= {0.0, 1.0}
        assert held.sum() == part.numel()
        assert torch.equal(into, torch.where(held == 1, ground + tensor, ground))
        assert torch.equal(gather(held, where), torch.ones_like(part))


def test_moves_name_the_tensor_and_its_positions() -> None:
    layout = small_layout(
        {"b.0.w": "r -> b.0.n when b[0] @ 3, 4", "b.1.w": "r -> b.1.n when b[1] @ 3, 4"}, Group("b", 2, path="b")
    )
    selection = layout.select({"b": [1], "b.1.n": [0, 2], "r": [1, 2]})
    found = moves(layout, selection)
    assert list(found) == ["b.1.w"]
    assert isinstance(found["b.1.w"], Move)
    assert found["b.1.w"].name == "b.0.w"
    rows, columns = found["b.1.w"].where
    assert rows.tolist() == [0, 2]
    assert columns == slice(1, 3)
    assert moves(layout, layout.select({"b": [1], "b.1.n": [0, 2], "r": [1, 2]})) is found, "equal selections share their moves"
    assert moves(layout, Selection())["b.1.w"].where == (None, None)


def test_extracting_from_parameters_builds_no_graph() -> None:
    layout = small_layout({"w": "n, m @ 4, 3"})
    weight = torch.randn(4, 3, requires_grad=True)
    for kept in ({}, {"n": 2}, {"n": [0, 2]}, {"m": [0, 2]}, {"n": [0, 2], "m": [0, 2]}):
        selection = layout.select(kept)
        part = extract({"w": weight}, layout, selection)["w"]
        assert not part.requires_grad
        room = {"w": torch.empty_like(part)}
        assert torch.equal(extract({"w": weight}, layout, selection, room)["w"], part)
        put({"w": part}, {"w": weight}, layout, selection)
        assert not permute({"w": weight}, layout, Ranking({"n": torch.tensor([3, 2, 1, 0])}))["w"].requires_grad


def test_extracting_on_the_meta_device_gives_shapes() -> None:
    layout = small_layout({"w": "n, m @ 4, 3"})
    part = extract({"w": torch.empty(4, 3, device="meta")}, layout, layout.select({"n": [0, 2], "m": [0, 2]}))["w"]
    assert (part.device.type, part.shape) == ("meta", (2, 2))


def test_putting_leaves_tensors_that_are_not_given_alone() -> None:
    layout = small_layout({"v": "n @ 3", "w": "n @ 3"})
    into = {"v": torch.zeros(3), "w": torch.zeros(3)}
    put({"w": torch.ones(2)}, into, layout, layout.select({"n": [0, 2]}))
    assert {name: tensor.tolist() for name, tensor in into.items()} == {"v": [0, 0, 0], "w": [1, 0, 1]}
