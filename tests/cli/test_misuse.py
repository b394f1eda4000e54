"""What people get wrong: one line says what was found and what to do, nothing is written, and nothing is guessed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from commands import Ran, raffm, trained
from raffm.cli.train import merged
from raffm.models.load import tiny
from rounds.made import VIT

Weights = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained run."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert trained(folder, "--rounds=2").returncode == 0
    return folder


def refused(ran: Ran, *words: str) -> None:
    """It ended with 2 and one line, in which these words stand."""
    assert ran.returncode == 2, ran.stdout
    assert ran.stderr.strip().count("\n") == 0, ran.stderr
    for word in words:
        assert word in ran.stderr, ran.stderr


# -- pretrained weights ----------------------------------------------------------------------------------------------


def pretrained(folder: Path, changed: Callable[[Weights], Weights] = lambda weights: weights, **config: Any) -> Path:
    """A saved classifier of images of digits, and what was done to its weights."""
    model: Any = tiny("vit", image_size=8, num_channels=1, num_labels=10, **config)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(changed(load_file(file)), file, {"format": "pt"})
    return folder


def without_a_layer(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if "layers.0." not in name and "layer.0." not in name}


def wrapped(weights: Weights) -> Weights:
    return {f"_orig_mod.{name}": tensor for name, tensor in weights.items()}


@pytest.mark.parametrize("changed", [without_a_layer, wrapped])
@pytest.mark.parametrize("command", ["evaluate", "train"])
def test_weights_that_are_not_there_are_not_made_up(
    tmp_path: Path, changed: Callable[[Weights], Weights], command: str
) -> None:
    folder = pretrained(tmp_path / "model", changed)
    words = ["--data=digits", "--no-time"] if command == "evaluate" else [f"--folder={tmp_path / 'run'}", "--rounds=1"]
    given = [folder, *words] if command == "evaluate" else ["--data=digits", f"--model={folder}", *words]
    refused(raffm(command, *given), "lacks", "would be random", "`vit.")
    assert not (tmp_path / "run").exists()


def test_only_a_head_is_new(tmp_path: Path) -> None:
    folder = pretrained(tmp_path / "model", lambda weights: {name: each for name, each in weights.items() if "vit." in name})
    ran = raffm("train", f"--model={folder}", "--clients=4", "--rounds=1", f"--folder={tmp_path / 'run'}")
    assert ran.returncode == 0, ran.stderr


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    folder = pretrained(tmp_path / "model")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(raffm("evaluate", folder, "--data=digits", "--no-time"), "damaged or cut short", str(folder))


def test_images_of_other_channels_are_refused_before_the_first_round(tmp_path: Path) -> None:
    tiny("vit", image_size=8, num_labels=10).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    refused(raffm("train", f"--model={tmp_path / 'model'}", f"--folder={tmp_path / 'run'}"), "1 channels", "reads 3")


def test_tokens_that_a_model_does_not_know_are_refused_before_the_first_round(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / f"{part}.csv").write_text("text,label\n" + "one two,0\nthree,1\n" * 6)
    words = ["--model=bert:tiny", f"--data={tmp_path}", "--clients=2", f"--folder={tmp_path / 'run'}"]
    refused(raffm("train", *words, "--set", "data.tokenizer=bytes"), "the token 1", "knows 50", "data.tokenizer")


@pytest.mark.parametrize("command", ["inspect", "verify", "label"])
def test_a_folder_that_holds_no_model_is_named_for_what_it_is(run: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "empty").mkdir()
    refused(raffm(command, tmp_path / "empty"), "config.json")
    refused(raffm(command, run), "the folder of a run", "raffm evaluate")
    refused(raffm(command, run / "submodels" / "1_4"), "holds a submodel", "load_submodel")
    refused(raffm(command, "resnet18"), "when a run begins")


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["vit-small", VIT])
def test_entries_that_a_config_does_not_have_are_refused(tmp_path: Path, model: str) -> None:
    words = [f"--model={model}", "--rounds=1", f"--folder={tmp_path / 'run'}"]
    refused(raffm("train", *words, "--set", "model.hiden_size=128"), "no entry 'hiden_size'", "Did you mean 'hidden_size'?")
    refused(raffm("train", *words, "--set", "model.norm=group"), "no entry 'norm'")


@pytest.mark.parametrize(("given", "asked"), [("1", 1), ("1.0", 4), ("0.5", 2), ("0", 4), ("3", 3), ("3.0", 3)])
def test_a_share_of_one_is_everybody_and_the_number_one_is_one_client(tmp_path: Path, given: str, asked: int) -> None:
    words = [f"--model={VIT}", "--clients=4", "--rounds=1", f"--folder={tmp_path / 'run'}"]
    ran = raffm("train", *words, f"--set=participation.clients={given}")
    assert ran.returncode == 0, ran.stderr
    assert f"4 clients (iid), {asked} a round" in ran.stdout
    assert len(json.loads((tmp_path / "run" / "results.json").read_text())["rounds"][0]["clients"]) == asked


def test_one_client_and_a_half_is_refused(tmp_path: Path) -> None:
    ran = raffm("train", "--set=participation.clients=1.5", f"--folder={tmp_path / 'run'}")
    refused(ran, "participation.clients is 1.5", "a share of at most 1.0")


def test_compare_takes_the_seed_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f'seed = 5\nrounds = 1\n[model]\nname = "{VIT}"\n[data]\nclients = 4\n')
    ran = raffm("compare", tmp_path / "run.toml", "--methods=heterofl", f"--folder={tmp_path / 'runs'}")
    assert ran.returncode == 0, ran.stderr
    assert "seed 5" in ran.stderr


def test_a_size_that_holds_too_little_is_named_as_it_was_given(tmp_path: Path) -> None:
    ran = raffm("train", f"--model={VIT}", "--fleet=1, 1/100000", "--rounds=1", f"--folder={tmp_path / 'run'}")
    refused(ran, "size 1e-05 is 1 parameters", "the smallest submodel")


def test_a_path_that_is_not_there_is_no_name_on_a_hub(tmp_path: Path) -> None:
    for name in ("/nonexistent/x.parquet", "./here", "train.csv"):
        refused(raffm("train", f"--data={name}", f"--folder={tmp_path / 'run'}"), f"there is no file or folder {name!r}")


@pytest.mark.parametrize("tolerance", ["nan", "-1", "0", "inf"])
def test_a_tolerance_is_a_relative_change(tolerance: str) -> None:
    refused(raffm("verify", VIT, "--tolerance", tolerance), "--tolerance", "above 0 and below 1")


def test_a_method_that_the_file_has_keeps_its_switches(caplog: pytest.LogCaptureFixture) -> None:
    content = {"method": {"name": "heterofl", "scaler": False}}
    assert merged(content, {"method": "heterofl"}, [])["method"] == content["method"]
    assert not caplog.records
    assert merged(content, {"method": "fedrolex"}, [])["method"] == "fedrolex"
    assert "scaler belong to heterofl, and not to fedrolex" in caplog.text


# -- files -------------------------------------------------------------------------------------------------------------


def test_places_that_cannot_be_written_are_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(raffm("train", f"--model={VIT}", "--rounds=1", f"--folder={tmp_path / 'file'}"), str(tmp_path / "file"))
    refused(raffm("export", run, f"--out={tmp_path / 'file'}", "--no-time"), str(tmp_path / "file"))
    refused(raffm("evaluate", run, "--no-time", "--plot=picture.foo"), "'picture.foo'", ".png, .svg, .pdf")
    refused(raffm("evaluate", run, "--no-time", "--plot=/nonexistent/x.png"), "no folder '/nonexistent'")


# -- going on ----------------------------------------------------------------------------------------------------------


def test_a_run_that_cannot_be_resumed_says_which_settings_differ(run: Path) -> None:
    refused(trained(run, "--resume", "--rounds=2", "--set=local.lr=0.5"), "local.lr is 0.01 there and 0.5 here")
    refused(trained(run, "--resume", "--rounds=1"), "has 2 rounds already, and 1 are asked for")


def test_what_is_not_there_to_be_resumed_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert trained(tmp_path / "misspelt", "--rounds=1", "--resume").returncode == 0
    assert "to resume: a new one begins" in caplog.text


def test_a_round_that_merges_nothing_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert trained(tmp_path / "run", "--rounds=1", "--set=participation.deadline=1e-9").returncode == 0
    assert "round 1 merged no update, and the model stays as it was: 2 clients were late, 0 dropped out" in caplog.text
