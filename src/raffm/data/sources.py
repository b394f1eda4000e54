"""Where data sets come from: digits, known sets, parquet, csv and image folders, or Hugging Face."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from raffm.data import images, plays, squad, text
from raffm.data.cache import cached
from raffm.data.examples import Dataset, Examples, Integers, refuse_labels
from raffm.data.rows import CHUNK, Rows, data_folder, needed, opened
from raffm.data.splits import stratified
from raffm.errors import DataError

T = TypeVar("T")

PAIRS = (("sentence1", "sentence2"), ("question1", "question2"), ("premise", "hypothesis"), ("question", "sentence"))
IMAGES = ("img", "image", "pixel_values")
TEXTS = ("text", "sentence")
LABELS = ("label", "fine_label", "labels")
FIFTH = 0.2  # the share of a source without a test set that becomes one


@dataclass(frozen=True)
class Columns:
    """The columns of a source; None: found by their names and types (an owner column is never guessed).

    `pair` holds the second text of every example, where there are two.
    """

    input: str | None = None
    label: str | None = None
    owner: str | None = None
    pair: str | None = None


@dataclass(frozen=True)
class _Chosen:
    """The columns to read, by name."""

    input: str
    label: str
    owner: str | None
    pair: str | None = None


FOUND = Columns()


def load(
    source: str,
    *,
    columns: Columns = FOUND,
    image_size: int | None = None,
    tokenizer: Any = None,
    max_length: int = 128,
    is_written: bool = False,
) -> Dataset:
    """The data set of a name, a path, or a Hugging Face name ("owner/set" or "owner/set:config"), in this order.

    "digits" is scikit-learn's. Names such as "cifar10" are looked for in `$RAFFM_DATA`, else in `data`. A path is
    a parquet or csv file, a folder with `train.parquet` and `test.parquet`, or one with images as `train/class/1.png`; a
    text file (`.txt`, `.txt.xz`) is a play, whose speakers are owners. Questions about texts are answered with a stretch of
    the text, or, if `is_written`, in the model's own words.

    Where the test labels are hidden (-1, as in GLUE) or there is no test set, the validation set is the test set; where
    there is neither, a fixed fifth of the examples, with the same mix of classes, the same for every seed.
    """
    if image_size is not None and image_size < 1:
        raise DataError(f"image_size is {image_size!r}; it must be at least 1 pixel.")
    if max_length < 1:
        raise DataError(f"max_length is {max_length!r}; it must be at least 1 token.")
    if source == "digits":
        return _digits(image_size)
    play = plays.found([data_folder() / source, Path(source)])
    if play is not None:
        return plays.load_play(play, tokenizer, max_length)
    parts = opened(source)
    if squad.is_squad(parts):
        return squad.load_questions(source, parts, tokenizer, max_length, is_written)
    chosen = _chosen(parts["train"], columns)
    parts = _tested(parts, chosen.label)
    for rows in parts.values():
        _refuse_columns(rows, (chosen.input, chosen.label, chosen.owner, chosen.pair))
    return _assembled(source, parts, chosen, _encoder(parts["train"], chosen, image_size, tokenizer, max_length))


def _digits(image_size: int | None) -> Dataset:
    """Real digits of 8 x 8 pixels, 1,437 for training and 360 for tests."""
    bunch = needed("sklearn.datasets", "demo").load_digits()
    pixels = torch.from_numpy(np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None])
    pixels = pixels if image_size is None else images.resized(pixels, image_size)
    examples = Examples({"pixel_values": pixels}, torch.from_numpy(bunch.target.astype(np.int64)))
    return _with_a_fifth_for_tests(Dataset("digits", examples, examples, tuple(map(str, bunch.target_names))))


def _with_a_fifth_for_tests(dataset: Dataset) -> Dataset:
    """The data set whose test set is a fixed fifth of its examples."""
    examples = dataset.train
    kept, held = stratified(examples.strata, math.ceil(FIFTH * len(examples)), seed=0)
    owners = dataset.owners and (dataset.owners[0][kept], dataset.owners[0][held])
    return Dataset(dataset.name, examples.take(kept), examples.take(held), dataset.classes, None, owners)


def _assembled(
    name: str, parts: Mapping[str, Rows], chosen: _Chosen, encode: Callable[[Rows], Mapping[str, Tensor]]
) -> Dataset:
    """The data set of some parts, of which "train" is one."""
    labels, classes = _labels(parts, chosen)
    for part, of_part in labels.items():
        refuse_labels(of_part, len(classes), f"the rows of {parts[part].where}")
    examples = {part: Examples(encode(rows), labels[part]) for part, rows in parts.items()}
    owners = {} if chosen.owner is None else _numbered(parts, chosen.owner)
    if "test" not in parts:
        both = (owners["train"], owners["train"]) if owners else None
        return _with_a_fifth_for_tests(Dataset(name, examples["train"], examples["train"], classes, None, both))
    pair = (owners["train"], owners["test"]) if owners else None
    return Dataset(name, examples["train"], examples["test"], classes, examples.get("validation"), pair)


def _refuse_columns(rows: Rows, names: Iterable[str | None]) -> None:
    for name in names:
        if name is not None and name not in rows.schema.names:
            raise DataError(f"{rows.where} has no column {name!r}. It has: {', '.join(rows.schema.names)}.")


def _chosen(rows: Rows, columns: Columns) -> _Chosen:
    """The columns that were asked for, or else look like what is needed."""
    _refuse_columns(rows, (columns.input, columns.label, columns.owner, columns.pair))
    label = columns.label or _first(LABELS, "label", rows)
    two = next((pair for pair in PAIRS if set(pair) <= set(rows.schema.names)), None)
    if two is not None and columns.input is None and columns.pair is None:
        return _Chosen(two[0], label, columns.owner, two[1])
    pictured = [name for name, feature in rows.features.items() if feature.get("_type") == "Image"]
    found = columns.input or _first([*pictured, *IMAGES, *TEXTS], "input", rows)
    return _Chosen(found, label, columns.owner, columns.pair)


def _first(candidates: Iterable[str], role: str, rows: Rows) -> str:
    for name in candidates:
        if name in rows.schema.names:
            return name
    found = ", ".join(rows.schema.names)
    raise DataError(
        f"{rows.where} has the columns {found}: none is known as the {role}. Name it: data.{role}, or in Python "
        f"Columns({role}=...)."
    )


def _encoder(
    rows: Rows, chosen: _Chosen, image_size: int | None, tokenizer: Any, max_length: int
) -> Callable[[Rows], dict[str, Tensor]]:
    """How a part becomes inputs: pixels, or token ids where the column holds texts."""
    column = chosen.input
    if _has_pictures(rows, column):
        needed("PIL", "data")
        return lambda part: _pictures(part, column, image_size)
    if tokenizer is None:
        raise DataError(f"the column {column!r} of {rows.where} holds texts. Give a tokenizer to load it.")
    return lambda part: _texts(part, column, chosen.pair, tokenizer, max_length)


def _has_pictures(rows: Rows, column: str) -> bool:
    is_file = str(rows.schema.field(column).type).startswith(("struct", "binary", "large_binary"))
    return is_file or column in IMAGES or rows.features.get(column, {}).get("_type") == "Image"


def _pictures(rows: Rows, column: str, size: int | None) -> dict[str, Tensor]:
    def make() -> dict[str, Tensor]:
        cells = _shown((cell for chunk in rows.chunks(column) for cell in chunk), rows.count, f"decoding {rows.where}")
        return {"pixel_values": images.decoded(cells, rows.count, rows.where, size)}

    return cached("images", {"files": rows.stamps, "column": column, "image_size": size}, make)


def _texts(rows: Rows, column: str, pair: str | None, tokenizer: Any, max_length: int) -> dict[str, Tensor]:
    def make() -> dict[str, Tensor]:
        firsts = _shown(rows.chunks(column), math.ceil(rows.count / CHUNK), f"tokenising {rows.where}")
        seconds = repeat(None) if pair is None else rows.chunks(pair)
        return text.tokenised(zip(firsts, seconds, strict=False), rows.where, tokenizer, max_length)

    identity = text.identity(next(rows.chunks(column)), rows.where, tokenizer, max_length)
    key = {"files": rows.stamps, "column": column, "tokenizer": identity, "max_length": max_length}
    return cached("texts", key if pair is None else {**key, "pair": pair}, make)


def _shown(items: Iterable[T], total: int, what: str) -> Iterable[T]:
    """The items, with a bar of progress where someone watches."""
    if not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, what, total, console=Console(stderr=True), transient=True)


def _tested(parts: Mapping[str, Rows], label: str) -> dict[str, Rows]:
    """The parts with the validation set as test set where that has hidden labels or does not exist."""
    kept = dict(parts)
    if "test" in kept and _is_hidden(kept, label):
        if "validation" not in kept:
            raise DataError(
                f"the labels of {kept['test'].where} are hidden (-1) and there is no validation set to test on."
                " Put one beside it, or remove the test file to hold out a fifth of the training examples."
            )
        del kept["test"]
    if "test" not in kept and "validation" in kept:
        kept["test"] = kept.pop("validation")
    return kept


def _is_hidden(parts: Mapping[str, Rows], label: str) -> bool:
    """Whether all test labels are -1, or there are none, while training labels are others."""
    if label not in parts["test"].schema.names:
        return True
    read = Rows.numbers if _is_number(parts["train"], label) else Rows.values
    return bool((read(parts["test"], label) == -1).all() and not (read(parts["train"], label) == -1).any())


def _is_number(rows: Rows, column: str) -> bool:
    """Whether a column holds numbers with a fraction."""
    return str(rows.schema.field(column).type) in ("float", "double", "halffloat")


def _labels(parts: Mapping[str, Rows], chosen: _Chosen) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The labels of every part and the names of the classes: those of Hugging Face, else the sorted values.

    Texts may have numbers in the place of classes.
    """
    column = chosen.label
    if _is_number(parts["train"], column) and not _has_pictures(parts["train"], chosen.input):
        return {part: torch.from_numpy(rows.numbers(column)) for part, rows in parts.items()}, (column,)
    values = {part: rows.values(column) for part, rows in parts.items()}
    names = parts["train"].features.get(column, {}).get("names")
    if names and all(np.issubdtype(found.dtype, np.integer) for found in values.values()):
        return {part: torch.from_numpy(found.astype(np.int64)) for part, found in values.items()}, tuple(names)
    classes = np.unique(np.concatenate(list(values.values())))
    numbers = {part: np.searchsorted(classes, found).astype(np.int64) for part, found in values.items()}
    return {part: torch.from_numpy(found) for part, found in numbers.items()}, tuple(map(str, classes))


def _numbered(parts: Mapping[str, Rows], column: str) -> dict[str, Integers]:
    """The owners of every part, numbered by their sorted values."""
    values = {part: rows.values(column) for part, rows in parts.items()}
    owners = np.unique(np.concatenate(list(values.values())))
    return {part: np.searchsorted(owners, found).astype(np.int64) for part, found in values.items()}
