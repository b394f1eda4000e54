"""ViT-base with random weights, and half-size Selections of it."""

from __future__ import annotations

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification
from transformers.initialization import no_init_weights

from raffm.algebra.layout import Layout
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection


def vit_base() -> nn.Module:
    """86 million parameters, filled with small random numbers."""
    with no_init_weights():
        model = ViTForImageClassification(ViTConfig(num_labels=10))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02, generator=draw)
    return model.eval()


def half(layout: Layout, seed: int) -> Selection:
    """Half of the FFN neurons and half of the dimensions of every head, drawn at random in every layer."""
    draw = torch.Generator().manual_seed(seed)
    order, sizes = {}, {}
    for name in layout.free:
        group = layout.groups[name]
        if name.endswith((".ffn", ".qk", ".vo")):
            rows = (layout.groups[group.base].size,) if group.base else ()
            order[name] = torch.rand((*rows, group.size), generator=draw).argsort(-1)
            sizes[name] = group.size // 2
    return Ranking(order).cut(layout, sizes)
