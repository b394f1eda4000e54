"""Where data sets come from: digits, known sets, parquet, csv and image folders, or Hugging Face."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raffm.data import glue, images, plays, text
from raffm.data.cache import cached, stamp
from raffm.data.examples import Dataset, Examples, Integers, refuse_labels
from raffm.data.splits import stratified
from raffm.errors import DataError
from raffm.libraries import library

Values = NDArray[Any]
T = TypeVar("T")

PARTS = ("train", "validation", "test")
PAIRS = (("sentence1", "sentence2"), ("question1", "question2"), ("premise", "hypothesis"), ("question", "sentence"))
IMAGES = ("img", "image", "pixel_values")
TEXTS = ("text", "sentence")
LABELS = ("label", "fine_label", "labels")
CHUNK = 1000  # rows that are decoded or tokenised at once
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


@dataclass(frozen=True, eq=False)
class Rows:
    """One part of a source, not read yet: `batches(column)` gives its arrays one after the other."""

    where: str
    schema: Any  # a pyarrow.Schema
    features: Mapping[str, Any]  # as Hugging Face describes columns; may be empty
    count: int
    batches: Callable[[str], Iterator[Any]]
    stamps: Any  # what tells one version of it from another

    def chunks(self, column: str) -> Iterator[list[Any]]:
        """The values of a column, some at a time."""
        for array in self.batches(column):
            for begin in range(0, len(array), CHUNK):
                yield array[begin : begin + CHUNK].to_pylist()

    def values(self, column: str) -> Values:
        """All values of a column of integers, words or truths, none of them missing."""
        arrays = [_plain(array, f"the column {column!r} of {self.where}") for array in self.batches(column)]
        missing = np.concatenate([np.asarray(array.is_null()) for array in arrays])
        if missing.any():
            raise DataError(f"{self.where} has no {column!r} in row {int(missing.argmax())}. Leave the row out or fill it.")
        return np.concatenate([array.to_numpy(zero_copy_only=False) for array in arrays])

    def numbers(self, column: str) -> NDArray[np.float32]:
        """All values of a column of numbers; a missing one is none."""
        return np.concatenate([array.to_numpy(zero_copy_only=False) for array in self.batches(column)]).astype(np.float32)


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
) -> Dataset:
    """The data set of a name, a path, or a Hugging Face name ("owner/set" or "owner/set:config"), in this order.

    "digits" is scikit-learn's. Names such as "cifar10" are looked for in `$RAFFM_DATA`, else in `data`. A path is
    a parquet or csv file, a folder with `train.parquet` and `test.parquet`, or one with images as `train/class/1.png`; a
    text file (`.txt`, `.txt.xz`) is a play, whose speakers are owners.

    Where the test labels are hidden (-1, as in GLUE) or there is no test set, the validation set is the test set; where
    there is neither, a fixed fifth of the examples, with the same mix of classes, the same for every seed.
    """
    if image_size is not None and image_size < 1:
        raise DataError(f"image_size is {image_size!r}; it must be at least 1 pixel.")
    if max_length < 1:
        raise DataError(f"max_length is {max_length!r}; it must be at least 1 token.")
    if source == "digits":
        return _digits(image_size)
    play = plays.found([_data_folder() / source, Path(source)])
    if play is not None:
        return plays.load_play(play, tokenizer, max_length)
    parts = _opened(source)
    chosen = _chosen(parts["train"], columns)
    parts = _tested(parts, chosen.label)
    for rows in parts.values():
        _refuse_columns(rows, (chosen.input, chosen.label, chosen.owner, chosen.pair))
    return _assembled(source, parts, chosen, _encoder(parts["train"], chosen, image_size, tokenizer, max_length))


def _digits(image_size: int | None) -> Dataset:
    """Real digits of 8 x 8 pixels, 1,437 for training and 360 for tests."""
    bunch = _module("sklearn.datasets", "demo").load_digits()
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
    raise DataError(f"{rows.where} has the columns {found}: none is known as the {role}. Name it: Columns({role}=...).")


def _encoder(
    rows: Rows, chosen: _Chosen, image_size: int | None, tokenizer: Any, max_length: int
) -> Callable[[Rows], dict[str, Tensor]]:
    """How a part becomes inputs: pixels, or token ids where the column holds texts."""
    column = chosen.input
    if _has_pictures(rows, column):
        _module("PIL", "data")
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


def _opened(source: str) -> dict[str, Rows]:
    """The parts of a source, from the first place that has it; each has rows, and there is one to train on."""
    if source in glue.METRICS:
        source = glue.source_of(source, _data_folder())
    places = [_data_folder() / source, Path(source)]
    parts = next((found for place in places if (found := _found(place))), None) or _from_hub(source)
    if "train" not in parts:
        raise DataError(f"the source {source!r} has no part named 'train', only: {', '.join(parts)}.")
    for rows in parts.values():
        if not rows.count:
            raise DataError(f"{rows.where} is empty: it must have at least one row.")
    return parts


def _data_folder() -> Path:
    return Path(os.environ.get("RAFFM_DATA") or "data")


def _found(place: Path) -> dict[str, Rows]:
    """The parts at a place: a file, files by part, or folders of images; none where there is nothing."""
    if place.is_file():
        return {"train": _table([place])}
    tables = {part: _table(files) for part in PARTS if (files := _files(place, part) or _files(place, f"{part}_matched"))}
    if tables or not place.is_dir():
        return tables
    folders = {part: place / part for part in PARTS if (place / part).is_dir()} or {"train": place}
    pictures = {part: found for part, folder in folders.items() if (found := images.in_folder(folder))}
    if not pictures:
        raise DataError(
            f"the folder {str(place)!r} holds no data: expected train.parquet or train.csv (with test.parquet or test.csv"
            " beside), or images as train/<class>/<name>.png."
        )
    return {part: _picture_rows(folders[part], found) for part, found in pictures.items()}


def _files(place: Path, part: str) -> list[Path]:
    """The files of one part: in the folder, as Hugging Face names them there, or beside it as `cola-train.parquet`."""
    for suffix in ("parquet", "csv"):
        beside = place.parent / f"{place.name}-{part}.{suffix}"
        patterns = (f"{part}.{suffix}", f"{part}-*.{suffix}", f"data/{part}-*.{suffix}")
        for files in ([beside] if beside.is_file() else [], *(sorted(place.glob(pattern)) for pattern in patterns)):
            if files:
                return files
    return []


def _table(files: list[Path]) -> Rows:
    if all(file.suffix == ".parquet" for file in files):
        return _parquet(files)
    if all(file.suffix == ".csv" for file in files):
        return _csv(files)
    raise DataError(f"{str(files[0])!r} is neither a .parquet nor a .csv file.")


def _parquet(files: list[Path]) -> Rows:
    """Rows of parquet files, read one row group after the other."""
    where = str(files[0])
    parquet = _module("pyarrow.parquet", "data")
    with _readable(where):
        opened = [parquet.ParquetFile(file) for file in files]

    def batches(column: str) -> Iterator[Any]:
        with _readable(where):
            for file in opened:
                for group in range(file.num_row_groups):
                    yield from file.read_row_group(group, columns=[column]).column(column).chunks

    schema = opened[0].schema_arrow
    described = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    count = sum(file.metadata.num_rows for file in opened)
    return Rows(where, schema, _features(described), count, batches, [stamp(file) for file in files])


def _csv(files: list[Path]) -> Rows:
    pyarrow, csv = _module("pyarrow", "data"), _module("pyarrow.csv", "data")
    options = csv.ParseOptions(newlines_in_values=True)
    with _readable(str(files[0])):
        table = pyarrow.concat_tables([csv.read_csv(file, parse_options=options) for file in files])
    return _rows(table, str(files[0]), {}, [stamp(file) for file in files])


def _picture_rows(folder: Path, found: list[tuple[Path, str]]) -> Rows:
    """Rows of image files; thousands of stamps become one."""
    table = _module("pyarrow", "data").table({"image": [str(file) for file, _ in found], "label": [name for _, name in found]})
    stamps = json.dumps([stamp(file) for file, _ in found])
    return _rows(table, str(folder), {"image": {"_type": "Image"}}, hashlib.sha256(stamps.encode()).hexdigest())


def _rows(table: Any, where: str, features: Mapping[str, Any], stamps: Any) -> Rows:
    """The rows of a table in memory."""
    return Rows(where, table.schema, features, table.num_rows, lambda column: iter(table.column(column).chunks), stamps)


def _from_hub(source: str) -> dict[str, Rows]:
    """The parts of a Hugging Face data set."""
    advice = f"Put train.parquet and test.parquet into {str(_data_folder() / source)!r} or give a path."
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise DataError(
            f"there is no data set {source!r} in {str(_data_folder())!r}, no such path, and Hugging Face's `datasets`"
            f" is not installed. {advice}"
        ) from None
    name, _, config = source.partition(":")
    try:
        parts = datasets.load_dataset(name, config or None)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"Hugging Face gives no data set {source!r}: {str(error).rstrip('.')}. {advice}") from None
    names = {part: part if part in parts else f"{part}_matched" for part in PARTS}  # MNLI has two of each
    return {part: _hub_rows(f"{source} ({name})", parts[name]) for part, name in names.items() if name in parts}


def _hub_rows(where: str, part: Any) -> Rows:
    stamps = [where, part.num_rows, *(stamp(Path(file["filename"])) for file in part.cache_files)]
    return _rows(part.with_format("arrow")[:], where, _features(part.features.to_dict()), stamps)


def _features(described: Mapping[str, Any]) -> dict[str, Any]:
    return {name: feature for name, feature in described.items() if isinstance(feature, Mapping)}


def _plain(array: Any, where: str) -> Any:
    """A column's array without its dictionary; it must hold integers, words or truths."""
    types = _module("pyarrow", "data").types
    array = array.dictionary_decode() if types.is_dictionary(array.type) else array
    kinds = (types.is_integer, types.is_string, types.is_large_string, types.is_boolean)
    if not any(is_kind(array.type) for is_kind in kinds):
        raise DataError(f"{where} holds values of the type {array.type}, but classes and owners are whole numbers or words.")
    return array


def _module(name: str, extra: str) -> Any:
    """A library that only some sources need."""
    return library(name, DataError(f"this source needs {name.partition('.')[0]}: pip install 'raffm[{extra}]'."))


@contextmanager
def _readable(where: str) -> Iterator[None]:
    """Say which file it is that cannot be read."""
    try:
        yield
    except (OSError, _module("pyarrow", "data").ArrowException) as error:
        raise DataError(f"{where!r} cannot be read: {error}. Is it whole, and what its name says?") from None
