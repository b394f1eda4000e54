"""Libraries that only some parts of raffm need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from raffm.errors import RaffmError


def library(name: str, missing: RaffmError) -> Any:
    """A module of a library, or the error that says how to get it."""
    try:
        return import_module(name)
    except ImportError:
        raise missing from None
