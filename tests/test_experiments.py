"""Experiments run from one command, tiny; the whole of each is run by `make test-all`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from experiments import missing
from experiments.nested.catalogue import FINER
from experiments.running import Runs, changed, found_in
from experiments.setting import RATES, base_of
from experiments.system_heterogeneity.catalogue import contents

import raffm
from raffm.data.rows import data_folder
from raffm.devices.balance import Widths
from raffm.models.labelled import Labelled
from raffm.models.load import trainable


def run(name: str, folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", f"experiments.{name}", "--scale", "smoke", "--runs", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_nested_is_compared_at_a_rate_that_held_out_examples_choose(tmp_path: Path) -> None:
    said = run("nested", tmp_path, "--what", "final", "compute", "report", "--methods", "nested", "heterofl")
    held_out = {line.partition(":")[0]: float(line.split()[1]) for line in said.splitlines() if line.startswith("rate-nested")}
    best = max(held_out, key=lambda name: held_out[name]).removeprefix("rate-nested-")
    result = json.loads((tmp_path / "results" / "nested-seed0.json").read_text())
    assert result["run"]["local"]["lr"] == float(best)
    assert result["data"]["validation"] == 0, "final runs train on everything"
    assert {"1", "1/4", "1 average", "1/4 average"} == {size["name"] for size in result["sizes"]}
    table = (tmp_path / "table.md").read_text()
    for words in ("| nested, seed 0 |", "| HeteroFL, 132 steps |", "Virtual hours", "nested against HeteroFL"):
        assert words in table
    assert (tmp_path / "by_round.png").stat().st_size > 10_000
    again = run("nested", tmp_path, "--what", "final", "--methods", "nested")
    assert "round 1/" not in again, "what is there is not run again"


def test_finer_shapes_of_the_small_resnet_are_balanced_by_two_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raffm.devices.balance.STEP", 2)
    model = {key: entry for key, entry in base_of("cpu")["model"].items() if key != "name"}
    widths = Widths(Labelled.of(trainable("resnet18", "image", 10, (3, 32, 32), changes=model)))
    shapes = widths.chain([None, widths.budget(1 / 4), widths.budget(1 / 16)])
    assert [list(shape) for shape in shapes[1:]] == list(FINER.values())


def test_a_run_that_was_found_with_other_settings_is_not_taken_for_this_one(tmp_path: Path) -> None:
    first, other = ({"rounds": rounds, "participation": {"clients": 2}} for rounds in (1, 2))
    runs = Runs(tmp_path / "runs", tmp_path / "results")
    found = runs.of("small", first)
    assert found["where"]["raffm"] == raffm.__version__
    assert runs.of("small", first) == found
    assert runs.of("small", {**first, "backend": {"name": "pooled"}}) == found, "where it runs makes no difference"
    with pytest.raises(SystemExit, match="other settings"):
        runs.of("small", other)
    borrowing = Runs(tmp_path / "elsewhere", tmp_path / "none", (tmp_path / "results",))
    assert borrowing.of("by another name", first) == found
    assert not (tmp_path / "elsewhere").exists()
    assert len(borrowing.of("longer", other)["rounds"]) == 2


def test_full_size_fedavg_is_the_same_on_every_fleet_and_raffm_where_all_devices_hold_everything(tmp_path: Path) -> None:
    said = run("system_heterogeneity", tmp_path)
    found = found_in(tmp_path / "results")
    reference = Runs(tmp_path / "fedavg", tmp_path / "fedavg").of(
        "fedavg", changed(contents("smoke", tmp_path)["xsmall"], {"method": {"name": "fedavg"}})
    )
    assert [entry["sizes"]["1"] for entry in found["xlarge"]["evaluations"]] == [
        entry["sizes"]["1"] for entry in reference["evaluations"]
    ]
    for ours, counted in zip(reference["rounds"], found["fedavg-xsmall"]["rounds"], strict=True):
        assert {key: ours[key] for key in counted} == counted
    assert "| xlarge |" in said
    assert (tmp_path / "by_time.png").stat().st_size > 10_000


def test_salient_parameters_first_only_rename_the_rows_of_a_whole_model(tmp_path: Path) -> None:
    run("salient_parameters", tmp_path, "--what", "table", "before", "report")
    found = found_in(tmp_path / "results")
    spp, original = (found[f"digits-{name}"]["evaluations"][-1]["sizes"]["1"]["test"] for name in ("spp", "original"))
    assert spp["loss"] == pytest.approx(original["loss"], abs=1e-4)
    assert len(found["sizes-before"]["with"]) == len(found["sizes-before"]["without"]) == 10
    assert (tmp_path / "by_size.png").stat().st_size > 5_000


def test_submodels_after_training_are_tested_without_further_training(tmp_path: Path) -> None:
    run("post_training", tmp_path, "--what", "vit", "half", "report")
    found = found_in(tmp_path / "results")
    assert len(found["vit"]["submodels"]) == 6
    least, most = found["vit"]["smallest"]["params"], found["vit"]["full"]["params"]
    assert all(least <= entry["params"] <= most for entry in found["vit"]["submodels"])
    flops = found["half"]["flops"]
    assert 0.4 < flops["half"] / flops["full"] < 0.6, "half of ViT-base takes half of the work, not a quarter"
    assert (tmp_path / "submodels.png").stat().st_size > 5_000


def test_a_part_of_the_table_of_fiarse_runs_with_its_habits(tmp_path: Path) -> None:
    said = run(
        "fiarse_table",
        tmp_path,
        "--what",
        "final",
        "habits",
        "published",
        "unseen",
        "report",
        "--methods",
        "fiarse",
        "pruning-greedy",
    )
    found = found_in(tmp_path / "results")
    rates = {name: found[f"{name}-seed0"]["run"]["local"]["lr"] for name in ("fiarse", "pruning-greedy")}
    assert rates["fiarse"] == rates["pruning-greedy"], "variants take FIARSE's rate"
    assert "rate-pruning-greedy-0.1" not in found
    every = found["published-fiarse"]["run"]
    assert every["data"]["parameters"]["tests"] == "unrelated"
    assert (every["evaluate"]["augmented"], every["evaluate"]["norms"]) == (True, "test-batches")
    assert every["local"]["shuffle"] is False
    assert {"1", "1/4", "1/8"} <= set(found["unseen-fiarse"]["sizes"])
    assert "| norms by test batches |" in said


def test_what_is_missing_is_what_was_asked_for_and_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Path(missing.HERE) / "nested" / "results"
    monkeypatch.setattr(missing, "HERE", tmp_path)
    every = missing.missing()
    assert {"nested-seed2", "ablation-spp", "texts-raffm"} <= set(every["nested"])
    assert {"fedrolex-seed0", "long-fiarse", "habit-order", "unseen-scalefl"} <= set(every["fiarse_table"])
    assert not {"nested-seed2", "fedavg-seed0"} & set(every["fiarse_table"]), "nested is asked for them"
    assert "nested-at0.1-seed0" not in every["nested"], "no other rate is known yet"
    (tmp_path / "nested" / "results").mkdir(parents=True)
    there = ("nested-seed2", *(f"rate-nested-{rate}" for rate in RATES))
    for name in there:
        (tmp_path / "nested" / "results" / f"{name}.json").symlink_to(results / f"{name}.json")
    left = missing.missing()
    assert set(every["nested"]) - set(left["nested"]) == set(there)
    assert set(left["nested"]) - set(every["nested"]) == {"nested-at0.1-seed0"}
    assert "habit-none" not in left["fiarse_table"], "FIARSE at the published rate is a run of nested"


@pytest.mark.slow
@pytest.mark.skipif(not (data_folder() / "sst2").is_dir(), reason="there is no sst2 in RAFFM_DATA")
def test_salient_parameters_are_compared_after_federated_training_too(tmp_path: Path) -> None:
    run("salient_parameters", tmp_path, "--what", "after", "random", "report")
    found = found_in(tmp_path / "results")
    shapes = [[entry["params"] for entry in found["random"][side]] for side in ("with", "without")]
    assert shapes[0] == shapes[1], "both checkpoints are cut to the same shapes"
    assert len(found["sizes-after"]["with"]) == 10
    for name in ("by_round", "random"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000


@pytest.mark.slow
def test_all_of_the_table_of_fiarse_runs(tmp_path: Path) -> None:
    run("fiarse_table", tmp_path)
    names = {path.stem for path in (tmp_path / "results").glob("*.json")}
    assert {"long-nested", "cifar100-scalefl", "published-heterofl", "unseen-fedrolex", "habit-order"} <= names


@pytest.mark.slow
def test_all_of_nested_runs(tmp_path: Path) -> None:
    run("nested", tmp_path)
    names = {path.stem for path in (tmp_path / "results").glob("*.json")}
    assert {"nested-bound", "heterofl-longer", "ablation-one", "cifar100-nested", "vit-raffm"} <= names
