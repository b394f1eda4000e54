"""One file with every submodel in it: weights in the order of their salience, so that smaller ones are prefixes of larger ones.

A device picks its size when it loads, and reads no more than that. The folder is also a checkpoint of the full model as its
family writes it, which others can load without raffm:

    config.json, model.safetensors   the full model, permuted: its outputs are those it had
    nested.json                      the sizes that were tested, with what they score and cost; labels, preprocessing
    order.safetensors                of groups whose weights may not move (blocks, rotary pairs): what to keep first
    norms.safetensors                of every size the statistics of its batch norms, and its norms where they are its own
    transient.safetensors            buffers that no state dict holds
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raffm.algebra.move import extract
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.errors import BudgetError, CheckpointError
from raffm.models.checkpoint import disk_names, model_described, model_without_weights, save_model
from raffm.models.files import found, mapped_tensors, read_json, read_tensors, write_json, write_tensors, written_whole
from raffm.models.labelled import Labelled
from raffm.models.moments import batch_norms
from raffm.models.rows import is_norm
from raffm.models.surgery import assembled

FORMAT = 1


@dataclass(frozen=True)
class Piece:
    """A submodel that was tested: the sizes of its groups, what it costs, and its metrics on the test set.

    `score` is its main metric on validation examples, by which the best is chosen; None where it is not known.
    """

    name: str
    sizes: Mapping[str, int]
    params: int
    flops: int
    metrics: Mapping[str, float]
    score: float | None = None


@dataclass(frozen=True, eq=False)
class Nested:
    """A folder with every submodel in it."""

    folder: Path
    about: Mapping[str, Any]

    @property
    def pieces(self) -> list[Piece]:
        """The sizes that were tested, the largest first."""
        return [Piece(**each) for each in self.about["pieces"]]

    @property
    def labels(self) -> list[str]:
        """The names of the outputs, in their order."""
        return list(self.about["labels"])

    def piece(self, name: str) -> Piece:
        """A size by its name."""
        known = {piece.name: piece for piece in self.pieces}
        if name not in known:
            raise CheckpointError(f"{str(self.folder)!r} has no size {name!r}. There are: {', '.join(known)}.")
        return known[name]

    def best(self, max_params: int) -> Piece:
        """Of the sizes with at most so many parameters the one with the best score, or where none is known the largest."""
        fitting = [piece for piece in self.pieces if piece.params <= max_params]
        if not fitting:
            least = min(piece.params for piece in self.pieces)
            raise BudgetError(f"no size has at most {max_params:,} parameters; the smallest has {least:,}.")
        if any(piece.score is None for piece in fitting):
            return max(fitting, key=lambda piece: piece.params)
        return max(fitting, key=lambda piece: (piece.score, -piece.params))

    def submodel(self, name: str | None = None, *, max_params: int | None = None) -> nn.Module:
        """The submodel of a size, or the best with at most so many parameters, ready to run; by default the largest."""
        piece = self.best(max_params) if max_params is not None else self.piece(name or self.pieces[0].name)
        selection = self._order.cut(self._frame.layout, piece.sizes)
        parts = extract(self._tensors, self._frame.layout, selection)
        module = assembled(self._frame.model, self._frame.layout, selection, {key: part.clone() for key, part in parts.items()})
        self._fill_norms(module, piece.name)
        return module.eval()

    @torch.no_grad()
    def _fill_norms(self, module: nn.Module, name: str) -> None:
        for key, tensor in read_tensors(self.folder / "norms.safetensors").items():
            size, _, entry = key.rpartition("/")
            if size == name:
                attrgetter(entry)(module).copy_(tensor)

    @cached_property
    def _frame(self) -> Labelled:
        return Labelled.of(model_without_weights(dict(self.about["model"])))

    @cached_property
    def _order(self) -> Ranking:
        return Ranking(read_tensors(self.folder / "order.safetensors"))

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        """The full model's tensors, mapped: what is not taken is not read."""
        stored = mapped_tensors(self.folder / "model.safetensors")
        named = {name: stored[on_disk] for name, on_disk in disk_names(self._frame.model).items() if on_disk in stored}
        return {**named, **read_tensors(self.folder / "transient.safetensors")}


def load_nested(folder: str | Path) -> Nested:
    """Open a folder that `save_nested` wrote; nothing large is read yet."""
    place = found(folder)
    about = read_json(place / "nested.json")
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{str(place)!r} has format {about.get('format')!r}; this raffm reads format {FORMAT}.")
    opened = Nested(place, about)
    if about["layout"] != opened._frame.layout.fingerprint:
        raise CheckpointError(f"{str(place)!r} was written for another version of {about['model']['class']}.")
    return opened


def save_nested(
    server: Labelled,
    order: Ranking,
    pieces: Mapping[str, tuple[Piece, Mapping[str, Tensor]]],
    folder: str | Path,
    about: Mapping[str, Any],
    card: str,
) -> None:
    """Write a model whose weights lie in the order of their salience, but for the groups of `order`.

    `pieces` holds every size with the statistics of its batch norms; `about` and `card` say what else is to be known.
    """
    tensors, model = dict(server.tensors), server.model
    state = set(model.state_dict())
    with written_whole(folder) as fresh:
        save_model(model, fresh)
        write_tensors(fresh / "order.safetensors", dict(order.order))
        write_tensors(fresh / "transient.safetensors", {name: tensor for name, tensor in tensors.items() if name not in state})
        norms = {f"{name}/{key}": tensor for name, (_, stored) in pieces.items() for key, tensor in stored.items()}
        write_tensors(fresh / "norms.safetensors", norms)
        content = {
            "format": FORMAT,
            "model": model_described(model),
            "layout": server.layout.fingerprint,
            "params": server.layout.count(Selection()),
            **about,
            "pieces": [asdict(piece) for piece, _ in pieces.values()],
        }
        write_json(fresh / "nested.json", content)
        (fresh / "README.md").write_text(card, encoding="utf-8")


def norms_of(module: nn.Module, are_own: bool = False) -> dict[str, Tensor]:
    """The statistics of a module's batch norms, by name; where norms are a size's own, what they multiply by and add, too."""
    entries = ("running_mean", "running_var")
    found = {f"{path}.{entry}": getattr(norm, entry) for path, norm in batch_norms(module).items() for entry in entries}
    for path, norm in module.named_modules() if are_own else ():
        if is_norm(norm):
            found |= {f"{path}.{name}": tensor.detach() for name, tensor in norm.named_parameters(recurse=False)}
    return found
