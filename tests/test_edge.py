"""From a run's TOML file to nodes and a server, without a network; and the folder that `raffm edge init` writes."""

from __future__ import annotations

import json
import os
import stat
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from commands import raffm
from raffm.algebra.selection import Selection
from raffm.data.examples import Dataset, Examples
from raffm.deploy.folder import package_of, write_app
from raffm.deploy.ledger import Known, refuse_classes
from raffm.deploy.statement import Device
from raffm.devices.budget import Budget
from raffm.edge import Office, own_device, own_examples, relabelled
from raffm.errors import RunError
from raffm.prepare import data_of
from raffm.settings import Settings, read_settings


def settings(**changes: object) -> Settings:
    model = {"name": "resnet18", "norm": "group", "widths": [32, 64], "depths": [1, 1]}
    return read_settings({"method": "heterofl", "model": model, "data": {"source": "digits", "clients": 4}, **changes})


# -- a node's own ----------------------------------------------------------------------------------------------------


def test_nodes_of_a_trial_take_the_parts_that_a_simulation_deals() -> None:
    dealt = data_of(settings())
    for place in range(4):
        own = own_examples(settings(), {"partition-id": place})
        assert torch.equal(own.labels, dealt.dataset.train.labels[dealt.split.train[place]])
    assert len(own_examples(settings(), {"partition-id": 0, "num-partitions": 2})) > len(own)


def test_a_node_that_has_no_part_is_told_so() -> None:
    with pytest.raises(RunError, match="partition-id is 4; the run's data have the parts 0 to 3"):
        own_examples(settings(), {"partition-id": 4})
    with pytest.raises(RunError, match="names its `data`"):
        own_examples(settings(), {})


def test_a_folder_of_the_node_s_own_is_read_and_its_classes_are_matched_by_name(tmp_path: Path) -> None:
    for name, shade in (("7", 70), ("3", 30)):
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(5):
            Image.fromarray(np.full((8, 8), shade, np.uint8)).save(tmp_path / "train" / name / f"{number}.png")
    classes = [str(digit) for digit in range(10)]
    given = settings(data={"source": "digits", "classes": classes})
    own = own_examples(given, {"data": str(tmp_path)})
    assert set(own.labels.tolist()) == {3, 7}
    shades = own.inputs["pixel_values"].float().mean((1, 2, 3))
    assert torch.equal(shades, own.labels * 10.0)


def test_a_class_that_the_run_does_not_know_is_named() -> None:
    some = Examples({}, torch.tensor([0, 1]))
    dataset = Dataset("mine", some, some, ("cat", "dog"))
    assert relabelled(dataset, ("dog", "cow", "cat")).labels.tolist() == [2, 0]
    with pytest.raises(RunError, match="'mine' has examples of 'dog'; the run's classes are cat, cow"):
        relabelled(dataset, ("cat", "cow"))


def test_in_a_simulation_sizes_follow_from_the_run_s_fleet() -> None:
    given = settings(fleet={"tiers": "1:1, 1/4:3"})
    config = [{"partition-id": place, "num-partitions": 4} for place in range(4)]
    assert sorted(own_device(given, each)["size"] for each in config) == [0.25, 0.25, 0.25, 1.0]
    assert own_device(given, {**config[0], "max-params": "3k"}) == {"max-params": 3000.0}
    assert own_device(given, {"data": "x"}) == {}


# -- the server's plan -----------------------------------------------------------------------------------------------


def test_every_node_gets_the_largest_size_that_it_can_hold() -> None:
    given = settings(fleet={"tiers": "1, 1/4, 1/16"}, participation={"clients": 1})
    whole = Office(given).plan([Known(10, 0, 20, (0,))]).server.layout.count(Selection())
    devices = [Device(), Device(None, Budget(max_params=whole // 2)), Device(1 / 16, None, 3e9)]
    known = [Known(10 + place, place, 20, (0, place), device) for place, device in enumerate(devices)]
    plan = Office(given).plan(known)
    tiers = [plan.tier_of(client, 0) for client in range(3)]
    assert [tier.size for tier in tiers] == [1.0, 1 / 4, 1 / 16]
    assert tiers[2].speed == 3e9
    assert plan.participation.minimum == 1
    assert plan.data.dataset.train.inputs == {}
    assert len(plan.data.dataset.test) == 360
    assert plan.data.dataset.validation is not None
    with pytest.raises(RunError, match=r"node 10 \(client 0\): it holds 10 params; the smallest"):
        Office(given).plan([Known(10, 0, 20, (0,), Device(None, Budget(max_params=10)))])


# -- the folder ------------------------------------------------------------------------------------------------------


def test_init_writes_an_app_with_keys_for_their_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = raffm("edge", "init", "My Edge!", "--nodes", "2", "--host", "fl.example.org", "--port", "9000")
    assert "is ready" in said.stdout
    folder = tmp_path / "My Edge!"
    package = folder / "raffm_edge_my_edge"
    run = tomllib.loads((package / "run.toml").read_text())
    assert run["data"]["classes"] == [str(digit) for digit in range(10)]
    assert run["participation"]["clients"] == 0, "all that come"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert project["components"]["clientapp"] == "raffm_edge_my_edge.client_app:app"
    assert project["config"]["folder"] == str(folder / "run")
    assert (folder / "nodes" / "1.config").read_text() == "partition-id=1 num-partitions=2 size='1/4'\n"
    for name in ("server.key", "local.key", "node0", "node1"):
        assert stat.S_IMODE((folder / "certs" / name).stat().st_mode) == 0o600
    assert os.access(folder / "node.sh", os.X_OK)
    assert "fl.example.org:9000" in (folder / "node.sh").read_text()
    assert "--host 0.0.0.0" in (folder / "link.sh").read_text()
    assert "server.key" not in (folder / "node.sh").read_text()
    assert "127.0.0.1:9000" in (folder / "home" / "config.toml").read_text()


def test_init_takes_the_sizes_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[model]\nname = 'vit-small'\n[data]\nsource = 'digits'\n[fleet]\ntiers = '1/2, 1/8'\n")
    assert raffm("edge", "init", tmp_path / "app", "--run", tmp_path / "run.toml").returncode == 0
    configs = [(tmp_path / "app" / "nodes" / f"{number}.config").read_text() for number in range(3)]
    assert ["size='1/2'" in config for config in configs] == [True, False, True]
    assert "size='1/8'" in configs[1]


def test_sizes_that_are_no_short_decimals_stay_exact(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[fleet]\ntiers = '1/3, 1/24, 2/3'\n")
    assert raffm("edge", "init", tmp_path / "app", "--run", tmp_path / "run.toml").returncode == 0
    configs = [(tmp_path / "app" / "nodes" / f"{number}.config").read_text() for number in range(3)]
    assert ["size='1/3'" in configs[0], "size='1/24'" in configs[1], f"size='{2 / 3!r}'" in configs[2]] == [True] * 3


@pytest.mark.parametrize("name", ["a`id`b", "my$HOME", "x}y", "a\\b", 'a"b'])
def test_folders_that_scripts_would_read_otherwise_are_refused(tmp_path: Path, name: str) -> None:
    said = raffm("edge", "init", tmp_path / name)
    assert said.returncode == 2
    assert "which scripts read otherwise" in said.stderr
    assert not (tmp_path / name).exists()


def test_labels_that_are_no_classes_stay_as_they_are() -> None:
    for labels in (torch.tensor([0.5, 2.0]), torch.tensor([[3, 4, 0, 0], [0, 0, 1, 1]])):
        some = Examples({}, labels)
        assert torch.equal(relabelled(Dataset("mine", some, some, ("first", "last")), ("first", "last")).labels, labels)
    refuse_classes(Known(7, 0, 5, (0,), Device()), 0)
    with pytest.raises(RunError, match="class 3; there are 3"):
        refuse_classes(Known(7, 0, 5, (0, 3), Device()), 3)


@pytest.mark.parametrize(
    ("words", "run", "error"),
    [
        ((), "method = 'nope'", "there is no method 'nope'"),
        (("--sizes", "abc"), "", "there is no fleet 'abc'"),
        (("--sizes", "1, 3/2"), "", "at most 1, but was given 1.5"),
        (("--host", "bad host!"), "", "--host is 'bad host!'"),
        ((), "[participation]\nclients = 10", "a round asks 10 clients, but there are 3"),
    ],
)
def test_init_refuses_what_could_not_run(tmp_path: Path, words: tuple[str, ...], run: str, error: str) -> None:
    (tmp_path / "run.toml").write_text(f"{run}\n[model]\nname = 'vit-small'\n[data]\nsource = 'digits'\n")
    said = raffm("edge", "init", tmp_path / "app", "--run", tmp_path / "run.toml", *words)
    assert said.returncode == 2
    assert error in said.stderr
    assert not (tmp_path / "app").exists()


def test_init_says_where_a_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "app").write_text("mine")
    said = raffm("edge", "init", tmp_path / "app")
    assert said.returncode == 2
    assert "is a file" in said.stderr


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"data": "/nowhere/data"}, "the node's `data` is '/nowhere/data', but there is nothing"),
        ({"data": ""}, "the node's `data` is ''"),
        ({"partition-id": "x"}, "the node's `partition-id` is 'x'; it is a whole number"),
        ({}, "a node's config names its `data`"),
    ],
)
def test_a_node_without_data_says_so(config: dict[str, object], error: str) -> None:
    with pytest.raises(RunError, match=error):
        own_examples(read_settings({"data": {"source": "digits", "clients": 3}}), config)


def test_nothing_that_is_there_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match="is not empty"):
        write_app(tmp_path / "app", {}, [""])
    assert [path.name for path in (tmp_path / "app").iterdir()] == ["mine.txt"]


def test_a_run_that_makes_no_sense_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[modelx]\nname = 'vit-small'\n")
    said = raffm("edge", "init", tmp_path / "app", "--run", tmp_path / "run.toml")
    assert said.returncode == 2
    assert "Did you mean 'model'?" in said.stderr
    assert not (tmp_path / "app").exists()


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("my-edge", "raffm_edge_my_edge"),
        ("日本", "raffm_edge_c7b7cdcc"),
        ("данные", "raffm_edge_2b239121"),
        ("7", "raffm_edge_7"),
    ],
)
def test_packages_have_names_of_their_own(name: str, package: str) -> None:
    assert package_of(name) == package
    assert package.isidentifier()


def test_probe_says_what_this_machine_can_do(tmp_path: Path) -> None:
    said = raffm("probe", "--seconds", "0.1", "--out", tmp_path / "machine.json")
    assert "GFLOP/s" in said.stdout
    found = json.loads((tmp_path / "machine.json").read_text())
    assert found["speed"] > 1e6
    assert found["memory"] > 1e6
