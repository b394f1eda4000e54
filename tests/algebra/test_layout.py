from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from algebra.small import small_layout
from raffm.algebra.axis import Name, Number, Product, Sum, parse, parse_label
from raffm.algebra.group import Group, Tie
from raffm.algebra.layout import Layout, is_place
from raffm.algebra.mask import Mask
from raffm.algebra.move import Move
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.algebra.tally import Change
from raffm.errors import LabelError

BLOCKS = Group("layers", 2, path="encoder.layer")

# -- building ------------------------------------------------------------------------------------------------------


def refusal(labels: dict[str, str], *groups: Group, **rest: object) -> str:
    with pytest.raises(LabelError) as error:
        small_layout(labels, *groups, **rest)
    return str(error.value)


def test_a_tensor_without_a_label_is_refused_by_name() -> None:
    with pytest.raises(LabelError, match=r"2 tensors have no label: `v`, `w`\. Add them to the table"):
        Layout.build({"u": parse_label("a")}, {"u": (1,), "v": (2,), "w": (3,)})


def test_many_tensors_without_a_label_are_named_in_part() -> None:
    with pytest.raises(LabelError) as error:
        Layout.build({}, {f"t{number}": (1,) for number in range(9)})
    assert "9 tensors have no label: `t0`, `t1`, `t2`, `t3`, `t4`, `t5` and 3 more." in str(error.value)


def test_a_label_for_a_tensor_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(LabelError, match=r"tensors that the model does not have: `w`\."):
        Layout.build({"u": parse_label("a"), "w": parse_label("a")}, {"u": (1,)})


def test_a_label_of_another_rank_is_refused() -> None:
    assert refusal({"w": "a -> b @ 3"}) == "`w` has shape (3,), but its label `a -> b` has 2 axes."
    assert refusal({"w": "scalar @ 3, 4"}) == "`w` has shape (3, 4), but its label `scalar` has 0 axes."


def test_an_axis_of_another_length_is_refused_with_the_known_sizes() -> None:
    found = refusal({"w": "a*b @ 7"}, Group("a", 2), Group("b", 3))
    assert found == "`w`, axis 0, has length 7, but its label `a*b` gives 6 (a=2, b=3)."


def test_an_axis_of_another_length_is_refused_on_every_axis() -> None:
    assert "`w`, axis 1, has length 4, but its label `a` gives 3 (a=3)" in refusal({"w": "a, a @ 3, 4"})


def test_an_axis_some_times_too_long_is_suspected_to_be_fused() -> None:
    found = refusal({"q": "r -> kv*qk @ 18, 4"}, Group("kv", 2), Group("qk", 3))
    assert "`q`, axis 0, has length 18, but its label `kv*qk` gives 6 (kv=2, qk=3)." in found
    assert found.endswith("The projection looks fused: did you mean `kv*qk + kv*qk + kv*qk`?")
    assert refusal({"u": "f @ 4", "w": "f @ 8"}).endswith("did you mean `f + f`?")
    assert "fused" not in refusal({"u": "f @ 4", "w": "f + f @ 16"})
    assert "fused" not in refusal({"w": "3 @ 9"})
    assert "fused" not in refusal({"u": "f @ 4", "w": "f @ 2"})


def test_a_size_that_nothing_tells_is_refused() -> None:
    found = refusal({"w": "a*b @ 6"})
    assert found == "the size of `a` in `w`, axis 0, cannot be told from the model. Name an attribute that holds it."


def test_a_size_that_does_not_divide_is_refused() -> None:
    assert "has length 7, but its label `a*b` gives 6 (a=2, b=3)" in refusal({"w": "a*b @ 7"}, Group("a", 2))
    assert "has length 8, but its label `a + 2*b` gives 7 (a=3, b=2)" in refusal({"v": "a @ 3", "w": "a + 2*b @ 8"})


def test_sizes_are_told_by_groups_then_attributes_then_axes() -> None:
    layout = small_layout(
        {"w": "a*b*c -> a @ 3, 30", "v": "b + d @ 9"},
        Group("c", 5),
        attributes={"module.heads": (Name("b"), 2), "module.place": (Name("#layers"), 77)},
    )
    assert layout.sizes == {"a": 3, "b": 2, "c": 5, "d": 7}
    assert layout.attributes == {"module.heads": Name("b"), "module.place": Name("#layers")}
    assert is_place("#layers")
    assert not is_place("layers")


def test_an_axis_of_one_group_tells_its_size_before_others_do() -> None:
    found = refusal({"w": "a*b @ 12", "v": "a @ 2"}, Group("b", 3))
    assert "`w`, axis 0, has length 12, but its label `a*b` gives 6 (a=2, b=3)." in found


def test_an_unknown_size_is_found_through_several_axes() -> None:
    layout = small_layout({"x": "a*b*c @ 30", "y": "a*b @ 6", "z": "a @ 2"})
    assert layout.sizes == {"a": 2, "b": 3, "c": 5}


def test_an_attribute_that_disagrees_is_refused_by_name() -> None:
    found = refusal({"w": "a @ 4"}, attributes={"block.width": (Name("a"), 5)})
    assert found == "`w`, axis 0, has length 4, but its label `a` gives 5 (a=5)."
    found = refusal({"w": "a @ 4"}, Group("a", 4), attributes={"block.width": (Name("a"), 5)})
    assert found == "`block.width` has length 5, but its label `a` gives 4 (a=4)."


def test_a_tie_that_the_full_model_breaks_is_refused() -> None:
    found = refusal({"w": "a @ 4", "v": "b @ 3"}, ties={"a": "2*b"})
    assert found == "the count tie `a = 2*b` does not hold in the full model. Correct the tie or the labels."
    assert small_layout({"w": "a @ 6", "v": "b @ 3"}, ties={"a": "2*b"}).ties == (Tie(Name("a"), parse("2*b")),)


def test_a_tie_between_unknown_groups_is_refused() -> None:
    assert "`b`" in refusal({"w": "a @ 4"}, ties={"a": "b"})


@pytest.mark.parametrize("length", [6, 10])
def test_an_axis_too_short_for_its_label_is_refused(length: int) -> None:
    assert "`w`, axis 0" in refusal({"v": "a @ 10", "w": f"a + b @ {length}"})


@pytest.mark.parametrize("guard", ["layres[0]", "layers[2]", "a[0]"])
def test_a_guard_of_a_block_that_is_not_there_is_refused(guard: str) -> None:
    assert guard.partition("[")[0] in refusal({"w": f"a when {guard} @ 4"}, BLOCKS)


def test_an_axis_without_groups_is_refused_without_sizes() -> None:
    assert refusal({"w": "3 @ 5"}) == "`w`, axis 0, has length 5, but its label `3` gives 3."


def test_properties_of_described_groups_are_kept() -> None:
    group = Group("a", 0, pinned=True, step=2, least=3, approximate="norms")
    layout = small_layout({"w": "a*b @ 12"}, group, Group("b", 2))
    assert layout.groups["a"] == Group("a", 6, pinned=True, step=2, least=3, approximate="norms")
    assert layout.groups["b"] == Group("b", 2)


# -- fibres and guards ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "is_fibred"),
    [
        ("h*d", True),
        ("h*2*d", True),
        ("2*h*d", True),
        ("h*(d + d + e)", True),
        ("h*d + h*e", True),
        ("h*e*d", True),
        ("e*d", False),
        ("d*h", False),
        ("h*d + d", False),
        ("d + h*d", False),
        ("(h + 1)*d", False),
        ("d*h*d", False),
        ("(d + e)*h", False),
        ("3*d", False),
    ],
)
def test_a_group_is_fibred_only_where_it_always_stands_under_its_base(label: str, is_fibred: bool) -> None:
    sizes = {"h": 2, "d": 3, "e": 4}
    length = eval(label, sizes)
    groups = [Group("h", 2), Group("d", 3, base="h"), Group("e", 4)]
    layout = small_layout({"w": f"{label} @ {length}", "h": "h @ 2"}, *groups)
    assert layout.bases == ({"d": "h"} if is_fibred else {})


def test_one_tensor_without_the_base_makes_a_group_plain() -> None:
    layout = small_layout({"w": "h*d @ 6", "v": "d @ 3"}, Group("h", 2), Group("d", 3, base="h"))
    assert layout.bases == {}
    assert layout.select({"d": [0, 2]}).kept["d"].tolist() == [0, 2]


def test_brackets_around_the_base_change_nothing() -> None:
    layout = small_layout({"w": "(h*r)*d @ 12"}, Group("h", 2), Group("r", 2), Group("d", 3, base="h"))
    assert layout.bases == {"d": "h"}


def test_a_group_fibred_over_a_fibred_group_is_refused() -> None:
    groups = (Group("a", 2), Group("b", 2, base="a"), Group("c", 3, base="b"))
    assert "`c`" in refusal({"w": "a*b*c @ 12"}, *groups)


def test_a_group_belongs_to_the_only_block_that_uses_it() -> None:
    layout = small_layout(
        {
            "encoder.layer.0.w": "r -> f0 when layers[0] @ 3, 2",
            "encoder.layer.1.w": "r -> f1 when layers[1] @ 4, 2",
            "encoder.layer.1.v": "f1 -> r when layers[1] @ 2, 4",
            "norm": "n @ 5",
        },
        BLOCKS,
    )
    guards = {name: group.guard for name, group in layout.groups.items()}
    assert guards == {"layers": None, "f0": ("layers", 0), "f1": ("layers", 1), "r": None, "n": None}


# -- the full model ------------------------------------------------------------------------------------------------


def test_free_groups_are_those_that_can_be_smaller() -> None:
    layout = small_layout({"w": "a, b, c, d @ 4, 4, 4, 1"}, Group("b", 0, pinned=True), Group("c", 0, least=4), BLOCKS)
    assert set(layout.free) == {"a", "layers"}
    assert set(layout.depths) == {"layers"}


def test_tensors_are_parameters_unless_said_otherwise() -> None:
    layout = small_layout({"w": "a @ 2", "b": "a @ 2", "t": "a @ 2"}, kinds={"b": "buffer", "t": "transient"})
    assert [layout.kind(name) for name in "wbt"] == ["parameter", "buffer", "transient"]
    assert layout.tensors("parameter", "transient") == ("w", "t")
    assert layout.tensors() == ()
    bare = Layout(layout.labels, layout.groups)
    assert bare.kind("b") == "parameter"
    assert bare.cut(Selection()).aliases == {}
    assert bare.attributes_of(Selection()) == {}


def described(label: str = "a -> b", size: int = 3, **properties: object) -> Layout:
    return small_layout({"w": f"{label} @ 3, {size}", "d": "d*b @ 6"}, Group("d", 0, **properties), BLOCKS)


def test_a_fingerprint_is_the_same_for_the_same_labels() -> None:
    assert described().fingerprint == described().fingerprint
    assert len(described().fingerprint) == 16
    assert int(described().fingerprint, 16) >= 0


def test_a_fingerprint_differs_where_tensors_mean_something_else() -> None:
    two = small_layout({"w": "a -> b @ 3, 3", "d": "d*b @ 6"}, Group("layers", 2, path="decoder.layer"))
    tied = small_layout({"w": "a -> b @ 3, 3", "d": "d*b @ 6"}, BLOCKS, ties={"a": "b"})
    renamed = small_layout({"v": "a -> b @ 3, 3", "d": "d*b @ 6"}, BLOCKS)
    fibred = small_layout({"w": "a -> b @ 3, 3", "d": "d*b @ 6"}, Group("b", 0, base="d"), BLOCKS)
    nested = small_layout({"w": "a -> b @ 3, 3", "d": "d*b @ 6"}, Group("b", 0, base="d"), BLOCKS)
    others = [described("a -> b transposed"), described("b -> a"), described(size=4), two, tied, renamed]
    assert len({described().fingerprint, *(layout.fingerprint for layout in others)}) == 7
    assert fibred.fingerprint == nested.fingerprint == described().fingerprint, "`b` is used without `d`: it is plain"
    apart = [small_layout({"w": "h*d @ 6"}, Group("h", 2), Group("d", 3, base=base)) for base in (None, "h")]
    assert apart[0].fingerprint != apart[1].fingerprint
    guarded = [small_layout({"w": f"a when layers[{index}] @ 3"}, BLOCKS) for index in (0, 1)]
    assert guarded[0].fingerprint != guarded[1].fingerprint


def test_a_fingerprint_does_not_depend_on_what_may_be_cut() -> None:
    assert described(pinned=True, least=2, step=2).fingerprint == described().fingerprint


# -- names inside a submodel ---------------------------------------------------------------------------------------


def deep(**rest: object) -> Layout:
    """Twelve blocks, so that a name of one is the beginning of another's."""
    labels = {f"encoder.layer.{i}.w": f"layers.{i}.f when layers[{i}] @ 4" for i in range(12)}
    labels["encoder.norm"] = "r @ 2"
    return small_layout(labels, Group("layers", 12, path="encoder.layer"), **rest)


def test_blocks_are_numbered_anew() -> None:
    layout = deep()
    selection = layout.select({"layers": [1, 10, 11], "layers.11.f": 2})
    assert layout.name_in(selection, "encoder.layer.1.w") == "encoder.layer.0.w"
    assert layout.name_in(selection, "encoder.layer.10.w") == "encoder.layer.1.w"
    assert layout.name_in(selection, "encoder.layer.11") == "encoder.layer.2"
    assert layout.name_in(selection, "encoder.norm") == "encoder.norm"
    assert layout.name_in(Selection(), "encoder.layer.7.w") == "encoder.layer.7.w"
    assert layout.group_in(selection, "layers.10.f") == "layers.1.f"
    assert layout.group_in(selection, "layers") == "layers"
    cut = layout.cut(selection)
    assert list(cut.labels) == ["encoder.layer.0.w", "encoder.layer.1.w", "encoder.layer.2.w", "encoder.norm"]
    assert cut.sizes == {"layers": 3, "layers.0.f": 4, "layers.1.f": 4, "layers.2.f": 2, "r": 2}
    assert cut.groups["layers.2.f"].guard == ("layers", 2)
    assert cut.groups["layers"].path == "encoder.layer"


def test_required_blocks_stay_required_in_the_submodel() -> None:
    labels = {f"b.{i}.w": f"b.{i}.f when b[{i}] @ 4" for i in range(4)}
    layout = small_layout(labels, Group("b", 4, path="b", required=(0, 2)))
    cut = layout.cut(layout.select({"b": [0, 2, 3]}))
    assert cut.groups["b"].required == (0, 1)
    assert layout.cut(Selection()).groups["b"].required == (0, 2)


def test_attributes_of_dropped_blocks_are_left_out() -> None:
    values = {f"encoder.layer.{i}.width": (Name(f"layers.{i}.f"), 4) for i in range(12)}
    values["encoder.layer.1"] = (Name("r"), 2)
    layout = deep(attributes={**values, "config.depth": (Name("layers"), 12)})
    selection = layout.select({"layers": [1, 10]})
    kept = {"encoder.layer.1.width": "layers.1.f", "encoder.layer.10.width": "layers.10.f", "encoder.layer.1": "r"}
    assert {name: str(expression) for name, expression in layout.attributes_of(selection).items()} == {
        **kept,
        "config.depth": "layers",
    }
    assert {name: str(expression) for name, expression in (layout.cut(selection).attributes or {}).items()} == {
        "encoder.layer.0.width": "layers.0.f",
        "encoder.layer.1.width": "layers.1.f",
        "encoder.layer.0": "r",
        "config.depth": "layers",
    }


def test_a_group_that_serves_a_whole_stack_may_be_named_after_it() -> None:
    labels = {f"encoder.layer.{i}.w": f"layers.heads*layers.{i}.f when layers[{i}] @ 6" for i in range(2)}
    layout = small_layout(labels, BLOCKS, Group("layers.heads", 2))
    assert layout.cut(layout.select({"layers": [1]})).sizes == {"layers": 1, "layers.heads": 2, "layers.0.f": 3}


def test_a_tensor_that_serves_a_whole_stack_may_be_named_after_it() -> None:
    labels = {f"encoder.layer.{i}.w": f"layers.{i}.f when layers[{i}] @ 6" for i in range(2)}
    layout = small_layout({**labels, "encoder.layer.norm": "r @ 2"}, BLOCKS)
    assert set(layout.cut(layout.select({"layers": [1]})).labels) == {"encoder.layer.0.w", "encoder.layer.norm"}


def test_aliases_of_dropped_blocks_are_left_out() -> None:
    layout = deep(aliases={"encoder.layer.3.v": "encoder.layer.3.w", "encoder.layer.4.v": "encoder.layer.4.w"})
    assert layout.cut(layout.select({"layers": [4]})).aliases == {"encoder.layer.0.v": "encoder.layer.0.w"}


def test_aliases_in_dropped_blocks_of_tensors_elsewhere_are_left_out() -> None:
    layout = deep(aliases={"encoder.layer.3.v": "encoder.norm", "encoder.layer.4.v": "encoder.norm"})
    assert layout.cut(layout.select({"layers": [4]})).aliases == {"encoder.layer.0.v": "encoder.norm"}


def test_attributes_that_count_groups_of_dropped_blocks_are_left_out() -> None:
    layout = deep(attributes={"config.widths.3": (Name("layers.3.f"), 4)})
    assert layout.cut(layout.select({"layers": [4]})).attributes == {}


# -- counts --------------------------------------------------------------------------------------------------------


def test_counts_come_from_sizes_alone() -> None:
    layout = small_layout(
        {"a": "r -> layers.0.f when layers[0] @ 3, 2", "b": "r -> layers.1.f when layers[1] @ 4, 2", "s": "scalar @"},
        BLOCKS,
        kinds={"b": "buffer"},
    )
    assert layout.count(Selection()) == 7
    assert layout.count(Selection(), "buffer") == 8
    assert layout.count(Selection(), "parameter", "buffer") == layout.count(Selection(), "buffer", "parameter") == 15
    assert layout.count_at({"r": 1, "layers": 1, "layers.0.f": 2}) == 3
    assert layout.count_at({"r": 1, "layers": 1, "layers.1.f": 2}) == 1
    assert layout.terms("buffer") == [(("layers", 1), ("layers.1.f", "r"), 1)]


def test_blocks_without_groups_of_their_own_are_counted() -> None:
    """Such as exits: every one maps the residual stream to the classes."""
    labels = {f"exits.{i}.w": f"residual -> classes when exits[{i}] @ 3, 4" for i in range(3)}
    layout = small_layout(labels, Group("exits", 3, path="exits"), Group("classes", 0, pinned=True))
    assert layout.count(Selection()) == 36
    assert layout.count(layout.select({"exits": [0, 2], "residual": 2})) == 12
    assert layout.count_at({"exits": 2, "residual": 2, "classes": 3}) == 12
    assert layout.count_at({"exits": 1, "residual": 4, "classes": 3}) == 12


def test_counts_from_sizes_leave_out_blocks_whose_shared_groups_are_missing() -> None:
    labels = {"b.0.w": "n when b[0] @ 3", "b.1.w": "n when b[1] @ 3", "b.2.w": "m when b[2] @ 4"}
    layout = small_layout(labels, Group("b", 3, path="b"))
    last = layout.select({"b": [2]})
    assert layout.count(last) == 4
    assert layout.count_at(layout.sizes_of(last)) == 4


def test_counts_from_sizes_need_every_size() -> None:
    with pytest.raises(KeyError):
        small_layout({"w": "vocab, r @ 5, 4"}).count_at({"r": 4})


# -- compositions --------------------------------------------------------------------------------------------------


def test_rows_of_heads_that_are_dropped_later_go_with_them() -> None:
    layout = small_layout({"w": "h*d @ 12"}, Group("h", 3), Group("d", 4, base="h"))
    outer = layout.select({"h": [0, 2], "d": [[0, 1, 2], [1, 2, 3]]})
    inside = layout.cut(outer)
    heads_only = layout.compose(outer, inside.select({"h": [1]}))
    assert {name: indices.tolist() for name, indices in heads_only.kept.items()} == {"h": [2], "d": [[1, 2, 3]]}
    both = layout.compose(outer, inside.select({"h": [1], "d": [[0, 2]]}))
    assert {name: indices.tolist() for name, indices in both.kept.items()} == {"h": [2], "d": [[1, 3]]}
    later = layout.compose(layout.select({"h": [0, 2]}), layout.cut(layout.select({"h": [0, 2]})).select({"d": [[0], [3]]}))
    assert {name: indices.tolist() for name, indices in later.kept.items()} == {"h": [0, 2], "d": [[0], [3]]}


def test_composing_reaches_groups_whose_blocks_are_numbered_anew() -> None:
    layout = deep()
    outer = layout.select({"layers": [3, 5, 7], "layers.5.f": [0, 1, 3]})
    inner = layout.cut(outer).select({"layers": [1, 2], "layers.1.f": [1, 2], "layers.2.f": [3]})
    both = layout.compose(outer, inner)
    assert {name: indices.tolist() for name, indices in both.kept.items()} == {
        "layers": [5, 7],
        "layers.5.f": [1, 3],
        "layers.7.f": [3],
    }


# -- ties ----------------------------------------------------------------------------------------------------------


def test_a_tie_gives_the_size_that_makes_it_hold() -> None:
    tie = Tie(parse("vo"), parse("2*rot"))
    assert str(tie) == "vo = 2*rot"
    assert tie.holds({"vo": 6, "rot": 3})
    assert not tie.holds({"vo": 6, "rot": 2})
    assert tie.solved({"rot": 3}, "vo") == 6
    assert tie.solved({"vo": 6}, "rot") == 3
    assert tie.solved({"vo": 5}, "rot") is None
    assert tie.solved({"vo": 5, "rot": 3}, "qk") is None
    assert Tie(parse("2*rot"), parse("vo")).solved({"rot": 3}, "vo") == 6


# -- values --------------------------------------------------------------------------------------------------------


def test_a_layout_is_compared_by_identity() -> None:
    layout = described()
    assert layout != described()
    assert len({layout, layout}) == 1


VALUES = [
    Number(3),
    Name("a"),
    Product((Name("a"), Name("b"))),
    Sum((Name("a"), Name("b"))),
    parse_label("a -> b"),
    Group("a", 3),
    Tie(Name("a"), Name("b")),
    Move("w", (None,)),
    Change(torch.zeros(1), torch.zeros(1)),
    Mask({}),
    Ranking(),
    Selection(),
    described(),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_cannot_be_changed(value: object) -> None:
    for field in fields(value):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field.name, None)
