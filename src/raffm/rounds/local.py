"""How a client trains: its optimizer, its rate, its order of examples. One loop, run by every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from raffm.data.examples import Examples, Integers
from raffm.data.task import Batch, Task
from raffm.errors import RunError
from raffm.methods.method import Learn
from raffm.rounds.dropout import in_sixteen_bits
from raffm.seeds import generator


@dataclass(frozen=True)
class Local:
    """Settings of local training.

    A client makes `steps` steps, or, where that is 0, as many as `epochs` over its own examples take. `schedule` goes
    from step to step: "constant", or "linear" down to 0. The rate of a round is `lr * decay ** (round // decay_every)`,
    or falls by `decay` at each of the `milestones`. `clip` bounds the norm of the gradient (0: no bound). Without `shuffle`
    examples come in the same order in every epoch and round, as in some published code.
    """

    optimizer: Literal["sgd", "adamw"] = "adamw"
    lr: float = 1e-3
    batch: int = 20
    epochs: float = 1
    steps: int = 0
    momentum: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float = 0.0
    schedule: Literal["constant", "linear"] = "constant"
    decay: float = 1.0
    decay_every: int = 1
    milestones: tuple[int, ...] = ()
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name in ("lr", "batch", "decay", "decay_every"):
            if not getattr(self, name) > 0:
                raise RunError(f"local {name} must be above 0, but is {getattr(self, name)!r}.")
        if min(self.momentum, self.weight_decay, self.clip) < 0 or not all(0 <= beta < 1 for beta in self.betas):
            raise RunError("local momentum, weight_decay and clip are at least 0, and betas lie in [0, 1).")
        if self.optimizer not in ("sgd", "adamw"):
            raise RunError(f"there is no local optimizer {self.optimizer!r}; there are sgd and adamw.")
        if self.schedule not in ("constant", "linear"):
            raise RunError(f"there is no schedule {self.schedule!r}; there are constant and linear.")
        if self.steps < 0 or (not self.steps and not self.epochs > 0):
            raise RunError("a client needs steps or epochs above 0.")

    def steps_of(self, examples: int) -> int:
        """How many steps a client with so many examples makes."""
        return self.steps or max(1, -(-int(self.epochs * examples) // self.batch))

    def rate(self, round: int, step: int, steps: int) -> float:
        """The learning rate of one step."""
        fallen = sum(round >= milestone for milestone in self.milestones) if self.milestones else round // self.decay_every
        start = self.lr * self.decay**fallen
        return start * (1 - step / steps) if self.schedule == "linear" else start

    def build(self, parameters: Iterable[Tensor], rate: float) -> torch.optim.Optimizer:
        """A fresh optimizer: nothing is carried from one round to the next."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, rate, betas=self.betas, weight_decay=self.weight_decay, fused=True)
        return torch.optim.SGD(parameters, rate, momentum=self.momentum, weight_decay=self.weight_decay, fused=True)


def order_of(examples: Integers, local: Local, seed: int, round: int, client: int) -> Tensor:
    """The table (steps, batch) of examples that a client sees: one shuffle after another, every batch full."""
    draw, count = generator(seed, "order", round, client), len(examples)
    needed = local.steps_of(count) * local.batch
    epochs = [
        torch.randperm(count, generator=draw) if local.shuffle else torch.arange(count) for _ in range(-(-needed // count))
    ]
    return torch.from_numpy(examples)[torch.cat(epochs)[:needed]].view(-1, local.batch)


def dropout_seed(seed: int, round: int, client: int) -> int:
    """What the random numbers within a client's module follow from."""
    return generator(seed, "dropout within", round, client).initial_seed()


def batches_of(task: Task, examples: Examples, order: Tensor, seed: int, round: int, client: int) -> Iterator[Batch]:
    """A client's batches, made on the device from tables that were drawn on the CPU."""
    moves = task.draw(tuple(order.shape), generator(seed, "augment", round, client))
    for picks, moved in zip(order, moves, strict=True):
        yield task.batch(examples, picks, moved)


def train(
    module: nn.Module, learn: Learn, local: Local, batches: Iterable[Batch], round: int, steps: int, tick: Callable[[], None]
) -> Tensor:
    """Train a module in place; give the mean loss of its steps, still on the device."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = local.build(parameters, local.rate(round, 0, steps))
    total = torch.zeros((), device=parameters[0].device)
    module.train()
    learn.prepare(module)
    try:
        with in_sixteen_bits(module):
            for step, batch in enumerate(batches):
                optimizer.param_groups[0]["lr"] = local.rate(round, step, steps)
                _forget(parameters)
                loss = _descended(learn.terms(learn.turn(step), module, batch))
                learn.after_backward(module)
                if local.clip:
                    nn.utils.clip_grad_norm_(parameters, local.clip)
                optimizer.step()
                learn.after_step(module)
                total += loss
                tick()
    finally:
        learn.finish(module)  # a step that fails leaves the module as it was lent
        _forget(parameters)
    return total / steps


def _descended(terms: Iterable[Tensor]) -> Tensor:
    """Run backward on every term before the next one is made, so that one is in memory at a time; give the first."""
    first: Tensor | None = None
    for term in terms:
        term.backward()  # type: ignore[no-untyped-call]
        first = term.detach() if first is None else first
    assert first is not None, "a loss has at least one term"
    return first


def _forget(parameters: list[nn.Parameter]) -> None:
    """Drop all gradients, as `zero_grad` does, without what that does besides."""
    for parameter in parameters:
        parameter.grad = None
