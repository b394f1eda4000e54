"""What a node does with a letter: build its submodel, train it on its own examples, answer. Its data never leave it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from raffm.algebra.layout import Layout
from raffm.algebra.selection import Selection
from raffm.data.examples import Examples
from raffm.data.task import Task
from raffm.deploy.letters import FORMAT, Letter, Reply, constants_of, held_of, reply_to, tensors_of
from raffm.errors import RunError
from raffm.methods import method_of
from raffm.methods.method import Client, Held, Learn, Share
from raffm.models.label import named_tensors
from raffm.models.labelled import Labelled
from raffm.models.surgery import assembled, skeleton
from raffm.rounds.local import Local, batches_of, order_of, train
from raffm.seeds import generator


@dataclass(frozen=True, eq=False)
class Node:
    """A device: its examples, its task, and the full model's structure, which has no weights."""

    frame: Labelled
    """On the meta device: shapes and labels, no numbers."""
    examples: Examples
    task: Task

    @staticmethod
    def of(full: Labelled, examples: Examples, task: Task) -> Node:
        """A node that knows what the full model looks like; its weights are not kept."""
        frame = skeleton(full.model, full.layout, Selection())
        return Node(Labelled.of(frame, full.table), examples, task)

    @cached_property
    def present(self) -> Tensor:
        """Which classes the node's examples have."""
        classes = self.frame.layout.sizes.get("classes", int(self.examples.labels.max()) + 1)
        return torch.bincount(self.examples.labels, minlength=classes) > 0

    def answer(self, letter: Letter) -> Reply:
        """Train as a letter says."""
        about = letter.about
        self._refuse(about)
        held = held_of(letter)
        share = Share(selected(self.frame.layout, about["sizes"]), about["numbers"])
        module = assembled(self.frame.model, self.frame.layout, share.selection, tensors_of(letter, held))
        local = _local(about["local"])
        loss = self._trained(module, self._learn(letter, share, held), local, about)
        tensors = named_tensors(module)[0]
        return reply_to(
            letter, held, {name: tensors[name].detach() for name in self._sent(share.selection)}, len(self.examples), loss
        )

    def _sent(self, selection: Selection) -> list[str]:
        """The names in the submodel of what goes back: everything but transient buffers."""
        layout = self.frame.layout
        return [layout.name_in(selection, name) for name in layout.labels_of(selection) if layout.kind(name) != "transient"]

    def _refuse(self, about: Mapping[str, Any]) -> None:
        if about.get("format") != FORMAT:
            raise RunError(f"the server writes letters of format {about.get('format')!r}; this raffm reads {FORMAT}.")
        if about["layout"] != self.frame.layout.fingerprint:
            raise RunError(
                f"the server's model has the layout {about['layout']}, the node's {self.frame.layout.fingerprint}: "
                "their configs or versions differ."
            )

    def _learn(self, letter: Letter, share: Share, held: Held) -> Learn:
        """As the method says; what it would read off the server's weights came with the letter."""
        given = {key: value for key, value in letter.about["method"].items() if key != "name"}
        method = method_of(letter.about["method"]["name"], **given)
        blank = {name: torch.zeros(()).expand(tensor.shape) for name, tensor in self.frame.tensors.items()}
        server = Labelled(self.frame.model, self.frame.layout, self.frame.table, blank)
        learn = method.learn(server, share, held, Client(self.task, self.present))
        for mine, sent in zip(learn.constants, constants_of(letter), strict=True):
            mine.copy_(sent)
        return learn

    def _trained(self, module: nn.Module, learn: Learn, local: Local, about: Mapping[str, Any]) -> float:
        seed, round, client = about["seed"], about["round"], about["client"]
        own = torch.arange(len(self.examples)).numpy()
        table = order_of(own, local, seed, round, client)
        batches = batches_of(self.task, self.examples, table, seed, round, client)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator(seed, "dropout within", round, client).initial_seed())
            return float(train(module, learn, local, batches, round, len(table), lambda: None))


def selected(layout: Layout, sizes: Mapping[str, int | list[int]]) -> Selection:
    """A Selection of these sizes: the first indices stand for those that the server chose."""
    return layout.select(dict(sizes))


def _local(content: Mapping[str, Any]) -> Local:
    lists = {key: tuple(entry) for key, entry in content.items() if isinstance(entry, list)}
    known = {entry.name for entry in fields(Local)}
    return Local(**{key: entry for key, entry in {**content, **lists}.items() if key in known})
