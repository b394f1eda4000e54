"""One TOML file a run: what is read, what is refused, and what it becomes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from raffm.cli.train import merged
from raffm.devices.budget import Budget
from raffm.devices.fleet import Fleet, Tier
from raffm.errors import RaffmError, RunError
from raffm.methods import METHODS
from raffm.methods.raffm import RaFFM
from raffm.prepare import fleet_from, method_from, plan_of
from raffm.rounds.local import Local
from raffm.settings import FleetSettings, Settings, read_file, read_settings

EVERYTHING = """
rounds = 7
seed = 3
[method]
name = "raffm"
metric = "l2_norm"
[model]
name = "resnet18"
norm = "group"
widths = [8, 16]
[data]
source = "cifar10"
split = "dirichlet-balanced"
alpha = 0.3
clients = 50
mean = [0.4, 0.4, 0.4]
flip = false
[fleet]
tiers = [{ size = 1, share = 1 }, { size = 0.25, share = 3, speed = 1e9, max_params = 2000 }]
redraw = true
[local]
optimizer = "sgd"
lr = 1
milestones = [10, 20]
betas = [0.8, 0.9]
[participation]
clients = 0.2
by = "data"
[merging]
optimizer = "adam"
strict = true
[evaluate]
every = 2
sizes = [1, 0.25]
[backend]
name = "pooled"
workers = 2
[save]
every = 5
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAFFM_CACHE", str(tmp_path_factory.getbasetemp() / "raffm-cache"))


def test_everything_that_can_be_set_is_read() -> None:
    found = read_settings(tomllib.loads(EVERYTHING))
    assert (found.rounds, found.seed, found.save.every) == (7, 3, 5)
    assert found.method == {"name": "raffm", "metric": "l2_norm"}
    assert found.model.config == {"norm": "group", "widths": [8, 16]}
    assert found.data.parameters == {"alpha": 0.3}
    assert found.data.mean == (0.4, 0.4, 0.4)
    assert found.data.flip is False
    assert found.local == Local(optimizer="sgd", lr=1.0, milestones=(10, 20), betas=(0.8, 0.9))
    assert isinstance(found.local.lr, float)
    assert found.evaluate.sizes == (1, 0.25)
    assert found.backend.workers == 2


@pytest.mark.parametrize("content", ["", EVERYTHING, 'method = "fiarse"', '[fleet]\ntiers = "quarters"'])
def test_settings_survive_json(content: str) -> None:
    found = read_settings(tomllib.loads(content))
    again = read_settings(json.loads(json.dumps(found.to_json())))
    assert again == found


def test_an_empty_file_is_the_default_run() -> None:
    assert read_settings({}) == Settings()


def test_tiers_become_a_fleet() -> None:
    settings = read_settings(tomllib.loads(EVERYTHING))
    expected = (Tier(1, 1), Tier(0.25, 3, speed=1e9, budget=Budget(max_params=2000)))
    assert fleet_from(settings.fleet) == Fleet(expected, redraw=True)
    assert fleet_from(FleetSettings("1, 1/4")) == Fleet((Tier(1.0), Tier(0.25)))


def test_a_method_gets_its_switches() -> None:
    assert method_from({"name": "raffm", "metric": "l2_norm"}) == RaFFM(metric="l2_norm")
    for name in METHODS:
        assert method_from({"name": name}).name == name


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("rund = 3", "the run has the unknown key 'rund'"),
        ("rounds = 1.5", "`rounds` is 1.5, which is not a whole number"),
        ("rounds = true", "`rounds` is True"),
        ('seed = "one"', "`seed` is 'one'"),
        ("local = 3", "`local` is a table of settings, but was given 3"),
        ("[local]\nepoch = 1", r"\[local\] has the unknown key 'epoch'. Did you mean 'epochs'\?"),
        ("[local]\nxyz = 1", "There are: optimizer, lr, "),
        ('[local]\nlr = "fast"', "`local.lr` is 'fast', which is not a number"),
        ("[local]\noptimizer = 3", "`local.optimizer` is 3, which is not a text"),
        ("[data]\nalfa = 1", r"\[data\] has the unknown key 'alfa'"),
        ("[data]\nflip = 1", "`data.flip` is 1, which is not true or false"),
        ("[fleet]\ntiers = 3", "`fleet.tiers` is 3"),
        ("method = 3", "`method` is a name, or a table"),
        ("[method]\nmetric = 3", "`method` is a name, or a table"),
        ("[merging]\nstrict = 1", "`merging.strict` is 1, which is not true or false"),
        ("[backend]\nworkers = 1.5", "`backend.workers` is 1.5"),
    ],
)
def test_what_makes_no_sense_is_refused_in_plain_words(content: str, words: str) -> None:
    with pytest.raises(RunError, match=words):
        read_settings(tomllib.loads(content))


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        ("[3]", "a list, each entry of it a table"),
        ("[{ share = 3 }]", "needs a `size`"),
        ("[{ size = 0.5, sped = 3 }]", "has the unknown key 'sped'. Did you mean 'speed'"),
        ("[{ size = 2 }]", "above 0 and at most 1"),
        ("[]", "at least one tier"),
    ],
)
def test_tiers_that_make_no_sense_are_refused(tiers: str, words: str) -> None:
    with pytest.raises(RunError, match=words):
        fleet_from(read_settings(tomllib.loads(f"[fleet]\ntiers = {tiers}")).fleet)


@pytest.mark.parametrize("tiers", ['[{ size = "big" }]', '[{ size = 0.5, share = "many" }]', "[{ size = 0.5, max_foo = 3 }]"])
def test_tiers_with_values_of_the_wrong_kind_are_refused(tiers: str) -> None:
    settings = read_settings(tomllib.loads(f"[fleet]\ntiers = {tiers}"))
    with pytest.raises(RaffmError):
        fleet_from(settings.fleet)


@pytest.mark.parametrize(
    "content",
    [
        "[local]\nmilestones = 5",
        "[local]\nbetas = 0.9",
        '[local]\nmilestones = ["x"]',
        "[local]\nbetas = [0.9]",
        "[data]\nmean = 0.5",
        '[data]\nmean = ["x"]',
        '[data]\nparameters = "abc"',
        "[evaluate]\nsizes = 0.5",
    ],
)
def test_lists_and_tables_of_the_wrong_kind_are_refused(content: str) -> None:
    with pytest.raises(RunError):
        read_settings(tomllib.loads(content))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no file"):
        read_file(tmp_path / "none.toml")
    (tmp_path / "damaged.toml").write_text("rounds = [")
    with pytest.raises(RunError, match="is not valid TOML"):
        read_file(tmp_path / "damaged.toml")
    (tmp_path / "good.toml").write_text("rounds = 3")
    assert read_file(tmp_path / "good.toml") == {"rounds": 3}


# -- flags over files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "flags", "assignments", "expected"),
    [
        ({"rounds": 3}, {"rounds": 5}, [], {"rounds": 5}),
        ({"local": {"lr": 1, "batch": 2}}, {"local.lr": 3}, [], {"local": {"lr": 3, "batch": 2}}),
        ({}, {}, ["local.epochs=3", "method = fiarse"], {"local": {"epochs": 3}, "method": "fiarse"}),
        (
            {},
            {},
            ["evaluate.sizes=[1, 0.5]", "merging.strict=true"],
            {"evaluate": {"sizes": [1, 0.5]}, "merging": {"strict": True}},
        ),
        ({}, {}, ["fleet.tiers=1, 1/4"], {"fleet": {"tiers": "1, 1/4"}}),
        ({"method": "raffm"}, {}, ["method.metric=l2_norm"], {"method": {"name": "raffm", "metric": "l2_norm"}}),
    ],
)
def test_flags_win_over_a_file(
    content: dict[str, Any], flags: dict[str, Any], assignments: list[str], expected: dict[str, Any]
) -> None:
    before = json.dumps(content)
    assert merged(content, flags, assignments) == expected
    assert json.dumps(content) == before, "the file's content stays as it is"


# -- plans ---------------------------------------------------------------------------------------------------------


def test_settings_become_a_plan() -> None:
    content = '[model]\nname = "vit:tiny"\nintermediate_size = 16\n[data]\nclients = 5\n[local]\nsteps = 3'
    made = plan_of(read_settings({**tomllib.loads(content), "rounds": 3, "seed": 4, "method": "heterofl"}))
    assert (made.rounds, made.seed, made.method.name, made.local.steps) == (3, 4, "heterofl", 3)
    assert made.data.clients == 5
    assert made.server.model.config.intermediate_size == 16  # type: ignore[union-attr]
    assert made.server.model.config.num_labels == 10  # type: ignore[union-attr]
    assert made.data.dataset.validation is not None


def test_the_same_settings_make_the_same_plan_and_another_seed_another() -> None:
    content = {"model": {"name": "vit:tiny"}, "data": {"clients": 5}}
    plans = [plan_of(read_settings({**content, "seed": seed})) for seed in (0, 0, 1)]
    weights = [next(made.server.model.parameters()).detach().tolist() for made in plans]
    parts = [made.data.split.train.indices.tolist() for made in plans]
    assert weights[0] == weights[1] != weights[2]
    assert parts[0] == parts[1] != parts[2]


def test_a_tier_may_be_a_device_that_is_known_by_name() -> None:
    fleet = fleet_from(FleetSettings(tiers=({"device": "pi4", "share": 80}, {"device": "v100", "size": 0.5, "power": 200})))
    assert [tier.name for tier in fleet.tiers] == ["Raspberry Pi 4", "Tesla V100"]
    assert [(tier.size, tier.share, tier.power) for tier in fleet.tiers] == [(0.25, 80, 7.0), (0.5, 1, 200)]
    with pytest.raises(RunError, match="there is no device 'pi'"):
        fleet_from(FleetSettings(tiers=({"device": "pi"},)))
