"""From a model and its family's table to a Layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from raffm.algebra.axis import Expression, Label, Name, Number, names, parse, parse_label, renamed
from raffm.algebra.blocks import block_of, is_place
from raffm.algebra.group import Group, Tie
from raffm.algebra.layout import Kind, Layout
from raffm.errors import LabelError, UnknownFamilyError
from raffm.models import adapters
from raffm.models import table as tables
from raffm.models.entries import entry
from raffm.models.table import Table

Rename = Callable[[str], str]

FIXED = "fixed"
"""The label of tensors that are never cut."""


def table_of(model: nn.Module, table: Table | str | Path | None = None) -> Table:
    """The table that belongs to a model: the given one, one that it carries, or the one shipped for its `config.model_type`."""
    if isinstance(table, Table):
        return table
    if table is not None:
        return tables.read_file(table)
    own = getattr(model, "raffm_table", None)
    if isinstance(own, Table):
        return own
    family = getattr(getattr(model, "config", None), "model_type", None)
    if not family:
        raise UnknownFamilyError(
            f"{type(model).__name__} has no `config.model_type`, so its family is unknown. Give a table: `table=...`."
        )
    found = tables.shipped(family)
    _refuse_version(found)
    return found


def _refuse_version(table: Table) -> None:
    """A shipped table speaks of the modules of certain versions of transformers."""
    if not table.transformers:
        return
    import transformers
    from packaging.specifiers import SpecifierSet  # comes with transformers

    if not SpecifierSet(table.transformers).contains(transformers.__version__, prereleases=True):
        raise UnknownFamilyError(
            f"the table of {table.family!r} holds for transformers {table.transformers}, but {transformers.__version__} is "
            "installed. Install one of those, or give a table of your own: `table=...`."
        )


def layout_of(model: nn.Module, table: Table | str | Path | None = None) -> Layout:
    """The layout of a model, checked against all of its parameters and buffers."""
    table = table_of(model, table)
    tensors, aliases = named_tensors(model)
    prefix, own = base_prefix(model), _without_adapters(tensors)
    table = _with_variants(table, prefix, own)
    last = _last_numbers(table, prefix, own)
    rename = _renaming(table, prefix, own, last)
    depths = _depth_groups(table, prefix, model, last)
    labels = {name: _any_label(table, prefix, name, tensors, last) for name in tensors}
    labels = {
        name: replace(
            label,
            axes=tuple(renamed(axis, rename) for axis in label.axes),
            guard=label.guard or (None if label.stack else _guard(name, depths)),
        )
        for name, label in labels.items()
    }
    attributes = _attributes(table, prefix, model, last, rename)
    named = [group for expression, _ in attributes.values() for group in names(expression) if not is_place(group)]
    used = dict.fromkeys([*(group for label in labels.values() for group in label.groups()), *named])
    return Layout.build(
        labels,
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        [*depths.values(), *(_group(table, name, model, last, rename) for name in used if name not in depths)],
        _ties(table, used, last, rename),
        attributes,
        aliases,
        _kinds(model, tensors),
        _lists(table, model),
        _when_cut(table, prefix, model, last, rename),
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
    prefix, tensors = base_prefix(model), _without_adapters(named_tensors(model)[0])
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


def head_names(model: nn.Module) -> set[str]:
    """The parameters beside the base model; where names do not tell which these are, those that the table has in its heads."""
    prefix, named = base_prefix(model), dict(model.named_parameters())
    if prefix:
        return {name for name in named if not name.startswith(prefix)}
    try:
        table = table_of(model)
    except UnknownFamilyError:
        return set()
    return {name for name in named if _has_line(table.heads, name) and not _has_line(table.tensors, name)}


def _has_line(lines: Mapping[str, str], name: str) -> bool:
    return any(tables.first_match(lines, part) is not None for part in (name, name.rpartition(".")[0]))


def _with_variants(table: Table, prefix: str, tensors: Mapping[str, Tensor]) -> Table:
    """The table with the lines of every variant that the model shows; they come first, so they win."""
    lines = dict(table.tensors)
    for variant in table.variant:
        if prefix + variant["has"] in tensors:
            lines = {**variant["tensors"], **{name: line for name, line in lines.items() if name not in variant["tensors"]}}
    return replace(table, tensors=lines)


def _without_adapters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the model itself, by the names that they have without adapters."""
    return {adapters.plain(name): tensor for name, tensor in tensors.items() if adapters.part_of(name) is None}


def _any_label(table: Table, prefix: str, name: str, tensors: Mapping[str, Tensor], last: tables.Numbers) -> Label:
    """The label of a tensor of the model, or of an adapter in it."""
    part = adapters.part_of(name)
    if part is None:
        return _label(table, prefix, adapters.plain(name), tensors[name], last)
    weight = tensors[f"{part.module}.base_layer.weight"]
    beside = _label(table, prefix, adapters.plain(f"{part.module}.weight"), weight, last)
    return adapters.label_of(replace(part, module=part.module.removeprefix(prefix)), beside)


def _label(table: Table, prefix: str, name: str, tensor: Tensor, last: tables.Numbers) -> Label:
    """The label of one tensor: by its own name, by its module's, or by a line that speaks of anything there."""
    relative = name.removeprefix(prefix) if name.startswith(prefix) else name
    module, _, leaf = relative.rpartition(".")
    lines = _lines(table, prefix, name)
    wide = {template: line for template, line in lines.items() if "*" in template}
    plain = {template: line for template, line in lines.items() if template not in wide}
    own = tables.first_match(plain, relative)
    found = own or tables.first_match(plain, module) or tables.first_match(wide, relative)
    if found is None:
        raise LabelError(
            f"`{name}` of shape {tuple(tensor.shape)} has no label in the table of {table.family!r}. Add a line for it."
        )
    text, numbers = found
    if text == FIXED:
        return Label(tuple(map(Number, tensor.shape)))
    label = parse_label(tables.fill(text, numbers, last))
    return label if own else _in_module(label, leaf, tensor)


def _lines(table: Table, prefix: str, name: str) -> Mapping[str, str]:
    """The lines that may speak of a tensor; where nothing tells the base model from its head, all."""
    if not prefix:
        return {**table.tensors, **table.heads}
    return table.tensors if name.startswith(prefix) else table.heads


def _in_module(label: Label, leaf: str, tensor: Tensor) -> Label:
    """A module's label, applied to one of its tensors: the weight takes it whole, a bias its target, a counter nothing."""
    if leaf == "weight":
        return label
    axes = (label.axes[label.target or 0],) if tensor.dim() else ()
    return Label(axes, guard=label.guard, stack=label.stack)


def _guard(name: str, depths: Mapping[str, Group]) -> tuple[str, int] | None:
    for depth in depths.values():
        index, _ = block_of(name, str(depth.path))
        if index is not None:
            return depth.name, index
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
    for template, about in table.depth.items():
        for numbers in _all_numbers(template, last):
            name, path = tables.fill(template, numbers, last), prefix + tables.fill(about["path"], numbers, last)
            if path not in modules and about.get("optional"):
                continue
            if path not in modules:
                raise LabelError(f"the table of {table.family!r} looks for blocks at `{path}`, which the model does not have.")
            blocks = [child for child, _ in modules[path].named_children()]
            if others := [child for child in blocks if not child.isdigit()]:
                raise LabelError(f"`{path}.{others[0]}` stands among the blocks of `{name}`, but is none: blocks have numbers.")
            required, ordered = tuple(about.get("required", ())), bool(about.get("ordered"))
            groups[name] = Group(name, len(blocks), path=path, required=required, ordered=ordered)
    return groups


def _group(table: Table, name: str, model: nn.Module, last: tables.Numbers, rename: Rename) -> Group:
    found = tables.first_match(table.groups, name)
    if found is None:
        return Group(name, 0)
    about, numbers = found
    allowed = {"size", "pinned", "per", "step", "least", "approximate", "apart", "free_where"}
    if unknown := set(about) - allowed:
        raise LabelError(f"group {name!r} has the unknown property {min(unknown)!r}; known are {sorted(allowed)}.")
    base = rename(tables.fill(about["per"], numbers, last)) if "per" in about else None
    rest = {"size": 0, **{key: about[key] for key in about if key not in ("per", "free_where")}}
    if any(entry(model, path) not in values for path, values in about.get("free_where", {}).items()):
        rest["pinned"] = True
    return Group(name, base=base, **rest)


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
    modules, places = dict(model.named_modules()), _places(model)
    for template, text in table.attributes.items():
        owner, attribute = _owner(template)
        owners = {"": {}} if attribute.startswith("config.") and not owner else _instances(prefix, owner, places)
        for plain, numbers in owners.items():
            name = places[plain]
            stored = entry(modules[name], attribute)
            if isinstance(stored, int) and not text.startswith("["):
                expression = renamed(parse(tables.fill(text, numbers, last)), rename)
                found[f"{name}.{attribute}".lstrip(".")] = (expression, stored)
    return found


def _lists(table: Table, model: nn.Module) -> dict[str, str]:
    """The lists in the config that have an entry for every block (`"[layers]"`), or that number blocks (`"[#layers]"`)."""
    listed = {name: text[1:-1] for name, text in table.attributes.items() if text.startswith("[")}
    return {name: depth for name, depth in listed.items() if isinstance(entry(model, name), list | tuple)}


def _when_cut(table: Table, prefix: str, model: nn.Module, last: tables.Numbers, rename: Rename) -> dict[str, tuple[str, str]]:
    """The modules that need another class once a group is cut, with the group and the class's name."""
    modules, places = dict(model.named_modules()), _places(model)
    found = {}
    for template, about in table.when_cut.items():
        for plain, numbers in _instances(prefix, template, places).items():
            name = places[plain]
            if about["class"] not in {kind.__name__ for kind in type(modules[name]).__mro__}:
                raise LabelError(f"`{name}` shall become a {about['class']} when it is cut, but its class derives from none.")
            found[name] = rename(tables.fill(about["group"], numbers, last)), about["class"]
    return found


def _owner(template: str) -> tuple[str, str]:
    """The module and the attribute that a name means; what follows `config` is inside that."""
    parts = template.split(".")
    cut = parts.index("config") if "config" in parts else -1
    return ".".join(parts[:cut]), ".".join(parts[cut:])


def _instances(prefix: str, owner: str, places: Mapping[str, str]) -> dict[str, tables.Numbers]:
    return tables.instances(prefix + owner if owner else prefix.rstrip("."), places)


def _places(model: nn.Module) -> dict[str, str]:
    """Where every module is, by the name that it has without adapters; of a layer with one, the layer itself."""
    return {adapters.plain(name): name for name, _ in model.named_modules()}


def _kinds(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Kind]:
    saved = set(model.state_dict(keep_vars=True))
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def kind(name: str, tensor: Tensor) -> Kind:
        if name in parameters:
            return "parameter" if tensor.requires_grad else "frozen"
        return "buffer" if name in saved else "transient"

    return {name: kind(name, tensor) for name, tensor in tensors.items()}
