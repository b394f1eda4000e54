"""A GPU that is not there: streams that do at once what they are told, and graphs that do recorded operations again.

So the captured backend runs whole, on the CPU: what it queues, keeps, compares, gives up and merges. What only a real one
shows (kernels, their order on several streams, speed) is for `benchmarks.gpu`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from simulate.order import Stream

FULL = RuntimeError("CUDA out of memory. Tried to allocate more. GPU 0 has too little")


class Generator:
    """The generator of random numbers, which says whether it drew some."""

    def get_offset(self) -> object:
        return torch.default_generator.get_state().tolist()


class Graph(TorchDispatchMode):
    """Operations, with the tensors that they read and wrote, done again in their places."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        found = operation(*given, **(named or {}))
        self.done.append((operation, given, named or {}, found))
        return found

    def capture_begin(self) -> None:
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    @torch.no_grad()
    def replay(self) -> None:
        for operation, given, named, before in self.done:
            found = operation(*given, **named)
            for place, tensor in zip(tree_leaves(before), tree_leaves(found), strict=True):
                if isinstance(place, Tensor) and place.data_ptr() != tensor.data_ptr():
                    place.copy_(tensor)


def pretended(patch: pytest.MonkeyPatch) -> None:
    """Let torch say that there is one."""
    functions = {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": nullcontext,
        "CUDAGraph": Graph,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "manual_seed": torch.manual_seed,
        "reset_peak_memory_stats": lambda: None,
        "memory_reserved": lambda: 0,
        "max_memory_reserved": lambda: 0,
        "memory_allocated": lambda: 0,
        "mem_get_info": lambda: (0, 1),
        "default_generators": (Generator(),),
    }
    for name, function in functions.items():
        patch.setattr(torch.cuda, name, function)
    patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    patch.setattr("raffm.simulate.graph.with_kernels", lambda *_: [])  # which are for a real one
    patch.setattr("raffm.simulate.graph.make_sure_of", lambda _: None)
