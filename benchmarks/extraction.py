"""(a) Extracting a half-size ViT-base: against a plain copy of the same bytes, and against the published way."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from benchmarks.timing import Times, interleaved, ratio
from benchmarks.vit_base import half, vit_base
from raffm.algebra.move import extract
from raffm.models.label import layout_of, named_tensors
from raffm.models.surgery import submodel


def measure(repeats: int) -> tuple[dict[str, Times], list[tuple[str, float, float]]]:
    """Times, and (claim, ratio, limit) rows."""
    model = vit_base()
    layout = layout_of(model)
    selection = half(layout, 0)
    tensors, _ = named_tensors(model)
    part = extract(tensors, layout, selection)
    buffers = {name: torch.empty_like(tensor) for name, tensor in part.items()}
    times = interleaved(
        {
            "copy_ of the same bytes": lambda: [buffers[name].copy_(tensor) for name, tensor in part.items()],
            "extract into reused buffers": lambda: extract(tensors, layout, selection, buffers),
            "submodel, fresh module": lambda: submodel(model, layout, selection),
            "the published way": lambda: published(model),
        },
        repeats,
        "extraction",
    )
    return times, [
        ("extract into reused buffers / copy_", ratio(times, "extract into reused buffers", "copy_ of the same bytes"), 2.0),
        ("fresh module / the published way", ratio(times, "submodel, fresh module", "the published way"), 1 / 3),
    ]


def published(model: Any) -> nn.Module:
    """What the published code does, for the same sizes: deep copy, randomly initialised smaller layers, prefix slices."""
    small = copy.deepcopy(model)
    for layer in small.vit.layers:
        width, ffn = layer.attention.q_proj.out_features // 2, layer.mlp.fc1.out_features // 2
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(layer.attention, name, _prefix(getattr(layer.attention, name), rows=width))
        layer.attention.o_proj = _prefix(layer.attention.o_proj, columns=width)
        layer.attention.head_dim //= 2
        layer.mlp.fc1, layer.mlp.fc2 = _prefix(layer.mlp.fc1, rows=ffn), _prefix(layer.mlp.fc2, columns=ffn)
    return small


def _prefix(old: nn.Linear, rows: int | None = None, columns: int | None = None) -> nn.Linear:
    rows, columns = rows or old.out_features, columns or old.in_features
    new = nn.Linear(columns, rows)
    with torch.no_grad():
        new.weight.copy_(old.weight[:rows, :columns])
        new.bias.copy_(old.bias[:rows])
    return new
