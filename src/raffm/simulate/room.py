"""Memory of a GPU: whether there is room, and what is said where there is none."""

from __future__ import annotations

import torch

from raffm.errors import RunError

FULL = ("out of memory", "unable to find an engine", "ALLOC_FAILED")
"""How the libraries on a GPU say that its memory is full; cuDNN finds no algorithm whose buffers fit."""


def is_full(error: RuntimeError) -> bool:
    """Whether an error says that memory is full."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(words in str(error) for words in FULL)


def full(what: str, said: str, remedy: str) -> RunError:
    """What did not fit, and what to do."""
    asked = said.partition(". GPU")[0].splitlines()[0]
    used, total = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[1]
    held = f"{used / 2**30:.2f} of its {total / 2**30:.2f} GiB are in use"
    return RunError(f"the GPU's memory does not hold {what}: {asked} ({held}). {remedy}.")


def make_sure_of(room: int) -> None:
    """Fail now where so many bytes are not to be had."""
    torch.cuda.empty_cache()
    torch.empty(room, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
