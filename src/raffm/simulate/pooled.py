"""Clients in worker processes: one thread each, weights in shared memory, sums kept by every worker.

Workers are forked, so that model, task and data need not travel. What does travel, orders and outcomes, goes through
pipes as JSON and safetensors: nothing is pickled. Clients are assigned by a plan, the longest first, and the workers'
sums are reduced in their order, so a run gives the same bits every time, and the serial ones to 1e-6.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from safetensors.torch import load as unpacked
from safetensors.torch import save as packed
from torch import Tensor

from raffm.algebra.selection import Selection
from raffm.algebra.tally import Tally, Total
from raffm.errors import RunError
from raffm.methods.method import Share
from raffm.models.rounding import Precision
from raffm.rounds.backend import Tick, by_shape
from raffm.rounds.costs import TRAINING, Costs
from raffm.rounds.plan import Order, Plan
from raffm.rounds.predict import Job, predicted
from raffm.rounds.workshop import Outcome, Workshop
from raffm.simulate.shared import Block, move_into, move_out

DEAD = "a worker process died (was it out of memory?). Use fewer workers, or the serial backend."

CORE = 5e10
"""FLOP/s of a core in small steps; with `CALL`, seconds a parameter tensor and step, a guess that divides clients well."""

CALL = 1e-4

POLL = 0.1
"""Seconds between two looks at whether a person wants to stop."""


@dataclass
class Worker:
    """A process, the pipe to it, and the memory it leaves its sums in."""

    process: Any
    pipe: Connection
    sums: Block
    coverage: Block


class Pooled:
    """Worker processes on this machine's CPU. Close it when done: it holds processes and shared memory."""

    def __init__(self, plan: Plan, workers: int | None = None, precision: Precision = "float32") -> None:
        if sys.platform == "win32":
            raise RunError("the pooled backend forks its workers, which Windows cannot do. Use the serial one.")
        devices = {tensor.device.type for tensor in plan.server.tensors.values()}
        if devices != {"cpu"}:
            raise RunError(f"the pooled backend trains on the CPU, but the model is on {', '.join(sorted(devices))}.")
        if plan.merging.combine != "mean":
            raise RunError(
                f"a {plan.merging.combine} needs all updates in one place, and workers send sums. Use the serial backend."
            )
        self._plan = plan
        self._precision = precision
        self._costs = Costs(plan)
        self._tensors = len(plan.server.layout.tensors("parameter"))
        move_into(Block(plan.server.tensors), plan.server.tensors)
        count = workers or cores()
        self._workers = [self._started() for _ in range(count)]

    def _started(self) -> Worker:
        counted = self._plan.tally().counted
        floats = {name: tensor for name, tensor in counted.items() if tensor.is_floating_point()}
        wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in floats.values()) else torch.float32
        sums, coverage = Block(floats, wide), Block(floats, wide)
        context = multiprocessing.get_context("fork")
        near, far = context.Pipe()
        given = self._plan, self._precision, far, near, sums, coverage, os.getpid()
        process = context.Process(target=_serve, args=given, daemon=True)
        process.start()
        far.close()
        return Worker(process, near, sums, coverage)

    def train(self, orders: Sequence[Order], tally: Tally, done: Callable[[Outcome], None], tick: Tick) -> list[Outcome]:
        """Train all clients on all workers; then add up their sums, worker by worker."""
        assigned = spread([self._seconds(order) for order in orders], len(self._workers))
        outcomes: list[Outcome] = []

        def heard(message: Mapping[str, Any]) -> None:
            outcomes.append(Outcome(**message["outcome"]))
            done(outcomes[-1])

        messages = [_orders_message(by_shape([orders[place] for place in places])) for places in assigned]
        replies = self._ask(messages, heard, tick)
        for worker, (about, counters) in zip(self._workers, replies, strict=True):
            tally.absorb(_totals(worker, about["coverage"]), counters)
        return sorted(outcomes, key=lambda outcome: outcome.client)

    def _seconds(self, order: Order) -> float:
        """What a client will roughly take: every step has a part that does not shrink with the model."""
        local = self._plan.local
        work = TRAINING * local.batch * self._costs.training_flops(order.share)
        calls = self._tensors * (1 + len(order.share.inner if order.share.drawn is None else order.share.inner[:1]))
        return local.steps_of(len(self._plan.data.split.train[order.client])) * (work / CORE + calls * CALL)

    def predict(self, jobs: Sequence[Job]) -> list[list[Tensor]]:
        """All submodels on all workers."""
        assigned = spread([self._costs.flops(job.share.selection) for job in jobs], len(self._workers))
        messages = [_jobs_message([jobs[place] for place in places]) for places in assigned]
        replies = self._ask(messages, lambda _: None, lambda: None)
        found: dict[int, list[Tensor]] = {}
        for places, (_, tensors) in zip(assigned, replies, strict=True):
            for at, place in enumerate(places):
                found[place] = [tensors[f"{at}/{part}"] for part in range(len(tensors) // len(places))]
        return [found[place] for place in range(len(jobs))]

    def _ask(
        self, messages: Sequence[bytes], heard: Callable[[Mapping[str, Any]], None], tick: Tick
    ) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
        """Send every worker its message and wait for all last words; `heard` gets what they say on the way."""
        for worker, message in zip(self._workers, messages, strict=True):
            try:
                worker.pipe.send_bytes(message)
            except ConnectionError:
                raise RunError(DEAD) from None
        last: dict[int, tuple[dict[str, Any], dict[str, Tensor]]] = {}
        while len(last) < len(self._workers):
            waiting = {worker.pipe: place for place, worker in enumerate(self._workers) if place not in last}
            for pipe in wait(list(waiting), POLL):
                about, tensors = _received(pipe)  # type: ignore[arg-type]
                if "error" in about:
                    raise RunError(f"a worker failed: {about['error']}")
                if about.get("last"):
                    last[waiting[pipe]] = about, tensors  # type: ignore[index]
                else:
                    heard(about)
            tick()
        return [last[place] for place in range(len(self._workers))]

    def close(self) -> None:
        """End the workers, and give the model memory of its own again."""
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join(timeout=0.5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        if self._workers:
            move_out(self._plan.server.tensors.values())
        self._workers = []


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spread(work: Sequence[float], workers: int) -> list[list[int]]:
    """Places of jobs for every worker: the longest first, each to the one with least to do, the first of equals."""
    loads = [0.0] * workers
    assigned: list[list[int]] = [[] for _ in range(workers)]
    for place in sorted(range(len(work)), key=lambda place: (-work[place], place)):
        idlest = loads.index(min(loads))
        loads[idlest] += work[place]
        assigned[idlest].append(place)
    return [sorted(places) for places in assigned]


# -- messages ------------------------------------------------------------------------------------------------------


def _message(about: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    """JSON, and tensors after it where there are some; four bytes say where they begin."""
    text = json.dumps(about).encode()
    content = packed({name: tensor.contiguous() for name, tensor in tensors.items()}) if tensors else b""
    return len(text).to_bytes(4, "little") + text + bytes(content)


def _received(pipe: Connection) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        content = pipe.recv_bytes()
    except (EOFError, ConnectionError):
        raise RunError(DEAD) from None
    begin = 4 + int.from_bytes(content[:4], "little")
    return json.loads(content[4:begin]), unpacked(content[begin:]) if len(content) > begin else {}


def _orders_message(orders: Sequence[Order]) -> bytes:
    shares, places, tensors = _packed_shares([order.share for order in orders])
    listed = [[order.client, order.round, order.weight, place] for order, place in zip(orders, places, strict=True)]
    return _message({"do": "train", "orders": listed, "shares": shares}, tensors)


def _jobs_message(jobs: Sequence[Job]) -> bytes:
    shares, places, tensors = _packed_shares([job.share for job in jobs])
    listed = [[job.round, place] for job, place in zip(jobs, places, strict=True)]
    return _message({"do": "predict", "jobs": listed, "shares": shares}, tensors)


def _packed_shares(shares: Sequence[Share]) -> tuple[list[dict[str, Any]], list[int], dict[str, Tensor]]:
    """Different shares once: their numbers, the place of every share among them, and their indices."""
    different: dict[Share, int] = {}
    places = [different.setdefault(share, len(different)) for share in shares]
    tensors = {
        f"{place}/{level}/{group}": kept
        for share, place in different.items()
        for level, selection in enumerate((share.selection, *share.inner))
        for group, kept in selection.kept.items()
    }
    plain = [{"numbers": dict(share.numbers), "inner": len(share.inner), "drawn": share.drawn} for share in different]
    return plain, places, tensors


def _unpacked_shares(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Share]:
    kept: list[list[dict[str, Tensor]]] = [[{} for _ in range(1 + plain["inner"])] for plain in about["shares"]]
    for key, indices in tensors.items():
        place, level, group = key.split("/", 2)
        kept[int(place)][int(level)][group] = indices
    found = []
    for plain, several in zip(about["shares"], kept, strict=True):
        own, *inner = map(Selection, several)
        found.append(Share(own, plain["numbers"], inner=tuple(inner), drawn=plain["drawn"]))
    return found


def _totals(worker: Worker, shapes: Mapping[str, list[int]]) -> dict[str, Total]:
    """What a worker left in shared memory."""
    found = {}
    for name, shape in shapes.items():
        size = torch.Size(shape)
        found[name] = Total(worker.sums.tensors[name], worker.coverage.tensors[name].view(-1)[: size.numel()].view(size))
    return found


# -- inside a worker -----------------------------------------------------------------------------------------------


def _serve(
    plan: Plan, precision: Precision, pipe: Connection, parents: Connection, sums: Block, coverage: Block, parent: int
) -> None:
    """Do what comes through the pipe until it is closed."""
    parents.close()
    _die_with(parent)
    _keep_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    workshop, tally = Workshop(plan, precision), plan.tally()
    while True:
        try:
            about, tensors = _received(pipe)
        except RunError:
            os._exit(0)  # the parent has closed the pipe
        try:
            if about["do"] == "train":
                _train(workshop, tally, pipe, about, tensors, sums, coverage)
            else:
                _predict(plan, workshop, pipe, about, tensors)
        except ConnectionError:
            os._exit(0)  # the parent has gone while this worker was at work
        except Exception as error:
            pipe.send_bytes(_message({"error": f"{type(error).__name__}: {error}"}))


def _die_with(parent: int) -> None:
    """On Linux the kernel ends a worker whose parent was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)


def _keep_memory() -> None:
    """On Linux a worker keeps what it frees for its next step, instead of having every page made anew."""
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "mallopt"):  # not in every C library
            library.mallopt(-4, 0)  # M_MMAP_MAX: large pieces come from the heap too
            library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: and stay there


def _train(
    workshop: Workshop,
    tally: Tally,
    pipe: Connection,
    about: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    sums: Block,
    coverage: Block,
) -> None:
    shares = _unpacked_shares(about, tensors)
    for client, round, weight, place in about["orders"]:
        outcome = workshop.train(Order(client, round, shares[place], weight), tally)
        pipe.send_bytes(_message({"outcome": asdict(outcome)}))
    shapes = {}
    for name, total in tally.totals().items():
        sums.tensors[name].copy_(total.sum)
        coverage.tensors[name].view(-1)[: total.coverage.numel()].copy_(total.coverage.reshape(-1))
        shapes[name] = list(total.coverage.shape)
    pipe.send_bytes(_message({"last": True, "coverage": shapes}, tally.counters()))


def _predict(plan: Plan, workshop: Workshop, pipe: Connection, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    shares = _unpacked_shares(about, tensors)
    found = {}
    for at, (round, place) in enumerate(about["jobs"]):
        outputs = predicted(plan, workshop, Job(shares[place], round))
        found.update({f"{at}/{part}": output for part, output in enumerate(outputs)})
    pipe.send_bytes(_message({"last": True}, found))
