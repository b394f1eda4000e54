"""One TOML file a run: read into frozen values, unknown keys refused. `prepare.py` turns them into a plan.

method = "fiarse"                 # or a table [method] with `name` and its switches
rounds = 100

[model]
name = "resnet18"                 # or family:tiny, a family, a folder, a Hugging Face name
norm = "group"                    # everything else changes the model's own config

[data]
source = "cifar10"
split = "dirichlet-balanced"
alpha = 0.3
clients = 100

[fleet]
tiers = "quarters"                # or a list of { size = 0.25, share = 30, speed = 1e10, bandwidth = 1e6 }
"""

from __future__ import annotations

import collections.abc
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from raffm.errors import RunError
from raffm.models.rounding import Precision
from raffm.rounds.local import Local
from raffm.rounds.plan import Evaluating, Merging, Participation


@dataclass(frozen=True)
class DataSettings:
    """Where examples come from and how they are divided among clients. `parameters` are those of the split.

    `classes` are the names of the classes, in their order, for nodes that have not all of them among their own data.
    """

    source: str = "digits"
    split: str = "iid"
    clients: int = 30
    validation: float = 0.1
    image_size: int = 0
    max_length: int = 128
    tokenizer: str = ""
    input: str = ""
    label: str = ""
    owner: str = ""
    pair: str = ""
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    crop: int | None = None
    flip: bool | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSettings:
    """Which model, and what of its config is changed."""

    name: str = "vit-small"
    table: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoraSettings:
    """Adapters beside frozen weights: their rank, 0 for none, and `targets`, the last names of the layers that get one."""

    rank: int = 0
    alpha: float = 0.0
    targets: tuple[str, ...] = ()
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise RunError(f"adapters have a rank of at least 1, or 0 for none, not {self.rank!r}.")


@dataclass(frozen=True)
class FleetSettings:
    """The clients' devices."""

    tiers: str | tuple[Mapping[str, Any], ...] = "1, 1/4, 1/16"
    redraw: bool = False


@dataclass(frozen=True)
class BackendSettings:
    """Where clients train, and in which precision: "float32", "bfloat16", or on graphs "tf32", elsewhere float32.

    `workers` 0 means as many as there are cores. Of the captured backend: `lanes` clients run at a time (0: all of a
    round), with the channels of images last or first.
    """

    name: str = "serial"
    workers: int = 0
    device: str = "cpu"
    lanes: int = 0
    precision: Precision = "float32"
    channels_last: bool = True

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise RunError(f"there cannot be {self.workers} workers. 0 means as many as there are cores.")
        if self.precision not in get_args(Precision):
            raise RunError(f"backend.precision is float32, tf32 or bfloat16, not {self.precision!r}.")
        if self.lanes < 0:
            raise RunError(f"there cannot be {self.lanes} lanes. 0 means as many as a round has clients.")


@dataclass(frozen=True)
class SaveSettings:
    """How often a run is saved, in rounds."""

    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise RunError(f"a run is saved every {self.every!r} rounds; give at least 1.")


@dataclass(frozen=True)
class Settings:
    """A whole run."""

    method: Mapping[str, Any] = field(default_factory=lambda: {"name": "raffm"})
    rounds: int = 20
    seed: int = 0
    model: ModelSettings = field(default_factory=ModelSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    data: DataSettings = field(default_factory=DataSettings)
    fleet: FleetSettings = field(default_factory=FleetSettings)
    local: Local = field(default_factory=Local)
    participation: Participation = field(default_factory=Participation)
    merging: Merging = field(default_factory=Merging)
    evaluate: Evaluating = field(default_factory=Evaluating)
    backend: BackendSettings = field(default_factory=BackendSettings)
    save: SaveSettings = field(default_factory=SaveSettings)

    def to_json(self) -> dict[str, Any]:
        """Plain values, as results and checkpoints hold them; what is not set is left out."""
        return {key: _set(entry) if isinstance(entry, dict) else entry for key, entry in asdict(self).items()}


def _set(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if value is not None}


_OPEN = {"model": "config", "data": "parameters"}
"""Sections whose unknown keys belong to somebody else: the model's config, the split."""

SPLIT_PARAMETERS: Mapping[str, Any] = {"alpha": float, "least": int, "classes_per_client": int, "k": int, "tests": str}
"""What splits may be given, and of which kind."""


# -- reading -------------------------------------------------------------------------------------------------------


def read_file(path: str | Path) -> dict[str, Any]:
    """The content of a run's TOML file."""
    path = Path(path)
    if not path.is_file():
        raise RunError(f"there is no file {str(path)!r}.")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RunError(f"{str(path)!r} is not valid TOML: {error}.") from None


def read_settings(content: Mapping[str, Any]) -> Settings:
    """A run from plain values; unknown keys and values of the wrong kind are refused."""
    known = {entry.name: entry for entry in fields(Settings)}
    kinds = get_type_hints(Settings)
    made: dict[str, Any] = {}
    for key, entry in content.items():
        refuse_unknown(key, known, "the run")
        if key == "method":
            made[key] = _method(entry)
        elif key in ("rounds", "seed"):
            made[key] = checked(entry, int, key)
        else:
            made[key] = _section(kinds[key], entry, key)
    return Settings(**made)


def _method(entry: Any) -> dict[str, Any]:
    content = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(content, Mapping) or not isinstance(content.get("name"), str):
        raise RunError(f"`method` is a name, or a table with a `name` and switches, but was given {entry!r}.")
    return dict(content)


def _section(kind: type[Any], entry: Any, where: str) -> Any:
    """A frozen value from a table."""
    if not isinstance(entry, Mapping):
        raise RunError(f"`{where}` is a table of settings, but was given {entry!r}.")
    known = {field.name: field for field in fields(kind)}
    kinds = get_type_hints(kind)
    rest = _OPEN.get(where, "")
    made: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in entry.items():
        if rest and key not in known and (where == "model" or key in SPLIT_PARAMETERS):
            others[key] = value
        else:
            refuse_unknown(key, known, f"[{where}]")
            made[key] = checked(value, kinds[key], f"{where}.{key}")
    if rest and (others or rest in made):
        made[rest] = {**made.get(rest, {}), **others}
    if where == "data":
        made["parameters"] = {key: _parameter(key, value) for key, value in made.get("parameters", {}).items()}
    return kind(**made)


def _parameter(key: str, value: Any) -> Any:
    refuse_unknown(key, SPLIT_PARAMETERS, "the split")
    return checked(value, SPLIT_PARAMETERS[key], f"data.{key}")


def refuse_unknown(key: str, known: Mapping[str, Any], where: str) -> None:
    """An unknown key is refused, with the nearest known one."""
    if key not in known:
        near = get_close_matches(key, known, 1)
        meant = f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(known)}."
        raise RunError(f"{where} has the unknown key {key!r}.{meant}")


def checked(value: Any, kind: Any, where: str) -> Any:
    """A value of the kind that a field has; whole numbers will do for others, lists become tuples."""
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for option in options:
        made = _fitted(value, option)
        if made is not None:
            return made
    raise RunError(f"`{where}` is {value!r}, which is not {' or '.join(_words(option) for option in options)}.")


def _fitted(value: Any, kind: Any) -> Any:
    """The value as a kind, or None where it is of another."""
    origin = get_origin(kind) or kind
    if origin is tuple and isinstance(value, list | tuple):
        inner = get_args(kind)
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
        made = [_fitted(entry, each) for entry, each in zip(value, kinds, strict=False)]
        return tuple(made) if len(value) == len(kinds) and all(entry is not None for entry in made) else None
    if origin is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if origin is int and isinstance(value, bool):
        return None
    expected = str if origin is Literal else Mapping if origin in (dict, Mapping, collections.abc.Mapping) else origin
    return value if isinstance(expected, type) and isinstance(value, expected) else None


def _words(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Literal: "a text"}
    origin = get_origin(kind) or kind
    if origin is tuple:
        inner = get_args(kind)
        return f"a list, each entry of it {_words(inner[0])}" if inner[-1] is Ellipsis else f"a list of {len(inner)} numbers"
    return words.get(origin, "a table" if origin is not type(None) else "left out")
