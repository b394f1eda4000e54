"""What a model takes where it runs: the seconds of one example, and the memory of a process that does nothing else.

Measured in a process of its own, as a device would run it: `python -m raffm.export.footprint KIND FILE INPUTS` prints it.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from raffm.devices.timing import Timing, timed
from raffm.errors import ExportError
from raffm.export.runtimes import Inputs, Run, in_onnx_runtime, in_openvino, in_torch
from raffm.models.checkpoint import load_submodel, save_submodel
from raffm.models.files import read_tensors, write_tensors

LIMIT = 600
"""Seconds after which a process that measures is given up."""


def in_stock(folder: Path) -> Run:
    """A model that transformers reads by itself."""
    import transformers

    kind: Any = getattr(transformers, json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0])
    return in_torch(kind.from_pretrained(folder, dtype=torch.float32).eval())


READERS: dict[str, Callable[[Path], Run]] = {
    "torch": lambda folder: in_torch(load_submodel(folder).eval()),
    "onnx": in_onnx_runtime,
    "openvino": in_openvino,
    "stock": in_stock,
}


@dataclass(frozen=True)
class Footprint:
    """The time of one example, and the most bytes that the process held beyond those before it read the model."""

    timing: Timing
    peak: int

    @staticmethod
    def from_json(content: dict[str, Any]) -> Footprint:
        """What was printed."""
        return Footprint(Timing(**content["timing"]), content["peak"])

    @property
    def words(self) -> tuple[str, str]:
        """Milliseconds with their spread, and megabytes."""
        median, low, high = (f"{1000 * each:.2f}" for each in (self.timing.median, self.timing.low, self.timing.high))
        return f"{median} ({low} to {high})", f"{self.peak / 1e6:.0f}"


def footprint_of(module: nn.Module, inputs: Inputs) -> Footprint:
    """What a module takes in torch."""
    with TemporaryDirectory() as folder:
        save_submodel(module, Path(folder) / "model")
        return footprint("torch", Path(folder) / "model", inputs)


def footprint(kind: str, path: Path, inputs: Inputs) -> Footprint:
    """What a file takes for one example in its runtime: "onnx", "openvino", "stock", or "torch" for a saved submodel."""
    with TemporaryDirectory() as folder:
        write_tensors(Path(folder) / "inputs.safetensors", inputs)
        command = [sys.executable, "-m", __name__, kind, str(path), str(Path(folder) / "inputs.safetensors")]
        said = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    if said.returncode:
        raise ExportError(f"{path.name} could not be run in a process of its own: {(said.stderr.splitlines() or ['?'])[-1]}")
    return Footprint.from_json(json.loads(said.stdout.splitlines()[-1]))


def _measured(kind: str, path: Path, inputs: Inputs) -> Footprint:
    """The same, in this process."""
    before = _most_held(begin=True)
    run = READERS[kind](path)
    timing = timed(lambda: run(inputs))
    return Footprint(timing, _most_held() - before)


def _most_held(begin: bool = False) -> int:
    """The most bytes that this process held, or holds now if it is to `begin` anew, where the system can do that."""
    try:
        if begin:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    print(json.dumps(asdict(_measured(sys.argv[1], Path(sys.argv[2]), read_tensors(Path(sys.argv[3]))))))  # noqa: T201
