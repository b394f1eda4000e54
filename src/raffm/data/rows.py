"""Tables of data, not read yet: parquet and csv files, folders of images, and data sets of Hugging Face."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raffm.data import glue, images
from raffm.data.cache import stamp
from raffm.errors import DataError
from raffm.libraries import library

Values = NDArray[Any]

PARTS = ("train", "validation", "test")
HUB = {"squad": "rajpurkar/squad_v2", "ag_news": "fancyzhx/ag_news"}  # what Hugging Face calls well-known sets
CHUNK = 1000  # rows that are decoded or tokenised at once


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


def opened(source: str) -> dict[str, Rows]:
    """The parts of a source, from the first place that has it; each has rows, and there is one to train on."""
    if source in glue.METRICS:
        source = glue.source_of(source, data_folder())
    places = [data_folder() / source, Path(source)]
    parts = next((found for place in places if (found := _found(place))), None) or _from_hub(source)
    if "train" not in parts:
        raise DataError(f"the source {source!r} has no part named 'train', only: {', '.join(parts)}.")
    for rows in parts.values():
        if not rows.count:
            raise DataError(f"{rows.where} is empty: it must have at least one row.")
    return parts


def data_folder() -> Path:
    """Where data sets are looked for by name."""
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
    parquet = needed("pyarrow.parquet", "data")
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
    pyarrow, csv = needed("pyarrow", "data"), needed("pyarrow.csv", "data")
    options = csv.ParseOptions(newlines_in_values=True)
    with _readable(str(files[0])):
        table = pyarrow.concat_tables([csv.read_csv(file, parse_options=options) for file in files])
    return _rows(table, str(files[0]), {}, [stamp(file) for file in files])


def _picture_rows(folder: Path, found: list[tuple[Path, str]]) -> Rows:
    """Rows of image files; thousands of stamps become one."""
    table = needed("pyarrow", "data").table({"image": [str(file) for file, _ in found], "label": [name for _, name in found]})
    stamps = json.dumps([stamp(file) for file, _ in found])
    return _rows(table, str(folder), {"image": {"_type": "Image"}}, hashlib.sha256(stamps.encode()).hexdigest())


def _rows(table: Any, where: str, features: Mapping[str, Any], stamps: Any) -> Rows:
    """The rows of a table in memory."""
    return Rows(where, table.schema, features, table.num_rows, lambda column: iter(table.column(column).chunks), stamps)


def _from_hub(source: str) -> dict[str, Rows]:
    """The parts of a Hugging Face data set."""
    is_path = source.startswith((".", "/", "~")) or Path(source).suffix in (".parquet", ".csv")
    if is_path and not Path(source.partition(":")[0]).exists():  # `datasets` may read a folder that we cannot
        raise DataError(f"there is no file or folder {source!r}.")
    advice = f"Put train.parquet and test.parquet into {str(data_folder() / source)!r} or give a path."
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise DataError(
            f"there is no data set {source!r} in {str(data_folder())!r}, no such path, and Hugging Face's `datasets`"
            f" is not installed. {advice}"
        ) from None
    name, _, config = HUB.get(source, source).partition(":")
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
    types = needed("pyarrow", "data").types
    array = array.dictionary_decode() if types.is_dictionary(array.type) else array
    kinds = (types.is_integer, types.is_string, types.is_large_string, types.is_boolean)
    if not any(is_kind(array.type) for is_kind in kinds):
        raise DataError(f"{where} holds values of the type {array.type}, but classes and owners are whole numbers or words.")
    return array


def needed(name: str, extra: str) -> Any:
    """A library that only some sources need."""
    return library(name, DataError(f"this source needs {name.partition('.')[0]}: pip install 'raffm[{extra}]'."))


@contextmanager
def _readable(where: str) -> Iterator[None]:
    """Say which file it is that cannot be read."""
    try:
        yield
    except (OSError, needed("pyarrow", "data").ArrowException) as error:
        raise DataError(f"{where!r} cannot be read: {error}. Is it whole, and what its name says?") from None
