"""From a trained model to a device: how fast a submodel is there, how small, and how soon. Writes deploy.json.

    python -m benchmarks.deploy

ViT-base at 224 pixels with random weights: they take as long as trained ones. Full and half are timed in turn, in one run, in
ONNX Runtime on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.timing import interleaved, ratio
from benchmarks.vit_base import vit_base
from raffm.elastic import RaFFM
from raffm.export.runtimes import in_onnx_runtime
from raffm.export.write import bytes_of, write_int8, write_onnx
from raffm.models.checkpoint import save_submodel


def half_of(elastic: RaFFM) -> dict[str, int]:
    """Half of every layer's FFN and half of its heads."""
    sizes = elastic.layout.sizes
    return {group: sizes[group] // 2 for group in sizes if group.endswith((".ffn", ".heads"))}


def measured(rounds: int) -> dict[str, Any]:
    """Everything about one model."""
    elastic = RaFFM(vit_base().eval())
    elastic.salient_parameter_prioritization()
    config = half_of(elastic)
    inputs = {"pixel_values": torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))}
    one = {name: tensor[:1] for name, tensor in inputs.items()}
    with TemporaryDirectory() as folder:
        begin = time.perf_counter()
        half, params = elastic.resource_aware_model(config)
        extracted = time.perf_counter() - begin
        save_submodel(half, Path(folder) / "half")
        saved = time.perf_counter() - begin
        files = {
            name: write_onnx(module, inputs, Path(folder) / f"{name}.onnx")
            for name, module in (("full", elastic.model), ("half", half.eval()))
        }
        runs = {name: in_onnx_runtime(written.path, os.cpu_count() or 1) for name, written in files.items()}
        taken = interleaved({name: partial(run, one) for name, run in runs.items()}, rounds, "full and half in turn")
        small = bytes_of(write_int8(files["half"].path, Path(folder) / "int8.onnx", [inputs]))
    return {
        "params": {"full": elastic.total_params, "half": params},
        "milliseconds": {name: times.median for name, times in taken.items()},
        "faster": ratio(taken, "full", "half"),
        "gap": {name: written.gap for name, written in files.items()},
        "bytes": {"float32": files["half"].bytes, "int8": small},
        "smaller": files["half"].bytes / small,
        "seconds": {"extracted": extracted, "extracted and saved": saved},
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="how often both are timed (default 12)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "deploy.json")
    options = parser.parse_args()
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    libraries = {name: version(name) for name in ("torch", "onnxruntime", "transformers")}
    results = {"date": date.today().isoformat(), **machine, **libraries, "vit-base": measured(options.rounds)}
    print(json.dumps(results, indent=1))
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
