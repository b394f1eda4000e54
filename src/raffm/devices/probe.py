"""What one submodel costs, measured block by block on a skeleton: shapes are followed, nothing is computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from raffm.algebra.layout import Layout
from raffm.algebra.selection import Selection
from raffm.devices.basis import Guard
from raffm.models.label import named_tensors
from raffm.models.sample import sample_inputs, with_padding
from raffm.models.surgery import assembled
from raffm.models.table import Table

TOKENS = 128
"""The length of the text that costs are stated for."""


@dataclass(frozen=True)
class Reading:
    """What was measured while the model ran through one block, or (guard None) between blocks."""

    guard: Guard
    values: tuple[float, ...]


# -- FLOPs ---------------------------------------------------------------------------------------------------------


def read_flops(model: nn.Module, layout: Layout, table: Table, selection: Selection) -> list[Reading]:
    """The FLOPs of the forward pass of one example: outside of all blocks, then in every block."""
    try:
        return _counted_blocks(model, layout, table, selection, "meta")
    except LOOKED:
        return _counted_blocks(model, layout, table, selection, "cpu")


LOOKED = (RuntimeError, NotImplementedError)
"""What is raised where a model looks at the values of its inputs, and there are none: T5 finds a text's last token."""


def _counted_blocks(model: nn.Module, layout: Layout, table: Table, selection: Selection, device: str) -> list[Reading]:
    module = countable(_hollow(model, layout, selection, device))
    inputs = sample_inputs(model, table, batch=1, tokens=TOKENS, device=device, generator=torch.Generator())
    counter = FlopCounterMode(display=False)
    spent: dict[Guard, int] = {None: 0}
    inside: list[tuple[Guard, int]] = []

    def enter(guard: Guard, _: object) -> None:
        inside.append((guard, counter.get_total_flops()))

    def leave(guard: Guard, _: object) -> None:
        spent[guard] = spent.get(guard, 0) + counter.get_total_flops() - inside.pop()[1]

    with _watched(module, layout, selection, enter, leave), torch.no_grad(), taken_apart(), counter:
        module(**inputs)
    spent[None] = counter.get_total_flops() - sum(spent.values())
    return [Reading(guard, (float(count),)) for guard, count in spent.items()]


def taken_apart() -> AbstractContextManager[Any]:
    """Within this, attention is a few plain products, which a counter sees on every device."""
    return sdpa_kernel(SDPBackend.MATH)


def countable(module: nn.Module) -> nn.Module:
    """A module without weights, made ready to be counted.

    It cannot look for padding in ids that have no values, and the counter stumbles over parameters that are outputs.
    """
    config: Any = getattr(module, "config", None)
    if getattr(config, "pad_token_id", None) is not None and not getattr(config, "is_encoder_decoder", False):
        config.pad_token_id = None
    return module.eval().requires_grad_(False)


def _hollow(
    model: nn.Module, layout: Layout, selection: Selection, device: str, mode: AbstractContextManager[Any] | None = None
) -> nn.Module:
    """The submodel with nothing in its tensors."""
    tensors, sizes = named_tensors(model)[0], layout.sizes_of(selection)
    shapes = {name: label.shape(sizes) for name, label in layout.labels_of(selection).items()}
    with mode or nullcontext():
        made = {name: torch.empty(shape, dtype=tensors[name].dtype, device=device) for name, shape in shapes.items()}
    return assembled(model, layout, selection, {layout.name_in(selection, name): tensor for name, tensor in made.items()})


Watcher = Callable[[Guard, Any], None]


@contextmanager
def _watched(module: nn.Module, layout: Layout, selection: Selection, enter: Watcher, leave: Watcher) -> Iterator[None]:
    """Call `enter` with what goes into every block, `leave` with what comes out of it."""
    handles = []
    for guard, path in _blocks(layout, selection).items():
        block = module.get_submodule(path)
        handles += [
            block.register_forward_pre_hook(lambda _, *given, guard=guard: enter(guard, given), with_kwargs=True),
            block.register_forward_hook(lambda _, given, made, guard=guard: leave(guard, made)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _blocks(layout: Layout, selection: Selection) -> dict[Guard, str]:
    """The path of every kept block in the submodel, by its guard in the full model."""
    return {
        (name, index): layout.name_in(selection, f"{depth.path}.{index}")
        for name, depth in layout.depths.items()
        for index in (selection.kept[name].tolist() if name in selection.kept else range(depth.size))
    }


# -- memory --------------------------------------------------------------------------------------------------------


def read_memory(model: nn.Module, layout: Layout, table: Table, selection: Selection, batch: int) -> list[Reading]:
    """The bytes that forward and backward of a batch need beyond the weights, stretch by stretch in forward order.

    The values of a stretch: the bytes it holds for the backward pass; what its backward pass leaves behind in their
    place (gradients); and how far above its start the backward pass rises meanwhile.
    """
    try:  # fake tensors on the CPU choose the same kernels as real ones; meta tensors would not
        return _metered(model, layout, table, selection, batch, FakeTensorMode())
    except LOOKED:
        return _metered(model, layout, table, selection, batch, nullcontext())


def _metered(
    model: nn.Module, layout: Layout, table: Table, selection: Selection, batch: int, mode: AbstractContextManager[Any]
) -> list[Reading]:
    module = with_padding(_hollow(model, layout, selection, "cpu", mode).train())
    meter = _Meter()
    for tensor in named_tensors(module)[0].values():
        meter.ignore(tensor)
    with _watched(module, layout, selection, meter.enter, meter.leave), mode, meter:
        inputs = sample_inputs(model, table, batch=batch, tokens=TOKENS)
        loss = _loss(_main_output(module(**inputs), table))
        meter.turn()
        loss.backward()  # type: ignore[no-untyped-call]
        meter.finish()
    return [Reading(stretch.guard, (stretch.held, stretch.left, stretch.rise)) for stretch in meter.stretches]


def read_inference(model: nn.Module, layout: Layout, table: Table, selection: Selection, batch: int = 1) -> int:
    """The peak bytes of the forward pass of a batch, weights included."""
    try:
        return _inferred(model, layout, table, selection, batch, FakeTensorMode())
    except LOOKED:
        return _inferred(model, layout, table, selection, batch, nullcontext())


def _inferred(
    model: nn.Module, layout: Layout, table: Table, selection: Selection, batch: int, mode: AbstractContextManager[Any]
) -> int:
    module = with_padding(_hollow(model, layout, selection, "cpu", mode).eval())
    meter, held = _Meter(), named_tensors(module)[0].values()
    for tensor in held:
        meter.ignore(tensor)
    with mode, torch.no_grad(), meter:
        module(**sample_inputs(model, table, batch=batch, tokens=TOKENS))
    return meter.peak + sum(tensor.numel() * tensor.element_size() for tensor in held)


def _main_output(output: Any, table: Table) -> Tensor:
    named = [getattr(output, name, None) for name in table.outputs]
    found: Tensor = next(tensor for tensor in [*named, *tree_iter(output)] if isinstance(tensor, Tensor))
    return found


def _loss(output: Tensor) -> Tensor:
    scores = output.flatten(0, -2)
    return functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64))


@dataclass
class _Stretch:
    """A part of the run, from entering or leaving a block to the next such moment."""

    guard: Guard
    held: int = 0
    left: int = 0
    rise: int = 0


@dataclass(eq=False)
class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the bytes of live storages while a model runs forward and backward."""

    stretches: list[_Stretch] = field(default_factory=lambda: [_Stretch(None)])
    live: int = 0
    peak: int = 0
    start: int = 0
    calls: int = 0
    current: _Stretch | None = None
    known: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.calls += 1
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor):
                self._follow(tensor)
        return made

    def ignore(self, tensor: Tensor) -> None:
        """Do not count the storage of a tensor that was there before."""
        self.known.add(tensor.untyped_storage()._cdata)

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            weakref.finalize(storage, self._free, key, size)
            self.live += size
            self.peak = max(self.peak, self.live)

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size

    # -- forward: stretches open and close as the run enters and leaves blocks

    def enter(self, guard: Guard, given: Any) -> None:
        """The run goes into a block: the stretch before it ends here."""
        if self.current is not None:  # a checkpointed block that the backward pass runs again
            return
        if self.calls:
            self._close(given)
        else:
            self.stretches.pop()
        self._open(guard)

    def leave(self, guard: Guard, made: Any) -> None:
        """The run comes out of a block."""
        if self.current is None:
            self._close(made)
            self._open(None)

    def _open(self, guard: Guard) -> None:
        self.stretches.append(_Stretch(guard))
        self.calls, self.start = 0, self.live

    def _close(self, tensors: Any) -> None:
        """End a stretch; its backward pass will begin when the gradient of what it hands on is there."""
        stretch = self.stretches[-1]
        stretch.held = self.live - self.start
        handed = [tensor for tensor in tree_iter(tensors) if isinstance(tensor, Tensor) and tensor.requires_grad]
        if handed:
            handed[0].register_hook(lambda _: self._arrive(stretch))  # type: ignore[no-untyped-call]

    # -- backward: the same stretches from the last to the first

    def turn(self) -> None:
        """The forward pass is over."""
        self.stretches[-1].held = self.live - self.start
        self.current, self.start, self.peak = self.stretches[-1], self.live, self.live

    def _arrive(self, stretch: _Stretch) -> None:
        self.finish()
        self.current, self.start, self.peak = stretch, self.live, self.live

    def finish(self) -> None:
        """The backward pass of a stretch is over."""
        assert self.current is not None
        self.current.left = self.live - self.start + self.current.held
        self.current.rise = self.peak - self.start
