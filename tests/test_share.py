"""One folder with every submodel in it: prefixes of one file, loaded by size, by budget, and without raffm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from commands import QUICK, raffm
from raffm.algebra.move import moves
from raffm.errors import BudgetError, CheckpointError, ExportError, RunError
from raffm.federate import submodel_of
from raffm.models.nested import Nested, load_nested
from raffm.prepare import reopened
from raffm.rounds.predict import outputs_of
from raffm.search.judge import judge_of
from raffm.share import SHIPPED, from_pretrained, push_to_hub, share

RESNET = ("--model=resnet18", "--set=model.widths=[8, 16]", "--set=model.depths=[1, 1]")


def trained(folder: Path, *words: str) -> Path:
    said = raffm("train", *words, "--method=raffm", *QUICK[2:], "--rounds=2", "--no-tensorboard", "--folder", folder)
    assert said.returncode == 0, said.stderr
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("vit") / "run", QUICK[0])


@pytest.fixture(scope="module")
def nested(run: Path) -> Nested:
    return share(run, run.parent / "nested")


def test_every_size_is_that_of_the_run(run: Path, nested: Nested) -> None:
    plan, _ = reopened(run)
    judge = judge_of(plan)
    inputs = plan.task.batch(plan.data.dataset.test, torch.arange(9)).inputs
    assert [piece.name for piece in nested.pieces] == ["1", "1/4"]
    for piece in nested.pieces:
        module = nested.submodel(piece.name)
        assert sum(parameter.numel() for parameter in module.parameters()) == piece.params
        with torch.no_grad():
            assert torch.allclose(module(**inputs).logits, judge.module(piece.sizes)(**inputs).logits, atol=1e-5)
        assert piece.metrics == judge.scores(judge.module(piece.sizes), plan.data.dataset.test)


def test_a_smaller_submodel_is_a_prefix_of_the_file(nested: Nested) -> None:
    frame = nested._frame
    selection = nested._order.cut(frame.layout, nested.piece("1/4").sizes)
    places = [where for move in moves(frame.layout, selection).values() for where in move.where if where is not None]
    assert any(isinstance(where, slice) for where in places)
    for where in places:
        if isinstance(where, slice):
            assert (where.start, where.step) in ((0, None), (None, None), (0, 1))
        else:  # a prefix of every head
            heads = where.view(4, -1)
            assert torch.equal(heads, heads[:, :1] + torch.arange(heads.shape[1]))


def test_a_device_picks_by_what_it_holds(nested: Nested) -> None:
    small = nested.piece("1/4")
    assert nested.best(small.params) == small
    assert nested.best(10**9).score == max(piece.score or 0.0 for piece in nested.pieces)  # validation, not the test set
    module = nested.submodel(max_params=small.params)
    assert sum(parameter.numel() for parameter in module.parameters()) == small.params
    with pytest.raises(BudgetError, match=f"no size has at most 10 parameters; the smallest has {small.params:,}"):
        nested.submodel(max_params=10)
    with pytest.raises(CheckpointError, match=r"has no size '1/3'. There are: 1, 1/4"):
        nested.submodel("1/3")


def test_the_full_model_loads_without_raffm(run: Path, nested: Nested) -> None:
    from transformers import ViTForImageClassification

    plan, _ = reopened(run)
    inputs = plan.task.batch(plan.data.dataset.test, torch.arange(5)).inputs
    other = ViTForImageClassification.from_pretrained(nested.folder).eval()
    with torch.no_grad():
        assert torch.allclose(other(**inputs).logits, plan.server.model.eval()(**inputs).logits, atol=1e-5)


def test_batch_norms_have_statistics_of_every_size(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", *RESNET)
    said = raffm("export", run, "--format", "nested", "--out", tmp_path / "nested")
    assert said.returncode == 0, said.stderr
    nested, (plan, _) = load_nested(tmp_path / "nested"), reopened(run)
    judge = judge_of(plan)
    for piece in nested.pieces:
        assert judge.scores(nested.submodel(piece.name), plan.data.dataset.test) == piece.metrics
    assert "is not empty" in raffm("export", run, "--format", "nested", "--out", tmp_path / "nested").stderr


def test_sizes_of_other_methods_are_those_that_they_trained(tmp_path: Path) -> None:
    for method in ("heterofl", "fiarse", "scalefl"):
        words = (QUICK[0], f"--method={method}", *QUICK[2:], "--rounds=2", "--no-tensorboard", "--folder", tmp_path / method)
        assert raffm("train", *words).returncode == 0
    nested, (plan, _) = share(tmp_path / "heterofl", tmp_path / "nested"), reopened(tmp_path / "heterofl")
    inputs = plan.task.batch(plan.data.dataset.test, torch.arange(9)).inputs
    served = submodel_of(plan, 1 / 4)
    with torch.no_grad():
        assert torch.allclose(nested.submodel("1/4")(**inputs).logits, served(**inputs).logits, atol=1e-5)
    assert nested.piece("1/4").params == sum(parameter.numel() for parameter in served.parameters())
    with pytest.raises(ExportError, match="what fiarse serves is no prefix"):
        share(tmp_path / "fiarse", tmp_path / "masks")
    with pytest.raises(RunError, match="scalefl divides weights by a factor of its own sizes"):
        share(tmp_path / "scalefl", tmp_path / "scaled")
    assert not (tmp_path / "masks").exists()


def test_the_sizes_of_a_search_are_shared(run: Path, tmp_path: Path) -> None:
    assert raffm("search", run, "--evaluations=10", "--finalists=3", "--examples=40", "--workers=1").returncode == 0
    pieces = share(run, tmp_path / "nested").pieces
    finalists = json.loads((run / "search" / "search.json").read_text())["finalists"]
    assert {"1", "1/4"} <= {piece.name for piece in pieces}  # the fleet's sizes stay
    added = {piece.params for piece in pieces if piece.name not in ("1", "1/4")}
    assert added
    assert added <= {each["costs"]["params"] for each in finalists}
    assert [piece.params for piece in pieces] == sorted((piece.params for piece in pieces), reverse=True)
    shutil.rmtree(run / "search")


def test_the_card_tells_sizes_scores_and_how_to_load(nested: Nested) -> None:
    card = (nested.folder / "README.md").read_text()
    for piece in nested.pieces:
        assert f"| {piece.name} | {piece.params:,} |" in card
    assert card.startswith("---\nlibrary_name: raffm\n")
    assert nested.labels == [str(digit) for digit in range(10)]


def test_what_is_not_there_or_foreign_is_named(nested: Nested, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="there is no folder 'nobody/nothing', and the hub did not give it"):
        from_pretrained("nobody/nothing")
    with pytest.raises(CheckpointError, match="the hub did not take 'me/mine'"):
        push_to_hub(nested.folder, "me/mine")
    with pytest.raises(CheckpointError, match=r"has no nested\.json"):
        push_to_hub(tmp_path, "me/mine")
    shutil.copytree(nested.folder, tmp_path / "old")
    about = json.loads((tmp_path / "old" / "nested.json").read_text())
    (tmp_path / "old" / "nested.json").write_text(json.dumps({**about, "format": 99}))
    with pytest.raises(CheckpointError, match="has format 99"):
        from_pretrained(tmp_path / "old")


@pytest.mark.parametrize("folder", sorted(SHIPPED.iterdir()) if SHIPPED.is_dir() else [], ids=lambda folder: folder.name)
def test_what_comes_with_raffm_scores_what_its_card_says(folder: Path) -> None:
    from raffm.data.sources import load
    from raffm.data.task import ImageClassification, classification_metrics

    nested = from_pretrained(folder.name)
    dataset = load(nested.about["data"])
    given = {key: value for key, value in nested.about["preprocessing"].items() if key != "task"}
    task = ImageClassification(**{**given, "mean": tuple(given["mean"]), "std": tuple(given["std"])})
    batch = task.batch(dataset.test, torch.arange(len(dataset.test)))
    for piece in nested.pieces:
        with torch.no_grad():
            found = classification_metrics(task.forward(nested.submodel(piece.name), batch), batch.labels)
        assert found["accuracy"] == pytest.approx(piece.metrics["accuracy"], abs=0.003)
        assert found["accuracy"] > 0.85


def test_sizes_with_norms_of_their_own_keep_them(tmp_path: Path) -> None:
    sizes = ("--set=model.widths=[16, 32]", "--set=model.depths=[1, 1]", "--method=nested", "--fleet=1, 1/4")
    said = raffm("train", RESNET[0], *sizes, "--data=digits", "--rounds=2", "--no-tensorboard", "--folder", tmp_path / "run")
    assert said.returncode == 0, said.stderr
    shared = share(tmp_path / "run", tmp_path / "shared")
    plan, _ = reopened(tmp_path / "run")
    test = plan.data.dataset.test
    for piece in shared.pieces:
        module = shared.submodel(piece.name)
        expected = submodel_of(plan, plan.served[piece.name].size)
        assert torch.allclose(outputs_of(plan, module, test), outputs_of(plan, expected, test), atol=1e-5)
    ranked = share(tmp_path / "run", tmp_path / "ranked", metric="l1_norm")  # rows are not ranked
    assert [piece.name for piece in ranked.pieces] == ["1", "1/4"]
    weights = [shared.submodel(piece.name).stem.norm.weight for piece in shared.pieces]  # type: ignore[union-attr]
    assert not torch.equal(weights[0][: len(weights[1])], weights[1])
