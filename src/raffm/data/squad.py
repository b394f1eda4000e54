"""SQuAD, and what has its columns: questions about texts, read from files or the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from raffm.data import text
from raffm.data.cache import cached
from raffm.data.examples import Dataset, Examples, Integers
from raffm.data.questions import OUTSIDE, QUESTION, Question, Questions, asked, windows, written
from raffm.data.rows import CHUNK, Rows
from raffm.errors import DataError

COLUMNS = frozenset({"context", "question", "answers"})

OWNER = "title"
"""The article that a text is from: a natural client."""


def is_squad(parts: Mapping[str, Rows]) -> bool:
    """Whether a source holds questions about texts."""
    return set(parts["train"].schema.names) >= COLUMNS


def load_questions(name: str, parts: Mapping[str, Rows], tokenizer: Any, max_length: int, is_written: bool) -> Dataset:
    """Questions and their texts, to be answered with a stretch of the text, or in writing. Articles are owners.

    The validation set is the test set where there is no other.
    """
    if tokenizer is None:
        raise DataError(f"{parts['train'].where} holds texts. Give a tokenizer to load it.")
    if not {"validation", "test"} & set(parts):
        raise DataError(f"the source {name!r} has questions to train on, but none to test with: put validation.parquet beside.")
    tested = parts["test" if "test" in parts else "validation"]
    train, test = read(parts["train"]), read(tested)
    make = _written if is_written else _spans
    examples, spans = make((parts["train"], train), (tested, test), tokenizer, max_length)
    questions = Questions((*train, *test), spans, tokenizer if is_written else None)
    owners = _owners(parts["train"], tested, examples, 0 if is_written else QUESTION)
    return Dataset(name, *examples, () if is_written else ("first", "last"), None, owners, questions)


def read(rows: Rows) -> list[Question]:
    """The questions of a part, checked."""
    columns = [[value for chunk in rows.chunks(column) for value in chunk] for column in ("question", "context", "answers")]
    found = []
    for place, (question, context, answers) in enumerate(zip(*columns, strict=True)):
        if not isinstance(question, str) or not isinstance(context, str):
            raise DataError(f"row {place} of {rows.where} has no text where a question and its context should be.")
        known = answers or {"text": [], "answer_start": []}
        entry = Question(question, context, tuple(known["text"]), tuple(known["answer_start"]))
        for words, begin in zip(entry.answers, entry.begins, strict=True):
            if context[begin : begin + len(words)] != words:
                raise DataError(
                    f"row {place} of {rows.where} says that {words!r} begins at character {begin} of its context, where "
                    f"{context[begin : begin + len(words)]!r} stands. Mend the row or leave it out."
                )
        found.append(entry)
    return found


Part = tuple[Rows, Sequence[Question]]
Pair = tuple[Examples, Examples]


def _spans(train: Part, test: Part, tokenizer: Any, max_length: int) -> tuple[Pair, Tensor]:
    """Windows of both parts, and where the tokens of all stand in their texts."""
    made = []
    for (rows, entries), first in ((train, 0), (test, len(train[1]))):
        key = {**_key(rows, entries, tokenizer, max_length), "first": first}
        made.append(cached("questions", key, _maker(entries, rows.where, tokenizer, max_length, first)))
    width = max(part["spans"].shape[1] for part in made)
    spans = [functional.pad(part["spans"], (0, 0, 0, width - part["spans"].shape[1]), value=OUTSIDE) for part in made]
    made[1]["labels"][:, 3] += len(spans[0])
    inputs = [{key: part[key] for key in part if key not in ("labels", "spans")} for part in made]
    return (Examples(inputs[0], made[0]["labels"]), Examples(inputs[1], made[1]["labels"])), torch.cat(spans)


def _maker(entries: Sequence[Question], where: str, tokenizer: Any, max_length: int, first: int) -> Any:
    return lambda: windows(entries, where, tokenizer, max_length, first)


def _written(train: Part, test: Part, tokenizer: Any, max_length: int) -> tuple[Pair, None]:
    """Questions of both parts with their texts, cut to `max_length`, and the answers' tokens."""
    found = []
    for (rows, entries), first in ((train, 0), (test, len(train[1]))):
        texts = [asked(entry) for entry in entries]
        chunks = ((texts[begin : begin + CHUNK], None) for begin in range(0, len(texts), CHUNK))
        inputs = text.tokenised(chunks, rows.where, tokenizer, max_length)
        found.append(Examples(inputs, written(entries, tokenizer, first)))
    return (found[0], found[1]), None


def _key(rows: Rows, entries: Sequence[Question], tokenizer: Any, max_length: int) -> dict[str, Any]:
    some = [entry.context for entry in entries[:CHUNK]]
    return {"files": rows.stamps, "tokenizer": text.identity(some, rows.where, tokenizer, max_length), "max_length": max_length}


def _owners(train: Rows, test: Rows, examples: Pair, column: int) -> tuple[Integers, Integers] | None:
    """Whose every example is, by the number of its question in this column of the labels."""
    if not all(OWNER in rows.schema.names for rows in (train, test)):
        return None
    titles = np.concatenate([rows.values(OWNER) for rows in (train, test)])
    numbers = np.unique(titles, return_inverse=True)[1].astype(np.int64)
    first, second = (numbers[part.labels[:, column].numpy()] for part in examples)
    return first, second
