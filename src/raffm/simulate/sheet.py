"""A sheet: all trained numbers of a module in buffers that never move, and the passes of a step over them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raffm.methods.method import Fading
from raffm.models.label import named_tensors
from raffm.models.resnet import Rectifying, StaticBatchNorm
from raffm.models.rounding import Precision, widened
from raffm.models.rows import AFFINE, ROWS
from raffm.simulate import flat


@dataclass(frozen=True)
class Style:
    """How lanes compute: "float32", "tf32" (products in 19 bits) or "bfloat16", and where the channels of images lie."""

    precision: Precision = "float32"
    channels_last: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """What modules compute in."""
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32


@dataclass(frozen=True)
class Passes:
    """The passes over all numbers of a step, and how batch norms normalise: plain ones, or kernels."""

    collect: Callable[[Sequence[Tensor], Tensor, Tensor | None, bool, Tensor | None, Tensor], None] | None = None
    publish: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], None] = flat.publish
    normalise: Callable[..., Tensor] | None = None


class Sheet:
    """The trained numbers of a module, which computes with them from now on; those that it sees otherwise lie first.

    `fading` says below which limits a value is not seen, `factors` by what parameters are multiplied, by their names.
    """

    def __init__(
        self, module: nn.Module, style: Style, fading: Fading | None = None, factors: Mapping[str, float] | None = None
    ) -> None:
        """Put all trained parameters into one piece of memory."""
        named = dict(module.named_parameters())
        self.device = next(iter(named.values())).device
        self._style, self.fading, scaled = style, fading, factors or {}
        rounded = _rounded(module) if style.dtype != torch.float32 else set()
        faded = set(fading.limits) if fading is not None else set()
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        shadowed = [name for name in trained if name in rounded or name in faded or name in scaled]
        names = [*shadowed, *(name for name in trained if name not in set(shadowed))]
        self.slots, length = flat.arranged({name: named[name].shape for name in names}, style.channels_last)
        _, seen = flat.arranged({name: named[name].shape for name in shadowed}, style.channels_last)
        self.values = torch.zeros(length, device=self.device)
        self.gradients = torch.zeros(length, device=self.device)
        self.seen = torch.zeros(seen, device=self.device, dtype=style.dtype)
        self.limits = torch.zeros(length // flat.BLOCK, device=self.device) if fading is not None else None
        self.factors = flat.by_block(self.slots, length, scaled, other=1.0).to(self.device) if scaled else None
        self.targets = named_tensors(module)[0]
        for name, slot in self.slots.items():
            named[name].data = slot.view(self.seen if name in set(shadowed) else self.values)
            self.targets[name] = slot.view(self.values)
        for name, parameter in named.items():
            if name in rounded and name not in trained:
                parameter.data = parameter.data.to(style.dtype)
        self.parameters = [named[name] for name in names]
        self._places = [slot.view(self.gradients) for slot in self.slots.values()]
        self.passes = Passes()
        if style.dtype == torch.bfloat16:
            module.register_forward_hook(widened)
        self.has_simple_norms = any(self._is_simple(part) for part in module.modules())  # which kernels of ours can be
        for part in module.modules():
            if isinstance(part, _BatchNorm):
                itself: Any = weakref.proxy(part)  # or a lane that is given up would wait for the garbage collector
                part.forward = partial(self._normed, itself)  # type: ignore[method-assign]
            if isinstance(part, Rectifying):
                part.rectified = self._rectified  # type: ignore[method-assign]

    def _normed(self, norm: _BatchNorm, values: Tensor) -> Tensor:
        """A batch norm by kernels of ours or torch's own.

        The blocks of cuDNN's wait for each other: on a chip that several clients share, for good.
        """
        if self.passes.normalise is not None and self._is_simple(norm):
            return self.passes.normalise(values, *_affine(norm), norm.eps)
        was, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, False
        try:
            return norm.__class__.forward(norm, values)
        finally:
            torch.backends.cudnn.enabled = was

    def _rectified(self, norm: nn.Module, hidden: Tensor, beside: Tensor | None = None) -> Tensor:
        """As `Rectifying.rectified`, in one go where nothing else is done to what a norm gives."""
        if self.passes.normalise is None or not self._is_simple(norm) or norm._forward_hooks or norm._forward_pre_hooks:
            return Rectifying.rectified(norm, hidden, beside)
        return self.passes.normalise(hidden, *_affine(norm), norm.eps, True, beside)

    def _is_simple(self, norm: nn.Module) -> TypeGuard[StaticBatchNorm]:
        """Whether kernels can do what a norm does: it gathers nothing, and channels are the fastest axis."""
        return self._style.channels_last and isinstance(norm, StaticBatchNorm)

    @torch.no_grad()
    def show(self) -> None:
        """Bring what the module sees in line with the values."""
        if len(self.seen):
            self.passes.publish(self.values, self.seen, self.limits, self.factors)

    @torch.no_grad()
    def collect(self, gradients: Sequence[Tensor]) -> None:
        """Gradients into their places, in the stead of what is there."""
        laid = [_laid_like(gradient, slot) for gradient, slot in zip(gradients, self.slots.values(), strict=True)]
        aware = self.fading is not None and self.fading.aware
        if self.passes.collect is not None:
            self.passes.collect(laid, self.values, self.limits, aware, self.factors, self.gradients)
        else:
            flat.collect(laid, self._places)
            if self.limits is not None:
                flat.fade_gradients(self.gradients, self.values, self.limits, aware)
            if self.factors is not None:
                flat.scale_gradients(self.gradients, self.factors)

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Further gradients on top; None where there is none."""
        for gradient, place in zip(gradients, self._places, strict=True):
            if gradient is not None:
                place.add_(gradient)


def _rounded(module: nn.Module) -> set[str]:
    """All parameters but those of batch norms, which need their range."""
    norms = (child for child in module.modules() if isinstance(child, _BatchNorm))
    own = {id(parameter) for norm in norms for parameter in norm.parameters()}
    return {name for name, parameter in module.named_parameters() if id(parameter) not in own}


def _laid_like(gradient: Tensor, slot: flat.Slot) -> Tensor:
    return gradient.contiguous(memory_format=torch.channels_last if slot.channels_last else torch.contiguous_format)


def _affine(norm: nn.Module) -> list[Tensor]:
    """The weight and bias of a norm, or the tables whose first rows they are."""
    return [getattr(norm, f"{name}{ROWS}" if hasattr(norm, f"{name}{ROWS}") else name) for name in AFFINE]
