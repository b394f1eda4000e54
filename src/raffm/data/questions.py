"""Questions about a text, as SQuAD has them: a stretch of the text answers, or nothing does.

Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text", EMNLP 2016, and "Know What You Don't Know:
Unanswerable Questions for SQuAD", ACL 2018.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raffm.data.text import padded, padding_of
from raffm.errors import DataError
from raffm.libraries import library

IGNORED = -100
"""The label of padding."""

WRITTEN = 32
"""Tokens of an answer in the model's own words, at most."""

QUESTION = 2
"""Where a window's labels have the number of its question."""

NO_ANSWER = "unanswerable"
"""What a model writes where nothing answers."""

OUTSIDE = -1
"""Where a token stands that is no part of the text."""

NEEDS = DataError("exact match and F1 of answers need torchmetrics: pip install 'raffm[train]'.")


@dataclass(frozen=True)
class Question:
    """A question, the text that it is about, and its answers with where each begins; there may be none."""

    question: str
    context: str
    answers: tuple[str, ...]
    begins: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Questions:
    """All questions of a data set, by number, and what it takes to read an answer.

    `spans` says where every token of every window stands in its text: (windows, tokens, begin and end). Answers that are
    written are read by `tokenizer` instead.
    """

    entries: tuple[Question, ...]
    spans: Tensor | None = None
    tokenizer: Any = None

    def metrics(self, said: Mapping[int, str]) -> dict[str, float]:
        """F1 and exact match of answers, as SQuAD's own script has them; "" says that nothing answers."""
        squad = library("torchmetrics.functional.text", NEEDS).squad
        given = [{"id": str(number), "prediction_text": words} for number, words in said.items()]
        known = [{"id": str(number), "answers": _accepted(self.entries[number])} for number in said]
        found = squad(given, known)
        return {"f1": float(found["f1"]) / 100, "exact_match": float(found["exact_match"]) / 100}


def _accepted(entry: Question) -> dict[str, list[Any]]:
    return {"text": list(entry.answers) or [""], "answer_start": list(entry.begins) or [0]}


# -- stretches of the text ---------------------------------------------------------------------------------------------


def windows(entries: Sequence[Question], where: str, tokenizer: Any, max_length: int, first: int) -> dict[str, Tensor]:
    """Every question with its text, in windows that overlap where the text is long.

    `labels` are the first and the last token of the first answer (0 and 0 where the window lacks it), the number of the
    question, beginning with `first`, and that of the window among these.
    """
    encoded = _encoded(entries, where, tokenizer, max_length)
    lengths = np.array([len(ids) for ids in encoded["input_ids"]], np.int64)
    found = {"input_ids": padded(_joined(encoded["input_ids"]), lengths, padding_of(tokenizer))}
    if "token_type_ids" in encoded:
        found["token_type_ids"] = padded(_joined(encoded["token_type_ids"]), lengths, 0)
    spans = torch.full((len(lengths), int(lengths.max()), 2), OUTSIDE, dtype=torch.int32)
    labels = torch.zeros((len(lengths), 4), dtype=torch.int64)
    for window, owner in enumerate(encoded["overflow_to_sample_mapping"]):
        inside = np.array([part == 1 for part in encoded.sequence_ids(window)])
        stands = np.where(inside[:, None], np.array(encoded["offset_mapping"][window]), OUTSIDE)
        spans[window, : len(stands)] = torch.from_numpy(stands)
        labels[window] = torch.tensor([*_tokens_of(entries[owner], stands), first + owner, window])
    return {**found, "lengths": torch.from_numpy(lengths), "spans": spans, "labels": labels}


def _encoded(entries: Sequence[Question], where: str, tokenizer: Any, max_length: int) -> Any:
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(f"answers are found in texts by a fast tokenizer, and {tokenizer.name_or_path!r} is none.")
    try:
        return tokenizer(
            [entry.question for entry in entries],
            [entry.context for entry in entries],
            truncation="only_second",
            max_length=max_length,
            stride=max_length // 3,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
    except BaseException as error:  # the library's own errors have no common kind, and its panics none of Python's
        if isinstance(error, KeyboardInterrupt):
            raise
        raise DataError(
            f"a question of {where} leaves too little of {max_length} tokens for its text: {error}. Raise max_length."
        ) from None


def _tokens_of(entry: Question, stands: np.ndarray[Any, Any]) -> tuple[int, int]:
    """The first and the last token of the first answer; 0 and 0 where it is not, or not whole, among those that stand here."""
    here = np.flatnonzero(stands[:, 0] >= 0)
    if not entry.answers or not len(here):
        return 0, 0
    begin, end = entry.begins[0], entry.begins[0] + len(entry.answers[0])
    if begin < stands[here[0], 0] or end > stands[here[-1], 1]:
        return 0, 0
    return int(here[stands[here, 0] <= begin][-1]), int(here[stands[here, 1] >= end][0])


def _joined(lists: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.asarray(each, np.int64) for each in lists])


def best_spans(outputs: Tensor, spans: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of every window the best stretch of its text, its score, and that of no answer.

    Outputs are scores for being the first and the last token: (windows, 2, tokens). A stretch has at most `longest` tokens.
    Gives where it begins and ends in the text, and the two scores.
    """
    inside = spans[..., 0] >= 0
    begins, ends = (outputs[:, place].masked_fill(~inside, -torch.inf) for place in (0, 1))
    best = torch.full((len(outputs),), -torch.inf)
    first, last = torch.zeros(len(outputs), dtype=torch.int64), torch.zeros(len(outputs), dtype=torch.int64)
    for more in range(min(longest, outputs.shape[2])):
        score, place = (begins[:, : begins.shape[1] - more] + ends[:, more:]).max(1)
        is_better = score > best
        best = torch.where(is_better, score, best)
        first, last = torch.where(is_better, place, first), torch.where(is_better, place + more, last)
    rows = torch.arange(len(outputs))
    return spans[rows, first, 0], spans[rows, last, 1], best, outputs[:, 0, 0] + outputs[:, 1, 0]


def answers_in(questions: Questions, outputs: Tensor, labels: Tensor, longest: int) -> dict[int, str]:
    """The answer to every question from all its windows: the best stretch, or "" where no answer scores higher in each."""
    assert questions.spans is not None
    found = best_spans(outputs, questions.spans[labels[:, 3]], longest)
    begins, ends, best, null = (values.tolist() for values in found)
    chosen: dict[int, tuple[float, str]] = {}
    nothing: dict[int, float] = {}
    for row, number in enumerate(labels[:, QUESTION].tolist()):
        nothing[number] = min(nothing.get(number, float("inf")), null[row])
        if number not in chosen or best[row] > chosen[number][0]:
            chosen[number] = best[row], questions.entries[number].context[begins[row] : ends[row]]
    return {number: words if score >= nothing[number] else "" for number, (score, words) in chosen.items()}


# -- the model's own words ---------------------------------------------------------------------------------------------


def asked(entry: Question) -> str:
    """A question and its text as T5 was taught to read them."""
    return f"question: {entry.question.strip()} context: {entry.context.strip()}"


def written(entries: Sequence[Question], tokenizer: Any, first: int) -> Tensor:
    """Labels: the number of every question, then the tokens of its first answer."""
    texts = [entry.answers[0] if entry.answers else NO_ANSWER for entry in entries]
    tokens = tokenizer(texts, truncation=True, max_length=WRITTEN)["input_ids"]
    labels = torch.full((len(entries), 1 + WRITTEN), IGNORED, dtype=torch.int64)
    labels[:, 0] = torch.arange(first, first + len(entries))
    for row, ids in enumerate(tokens):
        labels[row, 1 : 1 + len(ids)] = torch.tensor(ids)
    return labels


def answers_of(questions: Questions, tokens: Tensor, labels: Tensor) -> dict[int, str]:
    """The answers that were written."""
    texts = questions.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    words = (text.strip() for text in texts)
    return {
        number: "" if text.lower() == NO_ANSWER else text for number, text in zip(labels[:, 0].tolist(), words, strict=True)
    }
