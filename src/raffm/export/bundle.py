"""A folder for a device: the checked file, how inputs are made, what outputs mean, and what was measured."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from raffm.data.examples import Dataset, Examples
from raffm.data.task import Batch, Task, stated
from raffm.errors import ExportError
from raffm.export.footprint import Footprint, footprint, footprint_of
from raffm.export.runtimes import Run, gap, in_onnx_runtime, in_openvino, in_torch
from raffm.export.write import Written, bytes_of, write_int8, write_onnx, write_openvino
from raffm.models.files import write_json, written_whole
from raffm.models.stock import export_stock

Format = Literal["onnx", "onnx-int8", "openvino", "tensorrt", "stock"]

FORMATS: tuple[Format, ...] = get_args(Format)

SHOWN = 4
"""Examples that an exporter is shown."""

CALIBRATED = 128
"""Examples that give the ranges of activations."""

JUDGED = 2000
"""Examples that accuracy is compared on, at most."""

BATCH = 100


@dataclass(frozen=True)
class Bundle:
    """What was written: where, of which size, how far from torch, and the metrics of torch and of the file on examples."""

    folder: Path
    format: Format
    file: str
    bytes: int
    gap: float
    params: int
    examples: int
    torch: Mapping[str, float]
    exported: Mapping[str, float]
    in_torch: Footprint | None = None
    in_runtime: Footprint | None = None


def write_bundle(
    module: nn.Module,
    task: Task,
    dataset: Dataset,
    folder: Path,
    format: Format = "onnx",
    dynamic: bool = False,
    most_lost: float = 0.02,
    is_timed: bool = False,
    tokenizer: Any = None,
) -> Bundle:
    """Export a submodel into a new folder, and compare it with torch on validation examples, or else on training ones.

    `dynamic` quantises activations as they come; `most_lost` is what the main metric may lose by 8 bits; `is_timed` measures
    the time and memory of one example, in torch and in the file's runtime. A `tokenizer` travels along with texts.
    """
    if format not in FORMATS:
        raise ExportError(f"there is no format {format!r}. The formats are: {', '.join(FORMATS)}; all sizes in one: nested.")
    if dataset.questions is not None:
        raise ExportError(
            f"models that answer questions ({type(module).__name__}) are not exported: they have two outputs, or write. "
            "`raffm.export_stock` writes a file that plain transformers reads."
        )
    examples = dataset.validation or dataset.train
    several = examples if len(examples) > 1 else dataset.train
    shown = task.batch(several, torch.arange(min(SHOWN, len(several)))).inputs
    with written_whole(folder) as fresh:
        if tokenizer is not None and "input_ids" in shown and hasattr(tokenizer, "save_pretrained"):  # bytes need no files
            tokenizer.save_pretrained(fresh / "tokenizer")
        if format == "stock":
            return _stock(module, task, dataset, examples, fresh, folder, is_timed)
        if format == "openvino":
            written = write_openvino(module, shown, fresh / "model.xml")
            run = in_openvino(written.path)
        else:
            written = write_onnx(module, shown, fresh / "model.onnx")
            if format == "onnx-int8":
                written = _quantised(module, written, task, examples, shown, dynamic)
            run = in_onnx_runtime(written.path)
        if format == "tensorrt":
            (fresh / "build.sh").write_text(build_script(shown, "model.onnx", _longest(dataset)), encoding="utf-8")
            (fresh / "build.sh").chmod(0o755)
        found = _judged(module, task, examples, run)
        kind = "openvino" if format == "openvino" else "onnx"
        one = {name: tensor[:1] for name, tensor in shown.items()}
        taken = (footprint_of(module, one), footprint(kind, written.path, one)) if is_timed else ()
        bundle = Bundle(folder, format, written.path.name, written.bytes, written.gap, params_of(module), *found, *taken)
        _refuse_lost(bundle, most_lost)
        _describe(bundle, task, dataset, fresh)
    return bundle


def _stock(
    module: nn.Module, task: Task, dataset: Dataset, examples: Examples, fresh: Path, folder: Path, is_timed: bool
) -> Bundle:
    """The family's own format, which plain `from_pretrained` reads; `export_stock` runs and compares it."""
    export_stock(module, fresh / "stock")
    for each in (fresh / "stock").iterdir():
        shutil.move(each, fresh / each.name)
    (fresh / "stock").rmdir()
    written = type(module).from_pretrained(fresh, dtype=torch.float32).eval()  # type: ignore[attr-defined]
    one = task.batch(examples, torch.zeros(1, dtype=torch.int64)).inputs
    far = gap(in_torch(written)(one), in_torch(module)(one))
    found = _judged(module, task, examples, in_torch(written))
    taken = (footprint_of(module, one), footprint("stock", fresh, one)) if is_timed else ()
    size = bytes_of(fresh / "model.safetensors")
    bundle = Bundle(folder, "stock", "model.safetensors", size, far, params_of(module), *found, *taken)
    _describe(bundle, task, dataset, fresh)
    return bundle


def _quantised(
    module: nn.Module, written: Written, task: Task, examples: Examples, shown: Mapping[str, Tensor], dynamic: bool
) -> Written:
    """8 bits in place of 32, and how far outputs moved: their accuracy is judged, not this."""
    several = [] if dynamic else [batch.inputs for batch in _batches(task, examples, CALIBRATED, 16)]
    path = write_int8(written.path, written.path.with_name("model-int8.onnx"), several)
    written.path.unlink()
    return Written(path, bytes_of(path), gap(in_onnx_runtime(path)(shown), in_torch(module)(shown)))


def _judged(module: nn.Module, task: Task, examples: Examples, run: Run) -> tuple[int, dict[str, float], dict[str, float]]:
    """How many examples were looked at, and the metrics of torch and of the file on them."""
    said: list[tuple[Tensor, Tensor, Tensor]] = []
    was_training = module.training
    module.eval()
    for batch in _batches(task, examples, JUDGED, BATCH):
        with torch.no_grad():
            said.append((task.forward(module, batch).float(), task.forward(_Ran(run), batch), batch.labels))
    module.train(was_training)
    plain, exported, labels = (torch.cat(list(each)) for each in zip(*said, strict=True))
    return len(labels), task.metrics(plain, labels), task.metrics(exported, labels)


class _Ran(nn.Module):
    """A file that stands in a module's place: the task makes of its output what it makes of torch's."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def forward(self, **inputs: Tensor) -> Tensor:
        """The file's main output."""
        return self._run(inputs)


def _batches(task: Task, examples: Examples, most: int, size: int) -> Sequence[Batch]:
    return [task.batch(examples, picks) for picks in torch.split(torch.arange(min(most, len(examples))), size)]


def _refuse_lost(bundle: Bundle, most_lost: float) -> None:
    metric = next(iter(bundle.torch))
    lost = bundle.torch[metric] - bundle.exported[metric]
    if lost > most_lost:
        raise ExportError(
            f"{bundle.file} loses {lost:.3f} of {metric} on {bundle.examples} examples ({bundle.torch[metric]:.3f} before); "
            f"{most_lost:g} is allowed. Try another kind of quantisation, or allow more."
        )


def params_of(module: nn.Module) -> int:
    """The number of parameters, tied ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


# -- what travels along ------------------------------------------------------------------------------------------------


def _describe(bundle: Bundle, task: Task, dataset: Dataset, folder: Path) -> None:
    write_json(folder / "labels.json", {"labels": list(dataset.classes)})
    write_json(folder / "preprocessing.json", preprocessing(task, dataset))
    write_json(folder / "export.json", {**asdict(bundle), "folder": bundle.folder.name})
    (folder / "README.md").write_text(card(bundle, dataset), encoding="utf-8")


def preprocessing(task: Task, dataset: Dataset) -> dict[str, Any]:
    """How a task makes inputs; images that the data set holds in one square size are to be scaled to it."""
    found, pixels = stated(task), dataset.train.inputs.get("pixel_values")
    if pixels is not None and not found["size"] and pixels.shape[-1] == pixels.shape[-2]:
        found["size"] = int(pixels.shape[-1])
    return found


CARD = """# {name}

A submodel of {params:,} parameters for {data}{classes}, exported by raffm as {format}.

| | torch | this file |
|---|---|---|
{scores}{costs}

On {examples} examples, none of them of the test set. Largest difference of outputs: {gap:.1e}. {megabytes:.2f} MB.

`preprocessing.json` says how inputs are made: pixels between 0 and 1, then (value - mean) / std by channel, the image scaled
to `size` where that is not 0; texts are token ids and their mask, as the tokenizer in the folder `tokenizer` makes them.
`labels.json` names the outputs, in their order.
"""

NOT_BUILT = """
`build.sh` builds a TensorRT engine from the ONNX file, on the device that will run it. It was **not** run here: what was
checked is the ONNX file, in ONNX Runtime.
"""

BUILD = """#!/bin/sh
# Builds a TensorRT engine on the device that will run it, for batches of 1 to {most}. TensorRT 11 takes types from the file;
# for TensorRT 10 add --stronglyTyped.
exec trtexec --onnx={file} --saveEngine=model.engine \\
  --minShapes={least} --optShapes={usual} --maxShapes={largest} "$@"
"""


def card(bundle: Bundle, dataset: Dataset) -> str:
    """What somebody who finds the folder must know."""
    text = CARD.format(
        name=bundle.folder.name,
        data=dataset.name,
        classes=f" ({len(dataset.classes)} classes)" if dataset.classes else "",
        scores="\n".join(f"| {name} | {bundle.torch[name]:.4f} | {bundle.exported[name]:.4f} |" for name in bundle.torch),
        costs=_costs(bundle),
        megabytes=bundle.bytes / 1e6,
        **{key: getattr(bundle, key) for key in ("params", "format", "examples", "gap")},
    )
    return text + (NOT_BUILT if bundle.format == "tensorrt" else "")


def _costs(bundle: Bundle) -> str:
    """Rows of the card's table, where time and memory were measured."""
    if bundle.in_torch is None or bundle.in_runtime is None:
        return ""
    titles = ("ms for one example, where it was exported (10 % to 90 %)", "peak MB of memory, libraries not counted")
    both = zip(titles, bundle.in_torch.words, bundle.in_runtime.words, strict=True)
    return "".join(f"\n| {title} | {plain} | {exported} |" for title, plain, exported in both)


def _longest(dataset: Dataset) -> int:
    """The tokens of the longest text."""
    ids = dataset.train.inputs.get("input_ids")
    return 0 if ids is None else ids.shape[1]


def build_script(inputs: Mapping[str, Tensor], file: str, longest: int = 0, most: int = 32) -> str:
    """The command that builds an engine for batches of 1 to `most`, and for texts of up to the `longest`."""

    def shapes(batch: int, tokens: int) -> str:
        sizes = {name: (tokens,) if longest else tuple(tensor.shape[1:]) for name, tensor in inputs.items()}
        return ",".join(f"{name}:{'x'.join(map(str, (batch, *size)))}" for name, size in sizes.items())

    usual = min(longest, *(tensor.shape[1] for tensor in inputs.values()))
    return BUILD.format(
        file=file, most=most, least=shapes(1, 1), usual=shapes(min(8, most), usual), largest=shapes(most, longest)
    )
