"""One TOML file a run: read into frozen values, unknown keys refused, then turned into plain arguments.

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
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from raffm.data.examples import Dataset, Examples, Federation
from raffm.data.sources import Columns
from raffm.data.task import ImageClassification, Task, TextClassification
from raffm.devices.budget import Budget
from raffm.devices.fleet import Fleet, Tier, fleet_of
from raffm.errors import RunError
from raffm.federate import load_data
from raffm.methods import METHODS, method_of
from raffm.methods.method import Method
from raffm.models.labelled import Labelled
from raffm.models.load import Kind, trainable
from raffm.rounds.local import Local
from raffm.rounds.plan import Evaluating, Merging, Participation, Plan

USUAL: Mapping[str, Mapping[str, Any]] = {
    "cifar10": {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010), "crop": 4, "flip": True},
    "cifar100": {"mean": (0.5071, 0.4865, 0.4409), "std": (0.2673, 0.2564, 0.2762), "crop": 4, "flip": True},
}
"""How the images of well-known sets are usually normalised and augmented."""


@dataclass(frozen=True)
class DataSettings:
    """Where examples come from and how they are divided among clients. `parameters` are those of the split."""

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
class FleetSettings:
    """The clients' devices."""

    tiers: str | tuple[Mapping[str, Any], ...] = "1, 1/4, 1/16"
    redraw: bool = False


@dataclass(frozen=True)
class BackendSettings:
    """Where clients train. `workers` 0 means as many as there are cores."""

    name: str = "serial"
    workers: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise RunError(f"there cannot be {self.workers} workers. 0 means as many as there are cores.")


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

SPLIT_PARAMETERS: Mapping[str, Any] = {"alpha": float, "least": int, "classes_per_client": int, "k": int}
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
        _refuse_unknown(key, known, "the run")
        if key == "method":
            made[key] = _method(entry)
        elif key in ("rounds", "seed"):
            made[key] = _value(entry, int, key)
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
            _refuse_unknown(key, known, f"[{where}]")
            made[key] = _value(value, kinds[key], f"{where}.{key}")
    if rest and (others or rest in made):
        made[rest] = {**made.get(rest, {}), **others}
    if where == "data":
        made["parameters"] = {key: _parameter(key, value) for key, value in made.get("parameters", {}).items()}
    return kind(**made)


def _parameter(key: str, value: Any) -> Any:
    _refuse_unknown(key, SPLIT_PARAMETERS, "the split")
    return _value(value, SPLIT_PARAMETERS[key], f"data.{key}")


def _refuse_unknown(key: str, known: Mapping[str, Any], where: str) -> None:
    if key not in known:
        near = get_close_matches(key, known, 1)
        meant = f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(known)}."
        raise RunError(f"{where} has the unknown key {key!r}.{meant}")


def _value(value: Any, kind: Any, where: str) -> Any:
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


# -- making --------------------------------------------------------------------------------------------------------


def plan_of(settings: Settings) -> Plan:
    """Everything a run needs: model, data, clients, fleet and method."""
    _refuse_device(settings.backend.device)
    method = method_from(settings.method)
    fleet = fleet_from(settings.fleet)
    data = data_of(settings)
    model = model_for(settings, data.dataset)
    return Plan(
        server=Labelled.of(model, settings.model.table or None),
        method=method,
        task=task_of(settings, data.dataset, model),
        data=_on(data, settings.backend.device),
        fleet=fleet,
        rounds=settings.rounds,
        seed=settings.seed,
        local=settings.local,
        participation=settings.participation,
        merging=settings.merging,
        evaluating=settings.evaluate,
    )


def _refuse_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise RunError(f"the device {name!r} cannot be used: {str(error).splitlines()[0]}") from None


def method_from(content: Mapping[str, Any]) -> Method:
    """A method by name, with switches of the right kinds."""
    switches = {key: entry for key, entry in content.items() if key != "name"}
    kinds = get_type_hints(METHODS[content["name"]]) if content["name"] in METHODS else {}
    checked = {key: _value(entry, kinds[key], f"method.{key}") if key in kinds else entry for key, entry in switches.items()}
    return method_of(content["name"], **checked)


def _clients(data: DataSettings) -> int | None:
    return None if data.split == "column" and data.clients == DataSettings.clients else data.clients


def data_of(settings: Settings) -> Federation:
    """The data set, with a part held out for validation, divided among clients."""
    data = settings.data
    return load_data(
        data.source,
        clients=_clients(data),
        split=data.split,
        seed=settings.seed,
        validation=data.validation,
        columns=Columns(data.input or None, data.label or None, data.owner or None),
        image_size=data.image_size or None,
        tokenizer=_tokenizer(data.tokenizer or settings.model.name),
        max_length=data.max_length,
        **data.parameters,
    )


class _tokenizer:
    """The model's tokenizer, loaded when a text asks for it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *texts: Any, **options: Any) -> Any:
        return self._made()(*texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made(), name)

    def _made(self) -> Any:
        from transformers import AutoTokenizer

        if "tokenizer" not in self.__dict__:
            try:
                self.__dict__["tokenizer"] = AutoTokenizer.from_pretrained(self.name)
            except (OSError, ValueError):
                raise RunError(
                    f"no tokenizer was found for {self.name!r}. Texts need one: give `data.tokenizer`, a folder or a name."
                ) from None
        return self.__dict__["tokenizer"]


def kind_of(dataset: Dataset) -> Kind:
    """Whether a data set holds images or texts."""
    return "image" if "pixel_values" in dataset.train.inputs else "text"


def model_for(settings: Settings, dataset: Dataset) -> Any:
    """The model, with a head for the data set's classes."""
    shape = dataset.train.inputs["pixel_values"].shape[1:] if kind_of(dataset) == "image" else ()
    model = trainable(
        settings.model.name, kind_of(dataset), len(dataset.classes), tuple(shape), settings.seed, settings.model.config
    )
    return model.to(settings.backend.device)


def task_of(settings: Settings, dataset: Dataset, model: Any) -> Task:
    """Texts, or images with the normalisation that is given, that the model was pretrained with, or that is usual."""
    if kind_of(dataset) == "text":
        return TextClassification()
    data = settings.data
    channels, _, side = dataset.train.inputs["pixel_values"].shape[1:]
    plain = {"mean": (0.5,) * channels, "std": (0.5,) * channels, "crop": 0, "flip": False}
    usual = {**plain, **USUAL.get(Path(data.source).name, {}), **_pretrained_with(settings.model.name)}
    wanted = getattr(model.config, "image_size", side)
    return ImageClassification(
        mean=data.mean or usual["mean"],
        std=data.std or usual["std"],
        crop=usual["crop"] if data.crop is None else data.crop,
        flip=usual["flip"] if data.flip is None else data.flip,
        size=wanted if isinstance(wanted, int) and wanted != side else 0,
    )


def _pretrained_with(name: str) -> dict[str, tuple[float, ...]]:
    """The normalisation that a pretrained model's image processor states; nothing where there is none."""
    if name in ("vit-small", "resnet18") or name.endswith(":tiny"):
        return {}
    from transformers import ImageProcessingMixin

    try:
        stated, _ = ImageProcessingMixin.get_image_processor_dict(name)
    except OSError:
        return {}
    found = {"mean": stated.get("image_mean"), "std": stated.get("image_std")}
    return {key: tuple(values) for key, values in found.items() if values}


def fleet_from(settings: FleetSettings) -> Fleet:
    """A fleet by name, or from a list of tiers."""
    if isinstance(settings.tiers, str):
        return fleet_of(settings.tiers, settings.redraw)
    return Fleet(tuple(_tier(entry) for entry in settings.tiers), settings.redraw)


def _tier(entry: Mapping[str, Any]) -> Tier:
    limits = {key: value for key, value in entry.items() if key.startswith("max_")}
    known = {field.name: field for field in fields(Tier)}
    for key in entry:
        if key not in limits:
            _refuse_unknown(key, known, "a tier of the fleet")
    if "size" not in entry:
        raise RunError(f"a tier of the fleet needs a `size`: {dict(entry)!r}.")
    for key in limits:
        _refuse_unknown(key, {field.name: field for field in fields(Budget)}, "a tier of the fleet")
    kinds = get_type_hints(Tier)
    limits = {key: _value(value, int, f"fleet.{key}") for key, value in limits.items()}
    plain = {key: _value(value, kinds[key], f"fleet.{key}") for key, value in entry.items() if key not in limits}
    return Tier(**{**plain, "budget": Budget(**limits) if limits else None})


def _on(data: Federation, device: str) -> Federation:
    """The data on the device where it is read; the lengths of texts stay on the CPU."""
    if device == "cpu":
        return data

    def moved(examples: Examples) -> Examples:
        inputs = {name: tensor if name == "lengths" else tensor.to(device) for name, tensor in examples.inputs.items()}
        return Examples(inputs, examples.labels.to(device))

    dataset = data.dataset
    validation = None if dataset.validation is None else moved(dataset.validation)
    return replace(data, dataset=replace(dataset, train=moved(dataset.train), test=moved(dataset.test), validation=validation))
