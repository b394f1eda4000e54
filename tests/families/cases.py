"""The table of tiny models that every family test runs on: a row for each kind of model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raffm.models.label import table_of
from raffm.models.load import from_config
from raffm.models.sample import sample_inputs


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    family: str
    kind: str
    config: dict[str, Any]

    def build(self, seed: int = 0, **changes: Any) -> nn.Module:
        """A model in which no number is special: fresh zeros and ones hide mistakes."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = from_config(self.family, self.kind, {**self.config, **changes})
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                for buffer in model.buffers():
                    if buffer.is_floating_point():
                        buffer.add_(torch.rand_like(buffer) * 0.5)
        return model

    def inputs(self, model: nn.Module, batch: int = 3, seed: int = 1) -> dict[str, Tensor]:
        return sample_inputs(model, table_of(model), batch=batch, tokens=7, generator=torch.Generator().manual_seed(seed))


_VIT = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24, "num_labels": 5}
_VIT |= {"image_size": 8, "patch_size": 4}
_BERT = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24, "num_labels": 5}
_BERT |= {"vocab_size": 50, "max_position_embeddings": 20}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [2, 3], "num_labels": 5, "image_size": 32}

CASES = (
    Case("vit", "vit", "ViTForImageClassification", _VIT),
    Case("bert", "bert", "BertForSequenceClassification", _BERT),
    Case("resnet", "resnet", "ResNetForImageClassification", {**_RESNET, "layer_type": "basic"}),
    Case("resnet-cifar", "raffm_resnet", "ResNet", {"widths": [8, 12], "depths": [2, 3], "classes": 5, "image_size": 16}),
    Case("vit-base-model", "vit", "ViTModel", _VIT),
    Case("bert-base-model", "bert", "BertModel", _BERT),
    Case("bert-tied-head", "bert", "BertForMaskedLM", _BERT),
    Case("resnet-bottleneck", "resnet", "ResNetForImageClassification", {**_RESNET, "layer_type": "bottleneck"}),
    Case(
        "resnet-cifar-group-norm",
        "raffm_resnet",
        "ResNet",
        {"widths": [16, 24], "depths": [2, 2], "classes": 5, "image_size": 16, "norm": "group", "group_width": 4},
    ),
)
FAMILIES = CASES[:4]

Build = Callable[[], nn.Module]


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The main output of a model."""
    with torch.no_grad():
        output = model(**inputs)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state
