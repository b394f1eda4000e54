"""The fine-tuned models of the published table: a pretrained ViT, its indices arranged in three ways, on two data sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.preparing import Arrange, arranged, as_it_is, few, query_and_key_apart, salient_first
from experiments.running import Content, changed
from raffm.settings import read_file

HERE = Path(__file__).parent

PRETRAINED = "vit-tiny-cifar100"

ARRANGED: Mapping[str, Arrange] = {"original": as_it_is, "apart": query_and_key_apart, "spp": salient_first}
"""The model as it is; query and key sorted apart, the "standard pruning rank"; the most salient indices first."""

CLASSES = {"cifar10": 10, "flowers102": 102}

TRAINED = 9000
"""Training images of CIFAR-10, as published."""

LOCAL: Mapping[str, Content] = {"cifar10": {"epochs": 1.0}, "flowers102": {"epochs": 10.0}}
"""Flowers102 has 1,020 training images."""

SMOKE: Content = {"local": {"epochs": 0.2}}


def tuned(scale: str, folder: Path) -> dict[str, dict[str, Any]]:
    """The settings of all fine-tuned models: `cifar10-original` .. `flowers102-spp`."""
    base, found = read_file(HERE / "tuning.toml"), {}
    for source, classes in {"digits": 10}.items() if scale == "smoke" else CLASSES.items():
        for name, arrange in ARRANGED.items():
            found[f"{source}-{name}"] = changed(
                base, _of_source(source, classes, arrange, folder / "models" / f"{source}-{name}")
            )
    return found


def _of_source(source: str, classes: int, arrange: Arrange, place: Path) -> dict[str, Any]:
    """Which model learns which images."""
    if source == "digits":
        model = arranged(place, "vit-small", "image", classes, (1, 8, 8), arrange)
        return changed(SMOKE, {"model": {"name": model}, "data": {"source": source, "crop": 0, "flip": False}})
    model = arranged(place, PRETRAINED, "image", classes, (3, 32, 32), arrange)
    data: dict[str, Any] = {"source": source, "image_size": 32}
    if source == "cifar10":
        data = {"source": few(source, place.parents[1], train=TRAINED, test=10_000)}
    return {"model": {"name": model}, "data": data, "local": LOCAL[source]}
