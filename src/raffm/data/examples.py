"""Examples as tensors, and which of them belong to which client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raffm.errors import DataError

if TYPE_CHECKING:
    from raffm.data.questions import Questions

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs and labels of one length: decoded images (uint8) or token ids, as they stay on the device.

    Labels are classes, numbers to be predicted (floats), or a row of whole numbers an example, such as the tokens of a text.
    """

    inputs: Mapping[str, Tensor]
    labels: Tensor

    def __post_init__(self) -> None:
        lengths = {name: len(tensor) for name, tensor in self.inputs.items()}
        if any(length != len(self.labels) for length in lengths.values()):
            raise DataError(f"{len(self.labels)} labels came with inputs of other lengths: {lengths}.")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def strata(self) -> Integers:
        """The classes; numbers are rounded, and those below 0 taken together; rows are all of one kind."""
        if self.labels.dim() > 1:
            return np.zeros(len(self), np.int64)
        labels = self.labels.round().clamp(min=0) if self.labels.is_floating_point() else self.labels
        whole: Integers = labels.long().cpu().numpy()
        return whole

    def present(self, classes: int) -> Tensor:
        """Which of at least so many classes occur; where labels are numbers, all; of rows there is one kind."""
        if self.labels.dim() > 1:
            return torch.ones(1, dtype=torch.bool, device=self.labels.device)
        if self.labels.is_floating_point():
            return torch.ones(classes, dtype=torch.bool, device=self.labels.device)
        return torch.bincount(self.labels, minlength=classes) > 0

    def to(self, device: str | torch.device) -> Examples:
        """The same examples on a device."""
        return Examples({name: tensor.to(device) for name, tensor in self.inputs.items()}, self.labels.to(device))

    def take(self, indices: Tensor | Integers) -> Examples:
        """Some of the examples, in memory of their own."""
        picked = torch.as_tensor(indices)
        return Examples({name: tensor[picked] for name, tensor in self.inputs.items()}, self.labels[picked])


@dataclass(frozen=True, eq=False)
class Dataset:
    """What a source gives.

    `owners` holds, for a natural split, whose every example is: (train, test) integers. `questions` are those that the
    examples ask, where answers are learnt.
    """

    name: str
    train: Examples
    test: Examples
    classes: tuple[str, ...]
    validation: Examples | None = None
    owners: tuple[Integers, Integers] | None = None
    questions: Questions | None = None

    def __post_init__(self) -> None:
        for part, examples in (("training", self.train), ("test", self.test), ("validation", self.validation)):
            if examples is None:
                continue
            if not len(examples):
                raise DataError(f"the data set {self.name!r} has no {part} examples.")
            refuse_labels(examples.labels, len(self.classes), f"the {part} examples of {self.name!r}")


def refuse_labels(labels: Tensor, classes: int, where: str) -> None:
    """Refuse labels below 0 or beyond the last class, and numbers that are none."""
    if labels.is_floating_point():
        if not bool(torch.isfinite(labels).all()):
            raise DataError(f"{where} have a label that is not a finite number.")
        return
    if labels.dim() > 1:
        return
    least, most = int(labels.min()), int(labels.max())
    if least < 0 or most >= classes:
        found = least if least < 0 else most
        raise DataError(f"{where} have the label {found}, but there are {classes} classes: labels go from 0 to {classes - 1}.")


@dataclass(frozen=True, eq=False)
class Parts:
    """The examples of every client: those of client i are `indices[offsets[i]:offsets[i + 1]]`.

    Two arrays, so that 100,000 clients cost no more than their examples.
    """

    indices: Integers
    offsets: Integers

    @staticmethod
    def of(parts: Sequence[Integers]) -> Parts:
        """From a list of index arrays, one a client."""
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        return Parts(np.concatenate(parts).astype(np.int64) if len(parts) else np.zeros(0, np.int64), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Integers:
        if not 0 <= client < len(self):
            raise IndexError(client)
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    @property
    def counts(self) -> Integers:
        """How many examples every client has."""
        return np.diff(self.offsets)


@dataclass(frozen=True, eq=False)
class Split:
    """A client's training and test examples, from one draw of what is typical of it."""

    train: Parts
    test: Parts


@dataclass(frozen=True, eq=False)
class Federation:
    """A data set and its clients: what a run trains and tests on."""

    dataset: Dataset
    split: Split

    @property
    def clients(self) -> int:
        """How many clients are registered."""
        return len(self.split.train)
