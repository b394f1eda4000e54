"""The two pretrained models, each with data, a loss and an accuracy."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments import preparing

DATA = Path(os.environ.get("RAFFM_DATA", "../shared/data"))
MODELS = Path(os.environ.get("RAFFM_MODELS", "../shared/models"))


@dataclass(frozen=True)
class Subject:
    """A pretrained model and what it is asked to do."""

    name: str
    task: str
    model: nn.Module
    train: list[dict[str, Tensor]]
    test: list[dict[str, Tensor]]
    head: nn.Linear | None = None

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Class scores: the model's own, or a linear probe on its mean token."""
        if self.head is None:
            scores: Tensor = model(pixel_values=batch["pixel_values"]).logits
            return scores
        return self.head(embedded(model, batch))  # type: ignore[no-any-return]

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Cross-entropy."""
        return functional.cross_entropy(self.logits(model, batch), batch["labels"])

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """The share of test examples that a model gets right."""
        right = sum(int((self.logits(model, batch).argmax(1) == batch["labels"]).sum()) for batch in self.test)
        return right / sum(len(batch["labels"]) for batch in self.test)


def embedded(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over tokens, as the model was trained to be read."""
    mask = batch["attention_mask"]
    hidden: Tensor = model(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
    return functional.normalize((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=1)


def vit(test_size: int) -> Subject:
    """A ViT of 5.4 million parameters, pretrained on CIFAR-100."""
    from transformers import ViTForImageClassification

    model = ViTForImageClassification.from_pretrained(MODELS / "vit-tiny-cifar100", dtype=torch.float32).eval()
    train, test = (
        list(_images(DATA / "cifar100" / f"{part}.parquet", count)) for part, count in (("train", 512), ("test", test_size))
    )
    return Subject("vit-tiny-cifar100", f"CIFAR-100, {test_size:,} test images", model, train, test)


def _images(path: Path, count: int, batch: int = 128) -> Iterator[dict[str, Tensor]]:
    import numpy as np
    import pyarrow.parquet as parquet
    from PIL import Image

    rows = parquet.ParquetFile(path).read_row_group(0).slice(0, count).to_pylist()
    for start in range(0, count, batch):
        part = rows[start : start + batch]
        pixels = np.stack([np.asarray(Image.open(io.BytesIO(row["img"]["bytes"])).convert("RGB")) for row in part])
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
        yield {"pixel_values": images, "labels": torch.tensor([row["fine_label"] for row in part])}


def minilm(test_size: int) -> Subject:
    """All-MiniLM-L6-v2 (BERT, 22.7 million parameters) under a linear probe for news topics."""
    from transformers import AutoTokenizer, BertModel

    folder = preparing.minilm()
    model = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    train = list(_texts(DATA / "ag_news" / "train.parquet", 1024, tokenizer))
    test = list(_texts(DATA / "ag_news" / "test.parquet", test_size, tokenizer))
    return Subject("all-MiniLM-L6-v2", f"AG News, {test_size:,} test texts", model, train, test, _probe(model, train))


def _texts(path: Path, count: int, tokenizer: Any, batch: int = 64) -> Iterator[dict[str, Tensor]]:
    import pyarrow.parquet as parquet

    table = parquet.read_table(path, columns=["text", "label"]).to_pydict()
    order = torch.randperm(len(table["label"]), generator=torch.Generator().manual_seed(0))[:count].tolist()
    for start in range(0, count, batch):
        part = order[start : start + batch]
        tokens = tokenizer(
            [table["text"][row] for row in part], padding=True, truncation=True, max_length=64, return_tensors="pt"
        )
        ids = {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}
        yield {**ids, "labels": torch.tensor([table["label"][row] for row in part])}


def _probe(model: nn.Module, train: list[dict[str, Tensor]]) -> nn.Linear:
    """A logistic regression on the full model's embeddings."""
    from sklearn.linear_model import LogisticRegression

    with torch.no_grad():
        features = torch.cat([embedded(model, batch) for batch in train])
    labels = torch.cat([batch["labels"] for batch in train])
    fitted = LogisticRegression(C=10.0, max_iter=1000).fit(features.numpy(), labels.numpy())
    head = nn.Linear(features.shape[1], len(fitted.classes_))
    with torch.no_grad():
        head.weight.copy_(torch.tensor(fitted.coef_))
        head.bias.copy_(torch.tensor(fitted.intercept_))
    return head.requires_grad_(False)
