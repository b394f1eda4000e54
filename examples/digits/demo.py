"""Train a small ViT across thirty devices of three sizes on scikit-learn's digits, and hand each size its submodel.

python examples/digits/demo.py            # about a minute on two cores
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from rich.console import Console
from transformers import ViTConfig, ViTForImageClassification

from raffm import Evaluating, Local, Participation, load_data, load_submodel, train
from raffm.report.tables import as_rich
from raffm.report.watch import Display

FOLDER = Path("runs/demo")
ROUNDS = 60


def small_vit() -> ViTForImageClassification:
    """A ViT of 200,000 parameters: 16 patches, 4 layers x 64, 4 heads, FFN 256."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes))


def main() -> None:
    """Divide the data, train, look at the results, load a submodel."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    console = Console()
    data = load_data("digits", clients=30, split="dirichlet-balanced", alpha=1.0)
    console.print(
        f"{data.clients} clients, each with digits of its own mix: ten hold the whole model, ten a half, ten a quarter"
    )
    with Display(ROUNDS) as display:
        result = train(
            small_vit(),
            data,
            method="raffm",
            fleet="1, 1/2, 1/4",
            rounds=ROUNDS,
            local=Local(lr=2e-3, epochs=3),
            participation=Participation(0.4),
            evaluating=Evaluating(every=5),
            backend="pooled",
            folder=FOLDER,
            watcher=display,
        )
    console.print(as_rich(result.results, console.width))
    quarter = load_submodel(FOLDER / "submodels" / "1_4")
    params = sum(parameter.numel() for parameter in quarter.parameters())
    batch = result.plan.task.batch(data.dataset.test, torch.arange(1))
    digit = int(quarter(**batch.inputs).logits.argmax())
    console.print(
        f"the quarter-size submodel ({params:,} parameters) reads the first test digit as {digit}; it is {int(batch.labels)}"
    )
    console.print(f"report      {FOLDER / 'report.html'}")
    console.print(f"submodels   {FOLDER / 'submodels'}   (raffm.load_submodel reads each)")


if __name__ == "__main__":
    main()
