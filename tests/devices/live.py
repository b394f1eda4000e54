"""Memory that is counted, not guessed."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """The bytes of all tensors that a computation has alive, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.peak = dict[int, int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.follow(made)
        return made

    def follow(self, tensors: Any) -> None:
        for tensor in tree_iter(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.sizes:
                storage = tensor.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.sizes.values()))
