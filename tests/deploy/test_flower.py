"""Real processes: a SuperLink with TLS and node authentication, and three SuperNodes with devices of different sizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deploy.network import Network
from raffm.data.task import ImageClassification
from raffm.devices.fleet import Fleet, Tier
from raffm.federate import load_data
from raffm.methods import method_of
from raffm.models.labelled import Labelled
from raffm.models.load import trainable
from raffm.rounds.backend import Serial
from raffm.rounds.local import Local
from raffm.rounds.loop import train
from raffm.rounds.plan import Evaluating, Participation, Plan

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "raffm-trial"
version = "1.0.0"
description = "Three nodes."
license = "Apache-2.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "raffm"
[tool.flwr.app.components]
serverapp = "raffm_trial.server_app:app"
clientapp = "raffm_trial.client_app:app"
[tool.flwr.app.config]
out = ""
"""

CLIENT = """
from raffm.deploy.flower import node_app
from raffm.federate import load_data


def own(context):
    data = load_data("digits", clients=3, split="dirichlet-balanced", alpha=1.0, validation=0.0)
    return data.dataset.train.take(data.split.train[int(context.node_config["partition-id"])])


app = node_app(own)
"""

SERVER = """
from safetensors.torch import save_file
from raffm.data.task import ImageClassification
from raffm.deploy.flower import Serving, server_app
from raffm.deploy.ledger import fleet_of, ledger
from raffm.federate import load_data
from raffm.methods import method_of
from raffm.models.labelled import Labelled
from raffm.models.load import trainable
from raffm.rounds.local import Local
from raffm.rounds.plan import Evaluating, Participation, Plan


def plan(context, known):
    data = load_data("digits", clients=3, split="iid", validation=0.0)
    made = Plan(
        server=Labelled.of(trainable("vit:tiny", "image", 10, (1, 8, 8))),
        method=method_of("fiarse"),
        task=ImageClassification(),
        data=ledger(known, data.dataset),
        fleet=fleet_of(known),
        rounds=2,
        local=Local("sgd", lr=0.1, batch=10, steps=3),
        participation=Participation(3),
        evaluating=Evaluating(every=1),
    )
    plans.append((made, context.run_config["out"]))
    return made


def keep(results):
    made, out = plans[0]
    save_file({name: tensor.detach().clone() for name, tensor in made.server.tensors.items()}, out)


plans = []
app = server_app(plan, Serving(nodes=3), done=keep)
"""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    made = Network(tmp_path / "network")
    try:
        yield made
    finally:
        made.close()


@pytest.mark.slow
def test_three_nodes_over_tls_give_the_server_of_one_process(network: Network, tmp_path: Path) -> None:
    app = tmp_path / "app"
    (app / "raffm_trial").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PROJECT)
    for name, text in {"__init__": "", "client_app": CLIENT, "server_app": SERVER}.items():
        (app / "raffm_trial" / f"{name}.py").write_text(text)
    network.link()
    for number, size in enumerate(("1", "1/4", "1/16")):
        network.node(number, f"partition-id={number} size='{size}'")
    stranger = network.node(9, "partition-id=9", registered=False)
    out = tmp_path / "server.safetensors"
    said = network.flwr("run", app, "here", "--stream", "-c", f"out='{out}'", timeout=200)
    assert out.is_file(), said + network.log("link")
    assert stranger.wait(30) != 0
    assert "authentic" in network.log("node9").lower() or "activate" in network.log("node9").lower()

    data = load_data("digits", clients=3, split="dirichlet-balanced", alpha=1.0, validation=0.0)
    plan = Plan(
        server=Labelled.of(trainable("vit:tiny", "image", 10, (1, 8, 8))),
        method=method_of("fiarse"),
        task=ImageClassification(),
        data=data,
        fleet=Fleet((Tier(1.0), Tier(1 / 4), Tier(1 / 16)), dealt=(0, 1, 2)),
        rounds=2,
        local=Local("sgd", lr=0.1, batch=10, steps=3),
        participation=Participation(3),
        evaluating=Evaluating(every=1),
    )
    train(plan, Serial(plan))
    found = load_file(out)
    for name, tensor in plan.server.tensors.items():
        assert torch.allclose(found[name], tensor, atol=1e-5), name
