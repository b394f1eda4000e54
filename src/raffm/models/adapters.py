"""LoRA: small products beside frozen weights. PEFT puts them in; their labels follow from the weights they stand beside.

    weight   residual -> heads*qk           frozen
    lora_A   residual -> rank               trained
    lora_B   rank -> heads*qk               trained

A submodel may cut the weight, the rank, or both. What PEFT multiplies the product by (alpha / rank) stays that of the full
rank, so that an adapter cut to fewer ranks is the full one with the others left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from raffm.algebra.axis import Label, Name
from raffm.algebra.layout import Layout
from raffm.errors import LabelError

_ADAPTER = re.compile(r"(?P<module>.+)\.lora_(?P<side>A|B)\.(?P<adapter>[^.]+)\.weight")
_OTHER = re.compile(r"\.(lora_|ia3_|hada_|vera_|oft_)[^.]*\.")
_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")


@dataclass(frozen=True)
class Part:
    """One side of an adapter: the module that it stands in, and whether it comes first (A) or second (B)."""

    module: str
    side: Literal["A", "B"]
    adapter: str


def part_of(name: str) -> Part | None:
    """Which part of an adapter a tensor is; None for one of the model itself."""
    found = _ADAPTER.fullmatch(name)
    if found is not None:
        return Part(found["module"], "A" if found["side"] == "A" else "B", found["adapter"])
    if _OTHER.search(name):
        raise LabelError(f"`{name}` belongs to an adapter that has no labels: LoRA on linear layers has, without DoRA.")
    return None


def plain(name: str) -> str:
    """The name that a tensor or a module had before PEFT wrapped it."""
    return _WRAPPED.sub("", name)


def label_of(part: Part, weight: Label) -> Label:
    """The label of one side, from that of the weight it stands beside."""
    if weight.source is None or weight.target is None or len(weight.axes) != 2:
        raise LabelError(f"`{part.module}` has an adapter, but its label `{weight}` is no linear map.")
    rank = Name(rank_of(part))
    axes = (rank, weight.axes[weight.source]) if part.side == "A" else (weight.axes[weight.target], rank)
    return Label(axes, source=1, target=0, guard=weight.guard, stack=weight.stack)


def rank_of(part: Part) -> str:
    """The group of an adapter's ranks."""
    return f"{plain(part.module)}.rank" + ("" if part.adapter == "default" else f".{part.adapter}")


def rank_groups(layout: Layout) -> list[str]:
    """The groups of ranks of a model: the inner axes of its adapters."""
    return [name for name in layout.groups if name.endswith(".rank")]


# -- inside a module -----------------------------------------------------------------------------------------------


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is one of PEFT's LoRA layers."""
    return hasattr(module, "lora_A") and hasattr(module, "scaling") and hasattr(module, "get_base_layer")


def refresh(module: Any) -> None:
    """Bring what a LoRA layer stores in line with its shapes; what it multiplies by stays as it was."""
    module.out_features, module.in_features = _shape_of(module.get_base_layer())
    for adapter, first in module.lora_A.items():
        module.r[adapter] = first.weight.shape[0]


def _shape_of(layer: Any) -> tuple[int, int]:
    rows, columns = layer.weight.shape
    return (columns, rows) if is_transposed(layer) else (rows, columns)


def is_transposed(layer: nn.Module) -> bool:
    """Whether a linear layer stores its weight inputs first, as GPT-2's do."""
    return type(layer).__name__ == "Conv1D"
