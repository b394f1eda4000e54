"""Adapters in models of every family: labels proved by behaviour, and invariant 42."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from families.cases import CASES, Case, logits, named, relative
from raffm.algebra.layout import Layout
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.errors import LabelError
from raffm.models.label import layout_of, named_tensors, table_of
from raffm.models.load import from_config
from raffm.models.lora import merged, unwrapped, with_lora
from raffm.models.space import read_space
from raffm.models.surgery import submodel
from raffm.models.table import shipped
from raffm.models.verify import verify

peft = pytest.importorskip("peft")

NAMES = ("vit", "bert", "distilbert", "t5", "gpt2", "llama", "gpt2-classifier", "roberta", "t5-encoder", "electra", "deit")
ADAPTED = [case for case in CASES if case.name in NAMES]
each_case = pytest.mark.parametrize("case", ADAPTED, ids=lambda case: case.name)


def adapted(case: Case, rank: int = 6) -> nn.Module:
    """A model in which no number is special, those of its adapters neither."""
    model = with_lora(case.build(), rank, alpha=9.0).to(case.dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.2)
    return model


def ranks(layout: Layout) -> list[str]:
    return [name for name in layout.groups if name.endswith(".rank")]


@each_case
def test_the_labels_of_adapters_are_right(case: Case) -> None:
    found = {row.group: row.verdict for row in verify(adapted(case)).rows}
    assert any(group.endswith(".rank") for group in found)
    assert "wrong" not in found.values()
    assert all(verdict == "exact" for group, verdict in found.items() if group.endswith(".rank"))


@each_case
def test_merging_a_cut_adapter_is_cutting_a_merged_one(case: Case) -> None:
    """Invariant 42: merged(sub-LoRA) == slice(merged LoRA), where the full one has zeros for the ranks that are cut."""
    model = adapted(case)
    layout = layout_of(model)
    base = dict(Ranking().cut(layout, read_space(layout, table_of(model), None).smallest()).kept)
    cut = submodel(model, layout, layout.select({**base, **{name: [5, 0, 2] for name in ranks(layout)}}))
    blanked = copy.deepcopy(model)
    with torch.no_grad():
        for name, tensor in named_tensors(blanked)[0].items():
            if ".lora_A." in name:
                tensor[[1, 3, 4]] = 0
    full = merged(blanked)
    plain = layout_of(full)
    expected = submodel(full, plain, plain.select(base))
    small = merged(cut)
    found, wanted = named_tensors(small)[0], named_tensors(expected)[0]
    assert found.keys() == wanted.keys()
    for name in found:
        assert torch.allclose(found[name], wanted[name], atol=1e-6), name
    inputs = case.inputs(model)
    assert relative(logits(small.eval(), inputs), logits(cut.eval(), inputs)) < 1e-5


@each_case
def test_only_adapters_and_heads_are_trained_and_new_ones_change_nothing(case: Case) -> None:
    plain = case.build().eval()
    model = with_lora(copy.deepcopy(plain), rank=3).to(case.dtype).eval()
    inputs = case.inputs(model)
    assert torch.equal(logits(model, inputs), logits(plain, inputs))
    layout = layout_of(model)
    heads = {name for name in named_tensors(plain)[0] if not name.startswith(f"{plain.base_model_prefix}.")}
    assert all(".lora_" in name or name in heads for name in layout.tensors("parameter"))
    assert layout.count(Selection()) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("kind", "changes", "trained"),
    [
        ("T5ForQuestionAnswering", {"num_labels": 2}, {"qa_outputs.weight", "qa_outputs.bias"}),
        ("T5ForConditionalGeneration", {"tie_word_embeddings": False}, {"lm_head.weight"}),
        ("T5ForConditionalGeneration", {}, set()),
        ("T5EncoderModel", {}, set()),
    ],
)
def test_heads_are_trained_where_no_prefix_tells_them_from_the_base(
    kind: str, changes: dict[str, Any], trained: set[str]
) -> None:
    model = with_lora(from_config("t5", kind, {**shipped("t5").tiny["config"], **changes}), rank=2)
    assert {name for name, each in model.named_parameters() if each.requires_grad and "lora" not in name} == trained


def test_what_a_product_is_multiplied_by_stays_that_of_the_full_rank() -> None:
    model = adapted(named("vit"))
    layout = layout_of(model)
    small = submodel(model, layout, layout.select(dict.fromkeys(ranks(layout), 2)))
    for module in small.modules():
        if hasattr(module, "lora_A"):
            assert module.scaling == {"default": 9.0 / 6}
            assert module.r == {"default": 2}


def test_peft_s_own_wrapper_is_looked_through() -> None:
    model = named("bert").build()
    config = peft.LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["classifier"])
    wrapped = peft.get_peft_model(model, config)
    inside = unwrapped(wrapped)
    layout = layout_of(inside)
    assert layout.kind("classifier.weight") == "parameter"
    assert str(layout.labels["classifier.weight"]) == "residual -> classes"
    assert "wrong" not in {row.verdict for row in verify(inside).rows}
    assert set(named_tensors(merged(inside))[0]) == set(named_tensors(named("bert").build())[0])


def test_what_has_no_labels_is_named() -> None:
    with pytest.raises(LabelError, match="has no layer named nothing"):
        with_lora(named("vit").build(), targets=["nothing"])
    with pytest.raises(LabelError, match="a rank of at least 1"):
        with_lora(named("vit").build(), rank=0)
    with pytest.raises(LabelError, match="has no layer that makes queries"):
        with_lora(named("resnet-cifar").build())
    dora = named("vit").build()
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True), dora)
    with pytest.raises(LabelError, match="belongs to an adapter that has no labels"):
        layout_of(dora)
