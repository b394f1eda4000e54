"""The table of tiny models that every family test runs on: a row for each kind of model."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raffm.models.label import table_of
from raffm.models.load import from_config
from raffm.models.sample import sample_inputs
from raffm.models.table import shipped


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    family: str
    kind: str
    config: dict[str, Any]
    dtype: torch.dtype = torch.float32
    """T5 does not scale its attention, which amplifies rounding, and so do SAM's decoders: their cases are float64."""
    is_untied: bool = False
    """Whether the head has weights of its own, as a checkpoint may bring and no config says."""

    def build(self, seed: int = 0, **changes: Any) -> nn.Module:
        """A model in which no number is special: fresh zeros and ones hide mistakes."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = from_config(self.family, self.kind, {**self.config, **changes}).to(self.dtype)
            if self.is_untied:
                model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                for buffer in model.buffers():
                    if buffer.is_floating_point():
                        buffer.add_(torch.rand_like(buffer) * 0.5)
        return model

    def inputs(self, model: nn.Module, batch: int = 3, seed: int = 1) -> dict[str, Tensor]:
        made = sample_inputs(model, table_of(model), batch=batch, tokens=7, generator=torch.Generator().manual_seed(seed))
        return {name: given.to(self.dtype) if given.is_floating_point() else given for name, given in made.items()}


_VIT = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24, "num_labels": 5}
_VIT |= {"image_size": 8, "patch_size": 4}
_BERT = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24, "num_labels": 5}
_BERT |= {"vocab_size": 50, "max_position_embeddings": 20}
_ROBERTA = {**_BERT, "max_position_embeddings": 22}
_DISTILBERT = {"dim": 16, "n_layers": 3, "n_heads": 4, "hidden_dim": 24, "num_labels": 5}
_DISTILBERT |= {"vocab_size": 50, "max_position_embeddings": 20}
_TOKENS = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_GPT2 = {"n_embd": 16, "n_layer": 3, "n_head": 4, "n_inner": 24, "n_positions": 32, **_TOKENS}
_LLAMA = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
_LLAMA |= {"intermediate_size": 24, "max_position_embeddings": 32, **_TOKENS}
_QWEN2 = {**_LLAMA, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
_T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4, "vocab_size": 50}
_T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "decoder_start_token_id": 0}
_FLAN = {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_SAM = shipped("sam").tiny["config"]
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [2, 3], "num_labels": 5, "image_size": 32}

CASES = (
    Case("vit", "vit", "ViTForImageClassification", _VIT),
    Case("bert", "bert", "BertForSequenceClassification", _BERT),
    Case("resnet", "resnet", "ResNetForImageClassification", {**_RESNET, "layer_type": "basic"}),
    Case("resnet-cifar", "raffm_resnet", "ResNet", {"widths": [8, 12], "depths": [2, 3], "classes": 5, "image_size": 16}),
    Case("deit", "deit", "DeiTForImageClassificationWithTeacher", _VIT),
    Case("roberta", "roberta", "RobertaForSequenceClassification", _ROBERTA),
    Case("distilbert", "distilbert", "DistilBertForSequenceClassification", _DISTILBERT),
    Case("t5", "t5", "T5ForConditionalGeneration", _T5, torch.float64),
    Case("sam", "sam", "SamModel", _SAM, torch.float64),
    Case("gpt2", "gpt2", "GPT2LMHeadModel", _GPT2),
    Case("llama", "llama", "LlamaForCausalLM", _LLAMA),
    Case("qwen2", "qwen2", "Qwen2ForCausalLM", _QWEN2),
    Case("mistral", "mistral", "MistralForCausalLM", {**_LLAMA, "sliding_window": 4}),
    Case("electra", "electra", "ElectraForSequenceClassification", {**_BERT, "embedding_size": 12}),
    Case("electra-tied-head", "electra", "ElectraForMaskedLM", {**_BERT, "embedding_size": 16}),
    Case("flan-t5", "t5", "T5ForConditionalGeneration", _FLAN, torch.float64, is_untied=True),
    Case("t5-encoder", "t5", "T5EncoderModel", _T5, torch.float64),
    Case("t5-classifier", "t5", "T5ForSequenceClassification", {**_T5, "num_labels": 5, "eos_token_id": 1}, torch.float64),
    Case("roberta-tied-head", "roberta", "RobertaForMaskedLM", _ROBERTA),
    Case("distilbert-tied-head", "distilbert", "DistilBertForMaskedLM", _DISTILBERT),
    Case("gpt2-classifier", "gpt2", "GPT2ForSequenceClassification", {**_GPT2, "num_labels": 5}),
    Case("sam-vision-model", "sam_vision_model", "SamVisionModel", _SAM["vision_config"], torch.float64),
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
FAMILIES = tuple({case.family: case for case in reversed(CASES)}.values())


def named(name: str) -> Case:
    """A case by its name."""
    return next(case for case in CASES if case.name == name)


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The main output of a model."""
    with torch.no_grad():
        output = model(**inputs)
    return main_output(output)


def main_output(output: Any) -> Tensor:
    """The logits, or what comes nearest to them."""
    names = ("logits", "pred_masks", "last_hidden_state")
    return next(getattr(output, name) for name in names if hasattr(output, name))


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the scale of what was expected."""
    return float((found - expected).abs().max() / expected.abs().max())
