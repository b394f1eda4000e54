from pathlib import Path

import pytest
import torch

from families.cases import logits, named
from raffm.elastic import RaFFM
from raffm.errors import ExportError
from raffm.models.stock import export_stock

VIT, BERT, RESNET, OURS = map(named, ("vit", "bert", "resnet", "resnet-cifar"))


def alike(elastic: RaFFM, **sizes: int) -> dict[str, int]:
    """The same sizes in every layer."""
    return {f"layers.{layer}.{name}": size for layer in range(3) for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (VIT, {f"layers.{i}.{name}": size for i in range(3) for name, size in (("ffn", 7), ("heads", 3), ("qk", 2))}),
        (VIT, {"layers": 2, "residual": 9}),
        (BERT, {f"layers.{i}.ffn": 7 for i in range(3)}),
        (RESNET, {"stages.1.out": 7, "stages.1.blocks.0.inner": 7, "stages.1.blocks.1.inner": 7, "stages.1.blocks.2.inner": 7}),
    ],
)
def test_a_stock_folder_loads_without_raffm_to_the_same_logits(case, config, tmp_path: Path) -> None:
    import transformers

    elastic = RaFFM(case.build())
    small, _ = elastic.resource_aware_model(config)
    small.eval()
    export_stock(small, tmp_path / "stock")
    plain = getattr(transformers, case.kind).from_pretrained(tmp_path / "stock")
    inputs = case.inputs(elastic.model)
    expected = logits(small, inputs)
    assert float((logits(plain, inputs) - expected).abs().max() / expected.abs().max()) < 1e-5
    assert not hasattr(plain, "raffm")


def test_exporting_leaves_the_submodel_alone(tmp_path: Path) -> None:
    small, _ = RaFFM(VIT.build()).resource_aware_model({f"layers.{i}.qk": 2 for i in range(3)})
    before = small.vit.layers[0].attention.q_proj.weight.detach().clone()
    export_stock(small, tmp_path / "stock")
    assert torch.equal(small.vit.layers[0].attention.q_proj.weight, before)


@pytest.mark.parametrize(
    ("case", "config", "words"),
    [
        (BERT, {f"layers.{i}.heads": 2 for i in range(3)}, ["query.weight", "(8, 16)", "head_dim"]),
        (VIT, {"layers.1.ffn": 7}, ["intermediate_size", "[24, 7, 24]"]),
        (RESNET, {"stages.1.blocks.0.inner": 5}, ["layer.0.convolution.weight"]),
        (OURS, {}, ["ResNet"]),
    ],
)
def test_what_the_familys_config_cannot_say_is_refused(case, config, words: list[str], tmp_path: Path) -> None:
    small, _ = RaFFM(case.build()).resource_aware_model(config)
    with pytest.raises(ExportError) as caught:
        export_stock(small, tmp_path / "stock")
    assert all(word in str(caught.value) for word in words), caught.value
    assert not (tmp_path / "stock").exists()
