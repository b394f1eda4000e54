"""Exported files, run where they will be run: ONNX Runtime and OpenVINO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raffm.errors import ExportError
from raffm.libraries import library

Inputs = Mapping[str, Tensor]
Run = Callable[[Inputs], Tensor]
"""Gives the main output for inputs."""


def in_torch(module: nn.Module) -> Run:
    """The module itself."""

    def run(inputs: Inputs) -> Tensor:
        with torch.no_grad():
            return main_output(module(**inputs)).float()

    return run


def main_output(output: Any) -> Tensor:
    """The logits, or else the first tensor that a model gives."""
    if isinstance(output, Tensor):
        return output
    named = output if isinstance(output, Mapping) else vars(output)
    found = named.get("logits", next((entry for entry in named.values() if isinstance(entry, Tensor)), None))
    if not isinstance(found, Tensor):
        raise ExportError(f"{type(output).__name__} holds no tensor that could be compared.")
    return found


def in_onnx_runtime(path: Path, threads: int = 0) -> Run:
    """An ONNX file in ONNX Runtime, on the CPU; `threads` 0 leaves their number to it."""
    runtime = needed("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = {entry.name for entry in session.get_inputs()}
    outputs = [entry.name for entry in session.get_outputs()]
    main = "logits" if "logits" in outputs else outputs[0]

    def run(inputs: Inputs) -> Tensor:
        given = {name: tensor.numpy() for name, tensor in inputs.items() if name in names}
        return torch.from_numpy(session.run([main], given)[0]).float()

    return run


def in_openvino(path: Path, threads: int = 0) -> Run:
    """An OpenVINO file on the CPU, in float32."""
    openvino = needed("openvino", "openvino")
    exact = {"INFERENCE_PRECISION_HINT": "f32", **({"INFERENCE_NUM_THREADS": threads} if threads else {})}
    compiled = openvino.Core().compile_model(str(path), "CPU", exact)
    names = {port.get_any_name() for port in compiled.inputs}
    main = next((port for port in compiled.outputs if "logits" in port.names), compiled.outputs[0])

    def run(inputs: Inputs) -> Tensor:
        given = {name: tensor.numpy() for name, tensor in inputs.items() if name in names}
        return torch.from_numpy(compiled(given)[main].copy()).float()

    return run


def gap(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest output where that is above 1."""
    if one.shape != other.shape:
        raise ExportError(f"the exported file gives outputs of shape {tuple(one.shape)}, torch {tuple(other.shape)}.")
    return float((one - other).abs().max() / other.abs().max().clamp_min(1.0))


def needed(module: str, extra: str) -> Any:
    """A library that exports need, or an error that says how to get it."""
    return library(module, ExportError(f"this needs {module}: pip install 'raffm[{extra}]'."))


@contextmanager
def ready(module: nn.Module) -> Iterator[nn.Module]:
    """A module in evaluation mode, without caches of keys and values, for as long as it is exported."""
    config: Any = getattr(module, "config", None)
    cached, was_training = getattr(config, "use_cache", None), module.training
    module.eval()
    if cached is not None:
        config.use_cache = False
    try:
        yield module
    finally:
        module.train(was_training)
        if cached is not None:
            config.use_cache = cached
