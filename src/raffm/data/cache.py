"""What was decoded, tokenised or divided once, kept in files under `$RAFFM_CACHE` or `~/.cache/raffm`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from raffm.data.examples import Dataset, Integers, Parts, Split
from raffm.data.splits import split
from raffm.errors import CheckpointError
from raffm.models.files import read_json, read_tensors, write_json, write_tensors, written_whole

VERSION = 1  # of what is stored: a new number makes every entry anew


def cached(kind: str, key: Mapping[str, Any], make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors that belong to the key: from the cache, or made now and stored.

    The key must hold everything that the tensors depend on, as plain JSON. A damaged entry is made anew; where the
    cache cannot be written, nothing is stored.
    """
    key, folder = _place(kind, key)
    tensors = _stored(folder, key)
    if tensors is None:
        tensors = make()
        _store(folder, key, tensors)
    return tensors


def is_cached(kind: str, key: Mapping[str, Any]) -> bool:
    """Whether there is an entry for a key."""
    key, folder = _place(kind, key)
    return (folder / "key.json").is_file()


def prune(kind: str, most: int) -> None:
    """Keep the entries of a kind that were used last, so many, and remove the others."""
    try:
        entries = sorted((_root() / kind).iterdir(), key=lambda entry: -entry.stat().st_mtime_ns)
    except OSError:
        return
    for entry in entries[most:]:
        shutil.rmtree(entry, ignore_errors=True)


def _place(kind: str, key: Mapping[str, Any]) -> tuple[dict[str, Any], Path]:
    """A key as it is stored, and the folder of its entry."""
    plain = json.loads(json.dumps({**key, "version": VERSION}))
    return plain, _root() / kind / hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def split_cached(dataset: Dataset, clients: int | None, how: str, seed: int, **parameters: Any) -> Split:
    """What `split` gives, from the cache where this data set was divided in the same way before."""
    key = {"labels": _digest(dataset), "clients": clients, "how": how, "seed": seed, "parameters": parameters}
    tensors = cached("splits", key, lambda: _packed(split(dataset, clients, how, seed, **parameters)))
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return Split(*(Parts(arrays[f"{part}.indices"], arrays[f"{part}.offsets"]) for part in ("train", "test")))


def stamp(path: Path) -> dict[str, Any]:
    """What tells one version of a file from another, for a key."""
    status = path.stat()
    return {"path": str(path.resolve()), "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _root() -> Path:
    return Path(os.environ.get("RAFFM_CACHE") or Path.home() / ".cache" / "raffm")


def _stored(folder: Path, key: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """An entry, or None where there is none that is whole and has this key."""
    try:
        if read_json(folder / "key.json") != key:
            return None
        tensors = read_tensors(folder / "tensors.safetensors")
    except (CheckpointError, OSError):
        return None
    with suppress(OSError):
        os.utime(folder)  # what is in use is not the oldest
    return tensors


def _store(folder: Path, key: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write an entry whole, or not at all where the disk does not allow it."""
    try:
        with written_whole(folder) as fresh:
            write_json(fresh / "key.json", key)
            write_tensors(fresh / "tensors.safetensors", tensors)
    except (OSError, SafetensorError):
        pass


def _packed(made: Split) -> dict[str, Tensor]:
    parts = {"train": made.train, "test": made.test}
    arrays = {f"{name}.{field}": getattr(part, field) for name, part in parts.items() for field in ("indices", "offsets")}
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def _digest(dataset: Dataset) -> str:
    """A digest of everything in a data set that a split depends on."""
    labels: list[Integers] = [examples.labels.cpu().numpy() for examples in (dataset.train, dataset.test)]
    digest = hashlib.sha256()
    for array in (*labels, *(dataset.owners or ())):
        digest.update(f"{len(array)}:".encode() + np.ascontiguousarray(array, np.int64).tobytes())
    return digest.hexdigest()
