"""A model from what a person types: a folder, a name on the hub, or `family:tiny`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raffm.errors import CheckpointError, UnknownFamilyError
from raffm.models import table as tables
from raffm.models.resnet import ResNet, ResNetConfig


def tiny(family: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A random tiny model of a family, as its table describes it; needs no network."""
    about = tables.shipped(family).tiny
    if not about:
        raise UnknownFamilyError(f"the table of {family!r} describes no tiny model.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return from_config(family, about["class"], {**about["config"], **changes})


def from_config(family: str, name: str, content: dict[str, Any]) -> nn.Module:
    """A random model of a class, by the class's name: our own, or one of transformers'."""
    if family == "raffm_resnet":
        lists = {key: tuple(entry) for key, entry in content.items() if isinstance(entry, list)}
        return ResNet(ResNetConfig(**{**content, **lists})).eval()
    import transformers

    kind: Any = getattr(transformers, name, None)
    config_class = getattr(kind, "config_class", None)
    if config_class is None:
        raise CheckpointError(
            f"the class {name!r} is neither ours nor a model of transformers'. Give a full model: `model=...`."
        )
    model: nn.Module = kind(config_class.from_dict(content))
    return model.eval()


def model_from(name: str, device: str = "cpu") -> nn.Module:
    """A model with random weights from `family:tiny`, a folder with a config.json, or a name on the hub."""
    with torch.device(device):
        if name.endswith(":tiny"):
            return tiny(name.removesuffix(":tiny"))
        path = Path(name) / "config.json"
        if path.is_file():
            return _from_file(path)
        return _from_hub(name)


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
    if family == "raffm_resnet":
        known = {key: entry for key, entry in content.items() if key in ResNetConfig.__dataclass_fields__}
        return from_config(family, "ResNet", known)
    return _of_architecture(str(path.parent))


def _from_hub(name: str) -> nn.Module:
    try:
        return _of_architecture(name)
    except OSError:
        raise CheckpointError(
            f"{name!r} is no folder with a config.json, no `family:tiny` (families: {', '.join(tables.families())}), and was "
            "not found on the hub or in its cache. Download the model's files into a folder and give its path."
        ) from None


def _of_architecture(name: str) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    architectures = config.architectures or []
    if architectures and hasattr(transformers, architectures[0]):
        kind = getattr(transformers, architectures[0])
        model: nn.Module = kind(config)
    else:
        model = transformers.AutoModel.from_config(config, trust_remote_code=False)
    return model.eval()
