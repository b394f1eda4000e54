"""What the machine at hand can do, measured in a few seconds: free memory, and FLOP/s in training."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from raffm.devices.probe import taken_apart
from raffm.devices.timing import timed

SECONDS = 2.0
"""How long steps are timed."""

WIDTH, TOKENS, BATCH = 256, 64, 16


@dataclass(frozen=True)
class Machine:
    """A machine as it was found."""

    name: str
    memory: int
    """Bytes that programs can have now."""
    speed: float
    """FLOP/s of float32 training steps, forwards and backwards: of a layer of a transformer."""
    threads: int


def measure(seconds: float = SECONDS) -> Machine:
    """Look at this machine and let it work for a moment."""
    import psutil

    return Machine(_name(), int(psutil.virtual_memory().available), training_speed(seconds), torch.get_num_threads())


def training_speed(seconds: float = SECONDS) -> float:
    """FLOP/s that training steps reach: the median over as many steps as fit into so many seconds, at least three."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    inputs = torch.randn(BATCH, TOKENS, WIDTH)

    def step() -> None:
        layer.zero_grad()
        layer(inputs).square().mean().backward()

    with FlopCounterMode(display=False) as counter, taken_apart():
        step()
    flops = counter.get_total_flops()
    return float(flops) / timed(step, sys.maxsize, seconds, warm_up=0).median


def _name() -> str:
    return f"{platform.node()}, {platform.machine()}, {platform.system()}"
