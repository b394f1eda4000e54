"""An elastic space: the sizes that each group may take. A config picks one size per group.

Two notations are read, everywhere. Ours names groups, with `*` for any number:

    {"layers.*.ffn": [3072, 2304, 1536, 768], "layers.*.heads": [12, 9, 6, 3]}        a space
    {"layers.0.ffn": 1536, "layers.0.heads": 9}                                       a config; unnamed groups are whole

The published one gives totals, where `atten_out` is the width of query, key and value over all heads:

    {"atten_out_space": [768, 576], "inter_hidden_space": [3072, 1536], "residual_hidden_space": [768]}
    {"layer_1": {"atten_out": 576, "inter_hidden": 1536, "residual_hidden": 768}, ...}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from raffm.algebra.check import some
from raffm.algebra.layout import Layout
from raffm.errors import SpaceError
from raffm.models import table as tables
from raffm.models.table import Table

By = Literal["dims", "heads"]
Config = dict[str, Any]
"""Plain integers by group, or the published form."""


@dataclass(frozen=True, eq=False)
class Space:
    """The sizes of each group, largest first, and how configs are written."""

    layout: Layout
    table: Table
    sizes: Mapping[str, tuple[int, ...]]
    by: By = "dims"
    is_published: bool = False

    def smallest(self) -> dict[str, int]:
        """The smallest size of every group."""
        return {group: sizes[-1] for group, sizes in self.sizes.items()}

    def largest(self) -> dict[str, int]:
        """The largest size of every group."""
        return {group: sizes[0] for group, sizes in self.sizes.items()}

    def draw(self, generator: torch.Generator) -> dict[str, int]:
        """A size for every group, each as likely as the others, drawn independently."""
        picks = {group: int(torch.randint(len(sizes), (1,), generator=generator)) for group, sizes in self.sizes.items()}
        return {group: self.sizes[group][pick] for group, pick in picks.items()}

    def count(self) -> int:
        """How many different configs the space holds."""
        total = 1
        for sizes in self.sizes.values():
            total *= len(sizes)
        return total

    def to_config(self, sizes: Mapping[str, int]) -> Config:
        """Sizes as plain JSON, in the notation that the space was given in."""
        return _published_config(self, sizes) if self.is_published else dict(sizes)

    def to_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """A config in either notation as sizes by group."""
        if any(isinstance(entry, Mapping) for entry in config.values()):
            return _sizes_from_published(self, config)
        for group, size in config.items():
            _refuse_size(self.layout, group, size, "the config")
        return dict(config)

    def to_json(self) -> dict[str, list[int]]:
        """The space as plain JSON, in our notation."""
        return {group: list(sizes) for group, sizes in self.sizes.items()}


def read_space(layout: Layout, table: Table, given: Mapping[str, Any] | str | Path | None, by: By = "dims") -> Space:
    """A space from a dict in either notation, from a JSON file, or the default one."""
    if by not in ("dims", "heads"):
        raise SpaceError(f"by={by!r} is not known: attention is cut by 'dims' within every head, or by whole 'heads'.")
    if isinstance(given, str | Path):
        given = _from_file(Path(given))
    if given is None:
        return Space(layout, table, default_sizes(layout, table), by)
    if not isinstance(given, Mapping) or not given:
        raise SpaceError(f"an elastic space is a dict of lists of sizes, but was given {given!r}.")
    if any(name.endswith("_space") for name in given):
        return Space(layout, table, _sizes_of_published_space(layout, table, given, by), by, True)
    sizes: dict[str, tuple[int, ...]] = {}
    for pattern, entries in given.items():
        for group in _groups_of(layout, pattern):
            sizes[group] = _sorted_sizes(layout, group, entries)
    return Space(layout, table, sizes, by)


def default_sizes(layout: Layout, table: Table) -> dict[str, tuple[int, ...]]:
    """Full, three quarters, half and a quarter of every group that the family's table cuts by default."""
    patterns = table.space.get("cut") or list(layout.free)
    groups = [group for pattern in patterns for group in _matching(layout, pattern) if group in layout.free]
    return {group: _quarters(layout, group) for group in groups}


def _quarters(layout: Layout, name: str) -> tuple[int, ...]:
    group = layout.groups[name]
    return tuple(sorted({group.narrowed(quarters / 4) for quarters in (4, 3, 2, 1)}, reverse=True))


def _from_file(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpaceError(f"the elastic space {str(path)!r} cannot be read: {error.strerror}.") from None
    except json.JSONDecodeError as error:
        raise SpaceError(f"the elastic space {str(path)!r} is not valid JSON: {error}.") from None


def _matching(layout: Layout, pattern: str) -> list[str]:
    regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return [group for group in layout.groups if regex.fullmatch(group)]


def _groups_of(layout: Layout, pattern: str) -> list[str]:
    groups = _matching(layout, pattern)
    if not groups:
        raise SpaceError(f"no group matches {pattern!r}. The groups that can be cut are: {some(layout.free)}.")
    pinned = [group for group in groups if layout.groups[group].pinned]
    if pinned:
        raise SpaceError(f"group `{pinned[0]}` is pinned and cannot be cut. Drop it from the space.")
    return groups


def _sorted_sizes(layout: Layout, group: str, entries: Any) -> tuple[int, ...]:
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise SpaceError(f"the space of `{group}` must be a list of sizes, but is {entries!r}.")
    for size in entries:
        _refuse_size(layout, group, size, "the space")
    return tuple(sorted(set(entries), reverse=True))


def _refuse_size(layout: Layout, name: str, size: Any, where: str) -> None:
    group = layout.groups.get(name)
    if group is None:
        raise SpaceError(f"{where} names the group {name!r}, which the model does not have. `raffm inspect` lists its groups.")
    if isinstance(size, bool) or not isinstance(size, int):
        raise SpaceError(f"{where} gives `{name}` the size {size!r}; sizes are plain integers.")
    if size <= 0:
        raise SpaceError(f"{where} gives `{name}` the size {size}; nothing is left of a group of size 0. Drop that entry.")
    if size > group.size:
        raise SpaceError(f"{where} gives `{name}` the size {size}, but the full model has {group.size}.")
    if size % group.step and size != group.size:
        raise SpaceError(f"{where} gives `{name}` the size {size}, but it is cut in steps of {group.step}.")


# -- the published notation ----------------------------------------------------------------------------------------


def _sizes_of_published_space(layout: Layout, table: Table, given: Mapping[str, Any], by: By) -> dict[str, tuple[int, ...]]:
    if not table.published:
        raise SpaceError(
            f"the published notation ({', '.join(given)}) says nothing of the family {table.family!r}. Name its groups: "
            f"{some(default_sizes(layout, table), 3)}."
        )
    known = {f"{name}_space": name for name in table.published}
    if unknown := set(given) - set(known):
        raise SpaceError(f"the space has the unknown entry {min(unknown)!r}; this family has {', '.join(sorted(known))}.")
    sizes: dict[str, tuple[int, ...]] = {}
    for entry, totals in given.items():
        for group, whole in _published_groups(layout, table, known[entry], by).items():
            if not isinstance(totals, Sequence) or not totals:
                raise SpaceError(f"{entry} must be a list of sizes, but is {totals!r}.")
            parts = [_divided(entry, total, whole, group) for total in totals]
            sizes[group] = _sorted_sizes(layout, group, parts)
    return sizes


def _published_groups(layout: Layout, table: Table, name: str, by: By) -> dict[str, int]:
    """The groups that a published name cuts, each with the number that its totals are a multiple of."""
    templates = table.published[name]
    chosen = templates[-1] if by == "dims" else templates[0]
    groups = {}
    for group, numbers in tables.instances(chosen, layout.groups).items():
        first = {name: 0 for other in templates for name in tables.wildcards(other)}  # a group of all layers looks at one
        others = [tables.fill(other, {**first, **numbers}, {}) for other in templates if other != chosen]
        groups[group] = prod(int(other) if other.isdigit() else layout.groups[other].size for other in others)
    return groups


def _divided(entry: str, total: Any, factor: int, group: str) -> int:
    if isinstance(total, bool) or not isinstance(total, int):
        raise SpaceError(f"{entry} holds {total!r}; sizes are plain integers.")
    if total == 0:
        raise SpaceError(f"{entry} holds 0, which leaves nothing of `{group}`. Drop that entry.")
    if total % factor:
        raise SpaceError(
            f"{entry} holds {total}, which {factor} does not divide: `{group}` would not be whole. Use multiples of {factor}."
        )
    return total // factor


def _blocks(space: Space) -> list[int]:
    depth = next(iter(space.layout.depths.values()))
    return list(range(depth.size))


def _published_config(space: Space, sizes: Mapping[str, int]) -> Config:
    config: Config = {}
    for block in _blocks(space):
        entry = {}
        for name in space.table.published:
            for group, factor in _published_groups(space.layout, space.table, name, space.by).items():
                if space.layout.groups[group].guard in (None, (next(iter(space.layout.depths)), block)):
                    entry[name] = sizes.get(group, space.layout.groups[group].size) * factor
        config[f"layer_{block + 1}"] = entry
    return config


def _sizes_from_published(space: Space, config: Mapping[str, Any]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    depth = next(iter(space.layout.depths))
    expected = {f"layer_{block + 1}": block for block in _blocks(space)}
    for layer, entry in config.items():
        if layer not in expected or not isinstance(entry, Mapping):
            raise SpaceError(f"the config has the unknown entry {layer!r}; it has {some(expected, 3)} ... with a dict each.")
        for name, total in entry.items():
            if name not in space.table.published:
                raise SpaceError(f"{layer} has the unknown entry {name!r}; known are {', '.join(space.table.published)}.")
            for group, factor in _published_groups(space.layout, space.table, name, space.by).items():
                if space.layout.groups[group].guard in (None, (depth, expected[layer])):
                    size = _divided(f"{layer}.{name}", total, factor, group)
                    _refuse_size(space.layout, group, size, f"{layer} of the config")
                    if sizes.setdefault(group, size) != size:
                        raise SpaceError(f"{layer} gives `{group}` the size {size}, but an earlier layer gave {sizes[group]}.")
    return sizes
