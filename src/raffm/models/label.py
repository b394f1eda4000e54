"""From a model and its family's table to a Layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from raffm.algebra.axis import Expression, Label, Name, names, parse, parse_label, renamed
from raffm.algebra.group import Group, Tie
from raffm.algebra.layout import Kind, Layout
from raffm.errors import LabelError, UnknownFamilyError
from raffm.models import table as tables
from raffm.models.table import Table

Rename = Callable[[str], str]


def table_of(model: nn.Module, table: Table | str | Path | None = None) -> Table:
    """The table that belongs to a model: the given one, or the one shipped for its `config.model_type`."""
    if isinstance(table, Table):
        return table
    if table is not None:
        return tables.read_file(table)
    family = getattr(getattr(model, "config", None), "model_type", None)
    if not family:
        raise UnknownFamilyError(
            f"{type(model).__name__} has no `config.model_type`, so its family is unknown. Give a table: `table=...`."
        )
    return tables.shipped(family)


def layout_of(model: nn.Module, table: Table | str | Path | None = None) -> Layout:
    """The layout of a model, checked against all of its parameters and buffers."""
    table = table_of(model, table)
    tensors, aliases = named_tensors(model)
    prefix = base_prefix(model)
    table = _with_variants(table, prefix, tensors)
    last = _last_numbers(table, prefix, tensors)
    rename = _renaming(table, prefix, tensors, last)
    depths = _depth_groups(table, prefix, model, last)
    labels = {name: _label(table, prefix, name, tensor, last) for name, tensor in tensors.items()}
    labels = {
        name: replace(
            label,
            axes=tuple(renamed(axis, rename) for axis in label.axes),
            guard=label.guard or _guard(name, depths),
        )
        for name, label in labels.items()
    }
    attributes = _attributes(table, prefix, model, last, rename)
    used = dict.fromkeys(group for label in labels.values() for group in label.groups())
    used.update(dict.fromkeys(group for expression, _ in attributes.values() for group in names(expression) if group[0] != "#"))
    return Layout.build(
        labels,
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        [*depths.values(), *(_group(table, name, last, rename) for name in used if name not in depths)],
        _ties(table, used, last, rename),
        attributes,
        aliases,
        _kinds(model, tensors),
    )


def output_labels(model: nn.Module, table: Table | str | Path | None = None) -> dict[str, tuple[int, Expression]]:
    """For each output that the table names: which of its axes is labelled, and how."""
    table = table_of(model, table)
    rename, last = group_names(model, table)
    given = table.outputs
    entries = {name: entry if isinstance(entry, dict) else {"axis": -1, "label": entry} for name, entry in given.items()}
    return {
        name: (entry["axis"], renamed(parse(tables.fill(entry["label"], {}, last)), rename)) for name, entry in entries.items()
    }


def group_names(model: nn.Module, table: Table) -> tuple[Rename, dict[str, int]]:
    """How groups that a table names are called in a model, and the largest number of every wildcard."""
    tensors, _ = named_tensors(model)
    prefix = base_prefix(model)
    last = _last_numbers(table, prefix, tensors)
    return _renaming(table, prefix, tensors, last), last


def named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All parameters and buffers by name, tied ones once, and the other names of the tied ones."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            tensors[name] = tensor
    return tensors, aliases


def base_prefix(model: nn.Module) -> str:
    """The prefix of the base model's tensors inside a model with a head: "vit." or nothing."""
    prefix = getattr(model, "base_model_prefix", "")
    return f"{prefix}." if prefix and isinstance(getattr(model, prefix, None), nn.Module) else ""


def _with_variants(table: Table, prefix: str, tensors: Mapping[str, Tensor]) -> Table:
    """The table with the lines of every variant that the model shows; they come first, so they win."""
    lines = dict(table.tensors)
    for variant in table.variant:
        if prefix + variant["has"] in tensors:
            lines = {**variant["tensors"], **{name: line for name, line in lines.items() if name not in variant["tensors"]}}
    return replace(table, tensors=lines)


def _label(table: Table, prefix: str, name: str, tensor: Tensor, last: tables.Numbers) -> Label:
    """The label of one tensor: by its own name, or by its module's."""
    sections = _sections(table, prefix, name)
    relative = name.removeprefix(prefix) if sections is not table.heads else name
    if found := tables.first_match(sections, relative):
        return parse_label(tables.fill(found[0], found[1], last))
    module, _, leaf = relative.rpartition(".")
    if found := tables.first_match(sections, module):
        return _in_module(parse_label(tables.fill(found[0], found[1], last)), leaf, tensor)
    raise LabelError(
        f"`{name}` of shape {tuple(tensor.shape)} has no label in the table of {table.family!r}. Add a line for it."
    )


def _sections(table: Table, prefix: str, name: str) -> Mapping[str, str]:
    return table.tensors if name.startswith(prefix) else table.heads


def _in_module(label: Label, leaf: str, tensor: Tensor) -> Label:
    """A module's label, applied to one of its tensors: the weight takes it whole, a bias its target, a counter nothing."""
    if leaf == "weight":
        return label
    if tensor.dim() == 0:
        return Label((), guard=label.guard)
    return Label((label.axes[label.target or 0],), guard=label.guard)


def _guard(name: str, depths: Mapping[str, Group]) -> tuple[str, int] | None:
    for depth in depths.values():
        if name.startswith(f"{depth.path}."):
            return depth.name, int(name[len(f"{depth.path}.") :].split(".", maxsplit=1)[0])
    return None


def _last_numbers(table: Table, prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The largest number each wildcard takes in the model."""
    last: dict[str, int] = {}
    for name in tensors:
        relative = name.removeprefix(prefix)
        for candidate in (relative, relative.rpartition(".")[0]):
            if found := tables.first_match(table.tensors, candidate):
                last.update({key: max(number, last.get(key, 0)) for key, number in found[1].items()})
    return last


def _renaming(table: Table, prefix: str, tensors: Mapping[str, Tensor], last: tables.Numbers) -> Rename:
    """The function that gives groups their final names: the table's own, then one name for groups that are joined."""
    same = dict(table.names)
    for join in table.join:
        for numbers in _all_numbers(join.unless, last):
            if prefix + tables.fill(join.unless, numbers, last) not in tensors:
                first, second = (tables.fill(group, numbers, last) for group in join.groups)
                same[second] = first

    def rename(group: str) -> str:
        while group in same:
            group = same[group]
        return group

    return rename


def _all_numbers(template: str, last: tables.Numbers) -> list[dict[str, int]]:
    """Every reading of a template with at most one wildcard."""
    wildcards = tables.wildcards(template)
    if not wildcards:
        return [{}]
    return [{wildcards[0]: number} for number in range(last.get(wildcards[0], -1) + 1)]


def _depth_groups(table: Table, prefix: str, model: nn.Module, last: tables.Numbers) -> dict[str, Group]:
    modules = dict(model.named_modules())
    groups = {}
    for template, entry in table.depth.items():
        for numbers in _all_numbers(template, last):
            name, path = tables.fill(template, numbers, last), prefix + tables.fill(entry["path"], numbers, last)
            if path not in modules:
                raise LabelError(f"the table of {table.family!r} looks for blocks at `{path}`, which the model does not have.")
            blocks = len(list(modules[path].children()))
            groups[name] = Group(name, blocks, path=path, required=tuple(entry.get("required", ())))
    return groups


def _group(table: Table, name: str, last: tables.Numbers, rename: Rename) -> Group:
    found = tables.first_match(table.groups, name)
    if found is None:
        return Group(name, 0)
    entry, numbers = found
    allowed = {"pinned", "per", "step", "least", "approximate"}
    if unknown := set(entry) - allowed:
        raise LabelError(f"group {name!r} has the unknown property {min(unknown)!r}; known are {sorted(allowed)}.")
    base = rename(tables.fill(entry["per"], numbers, last)) if "per" in entry else None
    rest = {key: entry[key] for key in entry if key != "per"}
    return Group(name, 0, base=base, **rest)


def _ties(table: Table, groups: Mapping[str, None], last: tables.Numbers, rename: Rename) -> list[Tie]:
    ties = []
    for left, right in table.ties.items():
        for name, numbers in tables.instances(left, groups).items():
            ties.append(Tie(Name(name), renamed(parse(tables.fill(right, numbers, last)), rename)))
    return ties


def _attributes(
    table: Table, prefix: str, model: nn.Module, last: tables.Numbers, rename: Rename
) -> dict[str, tuple[Expression, int]]:
    """The integers that modules store, with what they mean and what they are."""
    found: dict[str, tuple[Expression, int]] = {}
    modules = dict(model.named_modules())
    for template, text in table.attributes.items():
        owner, _, attribute = template.rpartition(".")
        if owner == "config":
            found[template] = (renamed(parse(text), rename), getattr(model.config, attribute))
            continue
        for name, numbers in tables.instances(prefix + owner if owner else prefix.rstrip("."), modules).items():
            if isinstance(getattr(modules[name], attribute, None), int):
                expression = renamed(parse(tables.fill(text, numbers, last)), rename)
                found[f"{name}.{attribute}".lstrip(".")] = (expression, getattr(modules[name], attribute))
    return found


def _kinds(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Kind]:
    saved = set(model.state_dict(keep_vars=True))
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: "parameter" if name in parameters else "buffer" if name in saved else "transient" for name in tensors}
