"""`raffm train` and `raffm evaluate`: what they print, and how they say no."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import Ran, raffm, trained
from raffm.rounds import checkpoint

QUICKEST = ("--rounds=2", "--set=evaluate.every=1")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Asking a hub that cannot be reached takes many seconds; the cache goes where tests may write."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("RAFFM_CACHE", str(tmp_path_factory.getbasetemp() / "raffm-cache"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a trained run."""
    folder = tmp_path_factory.mktemp("runs") / "latest"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAFFM_CACHE", str(tmp_path_factory.getbasetemp() / "raffm-cache"))
        ran = trained(folder, *QUICKEST)
    assert ran.returncode == 0, ran.stderr
    (folder / "said.txt").write_text(ran.stdout + "\n---\n" + ran.stderr)
    yield folder


# -- what a run leaves ---------------------------------------------------------------------------------------------


def test_a_run_says_what_it_does_and_where_things_are(run: Path) -> None:
    said = (run / "said.txt").read_text()
    assert said.startswith(
        "heterofl: ViTForImageClassification on digits, 1,293 examples of 20 clients (iid), 2 a round, 2 rounds, seed 0\n"
    )
    assert re.search(r"round 2/2  loss \d\.\d+  accuracy: 1 .* %  1/4 .* %", said)
    assert f"report      {run / 'report.html'}" in said
    assert f"submodels   {run / 'submodels'}" in said


def test_a_run_leaves_a_checkpoint_results_a_report_and_submodels(run: Path) -> None:
    left = {entry.name for entry in run.iterdir()}
    assert {"checkpoint", "results.json", "metrics.csv", "metrics.md", "report.html", "submodels", "tensorboard"} <= left
    assert {entry.name for entry in (run / "submodels").iterdir()} == {"1", "1_4"}
    content = json.loads((run / "results.json").read_text())
    assert len(content["rounds"]) == len(content["evaluations"]) == 2
    assert content["run"]["method"] == {"name": "heterofl"}
    assert content["run"]["data"]["clients"] == 20


def test_submodels_that_were_saved_can_be_run(run: Path) -> None:
    import torch

    from raffm import load_submodel

    for name in ("1", "1_4"):
        module = load_submodel(run / "submodels" / name)
        assert module(pixel_values=torch.zeros(2, 1, 8, 8)).logits.shape == (2, 10)


def test_flags_win_over_the_file_and_set_reaches_every_setting(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'method = "fedavg"\nrounds = 50\n[model]\nname = "vit:tiny"\n[data]\nclients = 10\n[participation]\nclients = 2\n'
        "[fleet]\ntiers = [{ size = 1, share = 1 }, { size = 0.25, share = 3, speed = 1e9, max_params = 2000 }]\n"
    )
    words = ["--rounds=1", "--method=raffm", "--set=local.steps=1", "--set=local.optimizer=sgd", "--no-tensorboard"]
    ran = raffm("train", file, *words, f"--folder={tmp_path / 'run'}")
    assert ran.returncode == 0, ran.stderr
    content = json.loads((tmp_path / "run" / "results.json").read_text())
    assert content["method"] == "raffm"
    assert len(content["rounds"]) == 1
    assert content["run"]["local"]["steps"] == 1
    assert content["run"]["local"]["optimizer"] == "sgd"
    assert content["data"]["clients"] == 10
    assert not (tmp_path / "run" / "tensorboard").exists()
    again = raffm("evaluate", tmp_path / "run", "--json")
    assert again.returncode == 0, again.stderr
    assert_last_numbers(json.loads(again.stdout), content)


# -- evaluate ------------------------------------------------------------------------------------------------------


def assert_last_numbers(evaluation: dict, results: dict) -> None:  # type: ignore[type-arg]
    last = results["evaluations"][-1]
    assert evaluation["round"] == last["round"]
    assert evaluation["sizes"] == last["sizes"]


def test_evaluate_gives_the_last_numbers_of_the_run(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    ran = raffm("evaluate", run, "--json")
    assert ran.returncode == 0, ran.stderr
    results = json.loads((run / "results.json").read_text())
    assert_last_numbers(json.loads(ran.stdout), results)
    table = raffm("evaluate", run)
    lines = table.stdout.splitlines()
    assert lines[0].split("  ")[0] == "size"
    assert "test accuracy" in lines[0]
    for line, (name, scores) in zip(lines[1:], results["evaluations"][-1]["sizes"].items(), strict=True):
        assert line.startswith(f"{name} ")
        assert f"{scores['test']['accuracy'] * 100:.3g} %" in line
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before, "nothing changes"


def test_evaluate_compares_submodels_with_and_without_salient_parameters(run: Path, tmp_path: Path) -> None:
    ran = raffm("evaluate", run, "--sizes", "1, 1/2", "--spp", "l2_norm", "--plot", tmp_path / "sizes.png", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert list(found["sizes"]) == ["1", "1/2", "1/2 with SPP", "1/2 without SPP"]
    assert found["costs"]["1/2 with SPP"] == found["costs"]["1/2 without SPP"]
    assert found["costs"]["1/2 with SPP"]["params"] < found["costs"]["1"]["params"]
    assert all(0 < timing["low"] <= timing["median"] <= timing["high"] for timing in found["latency"].values())
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")
    table = raffm("evaluate", run, "--no-time").stdout
    assert "f1_macro" in table
    assert "ms here" not in table
    refused = raffm("evaluate", run, "--spp", "loud", "--no-time")
    assert refused.returncode == 2
    assert "there is no metric 'loud'" in refused.stderr


def test_evaluate_gives_sizes_that_the_run_never_saw(run: Path) -> None:
    ran = raffm("evaluate", run, "--sizes", "1/2, 1/16", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)["sizes"]
    assert list(found) == ["1", "1/2", "1/16"]
    assert found["1"] == json.loads((run / "results.json").read_text())["evaluations"][-1]["sizes"]["1"]


def test_evaluate_of_batch_norms_gives_the_last_numbers(tmp_path: Path) -> None:
    words = ("--rounds=1", "--model=raffm_resnet:tiny", "--fleet=1/16", "--no-tensorboard", "--set=local.steps=1")
    ran = trained(tmp_path / "run", *words)
    assert ran.returncode == 0, ran.stderr
    again = raffm("evaluate", tmp_path / "run", "--json")
    assert_last_numbers(json.loads(again.stdout), json.loads((tmp_path / "run" / "results.json").read_text()))


@pytest.mark.parametrize("method", ["scalefl", "heterofl"])
def test_texts_are_trained_and_evaluated_from_the_command_line(method: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "good": 2, "bad": 3, "film": 4}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]").save_pretrained(tmp_path / "words")
    rows = [f"{word} film,{label}" for word, label in (("good", 1), ("bad", 0))] * 60
    (tmp_path / "films.csv").write_text("\n".join(["text,label", *rows]))
    words = ["--model=bert:tiny", f"--method={method}", f"--data={tmp_path / 'films.csv'}", "--fleet=1, 1/4", "--rounds=2"]
    words += [f"--set=data.tokenizer={tmp_path / 'words'}", "--clients=6", "--set=participation.clients=3", "--lr=0.01"]
    ran = raffm("train", *words, f"--folder={tmp_path / 'run'}", "--no-tensorboard")
    assert ran.returncode == 0, ran.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [size["name"] for size in results["sizes"]] == ["1", "1/4"]
    assert raffm("evaluate", tmp_path / "run").returncode == 0
    if method == "heterofl":
        exported = raffm("export", tmp_path / "run", "--size=1/4", "--no-time", f"--out={tmp_path / 'out'}")
        assert exported.returncode == 0, exported.stderr
        assert AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")("bad film")["input_ids"] == [3, 4]


def test_tests_as_published_are_marked_everywhere(tmp_path: Path) -> None:
    """Also where a client's last batch has one example, and maps are one pixel."""
    words = ["--model=resnet18", "--set=model.widths=[8,8,8,8]", "--set=model.depths=[1,1,1,1]", "--method=fiarse"]
    words += ["--clients=30", "--set=local.batch=11", "--rounds=1", "--as-published", "--set=participation.clients=2"]
    ran = raffm("train", *words, "--fleet=1, 1/4", f"--folder={tmp_path / 'run'}", "--no-tensorboard")
    assert ran.returncode == 0, ran.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["run"]["data"]["split"] == "dirichlet-balanced"
    assert results["run"]["data"]["parameters"] == {"alpha": 0.3, "tests": "unrelated"}
    assert results["run"]["evaluate"]["norms"] == "test-batches"
    assert results["run"]["evaluate"]["augmented"] is True
    assert results["run"]["local"]["shuffle"] is False
    for name in ("report.html", "metrics.md"):
        said = (tmp_path / "run" / name).read_text().replace("&#x27;", "'")
        assert "As published: a client's test examples are unrelated" in said
        assert "clients train in one order of examples" in said


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        assert_refused(raffm("evaluate", place), "there is no folder")
    (tmp_path / "checkpoint").mkdir()
    assert_refused(raffm("evaluate", tmp_path), "has no run.json. Was it written by raffm?")


def test_sizes_that_make_no_sense_are_refused(run: Path) -> None:
    assert_refused(raffm("evaluate", run, "--sizes", "many"), "there is no fleet 'many'")
    assert_refused(raffm("evaluate", run, "--sizes", "2"), "at most 1")


# -- wrong use -----------------------------------------------------------------------------------------------------


def assert_refused(ran: Ran, expected: str) -> None:
    """Exit 2, one message that says this, no traceback."""
    assert ran.returncode == 2, ran
    assert expected in ran.stderr, ran.stderr
    assert "Traceback" not in ran.stderr + ran.stdout
    assert len(re.findall(r"^\w*Error: ", ran.stderr, re.M)) == 1


def wrongly(tmp_path: Path, *words: object, **files: str) -> Ran:
    """What a wrong command says; it must leave no folder."""
    for name, content in files.items():
        (tmp_path / f"{name}.toml").write_text(content)
        words = (tmp_path / f"{name}.toml", *words)
    ran = trained(tmp_path / "run", "--rounds=1", *words)
    assert not (tmp_path / "run").exists()
    return ran


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--method=fedprox"], "there is no method 'fedprox'. The methods are: fedavg, fedavg-capable, "),
        (["--data=nowhere-at-all"], "nowhere-at-all"),
        (["--split=random"], "there is no split 'random'. There are: iid, "),
        (["--split=dirichlet"], "the split 'dirichlet' needs the parameter 'alpha'"),
        (["--fleet=halves"], "there is no fleet 'halves'"),
        (["--backend=gpu"], "there is no backend 'gpu'. The backends are: "),
        (["--model=nothing:tiny"], "no layout for model type 'nothing'"),
        (["--model=nowhere/at-all"], "nowhere/at-all"),
        (["--set=model.table=missing.toml"], "missing.toml"),
        (["--set=local.batch=1.5"], "`local.batch` is 1.5, which is not a whole number"),
        (["--set=local.batch=many"], "`local.batch` is 'many', which is not a whole number"),
        (["--set=local.lr=true"], "`local.lr` is True, which is not a number"),
        (["--set=merging.strict=1"], "`merging.strict` is 1, which is not true or false"),
        (["--set=method.metric=3", "--method=raffm"], "which is not a text"),
        (["--set=method.name=raffm", "--set=method.metrik=l1_norm"], "raffm has no switch 'metrik'; it has metric, "),
        (["--clients=5000"], "more clients than samples: 5000 clients, 1293 training examples"),
        (["--split=shards", "--set=data.classes_per_client=1", "--clients=1290"], "would have no training data"),
        (["--fleet=1, 0.000001", "--method=raffm"], "even the smallest submodel of the space has"),
        (["--rounds=0"], "a run needs at least one round, but was given 0"),
        (["--set=local.epochs"], "--set takes key=value, as in --set local.epochs=3, but was given 'local.epochs'"),
        (["--set=local.epoch=3"], "[local] has the unknown key 'epoch'. Did you mean 'epochs'?"),
        (["--set=locale.epochs=3"], "the run has the unknown key 'locale'. Did you mean 'local'?"),
        (["--set=local.lr=-1"], "local lr must be above 0"),
        (["--set=participation.clients=500"], "a round asks 500 clients, but there are 20"),
        (["--set=data.validation=2"], "the validation share is 2.0"),
        (["--set=data.image_size=-3"], "image_size is -3"),
        (["--as-published", "--split=iid"], "with the split dirichlet-balanced, but this run has 'iid'"),
        (["--method=scalefl", "--set=method.exits=0"], "scalefl needs at least 1 exit and 0 convolutions, not 0 and 3"),
        (["--method=scalefl", "--set=method.temperature=inf"], "both finite, not 0.05 and inf"),
        (["--method=scalefl", "--model=gpt2:tiny"], "gpt2"),
        (["--set=backend.precision=float16", "--backend=captured"], "backend.precision"),
        (["--set=backend.lanes=-1"], "there cannot be -1 lanes"),
    ],
)
def test_wrong_settings_give_one_message_and_exit_2(words: list[str], expected: str, tmp_path: Path) -> None:
    assert_refused(wrongly(tmp_path, *words), expected)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("rounds = [", "is not valid TOML"),
        ("[local]\nepoch = 3", "[local] has the unknown key 'epoch'. Did you mean 'epochs'?"),
        ("round = 3", "the run has the unknown key 'round'. Did you mean 'rounds'?"),
        ("[locall]\nlr = 3", "the run has the unknown key 'locall'. Did you mean 'local'?"),
        ("data = 3", "data"),
        ("method = 3", "`method` is a name"),
    ],
)
def test_a_wrong_file_gives_one_message_and_exit_2(content: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text(content)
    ran = raffm("train", tmp_path / "wrong.toml", f"--folder={tmp_path / 'run'}")
    assert_refused(ran, expected)
    assert not (tmp_path / "run").exists()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert_refused(wrongly(tmp_path, tmp_path / "none.toml"), "none.toml")


def test_a_file_that_is_no_text_gives_one_message_and_exit_2(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'method = "\xe9"')
    assert_refused(wrongly(tmp_path, tmp_path / "latin.toml"), "latin.toml")


@pytest.mark.parametrize(
    "words",
    [
        ["--set=evaluate.sizes=0.5"],
        ["--set=evaluate.sizes=['x']"],
        ["--set=local.milestones=5"],
        ["--set=local.betas=0.9"],
        ["--set=local.betas=[0.9]"],
        ["--set=data.mean=[0.5, 0.5]"],
        ["--set=data.parameters=abc"],
        ["--set=data.alpha=abc", "--split=dirichlet"],
    ],
)
def test_a_list_or_table_of_the_wrong_kind_gives_one_message_and_exit_2(words: list[str], tmp_path: Path) -> None:
    assert_refused(wrongly(tmp_path, *words), "Error")


@pytest.mark.parametrize(
    "words",
    [
        ["--set=save.every=0"],
        ["--set=backend.workers=-1", "--backend=pooled"],
        ["--set=local.momentum=-1", "--set=local.optimizer=sgd"],
        ["--set=data.crop=-2"],
        ["--fleet=1:inf"],
        ["--set=model.hidden_size=banana"],
        ["--model=raffm_resnet:tiny", "--set=model.norn=group"],
    ],
)
def test_a_number_that_makes_no_sense_gives_one_message_and_exit_2(words: list[str], tmp_path: Path) -> None:
    assert_refused(wrongly(tmp_path, *words), "Error")


def test_labels_beyond_the_classes_are_refused(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    features = {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    table = pyarrow.table({"image": [{"bytes": b"", "path": ""}] * 30, "label": [0, 1, 5] * 10})
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    parquet.write_table(table.replace_schema_metadata(about), tmp_path / "train.parquet")
    ran = wrongly(tmp_path, f"--data={tmp_path / 'train.parquet'}")
    assert_refused(ran, "have the label 5, but there are 2 classes: labels go from 0 to 1")


def test_the_sizes_of_a_csv_without_enough_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "few.csv").write_text("image,label\na.png,1\n")
    ran = wrongly(tmp_path, f"--data={tmp_path / 'few.csv'}")
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr


def test_a_strict_run_stops_at_a_refused_update_and_says_who(tmp_path: Path) -> None:
    ran = trained(tmp_path / "run", "--rounds=2", "--strict", "--set=merging.max_norm=1e-9", "--no-tensorboard")
    assert_refused(ran, "UpdateError: client ")
    assert not checkpoint.exists(tmp_path / "run" / "checkpoint")


def test_refused_updates_are_told_while_the_run_goes_on(tmp_path: Path) -> None:
    words = ("--rounds=1", "--set=merging.max_norm=1e-9", "--no-tensorboard", "--set=local.steps=1")
    ran = trained(tmp_path / "run", *words)
    assert ran.returncode == 0
    assert ran.stderr.count("an update was refused: client ") == 2


# -- help ----------------------------------------------------------------------------------------------------------


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (
            "train",
            "--method --model --data --split --clients --fleet --rounds --lr --seed --backend --set --folder --resume --strict",
        ),
        ("evaluate", "--sizes --json"),
    ],
)
def test_help_lists_the_flags_in_plain_words(command: str, flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    ran = raffm(command, "--help")
    assert ran.returncode == 0
    said = plain(ran.stdout)
    for flag in flags.split():
        (line,) = [line for line in said.splitlines() if re.search(rf"{flag}\b", line) and "Usage" not in line][:1]
        words = re.sub(r"[│|]|--\S+|[A-Z]{3,}", " ", line).split()
        assert len(words) >= 3, line
