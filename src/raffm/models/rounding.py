"""Modules that compute in bfloat16, half of the bits of float32, where a processor is faster at it.

Parameters, losses and gradients stay float32: matrices are rounded on their way into products and convolutions.
"""

from __future__ import annotations

import platform
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from raffm.notices import notice

Precision = Literal["float32", "tf32", "bfloat16"]

INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""What processors call theirs for bfloat16."""


def rounded(module: nn.Module, device: str) -> None:
    """Let a module compute in bfloat16 from now on, and say what it says in float32."""
    forward = torch.autocast(device, torch.bfloat16)(module.forward)
    if device == "cpu":
        attend_plainly(module)
        forward = sdpa_kernel(SDPBackend.MATH)(forward)  # of those that have no plain one
    module.forward = forward
    module.register_forward_hook(widened)


def attend_plainly(module: nn.Module) -> None:
    """Let attention be two products and a softmax: on a CPU torch's own goes backward slowly, or widens its products."""
    for child in module.modules():
        config: Any = getattr(child, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = "eager"


def widened(module: nn.Module, _: Any, output: Any) -> Any:
    """What a model says in float32, so that losses are: a hook."""
    if isinstance(output, Tensor):
        return output.float()
    for name, entry in list(vars(output).items()):
        if isinstance(entry, Tensor) and entry.dtype == torch.bfloat16:
            setattr(output, name, entry.float())
    return output


def warn_of_slow_rounding(device: str) -> None:
    """Say so where bfloat16 is computed by detours."""
    if device == "cpu" and not any(torch.cpu.get_capabilities().get(name) for name in INSTRUCTIONS):
        notice(f"this processor ({platform.machine()}) has no instructions for bfloat16: float32 may be faster.")
