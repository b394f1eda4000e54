"""What is particular to a family: fused projections, grouped queries, rotary pairs, tables that serve a whole stack."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from families.cases import Case, logits, named, relative
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.devices.cost import CostModel
from raffm.elastic import RaFFM
from raffm.errors import SelectionError, SpaceError
from raffm.models.checkpoint import load_submodel, save_submodel
from raffm.models.label import layout_of, named_tensors
from raffm.models.load import tiny
from raffm.models.stock import export_stock
from raffm.models.surgery import submodel
from raffm.models.table import shipped
from raffm.models.verify import verify

# -- fused projections ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [named("gpt2"), named("sam")], ids=lambda case: case.name)
def test_slicing_a_fused_projection_is_fusing_the_slices(case: Case) -> None:
    model = case.build()
    layout = layout_of(model)
    heads, dims = [1, 3], torch.tensor([[0, 2], [1, 3]])
    rows = torch.tensor([[1, 0, 2, 3], [0, 2, 1, 3], [1, 0, 2, 3], [1, 3, 0, 2]])
    ranks = {"layers.0.heads": torch.tensor([1, 3, 0, 2]), "layers.0.vo": rows}
    selection = Ranking(ranks).cut(layout, {"layers.0.heads": 2, "layers.0.qk": 2})
    name = next(name for name in layout.labels if name.endswith(("0.attn.c_attn.weight", "0.attn.qkv.weight")))
    small, full = (named_tensors(each)[0][name] for each in (submodel(model, layout, selection), model))
    if case.name == "gpt2":
        small, full = small.T, full.T
    query, key, value = full.reshape(3, 4, 4, 16).unbind()
    kept = [part[heads][:, :2] for part in (query, key)]
    kept.append(torch.stack([value[head, row] for head, row in zip(heads, dims, strict=True)]))
    assert torch.equal(small.reshape(3, 2, 2, 16), torch.stack(kept))


def test_head_dimensions_that_share_relative_positions_are_the_same_in_every_head() -> None:
    layout = layout_of(named("sam").build())
    assert layout.groups["layers.0.qk"].base is None
    assert layout.groups["layers.0.vo"].base == "layers.0.heads"


def test_an_attention_with_a_scale_of_its_own_keeps_the_full_models() -> None:
    case = named("sam")
    model = case.build()
    layout = layout_of(model)
    whole = type(model.vision_encoder.layers[0].attn)
    small = submodel(model, layout, layout.select({"layers.0.qk": 2, "layers.0.vo": 2, "layers.1.heads": 2}))
    attentions = [layer.attn for layer in small.vision_encoder.layers]
    assert whole.__name__ == "SamVisionSdpaAttention"
    assert [type(attention).__name__ for attention in attentions] == ["SamVisionAttention", whole.__name__, whole.__name__]
    assert attentions[0].scale == model.vision_encoder.layers[0].attn.scale
    assert type(model.vision_encoder.layers[0].attn) is whole


def test_blocks_that_attend_globally_are_numbered_anew() -> None:
    model = named("sam").build()
    layout = layout_of(model)
    small = submodel(model, layout, layout.select({"layers": [1, 2]}))
    assert small.config.vision_config.global_attn_indexes == [0]
    assert [layer.window_size for layer in small.vision_encoder.layers] == [0, 3]
    assert model.config.vision_config.global_attn_indexes == [1]


# -- grouped queries and rotary pairs ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [named(name) for name in ("llama", "qwen2", "mistral")], ids=lambda case: case.name)
def test_query_heads_move_with_their_key_and_value(case: Case) -> None:
    model = case.build()
    layout = layout_of(model)
    attention = model.model.layers[1].self_attn
    ranks = {"layers.1.kv": torch.tensor([2, 0, 1]), "layers.1.rep": torch.tensor([[1, 0], [0, 1], [0, 1]])}
    small = submodel(model, layout, Ranking(ranks).cut(layout, {"layers.1.kv": 2, "layers.1.rep": 1}))
    cut = small.model.layers[1].self_attn
    queries = attention.q_proj.weight.view(3, 2, 8, 24)  # three groups of two heads
    assert torch.equal(cut.q_proj.weight.view(2, 8, 24), torch.stack([queries[0, 1], queries[2, 0]]))
    assert torch.equal(cut.k_proj.weight.view(2, 8, 24), attention.k_proj.weight.view(3, 8, 24)[[0, 2]])
    assert cut.num_key_value_groups == 1
    assert small.model.layers[0].self_attn.num_key_value_groups == 2
    if attention.q_proj.bias is not None:
        assert torch.equal(cut.q_proj.bias.view(2, 8)[1], attention.q_proj.bias.view(3, 2, 8)[2, 0])


def test_a_rotary_pair_carries_its_frequency() -> None:
    case = named("llama")
    model = case.build()
    layout = layout_of(model)
    selection = Ranking({"rot": torch.tensor([3, 1, 0, 2])}).cut(layout, {"rot": 2})
    small = submodel(model, layout, selection)
    assert torch.equal(small.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq[[1, 3]])
    pairs = [1, 3, 5, 7]  # dimension j turns with j + 4
    whole = model.model.layers[0].self_attn
    cut = small.model.layers[0].self_attn
    assert torch.equal(cut.k_proj.weight.view(3, 4, 24), whole.k_proj.weight.view(3, 8, 24)[:, pairs])
    assert cut.v_proj.weight.shape == (12, 24)
    assert (cut.head_dim, cut.scaling) == (4, whole.scaling)


def test_sorting_a_llama_leaves_its_rotary_pairs_in_place() -> None:
    case = named("llama")
    elastic = RaFFM(case.build())
    before, inputs = logits(elastic.model, case.inputs(elastic.model)), case.inputs(elastic.model)
    frequencies = elastic.model.model.rotary_emb.inv_freq.clone()
    elastic.salient_parameter_prioritization()
    order = elastic.ranking.order["rot"]
    elastic.permute()
    assert torch.equal(elastic.model.model.rotary_emb.inv_freq, frequencies)
    assert torch.equal(elastic.ranking.order["rot"], order)
    assert relative(logits(elastic.model, inputs), before) < 1e-5


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_a_model_makes_anew_are_not_cut(kind: str) -> None:
    about = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    about |= (
        {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
        if kind == "longrope"
        else {}
    )
    model = tiny("llama", rope_parameters=about)
    layout = layout_of(model)
    assert layout.groups["rot"].pinned
    assert not any(layout.groups[f"layers.{place}.kv"].pinned for place in range(3))
    if kind == "dynamic":  # what longrope does to its buffers depends on the version
        assert verify(model).holds


def test_a_llama_with_scaled_frequencies_may_be_cut() -> None:
    about = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = tiny("llama", rope_parameters={**about, "original_max_position_embeddings": 16})
    assert not layout_of(model).groups["rot"].pinned
    assert verify(model).holds


# -- classifiers that write ----------------------------------------------------------------------------------------


def test_a_classifier_without_a_token_for_padding_can_be_tried(tmp_path: Path) -> None:
    model = named("gpt2-classifier").build(pad_token_id=None)
    assert verify(model).holds
    elastic = RaFFM(model)
    small, _, _ = elastic.fit(max_memory=int(elastic_memory(elastic) * 0.9))
    assert model.config.pad_token_id is None
    assert small.config.pad_token_id is None
    cut, _ = elastic.resource_aware_model({f"layers.{place}.ffn": 7 for place in range(3)})
    export_stock(cut, tmp_path / "stock")


def elastic_memory(elastic: RaFFM) -> int:
    return CostModel(elastic.model, elastic.layout, elastic.table, free=tuple(elastic.space.sizes)).memory(elastic.layout.sizes)


@pytest.mark.parametrize("limit", ["flops", "memory"])
def test_a_model_that_looks_at_its_inputs_is_counted_all_the_same(limit: str) -> None:
    elastic = RaFFM(named("t5-classifier").build(), {"encoder.layers.*.ffn": [24, 12], "decoder.layers.*.ffn": [24, 12]})
    cost = CostModel(elastic.model, elastic.layout, elastic.table, free=tuple(elastic.space.sizes))
    smallest = elastic.layout.sizes_of(elastic.select(elastic.space.smallest()))
    least, most = (getattr(cost, limit)(sizes) for sizes in (smallest, elastic.layout.sizes))
    _, params, _ = elastic.fit(**{f"max_{limit}": (least + most) // 2})
    assert params < elastic.total_params


def test_flops_are_counted_in_half_precision() -> None:
    elastic = RaFFM(tiny("sam").bfloat16(), {"layers.*.ffn": [24, 12]})
    cost = CostModel(elastic.model, elastic.layout, elastic.table, free=tuple(elastic.space.sizes))
    assert cost.flops(elastic.layout.sizes) > 0


# -- T5 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("case", [named("t5"), named("flan-t5")], ids=lambda case: case.name)
def test_the_bias_table_of_a_stack_survives_dropping_block_0(case: Case, stack: str, tmp_path: Path) -> None:
    model = case.build()
    layout = layout_of(model)
    table = model.get_submodule(stack).block[0].layer[0].SelfAttention.relative_attention_bias.weight
    small = submodel(model, layout, layout.select({f"{stack}.layers": [1, 2], f"{stack}.heads": [0, 2, 3]}))
    blocks = small.get_submodule(stack).block
    attentions = [block.layer[0].SelfAttention for block in blocks]
    assert torch.equal(attentions[0].relative_attention_bias.weight, table[:, [0, 2, 3]])
    assert [attention.has_relative_attention_bias for attention in attentions] == [True, False]
    assert attentions[0].has_relative_attention_bias is True
    assert not hasattr(attentions[1], "relative_attention_bias")
    save_submodel(small, tmp_path / "small")
    inputs = case.inputs(model)
    assert torch.equal(logits(load_submodel(tmp_path / "small"), inputs), logits(small.eval(), inputs))
    without = small.get_submodule(stack).block[0].layer[0].SelfAttention
    without.has_relative_attention_bias = False  # what is lost, silently, where the table is forgotten
    said = logits(small, inputs)
    assert relative(said, logits(load_submodel(tmp_path / "small"), inputs)) > 1e-3


def test_the_heads_of_all_cross_attentions_are_as_many_but_each_layer_chooses() -> None:
    model = named("t5").build()
    layout = layout_of(model)
    ranks = {f"decoder.layers.{place}.cross.heads": torch.tensor([place, *({0, 1, 2, 3} - {place})]) for place in range(3)}
    selection = Ranking(ranks).cut(layout, {"decoder.cross": 1})
    assert [selection.kept[f"decoder.layers.{place}.cross.heads"].tolist() for place in range(3)] == [[0], [1], [2]]
    with pytest.raises(SelectionError, match="is broken"):
        layout.select({"decoder.layers.0.cross.heads": [0, 1]})
    by_one = Ranking().cut(layout, {"decoder.layers.1.cross.heads": 2})
    assert layout.sizes_of(by_one)["decoder.layers.2.cross.heads"] == 2


def test_a_head_with_weights_of_its_own_stays_untied(tmp_path: Path) -> None:
    model = named("flan-t5").build()
    layout = layout_of(model)
    assert layout.aliases == {"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"}
    small = submodel(model, layout, layout.select({"encoder.layers": [0, 1]}))
    assert small.lm_head.weight is not small.shared.weight
    save_submodel(small, tmp_path / "small")
    loaded = load_submodel(tmp_path / "small")
    assert torch.equal(loaded.lm_head.weight, small.lm_head.weight)
    assert not torch.equal(loaded.lm_head.weight, loaded.shared.weight)
    tied = named("t5").build()
    assert submodel(tied, layout_of(tied), Selection()).lm_head.weight is not tied.lm_head.weight
    assert layout_of(tied).aliases["lm_head.weight"] == "shared.weight"


# -- spaces --------------------------------------------------------------------------------------------------------


def test_the_published_space_cuts_llama_by_rotary_pairs_or_by_whole_groups() -> None:
    space = {"atten_out_space": [48, 24], "inter_hidden_space": [24, 12]}
    model = named("llama").build()
    pairs, _, config = RaFFM(model, space).sample_smallest_model()
    assert pairs.model.layers[2].self_attn.q_proj.weight.shape == (24, 24)
    assert pairs.model.layers[2].self_attn.head_dim == 4
    assert config["layer_1"] == {"atten_out": 24, "inter_hidden": 12, "residual_hidden": 24}
    groups, _, _ = RaFFM(model, {"atten_out_space": [48, 16]}, by="heads").sample_smallest_model()
    assert groups.model.layers[2].self_attn.q_proj.weight.shape == (16, 24)
    assert groups.model.layers[2].self_attn.head_dim == 8


def test_a_family_without_published_names_says_so() -> None:
    with pytest.raises(SpaceError, match=r"says nothing of the family 't5'.*encoder\.heads"):
        RaFFM(tiny("t5"), {"atten_out_space": [16, 8]})


@pytest.mark.parametrize("seed", range(3))
def test_verify_finds_a_table_that_is_lost_with_its_block(seed: int) -> None:
    """The two halves that are cut leave out every block once."""
    right = shipped("t5")
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"
    wrong = replace(right, tensors={**right.tensors, name: "buckets, encoder.heads"})
    found = verify(named("t5").build(), wrong, seed=seed)
    assert {row.group: row.verdict for row in found.rows}["encoder.layers"] == "wrong"


def test_verify_takes_no_nan_for_an_answer() -> None:
    model = named("bert").build()
    with torch.no_grad():
        model.classifier.bias[0] = torch.nan
    assert all(row.verdict == "wrong" for row in verify(model).rows)
