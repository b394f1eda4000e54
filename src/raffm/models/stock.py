"""Submodels that need no raffm to load: written by the family's own config, where that can express them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raffm.algebra.axis import Sum, names, parse, renamed, value
from raffm.algebra.layout import Layout
from raffm.errors import ExportError
from raffm.models import table as tables
from raffm.models.checkpoint import save_model
from raffm.models.entries import has_owner, set_entry
from raffm.models.files import written_whole
from raffm.models.label import base_prefix, group_names, layout_of, named_tensors, table_of
from raffm.models.sample import sample_inputs, with_padding
from raffm.models.surgery import Record, assembled
from raffm.models.table import Table
from raffm.models.verify import largest_change, named_outputs

TOLERANCE = 1e-4
"""How far, relative to their scale, the outputs of the written model may lie from those of the submodel."""


def export_stock(module: nn.Module, folder: str | Path, table: Table | str | Path | None = None, check: bool = True) -> None:
    """Write a model so that plain `from_pretrained` loads it; refuse where the family's config cannot express it.

    The frozen attention scale is folded into the query, so the outputs stay the same. With `check` the written model is
    loaded and run, and refused where its outputs differ.
    """
    table = table_of(module, table)
    if not table.stock or not hasattr(module, "save_pretrained"):
        raise ExportError(f"{type(module).__name__} has no stock form of its own. Save it with `save_submodel`.")
    layout = layout_of(module, table)
    config = copy.deepcopy(module.config)
    plain = _built(type(module), config, {**_config_values(module, table, layout), **_rotary_values(module, table, layout)})
    _refuse_other_shapes(module, plain)
    tensors = {**named_tensors(module)[0], **_folded(module, plain, table, layout)}
    ready = assembled(module, layout, layout.select({}), tensors)
    ready.config = config
    with written_whole(folder) as fresh:
        save_model(ready, fresh)
        if check:
            _refuse_other_outputs(module, fresh, table)


def _built(kind: type[nn.Module], config: Any, entries: Mapping[str, Any]) -> nn.Module:
    """The family's own model under a config with these entries, without weights."""
    try:
        for path, content in entries.items():
            if has_owner(config, path):
                set_entry(config, path, content)
        if hasattr(config, "validate"):
            config.validate()
        with torch.device("meta"):
            return kind(config)
    except Exception as error:  # configs check themselves in many ways
        raise ExportError(
            f"the family's own config cannot express this submodel: {str(error).splitlines()[-1].strip()} Save it with "
            "`save_submodel`."
        ) from None


def _rotary_values(module: nn.Module, table: Table, layout: Layout) -> dict[str, float]:
    """The base of rotary frequencies that were cut: for the first n of d pairs, theta' = theta^(n/d) gives the same."""
    tensors = named_tensors(module)[0]
    record = getattr(module, "raffm", None)
    values = {}
    for relative, key in table.rotary.items():
        name = base_prefix(module) + relative
        is_cut = isinstance(record, Record) and any(group in record.selection.kept for group in layout.labels[name].groups())
        frequencies = tensors[name].double()
        count = len(frequencies)
        if is_cut and count > 1 and _is_geometric(frequencies):
            values[key] = float(frequencies[-1]) ** (-count / (count - 1))
    return values


def _is_geometric(frequencies: Tensor) -> bool:
    """Whether frequencies are those of a base: 1, r, r^2, ..."""
    ratio = frequencies[-1] ** (1 / (len(frequencies) - 1))
    return bool(torch.allclose(frequencies, ratio ** torch.arange(len(frequencies)).to(frequencies), rtol=1e-5, atol=0))


def _refuse_other_outputs(module: nn.Module, folder: Path, table: Table) -> None:
    """The written model must say what the submodel says; both are run in float32."""
    ours = with_padding(copy.deepcopy(module).to("cpu", torch.float32).eval())
    written = with_padding(type(module).from_pretrained(folder, dtype=torch.float32).eval())  # type: ignore[attr-defined]
    inputs = sample_inputs(ours, table, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            change = largest_change(named_outputs(ours(**inputs)), named_outputs(written(**inputs)))
    except Exception as error:  # a model may need inputs that no table describes
        raise ExportError(
            f"{type(module).__name__} cannot be run on made-up inputs, so what was written is unproved: "
            f"{str(error).splitlines()[0]} Pass check=False to write it all the same."
        ) from None
    if change > TOLERANCE:
        raise ExportError(
            f"under the family's own config the outputs differ by {change:.1e} (a frozen scale or kept rotary pairs that it "
            "cannot express). Save it with `save_submodel`."
        )


def _config_values(module: nn.Module, table: Table, layout: Layout) -> dict[str, Any]:
    """What the config must say, from the sizes of the submodel."""
    rename, last = group_names(module, table)
    values: dict[str, Any] = {}
    for key, text in table.stock.items():
        inner = text.strip("[]")
        numbers = [{name: place} for name in tables.wildcards(inner) for place in range(last[name] + 1)] or [{}]
        filled = [renamed(parse(tables.fill(inner, number, last)), rename) for number in numbers]
        found = [value(each, layout.sizes) for each in filled if set(names(each)) <= set(layout.sizes)]
        if not found:  # of a part that this model lacks: T5's decoder
            continue
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
    tensors, aliases = named_tensors(plain)
    expected = {**tensors, **{alias: tensors[name] for alias, name in aliases.items()}}
    for name, tensor in named_tensors(module)[0].items():
        if name not in expected or expected[name].shape != tensor.shape:
            there = tuple(expected[name].shape) if name in expected else "no such tensor"
            raise ExportError(
                f"`{name}` has shape {tuple(tensor.shape)}, but under the family's own config it would have {there}: that "
                "config cannot express this submodel (it may have no head_dim of its own). Save it with `save_submodel`."
            )


def _folded(module: nn.Module, plain: nn.Module, table: Table, layout: Layout) -> dict[str, Tensor]:
    """The query weights, times what the stock attention scale lacks.

    Of a fused projection, whose label is a sum, the query is the first part.
    """
    modules, stock = dict(module.named_modules()), dict(plain.named_modules())
    prefix = base_prefix(module)
    folded: dict[str, Tensor] = {}
    for template, query in table.scale.items():
        owner, _, attribute = template.rpartition(".")
        for name, numbers in tables.instances(prefix + owner, modules).items():
            ratio = getattr(modules[name], attribute) / getattr(stock[name], attribute)
            path = prefix + tables.fill(query, numbers, {})
            if ratio != 1:
                for leaf, part in _own(modules[path]).items():
                    folded[f"{path}.{leaf}"] = _with_query(part.detach(), layout, f"{path}.{leaf}", ratio)
    return folded


def _with_query(tensor: Tensor, layout: Layout, name: str, ratio: float) -> Tensor:
    label = layout.labels[name]
    axis = label.target or 0
    target = label.axes[axis]
    scaled = tensor.clone()
    scaled.narrow(axis, 0, value(target.terms[0] if isinstance(target, Sum) else target, layout.sizes)).mul_(ratio)
    return scaled


def _own(module: nn.Module) -> Mapping[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))
