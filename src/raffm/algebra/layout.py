"""A Layout: what every axis of every tensor of a model means, checked against its shapes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal

import torch
from torch import Tensor

from raffm.algebra.axis import Expression, Label, Name, Number, Product, monomials, names, renamed, units, value
from raffm.algebra.blocks import in_first_block, is_dropped, is_place, renumbered
from raffm.algebra.check import (
    base_of,
    guard_of,
    refuse_groups,
    refuse_guards,
    refuse_misfit,
    refuse_rank,
    refuse_unlabelled,
    refuse_when_cut,
    solve,
)
from raffm.algebra.group import Group, Tie
from raffm.algebra.indices import read_indices
from raffm.algebra.selection import Indices, Selection
from raffm.errors import SelectionError

Kind = Literal["parameter", "frozen", "buffer", "transient"]
"""A frozen tensor is a parameter that is not trained; a transient one a buffer that `state_dict` leaves out."""

PARAMETERS: tuple[Kind, ...] = ("parameter", "frozen")

TRAVELLING: tuple[Kind, ...] = ("parameter", "buffer")
"""What clients change and send back; all else they are given once."""


Term = tuple[tuple[str, int] | None, tuple[str, ...], int]


@dataclass(frozen=True, eq=False)
class Layout:
    """Labels, groups and count ties of one model, and the integers its modules store.

    Build one with `Layout.build`, which checks every label against every shape. Tied tensors are labelled once;
    `aliases` gives their other names. `lists` names the lists that have an entry for every block of a depth group
    (`layers`), or that hold numbers of blocks (`#layers`); `when_cut` the modules that need another class, by its name,
    once a group of theirs is cut.
    """

    labels: Mapping[str, Label]
    groups: Mapping[str, Group]
    ties: tuple[Tie, ...] = ()
    attributes: Mapping[str, Expression] | None = None
    aliases: Mapping[str, str] | None = None
    kinds: Mapping[str, Kind] | None = None
    lists: Mapping[str, str] = field(default_factory=dict)
    when_cut: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @staticmethod
    def build(
        labels: Mapping[str, Label],
        shapes: Mapping[str, Sequence[int]],
        groups: Iterable[Group] = (),
        ties: Iterable[Tie] = (),
        attributes: Mapping[str, tuple[Expression, int]] | None = None,
        aliases: Mapping[str, str] | None = None,
        kinds: Mapping[str, Kind] | None = None,
        lists: Mapping[str, str] | None = None,
        when_cut: Mapping[str, tuple[str, str]] | None = None,
    ) -> Layout:
        """A checked layout; sizes that `groups` leaves at 0 are read off the attributes and the shapes."""
        described = {group.name: group for group in groups}
        attributes = attributes or {}
        refuse_unlabelled(labels, shapes)
        sizes = {name: group.size for name, group in described.items() if group.size}
        equations = [
            (f"`{name}`", expression, found)
            for name, (expression, found) in attributes.items()
            if not any(is_place(group) for group in names(expression))
        ]
        for name, label in labels.items():
            refuse_rank(name, label, shapes[name])
            pairs = enumerate(zip(label.axes, shapes[name], strict=True))
            equations += [(f"`{name}`, axis {place},", axis, length) for place, (axis, length) in pairs]
        solve(equations, sizes)
        for where, expression, found in equations:
            refuse_misfit(where, expression, found, sizes)
        made = {name: replace(described.get(name, Group(name, size)), size=size) for name, size in sizes.items()}
        made = {name: replace(group, guard=guard_of(name, labels), base=base_of(group, labels)) for name, group in made.items()}
        expressions = {name: pair[0] for name, pair in attributes.items()}
        layout = Layout(labels, made, tuple(ties), expressions, aliases or {}, kinds or {}, lists or {}, when_cut or {})
        refuse_guards(layout.labels, layout.groups)
        refuse_when_cut(layout.when_cut, layout.groups)
        refuse_groups(layout.groups, layout.ties)
        return layout

    # -- the full model ------------------------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of every group in the full model."""
        return {name: group.size for name, group in self.groups.items()}

    @cached_property
    def bases(self) -> dict[str, str]:
        """Every fibred group with its base."""
        return {name: group.base for name, group in self.groups.items() if group.base is not None}

    @cached_property
    def heads(self) -> frozenset[str]:
        """The groups whose indices are whole units with a width inside: heads, and counts that are tied to them."""
        axes = {axis for label in self.labels.values() for axis in label.axes}
        found = {unit for axis in axes for unit in units(axis, set(self.free))}
        equal = [
            {tie.left.group, tie.right.group} for tie in self.ties if isinstance(tie.left, Name) and isinstance(tie.right, Name)
        ]
        for _ in equal:
            found.update(*(pair for pair in equal if pair & found))
        return frozenset(found)

    @cached_property
    def followers(self) -> frozenset[str]:
        """The groups whose size a count tie gives."""
        return frozenset(name for tie in self.ties for name in names(tie.left))

    @cached_property
    def depths(self) -> dict[str, Group]:
        """The depth groups: those whose indices are blocks."""
        return {name: group for name, group in self.groups.items() if group.path is not None}

    @cached_property
    def free(self) -> tuple[str, ...]:
        """The groups that may be cut, in the order of the labels; those that a method alone chooses from are not among them."""
        groups = self.groups.items()
        return tuple(name for name, group in groups if not (group.pinned or group.apart) and group.size > group.least)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two models whose tensors mean the same, in every process and version of raffm."""
        content = {
            "labels": {name: str(label) for name, label in self.labels.items()},
            "groups": {name: [group.size, group.base, group.path] for name, group in self.groups.items()},
            "ties": [str(tie) for tie in self.ties],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def kind(self, name: str) -> Kind:
        """Whether a tensor is a parameter, one that is not trained, a buffer, or a buffer that is not saved."""
        return (self.kinds or {}).get(name, "parameter")

    def tensors(self, *kinds: Kind) -> tuple[str, ...]:
        """The names of all tensors of these kinds."""
        return tuple(name for name in self.labels if self.kind(name) in kinds)

    def uses(self, group: str) -> list[tuple[str, int]]:
        """The (tensor, axis) pairs that a group runs along."""
        return self._uses.get(group, [])

    def is_still(self, group: str) -> bool:
        """Whether its indices keep their places where weights are put in order: blocks, and what a saved model makes anew."""
        return group in self.depths or any(self.kind(tensor) == "transient" for tensor, _ in self.uses(group))

    @cached_property
    def _uses(self) -> dict[str, list[tuple[str, int]]]:
        found: dict[str, list[tuple[str, int]]] = {}
        for name, label in self.labels.items():
            for place, axis in enumerate(label.axes):
                for group in names(axis):
                    found.setdefault(group, []).append((name, place))
        return found

    # -- selections ----------------------------------------------------------------------------------------------

    def select(self, kept: Mapping[str, Tensor | Indices]) -> Selection:
        """Check the indices to keep and give them as a Selection.

        An integer means the first n. Whole groups and groups of dropped blocks are left out, so that equal submodels
        are equal values.
        """
        given: dict[str, Tensor] = {}
        for name in sorted(kept, key=lambda name: name in self.bases):  # a base is read before what is fibred over it
            given[name] = read_indices(self.groups, name, kept[name], given)
        chosen = {name: self._sorted(name, given) for name in given}
        chosen = {name: indices for name, indices in chosen.items() if not self._is_dropped(name, chosen)}
        chosen = {name: indices for name, indices in chosen.items() if indices.shape[-1] < self.groups[name].size}
        selection = Selection(chosen)
        sizes = self.sizes_of(selection)
        for tie in self.ties:
            if all(group in sizes for side in (tie.left, tie.right) for group in names(side)) and not tie.holds(sizes):
                raise SelectionError(
                    f"the count tie `{tie}` is broken: it would be {value(tie.left, sizes)} = {value(tie.right, sizes)}. "
                    "Cut the groups so that both sides count the same."
                )
        return selection

    def sizes_of(self, selection: Selection) -> dict[str, int]:
        """The size of every group that the submodel still has."""
        kept = selection.kept
        return {
            name: kept[name].shape[-1] if name in kept else group.size
            for name, group in self.groups.items()
            if not self._is_dropped(name, kept)
        }

    def labels_of(self, selection: Selection) -> dict[str, Label]:
        """The labels of the tensors that the submodel still has, by their names in the full model."""
        return {name: label for name, label in self.labels.items() if self.is_held(selection, name)}

    def is_held(self, selection: Selection, name: str) -> bool:
        """Whether the submodel still has a tensor, or dropped its block."""
        return _holds(self.labels[name].guard, selection.kept)

    def count(self, selection: Selection, *kinds: Kind) -> int:
        """How many numbers the submodel holds in tensors of these kinds (by default: its parameters)."""
        sizes = self.sizes_of(selection)
        terms = [term for term in self.terms(*(kinds or PARAMETERS)) if _holds(term[0], selection.kept)]
        return sum(times * prod(sizes[group] for group in groups) for _, groups, times in terms)

    def count_at(self, sizes: Mapping[str, int], *kinds: Kind) -> int:
        """The same from the sizes alone: blocks whose groups are missing there are dropped.

        Of blocks without groups of their own, the first are taken as kept.
        """
        alive = {self.groups[name].guard for name in sizes}
        owned = {group.guard for group in self.groups.values()}

        def is_kept(guard: tuple[str, int] | None, groups: tuple[str, ...]) -> bool:
            if guard is None:
                return True
            is_alive = guard in alive if guard in owned else guard[1] < sizes[guard[0]]
            return is_alive and all(group in sizes for group in groups)

        kept = [term for term in self.terms(*(kinds or PARAMETERS)) if is_kept(*term[:2])]
        return sum(times * prod(sizes[group] for group in groups) for _, groups, times in kept)

    def terms(self, *kinds: Kind) -> list[Term]:
        """The count of all tensors of these kinds as a polynomial: (block, groups to multiply, times) terms."""
        if kinds not in self._terms:
            counts: Counter[tuple[tuple[str, int] | None, tuple[str, ...]]] = Counter()
            for name in self.tensors(*kinds):
                label = self.labels[name]
                for groups, times in monomials(_flat(label)):
                    counts[label.guard, groups] += times
            self._terms[kinds] = [(guard, groups, times) for (guard, groups), times in counts.items()]
        return self._terms[kinds]

    @cached_property
    def _terms(self) -> dict[tuple[Kind, ...], list[Term]]:
        return {}

    # -- names inside a submodel ---------------------------------------------------------------------------------

    def name_in(self, selection: Selection, name: str) -> str:
        """What a tensor, a module or an attribute is called in the submodel: blocks are numbered anew."""
        if name in self.labels and self.labels[name].stack:
            return in_first_block(name, self._paths[self.labels[name].stack])
        return renumbered(name, self._paths, selection.kept)

    @cached_property
    def _paths(self) -> dict[str, str]:
        return {name: str(depth.path) for name, depth in self.depths.items()}

    def group_in(self, selection: Selection, name: str) -> str:
        """What a group is called in the submodel's own layout."""
        return renumbered(name, {depth: depth for depth in self.depths}, selection.kept)

    def cut(self, selection: Selection) -> Layout:
        """The layout of the submodel."""

        def new(group: str) -> str:
            return self.group_in(selection, group)

        sizes = self.sizes_of(selection)
        held = self.labels_of(selection)
        ties = tuple(
            Tie(renamed(tie.left, new), renamed(tie.right, new))
            for tie in self.ties
            if all(group in sizes for side in (tie.left, tie.right) for group in names(side))
        )
        attributes = {
            self.name_in(selection, name): renamed(expression, new)
            for name, expression in self.attributes_of(selection).items()
        }
        kinds: dict[str, Kind] = {self.name_in(selection, name): self.kind(name) for name in held}
        when_cut = {
            self.name_in(selection, name): (new(group), other) for name, (group, other) in self.when_cut_in(selection).items()
        }
        labels = {self.name_in(selection, name): self._label_in(selection, label) for name, label in held.items()}
        groups = {new(name): self._group_in(selection, name, size) for name, size in sizes.items()}
        return Layout(labels, groups, ties, attributes, self._aliases_in(selection), kinds, self.lists, when_cut)

    def _label_in(self, selection: Selection, label: Label) -> Label:
        axes = tuple(renamed(axis, lambda group: self.group_in(selection, group)) for axis in label.axes)
        return replace(label, axes=axes, guard=_guard_in(selection, label.guard))

    def _group_in(self, selection: Selection, name: str, size: int) -> Group:
        group = self.groups[name]
        return replace(
            group,
            name=self.group_in(selection, name),
            size=size,
            base=group.base and self.group_in(selection, group.base),
            guard=_guard_in(selection, group.guard),
            required=tuple(place for place, old in enumerate(self._kept_list(name, selection)) if old in group.required),
        )

    def _aliases_in(self, selection: Selection) -> dict[str, str]:
        aliases = {
            self.name_in(selection, alias): self.name_in(selection, name)
            for alias, name in (self.aliases or {}).items()
            if self.is_held(selection, name) and not is_dropped(alias, self._paths, selection.kept)
        }
        return {alias: name for alias, name in aliases.items() if alias != name}  # a copy in the block that it moved to

    def when_cut_in(self, selection: Selection) -> dict[str, tuple[str, str]]:
        """What `when_cut` says of the modules that the submodel still has, by their names in the full model."""
        return {name: entry for name, entry in self.when_cut.items() if not is_dropped(name, self._paths, selection.kept)}

    def attributes_of(self, selection: Selection) -> dict[str, Expression]:
        """The integers that the modules of the submodel store, by their names in the full model."""
        sizes = self.sizes_of(selection)
        return {
            name: expression
            for name, expression in (self.attributes or {}).items()
            if not is_dropped(name, self._paths, selection.kept)
            and all(group in sizes or is_place(group) for group in names(expression))
        }

    def compose(self, outer: Selection, inner: Selection) -> Selection:
        """The Selection of this layout that cuts as `inner` cuts the submodel `outer`."""
        old_name = {self.group_in(outer, name): name for name in self.sizes_of(outer)}
        chosen = dict(outer.kept)
        for new, picked in inner.kept.items():
            name = old_name[new]
            before = outer.kept.get(name)
            if name not in self.bases:
                chosen[name] = picked if before is None else before[picked]
                continue
            rows = self._kept_rows(self.bases[name], inner, outer)
            whole = torch.arange(self.groups[name].size).expand(len(rows), -1) if before is None else before[rows]
            chosen[name] = torch.gather(whole, 1, picked)
        for name, base in self.bases.items():  # rows of heads that `inner` drops go with them
            is_recut = self.group_in(outer, name) in inner.kept if name in old_name.values() else True
            if name in outer.kept and not is_recut:
                chosen[name] = outer.kept[name][self._kept_rows(base, inner, outer)]
        return self.select(dict(chosen))

    def _kept_rows(self, base: str, inner: Selection, outer: Selection) -> Tensor:
        count = self.sizes_of(outer)[base]
        return inner.kept.get(self.group_in(outer, base), torch.arange(count))

    def _kept_list(self, name: str, selection: Selection) -> list[int]:
        group = self.groups[name]
        if group.path is None:
            return []
        kept: list[int] = selection.kept[name].tolist() if name in selection.kept else list(range(group.size))
        return kept

    def _is_dropped(self, name: str, kept: Mapping[str, Tensor]) -> bool:
        """Whether all blocks that use a group are dropped."""
        guards = self._guards.get(name, ())
        return bool(guards) and not any(_holds(guard, kept) for guard in guards)

    @cached_property
    def _guards(self) -> dict[str, set[tuple[str, int] | None]]:
        return {group: {self.labels[name].guard for name, _ in uses} for group, uses in self._uses.items()}

    def _sorted(self, name: str, given: Mapping[str, Tensor]) -> Tensor:
        """The indices in ascending order; rows of a fibred group in the order of their heads."""
        indices = given[name]
        base = self.bases.get(name)
        if base is not None and base in given:
            indices = indices[given[base].argsort()]
        return indices.sort(dim=-1).values


def _guard_in(selection: Selection, guard: tuple[str, int] | None) -> tuple[str, int] | None:
    """A block by its number among the kept ones."""
    if guard is None or guard[0] not in selection.kept:
        return guard
    return guard[0], selection.kept[guard[0]].tolist().index(guard[1])


def _flat(label: Label) -> Expression:
    return Product(label.axes) if label.axes else Number(1)


def _holds(guard: tuple[str, int] | None, kept: Mapping[str, Tensor]) -> bool:
    return guard is None or guard[0] not in kept or bool((kept[guard[0]] == guard[1]).any())
