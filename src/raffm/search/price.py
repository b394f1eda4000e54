"""What candidates cost, known before any of them is made: exact, except for latency, which is estimated from a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from raffm.data.task import Batch
from raffm.devices.budget import Kind
from raffm.devices.cost import CostModel
from raffm.devices.probe import read_inference
from raffm.devices.rows import Rows
from raffm.devices.timing import Timing, timed
from raffm.errors import RunError
from raffm.export.runtimes import in_onnx_runtime, in_openvino
from raffm.export.write import write_onnx, write_openvino
from raffm.libraries import library
from raffm.models.rows import bare
from raffm.models.space import Space
from raffm.rounds.plan import Plan
from raffm.search.front import Sizes
from raffm.search.judge import Judge
from raffm.seeds import generator

Runtime = Literal["torch", "onnx", "openvino"]

COSTS = ("params", "bytes", "flops", "memory", "latency")
"""Numbers; bytes on disk; FLOPs, peak bytes and seconds of one example."""

NEEDS_SCIPY = RunError("an estimate of latency needs scipy: pip install 'raffm[train]'.")

SAMPLED = 12
"""Submodels that are timed, so that the latency of all others can be estimated."""


@dataclass(frozen=True, eq=False)
class Prices:
    """The costs of every submodel of a space.

    `asked` are those to be known; `speed` the FLOP/s of a device that is not here; `runtime` where latency is measured.
    """

    judge: Judge
    space: Space
    asked: Sequence[str]
    speed: float | None = None
    runtime: Runtime = "torch"

    def of(self, sizes: Sizes) -> dict[str, float]:
        """The costs of one submodel that are asked for, by name."""
        (found,) = self.many([sizes])
        return found

    def many(self, every: Sequence[Sizes]) -> list[dict[str, float]]:
        """The costs of submodels that are asked for, by name."""
        exact = self._exact(every)
        found: list[dict[str, float]] = [{kind: costs[place] for kind, costs in exact.items()} for place in range(len(every))]
        for sizes, costs in zip(every, found, strict=True):
            if "memory" in self.asked:
                server, selection = self.judge.plan.server, self.judge.selection(sizes)
                costs["memory"] = read_inference(server.model, server.layout, server.table, selection)
            if "latency" in self.asked:
                costs["latency"] = self._latency(costs["flops"], costs["params"])
        return found

    def _exact(self, every: Sequence[Sizes]) -> dict[Kind, list[float]]:
        """The costs that are polynomials in the sizes, for all submodels at once."""
        kinds: list[Kind] = ["params"]
        kinds += ["bytes"] if "bytes" in self.asked else []
        kinds += ["flops"] if {"flops", "latency"} & set(self.asked) else []
        found = {kind: [0.0] * len(every) for kind in kinds}
        depths = [name for name in self.space.sizes if name in self.space.layout.depths]
        by_depth: dict[tuple[int, ...], list[int]] = {}
        for place, sizes in enumerate(every):
            by_depth.setdefault(tuple(sizes[name] for name in depths), []).append(place)
        for depth, places in by_depth.items():
            columns = {group: np.array([float(every[place][group]) for place in places]) for group in self.space.sizes}
            rows = self._rows.of(dict(zip(depths, depth, strict=True)), columns)
            for kind in kinds:
                for place, cost in zip(places, np.rint(self.model.many(kind, rows)).tolist(), strict=True):
                    found[kind][place] = cost
        return found

    @cached_property
    def _rows(self) -> Rows:
        return Rows(self.space.layout, self.model.basis, self.judge.ranking, self.space.sizes)

    @cached_property
    def model(self) -> CostModel:
        """What predicts the exact ones."""
        server = bare(self.judge.plan.server)
        return CostModel(server.model, server.layout, server.table, free=tuple(self.space.sizes))

    @cached_property
    def _latency(self) -> Callable[[float, float], float]:
        """Seconds from FLOPs and parameters: by a device's speed, or as a few submodels took here."""
        speed = self.speed
        if speed is not None:
            return lambda flops, params: flops / speed
        coefficients = self._fitted()
        return lambda flops, params: float(coefficients @ np.array([1.0, flops, params]))

    def timed(self, sizes: Sizes) -> Timing:
        """The seconds of one example on this machine, in the runtime."""
        plan, module = self.judge.plan, self.judge.module(sizes)
        return latency(plan, module) if self.runtime == "torch" else latency_in(self.runtime, plan, module)

    def _fitted(self) -> NDArray[np.float64]:
        """What a submodel takes at least, and for every FLOP and parameter; none of them below 0."""
        draw = generator(self.judge.seed, "search", "latency")
        sampled = [self.space.largest(), self.space.smallest(), *(self.space.draw(draw) for _ in range(SAMPLED - 2))]
        exact = self._exact(sampled)
        rows = [[1.0, flops, params] for flops, params in zip(exact["flops"], exact["params"], strict=True)]
        taken = [self.timed(sizes).median for sizes in sampled]
        scale = np.array(rows, dtype=np.float64).max(0)
        solution, _ = library("scipy.optimize", NEEDS_SCIPY).nnls(np.array(rows) / scale, np.array(taken))
        return np.asarray(solution / scale)


def latency(plan: Plan, module: nn.Module) -> Timing:
    """The seconds of one example in torch, on this machine, with the threads that torch has."""
    batch = one_example(plan)
    device = next(module.parameters()).device

    def call() -> None:
        plan.task.forward(module, batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with torch.no_grad():
        return timed(call)


def latency_in(runtime: Runtime, plan: Plan, module: nn.Module) -> Timing:
    """The seconds of one example in the runtime that the module is exported to."""
    shown = plan.task.batch(plan.data.dataset.train, torch.arange(2)).inputs
    one = {name: tensor[:1] for name, tensor in shown.items()}
    with TemporaryDirectory() as folder:
        if runtime == "onnx":
            run = in_onnx_runtime(write_onnx(module, shown, Path(folder) / "model.onnx").path)
        else:
            run = in_openvino(write_openvino(module, shown, Path(folder) / "model.xml").path)
        return timed(lambda: run(one))


def one_example(plan: Plan) -> Batch:
    """The first training example as the model takes it."""
    return plan.task.batch(plan.data.dataset.train, torch.zeros(1, dtype=torch.int64))
