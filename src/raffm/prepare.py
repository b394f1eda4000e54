"""From settings to a plan: the model, the data, the clients and the method that they name, loaded and made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import nn

from raffm.data import glue
from raffm.data.answers import answering
from raffm.data.examples import Dataset, Examples, Federation
from raffm.data.sources import Columns, load
from raffm.data.task import ImageClassification, LanguageModelling, Task, TextClassification, TextRegression, kind_of
from raffm.data.text import Bytes, agree_on_padding
from raffm.devices.budget import Budget
from raffm.devices.fleet import Fleet, Tier, fleet_of, tier_of
from raffm.errors import RunError
from raffm.federate import Make, Trained, backend_of, captured_or_serial, load_data, run_plan
from raffm.libraries import library
from raffm.methods import EVERY, method_of
from raffm.methods.method import Method
from raffm.models.files import read_json
from raffm.models.labelled import Labelled
from raffm.models.load import WRITERS, has_decoder, place_of, trainable
from raffm.models.lora import with_lora
from raffm.rounds import checkpoint
from raffm.rounds.average import Average
from raffm.rounds.checkpoint import Saved
from raffm.rounds.loop import Watcher
from raffm.rounds.plan import Plan
from raffm.settings import BackendSettings, DataSettings, FleetSettings, Settings, checked, read_settings, refuse_unknown
from raffm.simulate.sheet import Style

NEEDS_TRANSFORMERS = RunError("a pretrained model needs transformers: pip install 'raffm[transformers]'.")

USUAL: Mapping[str, Mapping[str, Any]] = {
    "cifar10": {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010), "crop": 4, "flip": True},
    "cifar100": {"mean": (0.5071, 0.4865, 0.4409), "std": (0.2673, 0.2564, 0.2762), "crop": 4, "flip": True},
}
"""How the images of well-known sets are usually normalised and augmented."""


def plan_of(settings: Settings) -> Plan:
    """Everything a run needs: model, data, clients, fleet and method."""
    device = device_of(settings.backend)
    _refuse_device(device)
    method = method_from(settings.method)
    fleet = fleet_from(settings.fleet)
    data = data_of(settings)
    model = model_for(settings, data.dataset)
    return Plan(
        server=Labelled.of(model, settings.model.table or None),
        method=method,
        task=task_of(settings, data.dataset, model),
        data=on_device(data, device),
        fleet=fleet,
        rounds=settings.rounds,
        seed=settings.seed,
        local=settings.local,
        participation=settings.participation,
        merging=settings.merging,
        evaluating=settings.evaluate,
    )


def opened(place: Path, data: str | None = None, sizes: tuple[float, ...] = (), is_last: bool = False) -> tuple[Plan, int]:
    """A trained model and its data as a plan, and the rounds that it was trained for.

    `place` is a run's folder, or with `data` any pretrained classifier, whose submodels are RaFFM's. Of a run with an
    average that is what is opened, unless `is_last` asks for the last model.
    """
    if data is None or (place / "checkpoint").is_dir():
        plan, saved = reopened(place, sizes, data, is_last)
        return plan, saved.round
    settings = read_settings({"model": {"name": str(place)}, "data": {"source": data}})
    settings = replace(settings, evaluate=replace(settings.evaluate, sizes=sizes))
    plan = plan_of(settings)
    _refuse_another_head(str(place), plan.data.dataset)
    agree_on_padding(plan.server.model, plan.data.dataset.train.inputs)
    return plan, 0


def tokenizer_at(place: Path) -> Any:
    """What a run's texts, or those of a pretrained model, are read with; loaded when it is used."""
    if not (place / "checkpoint").is_dir():
        return _tokenizer(str(place))
    settings = read_settings(read_json(place / "checkpoint" / "results.json")["run"])  # no weights are read for it
    return _tokenizer(settings.data.tokenizer or settings.model.name)


def _refuse_another_head(name: str, dataset: Dataset) -> None:
    """A head that was made for these data just now has learnt nothing."""
    names = _classes_in(name)
    if names is None or len(names) != len(dataset.classes):
        has = "no head for classes" if names is None else f"{len(names)} classes"
        raise RunError(
            f"the model {name!r} has {has}, and {dataset.name} {len(dataset.classes)}: its head would be new. Train it "
            "first (raffm train), or give data of its classes."
        )
    if set(names) == set(dataset.classes) and names != list(dataset.classes):
        raise RunError(f"{name!r} has the classes {', '.join(names)}, and {dataset.name} the same in another order.")


def _classes_in(name: str) -> list[str] | None:
    """The names of the classes that a pretrained model tells apart; None where it has no such head."""
    if (Path(place_of(name)) / "config.json").is_file():
        content = read_json(Path(place_of(name)) / "config.json")
        if "classes" in content:  # our own ResNet
            return [str(place) for place in range(content["classes"])]
    config = library("transformers", NEEDS_TRANSFORMERS).AutoConfig.from_pretrained(place_of(name))
    if not any(each.endswith("Classification") for each in config.architectures or ()):
        return None
    return [str(config.id2label[place]) for place in range(config.num_labels)]


def reopened(folder: Path, sizes: tuple[float, ...] = (), data: str | None = None, is_last: bool = False) -> tuple[Plan, Saved]:
    """The plan of a run that was saved, with the weights it had then, or their average, and what was saved.

    `sizes` are to be served, if given; `data` takes the place of the run's.
    """
    place = folder / "checkpoint"
    saved = checkpoint.load(place, identity=None)
    _refuse_made_in_python(saved.results.run, folder)
    settings = read_settings(saved.results.run)
    if sizes:
        settings = replace(settings, evaluate=replace(settings.evaluate, sizes=sizes))
    given = settings if data is None else replace(settings, data=replace(settings.data, source=data))
    plan = plan_of(given)
    if data is not None:  # inputs are made, and outputs judged, as in training
        plan = replace(plan, task=task_of(settings, plan.data.dataset, plan.server.model))
    checkpoint.restore(saved, plan.server, place)
    if saved.average and not is_last:
        Average(plan.decay, dict(saved.average)).fill(plan.server)
    agree_on_padding(plan.server.model, plan.data.dataset.train.inputs)
    return plan, saved


def _refuse_made_in_python(run: Mapping[str, Any], folder: Path) -> None:
    """A run says which model and data it had only where settings named them."""
    if not {"model", "data"} <= set(run):
        raise RunError(
            f"{str(folder)!r} was trained from Python, with a model and data that have no name, so they cannot be made again. "
            "Its submodels are in `submodels` (raffm.load_submodel). To search or export a run, train it by `raffm train`."
        )


def run_as(settings: Settings, plan: Plan, folder: Path, resume: bool, watcher: Watcher | None) -> Trained:
    """Run the plan of settings where and as they say."""
    return run_plan(
        plan,
        backend=_backend(settings.backend),
        folder=folder,
        save_every=settings.save.every,
        resume=resume,
        settings=settings.to_json(),
        watcher=watcher,
    )


def device_of(settings: BackendSettings) -> str:
    """Where model and data go: graphs need a GPU, where there is one."""
    if settings.name != "captured":
        return settings.device
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # queues for clients side by side; read when CUDA starts
    return "cuda" if settings.device == "cpu" and torch.cuda.is_available() else settings.device


def _backend(settings: BackendSettings) -> Make:
    if settings.name != "captured":
        return lambda plan: backend_of(settings.name, plan, settings.workers or None, settings.precision)
    style = Style(settings.precision, settings.channels_last)
    return lambda plan: captured_or_serial(plan, settings.lanes, style)


def _refuse_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise RunError(f"the device {name!r} cannot be used: {str(error).splitlines()[0]}") from None


def method_from(content: Mapping[str, Any]) -> Method:
    """A method by name, with switches of the right kinds."""
    switches = {key: entry for key, entry in content.items() if key != "name"}
    kinds = get_type_hints(EVERY[content["name"]]) if content["name"] in EVERY else {}
    fitting = {key: checked(entry, kinds[key], f"method.{key}") if key in kinds else entry for key, entry in switches.items()}
    return method_of(content["name"], **fitting)


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
        **_reading(settings),
        **data.parameters,
    )


def dataset_of(settings: Settings, source: str) -> Dataset:
    """A data set as it is, read as the run reads its own."""
    return load(source, **_reading(settings))


def _reading(settings: Settings) -> dict[str, Any]:
    data = settings.data
    return {
        "columns": Columns(data.input or None, data.label or None, data.owner or None, data.pair or None),
        "image_size": data.image_size or None,
        "tokenizer": _tokenizer(data.tokenizer or settings.model.name),
        "max_length": data.max_length,
        "is_written": has_decoder(settings.model.name),
    }


class _tokenizer:
    """The model's tokenizer, loaded when a text asks for it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *texts: Any, **options: Any) -> Any:
        return self._made()(*texts, **options)

    def __len__(self) -> int:
        return len(self._made())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made(), name)

    def _made(self) -> Any:
        from transformers import AutoTokenizer

        if self.name == Bytes.name_or_path:
            return Bytes()
        if "tokenizer" not in self.__dict__:
            try:
                self.__dict__["tokenizer"] = AutoTokenizer.from_pretrained(place_of(self.name))
            except (OSError, ValueError):
                raise RunError(
                    f"no tokenizer was found for {self.name!r}. Texts need one: give `data.tokenizer`, a folder or a name."
                ) from None
        return self.__dict__["tokenizer"]


def model_for(settings: Settings, dataset: Dataset) -> Any:
    """The model, with a head for the data set's classes."""
    kind = kind_of(dataset)
    shape = dataset.train.inputs["pixel_values"].shape[1:] if kind == "image" else ()
    classes = len(_reading(settings)["tokenizer"]) if kind in WRITERS else len(dataset.classes)
    model = trainable(settings.model.name, kind, classes, tuple(shape), settings.seed, settings.model.config)
    _refuse_misfits(model, dataset)
    if settings.lora.rank:
        lora = settings.lora
        model = with_lora(model, lora.rank, lora.alpha or None, lora.targets or None, lora.dropout, settings.seed)
    return model.to(device_of(settings.backend))


def _refuse_misfits(model: Any, dataset: Dataset) -> None:
    """Refuse images or texts that the model cannot read."""
    parts = [part.inputs for part in (dataset.train, dataset.test, dataset.validation) if part is not None]
    if "input_ids" in parts[0]:
        _refuse_tokens(model, max(int(inputs["input_ids"].max()) for inputs in parts))
        _refuse_long(model, max(inputs["input_ids"].shape[1] for inputs in parts))
    if "pixel_values" in parts[0]:
        channels, reads = parts[0]["pixel_values"].shape[1], getattr(model.config, "num_channels", None)
        if isinstance(reads, int) and reads != channels:
            raise RunError(f"the images have {channels} channels, but the model reads {reads}.")


def _refuse_tokens(model: Any, largest: int) -> None:
    """Refuse texts with tokens that the model has no embedding for."""
    known = model.get_input_embeddings().num_embeddings
    if largest >= known:
        raise RunError(f"the texts have the token {largest:,}, but the model knows {known:,}. Give its own: data.tokenizer.")


def _refuse_long(model: Any, longest: int) -> None:
    """Refuse texts with more tokens than the model has learnt positions for."""
    most: int = getattr(model.config, "max_position_embeddings", None) or 0
    is_learnt = any(isinstance(each, nn.Embedding) and each.num_embeddings == most for each in model.modules())
    if is_learnt and longest > most:
        raise RunError(f"the longest text has {longest} tokens, but the model {most} positions: set data.max_length to {most}.")


def task_of(settings: Settings, dataset: Dataset, model: Any) -> Task:
    """Texts, or images with the normalisation that is given, that the model was pretrained with, or that is usual."""
    kind = kind_of(dataset)
    if kind == "language":
        return LanguageModelling()
    if dataset.questions is not None:
        return answering(dataset.questions)
    if kind == "text":
        return _text_task(settings.data.source, dataset)
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


def _text_task(source: str, dataset: Dataset) -> Task:
    """Classes or numbers, judged as the benchmark does that the source belongs to."""
    if dataset.train.labels.is_floating_point():
        return TextRegression()
    name = glue.task_name(source)
    named = () if name is None else glue.METRICS[name]
    is_fitting = len(dataset.classes) == glue.CLASSES or named == ("accuracy",)
    return TextClassification(named=named if is_fitting and name != "stsb" else ())


def _pretrained_with(name: str) -> dict[str, tuple[float, ...]]:
    """The normalisation that a pretrained model's image processor states; nothing where there is none."""
    if name in ("vit-small", "resnet18") or name.endswith(":tiny"):
        return {}
    from transformers import ImageProcessingMixin

    try:
        stated, _ = ImageProcessingMixin.get_image_processor_dict(place_of(name))
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
    known = {**{field.name: field for field in fields(Tier)}, "device": None}
    for key in entry:
        if key not in limits:
            refuse_unknown(key, known, "a tier of the fleet")
    if "size" not in entry and "device" not in entry:
        raise RunError(f"a tier of the fleet needs a `size`, or a `device` that is known by name: {dict(entry)!r}.")
    for key in limits:
        refuse_unknown(key, {field.name: field for field in fields(Budget)}, "a tier of the fleet")
    kinds = {**get_type_hints(Tier), "device": str}
    limits = {key: checked(value, int, f"fleet.{key}") for key, value in limits.items()}
    plain = {key: checked(value, kinds[key], f"fleet.{key}") for key, value in entry.items() if key not in limits}
    budget = Budget(**limits) if limits else None
    device = plain.pop("device", None)
    return replace(tier_of(device), **plain, budget=budget) if device is not None else Tier(**plain, budget=budget)


def on_device(data: Federation, device: str) -> Federation:
    """The data on the device where it is read; the lengths of texts stay on the CPU."""
    if device == "cpu":
        return data

    def moved(examples: Examples) -> Examples:
        inputs = {name: tensor if name == "lengths" else tensor.to(device) for name, tensor in examples.inputs.items()}
        return Examples(inputs, examples.labels.to(device))

    dataset = data.dataset
    validation = None if dataset.validation is None else moved(dataset.validation)
    return replace(data, dataset=replace(dataset, train=moved(dataset.train), test=moved(dataset.test), validation=validation))
