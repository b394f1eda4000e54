"""`raffm export`: a folder for a device."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from commands import QUICK, raffm
from raffm.data.task import ImageClassification
from raffm.errors import ExportError
from raffm.export.bundle import build_script, write_bundle
from raffm.export.runtimes import gap, in_onnx_runtime
from raffm.models.checkpoint import load_submodel
from raffm.prepare import reopened

SMALL = ("--model=resnet18", "--set=model.widths=[8, 16]", "--set=model.depths=[1, 1]", *QUICK[1:])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    assert raffm("train", *SMALL, "--rounds=2", "--no-tensorboard", "--folder", folder).returncode == 0
    return folder


def test_the_file_does_what_the_saved_submodel_does(run: Path) -> None:
    said = raffm("export", run, "--size", "1/4")
    assert said.returncode == 0, said.stderr
    folder = run / "export" / "onnx-1_4"
    assert {path.name for path in folder.iterdir()} == {
        "model.onnx",
        "labels.json",
        "preprocessing.json",
        "export.json",
        "README.md",
    }
    plan, _ = reopened(run)
    inputs = plan.task.batch(plan.data.dataset.test, torch.arange(7)).inputs
    with torch.no_grad():
        expected = load_submodel(run / "submodels" / "1_4").eval()(**inputs).logits
    assert gap(in_onnx_runtime(folder / "model.onnx")(inputs), expected) < 1e-4
    assert json.loads((folder / "labels.json").read_text())["labels"] == [str(digit) for digit in range(10)]
    assert json.loads((folder / "preprocessing.json").read_text())["mean"] == [0.5]
    about = json.loads((folder / "export.json").read_text())
    assert about["torch"] == about["exported"]
    assert about["examples"] == len(plan.data.dataset.validation or ())
    for place in ("in_torch", "in_runtime"):
        assert 0 < about[place]["timing"]["low"] <= about[place]["timing"]["median"] <= about[place]["timing"]["high"]
        assert about[place]["peak"] > 4 * about["params"]
    assert "peak MB of memory" in (folder / "README.md").read_text()
    assert "this file" in said.stdout
    again = raffm("export", run, "--size", "1/4")
    assert "is not empty" in again.stderr


def test_eight_bits_are_judged_on_examples_and_refused_where_they_cost_too_much(run: Path, tmp_path: Path) -> None:
    said = raffm("export", run, "--format", "onnx-int8", "--no-time", "--out", tmp_path / "int8")
    assert said.returncode == 0, said.stderr
    assert (tmp_path / "int8" / "model-int8.onnx").is_file()
    assert not (tmp_path / "int8" / "model.onnx").exists()
    refused = raffm("export", run, "--format", "onnx-int8", "--no-time", "--most-lost", "-1", "--out", tmp_path / "strict")
    assert refused.returncode == 2
    assert "model-int8.onnx loses" in refused.stderr
    assert not (tmp_path / "strict").exists()


def test_tensorrt_gets_a_checked_file_and_a_script_and_is_told_that_nothing_was_built(run: Path, tmp_path: Path) -> None:
    said = raffm("export", run, "--format", "tensorrt", "--no-time", "--out", tmp_path / "rt")
    assert "No engine was built" in said.stdout
    assert "--minShapes=pixel_values:1x1x8x8 --optShapes=pixel_values:8x1x8x8" in (tmp_path / "rt" / "build.sh").read_text()
    assert "**not** run here" in (tmp_path / "rt" / "README.md").read_text()


def test_a_script_names_every_input_and_takes_texts_of_any_length() -> None:
    inputs = {"input_ids": torch.zeros(2, 16), "attention_mask": torch.zeros(2, 16)}
    script = build_script(inputs, "model.onnx", longest=40, most=4)
    for kind, shape in (("min", "1x1"), ("opt", "4x16"), ("max", "4x40")):
        assert f"--{kind}Shapes=input_ids:{shape},attention_mask:{shape}" in script


def test_a_stock_file_is_measured_as_transformers_reads_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert raffm("train", *QUICK, "--rounds=1", "--no-tensorboard", "--folder", run).returncode == 0
    said = raffm("export", run, "--format=stock", "--out", tmp_path / "stock")
    assert said.returncode == 0, said.stderr
    about = json.loads((tmp_path / "stock" / "export.json").read_text())
    assert about["torch"] == about["exported"]
    assert min(about["in_runtime"]["timing"]["median"], about["in_runtime"]["peak"]) > 0


def test_the_size_of_squared_images_is_told_and_one_validation_example_is_enough(tmp_path: Path) -> None:
    for label, shade in (("dark", 20), ("light", 200)):
        (tmp_path / "set" / "train" / label).mkdir(parents=True)
        for number in range(7):
            picture = Image.fromarray(np.full((30, 40, 3), shade + number, np.uint8))
            picture.save(tmp_path / "set" / "train" / label / f"{number}.png")
    data = (f"--data={tmp_path / 'set'}", "--set=data.image_size=16", "--set=data.validation=0.1", "--clients=2")
    words = ("--model=resnet18", "--set=model.widths=[8, 16]", "--set=model.depths=[1, 1]", "--rounds=1", *data)
    said = raffm("train", *words, "--no-tensorboard", "--folder", tmp_path / "run")
    assert said.returncode == 0, said.stderr
    assert len(reopened(tmp_path / "run")[0].data.dataset.validation or ()) == 1
    said = raffm("export", tmp_path / "run", "--no-time", "--out", tmp_path / "out")
    assert said.returncode == 0, said.stderr
    assert json.loads((tmp_path / "out" / "preprocessing.json").read_text())["size"] == 16


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--format", "tflite"), "there is no format 'tflite'. The formats are: onnx"),
        (("--submodel", "nowhere.json"), "'nowhere.json' is no JSON file of sizes"),
        (("--size", "many"), "there is no fleet 'many'"),
        (("--format", "stock"), "Save it with `save_submodel`"),
        (("--size", "1, 1/2"), "a file holds one size"),
        (("--format", "nested", "--size", "1/4"), "leave --size out"),
    ],
)
def test_wrong_words_get_an_answer_and_leave_nothing(run: Path, tmp_path: Path, words: tuple[str, ...], error: str) -> None:
    said = raffm("export", run, "--out", tmp_path / "out", *words)
    assert said.returncode == 2
    assert error in said.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    said = raffm("export", tmp_path)
    assert said.returncode == 2
    assert "CheckpointError" in said.stderr


def test_an_export_that_fails_leaves_what_was_there(run: Path, tmp_path: Path) -> None:
    plan, _ = reopened(run)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(ExportError):
        write_bundle(nn.Identity(), ImageClassification(), plan.data.dataset, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
