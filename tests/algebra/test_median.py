"""Updates joined by their median: element by element, over those who held it."""

import pytest
import torch
from torch import Tensor

from raffm.algebra.axis import parse_label
from raffm.algebra.group import Group
from raffm.algebra.layout import Layout
from raffm.algebra.mask import Mask
from raffm.algebra.median import Median
from raffm.algebra.selection import Selection
from raffm.algebra.tally import Tally
from raffm.errors import UpdateError

LAYOUT = Layout.build(
    {"w": parse_label("a -> classes"), "n": parse_label("scalar")},
    {"w": (2, 3), "n": ()},
    [Group("classes", 0, pinned=True)],
    kinds={"n": "buffer"},
)


def server() -> dict[str, Tensor]:
    return {"w": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), "n": torch.tensor(3)}


def moved(*updates: tuple[dict[str, Tensor], Selection | Mask, float]) -> dict[str, Tensor]:
    tensors = server()
    tally = Median(LAYOUT, tensors)
    for place, (update, held, weight) in enumerate(updates):
        tally.add(update, held, weight, client=place)
    tally.step()
    return tensors


def whole(by: float, weight: float = 1.0, count: int = 3) -> tuple[dict[str, Tensor], Selection, float]:
    return {"w": server()["w"] + by, "n": torch.tensor(count)}, Selection(), weight


def test_one_client_that_is_far_off_moves_nothing_further_than_the_others_do() -> None:
    assert torch.equal(moved(whole(1.0), whole(2.0), whole(1e6, weight=1e6))["w"], server()["w"] + 2)


def test_of_an_even_number_the_middle_two_are_averaged() -> None:
    assert torch.equal(moved(whole(-8.0), whole(1.0), whole(2.0), whole(64.0))["w"], server()["w"] + 1.5)


def test_every_element_has_the_median_of_those_who_held_it() -> None:
    first = {"w": torch.tensor([[11.0], [14.0]]), "n": torch.tensor(3)}  # + 10 on column 0
    second = {"w": torch.tensor([[2.0, 3.0], [5.0, 6.0]]), "n": torch.tensor(3)}  # + 1 on columns 0 and 1
    third = {"w": torch.tensor([[0.0, 1.0], [3.0, 4.0]]), "n": torch.tensor(3)}  # - 1 there
    one, two = LAYOUT.select({"a": [0]}), LAYOUT.select({"a": [0, 1]})
    after = moved((first, one, 1.0), (second, two, 1.0), (third, two, 1.0))
    assert torch.equal(
        after["w"], torch.tensor([[2.0, 2.0, 3.0], [5.0, 5.0, 6.0]])
    )  # medians of 10, 1, -1; of 1, -1; of nothing


def test_masks_and_classes_that_do_not_count_are_honoured() -> None:
    kept = torch.tensor([[True, False, False], [False, False, True]])
    tensors = server()
    tally = Median(LAYOUT, tensors)
    tally.add({"w": server()["w"] + 4, "n": torch.tensor(3)}, Mask({"w": kept}))
    tally.add({"w": server()["w"] + 2, "n": torch.tensor(3)}, Selection(), counted={"classes": torch.tensor([True, False])})
    tally.step()
    expected = server()["w"] + torch.tensor([[3.0, 2.0, 2.0], [0.0, 0.0, 4.0]])
    assert torch.equal(tensors["w"], expected)


def test_clients_that_changed_nothing_change_nothing_bit_for_bit() -> None:
    after = moved(whole(0.0), whole(0.0), whole(0.0))
    assert torch.equal(after["w"], server()["w"])


def test_a_weight_of_0_leaves_a_client_out_and_counters_take_the_largest() -> None:
    after = moved(whole(1.0, count=7), whole(5.0, weight=0.0), whole(1.0, count=4))
    assert torch.equal(after["w"], server()["w"] + 1)
    assert int(after["n"]) == 7


def test_it_begins_anew_after_every_step_and_agrees_with_the_mean_of_equal_updates() -> None:
    tensors, other = server(), server()
    median, mean = Median(LAYOUT, tensors), Tally(LAYOUT, other)
    for _ in range(2):
        for tally, current in ((median, tensors), (mean, other)):
            for _ in range(3):
                tally.add({"w": current["w"] + 1, "n": torch.tensor(3)}, Selection())
            tally.step()
    assert torch.equal(tensors["w"], other["w"])


def test_a_refused_update_leaves_no_trace_and_sums_are_refused() -> None:
    tensors = server()
    tally = Median(LAYOUT, tensors)
    for bad in (torch.nan, torch.inf):
        with pytest.raises(UpdateError, match="client 'eve'"):
            tally.add({"w": server()["w"] * bad, "n": torch.tensor(3)}, Selection(), client="eve")
    with pytest.raises(UpdateError, match="weight"):
        tally.add(whole(1.0)[0], Selection(), -1.0)
    tally.step()
    assert torch.equal(tensors["w"], server()["w"])
    with pytest.raises(UpdateError, match="cannot be added up"):
        tally.totals()
