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
from raffm.devices.cost import CostModel
from raffm.devices.probe import read_inference
from raffm.devices.timing import Timing, timed
from raffm.errors import RunError
from raffm.export.runtimes import in_onnx_runtime, in_openvino
from raffm.export.write import write_onnx, write_openvino
from raffm.libraries import library
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
        """The costs that are asked for, by name."""
        layout = self.space.layout
        held = layout.sizes_of(self.judge.selection(sizes))
        found: dict[str, float] = {"params": self.model.params(held)}
        if "bytes" in self.asked:
            found["bytes"] = self.model.bytes(held)
        if "flops" in self.asked or "latency" in self.asked:
            found["flops"] = self.model.flops(held)
        if "memory" in self.asked:
            server = self.judge.plan.server
            found["memory"] = read_inference(server.model, layout, server.table, self.judge.selection(sizes))
        if "latency" in self.asked:
            found["latency"] = self._latency(found["flops"], found["params"])
        return found

    @cached_property
    def model(self) -> CostModel:
        """What predicts the exact ones."""
        server = self.judge.plan.server
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
        rows, taken = [], []
        for sizes in sampled:
            held = self.space.layout.sizes_of(self.judge.selection(sizes))
            rows.append([1.0, self.model.flops(held), self.model.params(held)])
            taken.append(self.timed(sizes).median)
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
