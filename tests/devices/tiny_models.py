"""Tiny models of every family, random cuts of them, and their real costs."""

import copy
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from raffm.algebra.layout import Layout
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.devices.cost import CostModel
from raffm.models import resnet
from raffm.models.label import layout_of, table_of
from raffm.models.sample import sample_inputs

_TRANSFORMER = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40, "num_labels": 5}
_VIT = ViTConfig(**_TRANSFORMER, image_size=8, patch_size=4)
_BERT = BertConfig(**_TRANSFORMER, vocab_size=50, max_position_embeddings=20)
_RESNET: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [2, 3], "num_labels": 5}
_OURS: dict[str, Any] = {"widths": (16, 24), "depths": (2, 3), "classes": 5, "image_size": 16}

MODELS = {
    "vit": lambda: ViTForImageClassification(_VIT),
    "bert": lambda: BertForSequenceClassification(_BERT),
    "bert with a tied head": lambda: BertForMaskedLM(_BERT),
    "resnet of basic blocks": lambda: ResNetForImageClassification(ResNetConfig(**_RESNET, layer_type="basic")),
    "resnet of bottlenecks": lambda: ResNetForImageClassification(ResNetConfig(**_RESNET, layer_type="bottleneck")),
    "our resnet": lambda: resnet.ResNet(resnet.ResNetConfig(**_OURS)),
    "our resnet with group norm": lambda: resnet.ResNet(resnet.ResNetConfig(**_OURS, norm="group", group_width=4)),
}


@cache
def model_of(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]()


@cache
def cost_of(name: str) -> CostModel:
    model = model_of(name)
    return CostModel(model, layout_of(model), table_of(model), batch=4)


def groups_to_cut(layout: Layout) -> list[str]:
    """All groups but those whose size a tie gives."""
    return [group for group in layout.free if not group.endswith(".vo")]


def possible_sizes(layout: Layout, name: str) -> list[int]:
    group = layout.groups[name]
    return list(range(max(group.least, len(group.required)), group.size + 1))


def random_ranking(layout: Layout, seed: int) -> Ranking:
    random = torch.Generator().manual_seed(seed)
    scores = {}
    for name in layout.free:
        rows = () if name not in layout.bases else (layout.groups[layout.bases[name]].size,)
        scores[name] = torch.rand((*rows, layout.groups[name].size), generator=random) ** 3
    return Ranking.by_scores(scores)


def random_selection(layout: Layout, seed: int) -> Selection:
    """A cut of every group, depth too, to a random size."""
    random = Random(seed)
    sizes = {group: random.choice(possible_sizes(layout, group)) for group in groups_to_cut(layout)}
    return random_ranking(layout, seed).cut(layout, sizes)


def real_params(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def real_bytes(module: nn.Module) -> int:
    saved: dict[int, Tensor] = {id(tensor): tensor for tensor in module.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in saved.values())


def real_flops(module: nn.Module) -> int:
    module = copy.deepcopy(module).to("meta").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(**sample_inputs(module, table_of(module), batch=1, tokens=128, device="meta"))
    return counter.get_total_flops()
