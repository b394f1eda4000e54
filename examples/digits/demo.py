"""Train a small ViT on scikit-learn's digits and look at its submodels, with and without salient parameter prioritization.

python examples/digits/demo.py            # about half a minute on two cores
"""

from __future__ import annotations

import statistics
import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from transformers import ViTConfig, ViTForImageClassification

from raffm import RaFFM
from raffm.devices.cost import CostModel

EPOCHS = 25


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,437 images (8 x 8, one channel) to train on and 360 to test on, with their labels."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return images[train], labels[train], images[test], labels[test]


def small_vit() -> ViTForImageClassification:
    """A ViT of 200,000 parameters: 16 patches, 4 layers x 64, 4 heads, FFN 256."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes))


def train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Plain training with AdamW, one cosine."""
    batch = 64
    steps = EPOCHS * (len(images) // batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    draw = torch.Generator().manual_seed(1)
    model.train()
    for _ in track(range(steps), "training"):
        picked = torch.randint(len(images), (batch,), generator=draw)
        loss = functional.cross_entropy(model(pixel_values=images[picked]).logits, labels[picked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of images that a model gets right."""
    return float((model(pixel_values=images).logits.argmax(1) == labels).float().mean())


@torch.no_grad()
def latency(model: nn.Module, image: Tensor, repeats: int = 30) -> float:
    """Median milliseconds for one image."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        model(pixel_values=image)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def main() -> None:
    """Train, rank, cut, compare."""
    torch.set_num_threads(1)  # the model is too small for more to pay
    images, labels, test_images, test_labels = digits()
    model = small_vit()
    train(model, images, labels)

    plain, ranked, informed = RaFFM(model), RaFFM(model), RaFFM(model)
    ranked.salient_parameter_prioritization()
    batches = [
        {"pixel_values": images[start : start + 64], "labels": labels[start : start + 64]} for start in range(0, 512, 64)
    ]
    informed.salient_parameter_prioritization("taylor", batches=batches)
    cost = CostModel(model, ranked.layout, ranked.table, free=tuple(ranked.space.sizes))
    table = Table(title="One model, every size (digits, 360 test images, no further training)")
    for heading in ("share", "parameters", "MFLOPs", "ms", "no SPP", "SPP", "SPP (Taylor)"):
        table.add_column(heading, justify="right")
    for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5):
        budget = int(plain.total_params * share)
        small, params, config = informed.fit(max_params=budget)
        others = [elastic.resource_aware_model(config)[0] for elastic in (plain, ranked)]
        table.add_row(
            f"{share:.0%}",
            f"{params:,}",
            f"{cost.flops(ranked.layout.sizes_of(ranked.select(config))) / 1e6:.2f}",
            f"{latency(small, test_images[:1]):.2f}",
            *(f"{accuracy(each, test_images, test_labels):.1%}" for each in (*others, small)),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
