"""On one GPU: is `captured` right, and what does it take? `python -m benchmarks.gpu` writes gpu.json.

    --quick     fewer steps and repeats, to see that all runs

Equality: every method's round in float32 against the serial backend on the same device. Time: FIARSE's round on CIFAR-10
(ResNet-18, 10 clients x 100 steps, batch 20, sizes 1, 1/4, 1/16, 1/64) for every method, against a plain loop over the same
steps, in one run. Images are random: they take as long as real ones.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from functools import cache
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from raffm.data.examples import Dataset, Examples, Federation, Parts, Split
from raffm.data.task import ImageClassification, TextClassification
from raffm.devices.fleet import fleet_of
from raffm.errors import RunError
from raffm.federate import load_data
from raffm.methods import METHODS, method_of
from raffm.methods.method import Client, Held, Learn
from raffm.models.labelled import Labelled
from raffm.models.load import trainable
from raffm.prepare import on_device
from raffm.rounds.backend import Backend, Serial
from raffm.rounds.evaluate import evaluate
from raffm.rounds.local import Local
from raffm.rounds.loop import Keeping, Nobody, train
from raffm.rounds.plan import Evaluating, Order, Participation, Plan
from raffm.rounds.results import Evaluation, Results, Round
from raffm.simulate import captured
from raffm.simulate.captured import Captured
from raffm.simulate.lane import Lane
from raffm.simulate.sheet import Style

SIZES = "1, 1/4, 1/16, 1/64"
TASK = ImageClassification((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), crop=4, flip=True)


def federation(clients: int, train: int, test: int, side: int = 32, device: str = "cuda") -> Federation:
    """Random images on the device, dealt evenly."""
    draw = torch.Generator(device).manual_seed(0)

    def examples(count: int) -> Examples:
        pixels = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=draw, device=device)
        return Examples({"pixel_values": pixels}, torch.randint(0, 10, (count,), generator=draw, device=device))

    parts = [Parts.of(np.array_split(np.arange(count), clients)) for count in (train, test)]
    return Federation(Dataset("random", examples(train), examples(test), tuple("abcdefghij")), Split(*parts))


@cache
def hundred() -> Federation:
    """A hundred clients with as many images as CIFAR-10 has."""
    return federation(100, 50_000, 10_000)


def plan_of(method: str, data: Federation, steps: int, asked: int = 10, device: str = "cuda", **rest: Any) -> Plan:
    """FIARSE's round on CIFAR-10 with any method."""
    model = trainable(rest.pop("model", "resnet18"), "image", 10, (3, 32, 32), changes=rest.pop("changes", None)).to(device)
    return Plan(
        server=Labelled.of(model),
        method=method_of(method, **rest.pop("switches", {})),
        task=rest.pop("task", TASK),
        data=data,
        fleet=fleet_of(rest.pop("fleet", SIZES)),
        rounds=1000,
        local=rest.pop("local", Local("sgd", lr=0.05, batch=20, steps=steps)),
        participation=Participation(asked),
        evaluating=Evaluating(batch=2000),
        **rest,
    )


# -- equality --------------------------------------------------------------------------------------------------------


def differences(methods: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """How far a captured client is from a serial one after a few steps, relative to how far it moved."""
    repay, captured.REPAY = captured.REPAY, 0  # few steps do not repay a capture
    data = federation(8, 800, 200)
    found = []
    for method in methods:
        for local in (Local("sgd", 0.05, 20, steps=steps, momentum=0.9), Local("adamw", 1e-3, 20, steps=steps)):
            found.append({"method": method, "optimizer": local.optimizer, "steps": steps, **difference(method, data, local)})
            print(found[-1], flush=True)
    captured.REPAY = repay
    return found


def difference(method: str, data: Federation, local: Local) -> dict[str, Any]:
    """One round of eight clients on both backends, from the same weights."""
    shapes = {"widths": (16, 32, 64), "depths": (1, 1, 1)}
    fleet = "1, 1/4, 1/16"  # balanced shapes of this model have no smaller one
    plans = [plan_of(method, data, local.steps, 8, changes=shapes, local=local, fleet=fleet) for _ in range(3)]
    graphs = Captured(plans[0], style=Style("float32", True))
    found, expected = one_round(plans[0], graphs), one_round(plans[1], Serial(plans[1]))
    before = {name: tensor for name, tensor in plans[2].server.tensors.items() if tensor.is_floating_point()}
    kinds = list(graphs._kinds.values())
    graphs.close()
    return {
        "gap": max(float((found[name] - expected[name]).abs().max()) for name in before),
        "moved": max(float((expected[name] - tensor.detach()).abs().max()) for name, tensor in before.items()),
        "tracks": sum(len(kind.tracks) for kind in kinds),
        "refused": sorted({kind.refused for kind in kinds if kind.refused}),
    }


def texts(rounds: int = 6) -> dict[str, Any]:
    """Some rounds on texts whose lengths differ by client, so that a lane has a graph for each, on both backends."""
    repay, captured.REPAY = captured.REPAY, 0
    draw = torch.Generator().manual_seed(0)
    lengths = torch.tensor([8, 24, 40, 24, 8, 40, 64, 8])[torch.arange(800) // 100]
    ids = torch.randint(0, 50, (800, 64), generator=draw)
    examples = Examples({"input_ids": ids.cuda(), "lengths": lengths}, torch.randint(0, 4, (800,), generator=draw).cuda())
    parts = Parts.of(list(np.arange(800).reshape(8, 100)))
    data = Federation(Dataset("texts", examples, examples, tuple("abcd")), Split(parts, parts))
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 64}
    plans = []
    for _ in range(3):
        model = trainable("bert:tiny", "text", 4, changes=off).cuda()
        local = Local("sgd", 0.05, 20, steps=4)
        given = {"fleet": fleet_of("1, 1/4"), "rounds": rounds, "local": local, "participation": Participation(3)}
        plans.append(Plan(Labelled.of(model), method_of("heterofl"), TextClassification(), data, **given))
    graphs, serial = Captured(plans[0], style=Style("float32")), Serial(plans[1])
    for round in range(rounds):
        found, expected = one_round(plans[0], graphs, round), one_round(plans[1], serial, round)
    kinds = list(graphs._kinds.values())
    before = {name: tensor for name, tensor in plans[2].server.tensors.items() if tensor.is_floating_point()}
    captured.REPAY = repay
    graphs.close()
    return {
        "gap": max(float((found[name] - expected[name]).abs().max()) for name in before),
        "moved": max(float((expected[name] - tensor.detach()).abs().max()) for name, tensor in before.items()),
        "graphs": sum(len(track.graphs) for kind in kinds for track in kind.tracks),
        "tracks": sum(len(kind.tracks) for kind in kinds),
        "refused": sorted({kind.refused for kind in kinds if kind.refused}),
    }


def one_round(plan: Plan, backend: Backend, round: int = 0) -> dict[str, torch.Tensor]:
    """The server after a round."""
    tally = plan.tally()
    backend.train(plan.orders(round, plan.cohort(round).present), tally, lambda _: None, lambda: None)
    tally.step()
    return {name: tensor.detach().clone() for name, tensor in plan.server.tensors.items()}


# -- time ------------------------------------------------------------------------------------------------------------


def seconds(run: Callable[[int], object], repeats: int) -> list[float]:
    """How long every run took, after one that does not count."""
    found = []
    for place in range(repeats + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run(place)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return found


WARM = 8
"""Rounds in which lanes are still captured: every cohort has another mix of sizes."""


def rounds_of(
    method: str, data: Federation, steps: int, repeats: int, style: Style, tested: bool = True, warm: int = 0, **rest: Any
) -> dict[str, Any]:
    """A round of a method: choosing, extracting, augmenting, training, tallying."""
    plan = plan_of(method, data, steps, **rest)
    backend = Captured(plan, style=style)
    tally = plan.tally()

    def run(round: int) -> None:
        orders = plan.orders(round, plan.cohort(round).present)
        backend.train(orders, tally, lambda _: None, lambda: None)
        tally.step()

    first, *taken = seconds(run, warm + repeats)
    warming, taken = taken[:-repeats], taken[-repeats:]
    evaluation = seconds(lambda place: evaluate(plan, backend, 1), 2)[-1] if tested else None
    refused = sorted({kind.refused for kind in backend._kinds.values() if kind.refused})
    backend.close()
    return {
        "first": first,
        "warming": warming,
        "median": median(taken),
        "mean": fmean(taken),
        "all": taken,
        "evaluation": evaluation,
        "refused": refused,
    }


def eager(method: str, data: Federation, steps: int, style: Style, **rest: Any) -> float:
    """The same steps of the same lanes, started one by one from Python; nothing but the steps is timed."""
    plan = plan_of(method, data, steps, **rest)
    taken = 0.0
    for order in plan.orders(0, plan.cohort(0).present):
        held = plan.method.held(plan.server, order.share)
        learn = plan.method.learn(plan.server, order.share, held, Client(plan.task, plan.present(order.client)))
        lane = Lane(plan, order, learn, style)

        def run(place: int, lane: Lane = lane, order: Order = order, held: Held = held, learn: Learn = learn) -> float:
            lane.load(order, held, learn)
            begin = spent = 0.0
            while begin < (steps if place else 2):
                count = lane.fill(int(begin))
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(count):
                    lane.step()
                torch.cuda.synchronize()
                begin, spent = begin + count, spent + time.perf_counter() - start
            return spent

        run(0)
        taken += run(1)
    return taken


VIT = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "image_size": 224,
    "patch_size": 16,
}


def vit_base(data: Federation, repeats: int) -> dict[str, Any]:
    """ViT-base at 224 pixels, batch 16: graphs against a plain loop."""
    local = Local("sgd", 0.01, batch=16, steps=20)
    given: dict[str, Any] = {
        "model": "vit-small",
        "changes": VIT,
        "local": local,
        "task": replace(TASK, size=224),
        "fleet": "full",
    }
    style = Style("bfloat16", True)
    graphs = rounds_of("fedavg", data, 20, repeats, style, asked=4, **given)
    return {"captured": graphs, "eager": eager("fedavg", data, 20, style, asked=4, **given)}


GROWTH = ((100, 1), (100, 3), (100, 10), (100, 30), (100, 100), (1000, 10), (10_000, 10), (100_000, 10))
"""Registered clients, and those of them that train in a round."""


def growth(repeats: int) -> list[dict[str, Any]]:
    """What a round costs with more clients in it, and with more that are registered."""
    found = []
    for registered, asked in GROWTH:
        data = federation(registered, max(50_000, 20 * registered), max(10_000, registered))  # a batch each
        taken = rounds_of("heterofl", data, 40, repeats, Style("bfloat16", True), asked=asked, tested=False)
        found.append({"registered": registered, "asked": asked, "median": taken["median"]})
        print(found[-1], flush=True)
    return found


SCALES: dict[str, dict[str, Any]] = {
    "a small ResNet": {"changes": {"widths": (16, 32, 64), "depths": (1, 1, 1)}},
    "ResNet-18": {},
    "a small ViT": {"model": "vit-small"},
    "ViT-base, 224 pixels": {"model": "vit-small", "changes": VIT, "task": replace(TASK, size=224)},
}


def scale(data: Federation, repeats: int) -> list[dict[str, Any]]:
    """What a round costs with larger models."""
    found = []
    for name, given in SCALES.items():
        numbers = sum(each.numel() for each in plan_of("heterofl", data, 40, device="cpu", **given).server.model.parameters())
        taken = rounds_of("heterofl", data, 40, repeats, Style("bfloat16", True), tested=False, **given)
        found.append({"model": name, "parameters": numbers, "median": taken["median"], "refused": taken["refused"]})
        print(found[-1], flush=True)
    return found


def little_memory(method: str) -> dict[str, Any]:
    """A round on a card that seems small: fewer clients at a time, the same server; and what is said where none fits."""
    data, total = federation(8, 800, 200), torch.cuda.get_device_properties(0).total_memory
    local = Local("sgd", 0.05, 20, steps=50)
    found: dict[str, Any] = {}
    servers = {}
    for name, gibibytes in (("plenty", 64.0), ("little", 2.5), ("too little", 0.25)):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + gibibytes * 2**30) / total)
        plan = plan_of(method, data, 50, 8, local=local)
        backend = Captured(plan, style=Style("float32", True))
        try:
            servers[name] = one_round(plan, backend)
            refused = sorted({kind.refused for kind in backend._kinds.values() if kind.refused})
            found[name] = {"gibibytes": gibibytes, "lanes": backend._width, "refused": refused}
        except RunError as error:
            found[name] = {"gibibytes": gibibytes, "error": str(error)}
        backend.close()
        print(name, found[name], flush=True)
    torch.cuda.set_per_process_memory_fraction(1.0)
    floats = [name for name, tensor in servers["plenty"].items() if tensor.is_floating_point()]
    found["gap"] = max(float((servers["plenty"][name] - servers["little"][name]).abs().max()) for name in floats)
    return found


SEEDS = range(5)

BACKENDS: dict[str, Callable[[Plan], Backend]] = {
    "serial": Serial,
    "captured": lambda plan: Captured(plan, style=Style("float32", True)),
    "captured bfloat16": lambda plan: Captured(plan, style=Style("bfloat16", True)),
}


def accuracy(rounds: int, backends: Sequence[str]) -> list[dict[str, Any]]:
    """A short run on CIFAR-10 (`$RAFFM_DATA`) with every backend and several seeds; the serial one needs no GPU."""
    found = []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for seed in SEEDS:
        for name in backends:
            data = on_device(load_data("cifar10", clients=50, split="iid", validation=0.0, seed=seed), device)
            shapes = {"widths": (16, 32, 64), "depths": (1, 1, 1)}
            plan = replace(plan_of("fiarse", data, 50, device=device, changes=shapes), rounds=rounds, seed=seed)
            begin = time.perf_counter()
            results = train(plan, BACKENDS[name](plan))
            last = {size: scores.test["accuracy"] for size, scores in results.evaluations[-1].sizes.items()}
            taken = time.perf_counter() - begin
            found.append({"backend": name, "device": device, "seed": seed, "seconds": taken, **last})
            print(found[-1], flush=True)
    return found


class Printing(Nobody):
    """Prints every evaluation, so that a run that is stopped has said something."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    def round(self, entry: Round, evaluation: Evaluation | None, results: Results) -> None:
        """A line."""
        if evaluation is not None:
            scores = {size: round(each.test["accuracy"], 4) for size, each in evaluation.sizes.items()}
            print(f"{entry.round} rounds, {time.perf_counter() - self._begin:.1f} s: {scores}", flush=True)


def long_run(rounds: int) -> dict[str, Any]:
    """FIARSE from beginning to end: rounds, evaluation and checkpoint after every 20th."""
    data = on_device(load_data("cifar10", clients=100, split="dirichlet-balanced", alpha=0.3, validation=0.0), "cuda")
    plan = plan_of("fiarse", data, 100)
    plan = replace(plan, rounds=rounds, evaluating=replace(plan.evaluating, every=20))
    begin = time.perf_counter()
    with TemporaryDirectory() as folder:
        backend, keeping = Captured(plan, style=Style("bfloat16", True)), Keeping(Path(folder) / "checkpoint", every=20)
        results = train(plan, backend, keeping, watcher=Printing())
    last = {size: scores.test["accuracy"] for size, scores in results.evaluations[-1].sizes.items()}
    return {"rounds": rounds, "seconds": time.perf_counter() - begin, "train": len(data.dataset.train), **last}


def python_loop() -> float:
    """Seconds of a fixed loop: how fast the processor is that feeds the GPU."""
    begin = time.perf_counter()
    sum(place % 7 for place in range(10_000_000))
    return time.perf_counter() - begin


def main() -> None:
    """Check, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps and repeats")
    parser.add_argument("--repeats", type=int, default=20, help="rounds of every method that count (default 20)")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=800, help="rounds of the long run (default 800)")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="those whose accuracy is measured (default: all)")
    parser.add_argument("--what", default="equal,texts,rounds,eager,vit,growth,scale,memory,accuracy,long")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "gpu.json")
    options = parser.parse_args()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before CUDA starts
    methods, what = options.methods.split(","), options.what.split(",")
    steps, repeats = (20, 2) if options.quick else (100, options.repeats)
    bf16 = Style("bfloat16", True)
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    if torch.cuda.is_available():
        results |= {"date": date.today().isoformat(), "torch": torch.__version__, "cuda": torch.version.cuda}
        results |= {"gpu": torch.cuda.get_device_name(), "python": platform.python_version(), "python_loop": python_loop()}

    def keep(name: str, found: Any) -> None:
        results[name] = found
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    if "equal" in what:
        keep("equal", differences(methods, 1) + differences(methods, 5))
    if "texts" in what:
        keep("texts", texts())
        print(results["texts"], flush=True)
    if "rounds" in what:
        for method in methods:
            keep("rounds", {**results.get("rounds", {}), method: rounds_of(method, hundred(), steps, repeats, bf16, warm=WARM)})
            print(method, results["rounds"][method], flush=True)
    if "eager" in what:
        keep("eager", {method: eager(method, hundred(), steps, bf16) for method in ("fedavg", "fiarse", "heterofl")})
        print(results["eager"], flush=True)
    if "vit" in what:
        keep("vit", vit_base(hundred(), 3))
        print(results["vit"], flush=True)
    if "growth" in what:
        keep("growth", growth(12))
    if "scale" in what:
        keep("scale", scale(hundred(), 3))
    if "memory" in what:
        keep("memory", {method: little_memory(method) for method in ("fedavg", "nested")})
    if "accuracy" in what:
        again = options.backends.split(",")
        known = [row for row in results.get("accuracy", []) if row["backend"] not in again]
        keep("accuracy", known + accuracy(10 if options.quick else 20, again))
    if "long" in what:
        keep("long", long_run(options.rounds))
        print(results["long"], flush=True)


if __name__ == "__main__":
    main()
