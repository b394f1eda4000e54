from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raffm.algebra.axis import (
    Expression,
    Label,
    Name,
    Number,
    Product,
    Sum,
    as_stretch,
    coordinates,
    monomials,
    names,
    parse,
    parse_label,
    positions,
    renamed,
    value,
)
from raffm.errors import LabelError

A, B, C, D = Name("a"), Name("b"), Name("c"), Name("d")

# -- the notation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", Number(3)),
        ("a", A),
        ("layers.3.ffn", Name("layers.3.ffn")),
        ("stages.-1.out", Name("stages.-1.out")),
        ("_x-1", Name("_x-1")),
        ("#layers", Name("#layers")),
        ("a*b", Product((A, B))),
        (" a * b\t* c ", Product((A, B, C))),
        ("a + b+c", Sum((A, B, C))),
        ("a*b + c", Sum((Product((A, B)), C))),
        ("a + b*c", Sum((A, Product((B, C))))),
        ("a*(b + c)", Product((A, Sum((B, C))))),
        ("(a + b)*c", Product((Sum((A, B)), C))),
        ("a*(b + c)*2 + d", Sum((Product((A, Sum((B, C)), Number(2))), D))),
        ("((a))", A),
        ("2*a", Product((Number(2), A))),
        ("norm*8", Product((Name("norm"), Number(8)))),
    ],
)
def test_an_expression_is_read_by_the_rules_of_arithmetic(text: str, expected: Expression) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a*(b+c)*2", "a*(b + c)*2"),
        ("(a)", "a"),
        ("kv*rep*qk+kv*qk + kv*vo", "kv*rep*qk + kv*qk + kv*vo"),
        ("(a + b)*(c + 3)", "(a + b)*(c + 3)"),
    ],
)
def test_an_expression_is_printed_as_it_would_be_written(text: str, expected: str) -> None:
    assert str(parse(text)) == expected


atoms = st.one_of(st.integers(0, 99).map(Number), st.sampled_from(["a", "b", "layers.0.qk", "x-1", "_y", "#l"]).map(Name))


def products(parts: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    """Products of names, numbers and sums, then sums of names, numbers and products: none holds one of its own kind."""
    factors = st.one_of(atoms, parts.filter(lambda part: not isinstance(part, Product)))
    nested = st.lists(factors, min_size=2, max_size=3).map(lambda found: Product(tuple(found)))
    terms = st.one_of(atoms, nested)
    return st.one_of(nested, st.lists(terms, min_size=2, max_size=3).map(lambda found: Sum(tuple(found))))


expressions = st.recursive(atoms, products, max_leaves=8)


@given(expressions)
def test_reading_what_was_printed_gives_the_same_expression(expression: Expression) -> None:
    assert parse(str(expression)) == expression
    assert hash(parse(str(expression))) == hash(expression)


@pytest.mark.parametrize("text", ["(a*b)*c", "a*(b*c)", "(a + b) + c", "a + (b + c)"])
def test_brackets_that_change_nothing_are_not_kept(text: str) -> None:
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "where it has 'its end'"),
        ("   ", "where it has 'its end'"),
        ("a*", "'a*' needs a group or a number where it has 'its end'"),
        ("a +", "where it has 'its end'"),
        ("*a", "where it has '*'"),
        ("a**b", "where it has '*'"),
        ("a + + b", "where it has '+'"),
        ("()", "where it has ')'"),
        ("(a", "a bracket is not closed in '(a'"),
        ("(a b", "a bracket is not closed in '(a b'"),
        ("a)", "cannot read ')' in the expression 'a)'"),
        ("a b", "cannot read 'b' in the expression 'a b'"),
        ("a 3", "cannot read '3' in the expression 'a 3'"),
        ("a(b)", "cannot read '(' in the expression 'a(b)'"),
        ("3a", "cannot read '3a' in the expression '3a'"),
        ("3.5", "cannot read '3.5'"),
        ("33b*a", "cannot read '33b*a'"),
        ("a*$b", "cannot read '$b' in the expression 'a*$b'"),
        ("a / 2", "cannot read '/ 2'"),
        ("a - b", "cannot read '- b'"),
        ("-1", "cannot read '-1'"),
    ],
)
def test_text_that_is_no_expression_is_refused_with_the_place(text: str, found: str) -> None:
    with pytest.raises(LabelError) as error:
        parse(text)
    assert found in str(error.value)


def test_the_groups_of_an_expression_are_named_once_in_order() -> None:
    assert names(parse("b*(a + b*3) + c*a")) == ("b", "a", "c")
    assert names(parse("3*4")) == ()


def test_the_value_of_an_expression_is_its_arithmetic() -> None:
    assert value(parse("2*a*(b + c) + 7"), {"a": 3, "b": 4, "c": 5}) == 61
    assert value(parse("a"), {"a": 3}) == 3
    with pytest.raises(KeyError):
        value(parse("a"), {})


def test_monomials_are_the_expression_multiplied_out() -> None:
    assert dict(monomials(parse("2*b*(a + c)"))) == {("a", "b"): 2, ("b", "c"): 2}
    assert dict(monomials(parse("a + a + b*3"))) == {("a",): 2, ("b",): 3}
    assert dict(monomials(parse("(a + 1)*(a + 1)"))) == {("a", "a"): 1, ("a",): 2, (): 1}
    assert monomials(parse("7")) == (((), 7),)
    assert list(monomials(parse("b + a"))) == [(("a",), 1), (("b",), 1)]


@given(expressions)
def test_monomials_add_up_to_the_value(expression: Expression) -> None:
    sizes = {"a": 2, "b": 3, "layers.0.qk": 5, "x-1": 7, "_y": 11, "#l": 13}
    products = [times * prod(sizes[group] for group in groups) for groups, times in monomials(expression)]
    assert sum(products) == value(expression, sizes)


def test_renaming_reaches_every_group_and_nothing_else() -> None:
    assert renamed(parse("a*(b + 3) + a"), {"a": "x", "b": "y.1"}.__getitem__) == parse("x*(y.1 + 3) + x")


# -- positions -----------------------------------------------------------------------------------------------------

SIZES = {"h": 3, "d": 4, "v": 2, "f": 5}


def chosen(**indices: list) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(kept) for name, kept in indices.items()}


def listed(text: str, bases: dict[str, str] | None = None, **indices: list) -> object:
    where = positions(parse(text), SIZES, chosen(**indices), bases or {})
    return where.tolist() if isinstance(where, torch.Tensor) else where


def test_an_axis_of_whole_groups_has_no_positions() -> None:
    assert listed("h*d", f=[1]) is None
    assert listed("3") is None


@pytest.mark.parametrize(
    ("text", "indices", "expected"),
    [
        ("f", {"f": [0, 2]}, [0, 2]),
        ("f", {"f": [1, 2, 3]}, slice(1, 4)),
        ("f", {"f": [4]}, slice(4, 5)),
        ("f", {"f": [3, 2]}, [3, 2]),
        ("f", {"f": [0, 1, 2, 3, 4]}, slice(0, 5)),
        ("f", {"f": [1, 0, 2]}, [1, 0, 2]),
        ("f", {"f": [0, 2, 1, 3]}, [0, 2, 1, 3]),
        ("h*d", {"h": [0, 2]}, [0, 1, 2, 3, 8, 9, 10, 11]),
        ("h*d", {"h": [1]}, slice(4, 8)),
        ("h*d", {"d": [1, 3]}, [1, 3, 5, 7, 9, 11]),
        ("h*d", {"h": [2, 0], "d": [3]}, [11, 3]),
        ("h*2*v", {"v": [1]}, [1, 3, 5, 7, 9, 11]),
        ("v + f", {"f": [0, 4]}, [0, 1, 2, 6]),
        ("v + f", {"v": [1]}, slice(1, 7)),
        ("h*(v + v)", {"v": [1]}, [1, 3, 5, 7, 9, 11]),
        ("(v + 1)*h", {"v": [0], "h": [1]}, [1, 7]),
    ],
)
def test_positions_are_those_of_the_chosen_indices_in_their_order(text: str, indices: dict, expected: object) -> None:
    assert listed(text, **indices) == expected


@pytest.mark.parametrize(
    ("text", "indices", "expected"),
    [
        ("h*d", {"d": [[0, 1], [1, 2], [2, 3]]}, [0, 1, 5, 6, 10, 11]),
        ("h*d", {"h": [0, 2], "d": [[3], [0]]}, [3, 8]),
        ("h*d", {"h": [2, 0], "d": [[3], [0]]}, [11, 0]),
        ("h*d", {"h": [1]}, slice(4, 8)),
        ("h*2*d", {"h": [1, 2], "d": [[0], [3]]}, [8, 12, 19, 23]),
        ("h*(d + d + v)", {"h": [2], "d": [[1, 2]]}, [21, 22, 25, 26, 28, 29]),
        ("h*v*d + h*d", {"h": [0, 1], "d": [[0], [1]]}, [0, 4, 9, 13, 24, 29]),
        ("2*h*d", {"h": [0, 1], "d": [[0], [1]]}, [0, 5, 12, 17]),
    ],
)
def test_a_fibred_group_has_its_own_indices_in_every_head(text: str, indices: dict, expected: object) -> None:
    assert listed(text, {"d": "h"}, **indices) == expected


def test_a_stretch_is_a_slice_only_without_gap_and_in_order() -> None:
    assert as_stretch(torch.tensor([5])) == slice(5, 6)
    assert as_stretch(torch.tensor([2, 3])) == slice(2, 4)
    for gapped in ([2, 4], [3, 2], [0, 2, 1, 3], [0, 0], [1, 1, 3]):
        found = as_stretch(torch.tensor(gapped))
        assert isinstance(found, torch.Tensor)
        assert found.tolist() == gapped


@pytest.mark.parametrize(
    ("text", "group", "expected"),
    [
        ("v", "v", [0, 1]),
        ("v", "h", [-1, -1]),
        ("2", "v", [-1, -1]),
        ("v*h", "v", [0, 0, 0, 1, 1, 1]),
        ("v*h", "h", [0, 1, 2, 0, 1, 2]),
        ("2*v*2", "v", [0, 0, 1, 1, 0, 0, 1, 1]),
        ("v + 1 + v", "v", [0, 1, -1, 0, 1]),
        ("2*(v + 1)", "v", [0, 1, -1, 0, 1, -1]),
        ("(v + 1)*2", "v", [0, 0, 1, 1, -1, -1]),
        ("v*h", "f", [-1] * 6),
    ],
)
def test_coordinates_give_the_index_of_a_group_or_minus_one(text: str, group: str, expected: list[int]) -> None:
    assert coordinates(parse(text), SIZES, group).tolist() == expected


# -- labels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a -> b", Label((B, A), source=1, target=0)),
        ("a->b", Label((B, A), source=1, target=0)),
        ("a -> b transposed", Label((A, B), source=0, target=1)),
        ("a -> b transposed ", Label((A, B), source=0, target=1)),
        ("a -> b*c, 3, 3", Label((Product((B, C)), A, Number(3), Number(3)), source=1, target=0)),
        ("a -> b, 3 transposed", Label((A, B, Number(3)), source=0, target=1)),
        ("a, b + c", Label((A, Sum((B, C))))),
        ("a", Label((A,))),
        ("scalar", Label(())),
        (" scalar ", Label(())),
        ("scalar when layers[2]", Label((), guard=("layers", 2))),
        ("a when layers[0]", Label((A,), guard=("layers", 0))),
        ("a -> b when stages.1.blocks[12]", Label((B, A), source=1, target=0, guard=("stages.1.blocks", 12))),
        ("a -> b transposed when x[1] ", Label((A, B), source=0, target=1, guard=("x", 1))),
        ("scalar, a", Label((Name("scalar"), A))),
    ],
)
def test_a_label_is_read_with_its_direction_storage_and_guard(text: str, expected: Label) -> None:
    assert parse_label(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "a -> b*c",
        "a -> b, 3, 3",
        "a*2 -> b + c transposed",
        "a -> b, 3 transposed when layers[3]",
        "vocab, residual",
        "a*(b + c)",
        "scalar",
        "scalar when exits[1]",
        "residual -> classes when exits[1]",
    ],
)
def test_a_label_is_printed_as_it_was_written(text: str) -> None:
    assert str(parse_label(text)) == text


@given(
    st.lists(expressions, max_size=4),
    st.sampled_from(["", "->", "transposed"]),
    st.sampled_from([None, ("layers", 0), ("stages.0.blocks", 12)]),
)
def test_reading_a_printed_label_gives_the_same_label(axes: list, direction: str, guard: tuple | None) -> None:
    if direction and len(axes) >= 2:
        ends = {"source": 1, "target": 0} if direction == "->" else {"source": 0, "target": 1}
        label = Label(tuple(axes), guard=guard, **ends)
    else:
        label = Label(tuple(axes), guard=guard)
    assert parse_label(str(label)) == label


def test_a_label_knows_its_shape_and_its_groups() -> None:
    label = parse_label("a -> b*c, 3, a")
    assert label.shape({"a": 2, "b": 4, "c": 5}) == (20, 2, 3, 2)
    assert label.groups() == ("b", "c", "a")
    assert parse_label("scalar").shape({}) == ()
    assert parse_label("scalar").groups() == ()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "'its end'"),
        ("a,,b", "'its end'"),
        ("a, ", "'its end'"),
        ("a ->", "'its end'"),
        ("-> a", "'its end'"),
        ("a -> b -> c", "cannot read '-> c'"),
        ("a, b transposed", "cannot read 'transposed'"),
        ("a when layers", "cannot read 'when'"),
        ("a when layers[x]", "cannot read '[x]'"),
        ("a when layers[-1]", "cannot read '[-1]'"),
        ("a when layers[0] b", "cannot read '[0] b'"),
        ("scalar -> $", "cannot read '$'"),
    ],
)
def test_text_that_is_no_label_is_refused_with_the_place(text: str, found: str) -> None:
    with pytest.raises(LabelError) as error:
        parse_label(text)
    assert found in str(error.value)


@pytest.mark.parametrize("name", ["nontransposed", "conv.transposed", "is_transposed"])
def test_a_group_whose_name_ends_in_transposed_is_a_group(name: str) -> None:
    assert parse_label(f"a -> {name}") == Label((Name(name), A), source=1, target=0)


def test_a_guard_may_name_every_group_that_can_be_written() -> None:
    assert parse_label("a when my-blocks[1]") == Label((A,), guard=("my-blocks", 1))
