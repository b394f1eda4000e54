"""Folders that are written whole or not at all, and tensors that are read without running code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch import Tensor

from raffm.errors import CheckpointError


@contextmanager
def written_whole(folder: str | Path) -> Iterator[Path]:
    """A new folder that takes the place of `folder` once everything in it is written; other files there stay.

    A program that is killed on the way leaves the old folder, here or as `folder.previous`.
    """
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    fresh.chmod(0o755)
    try:
        yield fresh
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    previous = _previous(folder)
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)
    fresh.rename(folder)
    if previous.exists():
        for entry in previous.iterdir():
            if not (folder / entry.name).exists():
                entry.rename(folder / entry.name)
        shutil.rmtree(previous)


def found(folder: str | Path) -> Path:
    """The folder to read: itself, or what an interrupted save left of it."""
    folder = Path(folder).absolute()
    if folder.is_dir():
        return folder
    if _previous(folder).is_dir():
        return _previous(folder)
    raise CheckpointError(f"there is no folder {str(folder)!r}.")


def _previous(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.previous")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Plain JSON, readable by people."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file that must be there."""
    if not path.is_file():
        raise CheckpointError(f"{str(path.parent)!r} has no {path.name}. Was it written by raffm?")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{str(path)!r} is damaged: {error}. Restore it from a copy.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{str(path)!r} holds no JSON object.")
    return content


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file."""
    from safetensors.torch import save_file

    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def mapped_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file that must be there, mapped into memory: what is not touched is not read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise CheckpointError(f"{str(path.parent)!r} has no {path.name}.")
    try:
        tensors: dict[str, Tensor] = load_file(path)
        return tensors
    except SafetensorError as error:
        raise CheckpointError(f"{str(path)!r} is damaged or cut short: {error}. Restore it from a copy.") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The same in memory of their own.

    A view into the file need not be aligned as fresh memory is, and kernels round differently where it is not.
    """
    return {name: tensor.clone() for name, tensor in mapped_tensors(path).items()}
