"""ResNets for small images: a 3x3 stem, no pooling before the blocks, post-activation basic blocks.

The default is the ResNet-18 of the federated literature: 11,173,962 parameters at 10 classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from raffm.errors import SpaceError


@dataclass
class ResNetConfig:
    """The shape of a ResNet. `group_width` is the number of channels in one norm group, for `norm="group"`."""

    widths: tuple[int, ...] = (64, 128, 256, 512)
    depths: tuple[int, ...] = (2, 2, 2, 2)
    classes: int = 10
    channels: int = 3
    image_size: int = 32
    norm: Literal["batch", "group"] = "batch"
    group_width: int = 8
    model_type: str = "raffm_resnet"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they are saved."""
        return asdict(self)


@dataclass
class Logits:
    """What the model returns, by the name that Hugging Face models use."""

    logits: Tensor


class StaticBatchNorm(nn.BatchNorm2d):
    """Batch norm that uses batch statistics in training and never updates its running ones there.

    `recalibrate` fills those, once the weights are final. Averaging running statistics of clients mixes
    distributions of different models; this does not.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by batch statistics in training, by the recalibrated ones in evaluation."""
        if not self.training:
            return super().forward(input)
        return functional.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)


class Rectifying(nn.Module):
    """A module that rectifies what its norms give."""

    @staticmethod
    def rectified(norm: nn.Module, hidden: Tensor, beside: Tensor | None = None) -> Tensor:
        """Normed, added to what is beside it, and rectified; a backend may put one kernel in the place of the three."""
        normed: Tensor = norm(hidden)
        return functional.relu(normed if beside is None else normed + beside)


class ResNet(Rectifying):
    """A ResNet for small images; `ResNet()` is the ResNet-18."""

    def __init__(self, config: ResNetConfig | None = None) -> None:
        """Build one with random weights."""
        super().__init__()
        self.config = config or ResNetConfig()
        _refuse(self.config)
        self.group_width = self.config.group_width if self.config.norm == "group" else 1
        width = self.config.widths[0]
        self.stem = ConvNorm(self.config.channels, width, 3, 1, self.config)
        stages = []
        for place, (new, depth) in enumerate(zip(self.config.widths, self.config.depths, strict=True)):
            strides = [1 if place == 0 else 2] + [1] * (depth - 1)
            inputs = [width] + [new] * (depth - 1)
            stages.append(
                nn.Sequential(*(Block(old, new, stride, self.config) for old, stride in zip(inputs, strides, strict=True)))
            )
            width = new
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(width, self.config.classes)

    def forward(self, pixel_values: Tensor) -> Logits:
        """Class scores for images (batch, channels, height, width)."""
        hidden = self.rectified(self.stem.norm, self.stem.conv(pixel_values))
        for stage in self.stages:
            hidden = stage(hidden)
        return Logits(self.head(hidden.mean(dim=(2, 3))))


def _refuse(config: ResNetConfig) -> None:
    if len(config.widths) != len(config.depths) or min(*config.widths, *config.depths) < 1:
        raise SpaceError(f"widths {config.widths} and depths {config.depths} must be as many, and each at least 1.")
    odd = [width for width in config.widths if width % config.group_width]
    if config.norm == "group" and odd:
        raise SpaceError(f"a width of {odd[0]} is no multiple of the {config.group_width} channels in a norm group.")


class ConvNorm(nn.Module):
    """A convolution and the norm that the config asks for."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, config: ResNetConfig) -> None:
        """Build one with random weights."""
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        self.norm = _norm(outputs, config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Normed, not yet activated."""
        normed: Tensor = self.norm(self.conv(hidden))
        return normed


class Block(Rectifying):
    """Two convolutions with a shortcut beside them."""

    def __init__(self, inputs: int, outputs: int, stride: int, config: ResNetConfig) -> None:
        """Build one with random weights."""
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = _norm(outputs, config)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, padding=1, bias=False)
        self.norm2 = _norm(outputs, config)
        is_identity = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if is_identity else ConvNorm(inputs, outputs, 1, stride, config)

    def forward(self, hidden: Tensor) -> Tensor:
        """What the next block reads."""
        inner = self.rectified(self.norm1, self.conv1(hidden))
        return self.rectified(self.norm2, self.conv2(inner), self.shortcut(hidden))


def _norm(channels: int, config: ResNetConfig) -> nn.Module:
    if config.norm == "group":
        return nn.GroupNorm(channels // config.group_width, channels)
    return StaticBatchNorm(channels)


def recalibrate(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Fill the running statistics of every batch norm with the mean of those of all batches, each counted alike.

    Everything else runs in evaluation mode; weights do not change.
    """
    was_training = model.training
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [(type(norm), norm.momentum) for norm in norms]
    model.eval()
    for norm in norms:
        norm.__class__ = nn.BatchNorm2d  # a static one would not look at what it sees
        norm.reset_running_stats()
        norm.momentum = None  # an equal mean over all batches
        norm.train()
    try:
        with torch.no_grad():
            for batch in batches:
                model(batch)
    finally:
        for norm, (kind, momentum) in zip(norms, before, strict=True):
            norm.__class__, norm.momentum = kind, momentum
        model.train(was_training)
