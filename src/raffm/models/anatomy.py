"""How a classifier is taken apart: what comes before its blocks, the blocks, and its head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from raffm.algebra.axis import Expression, Label, Number, renamed
from raffm.errors import SpaceError
from raffm.models.label import named_tensors
from raffm.models.labelled import Labelled
from raffm.models.resnet import ConvNorm
from raffm.seeds import generator


@dataclass(frozen=True)
class EarlyHead:
    """A new head for an exit, with the labels of its tensors and of the integers that its modules store."""

    module: nn.Module
    labels: Mapping[str, Label]
    attributes: Mapping[str, str] = field(default_factory=dict)


Early = Callable[[int, int, int, int], EarlyHead]
"""From the number of an exit, of the blocks before it, of convolutions in its head, and a seed."""


@dataclass(frozen=True)
class Anatomy:
    """A classifier in pieces, and how its early heads are made.

    The stem gives what the first block reads, and what every block is given besides.
    """

    stem: nn.Module
    blocks: Sequence[nn.Module]
    head: nn.Module
    early: Early


def anatomy_of(server: Labelled) -> Anatomy:
    """How a classifier is taken apart."""
    kind = type(server.model).__name__
    if kind not in _ANATOMIES:
        raise SpaceError(f"{kind} cannot be given early exits; these can: {', '.join(_ANATOMIES)}.")
    return _ANATOMIES[kind](server)


# -- stems and heads -------------------------------------------------------------------------------------------------


class _Patches(nn.Module):
    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, tuple[()]]:
        return self.embeddings(pixel_values), ()


class _Tokens(nn.Module):
    def __init__(self, embeddings: nn.Module, config: Any) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.config = config

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor | None]]:
        from transformers.masking_utils import create_bidirectional_mask

        hidden = self.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)
        return hidden, (create_bidirectional_mask(config=self.config, inputs_embeds=hidden, attention_mask=attention_mask),)


class _Pixels(nn.Module):
    def __init__(self, stem: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.stem = stem
        self.activation = activation

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, tuple[()]]:
        return self.activation(self.stem(pixel_values)), ()


class _NormedHead(nn.Module):
    """The first token of a normed sequence, classified."""

    def __init__(self, norm: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.classifier = classifier

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.norm(hidden)[:, 0])
        return logits


class _MeanHead(nn.Module):
    """Convolutions, then the mean of all pixels, classified."""

    def __init__(self, classifier: nn.Module, convolutions: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(*convolutions)
        self.classifier = classifier

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.convolutions(hidden).mean(dim=(2, 3)))
        return logits


# -- families --------------------------------------------------------------------------------------------------------


def _vit(server: Labelled) -> Anatomy:
    model: Any = server.model
    base = getattr(model, model.base_model_prefix)
    head = _NormedHead(base.layernorm, model.classifier)
    return Anatomy(_Patches(base.embeddings), list(base.layers), head, _copied(server, head))


def _bert(server: Labelled) -> Anatomy:
    model: Any = server.model
    stem = _Tokens(model.bert.embeddings, model.config)
    head = nn.Sequential(model.bert.pooler, model.dropout, model.classifier)
    return Anatomy(stem, list(model.bert.encoder.layer), head, _copied(server, head))


def _roberta(server: Labelled) -> Anatomy:
    model: Any = server.model
    stem = _Tokens(model.roberta.embeddings, model.config)
    return Anatomy(stem, list(model.roberta.encoder.layer), model.classifier, _copied(server, model.classifier))


def _resnet(server: Labelled) -> Anatomy:
    model: Any = server.model
    stem = _Pixels(model.resnet.embedder, nn.Identity())
    blocks = [block for stage in model.resnet.encoder.stages for block in stage.layers]
    linear = model.classifier[1]
    return Anatomy(stem, blocks, _MeanHead(linear), _convolved(server, blocks, linear, _hf_layer))


def _own_resnet(server: Labelled) -> Anatomy:
    model: Any = server.model
    blocks = [block for stage in model.stages for block in stage]

    def layer(width: int) -> nn.Module:
        return nn.Sequential(ConvNorm(width, width, 3, 1, model.config), nn.ReLU())

    return Anatomy(_Pixels(model.stem, nn.ReLU()), blocks, _MeanHead(model.head), _convolved(server, blocks, model.head, layer))


_ANATOMIES: Mapping[str, Callable[[Labelled], Anatomy]] = {
    "ViTForImageClassification": _vit,
    "DeiTForImageClassification": _vit,
    "BertForSequenceClassification": _bert,
    "RobertaForSequenceClassification": _roberta,
    "ResNetForImageClassification": _resnet,
    "ResNet": _own_resnet,
}


def _hf_layer(width: int) -> nn.Module:
    """A layer of a Hugging Face ResNet, initialised as that is."""
    from transformers.models.resnet.modeling_resnet import ResNetConvLayer

    layer: nn.Module = ResNetConvLayer(width, width)
    nn.init.kaiming_normal_(layer.convolution.weight, mode="fan_out", nonlinearity="relu")  # type: ignore[union-attr, arg-type]
    return layer


# -- early heads -----------------------------------------------------------------------------------------------------


def _copied(server: Labelled, head: nn.Module) -> Early:
    """Copies of the model's own head."""
    known = {id(tensor): server.layout.labels[name] for name, tensor in server.tensors.items()}
    labels = {name: known[id(tensor)] for name, tensor in named_tensors(head)[0].items()}
    return lambda exit, place, convolutions, seed: EarlyHead(copy.deepcopy(head), labels)


def _convolved(server: Labelled, blocks: Sequence[nn.Module], own: nn.Linear, layer: Callable[[int], nn.Module]) -> Early:
    """Convolutions as wide as the block before them, and a classifier of that width."""
    known = {id(tensor): server.layout.labels[name] for name, tensor in server.tensors.items()}
    classes = known[id(own.weight)].axes[0]

    def early(exit: int, place: int, convolutions: int, seed: int) -> EarlyHead:
        norm = [parameter for parameter in blocks[place - 1].parameters() if parameter.dim() == 1][-1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator(seed, "exit", place).initial_seed())
            layers = [layer(len(norm)) for _ in range(convolutions)]
            head = _MeanHead(nn.Linear(len(norm), own.out_features), layers).to(norm.device, norm.dtype)
        features = known[id(norm)].axes[0]
        widths = [features, *(_of_its_own(server, features, f"exits.{exit}.inner.{number}") for number in range(convolutions))]
        labels = {"classifier.weight": Label((classes, widths[-1]), 1, 0), "classifier.bias": Label((classes,))}
        for number, (source, target) in enumerate(pairwise(widths)):
            labels |= {
                f"convolutions.{number}.{name}": label for name, label in _labels(layers[number], source, target).items()
            }
        groups = {name: module for name, module in head.named_modules() if isinstance(module, nn.GroupNorm)}
        stored = {f"{name}.num_groups": f"exits.{exit}.inner.{name.split('.')[1]}" for name in groups}
        return EarlyHead(head, labels, stored)

    return early


def _of_its_own(server: Labelled, features: Expression, name: str) -> Expression:
    """The same expression over a free group of another name."""
    return renamed(features, lambda group: group if server.layout.groups[group].pinned else name)


def _labels(layer: nn.Module, source: Expression, target: Expression) -> dict[str, Label]:
    """The labels of a convolution without bias and of its norm, by the ranks of their tensors."""
    kernel = Label((target, source, Number(3), Number(3)), 1, 0)
    by_rank = {4: kernel, 1: Label((target,)), 0: Label(())}
    return {name: by_rank[tensor.dim()] for name, tensor in named_tensors(layer)[0].items()}
