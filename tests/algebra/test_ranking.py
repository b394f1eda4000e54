from __future__ import annotations

import pytest
import torch

from algebra.small import small_layout
from raffm.algebra.group import Group
from raffm.algebra.layout import Layout
from raffm.algebra.move import permute
from raffm.algebra.ranking import Ranking, complete
from raffm.algebra.selection import Selection
from raffm.errors import SelectionError


def lists(selection: Selection) -> dict[str, list]:
    return {name: indices.tolist() for name, indices in selection.kept.items()}


def attention() -> Layout:
    return small_layout({"q": "h*d @ 6", "v": "h*v @ 6", "f": "f @ 4"}, Group("h", 2), Group("d", 3, base="h"), ties={"v": "d"})


def test_the_identity_ranking_keeps_the_first_indices() -> None:
    assert lists(Ranking().cut(attention(), {"h": 1, "f": 3})) == {"f": [0, 1, 2], "h": [0]}
    assert Ranking().cut(attention(), {}) == Selection()
    assert Ranking().cut(attention(), {"h": 2, "f": 4}) == Selection()


def test_the_best_indices_are_kept_whatever_their_order() -> None:
    ranking = Ranking({"f": torch.tensor([3, 1, 0, 2]), "h": torch.tensor([1, 0])})
    assert lists(ranking.cut(attention(), {"f": 2})) == {"f": [1, 3]}
    assert lists(ranking.cut(attention(), {"f": 3, "h": 1})) == {"f": [0, 1, 3], "h": [1]}


def test_fibred_rows_follow_the_heads_that_are_kept() -> None:
    ranking = Ranking({"h": torch.tensor([1, 0]), "d": torch.tensor([[2, 1, 0], [0, 2, 1]])})
    assert lists(ranking.cut(attention(), {"d": 2})) == {"d": [[1, 2], [0, 2]], "v": [0, 1]}
    assert lists(ranking.cut(attention(), {"d": 1, "h": 1})) == {"d": [[0]], "h": [1], "v": [0]}
    unranked = Ranking({"h": torch.tensor([1, 0])})
    assert lists(unranked.cut(attention(), {"d": 1, "h": 1})) == {"d": [[0]], "h": [1], "v": [0]}


def test_fibred_rows_stand_in_the_order_of_their_heads() -> None:
    layout = small_layout({"q": "h*d @ 9"}, Group("h", 3), Group("d", 3, base="h"))
    ranking = Ranking({"h": torch.tensor([2, 0, 1]), "d": torch.tensor([[0, 1, 2], [1, 0, 2], [2, 1, 0]])})
    assert lists(ranking.cut(layout, {"h": 2, "d": 1})) == {"h": [0, 2], "d": [[0], [2]]}


def test_groups_follow_their_ties_along_a_chain() -> None:
    labels = {"w": "a, b, c, e @ 4, 4, 8, 3"}
    for ties in ({"a": "b", "c": "2*b"}, {"c": "2*b", "a": "b"}, {"c": "a + b", "b": "a"}):
        layout = small_layout(labels, ties=ties)
        assert complete(layout, {"a": 3}) == {"a": 3, "b": 3, "c": 6}
        assert lists(Ranking().cut(layout, {"a": 3})) == {"a": [0, 1, 2], "b": [0, 1, 2], "c": [0, 1, 2, 3, 4, 5]}
        assert complete(layout, {"e": 2}) == {"e": 2}
        assert complete(layout, {"a": 4}) == {"a": 4}


def test_completing_sizes_leaves_the_given_ones_alone() -> None:
    layout = small_layout({"v": "vo @ 6", "q": "qk @ 6", "r": "rot @ 3"}, ties={"vo": "2*rot", "qk": "vo"})
    given = {"rot": 2}
    assert complete(layout, given) == {"rot": 2, "vo": 4, "qk": 4}
    assert given == {"rot": 2}
    assert None not in complete(layout, {"vo": 4}).values()


def test_a_long_chain_of_ties_is_followed_to_its_end() -> None:
    layout = small_layout({"w": "a, b, c, d, e @ 4, 4, 4, 4, 4"}, ties={"e": "d", "d": "c", "c": "b", "b": "a"})
    assert complete(layout, {"a": 2}) == dict.fromkeys("abcde", 2)


def test_a_size_against_a_tie_is_refused() -> None:
    with pytest.raises(SelectionError, match=r"the count tie `v = d` is broken: it would be 2 = 1"):
        Ranking().cut(attention(), {"v": 2, "d": 1})


def test_required_blocks_come_first() -> None:
    labels = {f"b.{i}.w": f"b.{i}.n when b[{i}] @ 4" for i in range(4)}
    layout = small_layout(labels, Group("b", 4, path="b", required=(0, 2)))
    ranking = Ranking({"b": torch.tensor([3, 2, 1, 0])})
    assert lists(ranking.cut(layout, {"b": 2})) == {"b": [0, 2]}
    assert lists(ranking.cut(layout, {"b": 3})) == {"b": [0, 2, 3]}
    assert lists(Ranking().cut(layout, {"b": 3, "b.1.n": 2, "b.3.n": 2})) == {"b": [0, 1, 2], "b.1.n": [0, 1]}
    with pytest.raises(SelectionError, match=r"block 0 of `b` cannot be dropped"):
        ranking.cut(layout, {"b": 1})


@pytest.mark.parametrize(("size", "found"), [(0, "to 0"), (5, "to 5"), (-1, "to -1")])
def test_an_impossible_size_is_refused(size: int, found: str) -> None:
    with pytest.raises(SelectionError) as error:
        Ranking().cut(attention(), {"f": size})
    assert str(error.value) == f"group `f` has 4 indices and cannot be cut {found}."


def test_the_size_of_an_unknown_group_is_refused() -> None:
    with pytest.raises(SelectionError, match=r"there is no group 'ffn'; `raffm inspect` lists them\."):
        Ranking().cut(attention(), {"ffn": 2})


def test_a_size_that_is_no_integer_is_refused() -> None:
    with pytest.raises(SelectionError, match="`f`"):
        Ranking().cut(attention(), {"f": 2.5})


def test_groups_follow_a_tie_in_both_directions() -> None:
    layout = small_layout({"v": "vo @ 6", "r": "rot @ 3"}, ties={"vo": "2*rot"})
    assert lists(Ranking().cut(layout, {"vo": 4})) == {"vo": [0, 1, 2, 3], "rot": [0, 1]}


def test_scores_become_an_order_and_stay_readable() -> None:
    scores = {"f": torch.tensor([1.0, 3.0, 2.0, 3.0]), "d": torch.tensor([[1, 2, 3], [3, 2, 1]])}
    ranking = Ranking.by_scores(scores)
    assert ranking.order["f"].tolist() == [1, 3, 2, 0]
    assert ranking.order["d"].tolist() == [[2, 1, 0], [0, 1, 2]]
    assert ranking.scores["f"] is scores["f"]
    assert dict(Ranking().scores) == dict(Ranking().order) == {}


def test_equal_scores_keep_their_order_however_many_they_are() -> None:
    scores = torch.arange(10_000) % 3
    order = Ranking.by_scores({"f": scores}).order["f"]
    assert order.tolist() == sorted(range(10_000), key=lambda index: (-(index % 3), index))
    assert Ranking.by_scores({"f": torch.zeros(10_000)}).order["f"].tolist() == list(range(10_000))


def test_a_ranking_cannot_be_changed() -> None:
    order, scores = {"f": torch.tensor([1, 0])}, {"f": torch.tensor([1.0, 2.0])}
    ranking = Ranking(order, scores)
    order["g"] = scores["g"] = torch.tensor([0])
    assert set(ranking.order) == set(ranking.scores) == {"f"}
    with pytest.raises(TypeError):
        ranking.order["f"] = torch.tensor([0, 1])
    with pytest.raises(TypeError):
        ranking.scores["f"] = torch.tensor([0, 1])
    assert ranking != Ranking(order), "rankings are compared by identity"


def test_depth_is_not_permuted() -> None:
    labels = {f"b.{i}.w": f"b.{i}.n when b[{i}] @ 3" for i in range(2)}
    layout = small_layout(labels, Group("b", 2, path="b"))
    tensors = {name: torch.arange(3) + 10 * i for i, name in enumerate(labels)}
    moved = permute(tensors, layout, Ranking({"b": torch.tensor([1, 0]), "b.0.n": torch.tensor([2, 0, 1])}))
    assert {name: tensor.tolist() for name, tensor in moved.items()} == {"b.0.w": [2, 0, 1], "b.1.w": [10, 11, 12]}


@pytest.mark.parametrize("order", [[1, 0], [0, 0, 1, 1], [[0, 1, 2, 3]]])
def test_an_order_that_is_no_permutation_of_its_group_is_refused(order: list) -> None:
    with pytest.raises(SelectionError, match="`f`"):
        permute({"f": torch.arange(4.0)}, attention(), Ranking({"f": torch.tensor(order)}))


def test_a_pinned_group_is_not_permuted() -> None:
    layout = small_layout({"w": "vocab @ 3"}, Group("vocab", 0, pinned=True))
    moved = permute({"w": torch.arange(3)}, layout, Ranking({"vocab": torch.tensor([2, 1, 0])}))
    assert moved["w"].tolist() == [0, 1, 2]


def test_the_order_of_an_unknown_group_is_refused() -> None:
    with pytest.raises(SelectionError, match="'ffn'"):
        permute({"f": torch.arange(4.0)}, attention(), Ranking({"ffn": torch.tensor([0, 1])}))


@pytest.mark.parametrize("order", [[1, 0], [[3, 2, 1, 0]]])
def test_a_cut_by_an_order_that_is_no_permutation_is_refused(order: list) -> None:
    with pytest.raises(SelectionError, match="`f`"):
        Ranking({"f": torch.tensor(order)}).cut(attention(), {"f": 3})
