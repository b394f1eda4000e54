"""Real processes: a SuperLink with TLS and node authentication, and SuperNodes with devices of different sizes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deploy.network import DIGITS, Network
from raffm.deploy.keys import write_node_key
from raffm.devices.fleet import Fleet, Tier
from raffm.federate import run_plan
from raffm.prepare import plan_of
from raffm.settings import read_settings

RUN = {**DIGITS, "rounds": 2, "evaluate": {"every": 2}}


METHODS = ["fiarse", pytest.param({"name": "nested", "shapes": "uniform"}, marks=pytest.mark.slow, id="nested")]


@pytest.fixture(params=METHODS)
def content(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**RUN, "method": request.param, "merging": {"average": 0.5}}


@pytest.fixture
def network(tmp_path: Path, content: dict[str, Any]) -> Iterator[Network]:
    made = Network.made(tmp_path, content)
    try:
        yield made
    finally:
        made.close()


def test_three_nodes_over_tls_give_the_server_of_one_process(network: Network, content: dict[str, Any]) -> None:
    network.begin()
    write_node_key(network.folder / "certs" / "node3")
    (network.folder / "nodes" / "3.config").write_text("partition-id=3 num-partitions=3")
    stranger = network.node(3)
    said = network.flwr("run", ".", "here", "--stream")
    results = network.folder / "run" / "results.json"
    assert results.is_file(), said + network.log("link")

    made = plan_of(read_settings(content))
    assert made.given is not None
    dealt = Fleet((Tier(1.0), Tier(1 / 4), Tier(1 / 16)), dealt=(0, 1, 2))
    plan = replace(made, fleet=dealt, server=made.given, given=None)
    expected = run_plan(plan)
    found = load_file(network.folder / "run" / "checkpoint" / "average.safetensors")
    for name, tensor in plan.server.tensors.items():
        assert torch.allclose(found[name], tensor, atol=1e-5), name
    scores = json.loads(results.read_text())["evaluations"][-1]["sizes"]
    for name, size in expected.results.evaluations[-1].sizes.items():
        assert scores[name]["test"]["accuracy"] == pytest.approx(size.test["accuracy"], abs=0.01)

    assert stranger.wait(30) != 0
    assert re.search("authentic|activate", network.log("node3").lower())
    nobody_else_was_reached(network)


def nobody_else_was_reached(network: Network) -> None:
    """No telemetry, no update check, no dependency installed: all addresses are of this machine, and `uv` never ran."""
    addresses = {about for event, about in network.watched if event != "subprocess.Popen"}
    strange = [about for about in addresses if not re.search(r"127\.0\.0\.1|localhost|::1|^'/|^b'/|None", about)]
    assert not strange
    assert len(addresses) > 1
    assert not [about for event, about in network.watched if event == "subprocess.Popen" and re.search(r"\b(uv|pip)\b", about)]
