"""The commands, as a person runs them: most in this process, to save imports, and some in one of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commands import RAFFM, raffm


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking a hub that cannot be reached takes many seconds."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_the_command_runs_in_a_process_of_its_own() -> None:
    ran = subprocess.run([RAFFM, "inspect", "zamba2:tiny"], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 2
    assert ran.stderr.startswith("UnknownFamilyError: no layout for model type 'zamba2'.")
    assert "Traceback" not in ran.stderr + ran.stdout


def test_inspect_shows_groups_sizes_and_what_can_be_cut() -> None:
    ran = raffm("inspect", "vit:tiny")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("ViTForImageClassification (vit), ")
    line = next(line for line in ran.stdout.splitlines() if line.startswith("layers.0.ffn"))
    assert line.split() == ["layers.0.ffn", "24", "free", "792", "24", "18", "12", "6"]
    assert "per layers.0.heads" in ran.stdout


def test_inspect_lists_labels_on_request() -> None:
    ran = raffm("inspect", "raffm_resnet:tiny", "--labels")
    assert "stages.0.0.conv1.weight" in ran.stdout
    assert "stem*width -> stages.0.blocks.0.inner*width, 3, 3 when stages.0.blocks[0]" in ran.stdout


def test_verify_proves_a_family_and_exits_0() -> None:
    ran = raffm("verify", "bert:tiny")
    assert ran.returncode == 0, ran.stderr
    rows = {line.split()[0]: line for line in ran.stdout.splitlines()}
    assert rows["layers.*.ffn"].endswith("exact")
    assert "approximate (layer norm statistics change)" in rows["residual"]


def test_verify_exits_1_where_a_claim_is_wrong(tmp_path: Path) -> None:
    from importlib import resources

    text = (resources.files("raffm.models.families") / "vit.toml").read_text()
    wrong = text.replace(
        '"layers.{i}.attention.k_proj" = "residual -> layers.{i}.heads*layers.{i}.qk"',
        '"layers.{i}.attention.k_proj" = "residual -> layers.{i}.heads*layers.{i}.vo"',
    )
    assert wrong != text
    (tmp_path / "vit.toml").write_text(wrong)
    ran = raffm("verify", "vit:tiny", "--table", str(tmp_path / "vit.toml"))
    assert ran.returncode == 1
    assert "wrong" in ran.stdout


def test_label_drafts_a_table_that_verify_accepts(tmp_path: Path) -> None:
    drafted = raffm("label", "bert:tiny")
    assert drafted.returncode == 0, drafted.stderr
    (tmp_path / "draft.toml").write_text(drafted.stdout)
    assert raffm("verify", "bert:tiny", "--table", str(tmp_path / "draft.toml")).returncode == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["inspect", "nowhere/at-all"], "nowhere/at-all"),
        (["inspect", "zamba2:tiny"], "zamba2"),
        (["verify", "vit:tiny", "--table", "missing.toml"], "missing.toml"),
        (["verify", "vit:tiny", "--tolerance", "much"], "much"),
        (["explode"], "explode"),
    ],
)
def test_wrong_use_gives_one_message_and_exit_2(words: list[str], expected: str) -> None:
    ran = raffm(*words)
    assert ran.returncode == 2
    assert expected in ran.stderr
    assert "Traceback" not in ran.stderr + ran.stdout


def test_a_model_of_an_unknown_family_says_what_to_do(tmp_path: Path) -> None:
    config = {
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        "hidden_size": 8,
        "n_layer": 1,
        "n_head": 2,
        "vocab_size": 9,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    ran = raffm("inspect", str(tmp_path))
    assert ran.returncode == 2
    assert "no layout for model type 'bloom'" in ran.stderr
    assert "raffm label" in ran.stderr


def test_help_is_quick_because_it_imports_no_torch() -> None:
    script = "import sys\nimport raffm.cli.main\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_folder_written_by_raffm_can_be_inspected(tmp_path: Path) -> None:
    from raffm import RaFFM
    from raffm.models.load import tiny

    RaFFM(tiny("raffm_resnet")).save_ckpt(tmp_path / "ckpt")
    assert raffm("inspect", str(tmp_path / "ckpt")).returncode == 0
