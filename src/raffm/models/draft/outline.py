"""The build of a model as far as shapes tell it: its stacks of blocks, and a name for every length of an axis."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from raffm.models.draft.probe import Map, Probe, Vector, is_constant, quotient
from raffm.models.draft.recognise import Block, Finding, recognised
from raffm.models.label import base_prefix


@dataclass(frozen=True)
class Stack:
    """The lists of blocks that share one line of `[depth]`: one list, or one for every stage."""

    name: str
    path: str
    letter: str
    """The wildcard for a block."""
    stage_letter: str
    """The wildcard for a stage; empty where there is one list only."""
    lists: tuple[str, ...]
    key: str
    """The entry of the config that sets the number of blocks."""

    @property
    def own(self) -> str:
        """The prefix of the groups that a block has for itself: `layers.{i}.`."""
        return f"{self.name}.{{{self.letter}}}."

    @property
    def stages(self) -> str:
        """What the groups of the stages are called, without their number: `stages`."""
        return self.name.partition(".{")[0]

    @property
    def stem(self) -> str:
        """What enters the first stage."""
        return f"{self.stages.removesuffix('stages')}stem"

    def seen_from(self, own: int | None, stage: int) -> str:
        """The axis that a stage adds onto, as written in a line for stage `own`, or outside of all stages."""
        if own is not None and abs(stage - own) <= 1:
            shift = {-1: "-1", 0: "", 1: "+1"}[stage - own]
            return f"{self.stages}.{{{self.stage_letter}{shift}}}.out"
        if stage == -1:
            return self.stem
        is_last = stage == len(self.lists) - 1
        return f"{self.stages}.{{{self.stage_letter}:last}}.out" if is_last else f"{self.stages}.{stage}.out"


def _stacks(depths: Mapping[str, str], prefix: str) -> list[Stack]:
    """The stacks of a model; lists outside of the base model cannot be cut, so they are none."""
    lines: dict[str, list[str]] = {}
    for path, key in depths.items():
        if path.startswith(prefix):
            is_staged = key.rpartition(".")[2].isdigit()  # an element of a list such as `depths`
            lines.setdefault(re.sub(r"\.\d+(?=\.|$)", ".{}", path, count=1) if is_staged else path, []).append(path)
    stacks = []
    for place, (line, lists) in enumerate(lines.items()):
        stage = "stuvw"[place % 5] if "{}" in line else ""
        letter = ("bcdef" if stage else "ijklm")[place % 5]
        start = line.removeprefix(prefix).partition(".{}")[0].rpartition(".")[0]
        name = f"{start}." if len(lines) > 1 and start else ""
        name += f"stages.{{{stage}}}.blocks" if stage else "layers"
        stacks.append(Stack(name, line.replace("{}", f"{{{stage}}}"), letter, stage, tuple(lists), depths[lists[0]]))
    return stacks


@dataclass(frozen=True)
class Outline:
    """What is known of a model before its blocks are looked into."""

    probe: Probe
    prefix: str
    """The prefix of the base model inside the model: `vit.`, or nothing."""
    stacks: tuple[Stack, ...]
    maps: Mapping[str, Map]

    def template(self, name: str) -> tuple[str, dict[str, int]]:
        """A name with wildcards in place of the numbers of blocks and stages, and those numbers."""
        parts: list[str] = []
        numbers: dict[str, int] = {}
        for part in name.split("."):
            letter = self._letters.get(".".join(parts)) if part.isdigit() else None
            if letter:
                numbers[letter] = int(part)
            parts.append(f"{{{letter}}}" if letter else part)
        return ".".join(parts), numbers

    @cached_property
    def _letters(self) -> dict[str, str]:
        blocks = {stack.path: stack.letter for stack in self.stacks}
        return blocks | {stack.path.partition(".{")[0]: stack.stage_letter for stack in self.stacks if stack.stage_letter}

    @cached_property
    def blocks(self) -> dict[str, tuple[Stack, int, int]]:
        """The path of every block, with its stack, its stage and its place."""
        return {
            f"{path}.{place}": (stack, stage, place)
            for stack in self.stacks
            for stage, path in enumerate(stack.lists)
            for place in range(self.count(path))
        }

    def block_of(self, name: str) -> str | None:
        """The path of the block that a tensor or a module stands in."""
        return next((path for path in self.blocks if name.startswith(f"{path}.")), None)

    def count(self, path: str) -> int:
        """How many blocks a list has."""
        return len(list(self.probe.model.get_submodule(path).children()))

    def maps_in(self, path: str) -> dict[str, Map]:
        """The maps inside a block, by their names in it."""
        prefix = f"{path}."
        return {name.removeprefix(prefix): each for name, each in self.maps.items() if name.startswith(prefix)}

    @cached_property
    def main(self) -> dict[str, Vector]:
        """The length that the blocks of a list add onto: what their last map gives that is met outside of the list, too."""
        found = {}
        for path in (path for stack in self.stacks for path in stack.lists):
            outside = {axis for name, axes in self.probe.tensors.items() if not name.startswith(f"{path}.") for axis in axes}
            maps = self.maps_in(f"{path}.{self.count(path) - 1}").values()
            given = [each.target for each in maps if not is_constant(each.target)]
            if given:
                found[path] = ([vector for vector in given if vector in outside] or given)[-1]
        return found

    def typical(self, stack: Stack) -> frozenset[str]:
        """The maps that the last block of a stack has, by their names inside it."""
        return frozenset(self.maps_in(f"{stack.lists[0]}.{self.count(stack.lists[0]) - 1}"))

    def shortcut(self, stack: Stack) -> str:
        """A map that only the first block of a stage has, as a template; empty where there is none."""
        for path in stack.lists if stack.stage_letter else ():
            for name in self.maps_in(f"{path}.0"):
                if name not in self.typical(stack):
                    return f"{stack.path}.0.{name}"
        return ""

    def enters(self, stack: Stack) -> Vector | None:
        """The length that enters the first stage, where a shortcut may project it."""
        first = self.maps_in(f"{stack.lists[0]}.0")
        entering = [each.source for name, each in first.items() if name in self.typical(stack)]
        return entering[0] if entering and self.shortcut(stack) and not is_constant(entering[0]) else None

    @cached_property
    def before_blocks(self) -> frozenset[str]:
        """The modules that have tensors and are defined before all blocks."""
        tensors = list(self.probe.tensors)
        first = next((place for place, name in enumerate(tensors) if self.block_of(name)), 0)
        return frozenset(name.rpartition(".")[0] for name in tensors[:first])


def outline(found: Probe) -> Outline:
    """The stacks and the maps of a model that was built at several sizes."""
    prefix = base_prefix(found.model)
    return Outline(found, prefix, tuple(_stacks(found.depths, prefix)), found.maps())


# -- names of lengths ----------------------------------------------------------------------------------------------


def _main_names(shape: Outline) -> dict[Vector, str]:
    """The lengths that blocks add onto: `residual`, or one `stages.0.out` a stage; `stages.-1.out` enters the first."""
    names: dict[Vector, str] = {}
    for stack in shape.stacks:
        mains = {stage: main for stage, path in enumerate(stack.lists) if (main := shape.main.get(path))}
        if stack.stage_letter and (len(stack.lists) == 1 or len(set(mains.values())) > 1):
            for stage, main in mains.items():
                names.setdefault(main, f"{stack.stages}.{stage}.out")
            if entering := shape.enters(stack):
                names.setdefault(entering, f"{stack.stages}.-1.out")
        for main in mains.values():
            start = f"{stack.name.rpartition('.')[0]}." if "residual" in names.values() else ""
            names.setdefault(main, f"{start}residual")
    return names


_KNOWN = {
    "vocab_size": "vocabulary",
    "max_position_embeddings": "positions",
    "n_positions": "positions",
    "image_size": "positions",
    "type_vocab_size": "types",
    "num_labels": "classes",
    "classes": "classes",
    "num_channels": "channels",
    "channels": "channels",
    "patch_size": "patch",
}
"""What entries of a config usually count, the most telling first."""


def _other_names(found: Probe, vectors: Iterable[Vector], names: Mapping[Vector, str]) -> dict[Vector, str]:
    """Names for the lengths that have none: a multiple of one that has, or what the config calls it."""
    fresh: dict[Vector, str] = {}
    for vector in vectors:
        if not is_constant(vector) and vector not in names and vector not in fresh:
            taken = {*names.values(), *fresh.values()}
            fresh[vector] = _multiple(vector, names) or _unused(_config_name(found.keys_of(vector)), taken)
    return fresh


def _multiple(vector: Vector, names: Mapping[Vector, str]) -> str:
    for other, name in names.items():
        factor = quotient(vector, other)
        if factor and is_constant(factor):
            return f"{factor[0]}*{name}"
    return ""


def is_known(name: str) -> bool:
    """Whether a name says by itself what it counts."""
    return name in _KNOWN.values()


def _config_name(keys: tuple[str, ...]) -> str:
    parts = {part for key in keys for part in key.split(".")}
    return next((name for key, name in _KNOWN.items() if key in parts), keys[0])


def _unused(name: str, taken: set[str]) -> str:
    return next(each for each in (name, *(f"{name}_{number}" for number in range(2, 1000))) if each not in taken)


# -- names in blocks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Naming:
    """The name of every length: everywhere, in each block, and at the ends of maps."""

    shape: Outline
    main: Mapping[Vector, str]
    classes: Mapping[Vector, str]
    findings: Mapping[str, Finding]
    """What was recognised in each block."""
    norm_widths: Mapping[Vector, str]
    """For the lengths that a group norm runs over: the channels of one norm group."""

    @cached_property
    def found(self) -> Finding:
        """What was recognised in all blocks together."""
        merged = Finding()
        for finding in self.findings.values():
            merged |= finding
        return merged

    def group(self, module: str, vector: Vector, given: str | None = None) -> str:
        """What a length is called in a module; `given` where the end of a map is known from its block."""
        block = self.shape.block_of(f"{module}.")
        local = self.findings[block].local if block else {}
        name = given or self.main.get(vector) or local.get(vector) or self.classes[vector]
        return self._relative(module, name)

    def axis(self, module: str, vector: Vector, given: str | None = None) -> str:
        """The expression of an axis: a plain number where no size changes it."""
        if is_constant(vector) and given is None:
            return str(vector[0])
        width = self.norm_widths.get(vector)
        return self.group(module, vector, given) + (f"*{width}" if width else "")

    def everywhere(self, name: str) -> str:
        """A name with a wildcard in place of the number of its stage, but for what enters the first."""
        for stack in self.shape.stacks:
            if stack.stage_letter and re.fullmatch(rf"{re.escape(stack.stages)}\.(\d+|-1)\.out", name):
                return stack.stem if name.endswith(".-1.out") else f"{stack.stages}.{{{stack.stage_letter}}}.out"
        return name

    def _relative(self, module: str, name: str) -> str:
        """A name with the number of its stage as seen from the module: `stages.{s-1}.out`."""
        numbers = self.shape.template(module)[1]
        for stack in self.shape.stacks:
            hit = re.fullmatch(rf"(\d+\*)?{re.escape(stack.stages)}\.(-?\d+)\.out", name) if stack.stage_letter else None
            if hit:
                is_stem = hit[2] == "0" and module in self.shape.before_blocks and self.shape.shortcut(stack)
                seen = stack.seen_from(numbers.get(stack.stage_letter), -1 if is_stem else int(hit[2]))
                return f"{hit[1] or ''}{seen}"
        return name


def named(shape: Outline) -> Naming:
    """Look into the blocks of a model and name every length."""
    found = shape.probe
    main = _main_names(shape)
    outside = [axis for name, axes in found.tensors.items() if not shape.block_of(name) for axis in axes]
    known = main | _other_names(found, outside, main)
    plain = {vector: name for vector, name in known.items() if "*" not in name}
    findings = {path: _finding(shape, path, main, plain) for path in shape.blocks}
    rest = [axis for name, axes in found.tensors.items() for axis in axes if not _is_local(shape, findings, name, axis)]
    return Naming(shape, main, known | _other_names(found, rest, known), findings, _norm_widths(found))


def _is_local(shape: Outline, findings: Mapping[str, Finding], name: str, axis: Vector) -> bool:
    block = shape.block_of(name)
    return block is not None and axis in findings[block].local


def _finding(shape: Outline, path: str, main: Mapping[Vector, str], known: Mapping[Vector, str]) -> Finding:
    stack, stage, place = shape.blocks[path]
    vector = shape.main.get(stack.lists[stage])
    if vector is None:
        return Finding()
    is_projected = place == 0 and main[vector] != "residual" and shape.shortcut(stack)
    entry = f"{stack.stages}.{stage - 1}.out" if is_projected else main[vector]
    block = Block(path, stack.own, entry, main[vector], vector, shape.typical(stack))
    return recognised(shape.probe, block, list(shape.maps_in(path).values()), known)


def _norm_widths(found: Probe) -> dict[Vector, str]:
    """The channels in one group of every group norm: a number, or the pinned group `width` where the config sets it."""
    counts = {name.rpartition(".")[0]: vector for name, vector in found.integers.items() if name.endswith(".num_groups")}
    widths = {}
    for module, count in counts.items():
        channels = found.tensors[f"{module}.weight"][0]
        widths[channels] = quotient(channels, count) or channels
    varied = {width for width in widths.values() if not is_constant(width)}
    names = {width: f"width{place + 1 if place else ''}" for place, width in enumerate(sorted(varied))}
    return {channels: names.get(width, str(width[0])) for channels, width in widths.items()}
