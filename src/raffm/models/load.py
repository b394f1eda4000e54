"""A model from what a person types: a folder, a name on the hub, or `family:tiny`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn

from raffm.errors import CheckpointError, RaffmError, SpaceError, UnknownFamilyError
from raffm.models import table as tables
from raffm.models.exits import with_exits
from raffm.models.label import head_names
from raffm.models.labelled import Labelled
from raffm.models.resnet import ResNet, ResNetConfig


def tiny(family: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A random tiny model of a family, as its table describes it; needs no network."""
    about = tables.shipped(family).tiny
    if not about:
        raise UnknownFamilyError(f"the table of {family!r} describes no tiny model.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return from_config(family, about["class"], {**about["config"], **changes})


def from_config(family: str, name: str, content: dict[str, Any], attention: str | None = None) -> nn.Module:
    """A random model of a class, by the class's name: our own, or one of transformers'; `attention` is how it attends."""
    if "exits" in content:
        recipe = content["exits"]
        whole = from_config(family, recipe["kind"], {key: content[key] for key in content if key != "exits"}, attention)
        return with_exits(Labelled.of(whole), recipe["after"], recipe["convolutions"]).model
    if family == "raffm_resnet":
        return _resnet(content).eval()
    import transformers

    kind: Any = getattr(transformers, name, None)
    config_class = getattr(kind, "config_class", None)
    if config_class is None:
        raise CheckpointError(
            f"the class {name!r} is neither ours nor a model of transformers'. Give a full model: `model=...`."
        )
    config = config_class.from_dict(content)
    if attention is not None:
        config._attn_implementation = attention
    return _built(kind, config, content)


def _built(kind: Any, config: Any, content: Mapping[str, Any]) -> nn.Module:
    """A model of a class, with weights of its own in the head where the stored config says so.

    T5's config class forgets that (FLAN-T5 has such a head), and ties whatever is built from it.
    """
    model: Any = kind(config)
    head = model.get_output_embeddings() if content.get("tie_word_embeddings") is False else None
    if head is not None and not has_own_head(model):
        head.weight = nn.Parameter(torch.empty_like(head.weight).copy_(head.weight.detach()), head.weight.requires_grad)
    made: nn.Module = model.eval()
    return made


def has_own_head(model: Any) -> bool:
    """Whether a language model's head has other weights than its embeddings."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return head is not None and head.weight is not model.get_input_embeddings().weight


def model_from(name: str, device: str = "cpu") -> nn.Module:
    """A model with random weights from `family:tiny`, a folder with a config.json, or a name on the hub."""
    with torch.device(device):
        if name.endswith(":tiny"):
            return tiny(name.removesuffix(":tiny"))
        path = Path(place_of(name)) / "config.json"
        _refuse_submodel(name, path.parent)
        if path.is_file():
            return _from_file(path)
        if (Path(name) / "checkpoint").is_dir():
            raise CheckpointError(f"{name!r} is the folder of a run, which `raffm evaluate` reads; here a model is asked for.")
        if name in ("vit-small", "resnet18"):
            raise CheckpointError(f"{name!r} is made to fit the data when a run begins; here a model is asked for.")
        return _from_hub(name)


def _refuse_submodel(name: str, folder: Path) -> None:
    if (folder / "raffm.json").is_file():
        raise CheckpointError(f"{name!r} holds a submodel, and a full model is asked for. `raffm.load_submodel` reads it.")


def place_of(name: str) -> str:
    """The folder of a model: a path, or a name in `$RAFFM_MODELS` (by default `models`); else the name, as the hub has it."""
    if (Path(name) / "config.json").is_file():
        return name
    local = models_folder() / name
    return str(local) if (local / "config.json").is_file() else name


def models_folder() -> Path:
    """Where models are looked for by name."""
    return Path(os.environ.get("RAFFM_MODELS", "models"))


Kind = Literal["image", "text", "language", "span", "written"]
"""What a classifier looks at; that texts are written; or how questions are answered."""

_AUTO: Mapping[Kind, str] = {
    "image": "AutoModelForImageClassification",
    "text": "AutoModelForSequenceClassification",
    "language": "AutoModelForCausalLM",
    "span": "AutoModelForQuestionAnswering",
    "written": "AutoModelForSeq2SeqLM",
}

_DOES: Mapping[Kind, str] = {
    "image": "classifies images",
    "text": "classifies texts",
    "language": "writes texts",
    "span": "finds answers in texts",
    "written": "writes answers",
}

WRITERS: tuple[Kind, ...] = ("language", "written")
"""Their classes are tokens."""


def trainable(
    name: str, kind: Kind, classes: int, shape: tuple[int, ...] = (), seed: int = 0, changes: Mapping[str, Any] | None = None
) -> nn.Module:
    """A classifier to train, or a model that writes, for which `classes` are its tokens.

    `vit-small`, `resnet18` and `family:tiny` are random; a folder or a name on the hub brings its weights. `shape` is
    that of an image (channels, height, width). `changes` are entries of the model's own config. New heads and random
    weights follow from the seed.
    """
    changes = dict(changes or {})
    with torch.random.fork_rng(devices=[]), _told_of(changes):
        torch.manual_seed(seed)
        if name == "resnet18":
            given = {"classes": classes, "channels": shape[0], "image_size": shape[-1], **changes} if shape else changes
            return _resnet(given)
        if name == "vit-small":
            _refuse_unknown("ViTForImageClassification", changes)
            return from_config(
                "vit", "ViTForImageClassification", {**_small_vit(shape), **_fitting("vit", classes, shape), **changes}
            )
        if name.endswith(":tiny"):
            return _tiny_classifier(name.removesuffix(":tiny"), kind, classes, shape, changes)
        return _pretrained(name, kind, classes, changes)


@contextmanager
def _told_of(changes: Mapping[str, Any]) -> Iterator[None]:
    """What a config cannot be built from, in words."""
    try:
        yield
    except RaffmError:
        raise
    except Exception as error:  # configs of many libraries raise many kinds
        if not changes:
            raise
        raise SpaceError(f"no model can be built with {dict(changes)!r}: {str(error).strip().splitlines()[-1]}") from None


def _tiny_classifier(family: str, kind: Kind, classes: int, shape: tuple[int, ...], changes: Mapping[str, Any]) -> nn.Module:
    """The classifier of a family with its tiny config: `gpt2:tiny` itself writes."""
    about = tables.shipped(family).tiny
    fitting = {"vocab_size": classes} if kind in WRITERS else _fitting(family, classes, shape)
    content = {**about["config"], **fitting, **changes}
    if family == "raffm_resnet":
        return _resnet(content)
    import transformers

    _refuse_unknown(about["class"], changes)
    config = getattr(transformers, about["class"]).config_class.from_dict({**content, "architectures": [about["class"]]})
    try:
        model: nn.Module = getattr(transformers, _AUTO[kind]).from_config(config)
    except ValueError:
        raise CheckpointError(f"the family {family!r} has no model that {_DOES[kind]}.") from None
    return model.eval()


def _refuse_unknown(kind: str, changes: Mapping[str, Any]) -> None:
    """Refuse entries that the config of a class of transformers does not have: it would take them and do nothing."""
    import transformers

    config: Any = getattr(transformers, kind).config_class()
    known = {*config.to_dict(), *config.attribute_map, "num_labels"}
    for key in changes:
        if key not in known:
            near = get_close_matches(key, known, 1)
            meant = f"Did you mean {near[0]!r}?" if near else "`[model]` has entries of the model's own config."
            raise SpaceError(f"the config of {kind} has no entry {key!r}. {meant}")


def _small_vit(shape: tuple[int, ...]) -> dict[str, Any]:
    """A ViT of 200,000 parameters for small images: 4 x 4 patches, 4 layers of width 64."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
    return {**sizes, "patch_size": max(1, shape[-1] // 4) if shape else 4}


def _resnet(given: dict[str, Any]) -> nn.Module:
    unknown = set(given) - set(ResNetConfig.__dataclass_fields__)
    if unknown:
        raise SpaceError(f"the ResNet has no setting {min(unknown)!r}; it has {', '.join(ResNetConfig.__dataclass_fields__)}.")
    lists = {key: tuple(entry) for key, entry in given.items() if isinstance(entry, list | tuple)}
    return ResNet(ResNetConfig(**{**given, **lists}))


def _fitting(family: str, classes: int, shape: tuple[int, ...]) -> dict[str, Any]:
    """What of a tiny model's config follows from the data."""
    if family == "raffm_resnet":
        return {"classes": classes, "channels": shape[0], "image_size": shape[-1]} if shape else {"classes": classes}
    images = {"image_size": shape[-1], "num_channels": shape[0]} if shape else {}
    return {"num_labels": classes, **images}


def _pretrained(name: str, kind: Kind, classes: int, changes: dict[str, Any]) -> nn.Module:
    """The weights of a folder or of a name on the hub, with a head for these classes."""
    name = place_of(name)
    path = Path(name) / "config.json"
    if path.is_file() and json.loads(path.read_text(encoding="utf-8")).get("model_type") == "raffm_resnet":
        from raffm.models.checkpoint import load_weights

        model = _from_file(path)
        model.load_state_dict(load_weights(model, path.parent))
        return model
    _refuse_submodel(name, path.parent)
    import transformers

    try:
        loaded, about = getattr(transformers, _AUTO[kind]).from_pretrained(
            name,
            **({} if kind in WRITERS else {"num_labels": classes}),
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=False,
            **changes,
        )
    except SafetensorError as error:
        raise CheckpointError(f"the weights in {name!r} are damaged or cut short: {error}.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{name!r} is neither vit-small, resnet18, nor `family:tiny` (families: {', '.join(tables.families())}), nor a "
            f"folder or a name on the hub with a model that {_DOES[kind]}: {str(error).splitlines()[0]} Without the hub, put "
            f"its files into {str(models_folder() / name)!r}."
        ) from None
    if any(".lora_" in str(key) for key in about["unexpected_keys"]):
        raise CheckpointError(f"{name!r} holds adapters beside its weights: `RaPEFT.load_ckpt` reads them.")
    _refuse_mismatches(name, loaded, about["mismatched_keys"])
    _refuse_random(name, loaded, about["missing_keys"], about["unexpected_keys"])
    if kind in WRITERS and loaded.get_input_embeddings().num_embeddings < classes:
        known = loaded.get_input_embeddings().num_embeddings
        raise CheckpointError(
            f"the tokenizer has {classes:,} tokens, but {name!r} knows {known:,}. Give its own: data.tokenizer."
        )
    classifier: nn.Module = loaded.float().eval()
    return classifier


def _refuse_mismatches(name: str, model: Any, mismatched: Any) -> None:
    """Only a head may have other shapes than the files: it is new."""
    odd = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in mismatched)
    inside = [key for key in odd if key.startswith(f"{model.base_model_prefix}.")]
    if inside:
        raise CheckpointError(f"the weights in {name!r} do not fit their config: `{inside[0]}` has another shape there.")


def _refuse_random(name: str, model: Any, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Only a head, and the pooler before it, may be new: other weights that the files lack would be random, and nobody knew."""
    heads = head_names(model)
    lacking = sorted(key for key in missing if key not in heads and ".pooler." not in key)
    if lacking:
        odd = min(unexpected, default=None)
        raise CheckpointError(
            f"{name!r} lacks {len(lacking)} of the model's own tensors, which would be random: `{lacking[0]}`. "
            + (
                "Does its config belong to its weights?"
                if odd is None
                else f"It has `{odd}` instead, which no model of ours has."
            )
        )


def has_decoder(name: str) -> bool:
    """Whether a model reads with an encoder and writes with a decoder, as T5 does."""
    if name in ("vit-small", "resnet18"):
        return False
    if name.endswith(":tiny"):
        family = name.removesuffix(":tiny")
        return family in tables.families() and str(tables.shipped(family).tiny.get("class")).endswith("ConditionalGeneration")
    path = Path(place_of(name)) / "config.json"
    if path.is_file():
        return bool(json.loads(path.read_text(encoding="utf-8")).get("is_encoder_decoder"))
    import transformers

    try:
        return bool(transformers.AutoConfig.from_pretrained(name, trust_remote_code=False).is_encoder_decoder)
    except (OSError, ValueError):  # said when the model is loaded
        return False


def config_of_type(name: str) -> Any:
    """The default config of a model type that transformers knows (`gpt2`), or None."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return AutoConfig.for_model(name) if name in CONFIG_MAPPING else None


def _from_file(path: Path) -> nn.Module:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{str(path)!r} is not valid JSON: {error}.") from None
    family = content.get("model_type")
    if not family:
        raise CheckpointError(f"{str(path)!r} names no `model_type`, so the family of the model is unknown.")
    if "exits" in content:
        return from_config(family, content["exits"]["kind"], content)
    if family == "raffm_resnet":
        known = {key: entry for key, entry in content.items() if key in ResNetConfig.__dataclass_fields__}
        return from_config(family, "ResNet", known)
    return _of_architecture(str(path.parent))


def _from_hub(name: str) -> nn.Module:
    try:
        return _of_architecture(name)
    except (OSError, ValueError):
        raise CheckpointError(
            f"{name!r} is no folder with a config.json, no `family:tiny` (families: {', '.join(tables.families())}), and was "
            f"not found on the hub or in its cache. Put its files (config.json and model.safetensors) into "
            f"{str(models_folder() / name)!r}, or give the path of a folder that has them."
        ) from None


def _of_architecture(name: str) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    architectures = config.architectures or []
    if architectures and hasattr(transformers, architectures[0]):
        stored, _ = transformers.PreTrainedConfig.get_config_dict(name)
        return _built(getattr(transformers, architectures[0]), config, stored)
    model: nn.Module = transformers.AutoModel.from_config(config, trust_remote_code=False)
    return model.eval()
