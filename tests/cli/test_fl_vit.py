"""`fl_vit.py` takes the flags of the published script and runs the same engine."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from data.pairs import pairs, tokenizer
from raffm.models.load import trainable
from raffm.prepare import reopened

SCRIPT = Path(__file__).parents[2] / "fl_vit.py"


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["fl_vit.py", *flags])
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAFFM_CACHE", str(tmp_path / "cache"))


def test_the_published_flags_train_and_leave_logs_for_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log" / "vit"
    flags = (
        "--method raffm --spp --model vit-small --dataset digits --num_clients 10 --lr 3e-4 --num_rounds 2 --num_local_epochs 1"
    )
    run(monkeypatch, *flags.split(), "--save_dir", str(log))
    results = json.loads((log / "results.json").read_text())
    assert results["run"]["method"] == {"name": "raffm", "sizes": "sandwich", "metric": "l1_norm"}
    assert results["run"]["local"]["schedule"] == "linear"
    assert [size["name"] for size in results["sizes"]] == ["1", "0.75", "1/2"]
    assert any(path.name.startswith("events") for path in (log / "tensorboard").iterdir())


def test_vanilla_is_fedavg_and_a_fleet_fits_submodels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = "--model vit-small --dataset digits --num_clients 10 --num_rounds 1 --num_local_epochs 1 --k-shot 2".split()
    run(monkeypatch, "--method", "vanilla", *few, "--save_dir", str(tmp_path / "vanilla"))
    assert json.loads((tmp_path / "vanilla" / "results.json").read_text())["method"] == "fedavg"
    run(monkeypatch, "--fleet", "1:1, 1/4:1", *few, "--save_dir", str(tmp_path / "fitted"))
    fitted = json.loads((tmp_path / "fitted" / "results.json").read_text())
    assert fitted["run"]["method"] == {"name": "raffm", "sizes": "fitted", "metric": "none"}


def test_peft_trains_adapters_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    few = "--peft --model vit-small --dataset digits --num_clients 10 --num_rounds 1 --num_local_epochs 1 --k-shot 2".split()
    run(monkeypatch, *few, "--save_dir", str(tmp_path / "log"))
    results = json.loads((tmp_path / "log" / "results.json").read_text())
    assert results["run"]["lora"] == {"rank": 16, "alpha": 16.0, "targets": [], "dropout": 0.1}
    assert results["rounds"][0]["bytes_up"] < 0.3 * 4 * results["model"]["params"]


def test_what_it_cannot_do_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, "--method", "magic")
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("RunError: there is no method 'magic'.")


def test_d_ra24_the_same_flags_train_on_glue_and_texts_are_padded_to_the_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published: every sentence is padded to 512 tokens. D-RA23: any family will do, DistilBERT too."""
    monkeypatch.setenv("RAFFM_DATA", str(tmp_path))
    pairs(tmp_path / "glue_small" / "rte", [0, 1] * 20)
    model = trainable("distilbert:tiny", "text", 2)
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    tokenizer(tmp_path / "words").save_pretrained(tmp_path / "model")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    few = "--method raffm --spp --dataset rte --num_clients 2 --num_rounds 1 --num_local_epochs 1 --batch_size 4".split()
    monkeypatch.setattr(
        sys, "argv", ["fl_glue.py", *few, "--model", str(tmp_path / "model"), "--save_dir", str(tmp_path / "log")]
    )
    runpy.run_path(str(SCRIPT.with_name("fl_glue.py")), run_name="__main__")
    results = json.loads((tmp_path / "log" / "results.json").read_text())
    assert results["metric"] == "accuracy"
    plan, _ = reopened(tmp_path / "log")
    batch = plan.task.batch(plan.data.dataset.train, torch.arange(4))
    assert batch.inputs["input_ids"].shape[1] <= 16
