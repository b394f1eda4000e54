"""A first table for a model type that has none, drafted by building the model at several sizes.

A draft is never to be trusted: shapes cannot tell a query from a residual map. What rests on more than shapes is marked
`# guess:` on its line; a person reads those lines, and `raffm verify` proves the table by running the model.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from raffm.errors import LabelError
from raffm.models import table as tables
from raffm.models.draft.outline import Naming, Outline, Stack, is_known, named, outline
from raffm.models.draft.probe import Map, Probe, Recipe, Vector, probe, quotient, recipe_of
from raffm.models.label import layout_of


def draft(model_or_config: Any) -> str:
    """The text of a table for a model, or for a config of Hugging Face or of our own ResNet.

    Nothing is allocated: the class is called with changed configs on the meta device. A model is only asked for its
    class and its config.
    """
    recipe = recipe_of(model_or_config)
    text = _written(probe(recipe))
    if _misfit(recipe, text):  # blocks may differ beyond the second one
        text = _written(probe(recipe, depth=None))
    problem = _misfit(recipe, text)
    return f"# This draft does not fit the model yet: {problem}\n{text}" if problem else text


def _misfit(recipe: Recipe, text: str) -> str:
    """What is wrong with a table for the very model that it was drafted for; empty where it fits."""
    try:
        layout_of(recipe.build(), tables.read(text))
    except LabelError as error:
        return " ".join(str(error).split())
    return ""


def _written(found: Probe) -> str:
    naming = named(outline(found))
    tensors = _tensor_sections(naming)
    sections = [
        _introduction(found),
        _section("depth", _depth_lines(naming)),
        _section("groups", (line for line in _group_lines(naming) if _is_used(line.key, tensors))),
        _section("ties", _tie_lines(naming)),
        *_join_sections(naming.shape),
        *tensors,
        _section("attributes", _attribute_lines(naming)),
        _section("inputs", _input_lines(found)),
        _section("outputs", _output_lines(naming)),
        _section("space", _space_lines(naming)),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


# -- tensors -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line:
    """One line of a section."""

    key: str
    value: str
    guess: str = ""

    def __str__(self) -> str:
        key = self.key if re.fullmatch(r"\w+", self.key) else f'"{self.key}"'
        return f"{key} = {self.value}" + (f"  # guess: {self.guess}" if self.guess else "")


def _tensor_sections(naming: Naming) -> list[str]:
    prefix = naming.shape.prefix
    lines = list(_general_lines(naming))
    base = [_Line(line.key.removeprefix(prefix), line.value, line.guess) for line in lines if line.key.startswith(prefix)]
    heads = [line for line in lines if not line.key.startswith(prefix)]
    return [_section("tensors", base), _section("heads", heads)]


def _general_lines(naming: Naming) -> Iterator[_Line]:
    """One line for all blocks where their labels agree; the first block gets its own where it differs."""
    cases: dict[str, list[_Line]] = {}
    for line in _module_lines(naming):
        cases.setdefault(naming.shape.template(line.key)[0], []).append(line)
    for template, lines in cases.items():
        yield from _merged(naming.shape, template, lines)


def _merged(shape: Outline, template: str, lines: list[_Line]) -> Iterator[_Line]:
    stack = next((stack for stack in shape.stacks if template.startswith(f"{stack.path}.{{")), None)
    places = [shape.template(line.key)[1][stack.letter] if stack else 1 for line in lines]
    first = [line for line, place in zip(lines, places, strict=True) if place == 0]
    others = [line for line, place in zip(lines, places, strict=True) if place > 0]
    is_alike = {line.value for line in first} == {line.value for line in others}
    if stack is None or is_alike or all(shape.count(path) == 1 for path in stack.lists):
        yield from _agreed(shape, template, lines)
        return
    yield from _agreed(shape, *_for_first_block(stack, template, first, is_alone=not others))
    yield from _agreed(shape, template, others)


def _for_first_block(stack: Stack, template: str, lines: list[_Line], is_alone: bool) -> tuple[str, list[_Line]]:
    """The lines of all first blocks, with their number written out."""
    zero = (f"{{{stack.letter}}}", "0")
    note = "only block 0 has this; it may serve all blocks" if is_alone and not stack.stage_letter else ""
    return template.replace(*zero), [_Line(each.key, each.value.replace(*zero), each.guess or note) for each in lines]


def _agreed(shape: Outline, template: str, lines: list[_Line]) -> Iterator[_Line]:
    """One line under the template, or where labels differ one under each full name."""
    if lines and len({line.value for line in lines}) == 1:
        yield _Line(template, lines[0].value, lines[0].guess)
        return
    for line in lines:
        yield _Line(line.key, tables.fill(line.value, shape.template(line.key)[1], {}), line.guess)


def _module_lines(naming: Naming) -> Iterator[_Line]:
    """A line for every module whose tensors follow its weight, else one for each tensor."""
    guesses = naming.found.guesses
    modules: dict[str, dict[str, str]] = {}
    for name in naming.shape.probe.tensors:
        module, _, leaf = name.rpartition(".")
        modules.setdefault(module, {})[leaf] = _label(naming, module, leaf)
    for module, labels in modules.items():
        weight = labels.get("weight", "")
        target = (weight.removesuffix(" transposed").partition(" -> ")[2] or weight).partition(",")[0]
        if weight and all(label in (target, "scalar") for leaf, label in labels.items() if leaf != "weight"):
            yield _Line(module, f'"{weight}"', guesses.get(module, ""))
        else:
            names = {f"{module}.{leaf}".lstrip("."): label for leaf, label in labels.items()}
            yield from (_Line(name, f'"{label}"', guesses.get(module, "")) for name, label in names.items())


def _label(naming: Naming, module: str, leaf: str) -> str:
    name = f"{module}.{leaf}".lstrip(".")
    axes = naming.shape.probe.tensors[name]
    block = naming.shape.block_of(name)
    source, target = naming.findings[block].ends.get(module, (None, None)) if block else (None, None)
    linear = naming.shape.maps.get(module)
    if linear is None or leaf != "weight":
        texts = [naming.axis(module, axis, target if len(axes) == 1 else None) for axis in axes]
        return ", ".join(texts) or "scalar"
    ends = f"{naming.axis(module, linear.source, source)} -> {naming.axis(module, linear.target, target)}"
    rest = ", ".join([ends, *(naming.axis(module, axis) for axis in axes[2:])])
    return rest + (" transposed" if linear.is_transposed else "")


# -- the other sections --------------------------------------------------------------------------------------------


def _section(title: str, lines: Iterator[_Line] | list[_Line]) -> str:
    written = list(dict.fromkeys(map(str, lines)))
    return "\n".join([f"[{title}]", *written]) if written else ""


def _introduction(found: Probe) -> str:
    family = getattr(found.recipe.config, "model_type", "") or found.recipe.name.lower()
    return (
        f"# A draft, made by building {found.recipe.name} at {len(found.keys) + 1} sizes and comparing shapes.\n"
        "# Check the lines that are marked `guess`, name what has no good name, then prove the table by running the model:\n"
        "#     raffm verify MODEL --table FILE\n"
        f'family = "{family}"'
    )


def _depth_lines(naming: Naming) -> Iterator[_Line]:
    shape = naming.shape
    for stack in shape.stacks:
        path = stack.path.removeprefix(shape.prefix)
        if _is_first_special(shape, stack):
            yield _Line(stack.name, f'{{ path = "{path}", required = [0] }}', "block 0 has tensors that the others lack")
        else:
            yield _Line(stack.name, f'{{ path = "{path}" }}')


def _is_first_special(shape: Outline, stack: Stack) -> bool:
    """Whether the first block of a list has tensors that the next one lacks."""
    for path in stack.lists:
        inner = [
            {name.removeprefix(block) for name in shape.probe.tensors if name.startswith(block)}
            for block in (f"{path}.0.", f"{path}.1.")
        ]
        if shape.count(path) > 1 and inner[0] > inner[1]:
            return True
    return False


def _group_lines(naming: Naming) -> Iterator[_Line]:
    found = naming.found
    for vector, name in naming.main.items():
        if _is_layer_normed(naming.shape, vector):
            yield _Line(naming.everywhere(name), '{ approximate = "layer norm statistics change" }')
    for name, base in found.fibres.items():
        pin = ", pinned = true" if name in found.pinned else ""
        yield _Line(name, f'{{ per = "{base}"{pin} }}', found.pinned.get(name, ""))
    for name, why in found.pinned.items():
        if name not in found.fibres:
            yield _Line(name, "{ pinned = true }", why)
    for vector, name in naming.classes.items():
        if vector not in naming.main and "*" not in name:
            keys = " and ".join(naming.shape.probe.keys_of(vector))
            yield _Line(name, "{ pinned = true }", "" if is_known(name) else f"follows {keys} of the config")
    yield from (_Line(name, "{ pinned = true }") for name in naming.norm_widths.values() if not name.isdigit())


def _is_layer_normed(shape: Outline, vector: Vector) -> bool:
    """Whether some norm without running statistics and without groups runs over a length."""
    tensors = shape.probe.tensors
    norms = [name.rpartition(".")[0] for name, axes in tensors.items() if name.endswith(".weight") and axes == (vector,)]
    return any(f"{each}.running_mean" not in tensors and f"{each}.num_groups" not in shape.probe.integers for each in norms)


def _is_used(group: str, sections: list[str]) -> bool:
    return any(re.search(rf"(?<![\w.]){re.escape(group)}(?![\w.])", section) for section in sections)


def _tie_lines(naming: Naming) -> Iterator[_Line]:
    for name in naming.found.fibres:
        start, _, last = name.rpartition(".")
        if last == "vo":
            yield _Line(name, f'"{start}.qk"', "query, key and value are cut into heads of one size")


def _join_sections(shape: Outline) -> Iterator[str]:
    """Stages whose first block may project what enters it: without that, they add onto the axis of the stage before."""
    for stack in shape.stacks:
        if shortcut := shape.shortcut(stack):
            name, letter = stack.stages, stack.stage_letter
            yield _section("names", [_Line(f"{name}.-1.out", f'"{stack.stem}"')])
            groups = f'["{name}.{{{letter}-1}}.out", "{name}.{{{letter}}}.out"]'
            unless = f'"{shortcut.removeprefix(shape.prefix)}.weight"'
            yield f"[{_section('join', [_Line('groups', groups), _Line('unless', unless)])}".replace("]", "]]", 1)


def _attribute_lines(naming: Naming) -> Iterator[_Line]:
    shape, prefix = naming.shape, naming.shape.prefix
    stored = {**naming.found.attributes, **_map_attributes(naming), **_norm_attributes(naming), **_places(shape)}
    for name, text in stored.items():
        yield _Line(shape.template(name)[0].removeprefix(prefix), f'"{text}"')
    for stack in shape.stacks:
        if "." not in stack.key and len(stack.lists) == 1:
            yield _Line(f"config.{stack.key}", f'"{stack.name}"')


def _map_attributes(naming: Naming) -> dict[str, str]:
    """The widths that maps store under names of their own, which only a table can bring up to date."""
    attributes = {}
    for module in naming.shape.maps:
        source, _, target = _label(naming, module, "weight").removesuffix(" transposed").partition(" -> ")
        for name, text in (("nx", source), ("nf", target)):
            if f"{module}.{name}" in naming.shape.probe.integers:
                attributes[f"{module}.{name}"] = text
    return attributes


def _norm_attributes(naming: Naming) -> dict[str, str]:
    """The integers of group norms: how many groups there are, and how wide one is where the model stores it."""
    found = naming.shape.probe
    attributes = {}
    for name in found.integers:
        module, _, last = name.rpartition(".")
        if last == "num_groups":
            weight = _label(naming, module, "weight")
            attributes[name], _, width = weight.rpartition("*")
            counted = quotient(found.tensors[f"{module}.weight"][0], found.integers[name])
            stored = {own: width for own, vector in found.stored_in("").items() if vector == counted}
            attributes.update({} if width.isdigit() else stored)
    return attributes


def _places(shape: Outline) -> dict[str, str]:
    """The integers that hold the place of a block among the others."""
    found: dict[str, str] = {}
    for stack in shape.stacks:
        for path in stack.lists:
            blocks = [f"{path}.{place}." for place in range(shape.count(path))]
            inside = [name.removeprefix(blocks[0]) for name in shape.probe.integers if name.startswith(blocks[0])]
            for name in inside if len(blocks) > 1 else ():
                values = [shape.probe.integers.get(f"{block}{name}", (-1,))[0] for block in blocks]
                if values == list(range(len(blocks))):
                    found |= {f"{block}{name}": f"#{stack.name}" for block in blocks}
    return found


def _input_lines(found: Probe) -> Iterator[_Line]:
    model, config = found.model, found.recipe.config
    name = getattr(model, "main_input_name", "") or next(iter(inspect.signature(model.forward).parameters))
    if name == "pixel_values":
        channels = next((key for key in ("num_channels", "channels") if key in found.settings), "num_channels = 3")
        size = "image_size" if getattr(config, "image_size", None) else "image_size = 224"
        yield _Line(name, f'["{channels}", "{size}", "{size}"]', "the config does not say" if "=" in channels + size else "")
    elif name == "input_ids":
        yield _Line(name, '["tokens < vocab_size"]')
    if getattr(config, "is_encoder_decoder", False):
        yield _Line("decoder_input_ids", '["tokens < vocab_size"]')


def _output_lines(naming: Naming) -> Iterator[_Line]:
    shape = naming.shape
    outside = [each for name, each in shape.maps.items() if not shape.block_of(name)]
    if outside and outside[-1].target not in naming.main:
        last = outside[-1]
        yield _Line("logits", f'"{naming.axis(last.module, last.target)}"', f"what `{last.module}` gives")
    if getattr(shape.probe.model, "base_model_prefix", ""):  # Hugging Face models name their other outputs alike
        yield from _hidden_lines(naming, [each for each in outside if "pooler" in each.module.split(".")])


def _hidden_lines(naming: Naming, poolers: list[Map]) -> Iterator[_Line]:
    """What the blocks give, and what is pooled from it."""
    for stack in naming.shape.stacks[-1:]:
        main = naming.shape.main.get(stack.lists[-1])
        if main is not None and naming.main[main].endswith("residual"):
            names = ("last_hidden_state", "encoder_last_hidden_state")
            is_double = getattr(naming.shape.probe.recipe.config, "is_encoder_decoder", False)
            yield from (_Line(name, f'"{naming.main[main]}"') for name in names[: 1 + is_double])
            yield from (_Line("pooler_output", f'"{naming.axis(each.module, each.target)}"') for each in poolers)
        elif main is not None:
            label = f'{{ axis = {_channel_axis(naming.shape)}, label = "{naming.axis("", main)}" }}'
            yield from (_Line(name, label, "which axis holds the channels") for name in ("last_hidden_state", "pooler_output"))


def _channel_axis(shape: Outline) -> int:
    """Where the channels stand in what the blocks give: second where they convolve images, else last."""
    is_convolving = any(len(axes) > 3 for name, axes in shape.probe.tensors.items() if shape.block_of(name))
    return 1 if is_convolving else -1


def _space_lines(naming: Naming) -> Iterator[_Line]:
    patterns = dict.fromkeys(re.sub(r"\{\w\}", "*", name) for name in naming.found.cut)
    if patterns:
        yield _Line("cut", "[" + ", ".join(f'"{pattern}"' for pattern in patterns) + "]")
