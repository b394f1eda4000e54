"""Dropout on a CPU: sixteen random bits a number, drawn 64 at a time.

There torch draws a float for every number (on processors that are not Intel's, one after the other), which takes a fifth of a
small transformer's step. The bits come from the same seeded generator, and are the same on every processor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.overrides import TorchFunctionMode

STEPS = 1 << 16
"""Chances are counted in parts of this."""


def in_sixteen_bits(module: nn.Module) -> AbstractContextManager[object]:
    """Within it a module's dropout draws so, if it has any and lies on a CPU: calls of torch take a microsecond longer."""
    is_here = next(module.parameters()).device.type == "cpu"
    has_any = is_here and any(isinstance(child, nn.Dropout) and child.p > 0 for child in module.modules())
    return SixteenBits() if has_any else nullcontext()


class SixteenBits(TorchFunctionMode):
    """Within it, dropout of tensors on a CPU draws sixteen bits a number."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, given: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        named = named or {}
        return (_dropped if function is dropout else function)(*given, **named)


def _dropped(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """What `torch.nn.functional.dropout` promises."""
    dropped = round(p * STEPS)
    if not training or input.device.type != "cpu" or not 0 < dropped < STEPS:
        return dropout(input, p, training, inplace)
    kept = _bits(input.numel()).view(input.shape) >= dropped - STEPS // 2
    factors = kept.to(input.dtype).mul_(STEPS / (STEPS - dropped))
    return input.mul_(factors) if inplace else input * factors


def _bits(count: int) -> Tensor:
    """So many numbers of sixteen random bits each, from the generator that torch's own dropout draws from."""
    return torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:count]
