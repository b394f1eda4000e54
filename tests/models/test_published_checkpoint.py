"""A folder as the published code of 2023 wrote it: old names of tensors, the space in the config, pickled or not."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import ViTForImageClassification

from commands import raffm
from families.cases import logits, named
from raffm.elastic import RaFFM
from raffm.errors import CheckpointError
from raffm.models.checkpoint import load_weights
from raffm.models.load import trainable
from raffm.models.verify import verify

VIT = named("vit")
SPACE = {"atten_out_space": [16, 8], "inter_hidden_space": [24, 16, 8], "residual_hidden_space": [16]}
CONFIG = {
    "_name_or_path": "google/vit-base-patch16-224-in21k",
    "architectures": ["ViTForImageClassification"],
    "attention_probs_dropout_prob": 0.0,
    "elastic_config": SPACE,
    "encoder_stride": 16,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "id2label": {str(number): f"LABEL_{number}" for number in range(5)},
    "image_size": 8,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "label2id": {f"LABEL_{number}": number for number in range(5)},
    "hidden_size": 16,
    "layer_norm_eps": 1e-12,
    "model_type": "vit",
    "num_attention_heads": 4,
    "num_channels": 3,
    "num_hidden_layers": 3,
    "patch_size": 4,
    "problem_type": "single_label_classification",
    "qkv_bias": True,
    "torch_dtype": "float32",
    "transformers_version": "4.31.0",
}
LAYER = {
    "attention.attention.query": (16, 16),
    "attention.attention.key": (16, 16),
    "attention.attention.value": (16, 16),
    "attention.output.dense": (16, 16),
    "intermediate.dense": (24, 16),
    "output.dense": (16, 24),
    "layernorm_before": (16,),
    "layernorm_after": (16,),
}


def old_tensors() -> dict[str, Tensor]:
    """Random weights by the names of 2023."""
    draw = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "vit.embeddings.cls_token": (1, 1, 16),
        "vit.embeddings.position_embeddings": (1, 5, 16),
        "vit.embeddings.patch_embeddings.projection.weight": (16, 3, 4, 4),
        "vit.embeddings.patch_embeddings.projection.bias": (16,),
        "vit.layernorm.weight": (16,),
        "vit.layernorm.bias": (16,),
        "classifier.weight": (5, 16),
        "classifier.bias": (5,),
    }
    for layer in range(3):
        for name, shape in LAYER.items():
            shapes[f"vit.encoder.layer.{layer}.{name}.weight"] = shape
            shapes[f"vit.encoder.layer.{layer}.{name}.bias"] = shape[:1]
    return {name: torch.randn(shape, generator=draw) * 0.3 for name, shape in shapes.items()}


@pytest.fixture(params=["pytorch_model.bin", "model.safetensors"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    place = tmp_path / "published"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(CONFIG, indent=2))
    if request.param == "pytorch_model.bin":
        torch.save(old_tensors(), place / request.param)
    else:
        save_file(old_tensors(), place / request.param, metadata={"format": "pt"})
    return place


def test_it_loads_and_scales_with_its_own_space(folder: Path) -> None:
    elastic = RaFFM(ViTForImageClassification.from_pretrained(folder))
    old = old_tensors()
    assert torch.equal(
        elastic.model.vit.layers[1].attention.q_proj.weight, old["vit.encoder.layer.1.attention.attention.query.weight"]
    )
    assert elastic.space.is_published
    assert elastic.space.sizes["layers.0.qk"] == (4, 2)
    elastic.salient_parameter_prioritization()
    small, params, config = elastic.sample_smallest_model()
    assert config["layer_3"] == {"atten_out": 8, "inter_hidden": 8, "residual_hidden": 16}
    assert params < elastic.total_params == sum(tensor.numel() for tensor in old.values())
    assert torch.isfinite(logits(small, VIT.inputs(elastic.model))).all()
    elastic.aggregate([small])
    assert verify(elastic.model).holds


def test_it_can_be_written_and_read_again(folder: Path, tmp_path: Path) -> None:
    elastic = RaFFM(ViTForImageClassification.from_pretrained(folder))
    elastic.save_ckpt(tmp_path / "ours")
    again = RaFFM(ViTForImageClassification.from_pretrained(tmp_path / "ours"))
    inputs = VIT.inputs(elastic.model)
    assert torch.equal(logits(again.model, inputs), logits(elastic.model, inputs))
    assert again.space.sizes == elastic.space.sizes


def test_it_can_be_inspected_and_trained_by_its_folder_or_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = raffm("inspect", folder)
    assert ran.returncode == 0, ran.stderr
    assert f"ViTForImageClassification (vit), {sum(map(Tensor.numel, old_tensors().values())):,} parameters" in ran.stdout
    monkeypatch.setenv("RAFFM_MODELS", str(folder.parent))
    assert raffm("inspect", "published").stdout == ran.stdout
    model = trainable("published", "image", 5)
    assert torch.equal(model.classifier.weight, old_tensors()["classifier.weight"])


def test_a_pickle_that_holds_code_is_not_run(tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "ran",))  # type: ignore[return-value]

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Code()))
    with pytest.raises(Exception, match=r"[Ww]eights"):
        trainable(str(tmp_path), "image", 5)
    with pytest.raises(CheckpointError, match="holds more than tensors"):
        load_weights(VIT.build(), tmp_path)
    assert not (tmp_path / "ran").exists()
