"""What a newcomer sees first: the public names, the README's example, the version."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import raffm

ROOT = Path(__file__).parent.parent


def test_public_names_are_sorted_and_there() -> None:
    assert list(raffm.__all__) == sorted(raffm.__all__)
    assert all(getattr(raffm, name).__module__.startswith("raffm.") for name in raffm.__all__)
    assert list(raffm.__all__) == list(raffm._HOMES)


def test_importing_raffm_imports_no_heavy_library() -> None:
    script = "import sys, raffm\nsys.exit(any(name in sys.modules for name in ('transformers', 'flwr', 'datasets', 'sklearn')))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.filterwarnings("ignore")
def test_the_readmes_examples_have_twelve_lines_at_most_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAFFM_CACHE", str(tmp_path / "cache"))
    shipped, run, submodels = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for code in (shipped, run, submodels):
        assert len([line for line in code.splitlines() if line]) <= 12
    exec(compile(shipped, "README.md", "exec"), {})
    assert "('1/4', 49258, 0.8" in capsys.readouterr().out
    exec(compile(run, "README.md", "exec"), {})
    assert "| 1/4 |" in capsys.readouterr().out
    assert (tmp_path / "runs" / "digits" / "report.html").is_file()
    exec(compile(submodels, "README.md", "exec"), {})
    assert "torch.Size([1, 2])" in capsys.readouterr().out


def test_the_algebra_page_shows_labels_that_can_be_read() -> None:
    from raffm.algebra.axis import parse_label

    text = (ROOT / "docs" / "algebra.md").read_text().split("## Groups")[0]
    labels = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert len(labels) == 12
    assert [str(parse_label(label)) for label in labels] == labels


def test_every_error_is_drawn_in_the_tree() -> None:
    from raffm import errors

    drawn = set(re.findall(r"\w+Error\b", errors.__doc__ or ""))
    assert drawn == {name for name in vars(errors) if name.endswith("Error")}


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        raffm.nonsense  # noqa: B018
