"""Norms of every size's own: weights and biases of a norm become tables with a row a size; a module reads the first.

The rows are an ordinary group, `sizes`: a submodel holds those of some sizes. Everything that moves, counts, saves or sends
tensors follows from the labels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from raffm.models.label import base_prefix
from raffm.models.labelled import Labelled

SIZES = "sizes"
"""The group of the rows."""

AFFINE = ("weight", "bias")


def with_rows(server: Labelled, count: int) -> Labelled:
    """A model whose norms have so many rows, each beginning with the norm's own numbers; all else is the given model's."""
    shared = {id(tensor): tensor for tensor in (*server.model.parameters(), *server.model.buffers())}
    model = copy.deepcopy(server.model, shared)
    prefix, lines = base_prefix(model), dict[str, str]()
    for path, norm in model.named_modules():
        if is_norm(norm):
            for name in _stack(norm, count):
                label = str(server.layout.labels[f"{path}.{name}"]).partition(" when ")[0]
                lines[f"{path.removeprefix(prefix)}.{name}_rows"] = f"{SIZES}, {label}"
    model.raffm_table = replace(server.table, tensors={**lines, **server.table.tensors})  # type: ignore[assignment]
    return Labelled.of(model)


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
        norm.register_parameter(f"{name}_rows", nn.Parameter(own.detach().expand(count, -1).clone(), own.requires_grad))
    norm.__class__ = _with_rows(type(norm), tuple(names))  # type: ignore[arg-type]
    return names


@cache
def _with_rows(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The norm's own class, for which the first row is its weight."""
    read = {name: property(_first_row(f"{name}_rows")) for name in names}
    return type(kind.__name__, (kind,), {**read, "plain_kind": kind})


def _first_row(table: str) -> Callable[[nn.Module], Tensor]:
    return lambda norm: getattr(norm, table)[0]


@torch.no_grad()
def plain(module: nn.Module) -> nn.Module:
    """The same module with plain norms, which have what the first rows have; changed in place."""
    for norm in module.modules():
        kind = getattr(type(norm), "plain_kind", None)
        if kind is not None:
            rows = {name: getattr(norm, f"{name}_rows") for name in AFFINE if hasattr(norm, f"{name}_rows")}
            norm.__class__ = kind
            for name, table in rows.items():
                delattr(norm, f"{name}_rows")
                norm.register_parameter(name, nn.Parameter(table[0].detach().clone(), table.requires_grad))
    if hasattr(module, "raffm_table"):
        del module.raffm_table
    return module
