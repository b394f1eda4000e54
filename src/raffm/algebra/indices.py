"""Indices as people give them, checked: a size, a list, or a table with a row for every head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raffm.algebra.check import some
from raffm.algebra.group import Group
from raffm.algebra.selection import Indices
from raffm.errors import SelectionError


def read_indices(groups: Mapping[str, Group], name: str, given: Tensor | Indices, chosen: Mapping[str, Tensor]) -> Tensor:
    """The indices to keep of a group; `chosen` holds those of the groups before it, bases before what is fibred over them."""
    group = groups.get(name)
    if group is None:
        raise SelectionError(f"there is no group {name!r}. The groups are: {some(groups)}.")
    if group.pinned:
        raise SelectionError(f"group `{name}` is pinned and cannot be cut.")
    rows = None
    if group.base is not None:
        rows = len(chosen[group.base]) if group.base in chosen else groups[group.base].size
    if isinstance(given, int) and not isinstance(given, bool):
        given = _first(name, given, rows)
    indices = _as_tensor(name, given)
    if rows is None and indices.dim() != 1:
        raise SelectionError(f"group `{name}` takes one list of indices, but was given a table of them.")
    if rows is not None and (indices.dim() != 2 or len(indices) != rows):
        raise SelectionError(
            f"group `{name}` keeps its own indices in every kept index of `{group.base}`: {rows} rows were expected, "
            f"but the given indices have shape {tuple(indices.shape)}."
        )
    _refuse(group, indices)
    return indices


def _first(name: str, count: int, rows: int | None) -> Tensor:
    if count < 1:
        raise SelectionError(f"group `{name}` cannot keep {count} indices. Keep at least one.")
    return torch.arange(count) if rows is None else torch.arange(count).expand(rows, -1).clone()


def _as_tensor(name: str, given: object) -> Tensor:
    """Given indices as an integer tensor on the CPU: a list, or a table with a row for every head."""
    if isinstance(given, list | tuple) and given and all(isinstance(row, list | tuple) for row in given):
        counts = [len(row) for row in given]
        if len(set(counts)) > 1:
            odd = next(place for place, count in enumerate(counts) if count != counts[0])
            raise SelectionError(
                f"group `{name}` keeps {counts[0]} indices in head 0 but {counts[odd]} in head {odd}; a fibred group keeps the "
                "same number in every head. Cut each head to the same size, or drop whole heads."
            )
    try:
        indices = torch.as_tensor(given)
    except (ValueError, TypeError, RuntimeError):
        raise SelectionError(f"group `{name}` takes a size or a list of integers, but was given {given!r}.") from None
    if indices.numel() == 0:
        raise SelectionError(f"group `{name}` would keep nothing. Keep at least one index.")
    if indices.is_floating_point() or indices.dtype == torch.bool or indices.dim() == 0:
        raise SelectionError(f"group `{name}` takes a size or a list of integers, but was given {given!r}.")
    return indices.to("cpu", torch.int64)


def _refuse(group: Group, indices: Tensor) -> None:
    """Refuse indices that a group does not have, twice, too few of them, or without a required block."""
    count = indices.shape[-1]
    if count < max(group.least, 1):
        raise SelectionError(f"group `{group.name}` would keep {count} of {group.size}; it must keep at least {group.least}.")
    if int(indices.min()) < 0 or int(indices.max()) >= group.size:
        found = int(indices.max()) if int(indices.max()) >= group.size else int(indices.min())
        raise SelectionError(
            f"index {found} is out of range for group `{group.name}`, which has indices 0 to {group.size - 1}."
        )
    ordered = indices.sort(dim=-1).values
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise SelectionError(f"group `{group.name}` was given an index twice. Every index may be kept once.")
    if count % group.step and count != group.size:
        raise SelectionError(f"group `{group.name}` is cut in steps of {group.step}, so {count} is no possible size.")
    missing = set(group.required) - set(indices.flatten().tolist())
    if missing:
        raise SelectionError(
            f"block {min(missing)} of `{group.name}` cannot be dropped: later blocks need its shortcut or its tables. Keep it."
        )
    if group.ordered and int(ordered[-1]) != count - 1:
        raise SelectionError(f"of `{group.name}` the first blocks are kept: {count} were asked for, but not 0 to {count - 1}.")
