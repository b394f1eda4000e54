"""Small random models, without any module: what their axes mean is written here once more, apart from raffm's notation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from raffm.algebra.axis import parse, parse_label
from raffm.algebra.group import Group, Tie
from raffm.algebra.layout import Kind, Layout
from raffm.algebra.ranking import Ranking

Axis = Any
"""A number, the name of a group, ("*", axis, ...) for nested axes or ("+", axis, ...) for concatenated ones."""

Guard = tuple[str, int] | None

PLACES = ("#layers", "first#layers")
"""What attributes say of a block: its place, and whether it is the first."""

Kept = dict[str, Any]
"""Plain lists of the indices to keep; a list of lists for a fibred group."""


def text_of(axis: Axis) -> str:
    """The axis in raffm's notation."""
    if not isinstance(axis, tuple):
        return str(axis)
    sign, *parts = axis
    return f" {sign} ".join(
        f"({text_of(part)})" if isinstance(part, tuple) and sign == "*" else text_of(part) for part in parts
    )


def block_of(name: str) -> int:
    """The number of the layer that something stands in."""
    return int(name.removeprefix("encoder.layer.").split(".")[0])


def renamed_axis(axis: Axis, rename: Callable[[str], str]) -> Axis:
    """The same axis over groups of other names."""
    if isinstance(axis, tuple):
        return (axis[0], *(renamed_axis(part, rename) for part in axis[1:]))
    return rename(axis) if isinstance(axis, str) else axis


@dataclass(frozen=True)
class Described:
    """One tensor: its axes in storage order, and how its label is written. `stack` is the depth group that it serves."""

    axes: tuple[Axis, ...]
    direction: str = ""
    guard: Guard = None
    stack: str = ""
    kind: Kind = "parameter"
    dtype: torch.dtype = torch.float32

    @property
    def label(self) -> str:
        texts = [text_of(axis) for axis in self.axes]
        if self.direction == "->":
            texts = [f"{texts[1]} -> {texts[0]}", *texts[2:]]
        elif self.direction == "transposed":
            texts = [f"{texts[0]} -> {texts[1]}", *texts[2:]]
        text = ", ".join(texts) or "scalar"
        text += " transposed" if self.direction == "transposed" else ""
        text += f" of {self.stack}" if self.stack else ""
        return text + (f" when {self.guard[0]}[{self.guard[1]}]" if self.guard else "")


@dataclass(frozen=True)
class Unit:
    """Groups that are cut together, each to so many times the drawn count; the first one leads."""

    groups: dict[str, int]
    counts: tuple[int, ...]

    @property
    def leader(self) -> str:
        return next(iter(self.groups))


@dataclass
class World:
    """A model as plain data. `bases` and `sizes` say what raffm should find out by itself."""

    tensors: dict[str, Described] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    bases: dict[str, str] = field(default_factory=dict)
    ties: list[tuple[Axis, Axis]] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    attributes: dict[str, tuple[Axis, int]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    # -- description ---------------------------------------------------------------------------------------------

    def group(self, name: str, size: int, is_plain: bool = False, **properties: Any) -> str:
        """Describe a group; `is_plain` says that its base does not hold, because of a tensor that lacks it."""
        self.groups[name] = Group(name, properties.pop("told", 0), **properties)
        self.sizes[name] = size
        if self.groups[name].base is not None and not is_plain:
            self.bases[name] = self.groups[name].base
        return name

    def unit(self, **groups: int) -> None:
        """Let groups be cut together, each to so many times one count."""
        leader = next(iter(groups))
        group, size = self.groups[leader], self.sizes[leader] // groups[leader]
        least = max(group.least, len(group.required))
        counts = [count for count in range(least, size + 1) if count % group.step == 0 or count == size]
        self.units.append(Unit(groups, tuple(counts)))

    def tensor(self, name: str, *axes: Axis, direction: str = "", **properties: Any) -> None:
        self.tensors[name] = Described(axes, direction, **properties)

    def linear(self, name: str, source: Axis, target: Axis, *rest: Axis, transposed: bool = False, **properties: Any) -> None:
        ends = (source, target) if transposed else (target, source)
        self.tensor(name, *ends, *rest, direction="transposed" if transposed else "->", **properties)

    # -- what raffm makes of it ----------------------------------------------------------------------------------

    def layout(self) -> Layout:
        return Layout.build(
            {name: parse_label(described.label) for name, described in self.tensors.items()},
            {name: self.shape(name) for name in self.tensors},
            self.groups.values(),
            [Tie(parse(text_of(left)), parse(text_of(right))) for left, right in self.ties],
            {name: (parse(text_of(axis)), found) for name, (axis, found) in self.attributes.items()},
            self.aliases,
            {name: described.kind for name, described in self.tensors.items()},
        )

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(len(elements(axis, self.sizes)) for axis in self.tensors[name].axes)

    def values(self, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Random tensors, with zeros of both signs among them."""
        random = torch.Generator().manual_seed(seed)
        made = {}
        for name, described in self.tensors.items():
            if described.dtype == torch.int64:
                made[name] = torch.randint(0, 9, self.shape(name), generator=random)
                continue
            tensor = torch.randn(self.shape(name), generator=random)
            tensor[torch.rand(self.shape(name), generator=random) < 0.1] = 0.0
            tensor[torch.rand(self.shape(name), generator=random) < 0.1] = -0.0
            made[name] = tensor.to(dtype)
        return made

    def names(self, *kinds: Kind) -> list[str]:
        return [name for name, described in self.tensors.items() if described.kind in kinds]

    # -- what should become of it when it is cut -------------------------------------------------------------------

    def is_alive(self, guard: Guard, kept: Kept) -> bool:
        return guard is None or guard[0] not in kept or guard[1] in kept[guard[0]]

    def guards(self, group: str) -> set[Guard]:
        """The blocks of all tensors that a group runs along."""
        return {made.guard for made in self.tensors.values() if any(group in groups_of(axis) for axis in made.axes)}

    def is_left(self, group: str, kept: Kept) -> bool:
        guards = self.guards(group)
        return not guards or any(self.is_alive(guard, kept) for guard in guards)

    def normal(self, kept: Kept) -> Kept:
        """The cut with sorted indices, without whole groups and without groups of dropped blocks."""
        found = {}
        for name, indices in kept.items():
            if self.size_after(name, kept) == self.sizes[name] or not self.is_left(name, kept):
                continue
            if name not in self.bases:
                found[name] = sorted(indices)
                continue
            heads = kept.get(self.bases[name], range(len(indices)))
            found[name] = [sorted(row) for _, row in sorted(zip(heads, indices, strict=True))]
        return found

    def size_after(self, name: str, kept: Kept) -> int:
        if name not in kept:
            return self.sizes[name]
        return len(kept[name][0] if name in self.bases else kept[name])

    def sizes_after(self, kept: Kept) -> dict[str, int]:
        """The sizes of the groups that are left, by their old names."""
        return {name: self.size_after(name, kept) for name in self.sizes if self.is_left(name, kept)}

    def name_after(self, name: str, kept: Kept) -> str:
        """A tensor's name among the blocks that are left; what serves a stack is named in its first block, always."""
        if name in self.tensors and self.tensors[name].stack:
            return name
        return self._moved(name, kept, {depth: str(group.path) for depth, group in self.groups.items() if group.path})

    def group_after(self, name: str, kept: Kept) -> str:
        return self._moved(name, kept, {depth: depth for depth, group in self.groups.items() if group.path})

    def _moved(self, name: str, kept: Kept, prefixes: Mapping[str, str]) -> str:
        for depth, prefix in prefixes.items():
            for old in range(self.sizes[depth]):
                before = f"{prefix}.{old}"
                if depth in kept and (name == before or name.startswith(before + ".")):
                    return f"{prefix}.{sorted(kept[depth]).index(old)}" + name[len(before) :]
        return name

    def place_after(self, name: str, axis: str, found: int, kept: Kept) -> int:
        """What a block's attribute says of its place among the blocks that are left."""
        if "layers" not in kept:
            return found
        before = [index for index in kept["layers"] if index < block_of(name)]
        return len(before) if axis == "#layers" else int(not before)

    def cut(self, kept: Kept) -> World:
        """The submodel as a description of its own."""
        sizes = self.sizes_after(kept)

        def group(name: str) -> str:
            return self.group_after(name, kept)

        def guard(old: Guard) -> Guard:
            return None if old is None else (old[0], sorted(kept[old[0]]).index(old[1]) if old[0] in kept else old[1])

        sub = World()
        for name, described in self.tensors.items():
            if self.is_alive(described.guard, kept):
                axes = tuple(renamed_axis(axis, group) for axis in described.axes)
                sub.tensors[self.name_after(name, kept)] = replace(described, axes=axes, guard=guard(described.guard))
        for name, size in sizes.items():
            old = self.groups[name]
            required = tuple(sorted(kept[name]).index(index) for index in old.required) if name in kept else old.required
            base = old.base and group(old.base)
            sub.groups[group(name)] = replace(old, name=group(name), size=size, base=base, required=required)
            sub.sizes[group(name)] = size
        sub.bases = {group(name): group(base) for name, base in self.bases.items() if name in sizes}
        sub.ties = [
            (renamed_axis(left, group), renamed_axis(right, group))
            for left, right in self.ties
            if groups_of(left) | groups_of(right) <= set(sizes)
        ]
        for unit in self.units:
            if unit.leader in sizes:
                most = sizes[unit.leader] // unit.groups[unit.leader]
                counts = {
                    most,
                    *(count for count in unit.counts if count < most and count % self.groups[unit.leader].step == 0),
                }
                sub.units.append(Unit({group(name): times for name, times in unit.groups.items()}, tuple(sorted(counts))))
        blocks = {
            f"{self.groups[depth].path}.{index}."
            for depth in kept
            if self.groups[depth].path
            for index in set(range(self.sizes[depth])) - set(kept[depth])
        }
        for name, (axis, place) in self.attributes.items():
            is_left = all(part in sizes or part in PLACES for part in groups_of(axis))
            if is_left and not any(name.startswith(block) for block in blocks):
                moved = renamed_axis(axis, group)
                found = self.place_after(name, axis, place, kept) if axis in PLACES else len(elements(moved, sub.sizes))
                sub.attributes[self.name_after(name, kept)] = (moved, found)
        sub.aliases = {
            self.name_after(alias, kept): self.name_after(name, kept)
            for alias, name in self.aliases.items()
            if self.is_alive(self.tensors[name].guard, kept)
        }
        return sub


def elements(axis: Axis, sizes: Mapping[str, int]) -> list[tuple[tuple[str, int], ...]]:
    """What lies along an axis, one position after another: of every group, number and sum the index it stands for."""
    return _elements(axis, tuple((name, sizes[name]) for name in sorted(groups_of(axis))))


def groups_of(axis: Axis) -> set[str]:
    if isinstance(axis, tuple):
        return {group for part in axis[1:] for group in groups_of(part)}
    return {axis} if isinstance(axis, str) else set()


@cache
def _elements(axis: Axis, known: tuple[tuple[str, int], ...]) -> list[tuple[tuple[str, int], ...]]:
    sizes = dict(known)
    if isinstance(axis, int):
        return [(("#", index),) for index in range(axis)]
    if isinstance(axis, str):
        return [((axis, index),) for index in range(sizes[axis])]
    sign, *parts = axis
    found = []
    if sign == "+":
        for place, part in enumerate(parts):
            for element in elements(part, sizes):
                found.append((("+", place), *element))
        return found
    if not parts:
        return [()]
    for outer in elements(parts[0], sizes):
        for inner in elements(("*", *parts[1:]), sizes):
            found.append(outer + inner)
    return found


# -- random worlds -------------------------------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A random model of a few layers."""
    world = World()
    flag, size = st.booleans(), st.integers(2, 4)
    world.group("residual", draw(size), approximate="a norm")
    world.unit(residual=1)
    world.group("vocabulary", 3, pinned=True)
    world.tensor("embed.weight", "vocabulary", "residual")
    if draw(flag):
        world.aliases["head.weight"] = "embed.weight"
    world.tensor("scale")
    if draw(flag):
        _convolutions(draw, world)
    layers = draw(st.integers(1, 3))
    has_depth = draw(flag)
    if has_depth:
        required = draw(st.sampled_from([(), (0,), (layers - 1,)]))
        world.group("layers", layers, told=layers, path="encoder.layer", required=required)
        world.unit(layers=1)
        world.attributes["config.layers"] = ("layers", layers)
        world.tensor("encoder.layer.norm", "residual")
    heads = _heads(world, "layers.heads", draw(st.integers(1, 3))) if draw(flag) else None
    for index in range(layers):
        guard = ("layers", index) if has_depth else None
        _attention(draw, world, index, guard, heads)
        _ffn(draw, world, index, guard)
    if has_depth and draw(flag):
        _stacked(draw, world, heads or "residual")
    if draw(flag):
        _pair(draw, world, [("layers", index) if has_depth else None for index in range(layers)][-2:])
    if draw(flag):
        _exits(draw, world)
    return world


def _heads(world: World, name: str, size: int) -> str:
    world.group(name, size, told=size)
    world.unit(**{name: 1})
    return name


def _pair(draw: st.DrawFn, world: World, guards: list[Guard]) -> None:
    """A group that the last two layers share."""
    world.group("pair", draw(st.integers(1, 3)))
    world.unit(pair=1)
    for place, guard in enumerate(guards):
        index = place if guard is None else guard[1]
        world.tensor(f"encoder.layer.{index}.pair", "pair", guard=guard)


def _stacked(draw: st.DrawFn, world: World, shared: str) -> None:
    """Tensors that serve all layers and stand in the first: over what all layers share, a group of their own, or nothing."""
    world.group("buckets", draw(st.integers(1, 3)))
    world.unit(buckets=1)
    table = "encoder.layer.0.table"
    if draw(st.booleans()):
        world.linear(f"{table}.weight", "buckets", ("*", shared, 2), transposed=draw(st.booleans()), stack="layers")
    else:
        world.tensor(f"{table}.weight", "buckets", shared, stack="layers")
    world.tensor(f"{table}.mean", shared, stack="layers", kind="buffer")
    world.tensor(f"{table}.batches", stack="layers", kind="buffer", dtype=torch.int64)
    world.tensor(f"{table}.ids", "buckets", stack="layers", kind="transient", dtype=torch.int64)
    if draw(st.booleans()):
        world.aliases["table.weight"] = f"{table}.weight"


def _convolutions(draw: st.DrawFn, world: World) -> None:
    world.group("stem", draw(st.integers(1, 3)))
    world.group("norm", draw(st.integers(1, 3)))
    world.unit(stem=1)
    world.unit(norm=1)
    world.linear("stem.conv.weight", 2, "stem", 3, 3)
    world.linear("stem.next.weight", "stem", ("*", "norm", 2), 1, 2)
    world.tensor("stem.norm.weight", ("*", "norm", 2))
    world.tensor("stem.norm.running_mean", ("*", "norm", 2), kind="buffer")
    world.tensor("stem.norm.batches", kind="buffer", dtype=torch.int64)
    world.tensor("stem.ids", 1, "stem", kind=draw(st.sampled_from(["buffer", "transient"])), dtype=torch.int64)


def _attention(draw: st.DrawFn, world: World, index: int, guard: Guard, shared: str | None) -> None:
    kind = draw(st.sampled_from(["separate", "shared", "gqa", "neox", "rotary"]))
    group, tensor = f"layers.{index}", f"encoder.layer.{index}.attention"
    base = shared or _heads(world, f"{group}.heads", draw(st.integers(1, 3)))
    qk, vo, rep, rot = f"{group}.qk", f"{group}.vo", f"{group}.rep", f"{group}.rot"
    fibre = {"base": base} if draw(st.booleans()) else {}
    width, small = draw(st.integers(1, 3)), st.integers(1, 2)
    transposed = draw(st.booleans())

    def linear(name: str, source: Axis, target: Axis) -> None:
        world.linear(f"{tensor}.{name}", source, target, transposed=transposed, guard=guard)

    world.attributes[f"{tensor}.heads"] = (base, world.sizes[base])
    world.attributes[f"{tensor}.place"] = ("#layers", index)
    if draw(st.booleans()):
        world.attributes[f"{tensor}.is_first"] = ("first#layers", int(index == 0))
    world.group(vo, 2 * width if kind == "rotary" else width, **fibre)
    if kind in ("gqa", "rotary"):
        repeats = draw(small)
        world.group(rep, repeats, told=repeats)
        world.unit(**{rep: 1})
    if kind == "rotary":
        world.group(rot, width, is_plain=True, **fibre)
        world.linear(f"{tensor}.q", "residual", ("*", base, rep, 2, rot), guard=guard)
        linear("k", "residual", ("*", base, 2, rot))
        linear("v", "residual", ("*", base, vo))
        linear("o", ("*", base, rep, vo), "residual")
        world.tensor(f"{tensor}.frequencies", rot, guard=guard, kind="transient")
        world.ties.append((vo, ("*", 2, rot)))
        world.unit(**{rot: 1, vo: 2})
        return
    world.group(qk, width, is_plain=kind == "shared", **fibre)
    if draw(st.booleans()):
        world.ties.append((vo, qk))
        world.unit(**{qk: 1, vo: 1})
    else:
        world.unit(**{qk: 1})
        world.unit(**{vo: 1})
    if kind == "gqa":
        linear("qkv", "residual", ("+", ("*", base, rep, qk), ("*", base, qk), ("*", base, vo)))
        linear("o", ("*", base, rep, vo), "residual")
    elif kind == "neox":
        linear("qkv", "residual", ("*", base, ("+", qk, qk, vo)))
        linear("o", ("*", base, vo), "residual")
    else:
        linear("q", "residual", ("*", base, qk))
        world.tensor(f"{tensor}.q.bias", ("*", base, qk), guard=guard)
        linear("v", "residual", ("*", base, vo))
        linear("o", ("*", base, vo), "residual")
    if kind == "shared":
        world.tensor(f"{tensor}.relative", 3, qk, guard=guard)


def _ffn(draw: st.DrawFn, world: World, index: int, guard: Guard) -> None:
    ffn, tensor = f"layers.{index}.ffn", f"encoder.layer.{index}.ffn"
    width = draw(st.integers(2, 5))
    world.group(ffn, width, step=draw(st.integers(1, 2)), least=draw(st.integers(1, 2)))
    world.unit(**{ffn: 1})
    world.attributes[f"config.widths.{index}"] = (ffn, width)
    target = ("+", ffn, ffn) if draw(st.booleans()) else ffn
    world.linear(f"{tensor}.up", "residual", target, guard=guard)
    world.tensor(f"{tensor}.up.bias", target, guard=guard)
    world.linear(f"{tensor}.down", ffn, "residual", transposed=draw(st.booleans()), guard=guard)
    world.tensor(f"{tensor}.mean", ffn, guard=guard, kind="buffer")
    world.tensor(f"{tensor}.gain", guard=guard)
    world.tensor(f"{tensor}.batches", guard=guard, kind="buffer", dtype=torch.int64)
    world.aliases[f"{tensor}.tied"] = f"{tensor}.up"


def _exits(draw: st.DrawFn, world: World) -> None:
    """Exits that have a group of their own, or none."""
    world.group("exits", 2, told=2, path="exits")
    world.unit(exits=1)
    for index in range(2):
        guard = ("exits", index)
        if draw(st.booleans()):
            world.linear(f"exits.{index}.out", "residual", 3, guard=guard)
            continue
        middle = world.group(f"exits.{index}.middle", draw(st.integers(1, 2)))
        world.unit(**{middle: 1})
        world.linear(f"exits.{index}.fc", "residual", middle, guard=guard)
        world.linear(f"exits.{index}.out", middle, 3, guard=guard)


# -- random cuts, rankings and clients -----------------------------------------------------------------------------


@st.composite
def sizes(draw: st.DrawFn, world: World) -> dict[str, int]:
    """A possible size for some of the groups, ties obeyed."""
    drawn = {}
    for unit in world.units:
        count = draw(st.sampled_from([None, *unit.counts]))
        if count is not None:
            drawn.update({name: times * count for name, times in unit.groups.items()})
    return drawn


@st.composite
def cuts(draw: st.DrawFn, world: World) -> Kept:
    """Random indices to keep, in no order; now and then of a whole group or in a dropped block."""
    random = Random(draw(st.integers(0, 999)))
    counts = draw(sizes(world))
    kept: Kept = {}
    for name in sorted(counts, key=lambda name: name in world.bases):
        if name in world.bases:
            rows = len(kept.get(world.bases[name], range(world.sizes[world.bases[name]])))
            kept[name] = [random.sample(range(world.sizes[name]), counts[name]) for _ in range(rows)]
            continue
        required = list(world.groups[name].required)
        others = [index for index in range(world.sizes[name]) if index not in required]
        kept[name] = required + random.sample(others, counts[name] - len(required))
    return kept


@st.composite
def rankings(draw: st.DrawFn, world: World) -> Ranking:
    """A random order for some of the groups."""
    random = Random(draw(st.integers(0, 999)))
    order = {}
    for name, size in world.sizes.items():
        if world.groups[name].pinned or not draw(st.booleans()):
            continue
        rows = [random.sample(range(size), size) for _ in range(world.sizes[world.bases[name]] if name in world.bases else 1)]
        order[name] = torch.tensor(rows if name in world.bases else rows[0])
    return Ranking(order)


seeds = st.integers(0, 999)
weights = st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.0, 17.0])
