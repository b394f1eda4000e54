"""Entries of configs by their paths: `vision_config.image_size`, also through plain dicts."""

from __future__ import annotations

from typing import Any


def entry(owner: Any, path: str) -> Any:
    """What stands at a path; None where something on the way is missing."""
    for part in path.split("."):
        owner = owner.get(part) if isinstance(owner, dict) else getattr(owner, part, None)
    return owner


def set_entry(owner: Any, path: str, value: Any) -> None:
    """Set what stands at a path that there is."""
    *owners, key = path.split(".")
    for part in owners:
        owner = owner[part] if isinstance(owner, dict) else getattr(owner, part)
    if isinstance(owner, dict):
        owner[key] = value
    else:
        setattr(owner, key, value)


def has_owner(owner: Any, path: str) -> bool:
    """Whether there is something that the last part of a path can be an entry of."""
    above = path.rpartition(".")[0]
    return not above or entry(owner, above) is not None
