"""A family's table: a TOML file that says what every axis of every tensor of that family means.

Names hold wildcards in braces: `layers.{i}.mlp.fc1` matches every layer, and `{i}` stands for the same number on the
right. `{s-1}` is the number before, `{s:last}` the last one, and `*` matches anything. A table may be `like` that of
another family, with a few lines of its own. `docs/algebra.md` explains the sections.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from raffm.errors import LabelError, UnknownFamilyError

Numbers = Mapping[str, int]
"""What the wildcards of a name stand for."""

_WILDCARD = re.compile(r"\{(?P<name>\w+)(?P<shift>[+-]\d+)?(?P<last>:last)?\}")


@dataclass(frozen=True)
class Join:
    """Two groups that are one unless the model has a certain tensor."""

    groups: tuple[str, str]
    unless: str


@dataclass(frozen=True)
class Table:
    """The sections of a family's file, as they stand there."""

    family: str
    tensors: Mapping[str, str]
    heads: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    transformers: str = ""
    depth: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    join: tuple[Join, ...] = ()
    variant: tuple[Mapping[str, Any], ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)
    when_cut: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    inputs: Mapping[str, list[str]] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    space: Mapping[str, list[str]] = field(default_factory=dict)
    widths: Mapping[str, list[str]] = field(default_factory=dict)
    published: Mapping[str, list[str]] = field(default_factory=dict)
    stock: Mapping[str, str] = field(default_factory=dict)
    scale: Mapping[str, str] = field(default_factory=dict)
    rotary: Mapping[str, str] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)


def read(text: str, origin: str = "the table") -> Table:
    """A table from TOML text."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise LabelError(f"{origin} is not valid TOML: {error}.") from None
    content = _completed(content)
    known = {entry.name for entry in fields(Table)}
    unknown = sorted(set(content) - known)
    if unknown:
        raise LabelError(f"{origin} has the unknown section {unknown[0]!r}. The sections are: {', '.join(sorted(known))}.")
    if "family" not in content or not content.get("tensors"):
        raise LabelError(f"{origin} needs a `family` and a section `[tensors]`.")
    content["join"] = tuple(Join(tuple(entry["groups"]), entry["unless"]) for entry in content.get("join", ()))
    content["variant"] = tuple(content.get("variant", ()))
    return Table(**content)


def _completed(content: dict[str, Any]) -> dict[str, Any]:
    """A table that is `like` another: the other's sections, with its own lines before and instead of theirs."""
    if "like" not in content:
        return content
    other = content.pop("like")
    if other not in families():
        raise LabelError(f"the table is like that of {other!r}, which there is not. The families are: {', '.join(families())}.")
    made = _completed(tomllib.loads(_text(other)))
    for key, entry in content.items():
        is_section = isinstance(entry, dict) and key != "tiny"
        rest = {name: line for name, line in made.get(key, {}).items() if name not in entry} if is_section else {}
        made[key] = {**entry, **rest} if is_section else entry
    return made


def read_file(path: str | Path) -> Table:
    """A table from a file of the user's own."""
    path = Path(path)
    if not path.is_file():
        raise LabelError(f"there is no table at {str(path)!r}.")
    return read(path.read_text(encoding="utf-8"), f"the table {str(path)!r}")


@cache
def shipped(family: str) -> Table:
    """The table that raffm ships for a family, by its `model_type`."""
    if family not in families():
        raise UnknownFamilyError(
            f"no layout for model type {family!r}. Run `raffm label {family} > {family}.toml`, complete it, then "
            f"`raffm verify MODEL --table {family}.toml`. The families are: {', '.join(families())}."
        )
    return read(_text(family), f"the table of {family!r}")


def _text(family: str) -> str:
    return (resources.files("raffm.models.families") / f"{family}.toml").read_text(encoding="utf-8")


def families() -> tuple[str, ...]:
    """The families that raffm ships a table for."""
    folder = resources.files("raffm.models.families")
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


# -- wildcards -----------------------------------------------------------------------------------------------------


@cache
def _pattern(template: str) -> re.Pattern[str]:
    parts, end, seen = [], 0, set()
    for found in _WILDCARD.finditer(template):
        name = found["name"]
        parts += [_plain(template[end : found.start()]), f"(?P={name})" if name in seen else rf"(?P<{name}>\d+)"]
        seen.add(name)
        end = found.end()
    return re.compile("".join(parts) + _plain(template[end:]))


def _plain(text: str) -> str:
    return re.escape(text).replace(r"\*", ".*")


def match(template: str, name: str) -> Numbers | None:
    """What the wildcards of a template stand for in a name, or None where it does not match."""
    found = _pattern(template).fullmatch(name)
    return None if found is None else {key: int(number) for key, number in found.groupdict().items()}


def fill(template: str, numbers: Numbers, last: Numbers) -> str:
    """A template with its wildcards replaced; `last` holds the largest number of each."""

    def replaced(found: re.Match[str]) -> str:
        source = last if found["last"] else numbers
        if found["name"] not in source:
            raise LabelError(f"the wildcard {found.group()!r} in {template!r} stands for nothing.")
        return str(source[found["name"]] + int(found["shift"] or 0))

    return _WILDCARD.sub(replaced, template)


def wildcards(template: str) -> tuple[str, ...]:
    """The names of a template's wildcards, each once."""
    return tuple(dict.fromkeys(found["name"] for found in _WILDCARD.finditer(template)))


def first_match(templates: Mapping[str, Any], name: str) -> tuple[Any, Numbers] | None:
    """The entry of the first template that matches a name."""
    for template, entry in templates.items():
        numbers = match(template, name)
        if numbers is not None:
            return entry, numbers
    return None


def instances(template: str, candidates: Iterable[str]) -> dict[str, Numbers]:
    """The candidates that a template matches."""
    found = {name: match(template, name) for name in candidates}
    return {name: numbers for name, numbers in found.items() if numbers is not None}
