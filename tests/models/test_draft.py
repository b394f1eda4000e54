import copy
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from raffm.algebra.layout import Layout
from raffm.errors import LabelError
from raffm.models import resnet, table
from raffm.models.draft import draft
from raffm.models.label import layout_of
from raffm.models.table import read
from raffm.models.verify import verify

torch.set_num_threads(1)

Made = tuple[Any, Any]
"""A model class and a config for it."""


def a_vit(chance: random.Random) -> Made:
    heads, patch = chance.randint(2, 5), chance.choice([2, 4])
    return transformers.ViTForImageClassification, transformers.ViTConfig(
        hidden_size=heads * chance.randint(2, 6),
        num_hidden_layers=chance.randint(1, 4),
        num_attention_heads=heads,
        intermediate_size=chance.randint(5, 50),
        image_size=patch * chance.randint(2, 4),
        patch_size=patch,
        num_labels=chance.randint(2, 9),
    )


def a_bert(kind: type[nn.Module]) -> Callable[[random.Random], Made]:
    def made(chance: random.Random) -> Made:
        heads = chance.randint(2, 5)
        return kind, transformers.BertConfig(
            hidden_size=heads * chance.randint(2, 6),
            num_hidden_layers=chance.randint(1, 4),
            num_attention_heads=heads,
            intermediate_size=chance.randint(5, 50),
            vocab_size=chance.randint(20, 60),
            max_position_embeddings=chance.randint(8, 20),
            num_labels=chance.randint(2, 4),
        )

    return made


def a_hugging_face_resnet(kind: str) -> Callable[[random.Random], Made]:
    def made(chance: random.Random) -> Made:
        widths = [4 * chance.randint(1, 6) for _ in range(chance.randint(2, 3))]
        return transformers.ResNetForImageClassification, transformers.ResNetConfig(
            embedding_size=chance.choice([widths[0], 4 * chance.randint(1, 6)]),
            hidden_sizes=widths,
            depths=[chance.randint(1, 3) for _ in widths],
            layer_type=kind,
        )

    return made


def a_resnet(norm: Any) -> Callable[[random.Random], Made]:
    def made(chance: random.Random) -> Made:
        widths = tuple(8 * chance.randint(1, 4) for _ in range(chance.randint(2, 4)))
        depths = tuple(chance.randint(1, 3) for _ in widths)
        group_width = chance.choice([2, 4, 8])
        return resnet.ResNet, resnet.ResNetConfig(widths, depths, norm=norm, group_width=group_width)

    return made


TRANSFORMERS = {
    "vit": a_vit,
    "bert": a_bert(transformers.BertForSequenceClassification),
    "bert for masked words": a_bert(transformers.BertForMaskedLM),
}
RESNETS = {
    "basic resnet": a_hugging_face_resnet("basic"),
    "bottleneck resnet": a_hugging_face_resnet("bottleneck"),
    "our resnet, batch norm": a_resnet("batch"),
    "our resnet, group norm": a_resnet("group"),
}
KNOWN = TRANSFORMERS | RESNETS


def on_meta(made: Made) -> nn.Module:
    kind, config = made
    with torch.device("meta"):
        model: nn.Module = kind(config)
    return model


def drafted_and_shipped(family: str, seed: int) -> Iterator[tuple[Layout, Layout]]:
    """The layouts by a draft and by the shipped table: of the model that was drafted from, and of others of its class."""
    chance = random.Random(f"{family} {seed}")
    model = on_meta(KNOWN[family](chance))
    drafted = read(draft(model))
    for other in (model, *(on_meta(KNOWN[family](chance)) for _ in range(4))):
        yield layout_of(other, drafted), layout_of(other)


def axes(layout: Layout) -> dict[tuple[str, int], str]:
    return {(name, place): str(axis) for name, label in layout.labels.items() for place, axis in enumerate(label.axes)}


def where(layout: Layout, pattern: str) -> dict[tuple[str, int], str]:
    return {place: text for place, text in axes(layout).items() if re.search(pattern, text)}


# -- the shapes and the labels that count --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", KNOWN)
def test_a_draft_fits_its_class_at_every_size_and_finds_each_feed_forward_and_residual_axis(family: str, seed: int) -> None:
    for drafted, shipped in drafted_and_shipped(family, seed):
        for pattern in (r"\bffn\b", r"\bresidual\b"):
            assert where(drafted, pattern) == where(shipped, pattern)


@pytest.mark.parametrize("family", KNOWN)
def test_a_draft_groups_axes_as_the_shipped_table_does(family: str) -> None:
    for drafted, shipped in drafted_and_shipped(family, seed=10):
        theirs = {place: text.replace("*width", "") if "batch" in family else text for place, text in axes(shipped).items()}
        pairs = {(text, theirs[place]) for place, text in axes(drafted).items() if not text.isdigit()}
        assert len(pairs) == len({ours for ours, _ in pairs}) == len({their for _, their in pairs})


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_a_draft_knows_heads_their_sizes_and_the_integers_that_store_them(family: str) -> None:
    for drafted, shipped in drafted_and_shipped(family, seed=20):
        assert drafted.attributes == shipped.attributes
        assert drafted.bases == shipped.bases
        assert drafted.ties == shipped.ties
        assert set(drafted.free) == set(shipped.free)
        assert {name: str(label) for name, label in drafted.labels.items() if label.guard} == {
            name: str(label) for name, label in shipped.labels.items() if label.guard
        }


@pytest.mark.parametrize("family", KNOWN)
def test_a_draft_finds_the_blocks_that_may_be_dropped(family: str) -> None:
    for drafted, shipped in drafted_and_shipped(family, seed=30):
        assert drafted.depths == shipped.depths


@pytest.mark.parametrize("family", KNOWN)
def test_a_draft_proposes_the_space_and_the_inputs_of_the_shipped_table(family: str) -> None:
    model = on_meta(KNOWN[family](random.Random(0)))
    drafted, shipped = read(draft(model)), table.shipped(model.config.model_type)
    assert set(drafted.space["cut"]) <= set(shipped.space["cut"])
    assert "layers.*.heads" in drafted.space["cut"] or "stages.*.blocks.*.inner" in drafted.space["cut"]
    assert drafted.inputs == shipped.inputs


@pytest.mark.parametrize("family", ["vit", "bert", "our resnet, group norm"])
def test_running_the_model_proves_its_draft(family: str) -> None:
    kind, config = KNOWN[family](random.Random(3))
    assert verify(kind(config), read(draft(config if family.startswith("our") else kind(config)))).holds


# -- models that raffm has no table for ----------------------------------------------------------------------------


SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20}
LARGER = {"hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 50}
WORDS = {"vocab_size": 40, "max_position_embeddings": 20}
IMAGES = {"image_size": 8, "patch_size": 4}
GROUPED = {"num_key_value_heads": 2, "vocab_size": 40}


def distilbert(dim: int, n_heads: int, n_layers: int, hidden_dim: int) -> Any:
    return transformers.DistilBertConfig(dim=dim, n_heads=n_heads, n_layers=n_layers, hidden_dim=hidden_dim, **WORDS)


def gpt2(n_embd: int, n_head: int, n_layer: int) -> Any:
    return transformers.GPT2Config(n_embd=n_embd, n_head=n_head, n_layer=n_layer, vocab_size=40, n_positions=20)


def t5(d_model: int, num_heads: int, num_layers: int, d_ff: int) -> Any:
    return transformers.T5Config(d_model=d_model, num_heads=num_heads, d_kv=6, num_layers=num_layers, d_ff=d_ff, vocab_size=40)


UNKNOWN = {
    "distilbert": (
        transformers.DistilBertForSequenceClassification,
        distilbert(24, 4, 2, 20),
        distilbert(36, 6, 3, 50),
    ),
    "roberta": (
        transformers.RobertaForSequenceClassification,
        transformers.RobertaConfig(**SMALL, **WORDS),
        transformers.RobertaConfig(**LARGER, **WORDS),
    ),
    "deit": (
        transformers.DeiTForImageClassification,
        transformers.DeiTConfig(**SMALL, **IMAGES),
        transformers.DeiTConfig(**LARGER, **IMAGES),
    ),
    "gpt2": (transformers.GPT2LMHeadModel, gpt2(24, 4, 2), gpt2(36, 6, 3)),
    "llama": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**SMALL, **GROUPED),
        transformers.LlamaConfig(**LARGER, **GROUPED),
    ),
    "t5": (transformers.T5ForConditionalGeneration, t5(24, 4, 2, 20), t5(36, 3, 3, 50)),
    "swin": (
        transformers.SwinForImageClassification,
        transformers.SwinConfig(embed_dim=12, depths=[2, 1], num_heads=[2, 4], image_size=32, window_size=4),
        transformers.SwinConfig(embed_dim=24, depths=[1, 3], num_heads=[3, 6], image_size=32, window_size=4),
    ),
    "gpt neox": (
        transformers.GPTNeoXForCausalLM,
        transformers.GPTNeoXConfig(**SMALL, vocab_size=40),
        transformers.GPTNeoXConfig(**LARGER, vocab_size=40),
    ),
}


@pytest.mark.parametrize("family", UNKNOWN)
def test_a_draft_of_an_unknown_model_fits_it_at_two_sizes(family: str) -> None:
    kind, small, larger = UNKNOWN[family]
    drafted = read(draft(on_meta((kind, small))))
    for config in (small, larger):
        layout = layout_of(on_meta((kind, config)), drafted)
        assert any(name.endswith(".ffn") for name in layout.free)
        assert all(depth.size > 0 for depth in layout.depths.values())


@pytest.mark.parametrize("family", ["distilbert", "roberta", "deit", "gpt2", "llama"])
def test_running_an_unknown_model_proves_its_draft(family: str) -> None:
    kind, small, _ = UNKNOWN[family]
    model = kind(small)
    assert verify(model, read(draft(model))).holds


def test_grouped_queries_share_their_keys() -> None:
    kind, small, _ = UNKNOWN["llama"]
    labels = layout_of(on_meta((kind, small)), read(draft(on_meta((kind, small))))).labels
    assert str(labels["model.layers.1.self_attn.q_proj.weight"]) == (
        "residual -> layers.1.kv*layers.1.rep*layers.1.qk when layers[1]"
    )
    assert str(labels["model.layers.1.self_attn.k_proj.weight"]) == "residual -> layers.1.kv*layers.1.qk when layers[1]"


def test_a_transposed_fused_projection_keeps_its_direction() -> None:
    kind, small, _ = UNKNOWN["gpt2"]
    label = layout_of(on_meta((kind, small)), read(draft(on_meta((kind, small))))).labels["transformer.h.0.attn.c_attn.weight"]
    assert (label.source, label.target) == (0, 1)
    assert str(label.axes[1]) == " + ".join(f"layers.0.heads*layers.0.{part}" for part in ("qk", "qk", "vo"))


def test_lists_with_one_word_a_block_grow_with_the_blocks() -> None:
    config = transformers.Gemma3TextConfig(**SMALL, **GROUPED, head_dim=6)
    layout = layout_of(
        on_meta((transformers.Gemma3ForCausalLM, config)), read(draft(on_meta((transformers.Gemma3ForCausalLM, config))))
    )
    assert layout.depths["layers"].size == 2


# -- the text ------------------------------------------------------------------------------------------------------


def test_a_draft_says_what_to_do_next_and_what_it_guessed() -> None:
    text = draft(on_meta(a_vit(random.Random(1))))
    assert text.startswith("# A draft")
    assert "raffm verify MODEL --table FILE" in text.partition("family")[0]
    guesses = [line for line in text.splitlines() if "# guess: " in line]
    assert all(any(name in line for line in guesses) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    assert not any("mlp" in line for line in guesses)


def test_drafting_reads_no_shipped_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a shipped table was read")

    monkeypatch.setattr(table, "shipped", refuse)
    monkeypatch.setattr(table, "families", refuse)
    monkeypatch.setattr(table.resources, "files", refuse)
    for made in KNOWN.values():
        assert read(draft(on_meta(made(random.Random(2)))))


def test_two_drafts_of_one_model_are_equal() -> None:
    model = on_meta(KNOWN["bottleneck resnet"](random.Random(4)))
    assert draft(model) == draft(model)


def test_a_config_is_enough_for_a_draft() -> None:
    kind, config = a_vit(random.Random(5))
    expected = draft(on_meta((kind, config)))
    config.architectures = [kind.__name__]
    assert draft(config) == expected


def test_a_config_without_a_class_is_drafted_by_its_base_model() -> None:
    _, config = a_vit(random.Random(6))
    drafted = read(draft(config))
    assert not drafted.heads
    assert layout_of(on_meta((transformers.ViTModel, config)), drafted).depths["layers"].path == "layers"


def test_a_model_is_left_as_it_was() -> None:
    kind, config = TRANSFORMERS["bert"](random.Random(7))
    model = kind(config)
    before, weights = copy.deepcopy(config.to_dict()), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    draft(model)
    assert model.config.to_dict() == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_a_model_larger_than_any_memory_can_be_drafted() -> None:
    config = transformers.BertConfig(hidden_size=2**16, num_attention_heads=2**8, intermediate_size=2**20, num_hidden_layers=40)
    config.architectures = ["BertForMaskedLM"]
    assert "layers.{i}.ffn" in draft(config)


def test_importing_the_drafting_code_does_not_import_transformers() -> None:
    code = "import sys, raffm.models.draft; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- refusals ------------------------------------------------------------------------------------------------------


class Stubborn(nn.Module):
    """A model that cannot be built from its config alone."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__()
        self.config = config


def test_a_class_that_is_not_built_from_its_config_alone_is_refused() -> None:
    with pytest.raises(LabelError, match=r"Stubborn could not be built on the meta device from its ResNetConfig"):
        draft(Stubborn(resnet.ResNetConfig(), "a tokenizer"))


def test_a_model_without_a_config_is_refused() -> None:
    with pytest.raises(LabelError, match="Linear has no `config` object"):
        draft(nn.Linear(2, 3))


def test_something_else_than_a_model_or_a_config_is_refused() -> None:
    with pytest.raises(LabelError, match="a model or a Hugging Face config was expected, but str was given"):
        draft("bert")
