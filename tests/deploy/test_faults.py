"""What fails in a real network, and what it costs: nodes and servers are killed, updates are poisoned."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deploy.network import DIGITS, Network, free_ports
from raffm.algebra.tally import Tally
from raffm.devices.fleet import Fleet, Tier
from raffm.prepare import plan_of
from raffm.rounds.backend import Serial
from raffm.rounds.plan import Plan
from raffm.settings import read_settings

pytestmark = pytest.mark.slow

RUN: Mapping[str, Any] = {**DIGITS, "rounds": 3, "evaluate": {"every": 10}}
FLEET = Fleet((Tier(1.0), Tier(1 / 4), Tier(1 / 16)), dealt=(0, 1, 2))
ALL = [0, 1, 2]

CHANGED = """

import os
import time

import numpy as np

from raffm.deploy.letters import Reply
from raffm.deploy.node import Node

place, honest = Path(os.environ["RAFFM_WATCHED"]).parent, Node.answer

def spoilt(client, round, reply):
    return reply

def answer(self, letter):
    client, round = letter.about["client"], letter.about["round"]
    with (place / "asked").open("a") as file:
        file.write(f"{client} {round}\\n")
    while (place / f"hold-{client}-{round}").exists():
        time.sleep(0.1)
    return spoilt(client, round, honest(self, letter))

Node.answer = answer
"""
"""Ends the file of a node that notes what it is asked, is held up by a file, and can spoil its replies."""

Make = Callable[..., Network]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Network] = []

    def make(spoilt: str = "", **changes: Any) -> Network:
        made.append(Network.made(tmp_path, {**RUN, **changes}))
        with (made[-1].folder / "raffm_edge_trial" / "client_app.py").open("a") as file:
            file.write(CHANGED + spoilt)
        return made[-1]

    try:
        yield make
    finally:
        for network in made:
            network.close()


def until(fact: Callable[[], bool], network: Network, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end, "\n".join(f"{name}: {network.log(name)}" for name in network.started)
        time.sleep(0.2)


def run(network: Network, *words: object) -> subprocess.Popen[bytes]:
    """A run that has begun; what it says goes into the log `run`."""
    return network.start("run", *network.command("run", ".", "here", "--stream", *words))


# -- what came out ---------------------------------------------------------------------------------------------------


def asked(network: Network) -> Counter[tuple[int, int]]:
    """How often a client was asked for its update of a round, both counted from 0."""
    file = network.folder.parent / "asked"
    lines = file.read_text().splitlines() if file.exists() else []
    return Counter((int(client), int(round)) for client, round in map(str.split, lines))


def hold(network: Network, client: int, round: int) -> Path:
    """While this file is there, the client does not answer in that round."""
    file = network.folder.parent / f"hold-{client}-{round}"
    file.touch()
    return file


def saved_rounds(network: Network) -> int:
    """How many rounds the checkpoint holds."""
    try:
        return int(json.loads((network.folder / "run" / "checkpoint" / "run.json").read_text())["round"])
    except FileNotFoundError:
        return 0


def rounds_of(network: Network) -> list[dict[str, Any]]:
    rounds: list[dict[str, Any]] = json.loads((network.folder / "run" / "results.json").read_text())["rounds"]
    assert [each["round"] for each in rounds] == list(range(1, len(rounds) + 1))
    return rounds


def status_of(network: Network) -> str:
    """What Flower says of the last run."""
    return str(json.loads(network.flwr("ls", "here", "--format", "json"))["runs"][0]["status"])


def server_after(plan: Plan, clients: Sequence[Sequence[int]]) -> Mapping[str, Tensor]:
    """The server of one process, after rounds that count these clients."""
    tally, backend = Tally(plan.server.layout, plan.server.tensors), Serial(plan)
    for round, present in enumerate(clients):
        outcomes = backend.train(plan.orders(round, present), tally, lambda _: None, lambda: None)
        assert not any(outcome.refused for outcome in outcomes)
        tally.step()
    return plan.server.tensors


def is_server_of(network: Network, *clients: Sequence[int]) -> bool:
    plan = replace(plan_of(read_settings(dict(RUN))), fleet=FLEET)
    return is_server(network, server_after(plan, clients))


def is_server(network: Network, expected: Mapping[str, Tensor]) -> bool:
    found = load_file(network.folder / "run" / "checkpoint" / "server.safetensors")
    return all(torch.allclose(found[name], tensor, atol=1e-5) for name, tensor in expected.items())


# -- killed ----------------------------------------------------------------------------------------------------------


def test_a_node_killed_in_mid_round_costs_its_own_update_and_is_back_after_a_restart(make: Make) -> None:
    network = make(rounds=4)
    network.begin()
    hold(network, client=1, round=1)
    other = hold(network, client=0, round=2)
    running = run(network)
    until(lambda: asked(network)[1, 1] == 1, network)
    network.kill("node1")
    until(lambda: asked(network)[0, 2] == 1, network)
    network.node(1)
    until(lambda: network.log("node1").count("SuperNode ID") == 2, network)
    other.unlink()
    assert running.wait(180) == 0, network.log("run")

    refused = [entry["refused"] for entry in rounds_of(network)]
    assert [set(each) for each in refused] == [set(), {"1"}, {"1"}, set()], refused
    assert refused[1]["1"].startswith("client 1: it failed: ")
    assert (1, 2) not in asked(network)
    assert is_server_of(network, ALL, [0, 2], [0, 2], ALL)


@pytest.mark.parametrize("also", ["its ServerApp, too", "the link alone", "a node, too"])
def test_a_killed_server_goes_on_from_its_last_finished_round(make: Make, also: str) -> None:
    """The last node measures its speed, which is another each time; the run goes on with what it said at first."""
    network = make()
    with (network.folder / "nodes" / "2.config").open("a") as config:
        config.write(" auto=true")
    network.begin()
    held = hold(network, client=0, round=1)
    running = run(network)
    until(lambda: asked(network)[0, 1] == 1, network)
    others = psutil.Process(network.started["link"].pid).children(recursive=True)
    assert any("flwr-serverapp" in each.name() for each in others)
    network.kill("link")
    for process in others if also != "the link alone" else ():
        process.kill()
    _, alive = psutil.wait_procs(others, timeout=20)
    assert not alive, "the programs of a link end with it"
    assert running.wait(60) != 0
    assert saved_rounds(network) == 1
    left = [0, 1] if also == "a node, too" else ALL
    if left != ALL:
        network.kill("node2")
    network.link()
    held.unlink()
    assert run(network, "-c", f"resume=true nodes={len(left)}").wait(240) == 0, network.log("run")

    assert len(rounds_of(network)) == 3
    assert [set(entry["refused"]) for entry in rounds_of(network)[1:]] == [set() if left == ALL else {"2"}] * 2
    assert all(asked(network)[client, 0] == 1 for client in ALL)
    assert is_server_of(network, ALL, left, left)


def test_a_node_that_stalls_past_the_deadline_costs_its_own_update(make: Make) -> None:
    network = make(rounds=4)
    network.begin()
    held = hold(network, client=2, round=1)
    running = run(network, "-c", "deadline=30.0")
    until(lambda: asked(network)[0, 2] == 1, network)
    held.unlink()  # it ends what nobody waits for any more, and is back
    assert running.wait(240) == 0, network.log("run")
    refused = [entry["refused"] for entry in rounds_of(network)]
    assert set(refused[1]) == {"2"}, refused
    assert refused[1]["2"] == "client 2: it did not answer within 30 s"
    assert not refused[0]
    assert not refused[3], "it is back, at the latest in the round after the next"
    assert is_server_of(network, *(ALL if not each else [0, 1] for each in refused))


def test_a_link_of_its_own_process_may_be_killed_and_the_run_loses_nothing(make: Make) -> None:
    network = make()
    secret = network.folder / "home" / "secret"
    secret.write_bytes(b"known to the link and to who starts its programs")
    apart = ("--isolation", "process", "--superexec-auth-secret-file", secret)
    network.begin(*apart)
    starter = f"exec flower-superexec --root-certificates certs/ca.crt --runtime-api-address 127.0.0.1:{network.port}"
    begin = f". '{network.folder}/env.sh' && cd '{network.folder}'"
    network.start("starter", "sh", "-c", f"{begin} && {starter} --superexec-auth-secret-file '{secret}'")
    held = hold(network, client=0, round=1)
    network.flwr("run", ".", "here")
    until(lambda: asked(network)[0, 1] == 1, network)
    assert not psutil.Process(network.started["link"].pid).children(recursive=True)
    network.kill("link")
    assert saved_rounds(network) == 1
    network.link(*apart)
    held.unlink()
    until((network.folder / "run" / "results.json").is_file, network)
    until(lambda: status_of(network) == "finished:completed", network)

    assert not any(entry["refused"] for entry in rounds_of(network))
    assert asked(network) == {(client, round): 1 for client in ALL for round in range(3)}
    assert is_server_of(network, ALL, ALL, ALL)


# -- poisoned --------------------------------------------------------------------------------------------------------


def spoils(*ways: str) -> str:
    """Client 1 spoils its reply of every round in another way; `name` and `array` are those of its first tensor."""
    given = "".join(f"    if round == {round}:\n        return {way}\n" for round, way in enumerate(ways))
    return f"""
def spoilt(client, round, reply):
    if client != 1:
        return reply
    name, array = next(iter(reply.arrays.items()))
    def changed(about={{}}, **arrays):
        return Reply({{**reply.about, **about}}, {{**reply.arrays, **arrays}})
{given}    return reply
"""


POISONS = {
    "a NaN": ("changed(**{name: array * np.nan})", "holds a NaN"),
    "a wrong shape": ("changed(**{name: np.zeros(3, array.dtype)})", "has 3 values; its mask keeps"),
    "an old round": ("changed({'round': 0})", "its reply has the round 0; 2 was asked for"),
    "the name of another": ("changed({'client': 0})", "its reply has the client 0; 1 was asked for"),
    "other numbers": ("changed(**{name: array.astype(np.float64)})", "cannot be read"),
    "less than all": ("Reply(reply.about, {name: array})", "the update lacks"),
    "more than all": ("changed(**{'tensor/door': array})", "cannot be read"),
    "an error": ("1 / 0", "ZeroDivisionError"),
}


def test_a_poisoned_update_is_refused_and_named_and_nothing_else_is_lost(make: Make) -> None:
    network = make(spoils(*(way for way, _ in POISONS.values())), rounds=len(POISONS) + 1)
    network.begin()
    assert run(network).wait(400) == 0, network.log("run")

    *bad, last = [entry["refused"] for entry in rounds_of(network)]
    for (name, (_, words)), refused in zip(POISONS.items(), bad, strict=True):
        assert set(refused) == {"1"}, name
        assert refused["1"].startswith("client 1"), refused
        assert words in refused["1"], refused
    assert not last
    assert is_server_of(network, *[[0, 2]] * len(POISONS), ALL)


def test_a_run_below_its_minimum_stops_and_says_why(make: Make) -> None:
    network = make(spoils("changed({'round': 99})"), participation={"clients": 3, "minimum": 3, "tries": 2})
    network.begin()
    run(network).wait(180)
    said = " ".join((network.log("run") + network.log("link")).split())
    assert "round 1 had 2 good updates; 3 are needed, and it was tried 2 times. client 1: its reply has the round 99" in said
    assert asked(network) == {(client, 0): 2 for client in ALL}
    assert not (network.folder / "run" / "checkpoint").exists()
    assert not (network.folder / "run" / "results.json").exists()
    assert status_of(network) == "finished:failed"


# -- without a network -----------------------------------------------------------------------------------------------


def test_the_same_app_runs_in_flowers_simulation(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower starts a link for simulations that stays; here it has a port of its own, and `make` ends it."""
    pytest.importorskip("ray")
    monkeypatch.setenv("FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", str(free_ports(1)))
    network = make(rounds=2)
    said = network.flwr("run", ".", "simulation", "--stream")
    assert (network.folder / "run" / "results.json").is_file(), said
    assert not any(entry["refused"] for entry in rounds_of(network))
    settings = read_settings({**RUN, "fleet": {"tiers": "1, 1/4, 1/16"}})
    assert is_server(network, server_after(plan_of(settings), [ALL, ALL]))
