"""Streams of a GPU that is not there, whose work may come in any order that events allow.

Operations are done at once; what is checked is that each would find, whatever the order, what it found: that whatever it
reads was written before, by its own stream or one that was waited for, and that memory it takes is no longer read elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Stream:
    """A queue that knows how far every other had come where it waited for it last."""

    def __init__(self) -> None:
        self.past: Counter[Stream] = Counter()

    def tick(self) -> int:
        """The number of one more operation."""
        self.past[self] += 1
        return self.past[self]

    def record_event(self) -> Counter[Stream]:
        return Counter(self.past)

    def wait_event(self, event: Counter[Stream]) -> None:
        self.past |= event

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.past)

    def has_seen(self, stream: Stream, number: int) -> bool:
        return self.past[stream] >= number

    def is_joined(self, other: Stream) -> bool:
        """Whether all that another did is past."""
        return self.past[other] >= other.past[other]


@dataclass(eq=False)
class Memory:
    """A piece of memory: the stream that took it, who wrote it last, and who read it since."""

    storage: Any
    taken_by: Stream | None
    written: dict[Stream, int] = field(default_factory=dict)
    read: dict[Stream, int] = field(default_factory=dict)

    def unseen(self, stream: Stream, *uses: dict[Stream, int]) -> bool:
        """Whether some use of it is not known to be past where a stream is."""
        return any(not stream.has_seen(other, number) for use in uses for other, number in use.items())


class Order(TorchDispatchMode):
    """Watches operations; `found` says which of them could come too early."""

    def __init__(self, current: list[Stream]) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._current = current
        self._known: dict[int, Memory] = {}
        self._freed: list[Memory] = []

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        stream, named = self._current[-1], named or {}
        inputs = [self._memory(tensor, None) for tensor in _tensors((given, named))]
        changed = [self._memory(tensor, None) for tensor in _changed(operation, given, named)]
        made = operation(*given, **named)
        outputs = [self._memory(tensor, stream, str(operation)) for tensor in _tensors(made)]
        if not changed and all(memory in inputs for memory in outputs):
            return made  # a view
        number = stream.tick()
        for memory in inputs:
            self._note(memory.unseen(stream, memory.written), f"{operation} reads what is not written")
            memory.read[stream] = number
        for memory in (*changed, *(memory for memory in outputs if memory not in inputs)):
            others = {reader: last for reader, last in memory.read.items() if reader is not stream}
            self._note(memory.unseen(stream, memory.written, others), f"{operation} writes what is used")
            memory.written, memory.read = {stream: number}, {}
        return made

    def _memory(self, tensor: Tensor, stream: Stream | None, operation: str = "") -> Memory:
        """The memory of a tensor; where it is new, what was freed by the same stream may be given out again."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:  # no address comes twice while somebody looks at it, even weakly
            self._known[storage._cdata] = Memory(StorageWeakRef(storage), stream)
            if stream is not None:
                self._take(stream, operation)
        return self._known[storage._cdata]

    def _take(self, stream: Stream, operation: str) -> None:
        gone = {key: memory for key, memory in self._known.items() if memory.storage.expired()}
        self._freed += [memory for memory in gone.values() if memory.taken_by is not None]
        self._known = {key: memory for key, memory in self._known.items() if key not in gone}
        for memory in (each for each in self._freed if each.taken_by is stream):
            self._note(memory.unseen(stream, memory.written, memory.read), f"{operation} takes memory that is used")
        self._freed = [memory for memory in self._freed if memory.taken_by is not stream]

    def _note(self, is_early: bool, what: str) -> None:
        self.found[what] += is_early


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _changed(operation: Any, given: Any, named: Any) -> list[Tensor]:
    """The tensors that an operation writes."""
    arguments = operation._schema.arguments
    pairs = [*zip(arguments, given, strict=False), *((each, named[each.name]) for each in arguments if each.name in named)]
    return [tensor for about, value in pairs if about.alias_info and about.alias_info.is_write for tensor in _tensors(value)]


@contextmanager
def watched(patch: pytest.MonkeyPatch) -> Iterator[Order]:
    """Let torch's streams be these, and watch what is done."""
    current = [Stream()]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    patch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    patch.setattr(torch.cuda, "stream", on)
    with Order(current) as order:
        yield order
    order.found = +order.found
