from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from algebra.small import small_layout
from raffm.algebra.group import Group
from raffm.algebra.layout import Layout
from raffm.algebra.selection import Selection
from raffm.errors import RaffmError, SelectionError


def example() -> Layout:
    """Two blocks: heads with their own qk each, a tied vo, a ffn cut in steps; a pinned vocabulary."""
    labels = {"embed": "vocab, r @ 5, 4"}
    groups = [Group("vocab", 0, pinned=True), Group("layers", 3, path="layers", required=(1,))]
    for i in range(3):
        labels[f"layers.{i}.q"] = f"r -> layers.{i}.h*layers.{i}.qk when layers[{i}] @ 9, 4"
        labels[f"layers.{i}.v"] = f"r -> layers.{i}.h*layers.{i}.vo when layers[{i}] @ 9, 4"
        labels[f"layers.{i}.up"] = f"r -> layers.{i}.f when layers[{i}] @ 8, 4"
        groups += [
            Group(f"layers.{i}.h", 3),
            Group(f"layers.{i}.qk", 3, base=f"layers.{i}.h"),
            Group(f"layers.{i}.vo", 3),
            Group(f"layers.{i}.f", 8, step=4, least=4),
        ]
    return small_layout(labels, *groups, ties={f"layers.{i}.vo": f"layers.{i}.qk" for i in range(3)})


def refusal(kept: dict, layout: Layout | None = None) -> str:
    with pytest.raises(SelectionError) as error:
        (layout or example()).select(kept)
    return str(error.value)


def lists(selection: Selection) -> dict[str, list]:
    return {name: indices.tolist() for name, indices in selection.kept.items()}


# -- what may be selected ------------------------------------------------------------------------------------------


def test_a_number_means_the_first_indices() -> None:
    selection = example().select({"layers.0.f": 4, "layers.1.qk": 2, "layers.1.vo": 2, "r": 3})
    assert lists(selection) == {
        "layers.0.f": [0, 1, 2, 3],
        "layers.1.qk": [[0, 1]] * 3,
        "layers.1.vo": [0, 1],
        "r": [0, 1, 2],
    }


def test_indices_are_sorted_and_whole_groups_left_out() -> None:
    selection = example().select({"r": [3, 0], "layers.0.f": [7, 6, 5, 4, 3, 2, 1, 0], "layers": [2, 1, 0], "layers.0.h": 3})
    assert lists(selection) == {"r": [0, 3]}


def test_fibred_rows_follow_the_kept_heads() -> None:
    kept = {"layers.0.qk": [[2, 1], [0, 2]], "layers.0.h": [0, 2], "layers.0.vo": [0, 2]}
    assert lists(example().select(kept))["layers.0.qk"] == [[1, 2], [0, 2]]
    assert lists(example().select(dict(reversed(kept.items()))))["layers.0.qk"] == [[1, 2], [0, 2]]


def test_fibred_rows_move_with_heads_that_are_given_in_another_order() -> None:
    one = {"layers.0.h": [0, 2], "layers.0.qk": [[0, 1], [1, 2]], "layers.0.vo": 2}
    other = {"layers.0.h": [2, 0], "layers.0.qk": [[1, 2], [0, 1]], "layers.0.vo": 2}
    assert example().select(one) == example().select(other)


def test_groups_of_dropped_blocks_are_left_out() -> None:
    selection = example().select({"layers": [1], "layers.0.f": 4, "layers.1.f": 4})
    assert lists(selection) == {"layers": [1], "layers.1.f": [0, 1, 2, 3]}
    assert selection == example().select({"layers": [1], "layers.1.f": 4, "layers.2.qk": 2, "layers.2.vo": 3})


def test_groups_that_only_dropped_blocks_share_are_left_out() -> None:
    labels = {f"b.{i}.w": f"{'n' if i else 'm'} when b[{i}] @ 4" for i in range(3)}
    layout = small_layout(labels, Group("b", 3, path="b"))
    assert layout.select({"b": [0], "n": 2}) == layout.select({"b": [0]})


def test_tensors_arrays_and_lists_are_taken_alike() -> None:
    layout = example()
    for indices in ([1, 3], torch.tensor([3, 1]), torch.tensor([1, 3], dtype=torch.int32), np.array([1, 3])):
        assert layout.select({"r": indices}) == layout.select({"r": [1, 3]})


def test_a_selection_has_indices_of_its_own() -> None:
    given = torch.tensor([1, 3])
    selection = example().select({"r": given})
    given[0] = 2
    assert selection.kept["r"].tolist() == [1, 3]


# -- what may not --------------------------------------------------------------------------------------------------


def test_an_unknown_group_is_refused_with_the_known_ones() -> None:
    found = refusal({"layers.0.fnn": 4})
    assert found.startswith("there is no group 'layers.0.fnn'. The groups are: `layers`, `layers.0.h`, ")
    assert found.endswith("and 3 more.")
    assert issubclass(SelectionError, RaffmError)


def test_a_pinned_group_is_refused() -> None:
    assert refusal({"vocab": [0, 1]}) == "group `vocab` is pinned and cannot be cut."


@pytest.mark.parametrize(
    ("indices", "found"),
    [([0, 4], "index 4"), ([-1, 2], "index -1"), (5, "index 4"), ([-2, 9], "index 9"), ([0, 1, 2, 3, 4], "index 4")],
)
def test_an_index_out_of_range_is_refused(indices: object, found: str) -> None:
    assert refusal({"r": indices}) == f"{found} is out of range for group `r`, which has indices 0 to 3."


def test_a_repeated_index_is_refused() -> None:
    assert refusal({"r": [1, 2, 1]}) == "group `r` was given an index twice. Every index may be kept once."
    assert "`layers.0.qk` was given an index twice" in refusal({"layers.0.qk": [[0, 1], [1, 2], [2, 2]], "layers.0.vo": 2})


def test_an_empty_group_is_refused() -> None:
    assert refusal({"r": 0}) == "group `r` cannot keep 0 indices. Keep at least one."
    assert "`layers.0.qk` cannot keep 0" in refusal({"layers.0.qk": 0})
    assert "`layers.0.qk` would keep nothing" in refusal({"layers.0.qk": torch.zeros(3, 0, dtype=torch.int64)})


def test_a_size_below_the_least_is_refused() -> None:
    assert refusal({"layers.0.f": 2}) == "group `layers.0.f` would keep 2 of 8; it must keep at least 4."


def test_a_size_between_the_steps_is_refused() -> None:
    assert refusal({"layers.0.f": 6}) == "group `layers.0.f` is cut in steps of 4, so 6 is no possible size."


def test_a_whole_group_needs_no_step() -> None:
    layout = small_layout({"w": "a @ 7"}, Group("a", 0, step=4))
    assert layout.select({"a": 7}) == Selection()
    assert lists(layout.select({"a": 4})) == {"a": [0, 1, 2, 3]}


def test_a_required_block_is_kept() -> None:
    expected = "block 1 of `layers` cannot be dropped: later blocks need its shortcut or its tables. Keep it."
    assert refusal({"layers": [0, 2]}) == expected


def test_unequal_heads_are_refused_with_their_counts() -> None:
    found = refusal({"layers.0.qk": [[0, 1], [0], [1, 2]], "layers.0.vo": 2})
    assert "group `layers.0.qk` keeps 2 indices in head 0 but 1 in head 1" in found
    assert found.endswith("Cut each head to the same size, or drop whole heads.")


@pytest.mark.parametrize("table", [[[0, 1]], [0, 1], [0, 1, 2], [[0, 1]] * 4, [[[0, 1]] * 3], [[[0, 1]]] * 3])
def test_a_table_of_the_wrong_shape_is_refused(table: list) -> None:
    found = refusal({"layers.0.qk": table, "layers.0.vo": 2})
    assert "group `layers.0.qk` keeps its own indices in every kept index of `layers.0.h`: 3 rows were expected" in found
    assert found.endswith(f"have shape {tuple(torch.tensor(table).shape)}.")


def test_a_table_must_have_a_row_for_every_kept_head() -> None:
    found = refusal({"layers.0.h": [0, 2], "layers.0.qk": [[0, 1]] * 3, "layers.0.vo": 2})
    assert "2 rows were expected" in found


def test_a_table_is_refused_where_one_list_is_meant() -> None:
    assert refusal({"r": [[0, 1]]}) == "group `r` takes one list of indices, but was given a table of them."


@pytest.mark.parametrize("indices", [[0.0, 1.0], [True, False], 1.5])
def test_what_is_no_integer_is_refused(indices: object) -> None:
    assert refusal({"r": indices}) == f"group `r` takes a size or a list of integers, but was given {indices!r}."


def test_a_broken_tie_is_refused_with_both_counts() -> None:
    found = refusal({"layers.0.vo": 2})
    assert found.startswith("the count tie `layers.0.vo = layers.0.qk` is broken: it would be 2 = 3.")


def test_ties_of_dropped_blocks_do_not_count() -> None:
    layout = example()
    assert layout.select({"layers": [1, 2], "layers.0.vo": 2}) == layout.select({"layers": [1, 2]})
    shared = small_layout({"b.0.w": "m when b[0] @ 4", "b.1.w": "n when b[1] @ 4"}, Group("b", 2, path="b"), ties={"m": "n"})
    assert lists(shared.select({"b": [1], "n": 2})) == {"b": [1], "n": [0, 1]}


def test_the_advice_for_a_broken_tie_fits_the_tie() -> None:
    layout = small_layout({"v": "vo @ 6", "r": "rot @ 3"}, ties={"vo": "2*rot"})
    assert "to the same count" not in refusal({"vo": 4}, layout)


def test_a_bool_is_no_size() -> None:
    refusal({"r": True})


@pytest.mark.parametrize("given", [-1, None])
def test_what_is_no_size_is_refused(given: object) -> None:
    assert "`r`" in refusal({"r": given})


@pytest.mark.parametrize("given", ["8", ["a"], [0, [1]]])
def test_what_is_no_list_of_integers_is_refused_as_such(given: object) -> None:
    assert "head 0" not in refusal({"r": given})


@pytest.mark.parametrize(("given", "wrong"), [([], "float32"), (np.int64(3), "a table"), (torch.tensor(3), "a table")])
def test_a_refusal_says_what_was_given(given: object, wrong: str) -> None:
    assert wrong not in refusal({"r": given})


def test_a_group_is_never_empty_whatever_its_least_size() -> None:
    refusal({"a": 0}, small_layout({"w": "a @ 3"}, Group("a", 0, least=0)))


# -- values --------------------------------------------------------------------------------------------------------


def test_a_selection_is_written_in_plain_integers() -> None:
    selection = example().select(
        {"r": [0, 1], "layers": [0, 1], "layers.0.f": [0, 1, 2, 7], "layers.1.qk": 2, "layers.1.vo": 2}
    )
    assert selection.to_json() == {
        "layers": 2,
        "layers.0.f": [0, 1, 2, 7],
        "layers.1.qk": [[0, 1], [0, 1], [0, 1]],
        "layers.1.vo": 2,
        "r": 2,
    }


def test_a_selection_shows_its_sizes() -> None:
    selection = example().select({"r": [0, 2], "layers.1.qk": 2, "layers.1.vo": 2})
    assert repr(selection) == "Selection(layers.1.qk: 2, layers.1.vo: 2, r: 2)"
    assert repr(Selection()) == "Selection(everything)"
    assert Selection().is_everything
    assert not selection.is_everything


def test_selections_are_equal_by_contents() -> None:
    one, same = (
        Selection({"a": torch.tensor([1]), "b": torch.tensor([2])}),
        Selection({"b": torch.tensor([2]), "a": torch.tensor([1])}),
    )
    assert one == same
    assert hash(one) == hash(same)
    others = [
        Selection(),
        Selection({"a": torch.tensor([1])}),
        Selection({"a": torch.tensor([2]), "b": torch.tensor([2])}),
        Selection({"a": torch.tensor([1]), "c": torch.tensor([2])}),
        Selection({"a": torch.tensor([[1]]), "b": torch.tensor([2])}),
    ]
    assert one not in others
    assert len({one, same, *others}) == 1 + len(others)
    assert one != "everything"
    assert (one == 1) is False


def test_the_digest_of_a_selection_never_changes() -> None:
    """It travels between processes and versions: these values are part of the format."""
    assert Selection().digest == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert Selection({"a": torch.tensor([0, 2])}).digest == "c8ad45058b4ba2bb502f93ef3b40a30403a6f0b4806a9d1ef91b9eba7e4b561c"


def test_a_selection_cannot_be_changed() -> None:
    selection = Selection({"a": torch.tensor([1])})
    with pytest.raises(TypeError):
        selection.kept["a"] = torch.tensor([2])
    with pytest.raises(AttributeError):
        selection.kept = {}


def test_copies_of_a_selection_are_equal() -> None:
    selection = Selection({"a": torch.tensor([1])})
    for other in (copy.copy(selection), copy.deepcopy(selection), pickle.loads(pickle.dumps(selection))):
        assert other == selection
        assert isinstance(other, Selection)


# -- coverage ------------------------------------------------------------------------------------------------------


def blocks() -> Layout:
    labels = {"b.0.w": "b.0.n, 2 when b[0] @ 3, 2", "b.1.w": "b.1.n, 2 when b[1] @ 3, 2", "b.1.gain": "scalar when b[1] @"}
    return small_layout(labels, Group("b", 2, path="b"))


def test_coverage_is_false_in_dropped_blocks_and_true_where_indices_are_kept() -> None:
    layout = blocks()
    selection = layout.select({"b": [0], "b.0.n": [0, 2]})
    assert selection.coverage(layout, "b.0.w").tolist() == [[True, True], [False, False], [True, True]]
    assert [factor.tolist() for factor in selection.factors(layout, "b.0.w")] == [[True, False, True], [True, True]]
    assert not selection.coverage(layout, "b.1.w").any()
    assert Selection().coverage(layout, "b.1.gain").item() is True


def test_a_scalar_in_a_dropped_block_is_not_covered() -> None:
    layout = blocks()
    assert layout.select({"b": [0]}).coverage(layout, "b.1.gain").item() is False
