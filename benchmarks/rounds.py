"""A federated round against its floor: the same local steps on the same submodels, in a plain loop.

Mixed sizes (HeteroFL's 1, 1/4, 1/16) of a small ResNet on images of CIFAR's shape. `serial` is compared in CPU seconds with one
process, `pooled` in wall seconds with two bare worker processes. Memory is read in processes of their own.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from math import inf

import numpy as np
import torch
from rich.progress import track
from torch import nn
from torch.nn import functional

from raffm import Evaluating, Federation, Local, Participation
from raffm.algebra.tally import Tally
from raffm.data.examples import Dataset, Examples, Parts, Split
from raffm.data.task import ImageClassification
from raffm.devices.fleet import fleet_of
from raffm.methods import method_of
from raffm.models.labelled import Labelled
from raffm.models.load import trainable
from raffm.rounds.backend import Serial, by_shape
from raffm.rounds.local import batches_of, order_of
from raffm.rounds.plan import Order, Plan
from raffm.rounds.workshop import Workshop
from raffm.simulate.pooled import Pooled

EXAMPLES = 50
COHORT = 10


def federation(clients: int, examples: int = EXAMPLES) -> Federation:
    """Random images, so many for each client; a million clients would share the same few."""
    draw = torch.Generator().manual_seed(0)
    stored = min(clients * examples, 5000)
    pixels = torch.randint(0, 256, (stored, 3, 32, 32), generator=draw, dtype=torch.uint8)
    labels = torch.randint(0, 10, (stored,), generator=draw)
    part = Examples({"pixel_values": pixels}, labels)
    indices = np.arange(clients * examples, dtype=np.int64) % stored
    parts = Parts(indices, np.arange(clients + 1, dtype=np.int64) * examples)
    return Federation(Dataset("random", part, part, tuple("0123456789")), Split(parts, parts))


def plan_of(clients: int = 100, cohort: int = COHORT, examples: int = EXAMPLES, widths: Sequence[int] = (16, 32, 64)) -> Plan:
    """A round of mixed sizes."""
    model = trainable("resnet18", "image", 10, (3, 32, 32), changes={"widths": tuple(widths), "depths": (1,) * len(widths)})
    return Plan(
        server=Labelled.of(model),
        method=method_of("heterofl", scaler=False, masked_loss=False),
        task=ImageClassification((0.5,) * 3, (0.5,) * 3),
        data=federation(clients, examples),
        fleet=fleet_of("1, 1/4, 1/16"),
        rounds=1,
        local=Local("sgd", lr=0.1, batch=10),
        participation=Participation(cohort),
        evaluating=Evaluating(every=1_000_000),
    )


# -- contenders ----------------------------------------------------------------------------------------------------


class Plain:
    """What anybody would write: a module for every shape, a fresh optimizer for every client, and the steps."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        workshop = Workshop(plan)
        self.modules: dict[object, nn.Module] = {}
        for order in plan.orders(0, plan.cohort(0).present):
            resident = workshop.loaded(order.share, order.share.selection)
            self.modules.setdefault(order.share, copy.deepcopy(resident.module))

    def train(self, orders: Sequence[Order]) -> None:
        """The same steps of the same clients, without giving weights out or taking updates in."""
        plan = self.plan
        for order in orders:
            module = self.modules[order.share].train()
            optimizer = torch.optim.SGD(module.parameters(), plan.local.lr)
            table = order_of(plan.data.split.train[order.client], plan.local, 0, order.round, order.client)
            for batch in batches_of(plan.task, plan.data.dataset.train, table, 0, order.round, order.client):
                loss = functional.cross_entropy(module(**batch.inputs).logits, batch.labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


def whole_round(plan: Plan, backend: Serial | Pooled, tally: Tally) -> None:
    """Choose, train, tally, step."""
    orders = plan.orders(0, plan.cohort(0).present)
    backend.train(orders, tally, lambda _: None, lambda: None)
    tally.step()


def _bare_worker(plan: Plan, orders: Sequence[Order], pipe: object) -> None:
    torch.set_num_threads(1)
    plain = Plain(plan)
    while pipe.recv_bytes() == b"go":  # type: ignore[attr-defined]
        plain.train(orders)
        pipe.send_bytes(b"done")  # type: ignore[attr-defined]


class BareWorkers:
    """Two forked processes that do the steps of half of the clients each, and nothing else."""

    def __init__(self, plan: Plan) -> None:
        orders = by_shape(plan.orders(0, plan.cohort(0).present))
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for half in (orders[::2], orders[1::2]):
            near, far = context.Pipe()
            process = context.Process(target=_bare_worker, args=(plan, half, far), daemon=True)
            process.start()
            self.pipes.append(near)
            self.processes.append(process)

    def train(self) -> None:
        """One round."""
        for pipe in self.pipes:
            pipe.send_bytes(b"go")
        for pipe in self.pipes:
            pipe.recv_bytes()

    def close(self) -> None:
        """End the processes."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send_bytes(b"stop")
            process.join()


# -- measuring -----------------------------------------------------------------------------------------------------


def ratio(
    one: Callable[[], object], other: Callable[[], object], clock: Callable[[], float], repeats: int, title: str
) -> float:
    """The median over repeats of what one takes over what the other takes, in turn."""
    ratios = []
    for repeat in track(range(repeats + 2), title, transient=True):
        taken = []
        for run in (one, other) if repeat % 2 else (other, one):
            begin = clock()
            run()
            taken.append(clock() - begin)
        first, second = taken if repeat % 2 else reversed(taken)
        if repeat > 1:
            ratios.append(first / second)
    return statistics.median(ratios)


def measure(repeats: int) -> list[tuple[str, float, float]]:
    """Ratios to the floors, each with its limit."""
    torch.set_num_threads(1)
    plan = plan_of()
    orders = by_shape(plan.orders(0, plan.cohort(0).present))
    serial, tally, plain = Serial(plan), Tally(plan.server.layout, plan.server.tensors), Plain(plan)
    one = ratio(lambda: whole_round(plan, serial, tally), lambda: plain.train(orders), time.process_time, repeats, "serial")
    bare, pooled = BareWorkers(plan), Pooled(plan, 2)
    shared = Tally(plan.server.layout, plan.server.tensors)
    two = ratio(lambda: whole_round(plan, pooled, shared), bare.train, time.perf_counter, repeats, "pooled")

    def threaded() -> None:
        torch.set_num_threads(2)
        whole_round(plan, serial, tally)
        torch.set_num_threads(1)

    def workers() -> None:
        whole_round(plan, pooled, shared)

    threads = ratio(workers, threaded, time.perf_counter, repeats, "threads")
    more = ratio(threaded, lambda: whole_round(plan, serial, tally), time.perf_counter, repeats, "threads")
    bare.close()
    pooled.close()
    return [
        ("a serial round with two threads / with one, wall seconds", more, inf),
        ("a pooled round, a thread a worker / a serial one with two threads, wall seconds", threads, inf),
        ("a serial round / the plain loop over its steps, CPU seconds", one, 1.05),
        ("a pooled round / two bare workers doing its steps, wall seconds", two, 1.10),
    ]


def memory() -> list[tuple[str, float, float]]:
    """Peak memory and start of processes of their own."""
    ten, thousand = (_in_process("round", count) for count in (10, 1000))
    few, many = (_in_process("start", count) for count in (100, 100_000))
    return [
        ("peak memory of a round with 1,000 clients / with 10", thousand["peak"] / ten["peak"], 1.05),
        ("megabytes that 100,000 registered clients take more than 100", (many["peak"] - few["peak"]) / 1024, 50.0),
        ("seconds to start with 100,000 registered clients", many["seconds"], 1.0),
        ("seconds to start with 100 registered clients", few["seconds"], inf),
    ]


def _in_process(what: str, count: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.rounds", what, str(count)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def _child(what: str, count: int) -> None:
    torch.set_num_threads(1)
    if what == "round":
        plan = plan_of(clients=1000, cohort=count, examples=10)
        whole_round(plan, Serial(plan), Tally(plan.server.layout, plan.server.tensors))
        seconds = 0.0
    else:
        data = federation(count, examples=10)
        warm = plan_of(clients=100, examples=10)
        begin = time.perf_counter()
        plan = Plan(
            warm.server, warm.method, warm.task, data, warm.fleet, rounds=1, local=warm.local, participation=Participation(10)
        )
        plan.orders(0, plan.cohort(0).present)
        seconds = time.perf_counter() - begin
    print(json.dumps({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "seconds": seconds}))


if __name__ == "__main__":
    _child(sys.argv[1], int(sys.argv[2]))
