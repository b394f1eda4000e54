"""Clients on one GPU: every step is a CUDA graph, and the clients of a round run beside each other, a stream each.

A step of a small model is a few hundred kernels of a few microseconds, and starting one from Python takes longer than that.
So the step of each shape is captured once and replayed; the kernels of several clients fill the chip together. No graph is
used before it was compared, over several steps, with the same step run plainly.
"""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from raffm.algebra.tally import Tally
from raffm.methods.method import Client, Held, Learn, Share, Update, nothing
from raffm.notices import notice
from raffm.rounds.backend import Tick, by_shape
from raffm.rounds.local import dropout_seed
from raffm.rounds.plan import Order, Plan
from raffm.rounds.predict import Job, predicted
from raffm.rounds.workshop import Outcome, Workshop, merged, seeded, shape_of
from raffm.simulate.graph import Recorded, Recorder, Refused
from raffm.simulate.lane import Lane, limits_are_usable
from raffm.simulate.room import full, is_full
from raffm.simulate.sheet import Style

T = TypeVar("T")

REPAY = 40
"""Steps after which a capture has paid for itself."""

LANES = 64
"""Lanes that are kept, or twice as many as run at a time."""

BURST = 10
"""Steps of a client that are queued at a time, before it is another's turn."""

STREAMS = 32
"""Streams that torch tells apart; more would share queues."""


@dataclass(eq=False)
class Track:
    """A lane, and the graphs of its step, by where its inputs lie (texts of every length have their own) and by its turn."""

    lane: Lane
    graphs: dict[object, Recorded] = field(default_factory=dict)


@dataclass
class Kind:
    """Clients that share a step: how many steps they made so far, their tracks, and why the step is not captured."""

    steps: int = 0
    tracks: list[Track] = field(default_factory=list)
    refused: str = ""
    draws: bool = False
    """Whether a step draws random numbers: those of several graphs would mix."""


@dataclass(frozen=True, eq=False)
class Task:
    """An order with what its client holds and how it learns."""

    order: Order
    held: Held
    learn: Learn
    present: Tensor


@dataclass(frozen=True, eq=False)
class Running:
    """A client on its track and a stream, and the steps that it has still to queue."""

    task: Task
    track: Track
    stream: torch.cuda.Stream
    steps: Iterator[int]


class Captured:
    """Clients side by side on one CUDA device."""

    def __init__(self, plan: Plan, lanes: int = 0, style: Style | None = None) -> None:
        self._plan = plan
        self._style = style or Style()
        self._width = lanes or plan.participation.count(plan.data.clients)
        self._workshop = Workshop(plan)  # of what is tested, all of it under `_predicted`
        self._alone = Workshop(plan, self._style.precision)  # of clients whose steps are not captured
        self._kinds: OrderedDict[object, Kind] = OrderedDict()
        self._precision = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        is_exact = self._style.precision == "float32"
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = not is_exact
        self._device = torch.cuda.current_device()
        torch.cuda.set_device(plan.server.device)
        self._main = torch.cuda.current_stream()
        self._for_terms = [torch.cuda.Stream() for _ in plan.fleet.tiers[1:]]  # type: ignore[no-untyped-call]
        most = max(1, STREAMS - len(self._for_terms))
        self._streams = [torch.cuda.Stream() for _ in range(min(self._width, most))]  # type: ignore[no-untyped-call]
        self._recorder = Recorder(self._style.precision)
        self._copies: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()

    def train(self, orders: Sequence[Order], tally: Tally, done: Callable[[Outcome], None], tick: Tick) -> list[Outcome]:
        """Train all clients, as many at a time as there is room for; those whose steps are not captured come last."""
        held: dict[Share, Held] = {}
        sizes = {order.share: self._plan.server.layout.count(order.share.selection) for order in orders}
        waiting = sorted(by_shape(orders), key=lambda order: -sizes[order.share])  # the longest begin first
        alone: list[Order] = []
        outcomes: list[Outcome] = []
        while waiting:
            running = self._begin(waiting, alone, held)
            self._finish(running, tick)
            while running:  # the shortest end first; one that ended is let go, so that its lane can be given up
                outcomes.append(self._merged(running.pop(), tally))
                done(outcomes[-1])
        for order in alone:
            train = partial(self._alone.trained, order, tick)
            update, loss = self._with_room("a single client", "Use a smaller batch or model", train)
            outcomes.append(merged(self._plan, tally, update, loss))
            done(outcomes[-1])
        return outcomes

    def _begin(self, waiting: list[Order], alone: list[Order], held: dict[Share, Held]) -> list[Running]:
        """Begin as many of those that wait as there is room for; those whose steps are not captured are put aside."""
        running: list[Running] = []
        while waiting and len(running) < self._width:
            task = self._task(waiting[0], held)
            kind = self._kind(task)
            begun = self._begun(task, kind, running) if self._repays(task, kind) else None
            if begun is None and running and self._repays(task, kind):
                break  # it was not refused, so there is no room beside the others
            waiting.pop(0)
            kind.steps += self._steps_of(task)
            if begun is None:
                alone.append(task.order)
            else:
                running.append(begun)
        return running

    def predict(self, jobs: Sequence[Job]) -> list[list[Tensor]]:
        """One submodel after another, on the device, computed as the lanes do."""
        remedy = "Use a smaller one (evaluate.batch)"
        return [self._with_room("a batch of the evaluation", remedy, partial(self._predicted, job)) for job in jobs]

    def _predicted(self, job: Job) -> list[Tensor]:
        is_rounded = self._style.dtype == torch.bfloat16
        with torch.autocast("cuda", torch.bfloat16, enabled=is_rounded, cache_enabled=False):  # weights change between jobs
            return predicted(self._plan, self._workshop, job, self._laid_out)

    def _laid_out(self, module: nn.Module) -> nn.Module:
        """A copy of a module with its channels where the lanes have them; kept, since copying structure takes long."""
        if not self._style.channels_last:
            return module
        if module not in self._copies:
            copied = copy.deepcopy(module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self._copies[module] = copied
        mine, given = ([*each.parameters(), *each.buffers()] for each in (self._copies[module], module))
        torch._foreach_copy_(mine, given)
        return self._copies[module]

    def close(self) -> None:
        """Free lanes and graphs."""
        self._kinds.clear()
        self._copies.clear()
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = self._precision
        torch.cuda.empty_cache()
        torch.cuda.set_device(self._device)

    # -- who runs where ------------------------------------------------------------------------------------------

    def _task(self, order: Order, held: dict[Share, Held]) -> Task:
        plan = self._plan
        if order.share not in held:
            held[order.share] = plan.method.held(plan.server, order.share)
        present = plan.present(order.client)
        learn = plan.method.learn(plan.server, order.share, held[order.share], Client(plan.task, present))
        return Task(order, held[order.share], learn, present)

    def _kind(self, task: Task) -> Kind:
        learn = task.learn
        constants = tuple((tuple(tensor.shape), tensor.dtype) for tensor in learn.constants)
        fading = None if learn.fading is None else learn.fading.aware
        key = shape_of(self._plan, task.order.share.selection), learn.key, constants, fading
        if key not in self._kinds:
            kind = self._kinds[key] = Kind()
            reason = _uncapturable(learn, self._style, has_others=bool(task.order.share.inner))
            if reason:
                self._refuse(kind, Refused(reason))
        self._kinds.move_to_end(key)
        return self._kinds[key]

    def _steps_of(self, task: Task) -> int:
        return self._plan.local.steps_of(len(self._plan.data.split.train[task.order.client]))

    def _repays(self, task: Task, kind: Kind) -> bool:
        """Whether the client's step can be captured, and was or will be taken often enough."""
        is_usual = bool(kind.tracks) or kind.steps + self._steps_of(task) >= REPAY
        return is_usual and not kind.refused and limits_are_usable(task.learn.fading, task.held)

    def _begun(self, task: Task, kind: Kind, running: Sequence[Running]) -> Running | None:
        """A client on its track, its first steps queued; None where it cannot run so, or not beside those that do."""
        if kind.draws and running:
            return None
        try:
            return self._on_a_track(task, kind, running)
        except RuntimeError as error:
            if not is_full(error):
                raise
            said = str(error)  # the error itself holds on to what did not fit
        return self._begun(task, kind, running) if self._has_more_room(running, said) else None

    def _on_a_track(self, task: Task, kind: Kind, running: Sequence[Running]) -> Running | None:
        """A client on a track that is free or new; None where its step turns out to be none that can run there now."""
        track = self._free(kind, task, running)
        stream = self._streams[len(running) % len(self._streams)]
        begun = Running(task, track, stream, self._steps(task, kind, track, stream, is_beside=bool(running)))
        is_queued = next(begun.steps, None) is not None
        if kind.refused:
            return None
        if track not in kind.tracks:
            kind.tracks.append(track)
        return begun if is_queued else None

    def _finish(self, running: Sequence[Running], tick: Tick) -> None:
        """Queue the other steps of all clients, a few of each in turn, so that none waits for another."""
        left = list(running)
        while left:
            left = [each for each in left if next(each.steps, None) is not None]
            tick()

    def _free(self, kind: Kind, task: Task, running: Sequence[Running]) -> Track:
        """A track of this kind on which nobody runs."""
        busy = {id(each.track) for each in running}
        for track in kind.tracks:
            if id(track) not in busy:
                return track
        self._make_room(busy)
        return Track(Lane(self._plan, task.order, task.learn, self._style, self._for_terms))

    def _make_room(self, busy: set[int]) -> None:
        """Give up tracks that nobody runs on, the kinds used longest ago first, where there are too many."""
        most = max(LANES, 2 * self._width)
        for kind in list(self._kinds.values()):
            if sum(len(each.tracks) for each in self._kinds.values()) < most:
                return
            kind.tracks = [track for track in kind.tracks if id(track) in busy]

    def _has_more_room(self, running: Sequence[Running], said: str) -> bool:
        """Give up what lies idle, if anything does; else go on with fewer clients, or say that not even one fits."""
        if self._give_up({id(each.track) for each in running}):
            return True
        if not running:
            raise full("a single client", said, "Use a smaller batch or model")
        self._width = len(running)
        notice(f"the GPU has room for {self._width} clients at a time.")
        return False

    def _give_up(self, busy: set[int]) -> bool:
        """Free all tracks that nobody runs on; give whether there were any."""
        before = sum(len(kind.tracks) for kind in self._kinds.values())
        for kind in self._kinds.values():
            kind.tracks = [track for track in kind.tracks if id(track) in busy]
        torch.cuda.synchronize()
        gc.collect()  # modules whose parts refer to themselves
        torch.cuda.empty_cache()
        return before > sum(len(kind.tracks) for kind in self._kinds.values())

    def _with_room(self, what: str, remedy: str, run: Callable[[], T]) -> T:
        """Do what needs memory, without lanes if there is not enough; say in one line where that does not help."""
        try:
            return run()
        except RuntimeError as error:
            if not is_full(error):
                raise
            said = str(error)  # the error itself holds on to what did not fit
        if not self._give_up(set()):
            raise full(what, said, remedy)
        return self._with_room(what, remedy, run)

    # -- one client ----------------------------------------------------------------------------------------------

    def _steps(self, task: Task, kind: Kind, track: Track, stream: torch.cuda.Stream, is_beside: bool) -> Iterator[int]:
        """Queue all steps of a client on a stream, some at a time; gives how many are queued.

        None where the step cannot be captured, or draws random numbers and the client is beside others.
        """
        lane = track.lane
        with torch.cuda.stream(stream), seeded(self._plan, task.order):
            stream.wait_stream(self._main)
            lane.load(task.order, task.held, task.learn)
            filled = lane.fill(0)
            turns = [lane.turn(step) for step in range(lane.steps)]
            try:
                self._capture_missing(task, kind, track, turns)
            except Refused as refused:
                self._refuse(kind, refused)
                return
        if kind.draws and is_beside:
            return
        graphs = {turn: track.graphs[lane.where(), turn].graph for turn in set(turns)}
        with seeded(self._plan, task.order) if kind.draws else nullcontext():
            for begin in range(0, lane.steps, BURST):
                end = min(begin + BURST, lane.steps)
                with torch.cuda.stream(stream):
                    for step in range(begin, end):
                        if step == filled:
                            filled += lane.fill(step)
                        graphs[turns[step]].replay()
                yield end

    def _capture_missing(self, task: Task, kind: Kind, track: Track, turns: Sequence[int]) -> None:
        """The graphs of all turns that were not captured yet, where the inputs of the step lie now."""
        again = partial(self._again, task, track.lane)
        for turn in sorted(set(turns)):
            place = track.lane.where(), turn
            if place not in track.graphs:
                track.graphs[place] = self._recorder.record(track.lane, turn, again)
                kind.draws = kind.draws or track.graphs[place].draws
                again()

    def _merged(self, running: Running, tally: Tally) -> Outcome:
        """Wait for a client, and add its update to the tally."""
        task, lane, order = running.task, running.track.lane, running.task.order
        self._main.wait_stream(running.stream)
        loss = float(lane.total) / lane.steps
        update = Update(order.client, order.share, task.held, lane.update(order), order.weight, task.present)
        return merged(self._plan, tally, update, loss)

    def _again(self, task: Task, lane: Lane) -> None:
        """Back to the beginning of the client, random numbers too."""
        torch.cuda.manual_seed(dropout_seed(self._plan.seed, task.order.round, task.order.client))
        lane.load(task.order, task.held, task.learn)
        lane.fill(0)

    def _refuse(self, kind: Kind, refused: Refused) -> None:
        """Run steps of a kind plainly from now on; said once for all kinds."""
        if not any(other.refused == refused.reason for other in self._kinds.values()):
            notice(f"steps of {self._plan.method.name} run plainly: {refused}.")
        kind.refused, kind.tracks = refused.reason, []


def _uncapturable(learn: Learn, style: Style, has_others: bool) -> str:
    """Why the step of a method is not captured, if so: what lanes do in its stead is not all that it does."""
    if learn.fading is not None:
        return ""
    if style.dtype != torch.float32 and learn.after_step is not nothing:
        return "its method changes weights after a step, which bfloat16 lanes round"
    if learn.scaling is None and learn.finish is not nothing:
        return "its method does something after the last step"
    if has_others and learn.after_backward is not nothing:
        return "its method changes gradients that smaller submodels add to"
    return ""
