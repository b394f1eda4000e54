"""A federated run in a few lines of Python, and what it gives back."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from raffm import (
    Evaluating,
    Federation,
    Local,
    Participation,
    RaffmError,
    TextClassification,
    load_data,
    load_submodel,
    save_submodel,
    train,
)
from raffm.data.examples import Dataset, Examples
from raffm.data.splits import split
from raffm.data.task import Batch, ImageClassification
from raffm.errors import CheckpointError, DataError, RunError
from raffm.federate import Trained, task_for
from raffm.models.load import tiny, trainable
from rounds.made import RESNET, VIT, digits, federation

EVERYBODY = Participation(clients=4)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAFFM_CACHE", str(tmp_path_factory.getbasetemp() / "raffm-cache"))


def a_model(name: str = VIT) -> nn.Module:
    return trainable(name, "image", 10, (1, 8, 8))


@cache
def a_run(method: str = "heterofl", name: str = VIT, **how: object) -> Trained:
    """A run of one round; the same one again where the same is asked for."""
    local = Local(lr=1e-2, batch=6)
    return train(
        a_model(name), federation(), method=method, fleet="1, 1/4", rounds=1, local=local, participation=EVERYBODY, **how
    )


# -- ten lines -----------------------------------------------------------------------------------------------------


def test_ten_lines_train_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    data = load_data("digits", clients=30, split="dirichlet-balanced", alpha=0.3)
    model = trainable("vit:tiny", "image", classes=10, shape=(1, 8, 8))
    result = train(model, data, method="raffm", fleet="1, 1/2, 1/4", rounds=2)
    print(result)  # noqa: T201
    small = result.submodel(1 / 4)
    said = small(pixel_values=torch.zeros(1, 1, 8, 8)).logits
    assert said.shape == (1, 10)
    assert result.model is model
    table = capsys.readouterr().out
    assert table.startswith("| size | true fraction | parameters |")
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:5]] == ["1", "1/2", "1/4"]
    assert sum(parameter.numel() for parameter in small.parameters()) < 6450 / 4 + 1


def test_training_makes_the_model_better() -> None:
    data = load_data("digits", clients=10)
    model = trainable(RESNET, "image", 10, (1, 8, 8))
    local = Local(lr=1e-2, batch=20)
    result = train(model, data, method="fedavg", fleet="full", rounds=6, local=local, participation=Participation(clients=5))
    first, last = result.results.rounds[0].loss, result.results.rounds[-1].loss
    assert first is not None
    assert last is not None
    assert last < 0.6 * first
    assert result.results.evaluations[-1].sizes["1"].test["accuracy"] > 0.5


# -- submodels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["heterofl", "fedrolex", "raffm", "fiarse"])
@pytest.mark.parametrize("name", [VIT, RESNET])
def test_a_submodel_that_is_saved_and_loaded_says_the_same(method: str, name: str, tmp_path: Path) -> None:
    result = a_run(method, name)
    for size in (1.0, 0.25, 0.5):
        module = result.submodel(size)
        inputs = result.plan.task.batch(result.plan.data.dataset.test, torch.arange(6)).inputs
        save_submodel(module, tmp_path / f"{size}")
        again = load_submodel(tmp_path / f"{size}")
        with torch.no_grad():
            said, repeated = (each.eval()(**inputs) for each in (module, again))
        assert torch.equal(_logits(said), _logits(repeated))


def _logits(output: object) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits  # type: ignore[attr-defined]


def test_a_submodel_is_what_was_evaluated() -> None:
    result = a_run("raffm", RESNET)
    test = result.plan.data.dataset.test
    with torch.no_grad():
        said = result.submodel(0.25)(**result.plan.task.batch(test, torch.arange(24)).inputs)
    accuracy = float((_logits(said).argmax(1) == test.labels).double().mean())
    assert accuracy == pytest.approx(result.results.evaluations[-1].sizes["1/4"].test["accuracy"])


@pytest.mark.parametrize("size", [1.0, 0.25])
def test_a_submodel_has_memory_of_its_own(size: float) -> None:
    result = a_run("heterofl")
    before = {name: tensor.clone() for name, tensor in result.plan.server.tensors.items()}
    first, second = result.submodel(size), result.submodel(size)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.fill_(7.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in result.plan.server.tensors.items())
    assert all((parameter != 7).any() for parameter in second.parameters())
    assert not first.training


def test_a_way_of_serving_is_picked_by_its_name() -> None:
    result = a_run("fedrolex")
    assert result.submodel(0.25, "prefix")
    with pytest.raises(RunError, match=r"fedrolex serves nothing of size 0\.25 as 'sideways'"):
        result.submodel(0.25, "sideways")
    with pytest.raises(RunError, match=r"fedavg serves nothing of size 0\.25\."):
        a_run("fedavg").submodel(0.25)


@pytest.mark.parametrize(
    ("method", "size"),
    [*((method, size) for method in ("heterofl", "fedrolex", "fiarse") for size in (0, -1, 1.5)), ("raffm", 1.5)],
)
def test_a_size_that_is_no_part_of_a_model_is_refused(method: str, size: float) -> None:
    with pytest.raises(RaffmError):
        a_run(method).submodel(size)


# -- a folder ------------------------------------------------------------------------------------------------------


def test_a_run_with_a_folder_leaves_everything_there(tmp_path: Path) -> None:
    result = a_run.__wrapped__("fedrolex", folder=tmp_path / "run", settings={"note": "mine"})
    content = json.loads((tmp_path / "run" / "results.json").read_text())
    assert content["run"] == {"note": "mine"}
    assert {entry.name for entry in (tmp_path / "run" / "submodels").iterdir()} == {"1", "1_4-prefix"}
    assert (tmp_path / "run" / "report.html").is_file()
    with pytest.raises(CheckpointError, match="holds a run already"):
        a_run("fedrolex", folder=tmp_path / "run")
    again = a_run.__wrapped__("fedrolex", folder=tmp_path / "run", resume=True, settings={"note": "mine"})
    assert again.results.to_json() == result.results.to_json()


def test_the_pooled_backend_is_a_word() -> None:
    serial, pooled = a_run(), a_run(backend="pooled", workers=2)
    for name, tensor in serial.plan.server.tensors.items():
        torch.testing.assert_close(pooled.plan.server.tensors[name], tensor, rtol=0, atol=1e-6)
    assert pooled.submodel(0.25)


def test_the_backend_is_given_back_when_a_run_fails(tmp_path: Path) -> None:
    from simulate.test_pooled import children

    before = children()
    a_run(folder=tmp_path / "run")
    with pytest.raises(CheckpointError):
        a_run(folder=tmp_path / "run", backend="pooled", workers=2)
    assert children() - before == set()


# -- tasks of one's own --------------------------------------------------------------------------------------------


class Evenness:
    """Is a digit even? A task with a loss and metrics of its own, over the first two outputs."""

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.zeros((*shape, 0), dtype=torch.int64)

    def batch(self, examples: Examples, picks: Tensor, moves: Tensor | None = None) -> Batch:
        return Batch({"pixel_values": examples.inputs["pixel_values"][picks].float() / 255}, examples.labels[picks])

    def forward(self, module: nn.Module, batch: Batch) -> Tensor:
        return module(**batch.inputs).logits[:, 0]

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.softplus(-outputs * (1.0 - 2.0 * (labels % 2)))

    def metrics(self, outputs: Tensor, labels: Tensor) -> dict[str, float]:
        is_right = (outputs > 0) == (labels % 2 == 0)
        return {"sureness": float(outputs.abs().mean()), "agreement": float(is_right.double().mean())}


@pytest.mark.parametrize("method", ["fedavg", "raffm", "fiarse"])
def test_a_task_of_ones_own_brings_its_loss_and_its_metrics(method: str) -> None:
    result = a_run(method, task=Evenness(), evaluating=Evaluating(every=1))
    assert result.results.metric == "sureness"
    scores = result.results.evaluations[-1].sizes["1"]
    assert list(scores.test) == ["sureness", "agreement", "loss"]
    assert 0 <= scores.test["agreement"] <= 1
    assert "sureness" in str(result)


def test_texts_are_trained_like_images() -> None:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 30, (40, 12), generator=draw)
    lengths = torch.randint(3, 13, (40,), generator=draw)
    examples = Examples({"input_ids": ids, "lengths": lengths}, torch.randint(0, 2, (40,), generator=draw))
    dataset = Dataset("words", examples.take(torch.arange(30)), examples.take(torch.arange(30, 40)), ("no", "yes"))
    data = Federation(dataset, split(dataset, 3, "iid", 0))
    assert isinstance(task_for(data), TextClassification)
    model = trainable("bert:tiny", "text", 2)
    result = train(model, data, method="heterofl", fleet="1, 1/4", rounds=1, participation=Participation(clients=3))
    assert set(result.results.evaluations[-1].sizes) == {"1", "1/4"}


# -- wrong use -----------------------------------------------------------------------------------------------------


def test_wrong_words_are_refused_before_anything_happens() -> None:
    for how, words in (
        ({"method": "fedprox"}, "there is no method 'fedprox'"),
        ({"fleet": "halves"}, "there is no fleet 'halves'"),
        ({"fleet": "1, 1/4", "backend": "gpu"}, "there is no backend 'gpu'"),
        ({"rounds": 0}, "at least one round"),
        ({"fleet": "1, 1/4", "participation": Participation(clients=9)}, "asks 9 clients, but there are 4"),
    ):
        with pytest.raises(RunError, match=words):
            train(a_model(), federation(), **how)  # type: ignore[arg-type]


def test_labels_out_of_range_are_refused() -> None:
    examples = digits().train
    with pytest.raises(DataError, match="have the label 9, but there are 3 classes: labels go from 0 to 2"):
        Dataset("digits", examples, examples, ("a", "b", "c"))
    below = Examples(examples.inputs, examples.labels - 1)
    with pytest.raises(DataError, match="have the label -1"):
        Dataset("digits", below, examples, tuple("0123456789"))


def test_validation_labels_out_of_range_are_refused() -> None:
    examples = digits().train
    wrong = Examples(examples.inputs, examples.labels + 10)
    with pytest.raises(DataError, match="have the label"):
        Dataset("digits", examples, examples, tuple("0123456789"), wrong)


def test_a_model_whose_head_is_too_small_for_the_classes_is_refused() -> None:
    with pytest.raises(RaffmError):
        train(tiny("vit", num_channels=1), federation(), method="fedavg", fleet="full", rounds=1, participation=EVERYBODY)


def test_inputs_that_fit_no_task_are_refused() -> None:
    examples = Examples({"sound": torch.zeros(8, 3)}, torch.zeros(8, dtype=torch.int64))
    dataset = Dataset("noise", examples, examples, ("a", "b"))
    with pytest.raises(RunError, match="the inputs sound fit no task of ours"):
        task_for(Federation(dataset, split(dataset, 2, "iid", 0)))


def test_images_are_normalised_by_channel() -> None:
    assert task_for(federation()) == ImageClassification((0.5,), (0.5,))


@pytest.mark.parametrize("padding", [0, 7])
def test_a_model_learns_which_token_texts_are_padded_with(padding: int) -> None:
    """Classifiers that write look for it: a stock GPT-2 names none, and the wrong one would be read as text."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 7, (24,), generator=draw)
    ids = torch.randint(8, 50, (24, 6), generator=draw)
    ids = torch.where(torch.arange(6) < lengths[:, None], ids, padding)
    examples = Examples({"input_ids": ids, "lengths": lengths}, torch.randint(0, 2, (24,), generator=draw))
    dataset = Dataset("texts", examples, examples, ("no", "yes"), None, owners=None)
    model = trainable("gpt2:tiny", "text", 2, changes={"pad_token_id": None})
    data = Federation(dataset, split(dataset, 4, "iid", 0))
    found = train(model, data, method="heterofl", fleet="1, 1/4", rounds=1, local=Local(batch=3), participation=EVERYBODY)
    assert found.model.config.pad_token_id == padding
    task = TextClassification()
    alone = [task.forward(model, task.batch(examples, torch.tensor([place]))) for place in range(24)]
    together = task.forward(model, task.batch(examples, torch.arange(24)))
    torch.testing.assert_close(torch.cat(alone), together, rtol=1e-4, atol=1e-5)
