"""Train one foundation model across devices of every size, and give each device the submodel it can run."""

from raffm.algebra.layout import Layout
from raffm.algebra.mask import Mask
from raffm.algebra.move import extract, permute, scatter
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.algebra.tally import Tally
from raffm.elastic import RaFFM
from raffm.errors import RaffmError
from raffm.models.checkpoint import load_submodel, save_submodel
from raffm.models.draft import draft
from raffm.models.label import layout_of
from raffm.models.resnet import ResNet, ResNetConfig, recalibrate
from raffm.models.salience import l1_norm, l2_norm
from raffm.models.stock import export_stock
from raffm.models.surgery import submodel
from raffm.models.verify import verify

__version__ = "0.1.0"

__all__ = [
    "Layout",
    "Mask",
    "RaFFM",
    "RaffmError",
    "Ranking",
    "ResNet",
    "ResNetConfig",
    "Selection",
    "Tally",
    "draft",
    "export_stock",
    "extract",
    "l1_norm",
    "l2_norm",
    "layout_of",
    "load_submodel",
    "permute",
    "recalibrate",
    "save_submodel",
    "scatter",
    "submodel",
    "verify",
]
