"""A run that is stopped, killed, or runs out of disk goes on as if nothing had happened; a wrong checkpoint is refused."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import QUICK, ended, raffm, started, trained, wait_for
from raffm.data.task import ImageClassification
from raffm.errors import CheckpointError
from raffm.models.files import read_tensors, write_tensors
from raffm.rounds import checkpoint
from raffm.rounds.backend import Serial
from raffm.rounds.loop import Interrupted, Keeping, interruptible, train
from raffm.rounds.plan import Evaluating, Merging, Participation, Plan
from raffm.rounds.results import Evaluation, Results, Round
from raffm.simulate.pooled import Pooled
from rounds.made import RESNET, are_equal, plan, run, values

COMPARED = (
    "checkpoint/server.safetensors",
    "checkpoint/optimizer.safetensors",
    "checkpoint/run.json",
    "checkpoint/results.json",
    "results.json",
)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAFFM_CACHE", str(tmp_path_factory.getbasetemp() / "raffm-cache"))


class LightningError(Exception):
    """Strikes in the middle of a round."""


class Struck:
    """A watcher that ends the run at a client of a round, as a killed program would."""

    def __init__(self, round: int) -> None:
        self._round = round

    def client(self, round: int, done: int, of: int) -> None:
        if round == self._round:
            raise LightningError

    def round(self, entry: Round, evaluation: Evaluation | None, results: Results) -> None:
        pass


def made(**changes: Any) -> Plan:
    given = {"rounds": 4, "merging": Merging(optimizer="momentum", lr=0.5), "evaluating": Evaluating(every=2)}
    participation = Participation(clients=3, dropout=0.2)
    return plan(**{"method": "heterofl", "participation": participation, **given, **changes})


def keeping(folder: Path, **changes: Any) -> Keeping:
    return Keeping(folder / "checkpoint", **changes)


# -- going on ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["serial", "pooled"])
@pytest.mark.parametrize(("method", "model"), [("heterofl", "vit:tiny"), ("fiarse", RESNET)])
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(backend: str, method: str, model: str, tmp_path: Path) -> None:
    whole, parts, again = (made(method=method, model=model, rounds=3) for _ in range(3))

    def going(a_plan: Plan, folder: str, **how: Any) -> Results:
        watcher = how.pop("watcher", None)
        return run(a_plan, Pooled(a_plan, 2) if backend == "pooled" else None, keeping(tmp_path / folder, **how), watcher)

    expected = going(whole, "whole")
    with pytest.raises(LightningError):
        going(parts, "parts", watcher=Struck(2))
    assert checkpoint.load(tmp_path / "parts" / "checkpoint", None).round == 2
    found = going(again, "parts", resume=True)
    assert are_equal(values(again), values(whole))
    assert found.to_json() == expected.to_json()
    for name in ("server", "optimizer"):
        left, right = (tmp_path / folder / "checkpoint" / f"{name}.safetensors" for folder in ("whole", "parts"))
        assert left.read_bytes() == right.read_bytes()


def test_a_run_that_is_saved_every_third_round_goes_back_to_the_last_of_them(tmp_path: Path) -> None:
    whole, again = made(), made()
    expected = run(whole)
    with pytest.raises(LightningError):
        run(made(), None, keeping(tmp_path, every=3), Struck(3))
    assert checkpoint.load(tmp_path / "checkpoint", None).round == 3
    assert run(again, None, keeping(tmp_path, every=3, resume=True)) == expected
    assert are_equal(values(again), values(whole))


def test_the_results_of_a_resumed_run_are_written_byte_for_byte_alike(tmp_path: Path) -> None:
    whole = run(made(rounds=2))
    with pytest.raises(LightningError):
        run(made(rounds=2), None, keeping(tmp_path), Struck(1))
    again = run(made(rounds=2), None, keeping(tmp_path, resume=True))
    assert json.dumps(again.to_json()) == json.dumps(whole.to_json())


def test_a_finished_run_that_is_resumed_is_what_it_was(tmp_path: Path) -> None:
    expected = run(made(rounds=2), None, keeping(tmp_path))
    again = made(rounds=2)
    assert run(again, None, keeping(tmp_path, resume=True)) == expected


def test_resuming_where_nothing_was_saved_begins(tmp_path: Path) -> None:
    assert run(made(rounds=1), None, keeping(tmp_path, resume=True)) == run(made(rounds=1))


def test_a_run_may_go_on_with_another_backend_and_for_longer(tmp_path: Path) -> None:
    run(made(rounds=2), None, keeping(tmp_path))
    longer = made(rounds=4)
    found = run(longer, Pooled(longer, 2), keeping(tmp_path, resume=True))
    assert [entry.round for entry in found.rounds] == [1, 2, 3, 4]


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    run(made(rounds=1), None, keeping(tmp_path))
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds a run already. Resume it \(--resume\), or choose another folder"):
        run(made(rounds=1), None, keeping(tmp_path))
    assert snapshot(tmp_path) == before


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# -- checkpoints that do not fit -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one round."""
    folder = tmp_path_factory.mktemp("once")
    run(made(rounds=1), None, keeping(folder))
    return folder


@pytest.fixture
def saved(once: Path, tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    shutil.copytree(once, tmp_path, dirs_exist_ok=True)
    return tmp_path / "checkpoint"


def refused(folder: Path, a_plan: Plan, words: str) -> None:
    """Resuming is refused in these words, and neither the files nor the model change."""
    before, files = values(a_plan), snapshot(folder)
    with pytest.raises(CheckpointError, match=words):
        run(a_plan, None, keeping(folder.parent, resume=True))
    assert are_equal(values(a_plan), before)
    assert snapshot(folder) == files


@pytest.mark.parametrize("name", ["server.safetensors", "optimizer.safetensors", "results.json", "run.json"])
@pytest.mark.parametrize("left", [0.0, 0.6])
def test_a_truncated_file_is_refused(name: str, left: float, saved: Path) -> None:
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[: int(len(content) * left)])
    refused(saved, made(rounds=2), "damaged|cut short")


@pytest.mark.parametrize("name", ["server.safetensors", "optimizer.safetensors", "results.json"])
def test_a_missing_file_is_refused(name: str, saved: Path) -> None:
    (saved / name).unlink()
    refused(saved, made(rounds=2), f"has no {name}")


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"format": 1, "rounds": 3}', "null", '{"sizes": 3, "rounds": [], "evaluations": []}']
)
def test_results_that_say_something_else_are_refused(content: str, saved: Path) -> None:
    (saved / "results.json").write_text(content)
    refused(saved, made(rounds=2), "damaged|no JSON object")


def test_results_whose_evaluations_are_no_tables_are_refused(saved: Path) -> None:
    content = json.loads((saved / "results.json").read_text())
    content["evaluations"] = [{"round": 1, "sizes": []}]
    (saved / "results.json").write_text(json.dumps(content))
    refused(saved, made(rounds=2), "damaged")


@pytest.mark.parametrize("change", [{"format": 99}, {"round": "soon"}, {"round": None}])
def test_a_head_that_says_something_else_is_refused(change: dict[str, object], saved: Path) -> None:
    content = json.loads((saved / "run.json").read_text())
    (saved / "run.json").write_text(json.dumps({**content, **change}))
    refused(saved, made(rounds=2), "damaged|format 99")


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"method": "fedrolex"},
        {"fleet": "1, 1/16"},
        {"merging": Merging()},
        {"participation": Participation(clients=2)},
        {"model": RESNET},
        {"config": {"intermediate_size": 16}},
        {"evaluating": Evaluating(every=3)},
    ],
)
def test_the_checkpoint_of_another_run_is_refused(changes: dict[str, Any], saved: Path) -> None:
    refused(saved, made(**{"rounds": 2, **changes}), "belongs to another run")


@pytest.mark.parametrize("what", ["task", "labels"])
def test_a_run_of_another_task_or_other_examples_is_refused(what: str, saved: Path) -> None:
    other = made(rounds=2)
    if what == "task":
        other = replace(other, task=ImageClassification(crop=2))
    else:
        dataset = other.data.dataset
        turned = replace(dataset, train=replace(dataset.train, labels=(dataset.train.labels + 1) % 10))
        other = replace(other, data=replace(other.data, dataset=turned))
    refused(saved, other, "belongs to another run")


def test_a_checkpoint_with_a_tensor_that_does_not_fit_changes_nothing(saved: Path) -> None:
    tensors = read_tensors(saved / "server.safetensors")
    last = list(tensors)[-1]
    write_tensors(saved / "server.safetensors", {**tensors, last: torch.zeros(2, 2)})
    refused(saved, made(rounds=2), f"holds another model: `{last}` does not fit")


def test_a_checkpoint_that_lacks_a_tensor_is_refused(saved: Path) -> None:
    tensors = read_tensors(saved / "server.safetensors")
    write_tensors(saved / "server.safetensors", dict(list(tensors.items())[1:]))
    refused(saved, made(rounds=2), "does not fit|lacks|has no")


def test_what_a_killed_save_left_is_swept_and_what_it_had_moved_is_found(saved: Path) -> None:
    (saved.parent / ".checkpoint-abc").mkdir()
    (saved.parent / ".checkpoint-abc" / "server.safetensors").write_bytes(b"half")
    saved.rename(saved.with_name("checkpoint.previous"))
    again, whole = made(rounds=2), made(rounds=2)
    run(again, None, keeping(saved.parent, resume=True))
    run(whole)
    assert are_equal(values(again), values(whole))
    assert [entry.name for entry in saved.parent.iterdir()] == ["checkpoint"]


def test_other_files_in_the_folder_of_a_checkpoint_stay(saved: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    run(made(rounds=2), None, keeping(saved.parent, resume=True))
    assert (saved / "notes.txt").read_text() == "mine"


def test_a_checkpoint_that_cannot_be_written_says_so_and_harms_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointError, match=r"could not be written.*make room and resume"):
        run(made(rounds=1), None, keeping(tmp_path / "file"))


def test_a_fingerprint_depends_on_names_shapes_types_and_bits() -> None:
    from itertools import combinations

    plain = {"a": torch.zeros(2, 2)}
    found = [
        checkpoint.digest(plain),
        checkpoint.digest({"b": torch.zeros(2, 2)}),
        checkpoint.digest({"a": torch.zeros(4)}),
        checkpoint.digest({"a": torch.zeros(2, 2, dtype=torch.int32)}),
        checkpoint.digest({"a": -torch.zeros(2, 2)}),
        checkpoint.digest(plain, "more"),
    ]
    assert all(left != right for left, right in combinations(found, 2))
    assert checkpoint.digest({"a": torch.zeros(2, 2)}) == found[0]


# -- Ctrl-C --------------------------------------------------------------------------------------------------------


def test_ctrl_c_is_noticed_at_the_next_step_and_the_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as tick:
        tick()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            tick()
        assert signal.getsignal(signal.SIGINT) == before, "a second one stops at once"
    assert signal.getsignal(signal.SIGINT) == before


def test_a_run_in_another_thread_does_not_touch_signals() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run, made(rounds=1)).result().rounds


class Pressing:
    """A watcher that presses Ctrl-C after a client."""

    def __init__(self, round: int) -> None:
        self._round = round

    def client(self, round: int, done: int, of: int) -> None:
        if round == self._round and done == 1:
            os.kill(os.getpid(), signal.SIGINT)

    def round(self, entry: Round, evaluation: Evaluation | None, results: Results) -> None:
        pass


@pytest.mark.parametrize("backend", ["serial", "pooled"])
def test_an_interrupted_run_is_saved_and_resumed(backend: str, tmp_path: Path) -> None:
    whole, parts, again = (made(participation=Participation(clients=4)) for _ in range(3))
    run(whole, Pooled(whole, 2) if backend == "pooled" else None)
    with pytest.raises(Interrupted):
        run(parts, Pooled(parts, 2) if backend == "pooled" else None, keeping(tmp_path, every=100), Pressing(2))
    assert checkpoint.load(tmp_path / "checkpoint", None).round == 2
    run(again, Pooled(again, 2) if backend == "pooled" else None, keeping(tmp_path, resume=True))
    assert are_equal(values(again), values(whole))


# -- in a process of its own ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of eight rounds that nothing happens to."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAFFM_CACHE", str(tmp_path_factory.getbasetemp() / "raffm-cache"))
        ran = trained(folder, *LONG)
    assert ran.returncode == 0, ran.stderr
    yield folder


LONG = ("--rounds=8", "--set=merging.optimizer=momentum", "--set=merging.lr=0.3")


def assert_same_run(folder: Path, other: Path) -> None:
    for name in COMPARED:
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    left, right = (json.loads((place / "results.json").read_text()) for place in (folder, other))
    assert left == right


def kill_at(moment: float, folder: Path, *words: str) -> None:
    """Start a run, and kill it some time after its first checkpoint."""
    process = started(folder, *LONG, *words)
    try:
        wait_for(folder / "checkpoint" / "run.json", process)
        time.sleep(moment)
    finally:
        process.kill()
        ended(process)


def test_a_killed_run_that_is_resumed_is_the_undisturbed_one_byte_for_byte(undisturbed: Path, tmp_path: Path) -> None:
    kill_at(random.Random(5).uniform(0, 0.5), tmp_path / "run")
    ran = trained(tmp_path / "run", *LONG, "--resume")
    assert ran.returncode == 0, ran.stderr
    assert_same_run(tmp_path / "run", undisturbed)
    left = {entry.name for entry in (tmp_path / "run").iterdir()}
    assert left == {entry.name for entry in undisturbed.iterdir()}, "nothing half written is left"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_a_run_may_be_killed_at_any_moment_and_again(number: int, undisturbed: Path, tmp_path: Path) -> None:
    draw = random.Random(number)
    kill_at(draw.uniform(0, 0.6), tmp_path / "run")
    kill_at(draw.uniform(0, 0.6), tmp_path / "run", "--resume")
    ran = ended(started(tmp_path / "run", *LONG, "--resume"))
    assert ran.returncode == 0, ran.stderr
    assert_same_run(tmp_path / "run", undisturbed)


def test_ctrl_c_saves_the_run_says_so_and_exits_130(undisturbed: Path, tmp_path: Path) -> None:
    process = started(tmp_path / "run", *LONG)
    wait_for(tmp_path / "run" / "checkpoint" / "run.json", process)
    process.send_signal(signal.SIGINT)
    ran = ended(process)
    assert ran.returncode == 130, ran.stderr
    assert "stopped; the run is saved in" in ran.stderr
    assert "--resume" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert checkpoint.load(tmp_path / "run" / "checkpoint", None).round < 8
    again = trained(tmp_path / "run", *LONG, "--resume")
    assert again.returncode == 0, again.stderr
    assert_same_run(tmp_path / "run", undisturbed)


LIMITED = """
import pathlib, resource, sys, threading, time

folder, *words = sys.argv[1:]

def limit():
    while not pathlib.Path(folder, "checkpoint", "run.json").exists():
        time.sleep(0.001)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

threading.Thread(target=limit, daemon=True).start()
sys.argv = ["raffm", "train", f"--folder={folder}", *words]
from raffm.cli.main import main
main()
"""


def test_a_run_that_may_not_write_large_files_keeps_its_last_checkpoint(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-c", LIMITED, str(folder), *QUICK, *LONG]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert ran.returncode == 2, ran.stderr
    assert "CheckpointError: the checkpoint" in ran.stderr
    assert "could not be written" in ran.stderr
    assert "make room and resume" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert 1 <= checkpoint.load(folder / "checkpoint", None).round < 8
    again = trained(folder, *LONG, "--resume")
    assert again.returncode == 0, again.stderr
    assert_same_run(folder, undisturbed)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", place], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("needs the right to mount a disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


class Filling:
    """A watcher that fills the disk up after a round."""

    def __init__(self, filler: Path, round: int) -> None:
        self._filler, self._round = filler, round

    def client(self, round: int, done: int, of: int) -> None:
        pass

    def round(self, entry: Round, evaluation: Evaluation | None, results: Results) -> None:
        if entry.round == self._round:
            with self._filler.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="needs the right to mount a disk")
def test_a_run_on_a_full_disk_keeps_its_last_checkpoint(small_disk: Path) -> None:
    whole, again = made(rounds=4), made(rounds=4)
    expected = run(whole)
    with pytest.raises(CheckpointError, match=r"No space left on device.*The one before it is unharmed; make room and resume"):
        run(made(rounds=4), None, keeping(small_disk), Filling(small_disk / "filler", 3))
    assert {entry.name for entry in small_disk.iterdir()} == {"checkpoint", "filler"}
    assert checkpoint.load(small_disk / "checkpoint", None).round == 2
    (small_disk / "filler").unlink()
    assert run(again, None, keeping(small_disk, resume=True)).to_json() == expected.to_json()
    assert are_equal(values(again), values(whole))


def test_a_folder_with_a_run_is_refused_by_the_command(undisturbed: Path) -> None:
    before = snapshot(undisturbed)
    ran = trained(undisturbed, *LONG)
    assert ran.returncode == 2
    assert "holds a run already" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert snapshot(undisturbed) == before


def test_the_command_refuses_to_resume_another_run(undisturbed: Path) -> None:
    before = snapshot(undisturbed)
    ran = trained(undisturbed, *LONG, "--resume", "--seed=1")
    assert ran.returncode == 2
    assert "belongs to another run" in ran.stderr
    assert snapshot(undisturbed) == before


def test_a_run_that_was_made_longer_says_so(tmp_path: Path) -> None:
    for rounds in (1, 2):
        longer = made(rounds=rounds)
        results = train(longer, Serial(longer), keeping(tmp_path, resume=True), {"rounds": rounds})
    assert len(results.rounds) == 2
    assert results.run == {"rounds": 2}


def test_no_run_is_named_by_a_folder_without_one(tmp_path: Path) -> None:
    ran = raffm("evaluate", tmp_path)
    assert ran.returncode == 2
    assert "there is no folder" in ran.stderr
