"""What `Layout` checks: labels against shapes when it is built, indices when a submodel is selected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from raffm.algebra.axis import Expression, Label, Name, Number, Product, Sum, names, value
from raffm.algebra.group import Group
from raffm.errors import LabelError, SelectionError


def some(names: Iterable[str], most: int = 12) -> str:
    """The first few names, for a message."""
    listed = [f"`{name}`" for name in names]
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def as_indices(name: str, given: Tensor | Sequence[object]) -> Tensor:
    """Given indices as an integer tensor on the CPU."""
    try:
        indices = torch.as_tensor(given)
    except (ValueError, TypeError):
        counts = [len(row) if isinstance(row, Sequence) else row for row in given]
        raise SelectionError(
            f"group `{name}` keeps {counts[0]} indices in head 0 but not in every other ({counts}); a fibred group keeps "
            "the same number in every head. Cut each head to the same size, or drop whole heads."
        ) from None
    if indices.is_floating_point() or indices.dtype == torch.bool:
        raise SelectionError(f"group `{name}` takes integer indices, but was given {indices.dtype}.")
    return indices.to("cpu", torch.int64)


def refuse_indices(group: Group, indices: Tensor) -> None:
    """Refuse indices that a group does not have, twice, too few of them, or without a required block."""
    count = indices.shape[-1]
    if count < group.least:
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


def refuse_unlabelled(labels: Mapping[str, Label], shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse tensors without a label, and labels without a tensor."""
    unlabelled = [name for name in shapes if name not in labels]
    if unlabelled:
        raise LabelError(
            f"{len(unlabelled)} tensors have no label: {some(unlabelled, 6)}. Add them to the table; `raffm label` drafts one."
        )
    unknown = [name for name in labels if name not in shapes]
    if unknown:
        raise LabelError(f"the labels name tensors that the model does not have: {some(unknown, 6)}.")


def refuse_rank(name: str, label: Label, shape: Sequence[int]) -> None:
    """Refuse a label with more or fewer axes than its tensor."""
    if len(label.axes) != len(shape):
        raise LabelError(f"`{name}` has shape {tuple(shape)}, but its label `{label}` has {len(label.axes)} axes.")


def solve(equations: list[tuple[str, Expression, int]], sizes: dict[str, int]) -> None:
    """Find the sizes that are not known yet: first where a group stands alone, then where it is the only unknown."""
    for _, expression, found in equations:
        if isinstance(expression, Name):
            sizes.setdefault(expression.group, found)
    is_changed = True
    while is_changed:
        is_changed = False
        for _, expression, found in equations:
            unknown = [name for name in names(expression) if name not in sizes]
            if len(unknown) == 1:
                offset = value(expression, {**sizes, unknown[0]: 0})
                slope = value(expression, {**sizes, unknown[0]: 1}) - offset
                sizes[unknown[0]] = (found - offset) // slope if slope else 0
                is_changed = True


def refuse_misfit(where: str, expression: Expression, found: int, sizes: Mapping[str, int]) -> None:
    """Refuse an expression that does not give the length that was found."""
    unknown = [name for name in names(expression) if name not in sizes]
    if unknown:
        raise LabelError(
            f"the size of `{unknown[0]}` in {where} cannot be told from the model. Name an attribute that holds it."
        )
    expected = value(expression, sizes)
    if expected == found:
        return
    known = ", ".join(f"{name}={sizes[name]}" for name in names(expression))
    hint = ""
    if isinstance(expression, Name | Product) and expected and found % expected == 0:
        fused = Sum((expression,) * (found // expected))
        hint = f" The projection looks fused: did you mean `{fused}`?"
    raise LabelError(f"{where} has length {found}, but its label `{expression}` gives {expected} ({known}).{hint}")


def guard_of(name: str, labels: Mapping[str, Label]) -> tuple[str, int] | None:
    """The block that a group lives in, if all tensors that use it live in the same one."""
    guards = {label.guard for label in labels.values() if name in label.groups()}
    return guards.pop() if len(guards) == 1 else None


def base_of(group: Group, labels: Mapping[str, Label]) -> str | None:
    """The base of a fibred group, unless a tensor uses the group without it: then all bases share one set of indices."""
    if group.base is None:
        return None
    uses = [axis for label in labels.values() for axis in label.axes if group.name in names(axis)]
    return group.base if all(_is_under(axis, group.name, group.base) for axis in uses) else None


def _is_under(expression: Expression, group: str, base: str) -> bool:
    """Whether every use of `group` is nested inside `base`."""
    match expression:
        case Number():
            return True
        case Name(name):
            return name != group
        case Sum(terms):
            return all(_is_under(term, group, base) for term in terms)
        case Product((first, *others)):
            if first == Name(base) or not others:
                return (not others and _is_under(first, group, base)) or first == Name(base)
            return _is_under(first, group, base) and _is_under(Product(tuple(others)), group, base)
    raise AssertionError(expression)
