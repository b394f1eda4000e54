"""What every contender does: a CNN of 136,874 parameters, 100 clients with synthetic images, 10 of them a round, SGD.

All contenders start from the same weights, hold the same examples and make the same number of the same steps.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

CLIENTS, COHORT, CLASSES = 100, 10, 10
BATCH, RATE = 10, 0.1
WORKERS = 2

torch.set_num_threads(1)


class CNN(nn.Module):
    """Two convolutions and two linear maps, for images of 3 x 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = nn.Linear(32 * 8 * 8, 64)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """The logits."""
        x = torch.max_pool2d(torch.relu(self.first(pixel_values)), 2)  # (batch, 16, 16, 16)
        x = torch.max_pool2d(torch.relu(self.second(x)), 2)  # (batch, 32, 8, 8)
        logits: Tensor = self.head(torch.relu(self.hidden(x.flatten(1))))
        return logits


def model() -> CNN:
    """The model that everybody starts from."""
    torch.manual_seed(0)
    return CNN()


@cache
def stored(samples: int) -> tuple[Tensor, Tensor]:
    """All clients' images (uint8) and labels, client by client: a faint pattern for each class under noise."""
    draw = torch.Generator().manual_seed(1)
    patterns = torch.randn(CLASSES, 3, 32, 32, generator=draw)
    labels = torch.randint(0, CLASSES, (CLIENTS * samples,), generator=draw)
    noise = torch.randn(len(labels), 3, 32, 32, generator=draw)
    images = (128 + 18 * patterns[labels] + 50 * noise).clamp(0, 255).to(torch.uint8)
    return images, labels


@cache
def examples(samples: int) -> tuple[Tensor, Tensor]:
    """All clients' pixels between -1 and 1 (float32) and labels."""
    images, labels = stored(samples)
    return (images.float() / 255 - 0.5) / 0.5, labels


def own(samples: int, client: int) -> tuple[Tensor, Tensor]:
    """One client's pixels and labels."""
    pixels, labels = examples(samples)
    return pixels[client * samples : (client + 1) * samples], labels[client * samples : (client + 1) * samples]


def cohort(round: int) -> list[int]:
    """The clients of a round, for contenders that do not draw them themselves."""
    return torch.randperm(CLIENTS, generator=torch.Generator().manual_seed(round))[:COHORT].tolist()


def train(module: nn.Module, pixels: Tensor, labels: Tensor) -> None:
    """One epoch over a client's shuffled examples: the steps that everybody makes."""
    optimizer = torch.optim.SGD(module.parameters(), RATE, fused=True)
    for picks in torch.randperm(len(labels)).split(BATCH):
        optimizer.zero_grad()
        functional.cross_entropy(module(pixels[picks]), labels[picks]).backward()
        optimizer.step()


@torch.no_grad()
def loss_of(module: nn.Module, samples: int) -> float:
    """The mean loss over at most 1000 training examples."""
    pixels, labels = (part[:1000] for part in examples(samples))
    return float(functional.cross_entropy(module(pixels), labels))
