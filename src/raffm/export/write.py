"""Write a module as a file of another runtime, run that file, and compare it with torch before anybody else does."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raffm.errors import ExportError
from raffm.export.runtimes import Inputs, Run, gap, in_onnx_runtime, in_openvino, in_torch, needed, ready

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Written:
    """A file, the bytes that it and its companions take, and how far its outputs are from torch's."""

    path: Path
    bytes: int
    gap: float


def write_onnx(module: nn.Module, inputs: Inputs, path: Path, tolerance: float = TOLERANCE) -> Written:
    """An ONNX file for batches and texts of any length; `inputs` are an example of at least two.

    Its parameters lie in the file itself where they fit (2 GB), else in one beside it.
    """
    exporters = needed("transformers.exporters", "onnx")
    for name in ("onnx", "onnxscript", "onnxruntime"):
        needed(name, "onnx")
    _refuse_one(inputs)
    beside = sum(tensor.numel() * tensor.element_size() for tensor in module.parameters()) > LARGEST
    config = exporters.OnnxConfig(output_path=str(path), dynamic=True, external_data=beside)
    with ready(module), _said_by_us(f"{type(module).__name__} cannot be written as ONNX"):
        exporters.OnnxExporter().export(module, dict(inputs), config)
    return checked(module, inputs, path, in_onnx_runtime, tolerance)


LARGEST = 1_900_000_000
"""Bytes of parameters that one ONNX file takes."""


def write_int8(source: Path, path: Path, calibration: Sequence[Inputs] = ()) -> Path:
    """An ONNX file with numbers of 8 bits, from a checked one in float32.

    With `calibration` inputs, which give the ranges of activations, it is quantised statically (QDQ), which TensorRT takes,
    too; without any, weights alone are kept in 8 bits and activations quantised as they come. Products are quantised;
    norms, softmax and the rest stay as they are.
    """
    onnx, quantization = needed("onnx", "onnx"), needed("onnxruntime.quantization", "onnx")
    plain = path.with_name(f".{path.name}.float32")
    bits = quantization.QuantType.QInt8
    common = {"weight_type": bits, "op_types_to_quantize": ["MatMul", "Gemm", *(["Conv"] if calibration else [])]}
    static = {
        "quant_format": quantization.QuantFormat.QDQ,
        "per_channel": True,
        "activation_type": bits,
        "extra_options": {"ActivationSymmetric": True, "WeightSymmetric": True},
    }
    try:
        model = onnx.load(str(source))
        _forget_shapes_of_weights(model)
        onnx.save(model, str(plain))
        with _said_by_us(f"{source.name} cannot be quantised"):
            if calibration:
                quantization.quantize_static(str(plain), str(path), _Reader(calibration), **common, **static)
            else:
                quantization.quantize_dynamic(str(plain), str(path), **common, extra_options={"MatMulConstBOnly": True})
    finally:
        plain.unlink(missing_ok=True)
    return path


def write_openvino(module: nn.Module, inputs: Inputs, path: Path, tolerance: float = TOLERANCE) -> Written:
    """OpenVINO's two files, `path` (.xml) and one beside it (.bin), in float32."""
    exporters = needed("transformers.exporters", "openvino")
    needed("openvino", "openvino")
    _refuse_one(inputs)
    config = exporters.OpenVINOConfig(output_path=str(path), dynamic=True, compress_to_fp16=False)
    with ready(module), _unasked(), _said_by_us(f"{type(module).__name__} cannot be written for OpenVINO"):
        exporters.OpenVINOExporter().export(module, dict(inputs), config)
    return checked(module, inputs, path, in_openvino, tolerance)


def checked(module: nn.Module, inputs: Inputs, path: Path, runtime: Callable[[Path], Run], tolerance: float) -> Written:
    """Run a file on the example, on one of it and on three times as many; refuse it where it differs from torch."""
    run, plain = runtime(path), in_torch(module)
    with ready(module):
        apart = max(gap(run(given), plain(given)) for given in _several(inputs))
    if not apart <= tolerance:
        raise ExportError(
            f"{path.name} gives other outputs than torch: they differ by {apart:.1e}, and {tolerance:.0e} is allowed. Do not "
            "use it: the model computes something that its exporter gets wrong."
        )
    return Written(path, bytes_of(path), apart)


def bytes_of(path: Path) -> int:
    """What a file and those that belong to it take."""
    companions = {path, path.with_suffix(".bin"), path.with_name(f"{path.name}.data"), path.with_name(f"{path.name}_data")}
    return sum(each.stat().st_size for each in companions if each.is_file())


def _several(inputs: Inputs) -> Iterator[dict[str, Tensor]]:
    """The example in other numbers."""
    yield dict(inputs)
    yield {name: tensor[:1] for name, tensor in inputs.items()}
    yield {name: torch.cat([tensor] * 3) for name, tensor in inputs.items()}


def _refuse_one(inputs: Inputs) -> None:
    if min(len(tensor) for tensor in inputs.values()) < 2:
        raise ExportError("the example of inputs holds one; with two or more the exported file takes any number.")


class _Reader:
    """Inputs as ONNX Runtime's calibration asks for them."""

    def __init__(self, several: Sequence[Inputs]) -> None:
        self._left = iter(several)

    def get_next(self) -> dict[str, Any] | None:
        """The next inputs."""
        given = next(self._left, None)
        return None if given is None else {name: tensor.numpy() for name, tensor in given.items()}


def _forget_shapes_of_weights(model: Any) -> None:
    """Exporters transpose weights and leave their old shapes noted, over which quantisation stumbles."""
    weights = {tensor.name for tensor in model.graph.initializer}
    kept = [value for value in model.graph.value_info if value.name not in weights]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)


@contextmanager
def _unasked() -> Iterator[None]:
    """OpenVINO asks on a terminal whether it may send its maker data; programs of a build server are not asked."""
    before = os.environ.get("CI")
    os.environ["CI"] = "true"
    try:
        yield
    finally:
        os.environ.pop("CI")
        if before is not None:
            os.environ["CI"] = before


@contextmanager
def _said_by_us(what: str) -> Iterator[None]:
    """Exporters talk a lot; where they fail, their last line is worth more."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            warnings.simplefilter("ignore")
            yield
    except (RuntimeError, ValueError, TypeError, NotImplementedError, KeyError, AttributeError) as error:
        words = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ExportError(f"{what}: {words}") from error
    finally:
        logging.disable(level)
