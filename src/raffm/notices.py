"""What raffm says while it works: one line each, in the log `raffm`."""

from __future__ import annotations

import logging


def notice(words: str) -> None:
    """Say something that a person should know, though the work goes on."""
    logging.getLogger("raffm").warning("raffm: %s", words)
