import sys
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest

from raffm.errors import RunError
from raffm.report.tracker import Several, TensorBoard, values_of, values_of_evaluation
from raffm.rounds.results import Evaluation, Scores
from report.sample import VIEWED, results


class Kept:
    def __init__(self) -> None:
        self.entries: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, values: dict[str, float]) -> None:
        self.entries.append((step, dict(values)))


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


def test_a_round_gives_its_loss_and_its_traffic() -> None:
    entry = results().rounds[8]
    values = values_of(entry)
    assert values["train/loss"] == entry.loss
    assert values["train/bytes_up"] == 540_000_000
    assert (values["train/clients"], values["train/refused"]) == (6, 1)


def test_a_round_from_which_nobody_came_back_has_no_loss() -> None:
    assert "train/loss" not in values_of(replace(results().rounds[0], loss=None))


def test_an_evaluation_gives_the_mean_over_sizes_and_each_size() -> None:
    entry = results(VIEWED).evaluations[3]
    values = values_of_evaluation(entry, "accuracy")
    tests = [scores.test["accuracy"] for scores in entry.sizes.values()]
    assert values["global/accuracy"] == pytest.approx(sum(tests) / 5)
    assert values["size 1/4 windows/accuracy"] == entry.sizes["1/4 windows"].test["accuracy"]
    assert values["size 1/4/loss"] == entry.sizes["1/4"].test["loss"]
    assert values["size 1/4/clients worst decile"] == entry.sizes["1/4"].clients_worst_decile["accuracy"]


def test_what_was_not_measured_has_no_tag() -> None:
    bare = Evaluation(1, {"1": Scores({"accuracy": 0.5}, {}, {"accuracy": nan}, {})})
    assert values_of_evaluation(bare, "accuracy") == {"global/accuracy": 0.5, "size 1/accuracy": 0.5}
    assert values_of_evaluation(Evaluation(1, {}), "accuracy") == {}


def test_several_trackers_get_the_same_values() -> None:
    first, second = Kept(), Kept()
    Several([first, second]).log(3, {"train/loss": 0.5})
    assert first.entries == second.entries == [(3, {"train/loss": 0.5})]


def test_tensorboard_groups_by_size(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.log(5, values_of_evaluation(results().evaluations[0], "accuracy"))
    board.close()
    groups = {tag.split("/")[0] for tag in points(tmp_path)}
    assert groups == {"global", "size 1", "size 1\N{DIVISION SLASH}4", "size 1\N{DIVISION SLASH}16"}


def test_values_are_on_disk_before_the_board_is_closed(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.log(1, {"train/loss": 0.5})
    assert points(tmp_path) == {"train/loss": [(1, 0.5)]}
    board.close()
    board.close()


def test_a_resumed_run_shows_no_round_twice(tmp_path: Path) -> None:
    for rounds, loss in ((range(1, 9), 4.0), (range(6, 11), 2.0)):
        board = TensorBoard(tmp_path)
        for step in rounds:
            board.log(step, {"train/loss": loss})
        board.close()
    shown = points(tmp_path)["train/loss"]
    assert shown == [(step, 4.0) for step in range(1, 6)] + [(step, 2.0) for step in range(6, 11)]


def test_a_board_that_was_never_written_to_leaves_no_file(tmp_path: Path) -> None:
    TensorBoard(tmp_path / "log").close()
    assert not (tmp_path / "log").exists()


def test_missing_tensorboard_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RunError, match=r"pip install raffm\[tensorboard\]"):
        TensorBoard(tmp_path)


def test_a_loss_that_diverged_is_shown(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.log(1, values_of(replace(results().rounds[0], loss=nan)))
    board.close()
    assert len(points(tmp_path)["train/loss"]) == 1
