"""Experiments run from one command, tiny; the whole of each is run by `make test-all`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(name: str, folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", f"experiments.{name}", "--scale", "smoke", "--runs", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_nested_is_compared_at_a_rate_that_held_out_examples_choose(tmp_path: Path) -> None:
    said = run("nested", tmp_path, "--what", "final", "compute", "report", "--methods", "nested", "heterofl")
    held_out = {line.partition(":")[0]: float(line.split()[1]) for line in said.splitlines() if line.startswith("rate-nested")}
    best = max(held_out, key=lambda name: held_out[name]).removeprefix("rate-nested-")
    result = json.loads((tmp_path / "results" / "nested-seed0.json").read_text())
    assert result["run"]["local"]["lr"] == float(best)
    assert result["data"]["validation"] == 0, "final runs train on everything"
    assert {"1", "1/4", "1 average", "1/4 average"} == {size["name"] for size in result["sizes"]}
    table = (tmp_path / "table.md").read_text()
    for words in ("| nested, seed 0 |", "| HeteroFL, 132 steps |", "Virtual hours", "nested against HeteroFL"):
        assert words in table
    assert (tmp_path / "by_round.png").stat().st_size > 10_000
    again = run("nested", tmp_path, "--what", "final", "--methods", "nested")
    assert "round 1/" not in again, "what is there is not run again"


@pytest.mark.slow
def test_all_of_nested_runs(tmp_path: Path) -> None:
    run("nested", tmp_path)
    names = {path.stem for path in (tmp_path / "results").glob("*.json")}
    assert {"nested-bound", "heterofl-longer", "ablation-one", "cifar100-nested", "vit-raffm"} <= names
