"""What can be told about a model by building it at several sizes, on the meta device, and comparing shapes.

No weight is allocated and nothing runs. One integer of the config changes at a time, so an axis is known by the list of
lengths it has at all sizes: two axes with the same list follow the same entries of the config in the same way.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raffm.errors import LabelError
from raffm.models.resnet import ResNet, ResNetConfig

Vector = tuple[int, ...]
"""One number at every size that the model was built at."""


@dataclass(frozen=True)
class Recipe:
    """How to build a model: its class, or another function of a config, and the config."""

    make: Callable[[Any], nn.Module]
    config: Any
    name: str

    def with_entry(self, key: str, value: int) -> Recipe:
        """The same with one integer of the config changed: `hidden_size`, `hidden_sizes.0`, `text_config.hidden_size`."""
        config = copy.deepcopy(self.config)
        _set_entry(config, key, value)
        return Recipe(self.make, config, self.name)

    def build(self) -> nn.Module:
        """The model on the meta device."""
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.make(self.config)


@dataclass(frozen=True)
class Build:
    """The shapes, the stored integers and the numbers of blocks of a model at one size."""

    shapes: Mapping[str, tuple[int, ...]]
    integers: Mapping[str, int]
    blocks: Mapping[str, int]


@dataclass(frozen=True)
class Map:
    """A linear map, with the lengths of its input and its output at every size."""

    module: str
    source: Vector
    target: Vector
    is_transposed: bool
    is_convolution: bool


@dataclass(frozen=True)
class Probe:
    """A model built at several sizes; `keys` are the entries of the config that change, from the second size on."""

    model: nn.Module
    recipe: Recipe
    keys: tuple[str, ...]
    tensors: Mapping[str, tuple[Vector, ...]]
    integers: Mapping[str, Vector]
    settings: Mapping[str, Vector]
    depths: Mapping[str, str]
    """The lists of blocks whose length an entry of the config sets, with that entry."""

    def maps(self) -> dict[str, Map]:
        """The linear maps and convolutions by module, in the order in which they are defined."""
        found = {}
        for name, module in self.model.named_modules(remove_duplicate=False):
            axes = self.tensors.get(f"{name}.weight", ())
            ends = _ends(module)
            if ends and len(axes) > 1:
                found[name] = Map(name, axes[ends[0]], axes[ends[1]], ends[0] < ends[1], len(axes) > 2)
        return found

    def keys_of(self, vector: Vector) -> tuple[str, ...]:
        """The entries of the config that a length depends on."""
        return tuple(key for key, length in zip(self.keys, vector[1:], strict=True) if length != vector[0])

    def stored_in(self, module: str) -> dict[str, Vector]:
        """The integers that a module stores."""
        prefix = f"{module}." if module else ""
        names = [name for name in self.integers if name.rpartition(".")[0] == module]
        return {name.removeprefix(prefix): self.integers[name] for name in names}


# -- recipes -------------------------------------------------------------------------------------------------------


def recipe_of(model_or_config: Any) -> Recipe:
    """How to build more models like this one: from a model and its config, or from a config alone."""
    if isinstance(model_or_config, nn.Module):
        config = getattr(model_or_config, "config", None)
        if not getattr(config, "__dict__", None):
            raise LabelError(
                f"{type(model_or_config).__name__} has no `config` object, so it cannot be built at other sizes. "
                "A draft needs a model class that is called with one config object."
            )
        return Recipe(type(model_or_config), config, type(model_or_config).__name__)
    if isinstance(model_or_config, ResNetConfig):
        return Recipe(ResNet, model_or_config, "ResNet")
    return _recipe_of_config(model_or_config)


def _recipe_of_config(config: Any) -> Recipe:
    if not getattr(config, "model_type", None):
        raise LabelError(f"a model or a Hugging Face config was expected, but {type(config).__name__} was given.")
    import transformers

    for architecture in getattr(config, "architectures", None) or ():
        if kind := getattr(transformers, architecture, None):
            return Recipe(kind, config, architecture)
    return Recipe(transformers.AutoModel.from_config, config, "AutoModel")


def _entries(config: Any) -> Iterator[tuple[str, int]]:
    """The positive integers of a config: its own, those in its lists, and those of the configs inside it."""
    listed = dict(vars(config))
    if isinstance(getattr(type(config), "num_labels", None), property):
        listed["num_labels"] = config.num_labels
    for name, entry in listed.items():
        if not name.startswith("_"):
            yield from _entry(name, entry)


def _entry(name: str, entry: Any) -> Iterator[tuple[str, int]]:
    if type(entry) is int and entry > 0:
        yield name, entry
    elif isinstance(entry, list | tuple) and all(type(number) is int and number > 0 for number in entry):
        yield from ((f"{name}.{place}", number) for place, number in enumerate(entry))
    elif callable(getattr(entry, "to_dict", None)):
        yield from ((f"{name}.{inner}", number) for inner, number in _entries(entry))


def _set_entry(owner: Any, key: str, value: int) -> None:
    name, _, rest = key.partition(".")
    inner = getattr(owner, name)
    if not rest:
        setattr(owner, name, value)
    elif isinstance(inner, list | tuple):
        numbers = [value if place == int(rest) else number for place, number in enumerate(inner)]
        setattr(owner, name, type(inner)(numbers))
    else:
        _set_entry(inner, rest, value)


# -- sizes ---------------------------------------------------------------------------------------------------------


_MOST_BLOCKS = 256
"""No entry above this is tried as a number of blocks."""


def probe(recipe: Recipe, depth: int | None = 2) -> Probe:
    """Build a model at several sizes; `depth` is how many blocks each list of blocks gets, None for as many as it has.

    The size that all others are compared with may differ from the one given: where another size shows more tensors
    (a projection on a shortcut), that one is the better start.
    """
    grown = _depths(recipe)
    keys = [key for key, _ in _entries(recipe.config) if key not in grown.values()]
    depths = _outermost(grown)
    for key in sorted(set(depths.values())) if depth is not None else ():
        recipe = next((other for other in _resized(recipe, key, depth or 1) if _built(other) is not None), recipe)
    return _compared(recipe, keys, depths)


def _depths(recipe: Recipe) -> dict[str, str]:
    """The lists of blocks that grow with an entry of the config, and that entry."""
    start = _measured(_first(recipe))
    found = {}
    for key, number in _entries(recipe.config):
        others = _resized(recipe, key, number + 1) if number <= _MOST_BLOCKS else []
        build = next((build for other in others if (build := _tried(other, start))), start)
        found.update({path: key for path, count in build.blocks.items() if count != start.blocks.get(path, count)})
    return found


def _resized(recipe: Recipe, key: str, count: int) -> list[Recipe]:
    """The recipe with another number of blocks: as it is, and with its lists of one word a block made to fit."""
    number = dict(_entries(recipe.config))[key]
    plain = recipe.with_entry(key, count)
    fitted = copy.deepcopy(plain.config)
    for name, entry in vars(fitted).items():
        if isinstance(entry, list | tuple) and len(entry) == number and isinstance(entry[0], str):
            setattr(fitted, name, type(entry)([*entry, *entry[-1:] * count][:count]))
    return [plain, Recipe(recipe.make, fitted, recipe.name)]


def _first(recipe: Recipe) -> nn.Module:
    try:
        return recipe.build()
    except Exception as error:
        raise LabelError(
            f"{recipe.name} could not be built on the meta device from its {type(recipe.config).__name__}: "
            f"{type(error).__name__}: {error}. A draft needs a class that is called with its config alone."
        ) from error


def _built(recipe: Recipe) -> nn.Module | None:
    """The model, or None at a size that its class refuses, in whatever way."""
    try:
        return recipe.build()
    except Exception:
        return None


def _tried(recipe: Recipe, start: Build) -> Build | None:
    """The model at another size, unless it is refused there or loses tensors."""
    model = _built(recipe)
    build = None if model is None else _measured(model)
    return build if build is not None and build.shapes.keys() >= start.shapes.keys() else None


_DIVISORS = frozenset({"head", "heads", "group", "groups"})
"""Words for entries that divide a width. A class may divide without looking at the rest, so theirs must leave none."""


def _others(recipe: Recipe, key: str) -> Iterator[Recipe]:
    """The recipe with other values for one integer of its config, the likeliest to keep every divisibility first."""
    number = dict(_entries(recipe.config))[key]
    half = number // 2 if number % 2 == 0 else 0
    sizes = [half, 1, 2 * number, 3 * number] if words(key) & _DIVISORS else [2 * number, half, 3 * number, 1]
    sizes += [number + 1, number - 1]
    return (recipe.with_entry(key, size) for size in dict.fromkeys(sizes) if size not in (0, number))


def _compared(recipe: Recipe, keys: list[str], depths: Mapping[str, str], most_starts: int = 8) -> Probe:
    model = _first(recipe)
    start = _measured(model)
    variants = {key: variant for key in keys if (variant := _variant(recipe, key, start))}
    better = _better_start(recipe, keys, start, variants) if most_starts else None
    if better is not None:
        return _compared(better, keys, depths, most_starts - 1)
    variants = {key: variant for key, variant in variants.items() if variant[1] != start}
    builds = [start, *(build for _, build in variants.values())]
    recipes = [recipe, *(other for other, _ in variants.values())]
    return Probe(
        model,
        recipe,
        tuple(variants),
        {name: tuple(zip(*(build.shapes[name] for build in builds), strict=True)) for name in start.shapes},
        _vectors([build.integers for build in builds]),
        _vectors([dict(_entries(each.config)) for each in recipes]),
        {path: key for path, key in depths.items() if path in start.blocks},
    )


def _variant(recipe: Recipe, key: str, start: Build) -> tuple[Recipe, Build] | None:
    """The model with one entry of its config changed to the first value that its class takes."""
    tried = ((other, _tried(other, start)) for other in _others(recipe, key))
    return next(((other, build) for other, build in tried if build is not None), None)


def _better_start(recipe: Recipe, keys: list[str], start: Build, variants: Mapping[str, tuple[Recipe, Build]]) -> Recipe | None:
    """A size that shows more tensors; or one where an entry can change that could not: a width of 5 has but one head."""
    richer = [other for other, build in variants.values() if build.shapes.keys() > start.shapes.keys()]
    if richer:
        return richer[0]
    for key in (key for key in keys if key not in variants and words(key) & _DIVISORS):
        for other, _ in variants.values():
            if any(_built(each) is not None for each in _others(other, key)):
                return other
    return None


def _vectors(tables: Sequence[Mapping[str, int]]) -> dict[str, Vector]:
    return {name: tuple(table[name] for table in tables) for name in tables[0] if all(name in table for table in tables)}


def _outermost(depths: Mapping[str, str]) -> dict[str, str]:
    """The lists of blocks that do not stand inside a block of another (experts do)."""
    return {path: key for path, key in depths.items() if not any(path.startswith(f"{other}.") for other in depths)}


def _measured(model: nn.Module) -> Build:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    integers, blocks = {}, {}
    for path, module in model.named_modules(remove_duplicate=False):
        stored = {name: value for name, value in vars(module).items() if type(value) is int and not name.startswith("_")}
        integers.update({f"{path}.{name}".lstrip("."): value for name, value in stored.items()})
        children = [name for name, _ in module.named_children()]
        if children and children == [str(place) for place in range(len(children))]:
            blocks[path] = len(children)
    return Build({name: tuple(tensor.shape) for name, tensor in tensors}, integers, blocks)


_ENDS = {"in_features": (1, 0), "in_channels": (1, 0), "nx": (0, 1)}
"""Which axes of a weight are its map's input and output, by an integer that the module stores."""


def _ends(module: nn.Module) -> tuple[int, int] | None:
    stored = vars(module)
    if stored.get("groups", 1) != 1:  # a grouped convolution has no axis for its whole input
        return None
    if stored.get("transposed"):
        return 0, 1
    return next((ends for name, ends in _ENDS.items() if name in stored), None)


# -- arithmetic ----------------------------------------------------------------------------------------------------


def is_constant(vector: Vector) -> bool:
    """Whether a length is the same at every size."""
    return len(set(vector)) == 1


def quotient(vector: Vector, other: Vector) -> Vector | None:
    """One length divided by another at every size, where that leaves no rest."""
    if any(right == 0 or left % right for left, right in zip(vector, other, strict=True)):
        return None
    return tuple(left // right for left, right in zip(vector, other, strict=True))


def words(name: str) -> frozenset[str]:
    """The words in a module's or an entry's own name: `k_proj` has `k` and `proj`."""
    return frozenset(re.split(r"[_\d.]+", name.lower()))
