"""Memory of a GPU: whether there is room, and what is said where there is none."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Taken:
    """How much memory torch had, and how much of it was in use."""

    reserved: int
    used: int

    def most_since(self) -> int:
        """The most that was had beyond it and what is still in use now.

        Had, not used: every stream takes memory of its own, in a capture as before it. That in which cuBLAS works counts.
        """
        torch._C._cuda_clearCublasWorkspaces()
        kept = torch.cuda.memory_allocated() - self.used
        return max(0, torch.cuda.max_memory_reserved() - self.reserved - kept)


def taken() -> Taken:
    """What is had now, nothing of it spare."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return Taken(torch.cuda.memory_reserved(), torch.cuda.memory_allocated())


def make_sure_of(room: int) -> None:
    """Fail now where so many bytes are not to be had."""
    torch.cuda.empty_cache()
    torch.empty(room, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
