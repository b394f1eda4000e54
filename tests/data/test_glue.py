"""Two texts an example, numbers as labels, and the metrics of GLUE."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef

from commands import raffm
from data.pairs import pairs, tokenizer
from raffm.data.examples import Examples
from raffm.data.glue import METRICS, source_of, task_name
from raffm.data.metrics import named_metrics
from raffm.data.sources import Columns, load
from raffm.data.splits import hold_out, split
from raffm.data.task import TextClassification, TextRegression
from raffm.errors import DataError
from raffm.prepare import plan_of, reopened
from raffm.rounds.predict import outputs_of
from raffm.settings import read_settings


def test_two_texts_are_one_example_and_told_apart(tmp_path: Path) -> None:
    pairs(tmp_path / "rte", [0, 1, 1, 0])
    found = load(str(tmp_path / "rte"), tokenizer=tokenizer(tmp_path / "words"))
    batch = TextClassification(multiple=1).batch(found.train, torch.tensor([0, 1]))
    assert batch.inputs["input_ids"].tolist() == [[2, 4, 3, 7, 3, 0, 0, 0], [2, 4, 5, 6, 3, 5, 5, 3]]
    assert batch.inputs["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1]]
    assert len(found.test) == 4  # the validation set: test labels are hidden
    alone = load(str(tmp_path / "rte"), tokenizer=tokenizer(tmp_path / "words"), columns=Columns(input="sentence2"))
    assert "token_type_ids" not in alone.train.inputs


def test_numbers_are_labels_of_their_own(tmp_path: Path) -> None:
    pairs(tmp_path / "stsb", [float(value) for value in np.linspace(0, 5, 20)])
    found = hold_out(load(str(tmp_path / "stsb"), tokenizer=tokenizer(tmp_path / "words")), 0.2, 0)
    assert found.train.labels.dtype == torch.float32
    assert (len(found.train), len(found.validation or ()), found.classes) == (16, 4, ("label",))
    assert found.train.present(1).tolist() == [True]
    parts = split(found, 3, "dirichlet", 0, alpha=1.0, least=1)
    assert sorted(np.concatenate([parts.train[client] for client in range(3)])) == list(range(16))
    with pytest.raises(DataError, match="not a finite number"):
        pairs(tmp_path / "bad", [0.5, float("nan"), 1.0])
        load(str(tmp_path / "bad"), tokenizer=tokenizer(tmp_path / "words"))


@pytest.mark.filterwarnings("ignore:A single label")
@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.integers(0, 1)), min_size=2, max_size=30))
def test_d_ra25_metrics_are_those_of_the_libraries(rows: list[tuple[float, float, int]]) -> None:
    """Published: CoLA's class is whether a raw logit is above a half; here it is that of the largest."""
    outputs, labels = torch.tensor([row[:2] for row in rows]), torch.tensor([row[2] for row in rows])
    said = outputs.argmax(1).numpy()
    found = named_metrics(("matthews", "f1", "accuracy"), outputs, labels)
    assert found["matthews"] == pytest.approx(matthews_corrcoef(labels, said))
    assert found["f1"] == pytest.approx(f1_score(labels, said, zero_division=0))
    assert found["accuracy"] == pytest.approx(float((said == labels.numpy()).mean()))
    numbers = named_metrics(("pearson", "spearman"), outputs[:, :1], outputs[:, 1])
    if len(set(outputs[:, 0].tolist())) > 1 and len(set(outputs[:, 1].tolist())) > 1:
        assert numbers["pearson"] == pytest.approx(np.nan_to_num(pearsonr(outputs[:, 1], outputs[:, 0]).statistic), abs=1e-5)
        assert numbers["spearman"] == pytest.approx(spearmanr(outputs[:, 1], outputs[:, 0]).statistic, abs=1e-5)
    else:
        assert set(numbers.values()) == {0.0}


def test_a_metric_that_there_is_not_is_named() -> None:
    with pytest.raises(DataError, match=r"no metric 'bleu'\. There are: accuracy"):
        named_metrics(("bleu",), torch.zeros(2, 2), torch.zeros(2))


def test_d_ra23_tasks_are_found_by_name(tmp_path: Path) -> None:
    """Published: the parser knows few of the tasks that its script handles."""
    assert {name: task_name(f"nyu-mll/glue:{name}") for name in METRICS} == {name: name for name in METRICS}
    assert task_name("glue_small/cola") == "cola"
    assert task_name("ag_news") is None
    assert source_of("mnli", tmp_path) == "nyu-mll/glue:mnli"
    pairs(tmp_path / "glue_small" / "mrpc", [0, 1])
    assert source_of("mrpc", tmp_path) == "glue_small/mrpc"
    (tmp_path / "sst2").mkdir()
    assert source_of("sst2", tmp_path) == "sst2"


@pytest.mark.parametrize(("task", "labels", "metric"), [("mrpc", [0, 1] * 12, "f1"), ("stsb", [0.5, 4.5] * 12, "pearson")])
def test_d_ra10_a_task_is_trained_and_the_servers_model_judged_by_its_own_metric(
    task: str, labels: list[object], metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published: the last client's model is judged, and by its loss, of which the greatest is the best."""
    monkeypatch.setenv("RAFFM_DATA", str(tmp_path))
    monkeypatch.setenv("RAFFM_CACHE", str(tmp_path / "cache"))
    pairs(tmp_path / "glue_small" / task, labels)
    tokenizer(tmp_path / "words").save_pretrained(tmp_path / "words")
    words = ("--model", "bert:tiny", "--set", f"data.tokenizer={tmp_path / 'words'}", "--clients", 2, "--rounds", 1)
    folder = tmp_path / "run"
    said = raffm("train", "--task", task, *words, "--method", "heterofl", "--no-tensorboard", "--folder", folder)
    assert said.returncode == 0, said.stderr
    assert metric in (folder / "metrics.csv").read_text().splitlines()[0] or metric in said.stdout
    data = {"source": task, "tokenizer": str(tmp_path / "words"), "clients": 2}
    settings = read_settings({"model": {"name": "bert:tiny"}, "data": data})
    plan, _ = reopened(folder)
    test = plan.data.dataset.test
    said_by_server = plan.task.metrics(outputs_of(plan, plan.server.model.eval(), test), test.labels)
    judged = json.loads((folder / "results.json").read_text())["evaluations"][-1]["sizes"]["1"]["test"]
    assert next(iter(judged)) == metric
    assert judged[metric] == pytest.approx(said_by_server[metric], abs=1e-6)
    plan = plan_of(settings)
    assert type(plan.task) is (TextRegression if task == "stsb" else TextClassification)
    assert plan.task.named[0] == metric  # type: ignore[attr-defined]
    refused = raffm("train", "--task", "translation")
    assert "there is no task 'translation'" in refused.stderr


def test_mnli_is_tested_on_its_matched_validation_set(tmp_path: Path) -> None:
    pairs(tmp_path / "mnli", [0, 1, 2] * 4)
    for part in ("validation", "test"):
        (tmp_path / f"mnli-{part}.parquet").rename(tmp_path / f"mnli-{part}_matched.parquet")
    found = load(str(tmp_path / "mnli"), tokenizer=tokenizer(tmp_path / "words"))
    assert (len(found.train), len(found.test)) == (12, 12)


def test_numbers_fall_into_the_same_strata_in_every_part() -> None:
    train, test = (Examples({}, torch.tensor(labels)) for labels in ([0.2, 1.0, 5.0], [1.2, 4.8, -3.0]))
    assert train.strata.tolist() == [0, 1, 5]
    assert test.strata.tolist() == [1, 5, 0]
