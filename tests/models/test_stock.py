import json
from pathlib import Path

import pytest
import torch

from families.cases import logits, named, relative
from raffm.algebra.ranking import Ranking
from raffm.elastic import RaFFM
from raffm.errors import ExportError
from raffm.models.load import model_from, tiny
from raffm.models.stock import export_stock
from raffm.models.surgery import submodel

VIT, BERT, RESNET, OURS = map(named, ("vit", "bert", "resnet", "resnet-cifar"))


def every(**sizes: int) -> dict[str, int]:
    """The same sizes in every layer."""
    return {f"layers.{layer}.{name}": size for layer in range(3) for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (VIT, {f"layers.{i}.{name}": size for i in range(3) for name, size in (("ffn", 7), ("heads", 3), ("qk", 2))}),
        (VIT, {"layers": 2, "residual": 9}),
        (BERT, {f"layers.{i}.ffn": 7 for i in range(3)}),
        (RESNET, {"stages.1.out": 7, "stages.1.blocks.0.inner": 7, "stages.1.blocks.1.inner": 7, "stages.1.blocks.2.inner": 7}),
        (named("deit"), every(ffn=7, heads=3, qk=2)),
        (named("roberta"), every(ffn=7)),
        (named("distilbert"), {"layers": 2}),
        (named("gpt2"), every(ffn=7)),
        (named("gpt2"), {"residual": 8, **every(qk=2)}),  # a head size that the config can say, with another scale
        (named("sam"), {"layers": 2, **every(ffn=7)}),
        (named("t5"), {"encoder.layers": 2, "decoder.layers": 1}),
        (named("t5"), {"encoder.heads": 2, "decoder.heads": 2, "decoder.cross": 2}),
        (named("flan-t5"), {"encoder.layers": 2, "residual": 8}),
    ],
)
def test_a_stock_folder_loads_without_raffm_to_the_same_logits(case, config, tmp_path: Path) -> None:
    import transformers

    elastic = RaFFM(case.build())
    small, _ = elastic.resource_aware_model(config)
    small.eval()
    export_stock(small, tmp_path / "stock")
    plain = getattr(transformers, case.kind).from_pretrained(tmp_path / "stock", dtype=case.dtype)
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
        (named("gpt2"), every(heads=2), ["c_attn.weight", "(16, 24)"]),
        (BERT, {f"layers.{i}.heads": 3 for i in range(3)}, ["cannot express", "save_submodel"]),  # 16 is no multiple of 3
        (named("llama"), every(rep=1) | every(kv=3) | {"residual": 16}, ["cannot express"]),
        (named("t5"), {"residual": 8}, ["outputs differ by"]),  # its output scale is frozen, and the tied head cannot take it
    ],
)
def test_what_the_familys_config_cannot_say_is_refused(case, config, words: list[str], tmp_path: Path) -> None:
    small, _ = RaFFM(case.build()).resource_aware_model(config)
    with pytest.raises(ExportError) as caught:
        export_stock(small, tmp_path / "stock")
    assert all(word in str(caught.value) for word in words), caught.value
    assert not (tmp_path / "stock").exists()


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("config", [{"rot": 1}, {"rot": 2, "layers": 2}, every(kv=1, ffn=5), every(rep=1)])
def test_the_first_rotary_pairs_have_a_base_of_their_own(family: str, config: dict[str, int], tmp_path: Path) -> None:
    import transformers

    model = tiny(family)
    small, _ = RaFFM(model).resource_aware_model(config)
    export_stock(small, tmp_path / "stock")
    plain = getattr(transformers, type(model).__name__).from_pretrained(tmp_path / "stock")
    ids = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    assert relative(logits(plain, {"input_ids": ids}), logits(small.eval(), {"input_ids": ids})) < 1e-5
    if config.get("rot") == 2:
        full, kept = model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq
        theta = model.config.rope_parameters["rope_theta"]
        assert torch.allclose(kept, full[:2], rtol=1e-6)
        assert plain.config.rope_parameters["rope_theta"] == pytest.approx(theta ** (2 / len(full)), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_pairs_that_no_base_gives_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    elastic = RaFFM(tiny("llama").to(dtype))
    small = submodel(
        elastic.model, elastic.layout, Ranking({"rot": torch.tensor([0, 1, 3, 2])}).cut(elastic.layout, {"rot": 3})
    )
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.mul_(20)  # so that attention says something
    with pytest.raises(ExportError, match="rotary pairs"):
        export_stock(small, tmp_path / "stock")
    assert not (tmp_path / "stock").exists()


def test_a_base_that_was_not_cut_stays_as_it_is(tmp_path: Path) -> None:
    small, _ = RaFFM(tiny("llama")).resource_aware_model(every(ffn=5))
    export_stock(small, tmp_path / "stock")
    stored = json.loads((tmp_path / "stock" / "config.json").read_text())
    assert stored["rope_parameters"]["rope_theta"] == 10000.0


def test_a_model_that_says_nothing_finite_is_refused(tmp_path: Path) -> None:
    small, _ = RaFFM(VIT.build()).resource_aware_model({})
    with torch.no_grad():
        small.classifier.bias[0] = torch.nan
    with pytest.raises(ExportError, match="differ by inf"):
        export_stock(small, tmp_path / "stock")


def test_a_model_that_made_up_inputs_do_not_fit_may_be_written_unproved(tmp_path: Path) -> None:
    from transformers import BertForMultipleChoice

    with torch.random.fork_rng():
        elastic = RaFFM(BertForMultipleChoice(BERT.build().config))
    small, _ = elastic.resource_aware_model(every(ffn=7))
    with pytest.raises(ExportError, match="check=False"):
        export_stock(small, tmp_path / "stock")
    export_stock(small, tmp_path / "stock", check=False)
    assert BertForMultipleChoice.from_pretrained(tmp_path / "stock").config.intermediate_size == 7


def test_an_untied_head_is_written_as_one(tmp_path: Path) -> None:
    elastic = RaFFM(named("flan-t5").build())
    small, _ = elastic.resource_aware_model({"encoder.layers": 2})
    export_stock(small, tmp_path / "stock")
    elastic.save_ckpt(tmp_path / "ckpt")
    for folder in ("stock", "ckpt"):
        assert json.loads((tmp_path / folder / "config.json").read_text())["tie_word_embeddings"] is False
    other = RaFFM(model_from(str(tmp_path / "ckpt")).to(torch.float64))
    other.load_ckpt(tmp_path / "ckpt")
    assert other.total_params == elastic.total_params
    assert torch.equal(other.model.lm_head.weight, elastic.model.lm_head.weight)
