"""What `Layout` checks: labels against shapes when it is built, indices when a submodel is selected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from raffm.algebra.axis import Expression, Label, Name, Number, Product, Sum, names, value
from raffm.algebra.blocks import block_of
from raffm.algebra.group import Group, Tie
from raffm.errors import LabelError, SelectionError


def some(names: Iterable[str], most: int = 12) -> str:
    """The first few names, for a message."""
    listed = [f"`{name}`" for name in names]
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def refuse_order(group: Group, order: Tensor, rows: int | None) -> None:
    """Refuse an order that is no permutation of its group, or of every row of a fibred one."""
    expected = (group.size,) if rows is None else (rows, group.size)
    whole = torch.arange(group.size).expand(expected)
    if tuple(order.shape) != expected or not torch.equal(order.cpu().sort(dim=-1).values, whole):
        raise SelectionError(
            f"the order of group `{group.name}` has shape {tuple(order.shape)}; it must be a permutation of shape {expected}."
        )


def refuse_guards(labels: Mapping[str, Label], groups: Mapping[str, Group]) -> None:
    """Refuse tensors that belong to a block which no depth group has, and ones of a stack that are not in its block 0."""
    for name, label in labels.items():
        stack = groups.get(label.stack)
        if label.stack and (stack is None or stack.path is None or block_of(name, stack.path)[0] != 0):
            raise LabelError(
                f"`{name}` is said to serve all blocks of `{label.stack}`, but it does not stand in the first of them."
            )
        if label.guard is None:
            continue
        depth, index = label.guard
        if depth not in groups or groups[depth].path is None or index >= groups[depth].size:
            raise LabelError(f"`{name}` belongs to block {index} of `{depth}`, but there is no such depth group or block.")


def refuse_when_cut(when_cut: Mapping[str, tuple[str, str]], groups: Mapping[str, Group]) -> None:
    """Refuse a class for a cut of a group that there is not."""
    for name, (group, _) in when_cut.items():
        if group not in groups:
            raise LabelError(f"`{name}` shall change when `{group}` is cut, which is no group of this model.")


def refuse_groups(groups: Mapping[str, Group], ties: Iterable[Tie]) -> None:
    """Refuse fibres over fibres or over nothing, ties of unknown groups, and ties that do not hold."""
    for group in groups.values():
        if group.base is not None and (group.base not in groups or groups[group.base].base is not None):
            raise LabelError(f"group `{group.name}` is fibred over `{group.base}`, which is no plain group of this model.")
    sizes = {name: group.size for name, group in groups.items()}
    for tie in ties:
        unknown = [name for side in (tie.left, tie.right) for name in names(side) if name not in groups]
        if unknown:
            raise LabelError(f"the count tie `{tie}` names the group `{unknown[0]}`, which no label uses.")
        if not tie.holds(sizes):
            raise LabelError(f"the count tie `{tie}` does not hold in the full model. Correct the tie or the labels.")


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
    if expected == found and all(sizes[name] > 0 for name in names(expression)):
        return
    known = ", ".join(f"{name}={sizes[name]}" for name in names(expression))
    known = f" ({known})" if known else ""
    hint = ""
    if isinstance(expression, Name | Product) and found > expected > 0 and found % expected == 0:
        fused = Sum((expression,) * (found // expected))
        hint = f" The projection looks fused: did you mean `{fused}`?"
    raise LabelError(f"{where} has length {found}, but its label `{expression}` gives {expected}{known}.{hint}")


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
