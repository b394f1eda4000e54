"""Submodels that need no raffm to load: written by the family's own config, where that can express them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raffm.algebra.axis import parse, renamed, value
from raffm.algebra.layout import Layout
from raffm.errors import ExportError
from raffm.models import table as tables
from raffm.models.files import written_whole
from raffm.models.label import base_prefix, group_names, layout_of, named_tensors, table_of
from raffm.models.surgery import assembled
from raffm.models.table import Table


def export_stock(module: nn.Module, folder: str | Path, table: Table | str | Path | None = None) -> None:
    """Write a model so that plain `from_pretrained` loads it; refuse where the family's config cannot express it.

    The frozen attention scale is folded into the query, so the outputs stay the same.
    """
    table = table_of(module, table)
    if not table.stock or not hasattr(module, "save_pretrained"):
        raise ExportError(f"{type(module).__name__} has no stock form of its own. Save it with `save_submodel`.")
    layout = layout_of(module, table)
    config = copy.deepcopy(module.config)
    for key, content in _config_values(module, table, layout).items():
        setattr(config, key, content)
    with torch.device("meta"):
        plain: nn.Module = type(module)(config)
    _refuse_other_shapes(module, plain)
    tensors = {**named_tensors(module)[0], **_folded(module, plain, table)}
    ready = assembled(module, layout, layout.select({}), tensors)
    ready.config = config
    with written_whole(folder) as fresh:
        ready.save_pretrained(fresh)  # type: ignore[operator]


def _config_values(module: nn.Module, table: Table, layout: Layout) -> dict[str, Any]:
    """What the config must say, from the sizes of the submodel."""
    rename, last = group_names(module, table)
    values: dict[str, Any] = {}
    for key, text in table.stock.items():
        inner = text.strip("[]")
        numbers = [{name: place} for name in tables.wildcards(inner) for place in range(last[name] + 1)] or [{}]
        found = [value(renamed(parse(tables.fill(inner, number, last)), rename), layout.sizes) for number in numbers]
        if text.startswith("["):
            values[key] = found
        elif len(set(found)) == 1:
            values[key] = found[0]
        else:
            raise ExportError(
                f"the layers have different sizes ({key} would be {found}), but the config of {table.family!r} holds one "
                "number for all. Cut every layer alike, or save it with `save_submodel`."
            )
    return values


def _refuse_other_shapes(module: nn.Module, plain: nn.Module) -> None:
    expected, found = named_tensors(plain)[0], named_tensors(module)[0]
    for name, tensor in found.items():
        if name not in expected or expected[name].shape != tensor.shape:
            there = tuple(expected[name].shape) if name in expected else "no such tensor"
            raise ExportError(
                f"`{name}` has shape {tuple(tensor.shape)}, but under the family's own config it would have {there}: that "
                "config cannot express this submodel (it may have no head_dim of its own). Save it with `save_submodel`."
            )


def _folded(module: nn.Module, plain: nn.Module, table: Table) -> dict[str, Tensor]:
    """The query weights, times what the stock attention scale lacks."""
    modules, stock = dict(module.named_modules()), dict(plain.named_modules())
    prefix = base_prefix(module)
    folded: dict[str, Tensor] = {}
    for template, query in table.scale.items():
        owner, _, attribute = template.rpartition(".")
        for name, numbers in tables.instances(prefix + owner, modules).items():
            ratio = getattr(modules[name], attribute) / getattr(stock[name], attribute)
            path = prefix + tables.fill(query, numbers, {})
            if ratio != 1:
                folded.update({f"{path}.{leaf}": part.detach() * ratio for leaf, part in _own(modules[path]).items()})
    return folded


def _own(module: nn.Module) -> Mapping[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))
