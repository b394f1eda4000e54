"""Models on disk. Loading runs no code from the files.

A full model is what its family's own `save_pretrained` writes. A submodel is a folder with

    config.json             the full model's config, as its family writes it
    raffm.json              class, layout fingerprint, Selection
    model.safetensors       the submodel's weights, by the names that `save_pretrained` uses
    transient.safetensors   buffers that are not part of a state dict
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raffm.algebra.check import some
from raffm.errors import CheckpointError, RaffmError
from raffm.models.entries import set_entry
from raffm.models.exits import Exits, as_json
from raffm.models.files import found, read_json, read_tensors, write_json, write_tensors, written_whole
from raffm.models.label import layout_of, named_tensors
from raffm.models.load import from_config, has_own_head
from raffm.models.lora import Recipe, injected, recipe_of
from raffm.models.surgery import Record, assembled, skeleton
from raffm.models.table import Table

FORMAT = 1


def save_submodel(module: nn.Module, folder: str | Path) -> None:
    """Write a submodel into a folder that `load_submodel` reads back to the same logits, bit for bit."""
    record = record_of(module)
    if record.origin:
        raise CheckpointError(
            "this was cut from a submodel, and only the full model's config can be stored. Cut it from the full model: "
            "`layout.compose(outer, inner)` gives its Selection."
        )
    tensors, _ = named_tensors(module)
    state = set(module.state_dict())
    transient = {name: tensor for name, tensor in tensors.items() if name not in state}
    with written_whole(folder) as fresh:
        write_tensors(fresh / "model.safetensors", _on_disk(module))
        write_tensors(fresh / "transient.safetensors", transient)
        config = _config_dict(module)
        for path, content in record.config:
            set_entry(config, path, content)
        write_json(fresh / "config.json", config)
        write_json(
            fresh / "raffm.json",
            {
                "format": FORMAT,
                "class": type(module).__name__,
                "layout": record.fingerprint,
                "attention": getattr(getattr(module, "config", None), "_attn_implementation", None),
                "version": record.version,
                "selection": record.selection.to_json(),
                "dtypes": {name: dtype_name(tensor) for name, tensor in tensors.items()},
            },
        )


def load_submodel(folder: str | Path, table: Table | str | Path | None = None, model: nn.Module | None = None) -> nn.Module:
    """A submodel that `save_submodel` wrote.

    `table` is needed where its family is not one that raffm ships, and `model`, a full model with any weights, where
    its class is neither ours nor transformers'.
    """
    folder = found(folder)
    about = read_json(folder / "raffm.json")
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{str(folder)!r} has format {about.get('format')!r}; this version of raffm reads {FORMAT}.")
    model = model or _on_meta(about["class"], read_json(folder / "config.json"), about.get("attention"))
    layout = layout_of(model, table)
    if layout.fingerprint != about["layout"]:
        raise CheckpointError(
            f"{str(folder)!r} was written for another layout ({about['layout']}, here {layout.fingerprint}): its config or "
            "its table has changed, or it comes from another version."
        )
    try:
        selection = layout.select(about["selection"])
    except RaffmError as error:
        raise CheckpointError(f"the Selection in {str(folder / 'raffm.json')!r} does not fit its model: {error}") from None
    frame = skeleton(model, layout, selection)
    tensors = {**_from_disk(frame, folder), **read_tensors(folder / "transient.safetensors")}
    _refuse_strangers(named_tensors(frame)[0], tensors, about["dtypes"], folder)
    module = assembled(model, layout, selection, tensors, about["version"])
    module.eval()
    return module


def save_model(model: nn.Module, folder: Path) -> None:
    """Write a full model into a folder: `save_pretrained` where it has one, the same files otherwise."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)  # type: ignore[operator]
        if has_own_head(model):  # a config class may have forgotten it
            write_json(folder / "config.json", {**read_json(folder / "config.json"), "tie_word_embeddings": False})
        return
    write_tensors(folder / "model.safetensors", _on_disk(model))
    write_json(folder / "config.json", _config_dict(model))


def load_weights(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The weights of a full model from a folder, by their names in memory, all checked; the model is not changed."""
    stored = _read_weights(folder)
    in_memory = {on_disk: name for name, on_disk in disk_names(model).items()}
    tensors, aliases = named_tensors(model)
    passed_over = set(aliases) | (set(tensors) - set(in_memory.values()))  # repeated tied tensors, buffers made anew
    found_tensors = {in_memory.get(name, name): tensor for name, tensor in stored.items()}
    found_tensors = {name: tensor for name, tensor in found_tensors.items() if name not in passed_over}
    expected = {name: tensors[name] for name in in_memory.values()}
    _refuse_strangers(expected, found_tensors, {name: dtype_name(tensor) for name, tensor in expected.items()}, folder)
    return found_tensors


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: one safetensors file, several with an index, or an old pickle read as bare tensors."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(read_json(index)["weight_map"].values()))
        return {name: tensor for shard in shards for name, tensor in read_tensors(folder / Path(shard).name).items()}
    old = folder / "pytorch_model.bin"
    if old.is_file() and not (folder / "model.safetensors").is_file():
        try:
            tensors: dict[str, Tensor] = torch.load(old, map_location="cpu", weights_only=True)
        except Exception as error:  # the reader raises whatever a damaged or hostile file leads to
            raise CheckpointError(f"{str(old)!r} is damaged or holds more than tensors: {error}.") from None
        return tensors
    return read_tensors(folder / "model.safetensors")


def dtype_name(tensor: Tensor) -> str:
    """The kind of a tensor's numbers, as files and letters have it."""
    return str(tensor.dtype).removeprefix("torch.")


def record_of(module: nn.Module) -> Record:
    """What a submodel knows of its origin."""
    record = getattr(module, "raffm", None)
    if not isinstance(record, Record):
        raise CheckpointError(f"this {type(module).__name__} is no submodel of raffm's: it has no record of its Selection.")
    return record


def disk_names(module: nn.Module) -> dict[str, str]:
    """The name on disk of every tensor of the state dict, tied ones once.

    Hugging Face models keep older names on disk than in memory; the library's own rule is asked for them.
    """
    state = {name: tensor for name, tensor in named_tensors(module)[0].items() if name in set(module.state_dict())}
    if not hasattr(module, "save_pretrained"):
        return {name: name for name in state}
    from transformers.core_model_loading import revert_weight_conversion

    stand_ins = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    names = {id(tensor): name for name, tensor in stand_ins.items()}
    reverted = revert_weight_conversion(module, dict(stand_ins))
    found_names = {names[id(tensor)]: name for name, tensor in reverted.items() if id(tensor) in names}
    if set(found_names) != set(state):
        raise CheckpointError(f"the files of {type(module).__name__} fuse or split tensors, which raffm cannot read yet.")
    return found_names


def _on_disk(module: nn.Module) -> dict[str, Tensor]:
    tensors, _ = named_tensors(module)
    return {on_disk: tensors[name] for name, on_disk in disk_names(module).items()}


def _from_disk(frame: nn.Module, folder: Path) -> dict[str, Tensor]:
    stored = read_tensors(folder / "model.safetensors")
    in_memory = {on_disk: name for name, on_disk in disk_names(frame).items()}
    return {in_memory.get(name, name): tensor for name, tensor in stored.items()}


def _refuse_strangers(
    expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], dtypes: Mapping[str, str], folder: Path
) -> None:
    """Refuse files that lack a tensor, hold one more, or hold one of another shape or dtype."""
    missing, extra = set(expected) - set(tensors), set(tensors) - set(expected)
    if missing or extra:
        what = f"lacks {some(sorted(missing), 4)}" if missing else f"holds the unknown tensors {some(sorted(extra), 4)}"
        raise CheckpointError(f"{str(folder)!r} {what}. It is damaged or does not belong to this config.")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"`{name}` in {str(folder)!r} has shape {tuple(tensor.shape)}; its config and Selection give "
                f"{tuple(expected[name].shape)}."
            )
        if dtype_name(tensor) != dtypes.get(name):
            raise CheckpointError(f"`{name}` in {str(folder)!r} is {dtype_name(tensor)}; {dtypes.get(name)} was expected.")


def _config_dict(module: nn.Module) -> dict[str, Any]:
    config: Any = getattr(module, "config", None)
    content: dict[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    if content.get("tie_word_embeddings") and has_own_head(module):
        content["tie_word_embeddings"] = False
    if isinstance(module, Exits):
        content["exits"] = as_json(module.recipe)
    if (recipe := recipe_of(module)) is not None:
        content["lora"] = recipe.to_json()
    return content


def model_described(model: nn.Module) -> dict[str, Any]:
    """What it takes to build a model without its weights: its class, its config, how it attends."""
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return {"class": type(model).__name__, "config": _config_dict(model), "attention": attention}


def model_without_weights(about: dict[str, Any]) -> nn.Module:
    """The model that was described, on the meta device."""
    return _on_meta(about["class"], about["config"], about["attention"])


def _on_meta(name: str, config: dict[str, Any], attention: str | None) -> nn.Module:
    """The full model without weights."""
    plain = {key: entry for key, entry in config.items() if key != "lora"}
    with torch.device("meta"):
        model = from_config(str(config.get("model_type")), name, plain, attention)
        return injected(model, Recipe.from_json(config["lora"])) if "lora" in config else model
