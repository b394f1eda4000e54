"""On one GPU: is `captured` right, and what does it take? `python -m benchmarks.gpu` writes gpu.json.

    --quick     fewer steps and repeats, to see that all runs

Equality: every method's round in float32 against the serial backend on the same device. Time: FIARSE's round on CIFAR-10
(ResNet-18, 10 clients x 100 steps, batch 20, sizes 1, 1/4, 1/16, 1/64) for every method, against a plain loop over the same
steps, in one run. Images are random: they take as long as real ones.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from raffm.algebra.tally import Tally
from raffm.data.examples import Dataset, Examples, Federation, Parts, Split
from raffm.data.task import ImageClassification
from raffm.devices.fleet import fleet_of
from raffm.methods import METHODS, method_of
from raffm.models.labelled import Labelled
from raffm.models.load import trainable
from raffm.rounds.backend import Backend, Serial
from raffm.rounds.evaluate import evaluate
from raffm.rounds.local import Local
from raffm.rounds.plan import Evaluating, Participation, Plan
from raffm.simulate import captured
from raffm.simulate.captured import Captured
from raffm.simulate.lane import Style

SIZES = "1, 1/4, 1/16, 1/64"
TASK = ImageClassification((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), crop=4, flip=True)


def federation(clients: int, train: int, test: int, side: int = 32, device: str = "cuda") -> Federation:
    """Random images on the device, dealt evenly."""
    draw = torch.Generator().manual_seed(0)

    def examples(count: int) -> Examples:
        pixels = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=draw)
        return Examples({"pixel_values": pixels.to(device)}, torch.randint(0, 10, (count,), generator=draw).to(device))

    parts = [Parts.of(np.array_split(np.arange(count), clients)) for count in (train, test)]
    return Federation(Dataset("random", examples(train), examples(test), tuple("abcdefghij")), Split(*parts))


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
    captured.REPAY = 0  # few steps do not repay a capture
    data = federation(8, 800, 200)
    found = []
    for method in methods:
        for local in (Local("sgd", 0.05, 20, steps=steps, momentum=0.9), Local("adamw", 1e-3, 20, steps=steps)):
            found.append({"method": method, "optimizer": local.optimizer, "steps": steps, **difference(method, data, local)})
            print(found[-1], flush=True)
    return found


def difference(method: str, data: Federation, local: Local) -> dict[str, Any]:
    """One round of eight clients on both backends, from the same weights."""
    shapes = {"widths": (16, 32, 64), "depths": (1, 1, 1)}
    plans = [plan_of(method, data, local.steps, 8, changes=shapes, local=local) for _ in range(3)]
    graphs = Captured(plans[0], style=Style("float32", True))
    found, expected = one_round(plans[0], graphs), one_round(plans[1], Serial(plans[1]))
    before = {name: tensor for name, tensor in plans[2].server.tensors.items() if tensor.is_floating_point()}
    kinds = list(graphs._kinds.values())
    graphs.close()
    return {
        "gap": max(float((found[name] - expected[name]).abs().max()) for name in before),
        "moved": max(float((expected[name] - tensor).abs().max()) for name, tensor in before.items()),
        "tracks": sum(len(kind.tracks) for kind in kinds),
        "refused": sorted({kind.refused for kind in kinds if kind.refused}),
    }


def one_round(plan: Plan, backend: Backend, round: int = 0) -> dict[str, torch.Tensor]:
    """The server after a round."""
    tally = Tally(plan.server.layout, plan.server.tensors)
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


def rounds_of(method: str, data: Federation, steps: int, repeats: int, style: Style, **rest: Any) -> dict[str, Any]:
    """A round of a method: choosing, extracting, augmenting, training, tallying."""
    plan = plan_of(method, data, steps, **rest)
    backend = Captured(plan, style=style)
    tally = Tally(plan.server.layout, plan.server.tensors)

    def run(round: int) -> None:
        orders = plan.orders(round, plan.cohort(round).present)
        backend.train(orders, tally, lambda _: None, lambda: None)
        tally.step()

    first, *taken = seconds(run, repeats)
    tested = seconds(lambda place: evaluate(plan, backend, 1), 1)[-1]
    refused = sorted({kind.refused for kind in backend._kinds.values() if kind.refused})
    backend.close()
    return {"first": first, "median": median(taken), "all": taken, "evaluation": tested, "refused": refused}


def eager(method: str, data: Federation, steps: int, **rest: Any) -> float:
    """The same steps in a plain loop: the serial backend on the device."""
    plan = plan_of(method, data, steps, **rest)
    backend = Serial(plan)
    tally = Tally(plan.server.layout, plan.server.tensors)
    orders = plan.orders(0, plan.cohort(0).present)
    return seconds(lambda place: backend.train(orders, tally, lambda _: None, lambda: None), 1)[-1]


def main() -> None:
    """Check, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--what", default="equal,time,eager")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "gpu.json")
    options = parser.parse_args()
    methods = options.methods.split(",")
    steps, repeats = (20, 2) if options.quick else (100, 5)
    about = {"date": date.today().isoformat(), "torch": torch.__version__, "cuda": torch.version.cuda}
    results: dict[str, Any] = {**about, "gpu": torch.cuda.get_device_name(), "python": platform.python_version()}
    if "equal" in options.what:
        results["equal"] = differences(methods, 5)
        captured.REPAY = 40
    data = federation(100, 50000, 10000)
    if "time" in options.what:
        results["rounds"] = {}
        for method in methods:
            results["rounds"][method] = rounds_of(method, data, steps, repeats, Style("bfloat16", True))
            print(method, results["rounds"][method], flush=True)
    if "eager" in options.what:
        results["eager"] = {
            method: eager(method, data, steps, Style()) for method in ("fiarse", "heterofl", "fedavg") if method in methods
        }
        print(results["eager"], flush=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
