"""A lane: one client's training in buffers that never move, so that its step can be captured once and replayed.

Its step is the same as everywhere: the method's loss, backward, the method's hooks, the optimizer. What changes from client
to client (weights, batches, rates, limits, the method's constants) is copied into place before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from raffm.algebra.mask import Mask
from raffm.algebra.move import extract, moves, part_of, travelling
from raffm.data.task import Batch
from raffm.methods.method import Fading, Held, Learn, Scaling, nothing
from raffm.models.surgery import assembled
from raffm.rounds.dropout import in_sixteen_bits
from raffm.rounds.local import order_of
from raffm.rounds.plan import Order, Plan
from raffm.seeds import generator
from raffm.simulate import flat
from raffm.simulate.inset import Inset
from raffm.simulate.sheet import Sheet, Style

FILL = 1 << 26
"""Bytes of inputs that are made at a time (64 MiB)."""


class Lane:
    """Buffers, a module and an optimizer for clients of one shape."""

    def __init__(self, plan: Plan, order: Order, learn: Learn, style: Style, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        """Make room for an order and those like it; the constants of `learn` are the lane's from now on.

        On `streams`, which lanes may share, terms of the loss run beside the first.
        """
        self.plan, self.style, self.learn = plan, style, learn
        server, selection = plan.server, order.share.selection
        parts = extract(server.tensors, server.layout, selection)
        self.module = assembled(server.model, server.layout, selection, parts).train()
        self.device = next(iter(parts.values())).device
        self.fading, self.scaling = learn.fading, _folded(learn.scaling, self.module)
        self.sheet = Sheet(self.module, style, self.fading, self._scaled())
        self._make_optimizer()
        self._make_tables()
        self.insets = self._made_insets()
        self._streams = streams[: len(self.insets)]
        self._one = torch.ones((), device=self.device)

    # -- buffers -------------------------------------------------------------------------------------------------

    @property
    def sheets(self) -> list[Sheet]:
        """The numbers of the lane's own module, and those of smaller submodels."""
        return [self.sheet, *(inset.sheet for inset in self.insets)]

    def _scaled(self) -> dict[str, float]:
        """The factors of parameters whose modules' outputs are multiplied."""
        factors = {} if self.scaling is None else self.scaling.factors
        names = [name for name, _ in self.module.named_parameters()]
        return {name: factors[name.rpartition(".")[0]] for name in names if name.rpartition(".")[0] in factors}

    def _made_insets(self) -> list[Inset]:
        """What runs in the place of the smaller submodels that the loss runs."""
        if self.fading is not None or self.scaling is not None:
            return []
        insets = []
        for smaller in self.learn.prepare(self.module):
            smaller.stand_in = inset = Inset(self.plan.server, smaller, self.sheet, self.style)
            insets.append(inset)
        return insets

    def _make_optimizer(self) -> None:
        """An optimizer over everything at once, with its memory made beforehand and its rate in a tensor."""
        local = self.plan.local
        self.rate = torch.zeros((), device=self.device)
        whole = nn.Parameter(self.sheet.values)
        whole.grad = self.sheet.gradients
        options: dict[str, Any] = {"lr": self.rate, "weight_decay": local.weight_decay, "fused": True}
        if local.optimizer == "adamw":
            on_cuda = self.device.type == "cuda"
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW([whole], betas=local.betas, capturable=on_cuda, **options)
        else:
            self.optimizer = torch.optim.SGD([whole], momentum=local.momentum, **options)
        self.optimizer.step()  # all gradients are 0: makes the memory, moves nothing
        self._whole = whole
        self._before = torch.zeros_like(self.sheet.values) if self._has_memory and self.fading is not None else None

    @property
    def _has_memory(self) -> bool:
        """Whether the optimizer moves a number that has no gradient."""
        local = self.plan.local
        return local.optimizer == "adamw" or bool(local.momentum) or bool(local.weight_decay)

    @property
    def is_sign_like(self) -> bool:
        """Whether a weight may move as far by a tiny gradient as by a large one.

        The sign of a tiny gradient is rounding, so how far weights moved says something only where gradients are large.
        """
        return self.plan.local.optimizer == "adamw"

    def _make_tables(self) -> None:
        """Inputs of several steps, labels, rates and the number of the step."""
        local = self.plan.local
        batch = self.plan.task.batch(self.plan.data.dataset.train, torch.zeros(local.batch, dtype=torch.int64))
        bytes_of_step = sum(tensor.numel() * tensor.element_size() for tensor in batch.inputs.values())
        self.fill_steps = max(1, FILL // max(1, bytes_of_step))
        longest = local.steps_of(int(self.plan.data.split.train.counts.max()))
        self._most = min(self.fill_steps, longest)  # of any client, so that room made once is enough
        self._room: dict[object, Tensor] = {}
        self._inputs: dict[str, Tensor] = {}
        self._labels = batch.labels.new_zeros(0, device=self.device)
        self._rates = torch.zeros(0, device=self.device)
        self._rows = torch.arange(self._most * local.batch, device=self.device).view(self._most, local.batch)
        self.step_number = torch.zeros((), dtype=torch.int64, device=self.device)
        self.total = torch.zeros((), device=self.device)

    # -- one client ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, order: Order, held: Held, learn: Learn) -> None:
        """Everything of a client but its batches; `learn` is its own."""
        server = self.plan.server
        for buffer in (self.sheet.values, self.sheet.gradients):
            buffer.zero_()  # between tensors, too: what is no number there would be in every norm of gradients
        found = moves(server.layout, order.share.selection)
        parts = [part_of(server.tensors[name].detach(), move.where) for name, move in found.items()]
        torch._foreach_copy_([self.sheet.targets[move.name] for move in found.values()], parts)
        if isinstance(held, Mask):
            for name, kept in held.kept.items():
                self.sheet.targets[name].mul_(kept)
        self.turn = learn.turn
        for mine, theirs in zip(self.learn.constants, learn.constants, strict=True):
            mine.copy_(theirs)
        if self.sheet.limits is not None:
            limits = learn.fading.limits if learn.fading is not None else {}
            self.sheet.limits.copy_(flat.by_block(self.sheet.slots, len(self.sheet.values), limits))
        for memory in self.optimizer.state[self._whole].values():
            if isinstance(memory, Tensor):
                memory.zero_()
        self.total.zero_()
        self.sheet.show()
        self._plan_steps(order)

    def _plan_steps(self, order: Order) -> None:
        """The client's examples step by step, how each is augmented, and the rate of every step."""
        plan, local = self.plan, self.plan.local
        own = plan.data.split.train[order.client]
        self._table = order_of(own, local, plan.seed, order.round, order.client)
        self._moves = plan.task.draw(tuple(self._table.shape), generator(plan.seed, "augment", order.round, order.client))
        self.steps = len(self._table)
        self._all_rates = torch.tensor([local.rate(order.round, step, self.steps) for step in range(self.steps)])

    @torch.no_grad()
    def fill(self, begin: int) -> int:
        """Make the inputs of the next steps; give how many there are."""
        count = min(self.fill_steps, self.steps - begin)
        picks = self._table[begin : begin + count].reshape(-1)
        moved = self._moves[begin : begin + count].flatten(0, 1)
        batch = self._of_steps(picks, moved)
        capacity = self._most * self.plan.local.batch
        for name, tensor in batch.inputs.items():
            self._put(name, self._styled(tensor), capacity)
        self._labels = _grown(self._labels, batch.labels, capacity)
        self._labels[: len(batch.labels)].copy_(batch.labels)
        rates = self._all_rates[begin : begin + count].to(self.device)
        self._rates = _grown(self._rates, rates, self._most)
        self._rates[:count].copy_(rates)
        self.step_number.zero_()
        return count

    def _of_steps(self, picks: Tensor, moved: Tensor) -> Batch:
        """Examples of several steps; texts are as long as the client's longest, so that all its steps have one shape."""
        task, examples = self.plan.task, self.plan.data.dataset.train
        lengths = examples.inputs.get("lengths")
        if lengths is None:
            return task.batch(examples, picks, moved)
        drawn = self._table.reshape(-1)
        longest = drawn[lengths[drawn.to(lengths.device)].argmax().to(drawn.device)]
        batch = task.batch(examples, torch.cat([picks, longest[None]]), torch.cat([moved, moved[:1]]))
        return Batch({name: tensor[:-1] for name, tensor in batch.inputs.items()}, batch.labels[:-1])

    def _put(self, name: str, tensor: Tensor, capacity: int) -> None:
        place = name, tuple(tensor.shape[1:])  # texts of another length have room of their own: graphs know where it is
        self._room[place] = self._inputs[name] = self._laid(_grown(self._room.get(place, tensor[:0]), tensor, capacity))
        self._inputs[name][: len(tensor)].copy_(tensor)

    def _styled(self, tensor: Tensor) -> Tensor:
        return self._laid(tensor.to(self.style.dtype) if tensor.is_floating_point() else tensor)

    def _has_channels_last(self, tensor: Tensor) -> bool:
        """Whether it holds images whose channels are the fastest axis: of a single channel the tensor itself does not tell."""
        return self.style.channels_last and tensor.dim() == 4

    def _laid(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=torch.channels_last) if self._has_channels_last(tensor) else tensor

    def _taken(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """Some rows, laid as all are: images with channels last in one pass."""
        if not self._has_channels_last(tensor):
            return tensor.index_select(0, rows)
        return tensor.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)

    def where(self) -> object:
        """Where the inputs of a step lie; a graph holds for one place."""
        tables = {**self._inputs, "labels": self._labels, "rates": self._rates}
        return tuple((name, tensor.data_ptr(), tuple(tensor.shape)) for name, tensor in tables.items())

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, turn: int = 0) -> None:
        """The next step of the client, by the loss whose turn it is."""
        with in_sixteen_bits(self.module):
            self._stepped(turn)

    def _stepped(self, turn: int) -> None:
        terms = iter(self.learn.terms(turn, self.module, self._batch()))
        begun = self._now()
        loss = next(terms)
        spoken = self._now()
        for inset in self.insets:
            inset.spoken = spoken
        self.sheet.collect(self._hooked(torch.autograd.grad(loss, self.sheet.parameters, self._one.expand_as(loss))))
        loss = loss.detach()  # what it was computed from is not held on to
        self._add_others(terms, begun)
        self._move(loss)

    def _add_others(self, terms: Iterator[Tensor], begun: torch.cuda.Event | None) -> None:
        """Add the gradients of all other terms, which are found beside each other, one after the other."""
        found: list[tuple[Sequence[Tensor | None], list[Inset]]] = []
        try:
            while True:
                with self._aside(len(found), begun):
                    term = next(terms, None)
                    if term is None:
                        break
                    found.append(self._gradients(term))
        except BaseException:
            with suppress(RuntimeError):  # says that the capture is broken
                self._join(len(found) + 1)  # one that is not, ends and frees its memory only where all streams are joined
            raise
        self._join(len(found) + 1)  # the last one began, and found no term
        for own, insets in found:
            self.sheet.add(own)
            for inset in insets:
                inset.give_back()

    def _gradients(self, term: Tensor) -> tuple[Sequence[Tensor | None], list[Inset]]:
        """Those of the lane's own parameters, and the smaller submodels that have collected theirs."""
        wanted = [parameter for sheet in self.sheets for parameter in sheet.parameters]
        given = iter(torch.autograd.grad(term, wanted, self._one.expand_as(term), allow_unused=True))
        own, *others = [tuple(islice(given, len(sheet.parameters))) for sheet in self.sheets]
        touched = []
        for inset, gradients in zip(self.insets, others, strict=True):
            if any(gradient is not None for gradient in gradients):
                inset.collect(gradients)
                touched.append(inset)
        return own, touched

    def _now(self) -> torch.cuda.Event | None:
        """Where the stream is."""
        return torch.cuda.current_stream().record_event() if self._streams else None

    def _aside(self, place: int, begun: torch.cuda.Event | None) -> AbstractContextManager[object]:
        """A stream for another term of the loss, which begins where the batch was there."""
        if begun is None or place >= len(self._streams):
            return nullcontext()
        self._streams[place].wait_event(begun)
        return torch.cuda.stream(self._streams[place])

    def _join(self, count: int) -> None:
        """Wait for the first so many of the streams that terms run on."""
        for stream in self._streams[:count]:
            torch.cuda.current_stream().wait_stream(stream)

    def _batch(self) -> Batch:
        rows = self._rows.index_select(0, self.step_number[None])[0]
        inputs = {name: self._taken(tensor, rows) for name, tensor in self._inputs.items()}
        return Batch(inputs, self._labels.index_select(0, rows))

    def _hooked(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gradients after the method's own hook."""
        if self.fading is None and self.learn.after_backward is not nothing:
            for parameter, gradient in zip(self.sheet.parameters, gradients, strict=True):
                parameter.grad = gradient
            self.learn.after_backward(self.module)
            gradients = [parameter.grad for parameter in self.sheet.parameters if parameter.grad is not None]
            for parameter in self.sheet.parameters:
                parameter.grad = None
        return gradients

    @torch.no_grad()
    def _move(self, loss: Tensor) -> None:
        """The optimizer's step, and the method's own after it."""
        if self.plan.local.clip:
            nn.utils.clip_grad_norm_([self._whole], self.plan.local.clip)
        if self._before is not None:
            self._before.copy_(self.sheet.values)
        torch.index_select(self._rates, 0, self.step_number[None], out=self.rate.view(1))
        self.optimizer.step()
        if self._before is not None and self.sheet.limits is not None:
            flat.keep_faded(self.sheet.values, self._before, self.sheet.limits)
        self.sheet.show()
        if self.fading is None:
            self.learn.after_step(self.module)
        self.total.add_(loss)
        self.step_number.add_(1)

    def state(self) -> list[Tensor]:
        """All that a step changes, weights and gradients first."""
        memory = [each for each in self.optimizer.state[self._whole].values() if isinstance(each, Tensor)]
        return [
            self.sheet.values,
            self.sheet.gradients,
            self.sheet.seen,
            self.total,
            self.step_number,
            *memory,
            *self.module.buffers(),
        ]

    def update(self, order: Order) -> dict[str, Tensor]:
        """What the client sends back."""
        return travelling(self.sheet.targets, self.plan.server.layout, order.share.selection)


def _grown(buffer: Tensor, like: Tensor, capacity: int) -> Tensor:
    """A buffer with room for so many rows; the same one as long as it has it."""
    if len(buffer) >= capacity and buffer.shape[1:] == like.shape[1:]:
        return buffer
    return torch.zeros((capacity, *like.shape[1:]), dtype=like.dtype, device=like.device)


def _folded(scaling: Scaling | None, module: nn.Module) -> Scaling | None:
    """A scaling by powers of two of trained weights, which take it on without rounding; others are left to the hooks."""
    if scaling is None or any(math.frexp(factor)[0] != 0.5 for factor in scaling.factors.values()):
        return None
    own = (parameter for name in scaling.factors for parameter in module.get_submodule(name).parameters(recurse=False))
    return scaling if all(parameter.requires_grad for parameter in own) else None


def limits_are_usable(fading: Fading | None, held: Held) -> bool:
    """Whether limits alone say what is seen: at a limit of 0 everything would be."""
    return fading is None or not isinstance(held, Mask) or min(fading.limits.values(), default=1.0) > 0
