"""`raffm search` and `best_submodel`, as people use them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from commands import QUICK, raffm
from raffm import Local, load_data, train
from raffm.errors import RunError
from raffm.export.runtimes import gap, in_onnx_runtime
from raffm.models.files import write_json
from raffm.models.load import trainable
from raffm.pick import best_submodel, target_of
from raffm.prepare import opened
from raffm.search.find import Effort

SHORT = ("--evaluations=12", "--finalists=3", "--examples=50", "--workers=1")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    words = (*QUICK[:1], "--method=raffm", *QUICK[2:], "--rounds=2", "--no-tensorboard", "--folder", folder)
    assert raffm("train", *words).returncode == 0
    return folder


def test_from_a_run_to_a_file_for_a_device(run: Path, tmp_path: Path) -> None:
    said = raffm("search", run, "--max-params", "4k", *SHORT, "--out", tmp_path / "found")
    assert said.returncode == 0, said.stderr
    assert "submodels. 12 were judged on 50 validation examples, the best 3 of them on" in said.stdout
    assert "best  " in said.stdout
    recipe = json.loads((tmp_path / "found" / "best.json").read_text())
    assert recipe["costs"]["params"] <= 4000
    exported = raffm("export", run, "--submodel", tmp_path / "found" / "best.json", "--no-time", "--out", tmp_path / "file")
    assert exported.returncode == 0, exported.stderr
    picked = best_submodel(
        run, max_params=4000, effort=Effort(12, 3, 1), examples=50, folder=tmp_path / "found"
    )  # goes on with the same search: nothing is judged again
    assert dict(picked.found.best.sizes) == recipe["config"]
    plan = picked.judge.plan
    inputs = plan.task.batch(plan.data.dataset.test, torch.arange(5)).inputs
    with torch.no_grad():
        expected = picked.module()(**inputs).logits
    assert gap(in_onnx_runtime(tmp_path / "file" / "model.onnx")(inputs), expected) < 1e-4
    assert set(picked.scores()) == {"accuracy", "f1_macro", "f1_weighted"}


def test_what_a_search_of_the_last_model_found_is_exported_from_it(tmp_path: Path) -> None:
    words = (*QUICK[:1], "--method=raffm", *QUICK[2:], "--rounds=2", "--set=merging.average=0.9", "--no-tensorboard")
    assert raffm("train", *words, "--folder", tmp_path / "my run").returncode == 0
    for options, given in ((("--last",), " --last"), ((), "")):
        said = raffm("search", tmp_path / "my run", *options, *SHORT, "--out", tmp_path / f"found{len(options)}")
        assert said.returncode == 0, said.stderr
        assert f"raffm export '{tmp_path / 'my run'}'{given} --submodel " in said.stdout
        assert (" --last --submodel " in (tmp_path / f"found{len(options)}" / "explorer.html").read_text()) == bool(given)


def test_the_report_of_the_run_grows_an_explorer(run: Path) -> None:
    assert 'id="explorer"' not in (run / "report.html").read_text()
    assert raffm("search", run, *SHORT).returncode == 0
    for page in (run / "report.html", run / "search" / "explorer.html"):
        assert 'id="explorer"' in page.read_text()
    search = run / "search" / "search.json"
    finalists = json.loads(search.read_text())["finalists"]
    assert "say which, --pick 0 to 2" in raffm("export", run, "--submodel", search).stderr
    said = raffm("export", run, "--submodel", search, "--pick", 2, "--no-time")
    assert said.returncode == 0, said.stderr
    about = json.loads((run / "export" / "onnx-search-2" / "export.json").read_text())
    assert about["params"] == finalists[2]["costs"]["params"]


def test_latency_is_measured_here_and_estimated_elsewhere(run: Path, tmp_path: Path) -> None:
    here = best_submodel(run, max_latency=10.0, effort=Effort(6, 2, 1), examples=20)
    assert all(each.latency is not None and each.costs["latency"] == each.latency[0] for each in here.found.finalists)
    exported = best_submodel(run, effort=Effort(2, 1, 1), examples=20, runtime="onnx")
    assert exported.found.best.latency is not None
    with pytest.raises(RunError, match="measured in torch, onnx, openvino, not in 'tflite'"):
        best_submodel(run, runtime="tflite")  # type: ignore[arg-type]
    write_json(tmp_path / "device.json", {"name": "mine", "memory": 1e9, "speed": 1e6, "threads": 1})
    there = best_submodel(run, device=str(tmp_path / "device.json"), effort=Effort(6, 2, 1), examples=20)
    for each in there.found.finalists:
        assert each.costs["latency"] == pytest.approx(each.costs["flops"] / 1e6)
    assert there.found.limits == {}  # the whole model fits
    said = raffm("search", run, "--device", "xps15", *SHORT, "--out", tmp_path / "pi")
    assert "ms on xps15 (estimated)" in said.stdout


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--max-params", "10"), "no submodel fits"),
        (("--max-params", "many"), "--max-params is 'many'; give a number"),
        (("--max-flops", "-1"), "give a number above 0"),
        (("--device", "pi9"), "there is no device 'pi9'. Known are pi4"),
        (("--metric", "loud"), "not by 'loud'"),
        (("--space", "nowhere.json"), "'nowhere.json' cannot be read"),
        (("--evaluations", "0"), "evaluations of at least 1"),
        (("--max-latency-ms", "0.000001"), "above the limit 1e-06 ms"),
        (("--max-latency-ms", "nan"), "--max-latency-ms is nan; give a number above 0"),
        (("--examples", "0"), "at least 1 example"),
    ],
)
def test_wrong_words_get_an_answer(run: Path, tmp_path: Path, words: tuple[str, ...], error: str) -> None:
    said = raffm("search", run, *SHORT, "--out", tmp_path / "out", *words)
    assert said.returncode == 2
    assert error in said.stderr


def test_a_file_that_no_probe_wrote_is_named(tmp_path: Path) -> None:
    write_json(tmp_path / "odd.json", {"name": "mine"})
    with pytest.raises(RunError, match="was not written by `raffm probe`"):
        target_of(str(tmp_path / "odd.json"))
    write_json(tmp_path / "still.json", {"name": "mine", "memory": 1e9, "speed": 0})
    with pytest.raises(RunError, match=r"speed 0\.0; both must be above 0"):
        target_of(str(tmp_path / "still.json"))


@pytest.mark.parametrize("limit", [float("nan"), float("inf"), -1, "2M"])
def test_limits_that_are_no_numbers_above_zero_are_refused(run: Path, limit: float) -> None:
    with pytest.raises(RunError, match=r"max_params is .*; give a number above 0"):
        best_submodel(run, max_params=limit)


def test_a_run_made_in_python_is_not_taken_for_another(tmp_path: Path) -> None:
    """What model and data it had, nobody knows: those of the defaults would give other numbers."""
    data = load_data("digits", clients=4, split="iid")
    model = trainable("vit-small", "image", 10, (1, 8, 8))
    train(model, data, method="heterofl", rounds=1, local=Local(steps=1), folder=tmp_path / "own")
    for words in (("search",), ("evaluate",), ("export",)):
        said = raffm(*words, tmp_path / "own")
        assert said.returncode == 2
        assert "was trained from Python" in said.stderr


def test_any_pretrained_classifier_can_be_searched_and_exported(tmp_path: Path) -> None:
    model = trainable("vit-small", "image", 10, (1, 8, 8))
    model.save_pretrained(tmp_path / "mine")  # type: ignore[operator]
    words = ("--data", "digits", "--max-params", "30k", *SHORT, "--out", tmp_path / "found")
    said = raffm("search", tmp_path / "mine", *words)
    assert said.returncode == 0, said.stderr
    assert f"raffm export {tmp_path / 'mine'} --data digits --submodel" in said.stdout
    best = tmp_path / "found" / "best.json"
    exported = raffm(
        "export", tmp_path / "mine", "--data", "digits", "--submodel", best, "--no-time", "--out", tmp_path / "file"
    )
    assert exported.returncode == 0, exported.stderr
    about = json.loads((tmp_path / "file" / "export.json").read_text())
    assert about["params"] == json.loads(best.read_text())["costs"]["params"] <= 30_000
    tested = raffm("evaluate", tmp_path / "mine", "--data", "digits", "--sizes", "1, 1/2", "--no-time")
    assert tested.returncode == 0, tested.stderr


def test_a_model_of_other_classes_has_nothing_to_search_for(tmp_path: Path) -> None:
    trainable("vit-small", "image", 7, (1, 8, 8)).save_pretrained(tmp_path / "mine")  # type: ignore[operator]
    said = raffm("search", tmp_path / "mine", "--data", "digits")
    assert said.returncode == 2
    assert "has 7 classes, and digits 10: its head would be new" in said.stderr


def test_other_data_are_made_and_judged_as_in_training(run: Path) -> None:
    own, _ = opened(run)
    other, _ = opened(run, "digits")
    assert other.task == own.task
