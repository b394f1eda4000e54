"""Questions about texts: answers are found and judged as a well-kept library does it, and models of both kinds learn them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commands import raffm
from raffm.data.answers import SpanAnswers, WrittenAnswers
from raffm.data.examples import Dataset, Examples
from raffm.data.questions import OUTSIDE, WRITTEN, Question, Questions, answers_in, answers_of, best_spans, windows
from raffm.data.sources import load
from raffm.data.splits import hold_out, split
from raffm.data.task import Batch, kind_of, predicted_by
from raffm.deploy.letters import task_described, task_from
from raffm.elastic import RaFFM
from raffm.errors import DataError, RunError
from raffm.models.load import from_config, has_own_head, tiny, trainable
from raffm.models.table import shipped

REFERENCE = json.loads((Path(__file__).parent / "squad_cases.json").read_text())
ASKED = 3  # tokens before the text


def told() -> tuple[Questions, torch.Tensor, torch.Tensor]:
    """The cases of the reference: questions, scores, and labels of all windows."""
    entries, spans, scores, labels = [], [], [], []
    for number, case in enumerate(REFERENCE["cases"]):
        words = case["context"].split(" ")
        answers = case["answers"]
        texts, begins = tuple(each["text"] for each in answers), tuple(each["answer_start"] for each in answers)
        entries.append(Question("what", case["context"], texts, begins))
        for window in case["windows"]:
            stands = torch.full((ASKED + 26, 2), OUTSIDE, dtype=torch.int32)
            for place, word in enumerate(window["words"], ASKED):
                stands[place] = torch.tensor([case["begins"][word], case["begins"][word] + len(words[word])])
            said = torch.full((2, ASKED + 26), -1e9)
            said[:, : len(window["scores"][0])] = torch.tensor(window["scores"])
            labels.append([0, 0, number, len(spans)])
            spans.append(stands)
            scores.append(said)
    return Questions(tuple(entries), torch.stack(spans)), torch.stack(scores), torch.tensor(labels)


def test_answers_and_their_scores_equal_the_reference_unanswerable_questions_too() -> None:
    questions, scores, labels = told()
    found = answers_in(questions, scores, labels, longest=30)
    assert {str(number): words for number, words in found.items()} == REFERENCE["answers"]
    assert "" in found.values()
    for given_, expected in ((REFERENCE["answers"], "metrics"), (REFERENCE["given"], "given_metrics")):
        metrics = questions.metrics({int(number): words for number, words in given_.items()})
        assert metrics["f1"] == pytest.approx(REFERENCE[expected]["f1"] / 100, abs=1e-6)
        assert metrics["exact_match"] == pytest.approx(REFERENCE[expected]["exact"] / 100, abs=1e-6)


def test_windows_in_any_order_give_the_same_answers() -> None:
    questions, scores, labels = told()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    assert answers_in(questions, scores[order], labels[order], 30) == answers_in(questions, scores, labels, 30)


@given(st.integers(1, 12), st.integers(1, 14), st.integers(0, 2**31))
def test_the_best_stretch_is_the_best_of_all(tokens: int, longest: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    spans = torch.arange(2 * tokens).view(1, tokens, 2)
    spans = torch.where(torch.rand(1, tokens, 1, generator=draw) < 0.3, OUTSIDE, spans)
    spans[0, 0] = torch.tensor([0, 1])
    scores = torch.randn(1, 2, tokens, generator=draw)
    begin, end, best, null = best_spans(scores, spans, longest)
    inside = [place for place in range(tokens) if spans[0, place, 0] >= 0]
    every = {(i, j): float(scores[0, 0, i] + scores[0, 1, j]) for i in inside for j in inside if i <= j < i + longest}
    first, last = max(every, key=lambda pair: every[pair])
    assert (int(begin), int(end)) == (int(spans[0, first, 0]), int(spans[0, last, 1]))
    assert float(best) == pytest.approx(every[first, last])
    assert float(null) == pytest.approx(float(scores[0, 0, 0] + scores[0, 1, 0]))


# -- reading -----------------------------------------------------------------------------------------------------------

CONTEXT = "the harbour of Basel was built in 1906 and lies on the Rhine where ships wait all day and all night long"
ROWS = [
    ("where does it lie", "harbours", [("on the Rhine", 48), ("the Rhine", 51)]),
    ("when was it built", "harbours", [("1906", 34)]),
    ("who built it", "people", []),
    ("what waits", "people", [("ships", 67)]),
]


def table(folder: Path, changed: dict[int, int] | None = None) -> Path:
    folder.mkdir(parents=True)
    begins = {place: [begin for _, begin in row[2]] for place, row in enumerate(ROWS)} | {
        place: [begin] for place, begin in (changed or {}).items()
    }
    answers = [{"text": [text for text, _ in row[2]], "answer_start": begins[place]} for place, row in enumerate(ROWS)]
    columns: dict[str, Any] = {
        "question": [row[0] for row in ROWS],
        "title": [row[1] for row in ROWS],
        "context": [CONTEXT] * len(ROWS),
        "answers": answers,
    }
    for part in ("train", "validation"):
        pq.write_table(pa.table(columns), folder / f"{part}.parquet")
    return folder


def words(folder: Path, kind: str) -> Any:
    """A real tokenizer of BERT's or T5's kind that knows these words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    marks = ["[PAD]", "[EOS]", "[CLS]", "[SEP]", "[UNK]"]
    known = sorted({*CONTEXT.split(), *(word for row in ROWS for word in row[0].split()), "question", "context", ":"})
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate([*marks, *known])}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    form = ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1") if kind == "bert" else ("$A [EOS]", None)
    made.post_processor = processors.TemplateProcessing(*form, [("[CLS]", 2), ("[SEP]", 3), ("[EOS]", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", eos_token="[EOS]"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_labels_say_where_the_first_answer_stands_in_windows_that_hold_it(tmp_path: Path) -> None:
    dataset = load(str(table(tmp_path / "data")), tokenizer=words(tmp_path / "words", "bert"), max_length=16)
    assert kind_of(dataset) == "span"
    assert dataset.questions is not None and dataset.questions.spans is not None
    assert len(dataset.train) > len(ROWS), "a long text has several windows"
    for examples, first in ((dataset.train, 0), (dataset.test, len(ROWS))):
        found: dict[int, list[str]] = {}
        for begin, end, number, window in examples.labels.tolist():
            stands = dataset.questions.spans[window]
            if begin or end:
                found.setdefault(number - first, []).append(CONTEXT[int(stands[begin, 0]) : int(stands[end, 1])])
        assert {number: set(several) for number, several in found.items()} == {
            number: {row[2][0][0]} for number, row in enumerate(ROWS) if row[2]
        }
    assert dataset.owners is not None
    assert [set(owners) for owners in dataset.owners] == [{0, 1}, {0, 1}]


def test_perfect_scores_give_perfect_answers(tmp_path: Path) -> None:
    dataset = load(str(table(tmp_path / "data")), tokenizer=words(tmp_path / "words", "bert"), max_length=16)
    task, labels = SpanAnswers(questions=dataset.questions), dataset.test.labels
    assert dataset.questions is not None and dataset.questions.spans is not None
    scores = torch.zeros(len(labels), 2, dataset.questions.spans.shape[1])
    for place in (0, 1):
        scores[torch.arange(len(labels)), place, labels[:, place]] = torch.where(labels[:, place] > 0, 9.0, 5.0)
    assert task.metrics(scores, labels) == {"f1": 1.0, "exact_match": 1.0}


@given(st.integers(0, 2**31), st.integers(1, 4), st.sampled_from(["iid", "dirichlet-balanced", "dirichlet", "k-shot"]))
def test_all_windows_of_a_question_stay_together(seed: int, clients: int, how: str) -> None:
    draw = np.random.default_rng(seed)
    train, test = (np.repeat(np.arange(8) + first, draw.integers(1, 4, 8)) for first in (0, 8))
    examples = [asking(draw.permutation(numbers)) for numbers in (train, test)]
    dataset = Dataset("made", *examples, ("first", "last"), questions=Questions((), torch.zeros(64, 1, 2)))
    options = {"dirichlet-balanced": {"alpha": 1.0}, "dirichlet": {"alpha": 1.0, "least": 1}, "k-shot": {"k": 2}}.get(how, {})
    made = split(dataset, clients, how, seed, **options)
    for part, whole in ((made.train, dataset.train), (made.test, dataset.test)):
        owners = [set(numbers_of(whole, part[client])) for client in range(clients)]
        assert sum(map(len, owners)) == len(set().union(*owners)), "nobody shares a question"
        for client, own in enumerate(owners):
            assert len(part[client]) == sum(number in own for number in numbers_of(whole))
    held = hold_out(dataset, 0.25, seed)
    assert held.validation is not None
    kept, out = set(numbers_of(held.train)), set(numbers_of(held.validation))
    assert (len(kept), len(out), len(kept & out)) == (6, 2, 0)
    assert len(held.train) + len(held.validation) == len(dataset.train)


def asking(numbers: Any) -> Examples:
    """Windows of these questions."""
    labels = torch.zeros(len(numbers), 4, dtype=torch.int64)
    labels[:, 2] = torch.from_numpy(numbers)
    return Examples({"input_ids": torch.zeros(len(numbers), 1)}, labels)


def numbers_of(examples: Examples, places: Any = slice(None)) -> list[int]:
    found: list[int] = examples.labels[places, 2].tolist()
    return found


def test_what_is_written_is_read_and_judged(tmp_path: Path) -> None:
    tokenizer = words(tmp_path / "words", "t5")
    dataset = load(str(table(tmp_path / "data")), tokenizer=tokenizer, max_length=64, is_written=True)
    assert kind_of(dataset) == "written"
    task, labels = WrittenAnswers(questions=dataset.questions), dataset.test.labels
    assert dataset.questions is not None
    right = torch.where(labels[:, 1:] < 0, 0, labels[:, 1:])
    assert answers_of(dataset.questions, right, labels)[len(ROWS)] == "on the Rhine"
    outputs = torch.cat([torch.zeros(len(labels), 1), right.float()], 1)
    outputs[2, 1:] = 0  # nothing is written, and nothing answers
    assert task.metrics(outputs, labels) == {"f1": 1.0, "exact_match": 1.0}


def test_a_model_writes_what_its_library_generates_and_its_loss_is_the_librarys(tmp_path: Path) -> None:
    tokenizer = words(tmp_path / "words", "t5")
    dataset = load(str(table(tmp_path / "data")), tokenizer=tokenizer, max_length=64, is_written=True)
    model: Any = tiny("t5")
    task = WrittenAnswers(questions=dataset.questions)
    batch = task.batch(dataset.test, torch.arange(2))
    with torch.no_grad():
        said = predicted_by(task, model, batch)
        alone = Batch({name: tensor[:1] for name, tensor in batch.inputs.items()}, batch.labels[:1])
        assert torch.allclose(said[:1, 0], task.forward(model, alone)[:, 0], atol=1e-6)
        loss = model(**alone.inputs, labels=alone.labels[:, 1:].contiguous()).loss
        written = model.generate(**batch.inputs, max_new_tokens=WRITTEN, do_sample=False)[:, 1:]
    assert torch.allclose(said[0, 0], loss, atol=1e-6)
    assert said.shape == (2, 1 + WRITTEN)
    assert torch.equal(said[:, 1 : 1 + written.shape[1]].long(), written)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_questions_are_learnt_by_the_command_line(tmp_path: Path, kind: str) -> None:
    words(tmp_path / "words", kind)
    source, tokenizer = str(table(tmp_path / "data")), str(tmp_path / "words")
    settings = (f"data.tokenizer={tokenizer}", "data.validation=0", "data.max_length=20", "local.steps=2")
    given_ = [part for setting in settings for part in ("--set", setting)]
    done = raffm(
        *("train", "--model", f"{kind}:tiny", "--data", source, "--split", "column", "--rounds", "1", "--fleet", "1:1, 1/4:1"),
        *(*given_, "--folder", str(tmp_path / "run")),
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    scores = results["evaluations"][-1]["sizes"]
    assert {tuple(entry["test"])[:2] for entry in scores.values()} == {("f1", "exact_match")}


def test_a_task_travels_without_its_questions(tmp_path: Path) -> None:
    dataset = load(str(table(tmp_path / "data")), tokenizer=words(tmp_path / "words", "bert"), max_length=32)
    sent = json.loads(json.dumps(task_described(SpanAnswers(questions=dataset.questions, longest=7))))
    assert task_from(sent) == SpanAnswers(longest=7)
    with pytest.raises(RunError, match="questions"):
        task_from(sent).metrics(torch.zeros(1, 2, 3), torch.zeros(1, 4))


def test_bad_questions_are_refused_in_words(tmp_path: Path) -> None:
    tokenizer = words(tmp_path / "words", "bert")
    with pytest.raises(DataError, match=r"row 1 of .*'1906' begins at character 3"):
        load(str(table(tmp_path / "moved", {1: 3})), tokenizer=tokenizer)
    with pytest.raises(DataError, match="too little of 6 tokens"):
        load(str(table(tmp_path / "long")), tokenizer=tokenizer, max_length=6)
    (table(tmp_path / "untested") / "validation.parquet").unlink()
    with pytest.raises(DataError, match="none to test with"):
        load(str(tmp_path / "untested"), tokenizer=tokenizer)
    with pytest.raises(DataError, match="fast tokenizer"):
        windows([], "here", type("Slow", (), {"name_or_path": "slow"})(), 16, 0)


def test_flan_t5_keeps_the_head_of_its_own(tmp_path: Path) -> None:
    """Its config says so, and T5's config class forgets it."""
    model: Any = from_config("t5", "T5ForConditionalGeneration", {**shipped("t5").tiny["config"], "tie_word_embeddings": False})
    torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "tie_word_embeddings": False}))
    loaded: Any = trainable(str(tmp_path), "written", 50)
    assert has_own_head(loaded)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert torch.equal(loaded.shared.weight, model.shared.weight)


def test_heads_for_answers_are_whole_in_every_submodel() -> None:
    model = trainable("bert:tiny", "span", 2)
    assert type(model).__name__ == "BertForQuestionAnswering"
    small, params, _ = RaFFM(model).sample_smallest_model()
    assert params < sum(parameter.numel() for parameter in model.parameters())
    assert small.qa_outputs.out_features == 2  # type: ignore[union-attr]
