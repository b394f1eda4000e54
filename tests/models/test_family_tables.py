"""What the sections of a table mean, on models of a few lines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from raffm.algebra.axis import parse
from raffm.algebra.layout import Layout
from raffm.errors import LabelError, UnknownFamilyError
from raffm.models.label import layout_of, table_of
from raffm.models.surgery import submodel
from raffm.models.table import first_match, match, read, shipped

# -- tables like others --------------------------------------------------------------------------------------------


def test_a_table_may_be_like_another() -> None:
    other = shipped("vit")
    table = read('family = "mine"\nlike = "vit"')
    assert table.family == "mine"
    assert (table.tensors, table.groups, table.depth, table.space) == (other.tensors, other.groups, other.depth, other.space)
    assert table.transformers == other.transformers


def test_lines_of_ones_own_stand_before_and_instead_of_the_others() -> None:
    table = read("""
    family = "mine"
    like = "vit"
    [tensors]
    "layernorm" = "pooled"
    "layers.{i}.mlp.*" = "residual -> pooled"
    [outputs]
    logits = "pooled"
    """)
    others = dict(shipped("vit").tensors)
    assert list(table.tensors)[:2] == ["layernorm", "layers.{i}.mlp.*"]
    assert table.tensors["layernorm"] == "pooled"
    assert set(table.tensors) == {*others, "layers.{i}.mlp.*"}
    assert first_match(table.tensors, "layers.3.mlp.fc1") == ("residual -> pooled", {"i": 3})
    assert first_match(table.tensors, "layers.3.layernorm_after") == ("residual", {"i": 3})
    assert table.outputs == {**shipped("vit").outputs, "logits": "pooled"}


def test_a_table_may_be_like_one_that_is_like_another() -> None:
    table = read('family = "mine"\nlike = "roberta"')
    assert table.tensors == shipped("bert").tensors
    assert table.heads == shipped("roberta").heads


def test_a_table_like_one_that_there_is_not_is_refused() -> None:
    with pytest.raises(LabelError, match=r"like that of 'nonsense'.*bert"):
        read('family = "mine"\nlike = "nonsense"')


def test_the_tiny_model_of_a_table_is_its_own() -> None:
    assert "config" in shipped("vit").tiny
    assert read('family = "mine"\nlike = "vit"\n[tiny]\nclass = "Mine"').tiny == {"class": "Mine"}


def test_another_table_is_not_changed_by_one_that_is_like_it() -> None:
    before = dict(shipped("bert").heads)
    assert shipped("roberta").heads["classifier.out_proj"] == "residual -> classes"
    assert shipped("roberta").tensors == shipped("bert").tensors
    assert shipped("bert").heads == before
    assert "classifier.out_proj" not in before


def test_a_model_is_labelled_by_a_table_that_is_like_another() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"mlp": nn.ModuleDict({"fc1": nn.Linear(4, 6), "new": nn.Linear(6, 4)})})])
    text = 'family = "mine"\nlike = "vit"'
    with pytest.raises(LabelError, match=r"`layers.0.mlp.new.weight` of shape \(4, 6\) has no label in the table of 'mine'"):
        layout_of(model, read(text))
    layout = layout_of(model, read(text + '\n[tensors]\n"layers.{i}.mlp.new" = "layers.{i}.ffn -> residual"'))
    assert layout.sizes == {"layers": 1, "residual": 4, "layers.0.ffn": 6}


# -- `*` and `fixed` -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "name", "expected"),
    [
        ("decoder.*", "decoder.a.0.weight", {}),
        ("decoder.*", "decoder", None),
        ("decoder.*", "my.decoder.a", None),
        ("*.norm", "a.b.norm", {}),
        ("*", "anything.at.all", {}),
        ("layers.{i}.*.w", "layers.12.a.b.w", {"i": 12}),
        ("layers.{i}.*.w", "layers.x.a.w", None),
        ("a.b", "aXb", None),
    ],
)
def test_a_star_matches_anything(template: str, name: str, expected: dict[str, int] | None) -> None:
    assert match(template, name) == expected


class Guided(nn.Module):
    """A layer, and a guide with tensors of every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 6), nn.Linear(6, 2)
        self.guide = nn.Sequential(nn.Conv2d(6, 2, 3), nn.BatchNorm2d(2))


GUIDED = """
family = "guided"
[tensors]
"first" = "3 -> hidden"
"second" = "hidden -> 2"
"guide.*" = "fixed"
"""


def test_a_fixed_tensor_is_never_cut_whatever_its_shape() -> None:
    model = Guided()
    layout = layout_of(model, read(GUIDED))
    assert layout.sizes == {"hidden": 6}
    assert str(layout.labels["guide.0.weight"]) == "2, 6, 3, 3"
    assert str(layout.labels["guide.0.bias"]) == "2"
    assert str(layout.labels["guide.1.num_batches_tracked"]) == "scalar"
    small = submodel(model, layout, layout.select({"hidden": [1, 4]}))
    assert small.first.weight.shape == (2, 3)
    for name, tensor in model.guide.state_dict().items():
        assert torch.equal(small.guide.state_dict()[name], tensor)


@pytest.mark.parametrize("line", ['"guide.0.weight" = "hidden -> 2, 3, 3"\n', '"guide.0" = "hidden -> 2, 3, 3"\n'])
def test_a_line_of_ones_own_beats_one_that_speaks_of_anything(line: str) -> None:
    for text in (GUIDED.replace('"guide.*"', line + '"guide.*"'), GUIDED + line):
        assert ("guide.0.weight", 1) in layout_of(Guided(), read(text)).uses("hidden")


# -- blocks --------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Heads that are scaled; the scale comes from the table in the first block."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(4, 6), nn.Linear(6, 4)
        self.heads, self.place, self.has_table = 3, place, place == 0
        if self.has_table:
            self.table = nn.Embedding(5, 3)

    def forward(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.has_table:
            scale = self.table.weight.mean(0)
        assert scale is not None
        inner = self.q(x).unflatten(-1, (self.heads, -1)) * scale[:, None]
        return x + self.o(inner.flatten(-2)), scale


class Fast(Plain):
    """The same, by another way."""


class Stack(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Fast(place) for place in range(blocks))
        self.config = SimpleNamespace(
            num_layers=blocks,
            inner=SimpleNamespace(num_layers=blocks, heads=3),
            kinds=[f"kind {place}" for place in range(blocks)],
            global_blocks=[3, 1],
            windows=None,
        )

    def forward(self, x: Tensor) -> Tensor:
        scale = None
        for block in self.blocks:
            x, scale = block(x, scale)
        return x


STACK = """
family = "stack"

[depth]
layers = { path = "blocks" }

[groups]
buckets = { pinned = true }
"layers.{i}.d" = { per = "heads" }

[tensors]
"blocks.0.table" = "buckets, heads of layers"
"blocks.{i}.q" = "residual -> heads*layers.{i}.d"
"blocks.{i}.o" = "heads*layers.{i}.d -> residual"

[attributes]
"blocks.{i}.heads" = "heads"
"blocks.{i}.place" = "#layers"
"blocks.{i}.has_table" = "first#layers"
"config.num_layers" = "layers"
"config.inner.num_layers" = "layers"
"config.inner.heads" = "heads"
"config.missing.num_layers" = "layers"
"config.kinds" = "[layers]"
"config.windows" = "[layers]"
"config.global_blocks" = "[#layers]"

[when_cut]
"blocks.{i}" = { group = "layers.{i}.d", class = "Plain" }
"""


def stack(change: tuple[str, str] = ("", "")) -> tuple[Stack, Layout]:
    torch.manual_seed(0)
    model = Stack(4)
    return model, layout_of(model, read(STACK.replace(*change)))


def test_a_tensor_of_the_stack_has_no_block_of_its_own() -> None:
    _, layout = stack()
    label = layout.labels["blocks.0.table.weight"]
    assert (label.stack, label.guard) == ("layers", None)
    assert layout.labels["blocks.0.q.weight"].guard == ("layers", 0)
    assert layout.heads == {"heads"}


@pytest.mark.parametrize("blocks", [[0], [2], [1, 3], [0, 2, 3], [1, 2, 3]])
def test_a_stack_without_its_first_block_works_as_if_that_were_passed_by(blocks: list[int]) -> None:
    model, layout = stack()
    small = submodel(model, layout, layout.select({"layers": blocks}))
    with torch.no_grad():
        for place, block in enumerate(model.blocks):
            if place not in blocks:
                block.o.weight.zero_()
                block.o.bias.zero_()
    x = torch.randn(2, 4)
    torch.testing.assert_close(small(x), model(x))
    assert [name for name in small.state_dict() if "table" in name] == ["blocks.0.table.weight"]


def test_the_table_of_a_stack_is_cut_with_the_heads_that_all_blocks_share() -> None:
    model, layout = stack()
    small = submodel(model, layout, layout.select({"layers": [2, 3], "heads": [0, 2]}))
    assert torch.equal(small.blocks[0].table.weight, model.blocks[0].table.weight[:, [0, 2]])
    assert (small.blocks[0].table.embedding_dim, small.blocks[1].heads) == (2, 2)
    again = layout_of(small, read(STACK))
    assert again.fingerprint == layout.cut(layout.select({"layers": [2, 3], "heads": [0, 2]})).fingerprint


def test_blocks_know_their_place_and_a_flag_stays_a_flag() -> None:
    model, layout = stack()
    small = submodel(model, layout, layout.select({"layers": [1, 3]}))
    assert [block.place for block in small.blocks] == [0, 1]
    assert [block.has_table for block in small.blocks] == [True, False]
    assert all(type(block.has_table) is bool for block in small.blocks)
    assert [block.place for block in model.blocks] == [0, 1, 2, 3]
    assert [block.has_table for block in model.blocks] == [True, False, False, False]


def test_attributes_may_stand_in_nested_configs() -> None:
    model, layout = stack()
    assert set(layout.attributes or {}) > {"config.num_layers", "config.inner.num_layers", "config.inner.heads"}
    assert "config.missing.num_layers" not in (layout.attributes or {})
    small = submodel(model, layout, layout.select({"layers": [0, 2], "heads": 2}))
    assert (small.config.num_layers, small.config.inner.num_layers, small.config.inner.heads) == (2, 2, 2)
    assert (model.config.num_layers, model.config.inner.num_layers, model.config.inner.heads) == (4, 4, 3)


def test_a_nested_config_that_disagrees_with_the_model_is_refused() -> None:
    model = Stack(4)
    model.config.inner.num_layers = 5
    with pytest.raises(LabelError, match=r"`config.inner.num_layers` has length 5, but its label `layers` gives 4"):
        layout_of(model, read(STACK))


def test_a_list_with_an_entry_for_every_block_keeps_those_of_the_kept_ones() -> None:
    model, layout = stack()
    small = submodel(model, layout, layout.select({"layers": [1, 3]}))
    assert small.config.kinds == ["kind 1", "kind 3"]
    assert small.config.windows is None
    assert model.config.kinds == ["kind 0", "kind 1", "kind 2", "kind 3"]
    assert layout.lists == {"config.kinds": "layers", "config.global_blocks": "#layers"}


@pytest.mark.parametrize(
    ("blocks", "expected"), [([1, 3], [1, 0]), ([0, 3], [1]), ([0, 2], []), ([0, 1, 3], [2, 1]), ([0, 1, 2, 3], [3, 1])]
)
def test_a_list_of_blocks_holds_their_new_numbers(blocks: list[int], expected: list[int]) -> None:
    model, layout = stack()
    small = submodel(model, layout, layout.select({"layers": blocks}))
    assert small.config.global_blocks == expected
    assert model.config.global_blocks == [3, 1]


def test_a_submodel_remembers_what_the_full_config_said() -> None:
    model, layout = stack()
    small = submodel(model, layout, layout.select({"layers": [1, 3]}))
    assert dict(small.raffm.config) == {
        "num_layers": 4,
        "inner.num_layers": 4,
        "inner.heads": 3,
        "kinds": ("kind 0", "kind 1", "kind 2", "kind 3"),
        "global_blocks": (3, 1),
    }


def test_a_module_changes_its_class_once_its_group_is_cut() -> None:
    model, layout = stack()
    selection = layout.select({"layers": [1, 3], "layers.3.d": [[0], [1], [0]]})
    small = submodel(model, layout, selection)
    assert [type(block) for block in small.blocks] == [Fast, Plain]
    assert [type(block) for block in model.blocks] == [Fast] * 4
    assert layout.cut(selection).when_cut == {"blocks.0": ("layers.0.d", "Plain"), "blocks.1": ("layers.1.d", "Plain")}
    whole = submodel(model, layout, layout.select({"layers": [1, 3], "heads": 2}))
    assert [type(block) for block in whole.blocks] == [Fast, Fast]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('class = "Plain"', 'class = "Unheard"'), "Unheard"),
        (('group = "layers.{i}.d"', 'group = "layers.{i}.dd"'), "layers.0.dd"),
    ],
)
def test_a_class_or_a_group_that_there_is_not_is_refused(change: tuple[str, str], words: str) -> None:
    with pytest.raises(LabelError, match=words):
        stack(change)


def test_a_class_for_a_group_that_all_blocks_share_is_given_to_the_kept_ones() -> None:
    model, layout = stack(('group = "layers.{i}.d"', 'group = "heads"'))
    selection = layout.select({"layers": [1, 2], "heads": 2})
    assert [type(block) for block in submodel(model, layout, selection).blocks] == [Plain, Plain]
    assert set(layout.cut(selection).when_cut) == {"blocks.0", "blocks.1"}


def test_a_tuple_with_an_entry_for_every_block_stays_a_tuple() -> None:
    model = Stack(3)
    model.config.kinds = ("a", "b", "c")
    model.config.global_blocks = ()
    layout = layout_of(model, read(STACK))
    assert submodel(model, layout, layout.select({"layers": [0, 2]})).config.kinds == ("a", "c")


@pytest.mark.parametrize("label", ["buckets, heads of nowhere", "buckets, heads of heads"])
def test_a_tensor_of_a_stack_that_there_is_not_is_refused(label: str) -> None:
    with pytest.raises(LabelError, match="does not stand in the first of them"):
        stack(("buckets, heads of layers", label))


class Biased(nn.Module):
    """A bare parameter and a bare buffer in the first block that serve all."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)
        if place == 0:
            self.bias = nn.Parameter(torch.randn(4))
            self.register_buffer("shift", torch.randn(4), persistent=False)


BIASED = """
family = "biased"
[depth]
layers = { path = "0" }
[tensors]
"0.0.bias" = "width of layers"
"0.0.shift" = "width of layers"
"0.{i}.map" = "4 -> width"
"""


ONE_STACK = """
family = "x"
[depth]
layers = { path = "0" }
[tensors]
"""


def test_bare_tensors_of_a_stack_move_to_the_first_kept_block() -> None:
    model = nn.Sequential(nn.ModuleList(Biased(place) for place in range(3)))
    layout = layout_of(model, read(BIASED))
    small = submodel(model, layout, layout.select({"layers": [1, 2], "width": [0, 2]}))
    assert torch.equal(small[0][0].bias, model[0][0].bias[[0, 2]])
    assert torch.equal(small[0][0].shift, model[0][0].shift[[0, 2]])
    maps = {f"0.{place}.map.{leaf}" for place in range(2) for leaf in ("weight", "bias")}
    assert {name for name, _ in small.named_parameters()} == {"0.0.bias", *maps}
    assert "0.0.shift" not in small.state_dict()
    assert torch.equal(small[0][1].map.weight, model[0][2].map.weight[[0, 2]])


def test_a_tensor_of_a_stack_that_all_blocks_share_has_no_name_twice() -> None:
    blocks = [nn.ModuleDict({"table": nn.Embedding(5, 4)}) for _ in range(3)]
    for block in blocks[1:]:
        block["table"] = blocks[0]["table"]
    model = nn.Sequential(nn.ModuleList(blocks))
    layout = layout_of(model, read(ONE_STACK + '"0.0.table" = "5, width of layers"'))
    assert layout.cut(layout.select({"layers": [1, 2]})).aliases == {"0.1.table.weight": "0.0.table.weight"}


def test_a_module_beside_the_blocks_is_refused() -> None:
    model = nn.Sequential(nn.ModuleDict({"0": nn.Linear(4, 4), "1": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}))
    with pytest.raises(LabelError, match=r"`0\.norm` stands among the blocks"):
        layout_of(model, read(ONE_STACK + '"0.{i}" = "width -> width"\n"0.norm" = "width"'))


# -- two stacks ----------------------------------------------------------------------------------------------------


class Half(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.block = nn.ModuleList(nn.Linear(4, 4) for _ in range(config.num_layers))
        self.config = config


class Halves(nn.Module):
    """An encoder, and sometimes a decoder, each with a config of its own."""

    def __init__(self, has_decoder: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_layers=3)
        self.encoder = Half(SimpleNamespace(num_layers=3))
        if has_decoder:
            self.decoder = Half(SimpleNamespace(num_layers=2))


class Headed(nn.Module):
    base_model_prefix = "body"

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Halves(True), nn.Linear(4, 2)
        self.config = self.body.config


HALVES = """
family = "halves"

[depth]
"encoder.layers" = { path = "encoder.block" }
"decoder.layers" = { path = "decoder.block", optional = true }

[tensors]
"encoder.block.{i}" = "residual -> residual"
"decoder.block.{i}" = "residual -> residual"

[heads]
"head" = "residual -> classes"

[attributes]
"encoder.config.num_layers" = "encoder.layers"
"decoder.config.num_layers" = "decoder.layers"
"""


def test_blocks_that_a_model_lacks_are_an_error_unless_they_are_optional() -> None:
    layout = layout_of(Halves(False), read(HALVES))
    assert list(layout.depths) == ["encoder.layers"]
    assert list(layout.attributes or {}) == ["encoder.config.num_layers"]
    assert {name: group.size for name, group in layout_of(Halves(True), read(HALVES)).depths.items()} == {
        "encoder.layers": 3,
        "decoder.layers": 2,
    }
    with pytest.raises(LabelError, match=r"the table of 'halves' looks for blocks at `decoder.block`"):
        layout_of(Halves(False), read(HALVES.replace(", optional = true", "")))


@pytest.mark.parametrize("is_headed", [False, True])
def test_attributes_may_stand_in_the_config_of_a_module(is_headed: bool) -> None:
    model = Headed() if is_headed else Halves(True)
    prefix = "body." if is_headed else ""
    layout = layout_of(model, read(HALVES))
    assert layout.attributes == {
        f"{prefix}encoder.config.num_layers": parse("encoder.layers"),
        f"{prefix}decoder.config.num_layers": parse("decoder.layers"),
    }
    small = submodel(model, layout, layout.select({"encoder.layers": [2], "residual": 3}))
    body = small.body if is_headed else small
    assert (body.encoder.config.num_layers, body.decoder.config.num_layers) == (1, 2)
    assert (len(body.encoder.block), len(body.decoder.block)) == (1, 2)
    assert body.config.num_layers == small.config.num_layers == 3, "nobody speaks of the model's own"


# -- versions of transformers --------------------------------------------------------------------------------------


def of_family(family: str) -> nn.Module:
    model = Guided()
    model.config = SimpleNamespace(model_type=family)
    return model


@pytest.mark.parametrize("version", ["4.57.1", "5.16.9", "5.17.0.dev0", "6.0.0", "6.0.0.dev0"])
def test_a_shipped_table_is_refused_where_another_version_of_transformers_is_installed(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    for family in ("vit", "deit"):
        with pytest.raises(
            UnknownFamilyError, match=rf"'{family}' holds for transformers >=5.17,<6, but {version} is installed"
        ):
            table_of(of_family(family))
    with pytest.raises(UnknownFamilyError, match="is installed"):
        layout_of(of_family("vit"))


@pytest.mark.parametrize("version", ["5.17.0", "5.18.0.dev0", "5.99.1"])
def test_a_shipped_table_holds_for_its_versions_of_transformers(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    assert table_of(of_family("vit")) is shipped("vit")


def test_tables_of_ones_own_and_of_raffms_own_models_hold_for_every_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "1.0")
    own = read('family = "guided"\ntransformers = ">=5.17,<6"\n[tensors]\n"*" = "fixed"')
    assert own.transformers == shipped("vit").transformers
    assert layout_of(of_family("vit"), own).sizes == {}
    assert table_of(of_family("raffm_resnet")) is shipped("raffm_resnet")
