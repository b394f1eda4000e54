"""Train one foundation model across devices of every size, and give each device the submodel it can run."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raffm.algebra.layout import Layout
    from raffm.algebra.mask import Mask
    from raffm.algebra.move import extract, permute, scatter
    from raffm.algebra.ranking import Ranking
    from raffm.algebra.selection import Selection
    from raffm.algebra.tally import Tally
    from raffm.data.examples import Federation
    from raffm.data.task import ImageClassification, Task, TextClassification
    from raffm.devices.fleet import Fleet, Tier
    from raffm.elastic import RaFFM, RaPEFT
    from raffm.errors import RaffmError
    from raffm.federate import Trained, load_data, train
    from raffm.models.checkpoint import load_submodel, save_submodel
    from raffm.models.draft import draft
    from raffm.models.inspect import inspect
    from raffm.models.label import layout_of
    from raffm.models.lora import merged, with_lora
    from raffm.models.resnet import ResNet, ResNetConfig, recalibrate
    from raffm.models.salience import l1_norm, l2_norm
    from raffm.models.stock import export_stock
    from raffm.models.surgery import submodel
    from raffm.models.verify import verify
    from raffm.rounds.local import Local
    from raffm.rounds.plan import Evaluating, Merging, Participation

__version__ = "0.1.0"

_HOMES = {
    "Evaluating": "raffm.rounds.plan",
    "Federation": "raffm.data.examples",
    "Fleet": "raffm.devices.fleet",
    "ImageClassification": "raffm.data.task",
    "Layout": "raffm.algebra.layout",
    "Local": "raffm.rounds.local",
    "Mask": "raffm.algebra.mask",
    "Merging": "raffm.rounds.plan",
    "Participation": "raffm.rounds.plan",
    "RaFFM": "raffm.elastic",
    "RaPEFT": "raffm.elastic",
    "RaffmError": "raffm.errors",
    "Ranking": "raffm.algebra.ranking",
    "ResNet": "raffm.models.resnet",
    "ResNetConfig": "raffm.models.resnet",
    "Selection": "raffm.algebra.selection",
    "Tally": "raffm.algebra.tally",
    "Task": "raffm.data.task",
    "TextClassification": "raffm.data.task",
    "Tier": "raffm.devices.fleet",
    "Trained": "raffm.federate",
    "draft": "raffm.models.draft",
    "export_stock": "raffm.models.stock",
    "extract": "raffm.algebra.move",
    "inspect": "raffm.models.inspect",
    "l1_norm": "raffm.models.salience",
    "l2_norm": "raffm.models.salience",
    "layout_of": "raffm.models.label",
    "load_data": "raffm.federate",
    "load_submodel": "raffm.models.checkpoint",
    "merged": "raffm.models.lora",
    "permute": "raffm.algebra.move",
    "recalibrate": "raffm.models.resnet",
    "save_submodel": "raffm.models.checkpoint",
    "scatter": "raffm.algebra.move",
    "submodel": "raffm.models.surgery",
    "train": "raffm.federate",
    "verify": "raffm.models.verify",
    "with_lora": "raffm.models.lora",
}

__all__ = [
    "Evaluating",
    "Federation",
    "Fleet",
    "ImageClassification",
    "Layout",
    "Local",
    "Mask",
    "Merging",
    "Participation",
    "RaFFM",
    "RaPEFT",
    "RaffmError",
    "Ranking",
    "ResNet",
    "ResNetConfig",
    "Selection",
    "Tally",
    "Task",
    "TextClassification",
    "Tier",
    "Trained",
    "draft",
    "export_stock",
    "extract",
    "inspect",
    "l1_norm",
    "l2_norm",
    "layout_of",
    "load_data",
    "load_submodel",
    "merged",
    "permute",
    "recalibrate",
    "save_submodel",
    "scatter",
    "submodel",
    "train",
    "verify",
    "with_lora",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `raffm --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'raffm' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
