import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from families.cases import logits, named
from raffm.elastic import RaFFM
from raffm.errors import CheckpointError
from raffm.models.checkpoint import load_submodel, save_submodel
from raffm.models.files import found, written_whole
from raffm.models.load import trainable

VIT, BERT = named("vit"), named("bert")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small, _, _ = RaFFM(BERT.build()).sample_smallest_model()
    save_submodel(small, tmp_path / "submodel")
    return tmp_path / "submodel"


def spoil(folder: Path, how: str) -> None:
    weights, about = load_file(folder / "model.safetensors"), json.loads((folder / "raffm.json").read_text())
    match how:
        case "missing":
            del weights["classifier.bias"]
        case "extra":
            weights["classifier.spare"] = torch.zeros(2)
        case "shape":
            weights["classifier.bias"] = torch.zeros(9)
        case "dtype":
            weights["classifier.bias"] = weights["classifier.bias"].half()
        case "format":
            about["format"] = 99
        case "layout":
            about["layout"] = "0123"
        case "class":
            about["class"] = "os"
        case "selection":
            about["selection"]["layers.0.ffn"] = [0, 0, 1]
    if how == "truncated":
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[:-100])
        return
    if how in ("config.json", "raffm.json", "model.safetensors", "transient.safetensors"):
        (folder / how).unlink()
        return
    save_file(weights, folder / "model.safetensors")
    (folder / "raffm.json").write_text(json.dumps(about))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", ["classifier.bias"]),
        ("extra", ["classifier.spare"]),
        ("shape", ["classifier.bias", "(9,)"]),
        ("dtype", ["classifier.bias", "float16"]),
        ("truncated", ["model.safetensors", "cut short"]),
        ("format", ["99"]),
        ("layout", ["0123"]),
        ("class", ["os"]),
        ("selection", ["layers.0.ffn", "twice"]),
        ("config.json", ["config.json"]),
        ("raffm.json", ["raffm.json"]),
        ("model.safetensors", ["model.safetensors"]),
        ("transient.safetensors", ["transient.safetensors"]),
    ],
)
def test_a_spoiled_submodel_is_refused(folder: Path, how: str, words: list[str]) -> None:
    spoil(folder, how)
    with pytest.raises(CheckpointError) as caught:
        load_submodel(folder)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        load_submodel("nowhere")


def test_a_plain_model_is_no_submodel(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no submodel"):
        save_submodel(VIT.build(), tmp_path / "x")


def test_files_use_the_names_of_save_pretrained(tmp_path: Path) -> None:
    elastic = RaFFM(VIT.build())
    save_submodel(elastic.sample_smallest_model()[0], tmp_path / "ours")
    elastic.model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (set(load_file(tmp_path / name / "model.safetensors")) for name in ("ours", "theirs"))
    assert ours == theirs
    assert "vit.layers.0.attention.q_proj.weight" not in ours  # the names in memory are others


def test_a_failed_save_leaves_the_old_folder(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a").write_text("old")
    with pytest.raises(OSError, match="disk"), written_whole(tmp_path / "kept") as fresh:
        (fresh / "a").write_text("new")
        raise OSError("disk full")
    assert (tmp_path / "kept" / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_save_killed_at_any_step_leaves_a_folder_that_loads(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from raffm.models.files import written_whole
folder, calls, deadly = Path(sys.argv[1]), 0, int(sys.argv[2])
rename = Path.rename
def counted(self, target):
    global calls
    calls += 1
    if calls == deadly:
        os.kill(os.getpid(), 9)
    return rename(self, target)
Path.rename = counted
with written_whole(folder) as fresh:
    (fresh / "a").write_text("new")
"""
    for deadly in (1, 2, 3):
        target = tmp_path / f"ckpt{deadly}"
        target.mkdir()
        (target / "a").write_text("old")
        (target / "b").write_text("other")
        ran = subprocess.run([sys.executable, "-c", script, str(target), str(deadly)], check=False)
        assert ran.returncode == -signal.SIGKILL
        assert (found(target) / "a").read_text() in ("old", "new")


def test_a_submodel_attends_as_it_did_when_it_was_saved(tmp_path: Path) -> None:
    from transformers import ViTForImageClassification

    config = VIT.build().config
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        elastic = RaFFM(ViTForImageClassification(config).eval())
    small, _, _ = elastic.sample_smallest_model()
    save_submodel(small, tmp_path)
    loaded = load_submodel(tmp_path)
    assert loaded.config._attn_implementation == "eager"
    assert torch.equal(logits(loaded, VIT.inputs(elastic.model)), logits(small, VIT.inputs(elastic.model)))


def test_what_was_cut_from_a_submodel_cannot_be_saved(tmp_path: Path) -> None:
    small, _, _ = RaFFM(VIT.build()).sample_smallest_model()
    smaller, _ = RaFFM(small).resource_aware_model({"layers": 1})
    with pytest.raises(CheckpointError, match="cut from a submodel"):
        save_submodel(smaller, tmp_path / "smaller")
    assert not (tmp_path / "smaller").exists()


def test_training_does_not_begin_with_a_submodel_or_with_weights_of_another_shape(tmp_path: Path) -> None:
    model = VIT.build()
    save_submodel(RaFFM(model).sample_smallest_model()[0], tmp_path / "small")
    with pytest.raises(CheckpointError, match="holds a submodel"):
        trainable(str(tmp_path / "small"), "image", 5)
    model.save_pretrained(tmp_path / "full")
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    (tmp_path / "full" / "config.json").write_text(json.dumps({**config, "intermediate_size": 12}))
    with pytest.raises(CheckpointError, match=r"do not fit their config"):
        trainable(str(tmp_path / "full"), "image", 5)
    (tmp_path / "full" / "config.json").write_text(json.dumps(config))
    assert trainable(str(tmp_path / "full"), "image", 3).classifier.weight.shape == (3, 16)
