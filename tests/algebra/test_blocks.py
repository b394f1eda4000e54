"""Names when blocks are dropped, and tensors that serve a whole stack."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from algebra.small import small_layout
from raffm.algebra.axis import parse
from raffm.algebra.blocks import depth_of, in_first_block, is_dropped, is_place, place_value, renumbered
from raffm.algebra.group import Group
from raffm.algebra.layout import Layout
from raffm.algebra.move import extract, put

STACKS = {"layers": "encoder.layer", "exits": "exits"}
KEPT = {"layers": torch.tensor([1, 10]), "heads": torch.tensor([0])}

# -- places --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [("#layers", True), ("first#layers", True), ("first#my-stack.0.x", True), ("layers", False), ("firstlayers", False)],
)
def test_a_place_is_told_from_a_group_by_its_sign(name: str, expected: bool) -> None:
    assert is_place(name) == expected


@pytest.mark.parametrize(("name", "values"), [("#layers", [0, 1, 2]), ("first#layers", [1, 0, 0])])
def test_a_place_counts_blocks_or_says_which_is_the_first(name: str, values: list[int]) -> None:
    found = [place_value(name, place) for place in range(3)]
    assert found == values
    assert all(type(one) is int for one in found)


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("#layers", "layers"),
        ("first#layers", "layers"),
        ("#encoder.layers", "encoder.layers"),
        ("first#encoder.layers", "encoder.layers"),
        ("#firsts", "firsts"),
        ("layers", ""),
    ],
)
def test_a_place_names_its_depth_group_and_a_group_none(name: str, depth: str) -> None:
    assert depth_of(name) == depth


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("encoder.layer.1.fc.weight", "encoder.layer.0.fc.weight"),
        ("encoder.layer.10", "encoder.layer.1"),
        ("encoder.layer.10.1.w", "encoder.layer.1.1.w"),
        ("encoder.layer.norm.weight", "encoder.layer.norm.weight"),
        ("encoder.layers.1.w", "encoder.layers.1.w"),
        ("encoder.layer", "encoder.layer"),
        ("my.encoder.layer.1.w", "my.encoder.layer.1.w"),
        ("exits.1.w", "exits.1.w"),
    ],
)
def test_only_the_number_of_a_kept_block_changes(name: str, new: str) -> None:
    assert renumbered(name, STACKS, KEPT) == new


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("encoder.layer.0.fc.weight", True),
        ("encoder.layer.2", True),
        ("encoder.layer.1.fc.weight", False),
        ("encoder.layer.10.0.w", False),
        ("encoder.layer.norm.weight", False),
        ("encoder.layers.0.w", False),
        ("encoder.layer", False),
        ("exits.0.w", False),
        ("config.layers", False),
    ],
)
def test_dropped_is_what_stands_in_a_block_that_is_not_kept(name: str, expected: bool) -> None:
    assert is_dropped(name, STACKS, KEPT) == expected


@pytest.mark.parametrize("block", [0, 1, 12])
def test_a_name_in_the_first_block_is_the_same_from_every_block(block: int) -> None:
    assert in_first_block(f"encoder.layer.{block}.a.1.w", "encoder.layer") == "encoder.layer.0.a.1.w"


# -- tensors that serve a whole stack ------------------------------------------------------------------------------


def stacked(**rest: object) -> Layout:
    """Three blocks that add the bias of one table, which stands in the first."""
    labels = {"b.0.table": "buckets, heads of layers @ 2, 3", "b.0.scale": "scalar of layers @"}
    for i in range(3):
        labels[f"b.{i}.w"] = f"layers.{i}.f, heads when layers[{i}] @ 4, 3"
    return small_layout(labels, Group("layers", 3, path="b"), **rest)


def values(layout: Layout) -> dict[str, Tensor]:
    return {name: torch.randn(label.shape(layout.sizes)) for name, label in layout.labels.items()}


BLOCKS = [[0], [1], [2], [0, 2], [1, 2]]


@pytest.mark.parametrize("blocks", BLOCKS)
def test_what_serves_the_stack_stands_in_the_first_block_whichever_are_kept(blocks: list[int]) -> None:
    layout = stacked()
    selection = layout.select({"layers": blocks})
    held = layout.labels_of(selection)
    assert [layout.name_in(selection, name) for name in held] == ["b.0.table", "b.0.scale"] + [
        f"b.{place}.w" for place in range(len(blocks))
    ]
    tensors = values(layout)
    part = extract(tensors, layout, selection)
    assert torch.equal(part["b.0.table"], tensors["b.0.table"])
    assert torch.equal(part["b.0.w"], tensors[f"b.{blocks[0]}.w"])


@pytest.mark.parametrize("blocks", BLOCKS)
def test_what_serves_the_stack_is_cut_and_put_back_where_it_came_from(blocks: list[int]) -> None:
    layout = stacked()
    tensors = values(layout)
    selection = layout.select({"layers": blocks, "heads": [0, 2], "buckets": [1]})
    part = extract(tensors, layout, selection)
    assert torch.equal(part["b.0.table"], tensors["b.0.table"][[1]][:, [0, 2]])
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    put(part, into, layout, selection)
    assert into["b.0.table"].nonzero().tolist() == [[1, 0], [1, 2]]
    assert torch.equal(into["b.0.scale"], tensors["b.0.scale"])
    assert [bool(into[f"b.{i}.w"].any()) for i in range(3)] == [i in blocks for i in range(3)]


def test_what_serves_the_stack_is_counted_once_and_always() -> None:
    layout = stacked()
    assert layout.count(layout.select({})) == 2 * 3 + 1 + 3 * 4 * 3
    for block in range(3):
        selection = layout.select({"layers": [block]})
        assert layout.count(selection) == 2 * 3 + 1 + 4 * 3
        assert layout.count_at(layout.sizes_of(selection)) == 2 * 3 + 1 + 4 * 3


def test_a_group_of_the_stack_alone_is_left_when_its_block_is_dropped() -> None:
    layout = stacked()
    assert layout.groups["buckets"].guard is None
    selection = layout.select({"layers": [2], "buckets": [1]})
    assert sorted(selection.kept) == ["buckets", "layers"]
    assert layout.sizes_of(selection) == {"layers": 1, "layers.2.f": 4, "heads": 3, "buckets": 1}


def test_what_serves_the_stack_serves_that_of_the_submodel() -> None:
    layout = stacked()
    cut = layout.cut(layout.select({"layers": [1, 2], "heads": 2}))
    assert {name: str(label) for name, label in cut.labels.items()} == {
        "b.0.table": "buckets, heads of layers",
        "b.0.scale": "scalar of layers",
        "b.0.w": "layers.0.f, heads when layers[0]",
        "b.1.w": "layers.1.f, heads when layers[1]",
    }
    assert cut.cut(cut.select({"layers": [1]})).labels["b.0.table"] == cut.labels["b.0.table"]


def test_cutting_a_stack_twice_is_cutting_it_once() -> None:
    layout = stacked()
    tensors = values(layout)
    outer = layout.select({"layers": [1, 2], "heads": [1, 2]})
    inner = layout.cut(outer).select({"layers": [1], "heads": [0], "buckets": [1]})
    both = layout.compose(outer, inner)
    assert both == layout.select({"layers": [2], "heads": [1], "buckets": [1]})
    twice = extract(extract(tensors, layout, outer), layout.cut(outer), inner)
    once = extract(tensors, layout, both)
    assert list(once) == list(twice) == ["b.0.table", "b.0.scale", "b.0.w"]
    assert all(torch.equal(once[name], twice[name]) for name in once)


def test_another_name_of_what_serves_the_stack_goes_with_its_own_block() -> None:
    layout = stacked(aliases={"table": "b.0.table", "b.2.again": "b.0.table"})
    assert layout.cut(layout.select({"layers": [1]})).aliases == {"table": "b.0.table"}
    assert layout.cut(layout.select({"layers": [1, 2]})).aliases == {"table": "b.0.table", "b.1.again": "b.0.table"}


def test_attributes_that_speak_of_places_stay_what_they_say_in_the_submodel() -> None:
    said = {f"b.{i}.is_first": (parse("first#layers"), int(i == 0)) for i in range(3)}
    layout = stacked(attributes=said | {f"b.{i}.place": (parse("#layers"), i) for i in range(3)})
    cut = layout.cut(layout.select({"layers": [1, 2]}))
    assert {name: str(expression) for name, expression in (cut.attributes or {}).items()} == {
        "b.0.is_first": "first#layers",
        "b.1.is_first": "first#layers",
        "b.0.place": "#layers",
        "b.1.place": "#layers",
    }
