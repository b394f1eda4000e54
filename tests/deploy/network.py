"""A real Flower network on this machine, from the folder that `raffm edge init` writes; every part of it is a process."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tomli_w

BIN = Path(sys.executable).parent

DIGITS: Mapping[str, Any] = {
    "method": "fiarse",
    "model": {"name": "resnet18", "norm": "group", "widths": [8, 16], "depths": [1, 1]},
    "data": {"source": "digits", "split": "dirichlet-balanced", "alpha": 1.0, "clients": 3},
    "local": {"optimizer": "sgd", "lr": 0.1, "batch": 10, "steps": 3},
    "participation": {"clients": 3},
}
"""What three nodes train: small, without transformers, and over in seconds."""

WATCH = """
import json, os, sys

def note(event, given):
    if event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen"):
        about = given[1] if event == "socket.connect" else given[0]
        with open(os.environ["RAFFM_WATCHED"], "a") as file:
            file.write(json.dumps([event, repr(about)]) + "\\n")

sys.addaudithook(note)
"""
"""Notes in a file whom a Python program speaks to, and what it starts."""


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        first = random.randint(20_000, 50_000)
        with ExitStack() as taken:
            try:
                for port in range(first, first + count):
                    taken.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first


@dataclass
class Network:
    """Everything it starts runs in process groups of its own, and is ended by `close`."""

    folder: Path
    nodes: int
    port: int
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def made(place: Path, run: Mapping[str, Any], sizes: str = "1, 1/4, 1/16", nodes: int = 3) -> Network:
        (place / "run.toml").write_text(tomli_w.dumps(run))
        (place / "watch").mkdir()
        (place / "watch" / "sitecustomize.py").write_text(WATCH)
        made = Network(place / "trial", nodes, free_ports(nodes + 2))
        words = ["--run", place / "run.toml", "--nodes", nodes, "--sizes", sizes, "--port", made.port]
        command = [str(BIN / "raffm"), "edge", "init", str(made.folder), *map(str, words)]
        subprocess.run(command, check=True, capture_output=True)
        return made

    @property
    def environment(self) -> dict[str, str]:
        given = {"RAFFM_WATCHED": str(self.folder.parent / "watched"), "PYTHONPATH": str(self.folder.parent / "watch")}
        return {**os.environ, **given, "OMP_NUM_THREADS": "1", **self.variables}

    def start(self, name: str, *words: object) -> subprocess.Popen[bytes]:
        with (self.folder.parent / f"{name}.log").open("ab") as log:
            self.started[name] = subprocess.Popen(
                [str(word) for word in words],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        return self.started[name]

    def link(self, *words: object) -> None:
        self.start("link", self.folder / "link.sh", *words)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.2)
        raise AssertionError(self.log("link"))

    def node(self, number: int) -> subprocess.Popen[bytes]:
        return self.start(f"node{number}", self.folder / "node.sh", number)

    def begin(self, *words: object) -> None:
        """The link, and all nodes, registered."""
        self.link(*words)
        for number in range(self.nodes):
            self.flwr("supernode", "register", f"certs/node{number}.pub", "here")
            self.node(number)

    def flwr(self, *words: object, timeout: float = 240) -> str:
        """A command of Flower's, as the README has it."""
        ran = subprocess.run(
            self.command(*words), capture_output=True, text=True, env=self.environment, timeout=timeout, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr + self.log("link")
        return ran.stdout

    def command(self, *words: object) -> list[str]:
        said = " ".join(f"'{word}'" if " " in str(word) or "=" in str(word) else str(word) for word in words)
        return ["sh", "-c", f". '{self.folder}/env.sh' && cd '{self.folder}' && exec flwr {said}"]

    def log(self, name: str) -> str:
        return (self.folder.parent / f"{name}.log").read_text(errors="replace")

    @property
    def watched(self) -> list[tuple[str, str]]:
        """Whom all programs spoke to, and what they started."""
        lines = (self.folder.parent / "watched").read_text().splitlines()
        return [tuple(json.loads(line)) for line in lines]

    def kill(self, name: str) -> None:
        """At once, with what it started in its own session."""
        os.killpg(self.started[name].pid, signal.SIGKILL)
        self.started.pop(name).wait(10)

    def close(self) -> None:
        for process in self.started.values():
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    break
                try:
                    process.wait(8)
                except subprocess.TimeoutExpired:
                    continue
                time.sleep(0.2)
        for process in self.left():
            process.kill()

    def left(self) -> list[psutil.Process]:
        """All that descend from what was started, also those that left their group."""
        mark, found = self.environment["RAFFM_WATCHED"], []
        for process in psutil.process_iter():
            try:
                if process.environ().get("RAFFM_WATCHED") == mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found
