"""Norms of every size's own: weights and biases of a norm become tables with a row a size; a module reads the first.

The rows are an ordinary group, `sizes`: a submodel holds those of some sizes. Everything that moves, counts, saves or sends
tensors follows from the labels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from raffm.algebra.layout import Layout
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.errors import SpaceError
from raffm.models.label import base_prefix
from raffm.models.labelled import Labelled
from raffm.models.surgery import Record, skeleton

SIZES = "sizes"
"""The group of the rows."""

AFFINE = ("weight", "bias")

ROWS = "_rows"
"""What the names of tables end with."""


def with_rows(server: Labelled, count: int) -> Labelled:
    """A model whose norms have so many rows, each beginning with the norm's own numbers; all else is the given model's."""
    if SIZES in server.layout.groups:
        raise _inseparable(server, "they have rows already. Give the model that those were made from")
    kept = (*server.model.parameters(), *server.model.buffers(), getattr(server.model, "config", None))
    model = copy.deepcopy(server.model, {id(each): each for each in kept})
    prefix, lines = base_prefix(model), dict[str, str]()
    for path, norm in model.named_modules():
        if is_norm(norm):
            for name in _stack(norm, count):
                if f"{path}.{name}" not in server.layout.labels:
                    raise _inseparable(server, f"`{path}.{name}` has another name, too")
                label = str(server.layout.labels[f"{path}.{name}"]).partition(" when ")[0]
                lines[f"{path.removeprefix(prefix)}.{name}{ROWS}"] = f"{SIZES}, {label}"
    if not lines:
        raise _inseparable(server, "there are none")
    groups = {**server.table.groups, SIZES: {"apart": True}}
    model.raffm_table_before = getattr(server.model, "raffm_table", None)  # type: ignore[assignment]
    model.raffm_table = replace(server.table, tensors={**lines, **server.table.tensors}, groups=groups)  # type: ignore[assignment]
    return Labelled.of(model)


def _inseparable(server: Labelled, reason: str) -> SpaceError:
    kind = type(server.model).__name__
    return SpaceError(f"the norms of {kind} cannot be kept apart by size: {reason}. Share them instead: own_norms = false.")


def rows_of(layout: Layout) -> int:
    """How many rows a model's norms have; 0 where they are plain."""
    return layout.sizes.get(SIZES, 0)


def with_some(layout: Layout, sizes: dict[str, int], rows: Sequence[int]) -> Selection:
    """The first indices of every group, and some rows of the norms, where these have rows."""
    if SIZES not in layout.groups:
        return Ranking().cut(layout, sizes)
    rest = [row for row in range(layout.groups[SIZES].size) if row not in rows]
    return Ranking({SIZES: torch.tensor([*rows, *rest])}).cut(layout, {**sizes, SIZES: len(rows)})


def whole(layout: Layout) -> Selection:
    """The full model with the norms of the largest size alone."""
    return with_some(layout, {}, [0])


_BARE: WeakKeyDictionary[Labelled, Labelled] = WeakKeyDictionary()


def bare(server: Labelled) -> Labelled:
    """The model as it was before its norms had rows, without weights; the given one where they have none."""
    if SIZES not in server.layout.groups:
        return server
    if server not in _BARE:
        lines = {name: line for name, line in server.table.tensors.items() if not line.startswith(f"{SIZES},")}
        model = plain(skeleton(server.model, server.layout, whole(server.layout)))
        groups = {name: about for name, about in server.table.groups.items() if name != SIZES}
        _BARE[server] = Labelled.of(model, replace(server.table, tensors=lines, groups=groups))
    return _BARE[server]


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises and then scales: its name says so, and it has a weight of one axis and no children."""
    weight = getattr(module, "weight", None)
    is_scale = isinstance(weight, nn.Parameter) and weight.dim() == 1 and not list(module.children())
    return is_scale and "norm" in type(module).__name__.lower()


@torch.no_grad()
def _stack(norm: nn.Module, count: int) -> list[str]:
    """Put tables in the place of a norm's parameters; give their names."""
    names = [name for name in AFFINE if isinstance(getattr(norm, name, None), nn.Parameter)]
    for name in names:
        own: nn.Parameter = getattr(norm, name)
        delattr(norm, name)
        norm.register_parameter(f"{name}{ROWS}", nn.Parameter(own.detach().expand(count, -1).clone(), own.requires_grad))
    norm.__class__ = _with_rows(type(norm), tuple(names))  # type: ignore[arg-type]
    return names


@cache
def _with_rows(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The norm's own class, for which the first row is its weight."""
    read = {name: property(_first_row(f"{name}{ROWS}")) for name in names}
    return type(kind.__name__, (kind,), {**read, "plain_kind": kind})


def _first_row(table: str) -> Callable[[nn.Module], Tensor]:
    return lambda norm: getattr(norm, table)[0]


@torch.no_grad()
def plain(module: nn.Module) -> nn.Module:
    """The same module with plain norms, which have what the first rows have; changed in place."""
    for norm in module.modules():
        kind = getattr(type(norm), "plain_kind", None)
        if kind is not None:
            tables = {name: getattr(norm, f"{name}{ROWS}") for name in AFFINE if hasattr(norm, f"{name}{ROWS}")}
            norm.__class__ = kind
            for name, table in tables.items():
                delattr(norm, f"{name}{ROWS}")
                norm.register_parameter(name, nn.Parameter(table[0].detach().clone(), table.requires_grad))
    if hasattr(module, "raffm_table_before"):
        module.raffm_table = module.raffm_table_before
        del module.raffm_table_before
    return module


def plain_submodel(server: Labelled, module: nn.Module) -> nn.Module:
    """A submodel of a model with rows as one of the model without them; changed in place."""
    record = module.raffm
    if SIZES not in server.layout.groups or not isinstance(record, Record):
        return module
    kept = {name: indices for name, indices in record.selection.kept.items() if name != SIZES}
    module.raffm = replace(record, fingerprint=bare(server).layout.fingerprint, selection=Selection(kept))
    return plain(module)


def with_plain_norms(server: Labelled) -> Labelled:
    """A model with rows as one without them, which has the norms of the largest size; any other as it is."""
    if SIZES not in server.layout.groups:
        return server
    return Labelled.of(plain(copy.deepcopy(server.model)), bare(server).table)


@torch.no_grad()
def give_back(server: Labelled, given: Labelled) -> None:
    """Put the first rows into the norms of the model that rows were made from; it shares all else."""
    for name, tensor in server.tensors.items():
        own = name.removesuffix(ROWS)
        if own != name and own in given.tensors:
            given.tensors[own].copy_(tensor[0])
