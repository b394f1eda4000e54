"""What holds for every family: one suite, one table of tiny models."""

import copy
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from families.cases import CASES, Case, logits, main_output, named, relative
from families.draws import rankings, selections
from raffm.algebra.axis import names
from raffm.algebra.layout import Layout
from raffm.algebra.move import extract, permute
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.errors import SelectionError
from raffm.models.checkpoint import load_submodel, save_submodel
from raffm.models.label import layout_of, named_tensors, output_labels
from raffm.models.rounding import attend_plainly
from raffm.models.salience import rank
from raffm.models.surgery import assembled, skeleton, submodel
from raffm.models.verify import verify

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
few = settings(max_examples=12)


@cache
def built(case: Case) -> tuple[nn.Module, Layout]:
    model = case.build()
    return model, layout_of(model)


def zeroed(model: nn.Module, layout: Layout, selection: Selection) -> nn.Module:
    """The full model with everything that the Selection leaves out set to zero."""
    tensors = {name: tensor * selection.coverage(layout, name) for name, tensor in named_tensors(model)[0].items()}
    return assembled(model, layout, layout.select({}), tensors)


def attention_of(model: nn.Module) -> str | None:
    """What the model's config says of attention, where it says anything."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None)


@each_case
def test_verify_proves_every_label(case: Case) -> None:
    found = verify(built(case)[0])
    assert found.holds, found
    assert {row.verdict for row in found.rows} <= {"exact", "approximate"}
    assert all("." not in row.group for row in found.rows if row.verdict == "approximate")  # nothing inside a layer


@each_case
def test_extracting_everything_changes_nothing(case: Case) -> None:
    model, layout = built(case)
    whole = submodel(model, layout, layout.select({}))
    for name, tensor in named_tensors(model)[0].items():
        assert torch.equal(named_tensors(whole)[0][name], tensor)
    inputs = case.inputs(model)
    assert torch.equal(logits(whole, inputs), logits(model, inputs))


@each_case
@few
@given(data=st.data())
def test_a_submodel_is_the_full_model_with_the_rest_zeroed(case: Case, data: st.DataObject) -> None:
    model, layout = built(case)
    selection = data.draw(selections(layout, is_exact_only=True, has_depth=False))
    inputs = case.inputs(model)
    small, full = logits(submodel(model, layout, selection), inputs), logits(zeroed(model, layout, selection), inputs)
    if small.shape == full.shape:  # a model without a head returns fewer channels when its last stage is cut
        assert relative(small, full) < 1e-5


@each_case
@few
@given(data=st.data())
def test_plain_attention_says_the_same_and_leaves_the_full_model_its_own(case: Case, data: st.DataObject) -> None:
    model, layout = built(case)
    inputs, small = case.inputs(model), submodel(model, layout, data.draw(selections(layout)))
    usual, configured = logits(small, inputs), attention_of(model)
    attend_plainly(small)
    assert relative(logits(small, inputs), usual) < 1e-5
    assert attention_of(model) == configured
    assert attention_of(small) == (configured and "eager")


@each_case
@few
@given(data=st.data())
def test_every_submodel_runs_forward_and_backward(case: Case, data: st.DataObject) -> None:
    model, layout = built(case)
    small = submodel(model, layout, data.draw(selections(layout))).train()
    output = small(**case.inputs(model))
    main_output(output).square().mean().backward()
    gradients = [parameter.grad for parameter in small.parameters() if parameter.grad is not None]
    assert gradients
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    assert all(parameter.grad is None for parameter in model.parameters())


@each_case
@few
@given(data=st.data())
def test_a_submodel_is_really_smaller(case: Case, data: st.DataObject) -> None:
    model, layout = built(case)
    selection = data.draw(selections(layout))
    small = submodel(model, layout, selection)
    assert sum(parameter.numel() for parameter in small.parameters()) == layout.count(selection)
    held = named_tensors(small)[0]
    shapes = {
        layout.name_in(selection, name): label.shape(layout.sizes_of(selection))
        for name, label in layout.labels_of(selection).items()
    }
    assert {name: tuple(tensor.shape) for name, tensor in held.items()} == shapes
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in held.values())
    stray = [value for module in small.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    assert stray == []


@each_case
@few
@given(data=st.data())
def test_a_skeleton_has_the_shapes_of_the_submodel_and_no_memory(case: Case, data: st.DataObject) -> None:
    model, layout = built(case)
    selection = data.draw(selections(layout))
    frame, small = named_tensors(skeleton(model, layout, selection))[0], named_tensors(submodel(model, layout, selection))[0]
    assert {name: tensor.shape for name, tensor in frame.items()} == {name: tensor.shape for name, tensor in small.items()}
    assert all(tensor.is_meta for tensor in frame.values())


@each_case
@few
@given(data=st.data())
def test_the_layout_of_a_submodel_is_the_layout_cut(case: Case, data: st.DataObject) -> None:
    model, layout = built(case)
    selection = data.draw(selections(layout))
    anew, cut = layout_of(submodel(model, layout, selection)), layout.cut(selection)
    assert anew.sizes == cut.sizes
    assert {name: str(label) for name, label in anew.labels.items()} == {name: str(label) for name, label in cut.labels.items()}
    assert anew.fingerprint == cut.fingerprint


@each_case
@few
@given(data=st.data())
def test_a_submodel_of_a_submodel_is_a_submodel(case: Case, data: st.DataObject) -> None:
    model, layout = built(case)
    outer = data.draw(selections(layout))
    middle = layout.cut(outer)
    inner = data.draw(selections(middle))
    tensors = named_tensors(model)[0]
    twice = extract(extract(tensors, layout, outer), middle, inner)
    once = extract(tensors, layout, layout.compose(outer, inner))
    assert set(twice) == set(once)
    assert all(torch.equal(twice[name], once[name]) for name in once)


@each_case
@few
@given(data=st.data())
def test_permuting_every_group_leaves_outputs_alone(case: Case, data: st.DataObject) -> None:
    model, layout = built(case)
    visible = {group for output in ("stages", "residual", "stem") for group in layout.groups if group.startswith(output)}
    ranking = data.draw(rankings(layout))
    if case.kind in ("ViTModel", "BertModel", "T5EncoderModel"):  # these return the residual stream itself
        ranking = Ranking({name: order for name, order in ranking.order.items() if name not in visible})
    moved = assembled(model, layout, layout.select({}), permute(named_tensors(model)[0], layout, ranking))
    inputs = case.inputs(model)
    assert relative(logits(moved, inputs), logits(model, inputs)) < 1e-5


@each_case
def test_salience_is_a_permutation_inside_every_head_and_sorting_twice_changes_nothing(case: Case) -> None:
    model, layout = built(case)
    ranking = rank(model, layout)
    for name, order in ranking.order.items():
        rows = order if order.dim() == 2 else order[None]
        assert all(row.sort().values.tolist() == list(range(layout.groups[name].size)) for row in rows)
    sorted_tensors = permute(
        named_tensors(model)[0], layout, Ranking({n: o for n, o in ranking.order.items() if n not in layout.depths})
    )
    again = rank(assembled(model, layout, layout.select({}), sorted_tensors), layout)
    for name in layout.free:
        if name not in layout.depths:
            score = again.scores[name]
            assert bool((score.diff(dim=-1) <= 1e-5 * score.abs().max()).all()), name


@each_case
def test_sorting_by_salience_leaves_outputs_alone(case: Case) -> None:
    model, layout = built(case)
    seen = {group for _, label in output_labels(model).values() for group in names(label)}  # outputs that show a group itself
    order = {name: order for name, order in rank(model, layout).order.items() if name not in seen}
    moved = permute(named_tensors(model)[0], layout, Ranking(order))
    inputs = case.inputs(model)
    assert relative(logits(assembled(model, layout, layout.select({}), moved), inputs), logits(model, inputs)) < 1e-5


@each_case
@few
@given(data=st.data())
def test_a_saved_submodel_loads_to_the_same_logits_bit_for_bit(
    case: Case, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model, layout = built(case)
    small = submodel(model, layout, data.draw(selections(layout)), version=3)
    folder = tmp_path_factory.mktemp("saved") / "submodel"
    save_submodel(small, folder)
    loaded = load_submodel(folder)
    inputs = case.inputs(model)
    assert torch.equal(logits(loaded, inputs), logits(small.eval(), inputs))
    assert loaded.raffm == small.raffm
    assert type(loaded) is type(small)
    assert isinstance(json.loads((folder / "raffm.json").read_text())["selection"], dict)


def smallest(layout: Layout) -> dict[str, int]:
    tied = {str(tie.left) for tie in layout.ties}
    return {name: layout.groups[name].least for name in layout.free if name not in tied}


@each_case
def test_extraction_leaves_the_full_model_alone(case: Case) -> None:
    model, layout = built(case)
    before = {name: tensor.clone() for name, tensor in named_tensors(model)[0].items()}
    config = json.dumps(model.config.to_dict(), default=str)
    small = submodel(model, layout, Ranking().cut(layout, smallest(layout)))
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.fill_(7.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in named_tensors(model)[0].items())
    assert json.dumps(model.config.to_dict(), default=str) == config


@each_case
def test_a_record_survives_a_deep_copy(case: Case) -> None:
    model, layout = built(case)
    small = submodel(model, layout, Ranking().cut(layout, smallest(layout)), version=5)
    assert copy.deepcopy(small).to(torch.float64).raffm == small.raffm
    assert small.raffm.selection.kept


@pytest.mark.parametrize("case", [case for case in CASES if case.name == "bert-tied-head"], ids=lambda case: case.name)
def test_tied_weights_stay_tied_in_a_submodel(case: Case) -> None:
    model, layout = built(case)
    small = submodel(model, layout, Ranking().cut(layout, {"residual": 8}))
    assert small.cls.predictions.decoder.weight is small.bert.embeddings.word_embeddings.weight
    assert small.cls.predictions.bias is small.cls.predictions.decoder.bias


def test_the_resnet_has_the_published_number_of_parameters() -> None:
    from raffm.models.resnet import ResNet

    assert sum(parameter.numel() for parameter in ResNet().parameters()) == 11_173_962


def test_heads_of_a_submodel_come_from_one_head_each(tmp_path: Path) -> None:
    model, layout = built(named("vit"))
    weight = model.vit.layers[1].attention.q_proj.weight
    ranking = Ranking({"layers.1.qk": torch.tensor([[3, 1, 0, 2], [0, 1, 2, 3], [2, 3, 1, 0], [1, 0, 3, 2]])})
    selection = ranking.cut(layout, {"layers.1.qk": 2, "layers.1.heads": 3})
    small = submodel(model, layout, selection).vit.layers[1].attention
    rows = [[1, 3], [4, 5], [10, 11]]  # heads 0 to 2, two dimensions each
    assert torch.equal(small.q_proj.weight, weight[[row for head in rows for row in head]])
    assert (small.num_attention_heads, small.head_dim) == (3, 2)
    assert small.scaling == model.vit.layers[1].attention.scaling


def test_kept_blocks_are_numbered_anew_in_modules_and_config() -> None:
    model, layout = built(named("bert"))
    small = submodel(model, layout, layout.select({"layers": [0, 2]}))
    assert [layer.attention.self.layer_idx for layer in small.bert.encoder.layer] == [0, 1]
    assert small.config.num_hidden_layers == 2
    assert torch.equal(small.bert.encoder.layer[1].output.dense.weight, model.bert.encoder.layer[2].output.dense.weight)


@pytest.mark.parametrize("case", [named("resnet"), named("resnet-cifar")], ids=lambda case: case.name)
def test_a_block_with_a_shortcut_cannot_be_dropped(case: Case) -> None:
    _, layout = built(case)
    with pytest.raises(SelectionError, match=r"block 0 of `stages.1.blocks` cannot be dropped"):
        layout.select({"stages.1.blocks": [1, 2]})
    assert layout.sizes_of(layout.select({"stages.1.blocks": [0, 2]}))["stages.1.blocks"] == 2


def test_all_heads_of_a_layer_cannot_be_dropped() -> None:
    _, layout = built(named("vit"))
    with pytest.raises(SelectionError, match=r"layers\.1\.heads"):
        layout.select({"layers.1.heads": []})
