"""Early exits: a classifier in parts, each with a head of its own, so that the model may end after any of them.

    stem -> part 0 -> part 1 -> ... -> part n - 1
              |         |                 |
            head 0    head 1      the model's own head

The parts share their tensors with the model that they were made from. They carry a table of their own, so that all that
works on labels works on them: dropping the last parts drops their blocks and their heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from raffm.algebra.axis import names
from raffm.algebra.blocks import is_place
from raffm.algebra.layout import Layout
from raffm.errors import SpaceError
from raffm.models.anatomy import Anatomy, EarlyHead, anatomy_of
from raffm.models.label import named_tensors
from raffm.models.labelled import Labelled
from raffm.models.table import Table

DEPTH = "exits"
"""The depth group whose indices are the parts."""


@dataclass
class ExitLogits:
    """What every exit says, a tensor (batch, exits, classes)."""

    exits: Tensor

    @property
    def logits(self) -> Tensor:
        """What the last one says."""
        return self.exits[:, -1]


class Part(nn.Module):
    """The blocks up to an exit, and its head."""

    def __init__(self, blocks: Sequence[nn.Module], head: nn.Module) -> None:
        """Put them together."""
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = head

    def forward(self, hidden: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        """What the next part goes on with, and what this exit says."""
        for block in self.blocks:
            hidden = block(hidden, *given)
        return hidden, self.head(hidden)


@dataclass(frozen=True)
class Recipe:
    """What it takes, besides its config, to build a model with exits: its class, the blocks before every early exit."""

    kind: str
    after: tuple[int, ...]
    convolutions: int


class Exits(nn.Module):
    """A classifier with early exits."""

    def __init__(self, config: Any, stem: nn.Module, parts: Sequence[Part], recipe: Recipe) -> None:
        """Put them together."""
        super().__init__()
        self.config = config
        self.recipe = recipe
        self.stem = stem
        self.exits = nn.ModuleList(parts)
        self.raffm_table: Table | None = None

    @property
    def blocks(self) -> int:
        """How many blocks all parts have."""
        return sum(len(part.blocks) for part in self.exits)  # type: ignore[arg-type, misc]

    def forward(self, *values: Tensor, **inputs: Tensor) -> ExitLogits:
        """What every exit says to the inputs of the model that this was made from."""
        hidden, given = self.stem(*values, **inputs)
        said = []
        for part in self.exits:
            hidden, logits = part(hidden, *given)
            said.append(logits)
        return ExitLogits(torch.stack(said, 1))


def with_exits(server: Labelled, after: Sequence[int], convolutions: int = 3, seed: int = 0) -> Labelled:
    """A model with an exit after so many blocks, for every number in `after`, and its own head at the end.

    An early head looks like the model's own; that of a ResNet has `convolutions` more before it. Copies begin with the
    weights of the model's own head; what has no like there begins with random ones, which follow from the seed.
    """
    anatomy = anatomy_of(server)
    recipe = Recipe(type(server.model).__name__, _checked(after, len(anatomy.blocks)), convolutions)
    heads = [anatomy.early(exit, place, convolutions, seed) for exit, place in enumerate(recipe.after)]
    model = Exits(server.model.config, anatomy.stem, _parts(anatomy, recipe, heads), recipe)
    model.raffm_table = _table(server, model, heads)
    return Labelled.of(model.train(server.model.training))


def as_json(recipe: Recipe) -> dict[str, Any]:
    """A recipe in plain values."""
    return {**asdict(recipe), "after": list(recipe.after)}


def evenly(blocks: int, exits: int) -> tuple[int, ...]:
    """The blocks before each of so many evenly spaced exits, but for the last; fewer exits where there are few blocks."""
    places = {-(-blocks * place // exits) for place in range(1, exits)}
    return tuple(sorted(place for place in places if place < blocks))


def _checked(after: Sequence[int], blocks: int) -> tuple[int, ...]:
    places = tuple(after)
    if any(not 0 < place < blocks for place in places) or any(one >= other for one, other in pairwise(places)):
        raise SpaceError(
            f"early exits stand after 1 to {blocks - 1} of the model's {blocks} blocks, in ascending order, not after {places}."
        )
    return places


def _parts(anatomy: Anatomy, recipe: Recipe, heads: Sequence[EarlyHead]) -> list[Part]:
    stretches = [anatomy.blocks[begin:end] for begin, end in pairwise((0, *recipe.after, len(anatomy.blocks)))]
    modules = [*(head.module for head in heads), anatomy.head]
    return [Part(blocks, module) for blocks, module in zip(stretches, modules, strict=True)]


# -- what its tensors mean -------------------------------------------------------------------------------------------


def _table(server: Labelled, model: Exits, heads: Sequence[EarlyHead]) -> Table:
    """A table without wildcards: the lines of the model that it was made from, and those of the early heads."""
    layout = server.layout
    known = {id(tensor): str(layout.labels[name]) for name, tensor in server.tensors.items()}
    named = [(f"{DEPTH}.{exit}.head", head) for exit, head in enumerate(heads)]
    fresh = {f"{path}.{name}": str(label) for path, head in named for name, label in head.labels.items()}
    tensors = {name: known.get(id(tensor)) or fresh[name] for name, tensor in named_tensors(model)[0].items()}
    stored = {f"{path}.{name}": text for path, head in named for name, text in head.attributes.items()}
    return Table(
        family=server.table.family,
        title=f"{server.table.title} with early exits",
        tensors={name: label.partition(" when ")[0] for name, label in tensors.items()},
        depth={DEPTH: {"path": DEPTH, "ordered": True}},
        groups=_groups(layout),
        ties={str(tie.left): str(tie.right) for tie in layout.ties},
        attributes={**_attributes(server, model), **stored},
        inputs=server.table.inputs,
        outputs={DEPTH: {"axis": 1, "label": DEPTH}},
        space=server.table.space,
    )


def _groups(layout: Layout) -> dict[str, dict[str, Any]]:
    """The groups as the layout has them, but for its blocks; sizes of those alone that never change."""
    found: dict[str, dict[str, Any]] = {}
    for name, group in layout.groups.items():
        if name not in layout.depths:
            about = {"pinned": group.pinned, "step": group.step, "least": group.least, "approximate": group.approximate}
            about |= {"per": group.base} if group.base else {}
            found[name] = about | ({"size": group.size} if group.pinned else {})
    return found


def _attributes(server: Labelled, model: Exits) -> dict[str, str]:
    """The integers that modules store, but for those that speak of blocks: the first ones keep their places."""
    old = dict(server.model.named_modules())
    new = {id(module): name for name, module in model.named_modules()}
    found = {}
    for name, expression in (server.layout.attributes or {}).items():
        owner, _, attribute = name.rpartition(".")
        speaks_of_blocks = any(is_place(group) or group in server.layout.depths for group in names(expression))
        if owner in old and id(old[owner]) in new and not speaks_of_blocks:
            found[f"{new[id(old[owner])]}.{attribute}"] = str(expression)
    return found
