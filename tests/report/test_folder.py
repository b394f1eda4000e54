import json
import sys
from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import pytest

from raffm.errors import CheckpointError
from raffm.report.folder import read_results, write_results
from report.sample import VIEWED, hostile, results

TEXTS = {"results.json", "metrics.csv", "metrics.md", "report.html"}
PLOTS = {f"plots/{name}.{kind}" for name in ("by_round", "by_parameters", "by_client", "by_time") for kind in ("png", "svg")}


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_results_read_back_as_they_were_written(tmp_path: Path) -> None:
    for run in (results(VIEWED), results(evaluations=0), hostile()):
        write_results(run, tmp_path / "new" / "run")
        assert read_results(tmp_path / "new" / "run") == run


def test_results_json_is_plain_json_even_where_scores_are_not_numbers(tmp_path: Path) -> None:
    run = results(evaluations=1)
    (entry,) = run.evaluations
    sizes = {name: replace(scores, clients_mean={"accuracy": nan}) for name, scores in entry.sizes.items()}
    write_results(replace(run, evaluations=(replace(entry, sizes=sizes),)), tmp_path)
    assert "NaN" not in (tmp_path / "results.json").read_text()
    assert isnan(read_results(tmp_path).evaluations[0].sizes["1"].clients_mean["accuracy"])


def test_all_files_are_written_and_nothing_else(tmp_path: Path) -> None:
    write_results(results(), tmp_path)
    assert files(tmp_path) == TEXTS | PLOTS


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    write_results(results(), tmp_path / "a")
    write_results(read_results(tmp_path / "a"), tmp_path / "b")
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files(tmp_path / "a"))


def test_writing_again_replaces_and_keeps_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    write_results(results(evaluations=1), tmp_path)
    write_results(results(), tmp_path)
    assert len(read_results(tmp_path).evaluations) == 12
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    write_results(results(evaluations=1), tmp_path)
    (tmp_path / "metrics.csv").unlink()
    (tmp_path / "metrics.csv").mkdir()
    with pytest.raises(OSError, match=r"metrics\.csv"):
        write_results(results(), tmp_path)
    assert "1 evaluation" in (tmp_path / "report.html").read_text()
    assert not [name for name in files(tmp_path) if name.startswith(".")]


def test_without_matplotlib_all_but_the_plots_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_results(results(), tmp_path)
    assert files(tmp_path) == TEXTS
    assert "matplotlib is not installed" in (tmp_path / "report.html").read_text()


def test_settings_that_json_does_not_know_are_written_as_text(tmp_path: Path) -> None:
    write_results(replace(results(evaluations=0), run={"data": Path("here")}), tmp_path)
    assert read_results(tmp_path).run == {"data": "here"}


def test_a_folder_without_results_is_refused_in_plain_words(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no results\.json"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"format": 1, "run"', "is damaged"),
        ("[]", "no JSON object"),
        ('{"format": 1}', "is damaged: KeyError"),
        ('{"format": 1, "sizes": [3], "rounds": [], "evaluations": []}', "is damaged: TypeError"),
        ('{"format": 1, "sizes": [], "rounds": [], "evaluations": [{"round": 1, "sizes": []}]}', "is damaged: AttributeError"),
        ('{"format": 9}', "has format 9; this raffm reads format 1"),
        ("{}", "has format None"),
    ],
)
def test_damaged_results_are_refused_in_plain_words(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(CheckpointError, match=words):
        read_results(tmp_path)


def test_unknown_keys_are_refused(tmp_path: Path) -> None:
    write_results(results(evaluations=0), tmp_path)
    content = json.loads((tmp_path / "results.json").read_text())
    (tmp_path / "results.json").write_text(json.dumps({**content, "surprise": 1}))
    with pytest.raises(CheckpointError, match="surprise"):
        read_results(tmp_path)
