"""The notation: an axis is an arithmetic expression over named groups.

    residual -> heads*qk             a linear map, from input to output, however it is stored
    h*(qk + qk + vo)                 a product nests (row-major), a sum concatenates
    stage2.in -> stage2.out, 3, 3    further axes follow; plain numbers are never cut
    vocab, residual                  axes in storage order, with no direction
    scalar                           a tensor without axes
    residual -> ffn transposed       stored input first
    residual -> classes when exits[1]
    buckets, heads of layers         serves a whole stack, and stands in the first block that is kept

`docs/algebra.md` explains it on one page.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor

from raffm.errors import LabelError


@dataclass(frozen=True)
class Number:
    """A fixed count, such as the 3 of a kernel."""

    count: int

    def __str__(self) -> str:
        return str(self.count)


@dataclass(frozen=True)
class Name:
    """A group, by name."""

    group: str

    def __str__(self) -> str:
        return self.group


@dataclass(frozen=True)
class Product:
    """Nested axes, row-major: the last factor runs fastest."""

    factors: tuple[Expression, ...]

    def __str__(self) -> str:
        return "*".join(f"({factor})" if isinstance(factor, Sum) else str(factor) for factor in self.factors)


@dataclass(frozen=True)
class Sum:
    """Concatenated axes."""

    terms: tuple[Expression, ...]

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms))


Expression = Number | Name | Product | Sum

_TOKEN = re.compile(r"\s*(?:(?P<number>\d+)(?![\w.])|(?P<name>(?:first)?#?[A-Za-z_][\w.\-]*)|(?P<sign>[*+()]))")


def _tokens(text: str) -> Iterator[str]:
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise LabelError(f"cannot read {text[position:].strip()!r} in the expression {text!r}.")
        yield match.group().strip()
        position = match.end()


@cache
def parse(text: str) -> Expression:
    """Read an expression: `parse("heads*qk")`."""
    tokens = [*_tokens(text), ""]

    def sequence(position: int, sign: str, part: Callable[[int], tuple[Expression, int]]) -> tuple[list[Expression], int]:
        first, position = part(position)
        parts = [first]
        while tokens[position] == sign:
            following, position = part(position + 1)
            parts.append(following)
        return parts, position

    def total(position: int) -> tuple[Expression, int]:
        terms, position = sequence(position, "+", product)
        flat = [inner for term in terms for inner in (term.terms if isinstance(term, Sum) else (term,))]
        return (flat[0] if len(flat) == 1 else Sum(tuple(flat))), position

    def product(position: int) -> tuple[Expression, int]:
        factors, position = sequence(position, "*", atom)
        flat = [inner for factor in factors for inner in (factor.factors if isinstance(factor, Product) else (factor,))]
        return (flat[0] if len(flat) == 1 else Product(tuple(flat))), position

    def atom(position: int) -> tuple[Expression, int]:
        token = tokens[position]
        if token == "(":
            inside, position = total(position + 1)
            if tokens[position] != ")":
                raise LabelError(f"a bracket is not closed in {text!r}.")
            return inside, position + 1
        if token.isdigit():
            return Number(int(token)), position + 1
        if token and token not in "*+)":
            return Name(token), position + 1
        raise LabelError(f"{text!r} needs a group or a number where it has {token or 'its end'!r}.")

    expression, position = total(0)
    if tokens[position]:
        raise LabelError(f"cannot read {tokens[position]!r} in the expression {text!r}.")
    return expression


@cache
def names(expression: Expression) -> tuple[str, ...]:
    """The groups an expression uses, in order, each once."""
    match expression:
        case Number():
            return ()
        case Name(group):
            return (group,)
        case Product(parts) | Sum(parts):
            return tuple(dict.fromkeys(name for part in parts for name in names(part)))


def value(expression: Expression, sizes: Mapping[str, int]) -> int:
    """How long the axis is when the groups have these sizes."""
    match expression:
        case Number(count):
            return count
        case Name(group):
            return sizes[group]
        case Product(factors):
            return prod(value(factor, sizes) for factor in factors)
        case Sum(terms):
            return sum(value(term, sizes) for term in terms)


@cache
def monomials(expression: Expression) -> tuple[tuple[tuple[str, ...], int], ...]:
    """The expression multiplied out: (groups, how often) pairs; `2*a*(b + c)` gives ab and ac twice each."""
    counts: Counter[tuple[str, ...]] = Counter()
    match expression:
        case Number(count):
            counts[()] = count
        case Name(group):
            counts[(group,)] = 1
        case Sum(terms):
            for term in terms:
                counts.update(dict(monomials(term)))
        case Product(factors):
            counts[()] = 1
            for factor in factors:
                counts = _times(counts, dict(monomials(factor)))
    return tuple(sorted(counts.items()))


def _times(left: Mapping[tuple[str, ...], int], right: Mapping[tuple[str, ...], int]) -> Counter[tuple[str, ...]]:
    product: Counter[tuple[str, ...]] = Counter()
    for first, often in left.items():
        for second, times in right.items():
            product[tuple(sorted(first + second))] += often * times
    return product


def renamed(expression: Expression, rename: Callable[[str], str]) -> Expression:
    """The same expression over groups of other names."""
    match expression:
        case Number():
            return expression
        case Name(group):
            return Name(rename(group))
        case Product(factors):
            return Product(tuple(renamed(factor, rename) for factor in factors))
        case Sum(terms):
            return Sum(tuple(renamed(term, rename) for term in terms))


def units(expression: Expression, widths: Container[str]) -> set[str]:
    """The groups under whose every index one of `widths` is nested: `heads` in `heads*qk`."""
    match expression:
        case Product(factors):
            found = {unit for factor in factors for unit in units(factor, widths)}
            for place, factor in enumerate(factors):
                if isinstance(factor, Name) and any(name in widths for rest in factors[place + 1 :] for name in names(rest)):
                    found.add(factor.group)
            return found
        case Sum(terms):
            return {unit for term in terms for unit in units(term, widths)}
        case _:
            return set()


Where = slice | Tensor | None
"""Positions on one axis: a stretch, a list of them, or None for all."""


def positions(
    expression: Expression, sizes: Mapping[str, int], chosen: Mapping[str, Tensor], bases: Mapping[str, str]
) -> Where:
    """Where on the full axis the chosen indices of its groups lie, in the order in which they were chosen.

    A fibred group (a key of `bases`) has one row of indices for every chosen index of its base.
    """
    if not any(group in chosen for group in names(expression)):
        return None
    return as_stretch(_positions(expression, sizes, chosen, bases, {}))


def _positions(
    expression: Expression,
    sizes: Mapping[str, int],
    chosen: Mapping[str, Tensor],
    bases: Mapping[str, str],
    row: Mapping[str, int],
) -> Tensor:
    def inner(part: Expression, row: Mapping[str, int]) -> Tensor:
        return _positions(part, sizes, chosen, bases, row)

    match expression:
        case Number(count):
            return torch.arange(count)
        case Name(group):
            indices = chosen.get(group)
            if indices is None:
                return torch.arange(sizes[group])
            return indices[row[bases[group]]] if group in bases else indices
        case Sum(terms):
            starts = [sum(value(term, sizes) for term in terms[:place]) for place in range(len(terms))]
            return torch.cat([inner(term, row) + start for term, start in zip(terms, starts, strict=True)])
        case Product((first, *others)):
            if not others:
                return inner(first, row)
            rest = Product(tuple(others))
            stride = value(rest, sizes)
            outer = inner(first, row)
            if isinstance(first, Name) and any(bases.get(group) == first.group for group in names(rest)):
                blocks = [inner(rest, {**row, first.group: place}) for place in range(len(outer))]
                return torch.cat([block + index * stride for index, block in zip(outer.tolist(), blocks, strict=True)])
            return (outer[:, None] * stride + inner(rest, row)).flatten()
    raise AssertionError(expression)


def coordinates(expression: Expression, sizes: Mapping[str, int], group: str) -> Tensor:
    """The index of `group` at every position of the axis; -1 where the axis does not run along the group."""
    match expression:
        case Name(name) if name == group:
            return torch.arange(sizes[group])
        case Sum(terms):
            return torch.cat([coordinates(term, sizes, group) for term in terms])
        case Product((first, *others)) if others:
            rest = Product(tuple(others))
            if group in names(first):
                return coordinates(first, sizes, group).repeat_interleave(value(rest, sizes))
            return coordinates(rest, sizes, group).repeat(value(first, sizes))
        case Product((first,)):
            return coordinates(first, sizes, group)
    return torch.full((value(expression, sizes),), -1)


def as_stretch(indices: Tensor) -> Where:
    """The same positions as a slice, where they follow each other without a gap."""
    start, stop = int(indices[0]), int(indices[-1]) + 1
    contiguous = stop - start == len(indices) and bool((indices[1:] - indices[:-1] == 1).all())
    return slice(start, stop) if contiguous else indices


@dataclass(frozen=True)
class Label:
    """What the axes of one tensor mean, in storage order.

    `source` and `target` say which axis is a linear map's input and which its output.
    `guard` names the block this tensor belongs to: it exists only while that block is kept. `stack` names the depth
    group that it serves as a whole: it always exists, in the first kept block.
    """

    axes: tuple[Expression, ...]
    source: int | None = None
    target: int | None = None
    guard: tuple[str, int] | None = None
    stack: str = ""

    def __str__(self) -> str:
        if self.source is None or self.target is None:
            text = ", ".join(map(str, self.axes)) or "scalar"
        else:
            rest = [axis for place, axis in enumerate(self.axes) if place not in (self.source, self.target)]
            text = ", ".join([f"{self.axes[self.source]} -> {self.axes[self.target]}", *map(str, rest)])
            text += " transposed" if self.source < self.target else ""
        text += f" of {self.stack}" if self.stack else ""
        return text + (f" when {self.guard[0]}[{self.guard[1]}]" if self.guard else "")

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the tensor when the groups have these sizes."""
        return tuple(value(axis, sizes) for axis in self.axes)

    def groups(self) -> tuple[str, ...]:
        """The groups of all axes, each once."""
        return tuple(dict.fromkeys(name for axis in self.axes for name in names(axis)))


_GUARD = re.compile(r"\s+when\s+(?P<group>[\w.\-]+)\[(?P<index>\d+)\]\s*$")
_STACK = re.compile(r"\s+of\s+(?P<group>[\w.\-]+)\s*$")
_TRANSPOSED = re.compile(r"\s+transposed\s*$")


@cache
def parse_label(text: str) -> Label:
    """Read a label: `parse_label("residual -> heads*qk")`."""
    guard = None
    if found := _GUARD.search(text):
        guard = (found["group"], int(found["index"]))
        text = text[: found.start()]
    stack = ""
    if found := _STACK.search(text):
        stack = found["group"]
        text = text[: found.start()]
    if text.strip() == "scalar":
        return Label((), guard=guard, stack=stack)
    if "->" not in text:
        return Label(tuple(parse(part) for part in text.split(",")), guard=guard, stack=stack)
    is_transposed = _TRANSPOSED.search(text) is not None
    before, after = _TRANSPOSED.sub("", text).split("->", 1)
    target, *rest = (parse(part) for part in after.split(","))
    ends = (parse(before), target) if is_transposed else (target, parse(before))
    source = 0 if is_transposed else 1
    return Label((*ends, *rest), source=source, target=1 - source, guard=guard, stack=stack)
