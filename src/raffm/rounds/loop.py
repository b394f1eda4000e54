"""The rounds of a run. `train` is the whole of it: choose, train, tally, step, evaluate, save."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from math import isfinite
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from raffm.algebra.layout import TRAVELLING
from raffm.algebra.median import Median
from raffm.algebra.tally import Tally
from raffm.errors import CheckpointError, RunError, UpdateError
from raffm.models.rows import give_back, whole
from raffm.notices import notice
from raffm.rounds import checkpoint
from raffm.rounds.average import Average
from raffm.rounds.backend import Backend
from raffm.rounds.costs import Clock, Costs
from raffm.rounds.evaluate import evaluate_both, sizes_of
from raffm.rounds.optimize import ServerOptimizer
from raffm.rounds.plan import Cohort, Order, Plan
from raffm.rounds.results import Evaluation, Results, Round
from raffm.rounds.workshop import Outcome


class Interrupted(KeyboardInterrupt):
    """A run was stopped by hand; its checkpoint is written."""


class Watcher(Protocol):
    """Whoever looks on: a progress display, a tracker."""

    def client(self, round: int, done: int, of: int) -> None:
        """A client of a round has ended."""
        ...

    def round(self, entry: Round, evaluation: Evaluation | None, results: Results) -> None:
        """A round has ended."""
        ...


class Nobody:
    """Nobody looks on."""

    def client(self, round: int, done: int, of: int) -> None:
        """Nothing."""

    def round(self, entry: Round, evaluation: Evaluation | None, results: Results) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Keeping:
    """Where and how often a run is saved; without a folder it is not. With `resume` it goes on from what is there."""

    folder: Path | None = None
    every: int = 1
    resume: bool = False


def train(
    plan: Plan,
    backend: Backend,
    keeping: Keeping = Keeping(),  # noqa: B008 (frozen)
    settings: dict[str, Any] | None = None,
    watcher: Watcher | None = None,
) -> Results:
    """Run a plan to its end; the server's model is trained in place, and in the end the average, where there is one."""
    run = _Run(plan, backend, keeping, settings or {}, watcher or Nobody())
    try:
        _go_through(run)
    finally:
        if plan.given is not None:
            give_back(plan.server, plan.given)
    return run.results


def _go_through(run: _Run) -> None:
    plan, keeping = run.plan, run.keeping
    begin = run.begin()
    with interruptible() as tick:
        for round in range(begin, plan.rounds):
            cohort = plan.cohort(round)
            orders, late = run.in_time(plan.orders(round, cohort.present))
            try:
                outcomes = run.trained(round, orders, tick)
            except Interrupted:
                run.save(round)
                raise
            run.tally.step(run.optimizer.move)
            if run.average is not None:
                run.average.note(plan.server, round + 1)
            run.note(round, cohort, orders, late, outcomes)
            if (round + 1) % keeping.every == 0 or round + 1 == plan.rounds:
                run.save(round + 1)
    if run.average is not None:
        run.average.fill(plan.server)


@dataclass
class _Run:
    """What changes during a run."""

    plan: Plan
    backend: Backend
    keeping: Keeping
    settings: dict[str, Any]
    watcher: Watcher
    tally: Tally = field(init=False)
    optimizer: ServerOptimizer = field(init=False)
    average: Average | None = field(init=False)
    costs: Costs = field(init=False)
    clock: Clock = field(init=False)
    results: Results = field(init=False)
    identity: str = field(init=False)
    frozen: str = field(init=False)

    def begin(self) -> int:
        """Set everything up, from the checkpoint where the run is resumed; give the first round to run."""
        server = self.plan.server
        is_median = self.plan.merging.combine == "median"
        self.tally = Median(server.layout, server.tensors) if is_median else self.plan.tally()
        self.optimizer = ServerOptimizer(server.layout, self.plan.merging)
        self.average = Average(self.plan.decay) if self.plan.decay else None
        self.costs = Costs(self.plan)
        self.clock = Clock(self.plan, self.costs)
        self.results = _blank(self.plan, self.costs, self.settings)
        if self.keeping.folder is None:
            return 0
        self.identity, self.frozen = _identity(self.plan, self.settings), checkpoint.frozen_digest(server)
        checkpoint.sweep(self.keeping.folder)
        if not checkpoint.exists(self.keeping.folder):
            if self.keeping.resume:
                notice(f"there is no run in {str(self.keeping.folder)!r} to resume: a new one begins.")
            return 0
        if not self.keeping.resume:
            raise CheckpointError(
                f"{str(self.keeping.folder)!r} holds a run already. Resume it (--resume), or choose another folder."
            )
        return self._resumed(self.keeping.folder)

    def _resumed(self, folder: Path) -> int:
        saved = checkpoint.load(folder, self.identity, self.settings)
        if saved.round > self.plan.rounds:
            raise CheckpointError(f"{str(folder)!r} has {saved.round} rounds already, and {self.plan.rounds} are asked for.")
        _refuse_other_shapes(saved.results, self.results, folder)
        checkpoint.restore(saved, self.plan.server, folder)
        self.optimizer.restore(saved.optimizer, self.plan.server.device)
        if self.average is not None:
            self.average.restore(saved.average, self.plan.server)
        self.results = replace(saved.results, run=self.results.run)
        return saved.round

    def in_time(self, orders: Sequence[Order]) -> tuple[list[Order], list[Order]]:
        """Those that will answer before the deadline, and those that will not; all costs are asked for here."""
        deadline = self.plan.participation.deadline
        seconds = [self.clock.seconds(order) for order in orders]
        is_late = [bool(deadline) and taken > deadline for taken in seconds]
        on_time = [order for order, late in zip(orders, is_late, strict=True) if not late]
        return on_time, [order for order, late in zip(orders, is_late, strict=True) if late]

    def counting(self, round: int, of: int) -> Callable[[Outcome], None]:
        """Tell the watcher how many clients are done."""
        done: list[Outcome] = []

        def count(outcome: Outcome) -> None:
            done.append(outcome)
            self.watcher.client(round, len(done), of)

        return count

    def trained(self, round: int, orders: Sequence[Order], tick: Callable[[], None]) -> list[Outcome]:
        """Train all clients; where too few updates are good, forget them and try again."""
        needed, refusals = self.plan.participation.minimum, ""
        for _ in range(self.plan.participation.tries):
            outcomes = self.backend.train(orders, self.tally, self.counting(round, len(orders)), tick)
            self.refuse(outcomes)
            good = sum(not outcome.refused for outcome in outcomes)
            if good >= needed:
                return outcomes
            self.tally.forget()
            refusals = "; ".join(outcome.refused for outcome in outcomes if outcome.refused)
        raise RunError(
            f"round {round + 1} had {good} good updates; {needed} are needed, and it was tried "
            f"{self.plan.participation.tries} times. {refusals or 'Too few clients took part.'}"
        )

    def refuse(self, outcomes: Sequence[Outcome]) -> None:
        """With `strict`, a refused update ends the run, and the server stays as it was."""
        for outcome in outcomes:
            if outcome.refused and self.plan.merging.strict:
                raise UpdateError(outcome.refused)

    def note(
        self, round: int, cohort: Cohort, orders: Sequence[Order], late: Sequence[Order], outcomes: Sequence[Outcome]
    ) -> None:
        """Write down what a round did, evaluate where it is time, and tell the watcher."""
        entry = self._entry(round, cohort, orders, late, outcomes)
        self.results = replace(self.results, rounds=(*self.results.rounds, entry))
        if len(entry.refused) == len(entry.clients):
            several = (
                f"{len(entry.late)} clients were late, {len(entry.dropped)} dropped out, {len(entry.refused)} were refused"
            )
            notice(f"round {entry.round} merged no update, and the model stays as it was: {several}.")
        evaluation = None
        if (round + 1) % self.plan.evaluating.every == 0 or round + 1 == self.plan.rounds:
            try:
                evaluation, by_client = evaluate_both(self.plan, self.backend, round + 1, self.average)
            except RunError:
                self.save(round + 1)  # it is trained, whatever the test needs
                raise
            evaluations = (*self.results.evaluations, evaluation)
            self.results = replace(self.results, evaluations=evaluations, client_scores=by_client, metric=evaluation.metric)
        self.watcher.round(entry, evaluation, self.results)

    def _entry(
        self, round: int, cohort: Cohort, orders: Sequence[Order], late: Sequence[Order], outcomes: Sequence[Outcome]
    ) -> Round:
        losses = [outcome.loss for outcome in sorted(outcomes, key=lambda outcome: outcome.client) if not outcome.refused]
        costs = [self.costs.of(order.share) for order in orders]
        seconds = max([self.clock.seconds(order) for order in orders], default=0.0)
        return Round(
            round=round + 1,
            loss=fmean(losses) if losses and all(map(isfinite, losses)) else None,
            clients=tuple(sorted(order.client for order in orders)),
            dropped=tuple(sorted(cohort.dropped)),
            late=tuple(sorted(order.client for order in late)),
            refused={str(outcome.client): outcome.refused for outcome in outcomes if outcome.refused},
            bytes_up=sum(cost.bytes_up for cost in costs),
            bytes_down=sum(cost.bytes_down for cost in costs) + sum(self.costs.of(order.share).bytes_down for order in late),
            flops=sum(cost.work(self.clock.examples(order)) for cost, order in zip(costs, orders, strict=True)),
            seconds=self.plan.participation.deadline if late else seconds,
            joules=sum(self.clock.joules(order) for order in (*orders, *late)),
        )

    def save(self, next_round: int) -> None:
        """Write the checkpoint."""
        if self.keeping.folder is None:
            return
        names = self.plan.server.layout.tensors(*TRAVELLING)
        server = {name: self.plan.server.tensors[name] for name in names}
        average = {} if self.average is None else self.average.tensors
        saved = checkpoint.Saved(next_round, self.results, server, self.optimizer.state, self.frozen, average)
        checkpoint.save(self.keeping.folder, saved, self.identity)


def _blank(plan: Plan, costs: Costs, settings: dict[str, Any]) -> Results:
    dataset = plan.data.dataset
    return Results(
        run=json.loads(json.dumps(settings)),
        method=plan.method.name,
        model={
            "class": type(plan.server.model).__name__,
            "family": plan.server.table.family,
            "layout": plan.server.layout.fingerprint,
            "params": plan.server.layout.count(whole(plan.server.layout)),
        },
        data={
            "name": dataset.name,
            "classes": len(dataset.classes),
            "clients": plan.data.clients,
            "train": len(dataset.train),
            "test": len(dataset.test),
            "validation": 0 if dataset.validation is None else len(dataset.validation),
        },
        metric="accuracy",
        sizes=sizes_of(plan, costs),
        last=plan.evaluating.last,
    )


def _refuse_other_shapes(before: Results, now: Results, folder: Path) -> None:
    """Weights that were trained in some shapes do not fit others, whatever settings say."""
    for old, new in zip(before.sizes, now.sizes, strict=True):
        if (old.params, old.flops) != (new.params, new.flops):
            raise CheckpointError(
                f"{str(folder)!r} was trained with other shapes: size {old.name} had {old.params:,} parameters and "
                f"{old.flops:,} FLOPs, and would have {new.params:,} and {new.flops:,} now. Resume with the version of raffm "
                "that began it, or give its shapes (method.shapes)."
            )


def _identity(plan: Plan, settings: dict[str, Any]) -> str:
    """What a run is: its model at the beginning, its clients' data, and its settings, but for how long it lasts."""
    parts, dataset = plan.data.split, plan.data.dataset
    data = {"indices": torch.from_numpy(parts.train.indices), "offsets": torch.from_numpy(parts.train.offsets)}
    for place, examples in enumerate((dataset.train, dataset.test, dataset.validation)):
        if examples is not None:
            data[f"{place}/labels"] = examples.labels
            data |= {f"{place}/{name}": _sampled(tensor) for name, tensor in examples.inputs.items()}
    kept = {key: entry for key, entry in settings.items() if key not in checkpoint.FREE}
    parts_of_plan = (plan.method, plan.task, plan.fleet, plan.local, plan.participation, plan.merging, plan.evaluating)
    about = [plan.seed, sorted(kept.items()), *map(_said, parts_of_plan)]
    return checkpoint.digest({**plan.server.tensors, **data}, *about)


def _sampled(tensor: Tensor) -> Tensor:
    """A million numbers of a tensor, evenly spaced: enough to tell one data set from another."""
    flat = tensor.reshape(-1)
    return flat[:: max(1, len(flat) >> 20)]


def _said(part: object) -> str:
    """A value as text that is the same in every process; of an object without fields, its class."""
    return repr(part) if is_dataclass(part) else type(part).__qualname__


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """A function to call between steps: after Ctrl-C it raises `Interrupted`. A second Ctrl-C stops at once.

    A program that deals with Ctrl-C in its own way, as Flower does, keeps doing so.
    """
    pressed: list[int] = []

    def tick() -> None:
        if pressed:
            raise Interrupted

    def note(number: int, _: FrameType | None) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or not is_ours:
        yield tick
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield tick
    finally:
        signal.signal(signal.SIGINT, before)
