"""What the maps inside one block are for: attention, a feed-forward part, or a chain of convolutions.

Shapes alone cannot tell them apart (a query as wide as the residual has the shape of a residual map), so the order in
which modules are defined, the integers they store and their names serve as hints. What rests on a hint is a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from raffm.models.draft.probe import Map, Probe, Vector, is_constant, quotient, words


@dataclass(frozen=True)
class Block:
    """One block of a stack, the labels of what enters and leaves it, and what its own groups are called."""

    path: str
    own: str
    """The prefix of the block's own groups, with wildcards: `layers.{i}.`."""
    entry: str
    exit: str
    main: Vector
    """The length of the axis that the block adds onto."""
    typical: frozenset[str]
    """The maps, by their names inside a block, that every block of the stack has."""

    def inner_name(self, module: str) -> str:
        """What a module is called inside the block."""
        return module.removeprefix(f"{self.path}.")


@dataclass(frozen=True)
class Finding:
    """What was recognised: labels of both ends of maps, and of other axes by their lengths."""

    ends: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)
    """For a module: the labels of its input and of its output."""
    local: Mapping[Vector, str] = field(default_factory=dict)
    guesses: Mapping[str, str] = field(default_factory=dict)
    """For a module: what its label rests on."""
    fibres: Mapping[str, str] = field(default_factory=dict)
    """For a group that keeps its own indices in every index of another: that other."""
    pinned: Mapping[str, str] = field(default_factory=dict)
    """Groups that must not be cut, and why."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    cut: tuple[str, ...] = ()
    """The groups that a space may cut."""

    def __or__(self, other: Finding) -> Finding:
        return Finding(
            {**self.ends, **other.ends},
            {**self.local, **other.local},
            {**self.guesses, **other.guesses},
            {**self.fibres, **other.fibres},
            {**self.pinned, **other.pinned},
            {**self.attributes, **other.attributes},
            tuple(dict.fromkeys(self.cut + other.cut)),
        )


def recognised(probe: Probe, block: Block, maps: list[Map], known: Mapping[Vector, str]) -> Finding:
    """What the maps of a block are for; `known` are the lengths that have a name outside of blocks."""
    found = Finding()
    for place, attention in enumerate(_attentions(probe, block, maps)):
        found = _attention_labels(probe, block, attention, place) | found  # what the first one says of a length stands
    if not found.ends and (chain := _chain(block, maps)):
        return _chain_labels(probe, block, maps, chain)
    rest = [each for each in maps if each.module not in found.ends]
    return _feed_forward(block, rest, known) | found


# -- attention -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attention:
    query: Map
    key: Map
    value: Map
    out: Map | None

    @property
    def is_fused(self) -> bool:
        return self.query is self.value

    @property
    def width(self) -> Vector:
        """The length of all heads together."""
        return _third(self.query.target) or self.query.target if self.is_fused else self.query.target

    @property
    def key_width(self) -> Vector:
        return self.width if self.is_fused else self.key.target


@dataclass(frozen=True)
class _Heads:
    """How many heads there are, how many of them have their own key, and how long one is."""

    count: Vector
    keys: Vector
    size: Vector


_ROLES = {"q": "query", "query": "query", "k": "key", "key": "key", "v": "value", "value": "value"}


def _attentions(probe: Probe, block: Block, maps: list[Map]) -> list[_Attention]:
    trios = _named_trios(maps) or _equal_trios(probe, block, maps) or _fused_maps(probe, block, maps)
    return [_Attention(*trio, _following(maps, _Attention(*trio, None))) for trio in trios]


def _following(maps: list[Map], attention: _Attention) -> Map | None:
    """The output projection: the first map after query, key and value that is as wide as all heads."""
    last = max(maps.index(part) for part in (attention.query, attention.key, attention.value))
    return next((each for each in maps[last + 1 :] if each.source == attention.width), None)


def _named_trios(maps: list[Map]) -> list[tuple[Map, Map, Map]]:
    parents: dict[str, dict[str, Map]] = {}
    for each in maps:
        parent, _, name = each.module.rpartition(".")
        for word in words(name) & _ROLES.keys():
            parents.setdefault(parent, {}).setdefault(_ROLES[word], each)
    complete = [roles for roles in parents.values() if len(roles) == 3]
    return [(roles["query"], roles["key"], roles["value"]) for roles in complete]


def _equal_trios(probe: Probe, block: Block, maps: list[Map]) -> list[tuple[Map, Map, Map]]:
    """Three siblings of one shape in a module that stores a number of heads, when no name tells them apart."""
    shapes: dict[tuple[str, Vector, Vector], list[Map]] = {}
    for each in maps:
        shapes.setdefault((each.module.rpartition(".")[0], each.source, each.target), []).append(each)
    alike = [same for same in shapes.values() if len(same) in (3, 4)]
    return [(same[0], same[1], same[2]) for same in alike if _heads(probe, block, _Attention(same[0], same[1], same[2], None))]


def _fused_maps(probe: Probe, block: Block, maps: list[Map]) -> list[tuple[Map, Map, Map]]:
    """Maps three times as wide as the input of the next, in a module that stores a number of heads."""
    tripled = [each for each, after in pairwise(maps) if _third(each.target) == after.source]
    return [(each, each, each) for each in tripled if _heads(probe, block, _Attention(each, each, each, None))]


def _third(vector: Vector) -> Vector | None:
    return quotient(vector, (3,) * len(vector))


def _owners(block: Block, attention: _Attention) -> list[str]:
    """The modules that may store the number of heads: the parent of the query and its own parent, inside the block."""
    parent = attention.query.module.rpartition(".")[0]
    return [path for path in (parent, parent.rpartition(".")[0]) if path.startswith(block.path)]


def _heads(probe: Probe, block: Block, attention: _Attention) -> _Heads | None:
    stored = {vector for owner in _owners(block, attention) for vector in probe.stored_in(owner).values()}
    for key, count in probe.settings.items():
        if not words(key) & {"head", "heads"} or words(key) & {"dim", "size", "key", "kv", "value"}:
            continue
        size = quotient(attention.width, count)
        keys = size and quotient(attention.key_width, size)
        if size and keys and stored & {count, size} and quotient(count, keys):
            return _Heads(count, keys, size)
    return None


def _attention_labels(probe: Probe, block: Block, attention: _Attention, place: int) -> Finding:
    own = block.own + (f"{attention.query.module.split('.')[-2]}." if place else "")
    heads = _heads(probe, block, attention)
    if heads is None or (attention.is_fused and not (_third(attention.query.target) and attention.out)):
        return _plain_attention(own, attention)
    is_shared = heads.keys != heads.count
    keys = f"{own}kv" if is_shared else f"{own}heads"
    count = f"{own}kv*{own}rep" if is_shared else keys
    is_counted = any(heads.count in probe.stored_in(owner).values() for owner in _owners(block, attention))
    qk, vo = f"{own}qk", f"{own}vo" if is_counted or not attention.is_fused else f"{own}qk"
    parts = (f"{count}*{qk}", f"{keys}*{qk}", f"{keys}*{vo}")
    is_rotary = any({"inv", "freq"} <= words(name) for name in probe.tensors)
    meanings = {heads.size: qk, heads.keys: keys, heads.count: count}
    return Finding(
        _attention_ends(attention, parts, f"{count}*{vo}"),
        meanings,
        _attention_guesses(attention),
        {qk: keys, vo: keys},
        dict.fromkeys((qk, vo), "rotary positions turn pairs of channels") if is_rotary else {},
        _attention_attributes(probe, block, attention, heads, {**_shares(heads, own), **meanings}, f"{count}*{qk}"),
        (keys,) if is_rotary else (keys, qk),
    )


def _shares(heads: _Heads, own: str) -> dict[Vector, str]:
    share = quotient(heads.count, heads.keys)
    return {share: f"{own}rep"} if share and heads.keys != heads.count else {}


def _attention_ends(
    attention: _Attention, parts: tuple[str, str, str], outgoing: str
) -> dict[str, tuple[str | None, str | None]]:
    if attention.is_fused:
        ends: dict[str, tuple[str | None, str | None]] = {attention.query.module: (None, " + ".join(parts))}
    else:
        maps = (attention.query, attention.key, attention.value)
        ends = {each.module: (None, label) for each, label in zip(maps, parts, strict=True)}
    return {**ends, **({attention.out.module: (outgoing, None)} if attention.out else {})}


def _attention_guesses(attention: _Attention) -> dict[str, str]:
    if attention.is_fused:
        guesses = {attention.query.module: "all queries, then all keys, then all values; they may be interleaved by head"}
    else:
        roles = {"query": attention.query, "key": attention.key, "value": attention.value}
        guesses = {each.module: f"the {role}, by its name or place" for role, each in roles.items()}
    return {**guesses, **({attention.out.module: "the output projection, by its place"} if attention.out else {})}


def _plain_attention(own: str, attention: _Attention) -> Finding:
    """Attention whose number of heads no module stores: its width is one group, and pinned."""
    group = f"{own}attention"
    parts = (group, f"{group}.keys", f"{group}.keys") if attention.key_width != attention.width else (group,) * 3
    return Finding(
        _attention_ends(attention, parts, group),
        guesses=_attention_guesses(attention),
        pinned=dict.fromkeys(parts, "no module stores how many heads this holds"),
    )


def _attention_attributes(
    probe: Probe, block: Block, attention: _Attention, heads: _Heads, meanings: Mapping[Vector, str], whole: str
) -> dict[str, str]:
    """The stored integers that count heads, the size of a head, or both together where their name says so."""
    found = {}
    for owner in _owners(block, attention):
        for name, vector in probe.stored_in(owner).items():
            if vector in meanings:
                found[f"{owner}.{name}"] = meanings[vector]
            elif vector == attention.width and words(name) & {"head", "heads", "split", "inner"}:
                found[f"{owner}.{name}"] = whole
    return found


# -- everything else -----------------------------------------------------------------------------------------------


def _feed_forward(block: Block, maps: list[Map], known: Mapping[Vector, str]) -> Finding:
    """Lengths that one map of the block gives and a later one takes, and that nothing outside of blocks has.

    A map may give a length several times over: gate and values of a gated part in one.
    """
    given: list[Map] = []
    names: dict[Vector, str] = {}
    guesses = {}
    for each in maps:
        for giver in given if each.source not in known and each.source not in names else ():
            times = quotient(giver.target, each.source)
            if times and is_constant(times):
                count = sum("*" not in name for name in names.values())
                names[each.source] = f"{block.own}{'inner' if each.is_convolution else 'ffn'}{count + 1 if count else ''}"
                if times[0] > 1:
                    names[giver.target] = f"{times[0]}*{names[each.source]}"
                    guesses[giver.module] = "several parts, one after the other"
                break
        if each.target not in known and not is_constant(each.target):
            given.append(each)
    return Finding(local=names, guesses=guesses, cut=tuple(name for name in names.values() if "*" not in name))


def _chain(block: Block, maps: list[Map]) -> list[Map]:
    """The maps that follow each other from what enters the block to what leaves it; empty where they do not."""
    path = [each for each in maps if block.inner_name(each.module) in block.typical]
    is_linked = all(before.target == after.source for before, after in pairwise(path))
    return path if len(path) > 1 and is_linked and path[-1].target == block.main else []


def _chain_labels(probe: Probe, block: Block, maps: list[Map], chain: list[Map]) -> Finding:
    inner = [
        f"{block.own}{'inner' if place == 0 else 'middle' if place == 1 else f'inner{place + 1}'}"
        for place in range(len(chain) - 1)
    ]
    labels = [block.entry, *inner, block.exit]
    ends: dict[str, tuple[str | None, str | None]] = {each.module: (block.entry, block.exit) for each in maps}
    ends.update({each.module: (labels[place], labels[place + 1]) for place, each in enumerate(chain)})
    norms = {norm: (None, ends[before.module][1] if before else block.entry) for norm, before in _norms(probe, block, maps)}
    guesses = {each.module: "the maps of a block run in the order in which they are defined" for each in chain[:-1]}
    return Finding({**ends, **norms}, guesses=guesses, cut=tuple(inner))


def _norms(probe: Probe, block: Block, maps: list[Map]) -> Iterator[tuple[str, Map | None]]:
    """The modules of a block that scale an axis, each with the map defined before it."""
    by_name = {each.module: each for each in maps}
    before = None
    for name, _ in probe.model.named_modules():
        if not name.startswith(f"{block.path}."):
            continue
        before = by_name.get(name, before)
        axes = probe.tensors.get(f"{name}.weight", ())
        if len(axes) == 1 and (before is None or before.target == axes[0]):
            yield name, before
