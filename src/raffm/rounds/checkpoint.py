"""A run on disk, written whole or not at all: the server's tensors, its optimizer's memory, and what was found so far."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raffm.algebra.layout import TRAVELLING
from raffm.errors import CheckpointError
from raffm.models.files import found, read_json, read_tensors, write_json, write_tensors, written_whole
from raffm.models.labelled import Labelled
from raffm.rounds.results import Results, from_json

FORMAT = 1

FREE = ("rounds", "backend", "save")
"""Settings that may change where a run is resumed: how long it lasts, where it runs, how often it is saved."""


@dataclass(frozen=True, eq=False)
class Saved:
    """What a checkpoint holds.

    `round` is the next one to run; `frozen` tells the weights that are not trained from others; `average` is the server's
    average, where it keeps one.
    """

    round: int
    results: Results
    server: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    frozen: str = ""
    average: Mapping[str, Tensor] = field(default_factory=dict)


def save(folder: Path, saved: Saved, identity: str) -> None:
    """Write a checkpoint; if that fails, the one before survives."""
    try:
        with written_whole(folder) as fresh:
            write_tensors(fresh / "server.safetensors", saved.server)
            write_tensors(fresh / "optimizer.safetensors", saved.optimizer)
            write_tensors(fresh / "average.safetensors", saved.average)
            write_json(fresh / "results.json", saved.results.to_json())
            about = {"format": FORMAT, "identity": identity, "round": saved.round, "frozen": saved.frozen}
            write_json(fresh / "run.json", about)
    except Exception as error:  # a full disk shows as OSError or as an error of safetensors' own
        if isinstance(error, OSError) or "SafetensorError" in type(error).__name__:
            raise CheckpointError(
                f"the checkpoint {str(folder)!r} could not be written: {error}. The one before it is unharmed; make room and "
                "resume."
            ) from None
        raise


def load(folder: Path, identity: str | None, settings: Mapping[str, Any] | None = None) -> Saved:
    """Read a checkpoint; one of another run, or a damaged one, is refused. Without an identity any run will do.

    `settings` are those of the run that asks, to say where they differ.
    """
    folder = found(folder)
    about = read_json(folder / "run.json")
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{str(folder)!r} has format {about.get('format')!r}; this version of raffm reads {FORMAT}.")
    if identity is not None and about.get("identity") != identity:
        raise CheckpointError(
            f"{str(folder)!r} belongs to another run: its settings, model or data differ from these"
            f"{_differences(folder, settings or {})}. Resume with what it was started with, or choose another folder."
        )
    try:
        results = from_json(read_json(folder / "results.json"))
        next_round = int(about["round"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{str(folder)!r} is damaged: {error!r}. Restore it from a copy.") from None
    server, optimizer = (read_tensors(folder / f"{name}.safetensors") for name in ("server", "optimizer"))
    average = read_tensors(folder / "average.safetensors") if (folder / "average.safetensors").is_file() else {}
    return Saved(next_round, results, server, optimizer, str(about.get("frozen", "")), average)


def _differences(folder: Path, settings: Mapping[str, Any]) -> str:
    """The first settings that a saved run has otherwise."""
    there, here = (dict(_flat(run)) for run in (read_json(folder / "results.json").get("run", {}), settings))
    odd = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key) and key.split(".")[0] not in FREE]
    told = [f"{key} is {there.get(key)!r} there and {here.get(key)!r} here" for key in odd[:3]]
    return f" ({'; '.join([*told, *(['...'] if len(odd) > 3 else [])])})" if told else ""


def _flat(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting with the sections that it stands in: `local.lr`."""
    for key, entry in content.items():
        if isinstance(entry, Mapping):
            yield from _flat(entry, f"{above}{key}.")
        else:
            yield f"{above}{key}", list(entry) if isinstance(entry, tuple) else entry


@torch.no_grad()
def restore(saved: Saved, server: Labelled, folder: Path) -> None:
    """Put a checkpoint's weights into the server's tensors; ones that do not fit are refused, and nothing changes.

    Weights that are not trained are not in it: the server must have the same ones.
    """
    if saved.frozen != frozen_digest(server):
        raise CheckpointError(
            f"{str(folder)!r} was trained on other frozen weights than the model has now. Give the pretrained model that the "
            "run was started with."
        )
    tensors = {name: server.tensors[name] for name in server.layout.tensors(*TRAVELLING)}
    for name in {**tensors, **saved.server}:
        mine, theirs = tensors.get(name), saved.server.get(name)
        if mine is None or theirs is None or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            raise CheckpointError(f"{str(folder)!r} holds another model: `{name}` does not fit.")
    for name, tensor in tensors.items():
        tensor.copy_(saved.server[name])


def exists(folder: Path) -> bool:
    """Whether there is a checkpoint to resume from."""
    try:
        return (found(folder) / "run.json").is_file()
    except CheckpointError:
        return False


def sweep(folder: Path) -> None:
    """Remove what a killed save left beside a checkpoint."""
    for left in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(left, ignore_errors=True)


def frozen_digest(server: Labelled) -> str:
    """What tells the server's frozen weights from others; nothing where all are trained."""
    frozen = {name: server.tensors[name] for name in server.layout.tensors("frozen")}
    return digest(frozen) if frozen else ""


def digest(tensors: Mapping[str, Tensor], *about: Any) -> str:
    """A fingerprint of tensors and of what else makes a run what it is."""
    content = hashlib.sha256()
    for name, tensor in tensors.items():
        content.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        content.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    for entry in about:
        content.update(str(entry).encode())
    return content.hexdigest()
