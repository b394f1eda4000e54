"""What a node does with a letter: build its submodel, train it on its own examples, answer. Its data never leave it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raffm.algebra.move import travelling
from raffm.algebra.selection import Selection
from raffm.data.cache import cached, is_cached, prune
from raffm.data.examples import Examples
from raffm.data.task import Task
from raffm.deploy.letters import (
    FORMAT,
    Letter,
    Reply,
    constants_of,
    frozen_of,
    held_of,
    moments_to,
    reply_to,
    task_from,
    tensors_of,
)
from raffm.errors import RunError
from raffm.methods import method_of
from raffm.methods.method import Client, Held, Learn, Share
from raffm.models.checkpoint import model_without_weights
from raffm.models.label import named_tensors
from raffm.models.labelled import Labelled
from raffm.models.moments import Moments, moments
from raffm.models.rows import rows_of, with_rows
from raffm.models.surgery import assembled, skeleton
from raffm.rounds.local import Local, batches_of, dropout_seed, order_of, train

FROZEN = "frozen"

KEPT = 16
"""Sets of frozen weights that stay on a node's disk."""


@dataclass(frozen=True, eq=False)
class Node:
    """A device and its own examples.

    The model's structure and the task come with every letter; `frame`, the full model without weights, `task` and the
    file of a `table` are needed where they are the user's own.
    """

    examples: Examples
    frame: Labelled | None = None
    task: Task | None = None
    table: str = ""

    @staticmethod
    def of(full: Labelled, examples: Examples, task: Task) -> Node:
        """A node that knows what the full model looks like; its weights are not kept."""
        frame = skeleton(full.model, full.layout, Selection())
        return Node(examples, Labelled.of(frame, full.table), task)

    def answer(self, letter: Letter) -> Reply:
        """Train as a letter says."""
        if letter.about.get("format") != FORMAT:
            raise RunError(f"the server writes letters of format {letter.about.get('format')!r}; this raffm reads {FORMAT}.")
        frame = self.frame or Labelled.of(model_without_weights(letter.about["model"]), self.table or None)
        rows = letter.about["rows"]
        frame = with_rows(frame, rows) if rows and not rows_of(frame.layout) else frame
        if letter.about["layout"] != frame.layout.fingerprint:
            raise RunError(
                f"the server's model has the layout {letter.about['layout']}, the node's {frame.layout.fingerprint}: their "
                "configs or versions differ."
            )
        reply = Visit(letter, frame, self.task or task_from(letter.about["task"]), self.examples).answered()
        return Reply({**reply.about, "keeps": _kept(letter)}, reply.arrays)


@dataclass(frozen=True, eq=False)
class Visit:
    """One letter, the full model without weights, the task, and the node's examples."""

    letter: Letter
    frame: Labelled
    task: Task
    examples: Examples

    def answered(self) -> Reply:
        """Build the submodel, do what is asked, and say what came of it."""
        layout, about = self.frame.layout, self.letter.about
        held = held_of(self.letter)
        inner = tuple(layout.select(each) for each in about["inner"])
        own = layout.select(dict(about["sizes"]))  # the first indices stand for the chosen ones
        share = Share(own, about["numbers"], inner=inner, drawn=about["drawn"])
        tensors = {**self._frozen(), **tensors_of(self.letter, held)}
        module = assembled(self.frame.model, layout, share.selection, tensors)
        untrained = set(about["untrained"])
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in untrained)
        if about["kind"] == "moments":
            return moments_to(self.letter, self._moments(module))
        loss = self._trained(module, self._learn(share, held))
        sent = travelling(named_tensors(module)[0], layout, share.selection)
        changed = {name: tensor for name, tensor in sent.items() if name not in untrained}
        return reply_to(self.letter, held, changed, len(self.examples), loss)

    def _frozen(self) -> dict[str, Tensor]:
        """What is not trained: it comes once, and is read from this machine's disk afterwards, mapped into memory."""
        digest = self.letter.about["frozen"]
        return cached(FROZEN, {"digest": digest}, lambda: frozen_of(self.letter)) if digest else {}

    def _moments(self, module: nn.Module) -> dict[str, Moments]:
        """What the batch norms see on the first of the node's examples, as they are."""
        first = torch.arange(min(self.letter.about["examples"], len(self.examples)))

        def run() -> Iterator[None]:
            self.task.forward(module, self.task.batch(self.examples, first))
            yield

        return moments(module, run())

    def _learn(self, share: Share, held: Held) -> Learn:
        """As the method says; what it would read off the server's weights came with the letter."""
        given = self.letter.about["method"]
        method = method_of(given["name"], **{key: entry for key, entry in given.items() if key != "name"})
        blank = {name: torch.zeros(()).expand(tensor.shape) for name, tensor in self.frame.tensors.items()}
        server = Labelled(self.frame.model, self.frame.layout, self.frame.table, blank)
        classes = self.frame.layout.sizes.get("classes", 0)
        learn = method.learn(server, share, held, Client(self.task, self.examples.present(classes)))
        for mine, sent in zip(learn.constants, constants_of(self.letter), strict=True):
            mine.copy_(sent)
        return learn

    def _trained(self, module: nn.Module, learn: Learn) -> float:
        about, local = self.letter.about, _local(self.letter.about["local"])
        seed, round, client = about["seed"], about["round"], about["client"]
        table = order_of(np.arange(len(self.examples)), local, seed, round, client)
        batches = batches_of(self.task, self.examples, table, seed, round, client)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(dropout_seed(seed, round, client))
            return float(train(module, learn, local, batches, round, len(table), lambda: None))


def _kept(letter: Letter) -> str:
    """The frozen weights that this machine keeps from now on, if its disk has them; the oldest of many are given up."""
    digest: str = letter.about["frozen"]
    if digest:
        prune(FROZEN, KEPT)
    return digest if digest and is_cached(FROZEN, {"digest": digest}) else ""


def _local(content: Mapping[str, Any]) -> Local:
    lists = {key: tuple(entry) for key, entry in content.items() if isinstance(entry, list)}
    known = {entry.name for entry in fields(Local)}
    return Local(**{key: entry for key, entry in {**content, **lists}.items() if key in known})
