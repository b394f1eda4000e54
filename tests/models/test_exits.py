"""Early exits: a classifier in parts whose last exit is the model it was made from."""

from functools import cache
from math import ceil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from families.cases import Case, logits, named
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.data.examples import Examples
from raffm.data.task import TextClassification
from raffm.errors import SelectionError, SpaceError
from raffm.methods.widths import width_sizes
from raffm.models.anatomy import anatomy_of
from raffm.models.checkpoint import load_submodel, load_weights, save_model, save_submodel
from raffm.models.exits import DEPTH, Exits, evenly, with_exits
from raffm.models.labelled import Labelled
from raffm.models.load import model_from
from raffm.models.surgery import submodel
from raffm.models.verify import verify

CASES = (
    named("vit"),
    Case("deit", "deit", "DeiTForImageClassification", named("vit").config),
    named("bert"),
    named("roberta"),
    named("resnet"),
    named("resnet-bottleneck"),
    named("resnet-cifar"),
    named("resnet-cifar-group-norm"),
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
CONVOLUTIONAL = tuple(case for case in CASES if "resnet" in case.family)


@cache
def plain(case: Case) -> Labelled:
    return Labelled.of(case.build())


@cache
def parted(case: Case) -> Labelled:
    """The model of a case with exits after its first and second block, one convolution in early heads of ResNets."""
    return with_exits(plain(case), (1, 2), 1)


def said(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """What every exit says: (batch, exits, classes)."""
    with torch.no_grad():
        exits: Tensor = model(**inputs).exits
    return exits


def cut(server: Labelled, exits: int, ratio: float) -> Selection:
    return Ranking().cut(server.layout, {**width_sizes(server.layout, ratio), DEPTH: exits})


# -- the model and its exits ---------------------------------------------------------------------------------------


@each_case
def test_the_last_exit_says_what_the_model_says(case: Case) -> None:
    model = case.build().eval()
    inputs = case.inputs(model)
    expected = logits(model, inputs)
    exits = with_exits(Labelled.of(model), (1, 2)).model
    assert torch.equal(logits(exits, inputs), expected)
    assert said(exits, inputs).shape == (3, 3, 5)
    assert torch.equal(said(exits, inputs)[:, -1], expected)
    assert not torch.allclose(said(exits, inputs)[:, 0], expected, rtol=1e-2)


@each_case
def test_parts_share_their_tensors_with_the_model(case: Case) -> None:
    """What is trained in the parts is trained in the model, and the early heads are all that is new."""
    model = case.build().eval()
    server = with_exits(Labelled.of(model), (1, 2))
    own = {tensor.data_ptr() for tensor in model.state_dict().values()}
    new = [name for name, tensor in server.model.state_dict().items() if tensor.data_ptr() not in own]
    assert new
    assert all(name.startswith(("exits.0.head", "exits.1.head")) for name in new)
    inputs = case.inputs(model)
    before = logits(model, inputs)
    with torch.no_grad():
        for parameter in server.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    assert not torch.allclose(logits(model, inputs), before)
    assert torch.equal(logits(model, inputs), logits(server.model, inputs))


@pytest.mark.parametrize("training", [True, False])
def test_parts_are_in_the_mode_of_the_model(training: bool) -> None:
    exits = with_exits(Labelled.of(named("bert").build().train(training)), (1,)).model
    assert {module.training for module in exits.modules()} == {training}


@pytest.mark.parametrize("case", [case for case in CASES if case not in CONVOLUTIONAL], ids=lambda case: case.name)
def test_early_heads_of_transformers_begin_as_copies_with_memory_of_their_own(case: Case) -> None:
    parts = parted(case).model.exits
    last = dict(parts[-1].head.named_parameters())
    for part in parts[:-1]:
        assert list(dict(part.head.named_parameters())) == list(last)
        for name, parameter in part.head.named_parameters():
            assert torch.equal(parameter, last[name])
            assert parameter.data_ptr() != last[name].data_ptr()


@pytest.mark.parametrize("case", CONVOLUTIONAL, ids=lambda case: case.name)
def test_random_early_heads_follow_from_the_seed_alone(case: Case) -> None:
    state = torch.get_rng_state()
    one, same, other = (with_exits(plain(case), (1, 3), 2, seed).model.exits for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    name = "classifier.weight"
    assert torch.equal(one[0].head.get_parameter(name), same[0].head.get_parameter(name))
    assert not torch.equal(one[0].head.get_parameter(name), other[0].head.get_parameter(name))
    kernels = [parameter for parameter in one[0].head.parameters() if parameter.dim() == 4]
    assert len(kernels) == 2
    assert all(kernel.std() > 0 for kernel in kernels)
    assert not torch.equal(*kernels)


@pytest.mark.parametrize("case", CONVOLUTIONAL, ids=lambda case: case.name)
@pytest.mark.parametrize("convolutions", [0, 3])
def test_an_early_head_of_a_resnet_has_as_many_convolutions_as_asked(case: Case, convolutions: int) -> None:
    head = with_exits(plain(case), (2,), convolutions).model.exits[0].head
    kernels = [tuple(parameter.shape) for parameter in head.parameters() if parameter.dim() == 4]
    width = head.classifier.in_features
    assert kernels == [(width, width, 3, 3)] * convolutions


def test_a_model_that_cannot_have_exits_says_which_can() -> None:
    with pytest.raises(SpaceError, match=r"DistilBertForSequenceClassification cannot .*ViTForImageClassification"):
        anatomy_of(plain(named("distilbert")))


@pytest.mark.parametrize("after", [(0,), (3,), (-1, 1), (2, 1), (1, 1), (1, 4)])
def test_exits_that_are_not_between_the_blocks_are_refused(after: tuple[int, ...]) -> None:
    with pytest.raises(SpaceError, match=r"after 1 to 2 of the model's 3 blocks, in ascending order, not after \("):
        with_exits(plain(named("vit")), after)


# -- labels --------------------------------------------------------------------------------------------------------


@each_case
def test_verify_proves_every_label_of_a_model_with_exits(case: Case) -> None:
    found = verify(parted(case).model)
    assert found.holds, found
    rows = {row.group: row for row in found.rows}
    assert rows[DEPTH].verdict == "exact"
    assert ("exits.*.inner.0" in rows) is (case in CONVOLUTIONAL)


@each_case
@pytest.mark.parametrize("count", [1, 2])
def test_exits_that_are_left_say_what_they_said(case: Case, count: int) -> None:
    server = parted(case)
    small = submodel(server.model, server.layout, server.layout.select({DEPTH: count}))
    inputs = case.inputs(plain(case).model)
    assert len(small.exits) == count
    assert torch.equal(said(small, inputs), said(server.model.eval(), inputs)[:, :count])


def test_only_the_last_parts_can_be_dropped() -> None:
    layout = parted(named("vit")).layout
    assert layout.select({DEPTH: [0, 1]}).kept[DEPTH].tolist() == [0, 1]
    assert layout.select({DEPTH: [1, 0]}) == layout.select({DEPTH: 2})
    for kept in ([0, 2], [1, 2], [1]):
        with pytest.raises(SelectionError, match="`exits`"):
            layout.select({DEPTH: kept})


@pytest.mark.parametrize("order", [[2, 1, 0], [1, 2, 0], [0, 2, 1]])
@pytest.mark.parametrize("count", [1, 2])
def test_whatever_a_ranking_says_the_first_parts_are_kept(order: list[int], count: int) -> None:
    layout = parted(named("vit")).layout
    ranking = Ranking({DEPTH: torch.tensor(order), "residual": torch.arange(15, -1, -1)})
    selection = ranking.cut(layout, {DEPTH: count, "residual": 4})
    assert selection.kept[DEPTH].tolist() == list(range(count))
    assert selection.kept["residual"].tolist() == [12, 13, 14, 15]


@given(blocks=st.integers(1, 60), exits=st.integers(1, 12))
def test_even_exits_are_different_places_between_the_blocks(blocks: int, exits: int) -> None:
    places = evenly(blocks, exits)
    assert list(places) == sorted(set(places))
    assert all(1 <= place <= blocks - 1 for place in places)
    assert len(places) == min(exits, blocks) - 1
    gaps = [end - begin for begin, end in zip((0, *places), (*places, blocks), strict=True)]
    assert max(gaps) <= ceil(blocks / exits)


@pytest.mark.parametrize(
    ("blocks", "exits", "places"), [(12, 4, (3, 6, 9)), (8, 4, (2, 4, 6)), (3, 4, (1, 2)), (7, 4, (2, 4, 6)), (5, 1, ())]
)
def test_even_exits_of_common_models(blocks: int, exits: int, places: tuple[int, ...]) -> None:
    assert evenly(blocks, exits) == places


# -- on disk -------------------------------------------------------------------------------------------------------


@each_case
def test_a_cut_model_with_exits_comes_back_bit_for_bit(case: Case, tmp_path: Path) -> None:
    server = parted(case)
    small = submodel(server.model, server.layout, cut(server, 2, 0.5)).eval()
    save_submodel(small, tmp_path / "small")
    loaded = load_submodel(tmp_path / "small")
    assert isinstance(loaded, Exits)
    inputs = case.inputs(plain(case).model)
    assert said(small, inputs).shape == (3, 2, 5)
    assert torch.equal(said(loaded, inputs), said(small, inputs))
    assert {name: tensor.shape for name, tensor in loaded.state_dict().items()} == {
        name: tensor.shape for name, tensor in small.state_dict().items()
    }


@each_case
def test_a_full_model_with_exits_comes_back_bit_for_bit(case: Case, tmp_path: Path) -> None:
    server = with_exits(Labelled.of(case.build(seed=4).eval()), (2,), 1, seed=9)
    save_model(server.model, tmp_path)
    loaded = model_from(str(tmp_path))
    assert isinstance(loaded, Exits)
    assert loaded.recipe == server.model.recipe
    assert Labelled.of(loaded).layout.fingerprint == server.layout.fingerprint
    inputs = case.inputs(plain(case).model)
    assert not torch.equal(said(loaded, inputs), said(server.model, inputs))
    loaded.load_state_dict(load_weights(loaded, tmp_path))
    assert torch.equal(said(loaded, inputs), said(server.model, inputs))


# -- padding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_what_pads_a_text_changes_no_exit(name: str) -> None:
    model = parted(named(name)).model.eval()
    ids = torch.randint(2, 50, (3, 5), generator=torch.Generator().manual_seed(0))
    alone = said(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    for filler in (7, 30):
        rest = torch.full((3, 3), filler)
        padded = {"input_ids": torch.cat([ids, rest], 1), "attention_mask": (torch.arange(8) < 5).long().expand(3, -1)}
        assert torch.allclose(said(model, padded), alone, atol=1e-5)
        assert not torch.allclose(said(model, {"input_ids": padded["input_ids"]}), alone, atol=1e-3)


def test_texts_of_one_batch_have_the_exits_that_they_have_alone() -> None:
    """The batches of the task bring the mask along."""
    model = parted(named("bert")).model.eval()
    ids = torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(0))
    texts = Examples({"input_ids": ids, "lengths": torch.tensor([3, 16, 9, 5])}, torch.zeros(4, dtype=torch.int64))
    together = said(model, dict(TextClassification().batch(texts, torch.arange(4)).inputs))
    for place, length in enumerate((3, 16, 9, 5)):
        assert torch.allclose(said(model, {"input_ids": ids[place : place + 1, :length]})[0], together[place], atol=1e-5)
