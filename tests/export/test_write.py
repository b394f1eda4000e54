"""Heterogeneous submodels as files of other runtimes: what they say there is what torch says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from raffm.algebra.ranking import Ranking
from raffm.errors import ExportError
from raffm.export.runtimes import gap, in_onnx_runtime, in_torch
from raffm.export.write import bytes_of, write_int8, write_onnx, write_openvino
from raffm.models.labelled import Labelled
from raffm.models.load import tiny
from raffm.models.sample import sample_inputs
from raffm.models.space import read_space
from raffm.models.surgery import submodel
from raffm.seeds import generator


def uneven(family: str, model: nn.Module | None = None, **changes: object) -> tuple[nn.Module, dict[str, Tensor]]:
    """A random submodel with other widths in every layer, and inputs for it, with a mask where there are texts."""
    full = Labelled.of(model or tiny(family, **changes))
    space = read_space(full.layout, full.table, None)
    module = submodel(full.model, full.layout, Ranking().cut(full.layout, space.draw(generator(3, "export"))))
    inputs = sample_inputs(full.model, full.table, batch=3, tokens=9, generator=torch.Generator().manual_seed(1))
    if "input_ids" in inputs:
        inputs["attention_mask"] = (torch.arange(9) < torch.tensor([[9], [5], [2]])).long()
    return module.train(), inputs


def t5_encoder() -> nn.Module:
    from transformers import T5EncoderModel

    whole = tiny("t5")
    return T5EncoderModel(whole.config)  # type: ignore[arg-type]


QUICK = ["vit", "raffm_resnet"]
MORE = ["bert", "roberta", "distilbert", "resnet", "deit", "gpt2", "llama", "t5"]


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(family, marks=pytest.mark.slow) for family in MORE)])
def test_an_onnx_file_says_what_the_submodel_says_for_any_number_and_length(family: str, tmp_path: Path) -> None:
    module, inputs = uneven(family)
    written = write_onnx(module, inputs, tmp_path / "model.onnx")
    assert written.gap < 1e-4
    assert written.bytes == (tmp_path / "model.onnx").stat().st_size
    assert module.training
    if "input_ids" in inputs and "decoder_input_ids" not in inputs:
        short = {name: tensor[:2, :5] for name, tensor in inputs.items()}
        assert gap(in_onnx_runtime(written.path)(short), in_torch(module.eval())(short)) < 1e-4


@pytest.mark.slow
def test_the_encoder_of_t5_is_written(tmp_path: Path) -> None:
    module, inputs = uneven("t5", t5_encoder())
    assert write_onnx(module, inputs, tmp_path / "model.onnx").gap < 1e-4


@pytest.mark.parametrize("family", ["raffm_resnet", pytest.param("vit", marks=pytest.mark.slow)])
def test_openvino_says_what_the_submodel_says(family: str, tmp_path: Path) -> None:
    module, inputs = uneven(family)
    written = write_openvino(module, inputs, tmp_path / "model.xml")
    assert written.gap < 1e-4
    assert written.bytes == sum((tmp_path / name).stat().st_size for name in ("model.xml", "model.bin"))


def test_eight_bits_take_a_third_at_most_and_say_nearly_the_same(tmp_path: Path) -> None:
    model = tiny("vit", hidden_size=192, intermediate_size=768, num_hidden_layers=3, num_attention_heads=4)
    table = Labelled.of(model).table
    inputs = sample_inputs(model, table, batch=4)
    plain = write_onnx(model, inputs, tmp_path / "model.onnx")
    static = write_int8(plain.path, tmp_path / "static.onnx", [sample_inputs(model, table, batch=4) for _ in range(4)])
    dynamic = write_int8(plain.path, tmp_path / "dynamic.onnx")
    expected = in_torch(model.eval())(inputs)
    for path in (static, dynamic):
        assert bytes_of(path) < plain.bytes / 3
        assert gap(in_onnx_runtime(path)(inputs), expected) < 0.1
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "static.onnx", "dynamic.onnx"}


# -- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_file_that_says_something_else_is_refused(tmp_path: Path) -> None:
    module, inputs = uneven("raffm_resnet")
    with pytest.raises(ExportError, match=r"model\.onnx gives other outputs than torch: they differ by"):
        write_onnx(module, inputs, tmp_path / "model.onnx", tolerance=0.0)


def test_an_example_of_one_is_refused(tmp_path: Path) -> None:
    module, inputs = uneven("raffm_resnet")
    with pytest.raises(ExportError, match="with two or more the exported file takes any number"):
        write_onnx(module, {name: tensor[:1] for name, tensor in inputs.items()}, tmp_path / "model.onnx")


@pytest.mark.parametrize(("library", "extra"), [("onnxruntime", "onnx"), ("onnxscript", "onnx"), ("openvino", "openvino")])
def test_a_library_that_is_missing_is_named_with_the_way_to_get_it(
    library: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, inputs = uneven("raffm_resnet")
    monkeypatch.setitem(sys.modules, library, None)
    write = write_openvino if extra == "openvino" else write_onnx
    with pytest.raises(ExportError, match=rf"this needs {library}: pip install 'raffm\[{extra}\]'"):
        write(module, inputs, tmp_path / "model.onnx")


class Odd(nn.Module):
    """Computes what ONNX has no operator for."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Singular values."""
        return torch.linalg.svdvals(pixel_values)


def test_an_operator_that_a_format_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"Odd cannot be written as ONNX: .+"):
        write_onnx(Odd(), {"pixel_values": torch.randn(2, 4, 4)}, tmp_path / "model.onnx")
