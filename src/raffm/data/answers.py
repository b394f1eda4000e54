"""Questions about texts as tasks: the answer is a stretch of the text, or written in the model's own words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from raffm.data.questions import WRITTEN, Questions, answers_in, answers_of
from raffm.data.task import Batch, Task, TextClassification
from raffm.errors import RunError


def answering(questions: Questions) -> Task:
    """The task of answering a data set's questions, by stretches of their texts where it says where tokens stand."""
    return WrittenAnswers(questions=questions) if questions.spans is None else SpanAnswers(questions=questions)


FAR_BELOW = -1e9
"""The score of tokens that a batch does not have."""


@dataclass(frozen=True)
class _Answers(TextClassification):
    """`questions` are needed to judge, not to train: they do not travel."""

    questions: Questions | None = field(default=None, repr=False, compare=False)

    def known(self) -> Questions:
        if self.questions is None:
            raise RunError("answers are judged where their questions are: give the task the data set's `questions`.")
        return self.questions


@dataclass(frozen=True)
class SpanAnswers(_Answers):
    """Two scores for every token: to be the first and the last of the answer. The first token stands for no answer.

    An answer has at most `longest` tokens.
    """

    longest: int = 30

    def forward(self, module: nn.Module, batch: Batch) -> Tensor:
        """Both scores of all tokens: (windows, 2, tokens)."""
        output: Any = module(**batch.inputs)
        return torch.stack([output.start_logits, output.end_logits], 1)

    def predict(self, module: nn.Module, batch: Batch) -> Tensor:
        """The same, as long as the longest window of the data, so that batches can be joined."""
        said = self.forward(module, batch).float()
        spans = self.known().spans
        assert spans is not None
        return functional.pad(said, (0, spans.shape[1] - said.shape[2]), value=FAR_BELOW)

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean of two cross-entropies: which token is the first, and which the last."""
        both = [functional.cross_entropy(outputs[:, place], labels[:, place], reduction="none") for place in (0, 1)]
        return (both[0] + both[1]) / 2

    def taught(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        """The same with the teacher's probabilities."""
        both = [super(SpanAnswers, self).taught(outputs[:, place], teacher[:, place]) for place in (0, 1)]
        return (both[0] + both[1]) / 2

    def metrics(self, outputs: Tensor, labels: Tensor) -> dict[str, float]:
        """F1 and exact match, by question."""
        known = self.known()
        return known.metrics(answers_in(known, outputs.float().cpu(), labels.cpu(), self.longest))


@dataclass(frozen=True)
class WrittenAnswers(_Answers):
    """Models with encoder and decoder write the answer. Outputs are the loss of the right one, then what was written."""

    taught = None  # type: ignore[assignment]  # its outputs say nothing of other answers

    def forward(self, module: nn.Module, batch: Batch) -> Tensor:
        """The loss of the right answer; nothing is written."""
        return functional.pad(self._loss(module, batch)[:, None], (0, WRITTEN))

    def predict(self, module: nn.Module, batch: Batch) -> Tensor:
        """The loss, and the likeliest token, one after the other."""
        generate: Any = module.generate
        tokens = generate(**batch.inputs, max_new_tokens=WRITTEN, do_sample=False, num_beams=1)[:, 1:]
        padding = getattr(module.config, "pad_token_id", 0) or 0
        tokens = functional.pad(tokens, (0, WRITTEN - tokens.shape[1]), value=padding)
        return torch.cat([self._loss(module, batch)[:, None].float(), tokens.float()], 1)

    def _loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """The mean cross-entropy of every answer's tokens."""
        labels = batch.labels[:, 1:].contiguous()
        output: Any = module(**batch.inputs, labels=labels)
        found = functional.cross_entropy(output.logits.float().transpose(1, 2), labels, reduction="none")
        return found.sum(1) / (labels >= 0).sum(1)

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of every answer's tokens."""
        return outputs[:, 0]

    def metrics(self, outputs: Tensor, labels: Tensor) -> dict[str, float]:
        """F1 and exact match."""
        known = self.known()
        return known.metrics(answers_of(known, outputs[:, 1:].long().cpu(), labels.cpu()))
