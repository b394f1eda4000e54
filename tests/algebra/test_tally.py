from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch
from torch import Tensor

from algebra.small import small_layout
from raffm.algebra.group import Group
from raffm.algebra.layout import Layout
from raffm.algebra.mask import Mask
from raffm.algebra.move import extract
from raffm.algebra.selection import Selection
from raffm.algebra.sums import PIECE
from raffm.algebra.tally import Tally, stepped
from raffm.errors import UpdateError


def vector(dtype: torch.dtype = torch.float32, size: int = 4) -> tuple[Layout, dict[str, Tensor]]:
    return small_layout({"w": f"n @ {size}"}), {"w": torch.arange(1, size + 1).to(dtype)}


def bits(tensor: Tensor) -> list[int]:
    return tensor.view(torch.int32).tolist()


# -- rounds computed by hand ---------------------------------------------------------------------------------------


def test_a_round_computed_by_hand() -> None:
    layout, server = vector()
    tally = Tally(layout, server)
    tally.add({"w": torch.tensor([2.0, 4.0])}, layout.select({"n": 2}), weight=1.0)  # +1, +2
    tally.add({"w": torch.tensor([4.0, 3.0, 7.0])}, layout.select({"n": [0, 1, 3]}), weight=3.0)  # +3, +1, +3
    tally.step()
    assert server["w"].tolist() == [1 + 10 / 4, 2 + 5 / 4, 3.0, 7.0]


def test_changes_computed_by_hand() -> None:
    layout = small_layout({"w": "n, m @ 2, 3", "b": "m @ 3"})
    tally = Tally(layout, {"w": torch.zeros(2, 3), "b": torch.zeros(3)})
    tally.add({"w": torch.ones(2, 2), "b": torch.ones(2)}, layout.select({"m": [0, 2]}), weight=2.0)
    tally.add({"w": torch.ones(1, 3) * 4, "b": torch.ones(3) * 4}, layout.select({"n": [1]}), weight=1.0)
    changes = tally.changes()
    assert changes["w"].mean.tolist() == [[1, 0, 1], [2, 4, 2]]
    assert changes["w"].coverage.tolist() == [[2, 0, 2], [3, 1, 3]]
    assert changes["b"].mean.tolist() == [2, 4, 2]
    assert changes["b"].coverage.tolist() == [3, 1, 3]


def test_axes_that_nobody_cut_take_no_room_in_the_coverage() -> None:
    layout = small_layout({"w": "n, m, 2 @ 4, 3, 2", "s": "scalar @"})
    server = {"w": torch.zeros(4, 3, 2), "s": torch.tensor(0.0)}
    tally = Tally(layout, server)
    for weight in (1.0, 2.0):
        tally.add(server, Selection(), weight)
    coverage = tally.changes()["w"].coverage
    assert (coverage.shape, coverage.item()) == ((1, 1, 1), 3.0)
    tally.add(extract(server, layout, layout.select({"m": [0, 2]})), layout.select({"m": [0, 2]}), 5.0)
    changes = tally.changes()
    assert (changes["w"].coverage.shape, changes["w"].coverage.flatten().tolist()) == ((1, 3, 1), [5, 0, 5])
    assert (changes["s"].coverage.shape, changes["s"].coverage.item()) == ((), 5.0)


def test_counters_are_forgotten_after_the_step() -> None:
    layout = small_layout({"c": "scalar @"}, kinds={"c": "buffer"})
    server = {"c": torch.tensor(5)}
    tally = Tally(layout, server)
    tally.add({"c": torch.tensor(9)}, Selection())
    tally.add({"c": torch.tensor(7)}, Mask({}))
    tally.step()
    assert server["c"] == 9
    server["c"].fill_(1)
    tally.add({"c": torch.tensor(2)}, Selection())
    tally.step()
    assert server["c"] == 2


def test_a_counter_keeps_its_type() -> None:
    layout = small_layout({"c": "scalar @", "flag": "scalar @"}, kinds={"c": "buffer", "flag": "buffer"})
    server = {"c": torch.tensor(5, dtype=torch.int32), "flag": torch.tensor(False)}
    tally = Tally(layout, server)
    tally.add({"c": torch.tensor(9), "flag": torch.tensor(True)}, Selection())
    tally.step()
    assert (server["c"].item(), server["c"].dtype) == (9, torch.int32)
    assert (server["flag"].item(), server["flag"].dtype) == (True, torch.bool)


def test_a_tensor_may_be_empty() -> None:
    layout = small_layout({"w": "0, n @ 0, 3", "v": "n @ 3"})
    server = {"w": torch.zeros(0, 3), "v": torch.zeros(3)}
    held = layout.select({"n": [0, 2]})
    tally = Tally(layout, server)
    tally.add({"w": torch.zeros(0, 2), "v": torch.ones(2)}, held)
    tally.add({"w": torch.zeros(0, 3), "v": torch.ones(3)}, Mask({}))
    tally.step()
    assert (server["w"].shape, server["v"].tolist()) == ((0, 3), [1, 1, 1])


def test_transient_tensors_are_no_part_of_an_update() -> None:
    layout = small_layout({"w": "n @ 4", "t": "n @ 4"}, kinds={"t": "transient"})
    server = {"w": torch.zeros(4), "t": torch.zeros(4)}
    tally = Tally(layout, server)
    tally.add({"w": torch.ones(4)}, Selection())
    assert set(tally.changes()) == {"w"}
    Tally(layout, {"w": torch.zeros(4)})


def test_a_scalar_moves_by_the_mean_of_those_who_held_its_block() -> None:
    labels = {"b.0.w": "b.0.n when b[0] @ 2", "b.1.w": "b.1.n when b[1] @ 2", "b.1.gain": "scalar when b[1] @"}
    layout = small_layout(labels, Group("b", 2, path="b"))
    server = {"b.0.w": torch.zeros(2), "b.1.w": torch.zeros(2), "b.1.gain": torch.tensor(0.0)}
    tally = Tally(layout, server)
    tally.add({name: tensor + 1 for name, tensor in server.items()}, Selection())
    tally.add({"b.0.w": torch.zeros(2)}, layout.select({"b": [0]}))
    tally.step()
    assert server["b.1.w"].tolist() == [1, 1]
    assert server["b.1.gain"].item() == 1


def test_a_masked_client_may_hold_scalars() -> None:
    layout = small_layout({"w": "n @ 2", "gain": "scalar @"})
    server = {"w": torch.zeros(2), "gain": torch.tensor(0.0)}
    tally = Tally(layout, server)
    tally.add({"w": torch.ones(2), "gain": torch.tensor(1.0)}, Mask({"w": torch.tensor([True, False])}))
    tally.add({"w": torch.ones(2), "gain": torch.tensor(3.0)}, Mask({"gain": torch.tensor(False)}))
    tally.step()
    assert server["w"].tolist() == [1, 1]
    assert server["gain"].item() == 1


# -- bits and types ------------------------------------------------------------------------------------------------


def test_a_step_keeps_the_bits_of_what_does_not_move() -> None:
    server = torch.tensor([-0.0, 0.0, 1.5, -0.0, float("inf")])
    after = stepped(server, torch.tensor([0.0, -0.0, 0.0, 1.0, 0.0]))
    assert bits(after) == bits(torch.tensor([-0.0, 0.0, 1.5, 1.0, float("inf")]))


def test_a_step_is_taken_in_the_wider_type() -> None:
    server = torch.tensor([256.0], dtype=torch.bfloat16)
    assert stepped(server, torch.tensor([1.9])).dtype == torch.bfloat16
    assert stepped(server, torch.tensor([1.9])).item() == 258.0


def test_many_changes_to_half_precision_do_not_get_lost() -> None:
    """In bfloat16 itself a sum of ones stops at 256."""
    layout, _ = vector()
    server = {"w": torch.zeros(4, dtype=torch.bfloat16)}
    tally = Tally(layout, server)
    for number in range(400):
        half = layout.select({"n": 2}) if number % 2 else Selection()
        tally.add(extract({"w": torch.ones(4, dtype=torch.bfloat16)}, layout, half), half)
    changes = tally.changes()["w"]
    assert changes.mean.dtype == changes.coverage.dtype == torch.float32
    assert changes.mean.tolist() == [1, 1, 1, 1]
    assert changes.coverage.tolist() == [400, 400, 200, 200]


def test_a_half_precision_server_takes_updates_in_single_precision() -> None:
    layout, server = vector(torch.bfloat16)
    tally = Tally(layout, server)
    tally.add({"w": torch.tensor([1.5, 2.5, 3.5, 4.5])}, Selection())
    tally.add({"w": torch.tensor([2.5, 2.5, 3.5, 4.5])}, Selection())
    tally.step()
    assert (server["w"].dtype, server["w"].tolist()) == (torch.bfloat16, [2.0, 2.5, 3.5, 4.5])


def test_weights_are_as_precise_as_the_model() -> None:
    layout, server = vector(torch.float64)
    tally = Tally(layout, server)
    tally.add({"w": torch.full((4,), 9.0, dtype=torch.float64)}, Selection(), weight=0.1)
    tally.step()
    torch.testing.assert_close(server["w"], torch.full((4,), 9.0, dtype=torch.float64), rtol=1e-14, atol=0)


def test_tensors_of_several_types_share_a_tally() -> None:
    layout = small_layout({"a": "n @ 4", "b": "n @ 4", "c": "n @ 4"})
    server = {
        name: torch.zeros(4, dtype=dtype)
        for name, dtype in zip("abc", (torch.bfloat16, torch.float32, torch.float64), strict=True)
    }
    half = layout.select({"n": [1, 3]})
    tally = Tally(layout, server)
    for held in (Selection(), half, half, Selection()):
        tally.add(extract({name: tensor + 1 for name, tensor in server.items()}, layout, held), held)
    tally.step()
    assert [tensor.dtype for tensor in server.values()] == [torch.bfloat16, torch.float32, torch.float64]
    assert all(tensor.tolist() == [1, 1, 1, 1] for tensor in server.values())


def test_tensors_longer_than_a_piece_are_tallied_whole() -> None:
    layout = small_layout({"w": "n, m @ 700, 800"})
    server = {"w": torch.randn(700, 800)}
    assert server["w"].numel() > 2 * PIECE
    before = server["w"].clone()
    moved = before + torch.randn(700, 800)
    odd = layout.select({"n": list(range(1, 700, 2))})
    tally = Tally(layout, server)
    tally.add({"w": moved}, Selection(), 1.0)
    tally.add({"w": moved.T.contiguous().T}, Selection(), 2.0)
    tally.add({"w": before[1::2]}, odd, 3.0)
    tally.step()
    expected = moved.clone()
    expected[1::2] = (moved[1::2] + before[1::2]) / 2
    torch.testing.assert_close(server["w"], expected, rtol=1e-5, atol=1e-5)


def test_a_server_of_parameters_is_moved_in_place_without_a_graph() -> None:
    layout = small_layout({"w": "n, m @ 4, 3", "s": "scalar @"})
    server = {"w": torch.zeros(4, 3, requires_grad=True), "s": torch.zeros((), requires_grad=True)}
    places = {name: tensor.data_ptr() for name, tensor in server.items()}
    tally = Tally(layout, server)
    for kept in ({}, {"n": 2}, {"n": [0, 2]}, {"m": [0, 2]}, {"n": [0, 2], "m": [0, 2]}):
        held = layout.select(kept)
        update = {name: (tensor + 1).requires_grad_() for name, tensor in extract(server, layout, held).items()}
        tally.add(update, held)
        tally.add(update, held, sent={name: (tensor - 1) for name, tensor in update.items()})
    tally.step()
    assert {name: tensor.data_ptr() for name, tensor in server.items()} == places
    assert all(tensor.requires_grad and tensor.grad_fn is None for tensor in server.values())
    assert torch.equal(server["w"], torch.ones(4, 3))


def test_a_masked_server_of_parameters_builds_no_graph() -> None:
    layout = small_layout({"w": "n @ 4"})
    server = {"w": torch.zeros(4, requires_grad=True)}
    tally = Tally(layout, server)
    tally.add({"w": torch.ones(4, requires_grad=True)}, Mask({"w": torch.tensor([True, False, True, False])}))
    assert not tally.changes()["w"].mean.requires_grad


@pytest.mark.parametrize("name", ["sent", "change"])
def test_a_tensor_may_have_any_name(name: str) -> None:
    layout = small_layout({name: "n @ 3", "other": "n @ 3"})
    server = {name: torch.zeros(3), "other": torch.full((3,), 5.0)}
    tally = Tally(layout, server)
    for _ in range(2):
        tally.add({name: torch.ones(3), "other": torch.full((3,), 9.0)}, Selection())
    tally.step()
    assert server[name].tolist() == [1, 1, 1]
    assert server["other"].tolist() == [9, 9, 9]


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_refusal_says_what_was_found_and_expected() -> None:
    layout = small_layout({"b.0.w": "b.0.n when b[0] @ 4", "b.1.w": "b.1.n when b[1] @ 4"}, Group("b", 2, path="b"))
    server = {"b.0.w": torch.zeros(4), "b.1.w": torch.zeros(4)}
    tally = Tally(layout, server)
    held = layout.select({"b": [1], "b.1.n": 3})
    faults = {
        "`b.0.w` has shape (4,); its submodel has (3,).": {"b.0.w": torch.zeros(4)},
        "the update lacks `b.0.w`. Send exactly the tensors of its submodel.": {},
        "the update has the unknown tensors `b.1.w`.": {"b.0.w": torch.zeros(3), "b.1.w": torch.zeros(4)},
        "`b.0.w` is torch.int64; the server's is torch.float32.": {"b.0.w": torch.zeros(3, dtype=torch.int64)},
        "`b.0.w` holds a NaN or an infinity.": {"b.0.w": torch.tensor([0, 0, float("nan")])},
    }
    for found, update in faults.items():
        with pytest.raises(UpdateError) as error:
            tally.add(update, held, client=("site", 3))
        assert str(error.value).startswith("client ('site', 3): ")
        assert found in str(error.value)
    with pytest.raises(UpdateError, match=r"client '\?': the weight -1 is not"):
        tally.add({"b.0.w": torch.zeros(3)}, held, -1)
    many = dict.fromkeys("abcde", torch.zeros(1))
    with pytest.raises(UpdateError, match=r"lacks `a`, `b`, `c` and 2 more"):
        Tally(small_layout(dict.fromkeys(many, "n @ 1")), many).add({}, Selection())
    assert tally.changes() == {}


def test_a_counter_that_is_no_integer_is_refused() -> None:
    layout = small_layout({"c": "scalar @"}, kinds={"c": "buffer"})
    with pytest.raises(UpdateError, match=r"`c` is torch\.float32; the server's is torch\.int64"):
        Tally(layout, {"c": torch.tensor(5)}).add({"c": torch.tensor(5.0)}, Selection())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_what_is_not_finite_is_refused_in_every_type(dtype: torch.dtype, value: str) -> None:
    layout, server = vector(dtype)
    update = server["w"].clone()
    update[2] = float(value)
    with pytest.raises(UpdateError, match="NaN or an infinity"):
        Tally(layout, server).add({"w": update}, Selection())


def test_opposite_infinities_are_refused() -> None:
    layout, server = vector()
    with pytest.raises(UpdateError, match="NaN or an infinity"):
        Tally(layout, server).add({"w": torch.tensor([float("inf"), float("-inf"), 0, 0])}, Selection())


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 6e4), (torch.float32, 1e31), (torch.bfloat16, 1e31)])
def test_large_numbers_are_accepted(dtype: torch.dtype, value: float) -> None:
    layout = small_layout({"w": "n @ 64"})
    server = {"w": torch.zeros(64, dtype=dtype)}
    update = {"w": torch.full((64,), value, dtype=dtype)}
    tally = Tally(layout, server)
    tally.add(update, Selection())
    tally.step()
    assert torch.equal(server["w"], update["w"])


@pytest.mark.parametrize(
    ("dtype", "value", "given"), [(torch.float32, 1e300, torch.float64), (torch.float16, 1e6, torch.float32)]
)
def test_a_number_too_large_for_the_server_is_refused(dtype: torch.dtype, value: float, given: torch.dtype) -> None:
    layout, server = vector(dtype)
    tally = Tally(layout, server)
    with pytest.raises(UpdateError, match="`w`"):
        tally.add({"w": torch.full((4,), value, dtype=given)}, Selection())
    tally.step()
    assert server["w"].isfinite().all()


@pytest.mark.parametrize(("start", "weight"), [(-3e38, 1.0), (0.0, 1e3)])
def test_a_change_that_overflows_is_refused(start: float, weight: float) -> None:
    layout, _ = vector()
    server = {"w": torch.full((4,), start)}
    tally = Tally(layout, server)
    try:
        tally.add({"w": torch.full((4,), 3e38)}, Selection(), weight)
        tally.step()
    except UpdateError:
        pass
    assert server["w"].isfinite().all()


@pytest.mark.parametrize("sent", [{}, {"w": torch.zeros(1)}])
def test_an_update_against_something_else_than_was_sent_is_refused(sent: dict[str, Tensor]) -> None:
    layout, server = vector()
    before = server["w"].clone()
    tally = Tally(layout, server)
    with pytest.raises(UpdateError):
        tally.add({"w": torch.zeros(4)}, Selection(), sent=sent, client="phone")
    tally.step()
    assert torch.equal(server["w"], before)


@pytest.mark.parametrize(
    "kept",
    [
        {"w": torch.ones(3, dtype=torch.bool)},
        {"w": torch.ones(1, dtype=torch.bool)},
        {"w": torch.tensor([0.5, 1.0, 1.0, 1.0])},
        {"stranger": torch.ones(4, dtype=torch.bool)},
    ],
)
def test_a_mask_that_does_not_fit_is_refused_and_leaves_no_trace(kept: dict[str, Tensor]) -> None:
    layout = small_layout({"v": "m @ 2", "w": "n @ 4"})
    server = {"v": torch.zeros(2), "w": torch.zeros(4)}
    tally = Tally(layout, server)
    with pytest.raises(UpdateError):
        tally.add({"v": torch.ones(2), "w": torch.ones(4)}, Mask(kept), client="phone")
    tally.step()
    assert server["v"].tolist() == [0, 0]


@pytest.mark.parametrize(("foreign", "count"), [({"w": "n @ 9"}, 2), ({"v": "m @ 4"}, 4)])
def test_a_selection_of_another_layout_is_refused_and_leaves_no_trace(foreign: dict[str, str], count: int) -> None:
    layout, server = vector()
    (group,) = small_layout(foreign).groups
    held = small_layout(foreign).select({group: [0, 3] if count == 4 else [0, 8]})
    tally = Tally(layout, server)
    with pytest.raises(UpdateError):
        tally.add({"w": torch.zeros(count)}, held, client="phone")
    tally.step()
    assert server["w"].tolist() == [1, 2, 3, 4]


# -- masks ---------------------------------------------------------------------------------------------------------


def test_a_mask_covers_what_it_keeps_and_whole_tensors_elsewhere() -> None:
    layout = small_layout({"v": "n, 2 @ 2, 2", "w": "n @ 2", "s": "scalar @"})
    mask = Mask({"w": torch.tensor([True, False])})
    assert mask.coverage(layout, "w").tolist() == [True, False]
    assert mask.coverage(layout, "v").tolist() == [[True, True], [True, True]]
    assert (mask.coverage(layout, "s").item(), mask.coverage(layout, "s").dtype) == (True, torch.bool)
    assert mask != Mask(mask.kept), "masks are compared by identity"


def test_a_mask_may_cover_a_tensor_that_is_named_as_its_group_is() -> None:
    layout = small_layout({"n": "n @ 4"})
    server = {"n": torch.zeros(4)}
    tally = Tally(layout, server)
    tally.add({"n": torch.ones(4)}, Mask({"n": torch.tensor([True, False, False, True])}))
    tally.step()
    assert server["n"].tolist() == [1, 0, 0, 1]


def test_masked_rounds_computed_by_hand() -> None:
    layout, server = vector()
    tally = Tally(layout, server)
    tally.add({"w": torch.tensor([2.0, 9.0, 3.0, 9.0])}, Mask({"w": torch.tensor([True, False, True, False])}), 1.0)
    tally.add({"w": torch.tensor([4.0, 6.0])}, layout.select({"n": 2}), 3.0)
    tally.add({"w": torch.tensor([5.0, 2.0, 3.0, 4.0])}, Mask({"w": torch.tensor([True, True, False, False])}), 4.0)
    changes = tally.changes()["w"]
    assert changes.coverage.tolist() == [8, 7, 1, 0]
    torch.testing.assert_close(changes.mean, torch.tensor([(1 + 9 + 16) / 8, 12 / 7, 0, 0]))


# -- memory --------------------------------------------------------------------------------------------------------

PEAK = """
import resource, sys
import torch
from raffm.algebra.axis import parse_label
from raffm.algebra.layout import Layout
from raffm.algebra.move import extract
from raffm.algebra.tally import Tally

torch.set_num_threads(1)
labels = {f"w{i}": parse_label("n -> m") for i in range(12)}
layout = Layout.build(labels, {name: (1024, 1024) for name in labels})
server = {name: torch.ones(1024, 1024) for name in labels}  # 48 MiB
tally = Tally(layout, server)
for number in range(int(sys.argv[1])):
    first = 16 * (number % 10)
    selection = layout.select({"m": list(range(first, first + 256)), "n": list(range(first, first + 512))})
    tally.add(extract(server, layout, selection), selection, 1.0 + number)
tally.step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_the_memory_of_a_tally_does_not_depend_on_the_number_of_clients() -> None:
    steady = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 18)}  # else the heap's own moods are larger than the limit
    few, many = (
        int(subprocess.run([sys.executable, "-c", PEAK, str(n)], env=steady, capture_output=True, text=True, check=True).stdout)
        for n in (10, 100)
    )
    assert abs(many - few) < 0.05 * few


# -- time ----------------------------------------------------------------------------------------------------------


def seconds_of_changes(blocks: int) -> float:
    """The processor time of one round's means, over a model of so many blocks that are cut in depth."""
    labels = {f"b.{i}.w{j}": f"b.{i}.n when b[{i}] @ 4" for i in range(blocks) for j in range(8)}
    layout = small_layout(labels, Group("b", blocks, path="b"))
    server = {name: torch.zeros(4) for name in labels}
    tally = Tally(layout, server)
    for count in (blocks - 1, blocks - 2):
        held = layout.select({"b": count})
        tally.add(extract(server, layout, held), held)
    start = time.process_time()
    tally.changes()
    return time.process_time() - start


def test_the_time_of_a_round_grows_with_the_number_of_tensors_and_not_with_its_square() -> None:
    seconds_of_changes(4)
    few, many = (min(seconds_of_changes(blocks) for _ in range(2)) for blocks in (6, 36))
    assert many < 14 * few
