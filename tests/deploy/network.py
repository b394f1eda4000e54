"""A real Flower network on this machine: a SuperLink with TLS and node authentication, and SuperNodes, each a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from raffm.deploy.keys import write_certificates, write_node_key

BIN = Path(sys.executable).parent
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",
}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@dataclass
class Network:
    """Everything it starts runs in process groups of its own, and is ended by `close`."""

    folder: Path
    port: int = field(default_factory=free_port)
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.certificates = self.folder / "certs"
        write_certificates(self.certificates)
        (self.folder / "home").mkdir(parents=True)
        (self.folder / "empty").mkdir()
        (self.folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{self.certificates / "ca.crt"}"\n'
        )

    @property
    def environment(self) -> dict[str, str]:
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, **QUIET, "FLWR_HOME": str(self.folder / "home"), "PATH": path}

    def start(self, name: str, *words: object) -> subprocess.Popen[bytes]:
        command = [str(BIN / str(words[0])), *map(str, words[1:])]
        place, environment = self.folder / "empty", self.environment
        with (self.folder / f"{name}.log").open("wb") as log:
            self.started[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=place, env=environment, start_new_session=True
            )
        return self.started[name]

    def tls(self) -> list[object]:
        names = {"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.pem", "--ssl-keyfile": "server.key"}
        return [word for flag, name in names.items() for word in (flag, self.certificates / name)]

    def link(self) -> None:
        words = ["--enable-supernode-auth", "--host", "127.0.0.1", "--port", self.port]
        self.start("link", "flower-superlink", *self.tls(), *words, "--disable-runtime-dependency-installation")
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.2)
        raise AssertionError(self.log("link"))

    def node(self, number: int, config: str, registered: bool = True) -> subprocess.Popen[bytes]:
        key = self.certificates / f"node{number}"
        write_node_key(key)
        if registered:
            self.flwr("supernode", "register", f"{key}.pub", "here")
        words = ["--superlink", f"127.0.0.1:{self.port}", "--root-certificates", self.certificates / "ca.crt"]
        words += ["--auth-supernode-private-key", key, "--port", free_port(), "--node-config", config]
        return self.start(f"node{number}", "flower-supernode", *words, *self.tls())

    def flwr(self, *words: object, timeout: float = 120) -> str:
        command = [str(BIN / "flwr"), *map(str, words)]
        ran = subprocess.run(
            command, capture_output=True, text=True, cwd=self.folder, env=self.environment, timeout=timeout, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr + self.log("link")
        return ran.stdout

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

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
