"""Submodels of language models generate, and a cache changes nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from families.cases import Case, named
from families.draws import selections
from raffm.algebra.selection import Selection
from raffm.models.label import layout_of
from raffm.models.surgery import submodel

WRITERS = [named(name) for name in ("gpt2", "llama", "qwen2", "mistral", "t5", "flan-t5")]
each_writer = pytest.mark.parametrize("case", WRITERS, ids=lambda case: case.name)
few = settings(max_examples=5)
NEW = 9
"""More tokens than a sliding window of these tiny models holds."""


def written(model: nn.Module, ids: Tensor, **how: object) -> list[list[int]]:
    tokens = model.eval().generate(ids, do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW, **how)
    return tokens.tolist()


@each_writer
@few
@given(data=st.data())
def test_a_submodel_writes_the_same_with_and_without_a_cache(case: Case, data: st.DataObject) -> None:
    model = case.build()
    layout = layout_of(model)
    small = submodel(model, layout, data.draw(selections(layout)))
    ids = case.inputs(model)["input_ids"]
    assert written(small, ids) == written(small, ids, use_cache=False)


@each_writer
def test_a_static_cache_works_after_cutting_heads_and_depth(case: Case) -> None:
    model = case.build()
    layout = layout_of(model)
    cut = {"encoder.layers": [1, 2], "decoder.layers": [0, 2], "decoder.heads": [0, 2], "layers": [1, 2]}
    cut |= {f"layers.{place}.{heads}": 2 for place in range(3) for heads in ("heads", "kv")}
    small = submodel(model, layout, layout.select({name: kept for name, kept in cut.items() if name in layout.groups}))
    ids = case.inputs(model)["input_ids"]
    static = written(small, ids, cache_implementation="static", disable_compile=True)
    assert static == written(small, ids, use_cache=False)


def test_a_t5_with_fewer_encoder_than_decoder_blocks_writes() -> None:
    """A stock T5 of that shape cannot: the library gives its cache as many layers as the encoder has."""
    case = named("t5")
    model = case.build()
    layout = layout_of(model)
    small = submodel(model, layout, layout.select({"encoder.layers": [2]}))
    ids = case.inputs(model)["input_ids"]
    assert written(small, ids) == written(small, ids, use_cache=False)
    assert (len(small.encoder.block), small.encoder.config.num_layers, small.decoder.config.num_layers) == (1, 1, 3)


def test_blocks_of_a_submodel_have_places_of_their_own_in_the_cache() -> None:
    model = named("gpt2").build()
    layout = layout_of(model)
    small = submodel(model, layout, layout.select({"layers": [0, 2]}))
    assert [block.attn.layer_idx for block in small.transformer.h] == [0, 1]


def test_kept_layers_keep_their_kind_of_attention() -> None:
    model = named("qwen2").build()
    layout = layout_of(model)
    assert model.config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    small = submodel(model, layout, layout.select({"layers": [1, 2]}))
    assert small.config.layer_types == ["sliding_attention", "sliding_attention"]
    assert small.config.num_hidden_layers == 2
    assert submodel(model, layout, Selection()).config.layer_types == model.config.layer_types
    assert torch.equal(small.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)
