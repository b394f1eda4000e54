"""What is learnt: how examples become a batch, what the model says to it, its loss and its metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from raffm.data.examples import Dataset, Examples
from raffm.data.metrics import named_metrics
from raffm.errors import DataError, RunError
from raffm.models.load import Kind


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs by the names of the model's arguments, and labels."""

    inputs: Mapping[str, Tensor]
    labels: Tensor


class Task(Protocol):
    """Five functions; bring your own for another model, loss or metric. None of them may wait for the device.

    Where more is asked of a model than in training, such as to write, a sixth says it: `predict(module, batch)`. Where one
    model can teach another, a seventh says how far it is from that: `taught(outputs, teacher)`, a loss for every example.
    """

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """An integer table (*shape, k) that says how each example is augmented; k may be 0."""
        ...

    def batch(self, examples: Examples, picks: Tensor, moves: Tensor | None = None) -> Batch:
        """The examples at `picks` as the model takes them; `moves` is a row of the table, None for plain ones."""
        ...

    def forward(self, module: nn.Module, batch: Batch) -> Tensor:
        """What the model says: a row for every example."""
        ...

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """A loss for every example; training takes their mean."""
        ...

    def metrics(self, outputs: Tensor, labels: Tensor) -> dict[str, float]:
        """Metrics of some examples, higher is better, the most important first."""
        ...


class Classification:
    """One label an example, whatever the inputs are."""

    def forward(self, module: nn.Module, batch: Batch) -> Tensor:
        """The logits."""
        return logits_of(module, batch)

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy."""
        return functional.cross_entropy(outputs, labels, reduction="none")

    def taught(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        """Cross-entropy with the teacher's probabilities."""
        return functional.cross_entropy(outputs, teacher.softmax(-1), reduction="none")

    def metrics(self, outputs: Tensor, labels: Tensor) -> dict[str, float]:
        """Accuracy, macro and weighted F1."""
        return classification_metrics(outputs, labels)


@dataclass(frozen=True)
class ImageClassification(Classification):
    """Images (uint8, by channel) with one label each.

    `mean` and `std` normalise pixels between 0 and 1, one number a channel. `crop` is the padding of random crops
    in pixels (0: none), `flip` mirrors half of the images; both are drawn for training alone. `size` is the side to
    which a model wants its images enlarged, on the device (0: as they are stored).
    """

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    crop: int = 0
    flip: bool = False
    size: int = 0

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not all(spread > 0 for spread in self.std):
            raise DataError(f"mean {self.mean} and std {self.std} need a number for every channel, and each std above 0.")
        if self.crop < 0 or self.size < 0:
            raise DataError(f"crop is {self.crop!r} and size {self.size!r}; both are at least 0 pixels.")

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Where the crop begins, down and right, and whether the image is mirrored."""
        begins = torch.randint(0, 2 * self.crop + 1, (*shape, 2), generator=generator)
        flips = torch.randint(0, 2 if self.flip else 1, (*shape, 1), generator=generator)
        return torch.cat([begins, flips], -1)

    def batch(self, examples: Examples, picks: Tensor, moves: Tensor | None = None) -> Batch:
        """Normalised pixels, cropped and mirrored as `moves` says."""
        stored = examples.inputs["pixel_values"]
        picks = picks.to(stored.device)
        pixels = stored.index_select(0, picks)
        if moves is not None and (self.crop or self.flip):
            pixels = _moved(pixels, moves.to(stored.device), self.crop)
        factor, shift = _affine(self.mean, self.std, stored.device)
        values = pixels.float().mul_(factor).add_(shift)
        if self.size and self.size != values.shape[-1]:
            values = functional.interpolate(values, size=self.size, mode="bilinear", antialias=True)
        return Batch({"pixel_values": values}, examples.labels.index_select(0, picks))


@dataclass(frozen=True)
class TextClassification(Classification):
    """Token ids with one label each. Batches are as long as their longest text, rounded up to a few lengths.

    These are multiples of `multiple` tokens, of which long ones are more apart: at most eight between a number and its
    double. `named` are the metrics that count, the most important first; accuracy and F1 by default.
    """

    multiple: int = 8
    named: tuple[str, ...] = ()

    def metrics(self, outputs: Tensor, labels: Tensor) -> dict[str, float]:
        """Those that are named, then accuracy, macro and weighted F1."""
        return {**named_metrics(self.named, outputs, labels), **super().metrics(outputs, labels)}

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Texts are not augmented."""
        return torch.zeros((*shape, 0), dtype=torch.int64)

    def batch(self, examples: Examples, picks: Tensor, moves: Tensor | None = None) -> Batch:
        """Ids and their attention mask, cut to the longest text of the batch.

        Lengths stay on the CPU, so that reading one does not wait for the device.
        """
        lengths = examples.inputs["lengths"][picks.to(examples.inputs["lengths"].device)]
        stored = examples.inputs["input_ids"]
        longest = min(_bucket(int(lengths.max()), self.multiple), stored.shape[1])
        picks = picks.to(stored.device)
        ids = stored[picks, :longest].long()
        mask = torch.arange(longest, device=stored.device) < lengths.to(stored.device)[:, None]
        inputs = {"input_ids": ids, "attention_mask": mask.long()}
        if "token_type_ids" in examples.inputs:
            inputs["token_type_ids"] = examples.inputs["token_type_ids"][picks, :longest].long()
        return Batch(inputs, examples.labels[picks])


@dataclass(frozen=True)
class TextRegression(TextClassification):
    """Token ids with a number each: how alike two texts are. One output, squared error."""

    named: tuple[str, ...] = ("pearson", "spearman")

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Squared error."""
        return (outputs.flatten() - labels).square()

    def taught(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        """Squared error."""
        return self.losses(outputs, teacher.flatten())

    def metrics(self, outputs: Tensor, labels: Tensor) -> dict[str, float]:
        """The correlations that are named."""
        return named_metrics(self.named, outputs, labels)


@dataclass(frozen=True)
class LanguageModelling(TextClassification):
    """Token ids, of which each is to be told from those before it. Outputs are what the model gave to the right ones."""

    taught = None  # type: ignore[assignment]  # what it gave to the others is not among its outputs

    def forward(self, module: nn.Module, batch: Batch) -> Tensor:
        """For every token but the first: the logarithm of its probability, and whether it was the likeliest; 0 for padding.

        All rows have the length of the stored texts, so that batches can be joined.
        """
        longest = batch.inputs["input_ids"].shape[1]
        logits, labels = logits_of(module, batch)[:, :-1].float(), batch.labels[:, 1:longest]
        is_said = labels >= 0
        right = labels.clamp(min=0)
        likely = -functional.cross_entropy(logits.flatten(0, 1), right.flatten(), reduction="none").view_as(labels)
        hits = (logits.argmax(-1) == right).to(likely)
        said = torch.stack([likely, hits], 1) * is_said[:, None]
        return functional.pad(said, (0, batch.labels.shape[1] - longest))

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of a text's tokens."""
        return -outputs[:, 0].sum(1) / (labels[:, 1:] >= 0).sum(1).clamp(min=1)

    def metrics(self, outputs: Tensor, labels: Tensor) -> dict[str, float]:
        """The share of tokens that were told, and perplexity (lower is better), over all tokens alike."""
        count = max(int((labels[:, 1:] >= 0).sum()), 1)
        likely, hits = (float(outputs[:, row].double().sum()) / count for row in (0, 1))
        return {"accuracy": hits, "perplexity": math.exp(min(-likely, 700.0))}


def predicted_by(task: Task, module: nn.Module, batch: Batch) -> Tensor:
    """What a model says when it is tested: a row for every example, all rows of one length."""
    said: Tensor = getattr(task, "predict", task.forward)(module, batch)
    return said


Taught = Callable[[Tensor, Tensor], Tensor]


def teaching(task: Task) -> Taught | None:
    """How far a model's outputs are from a teacher's, an entry for every example; None where a task does not say."""
    found: Taught | None = getattr(task, "taught", None)
    return found


def stated(task: Task) -> dict[str, Any]:
    """A task in plain values: its kind and its fields, but for those that it does not show, such as tables of texts."""
    shown: list[str] = [field.name for field in fields(task) if field.repr] if is_dataclass(task) else []
    return {"task": type(task).__name__, **{name: getattr(task, name) for name in shown}}


def kind_of(dataset: Dataset) -> Kind:
    """What a data set is for: images or texts with one label each, questions, or texts to learn a language from."""
    inputs = dataset.train.inputs
    if dataset.questions is not None:
        return "written" if dataset.questions.spans is None else "span"
    if "pixel_values" in inputs:
        return "image"
    if "input_ids" in inputs:
        return "language" if dataset.train.labels.dim() > 1 else "text"
    raise RunError(f"the inputs {', '.join(inputs)} fit no task of ours. Give one of your own: `task=...`.")


def logits_of(module: nn.Module, batch: Batch) -> Tensor:
    """The logits that a model gives to a batch, by the name Hugging Face models use."""
    output: Any = module(**batch.inputs)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def classification_metrics(outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, macro and weighted F1; classes that neither occur nor are predicted do not count.

    From counts, because every client has its own at every size; equal to scikit-learn's.
    """
    truth, found = labels.cpu().numpy(), outputs.cpu().argmax(1).numpy()
    classes = max(outputs.shape[1], int(truth.max()) + 1)
    right, support, named = (np.bincount(chosen, minlength=classes) for chosen in (truth[truth == found], truth, found))
    by_class = 2 * right / np.maximum(support + named, 1)
    return {
        "accuracy": float(right.sum() / support.sum()),
        "f1_macro": float(by_class.sum() / np.count_nonzero(support + named)),
        "f1_weighted": float((by_class * support).sum() / support.sum()),
    }


def _bucket(length: int, multiple: int) -> int:
    """The next length of those that batches have."""
    step = max(multiple, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // step) * step


@lru_cache(maxsize=64)
def _affine(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """What turns a stored pixel into a normalised one: `(pixel / 255 - mean) / std = pixel * factor + shift`."""
    means, spreads = (torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1) for values in (mean, std))
    return (1 / (255 * spreads)).float().to(device), (-means / spreads).float().to(device)


def _moved(pixels: Tensor, moves: Tensor, crop: int) -> Tensor:
    """Images cropped out of a zero border and mirrored, each as its row (down, right, mirror) says."""
    count, _, height, width = pixels.shape
    padded = functional.pad(pixels, (crop, crop, crop, crop))
    rows = moves[:, 0, None] + torch.arange(height, device=pixels.device)  # (batch, height)
    columns = moves[:, 1, None] + torch.arange(width, device=pixels.device)  # (batch, width)
    columns = torch.where(moves[:, 2, None] == 1, columns.flip(1), columns)
    images = torch.arange(count, device=pixels.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[images, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
