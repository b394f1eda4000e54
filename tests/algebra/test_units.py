"""Labels that serve a stack, groups that are whole units, and sizes that a ratio gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algebra.small import small_layout
from raffm.algebra.axis import Label, Name, Number, parse, parse_label, units
from raffm.algebra.group import Group
from raffm.errors import LabelError

A, B = Name("a"), Name("b")

# -- ` of ` --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a of layers", Label((A,), stack="layers")),
        ("a, b of encoder.layers", Label((A, B), stack="encoder.layers")),
        ("scalar of my-blocks", Label((), stack="my-blocks")),
        ("a -> b, 3 of layers", Label((B, A, Number(3)), source=1, target=0, stack="layers")),
        ("a -> b transposed of layers", Label((A, B), source=0, target=1, stack="layers")),
        ("a of layers when exits[1]", Label((A,), guard=("exits", 1), stack="layers")),
    ],
)
def test_a_label_may_serve_a_whole_stack(text: str, expected: Label) -> None:
    assert parse_label(text) == expected
    assert str(expected) == text
    assert parse_label(f"{text.replace(' of ', '   of  ')}  ") == expected


@given(
    st.lists(st.sampled_from(["a", "b", "3", "a*b", "a + b", "a*(b + 2)"]), max_size=3),
    st.sampled_from(["", "->", "transposed"]),
    st.sampled_from(["", "layers", "encoder.layers", "x-1"]),
    st.sampled_from([None, ("exits", 0), ("stages.1.blocks", 12)]),
)
def test_reading_a_printed_label_of_a_stack_gives_the_same_label(
    axes: list[str], direction: str, stack: str, guard: tuple[str, int] | None
) -> None:
    ends = {"": (None, None), "->": (1, 0), "transposed": (0, 1)}[direction] if len(axes) > 1 else (None, None)
    label = Label(tuple(map(parse, axes)), *ends, guard=guard, stack=stack)
    assert parse_label(str(label)) == label


@pytest.mark.parametrize("name", ["of", "of.layers", "heads.of"])
def test_a_group_may_be_called_of(name: str) -> None:
    assert parse_label(name) == Label((Name(name),))
    assert parse_label(f"{name} of {name}") == Label((Name(name),), stack=name)


@pytest.mark.parametrize("text", ["a of", "a of layers[0]", "a of b, c", "a of b of c", "of layers transposed"])
def test_a_stack_stands_alone_and_last(text: str) -> None:
    with pytest.raises(LabelError):
        parse_label(text)


# -- units ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "widths", "expected"),
    [
        ("heads*qk", {"qk"}, {"heads"}),
        ("heads*qk", {"heads", "qk"}, {"heads"}),
        ("heads*qk", {"heads"}, set()),
        ("qk*heads", {"qk"}, set()),
        ("heads*8", {"heads"}, set()),
        ("2*qk", {"qk"}, set()),
        ("qk", {"qk"}, set()),
        ("3", {"qk"}, set()),
        ("kv*rep*2*rot", {"rot"}, {"kv", "rep"}),
        ("kv*rep*2*rot", {"rep"}, {"kv"}),
        ("heads*(qk + qk + vo)", {"vo"}, {"heads"}),
        ("kv*rep*qk + other*vo", {"vo"}, {"other"}),
        ("kv*rep*qk + other*vo", {"qk", "vo"}, {"kv", "rep", "other"}),
        ("2*(heads*qk + ffn)", {"qk", "ffn"}, {"heads"}),
    ],
)
def test_units_are_the_groups_with_a_width_inside(text: str, widths: set[str], expected: set[str]) -> None:
    assert units(parse(text), widths) == expected


def test_heads_are_the_groups_with_a_free_width_inside() -> None:
    layout = small_layout({"q": "r -> h*d @ 6, 4", "o": "h*d -> r @ 4, 6", "up": "r -> f @ 8, 4"}, Group("h", 2))
    assert layout.heads == {"h"}


def test_heads_whose_width_is_never_cut_are_widths_themselves() -> None:
    labels = {"q": "r -> h*d @ 6, 4", "k": "r -> g*1 @ 3, 4", "norm": "n*8 @ 16"}
    assert small_layout(labels, Group("h", 2), Group("d", 3, pinned=True)).heads == frozenset()
    assert small_layout(labels, Group("h", 2), Group("d", 3, least=3)).heads == frozenset()
    assert small_layout(labels, Group("h", 2), Group("d", 3, least=2)).heads == {"h"}


def test_heads_of_grouped_queries_are_the_keys_and_their_queries() -> None:
    layout = small_layout(
        {
            "q": "r -> kv*rep*2*rot @ 24, 4",
            "k": "r -> kv*2*rot @ 12, 4",
            "v": "r -> kv*vo @ 12, 4",
            "o": "kv*rep*vo -> r @ 4, 24",
        },
        Group("kv", 2),
        Group("rep", 2),
        ties={"vo": "2*rot"},
    )
    assert layout.heads == {"kv", "rep"}


def test_a_count_that_is_tied_to_heads_counts_heads() -> None:
    labels = {f"{i}.q": f"r -> layers.{i}.h*layers.{i}.d @ 6, 4" for i in range(2)}
    groups = [Group(f"layers.{i}.h", 2) for i in range(2)]
    counts = {"heads": (Name("count"), 2), "other": (Name("free"), 5)}
    ties = {"layers.0.h": "count", "count": "layers.1.h", "layers.0.d": "layers.1.d"}
    layout = small_layout(labels, *groups, ties=ties, attributes=counts)
    assert layout.heads == {"layers.0.h", "layers.1.h", "count"}


# -- sizes that a ratio gives --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "ratio", "expected"),
    [
        (Group("f", 10), 1.0, 10),
        (Group("f", 10), 0.5, 5),
        (Group("f", 10), 0.51, 6),
        (Group("f", 10), 0.01, 1),
        (Group("f", 100), 0.07, 7),  # 7.000000000000001
        (Group("f", 10, least=4), 0.2, 4),
        (Group("f", 10, least=4), 0.5, 5),
        (Group("f", 16, step=4), 0.5, 8),
        (Group("f", 16, step=4), 0.51, 12),
        (Group("f", 16, step=4), 0.01, 4),
        (Group("f", 10, step=4), 0.85, 10),
        (Group("f", 16, step=4, least=5), 0.1, 8),
        (Group("f", 3, step=8), 0.1, 3),
    ],
)
def test_a_narrowed_group_is_rounded_up_to_its_step_and_its_least(group: Group, ratio: float, expected: int) -> None:
    assert group.narrowed(ratio) == expected


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.integers(1, 16))
def test_a_narrowed_group_is_a_size_that_may_be_selected(size: int, step: int, least: int, sixteenths: int) -> None:
    group = Group("f", size, step=step, least=min(least, size))
    layout = small_layout({"w": f"f @ {size}"}, group)
    count = group.narrowed(sixteenths / 16)
    assert layout.sizes_of(layout.select({"f": count})) == {"f": count}
    assert count >= sixteenths / 16 * size
