"""The server's average: the weighted mean of all models so far, kept beside the last one and served in its place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from commands import QUICK, raffm
from raffm.errors import RunError
from raffm.prepare import reopened
from raffm.rounds import checkpoint
from raffm.rounds.average import Average
from raffm.rounds.backend import Serial
from raffm.rounds.evaluate import evaluate
from raffm.rounds.loop import Keeping, train
from raffm.rounds.plan import Evaluating, Merging, Plan
from rounds.made import RESNET
from rounds.made import plan as made

METHODS = ("fedavg", "heterofl", "fiarse", "raffm")


def plan_of(method: str = "heterofl", rounds: int = 3, average: float | None = 0.5) -> Plan:
    return replace(made(method), rounds=rounds, merging=Merging(average=average), evaluating=Evaluating(every=1))


def models(plan: Plan) -> list[dict[str, torch.Tensor]]:
    """The server after every round."""
    found = []
    for rounds in range(1, plan.rounds + 1):
        own = plan_of(plan.method.name, rounds, average=0.0)
        train(own, Serial(own))
        found.append({name: tensor.detach().clone() for name, tensor in own.server.tensors.items()})
    return found


@given(st.floats(0.01, 0.99), st.integers(1, 6), st.integers(0, 9))
def test_the_average_is_the_weighted_mean_of_all_models_so_far(decay: float, rounds: int, seed: int) -> None:
    plan = plan_of()
    draw = torch.Generator().manual_seed(seed)
    average, name = Average(decay), plan.server.layout.tensors("parameter")[0]
    seen = []
    for done in range(1, rounds + 1):
        with torch.no_grad():
            plan.server.tensors[name].normal_(generator=draw)
        seen.append(plan.server.tensors[name].detach().double().clone())
        average.note(plan.server, done)
    weights = [decay ** (rounds - place) for place in range(1, rounds + 1)]
    expected = sum(weight * tensor for weight, tensor in zip(weights, seen, strict=True)) / sum(weights)  # type: ignore[operator]
    torch.testing.assert_close(average.tensors[name].double(), expected, atol=1e-6, rtol=1e-5)
    assert average.tensors[name].dtype == torch.float32


def test_a_run_ends_with_the_average_of_its_models_and_trains_as_without() -> None:
    plan = plan_of()
    train(plan, Serial(plan))
    one, two, three = models(plan)
    for name in plan.server.layout.tensors("parameter"):
        expected = (0.25 * one[name] + 0.5 * two[name] + three[name]) / 1.75
        torch.testing.assert_close(plan.server.tensors[name].detach(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_both_models_are_evaluated_and_the_last_ones_scores_are_those_of_a_run_without(method: str) -> None:
    plan, plain = plan_of(method), plan_of(method, average=0.0)
    results, expected = train(plan, Serial(plan)), train(plain, Serial(plain))
    assert [size.name for size in results.sizes] == [
        *(size.name for size in expected.sizes),
        *(f"{size.name} average" for size in expected.sizes),
    ]
    for found, alone in zip(results.evaluations, expected.evaluations, strict=True):
        assert {name: found.sizes[name] for name in alone.sizes} == dict(alone.sizes)
        assert set(found.sizes) == {size.name for size in results.sizes}
    first = results.evaluations[0].sizes
    assert all(first[f"{size.name} average"] == first[size.name] for size in expected.sizes), "after one round they are one"


@pytest.mark.parametrize("method", ["fiarse", "heterofl", "nested"])
def test_thresholds_and_statistics_are_those_of_the_averaged_weights(method: str) -> None:
    """The average's scores are those of its weights opened in a run of their own, which knows of no other model."""
    plan, alone = (replace(made(method, model=RESNET), merging=Merging(average=decay)) for decay in (0.5, 0.0))
    plan = replace(plan, rounds=3)
    results = train(plan, Serial(plan))
    with torch.no_grad():
        for name in plan.server.layout.tensors("parameter"):
            alone.server.tensors[name].copy_(plan.server.tensors[name])
    expected = evaluate(alone, Serial(alone), plan.rounds)[0].sizes
    found = results.evaluations[-1].sizes
    assert {name: found[f"{name} average"] for name in expected} == dict(expected)
    assert all(found[name] != scores for name, scores in expected.items()), "the last model is another one"


def test_a_resumed_run_keeps_its_average_bit_for_bit(tmp_path: Path) -> None:
    whole = plan_of(rounds=4)
    train(whole, Serial(whole), Keeping(tmp_path / "whole"))
    for rounds in (2, 4):
        part = plan_of(rounds=rounds)
        train(part, Serial(part), Keeping(tmp_path / "parts", resume=rounds > 2))
    first, second = (checkpoint.load(tmp_path / name, None) for name in ("whole", "parts"))
    assert first.average.keys() == second.average.keys() != set()
    assert all(torch.equal(first.average[name], second.average[name]) for name in first.average)
    assert all(torch.equal(first.server[name], second.server[name]) for name in first.server)
    assert not all(torch.equal(first.server[name], first.average[name]) for name in first.server)
    assert first.results.evaluations == second.results.evaluations


def test_weights_of_an_average_lie_from_0_to_below_1() -> None:
    with pytest.raises(RunError, match="below 1"):
        Merging(average=1.0)


def test_what_is_opened_exported_and_searched_is_the_average_or_the_last_model(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = raffm("train", *QUICK, "--set", "merging.average=0.9", "--no-tensorboard", "--folder", folder)
    assert said.returncode == 0, said.stderr
    saved = checkpoint.load(folder / "checkpoint", None)
    (average, _), (last, _) = reopened(folder), reopened(folder, is_last=True)
    for name in average.server.layout.tensors("parameter"):
        assert torch.equal(average.server.tensors[name], saved.average[name])
        assert torch.equal(last.server.tensors[name], saved.server[name])
    scores = json.loads((folder / "results.json").read_text())["evaluations"][-1]["sizes"]
    assert not torch.equal(saved.average["classifier.weight"], saved.server["classifier.weight"])
    for option, name in (([], "1 average"), (["--last"], "1")):
        found = raffm("evaluate", folder, "--json", "--no-time", *option)
        assert found.returncode == 0, found.stderr
        assert scores[name]["test"]["accuracy"] == pytest.approx(
            json.loads(found.stdout)["sizes"]["1"]["test"]["accuracy"], abs=1e-6
        )

    for option, expected in ((["--last"], last), ([], average)):
        written = tmp_path / f"export{len(option)}"
        said = raffm("export", folder, "--format", "stock", "--no-time", "--out", written, *option)
        assert said.returncode == 0, said.stderr
        tensors = load_file(written / "model.safetensors")
        assert torch.equal(tensors["classifier.weight"], expected.server.tensors["classifier.weight"])
    searches = ["search", folder, "--max-params", "10k", "--evaluations", "4", "--finalists", "1", "--workers", "1"]
    assert raffm(*searches, "--last").returncode == 0
    refused = raffm(*searches)
    assert refused.returncode != 0
    assert "weights differ" in refused.stderr, "the average is not what was searched"
