"""Tables with one mistake each, made from a right one."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from raffm.models.label import base_prefix, layout_of, named_tensors
from raffm.models.table import Table, instances, shipped


@dataclass(frozen=True)
class Mutant:
    what: str
    table: Table
    equivalent: str = ""
    """Why no behaviour can tell this table from the right one; empty where it can."""

    @property
    def suspects(self) -> set[str]:
        """The groups that the mistake speaks of: where it will show first."""
        return {re.sub(r"\{\w+\}", "*", word) for word in _names(self.what.partition(": ")[2])}


def mutants(model: nn.Module, family: str) -> Iterator[Mutant]:
    """Swapped groups, transposed products, turned maps; dropped fibres, ties, stacks and classes."""
    table = _used(shipped(family), model)
    yield from _swapped(table, model)
    yield from _transposed(table)
    yield from _turned(table)
    yield from _without_fibre(table)
    yield from _without_tie(table)
    yield from _without_stack(table)
    yield from _without_class(table)


def _used(table: Table, model: nn.Module) -> Table:
    """The table without lines that this model has no tensor for: a mistake there cannot show."""
    prefix = base_prefix(model)
    names = list(named_tensors(model)[0])
    inside = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    outside = {name for name in names if not name.startswith(prefix)}

    def lines(section: dict[str, str], tensors: set[str]) -> dict[str, str]:
        candidates = tensors | {name.rpartition(".")[0] for name in tensors}
        return {name: label for name, label in section.items() if instances(name, candidates)}

    return replace(table, tensors=lines(dict(table.tensors), inside), heads=lines(dict(table.heads), outside))


def _with_label(table: Table, section: str, name: str, label: str) -> Table:
    return replace(table, **{section: {**getattr(table, section), name: label}})


def _labels(table: Table) -> Iterator[tuple[str, str, str]]:
    for section in ("tensors", "heads"):
        for name, label in getattr(table, section).items():
            yield section, name, label


def _swapped(table: Table, model: nn.Module) -> Iterator[Mutant]:
    """Every use of a group in every label, replaced by each other group of the same family of names."""
    layout = layout_of(model)
    words = dict.fromkeys(word for _, _, label in _labels(table) for word in _names(label))
    for section, name, label in _labels(table):
        for old in dict.fromkeys(_names(label)):
            for new in words:
                if new != old and _fits(new, old, name) and _length(layout, new) == _length(layout, old) is not None:
                    changed = re.sub(rf"(?<![\w.{{}}-]){re.escape(old)}(?![\w.{{}}-])", new, label, count=1)
                    both_pinned = all(table.groups.get(word, {}).get("pinned") for word in (old, new))
                    reason = "pinned groups never move, so their names mean nothing" if both_pinned else ""
                    yield Mutant(f"{name}: {label} as {changed}", _with_label(table, section, name, changed), reason)


def _names(label: str) -> list[str]:
    return re.findall(r"[A-Za-z_][\w.{}:-]*", re.sub(r"\btransposed\b|\bscalar\b", "", label))


def _fits(new: str, old: str, name: str) -> bool:
    wanted = set(re.findall(r"\{(\w+)", new))
    return wanted <= set(re.findall(r"\{(\w+)", name))


def _length(layout: object, word: str) -> int | None:
    for number in ("0", "1"):
        concrete = re.sub(r"\{\w+\}", number, word)
        sizes = layout.sizes  # type: ignore[attr-defined]
        if concrete in sizes:
            return sizes[concrete]
    return None


def _transposed(table: Table) -> Iterator[Mutant]:
    for section, name, label in _labels(table):
        for product in dict.fromkeys(re.findall(r"(?<![\w.{}:-])(?=([\w.{}:-]+\*[\w.{}:-]+))", label)):
            first, second = product.split("*")
            reason = "" if second != "width" else "a width of 1 nests either way"
            changed = label.replace(product, f"{second}*{first}", 1)
            yield Mutant(f"{name}: {label} as {changed}", _with_label(table, section, name, changed), reason)


def _turned(table: Table) -> Iterator[Mutant]:
    for section, name, label in _labels(table):
        found = re.fullmatch(r"(.+?) -> ([^,]+)(.*)", label)
        if found and found[1] != found[2]:
            changed = f"{found[2]} -> {found[1]}{found[3]}"
            yield Mutant(f"{name}: {label} as {changed}", _with_label(table, section, name, changed))


def _without_fibre(table: Table) -> Iterator[Mutant]:
    for group, entry in table.groups.items():
        if "per" in entry:
            rest = {key: entry[key] for key in entry if key != "per"}
            yield Mutant(
                f"{group} without its base",
                replace(table, groups={**table.groups, group: rest}),
                "the same indices in every head are a true, coarser claim",
            )


def _without_tie(table: Table) -> Iterator[Mutant]:
    for left in table.ties:
        rest = {name: right for name, right in table.ties.items() if name != left}
        yield Mutant(f"{left} without its tie", replace(table, ties=rest))


def _without_stack(table: Table) -> Iterator[Mutant]:
    for section, name, label in _labels(table):
        if " of " in label:
            changed = label.partition(" of ")[0]
            yield Mutant(f"{name}: {label} as {changed}", _with_label(table, section, name, changed))


def _without_class(table: Table) -> Iterator[Mutant]:
    for name in table.when_cut:
        rest = {other: entry for other, entry in table.when_cut.items() if other != name}
        yield Mutant(f"{name} without another class", replace(table, when_cut=rest))
