"""Flower's simulation: an app in a folder of its own, a daemon of its own, which is gone afterwards."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.others.clock import MARK, marked, options
from benchmarks.others.workload import CLIENTS

PATIENCE = 300
"""Seconds after which a run is given up."""

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "raffm"

[tool.flwr.app.components]
serverapp = "{name}.server:app"
clientapp = "{name}.client:app"

[tool.flwr.app.config]
"""

CONNECTIONS = """
[superlink]
default = "bench"

[superlink.bench]
address = ":local-in-memory:"
options.num-supernodes = {clients}
options.backend.client-resources.num-cpus = 1
options.backend.init-args.num-cpus = {actors}
options.backend.init-args.log-to-driver = false
"""


def main() -> None:
    told = options()
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans become ours, and no zombie stays
    mark = f"{os.environ[MARK]} Flower"  # a mark of its own, so that everything that carries it may be ended
    with tempfile.TemporaryDirectory(prefix="fl", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        written(place, told.workers)
        environment = {
            **os.environ,
            MARK: mark,
            "FLWR_HOME": str(place / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
            "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
            "RAY_TMPDIR": str(place),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAFFM_BENCH_SAMPLES": str(told.samples),
            "RAFFM_BENCH_ROUNDS": str(told.rounds),
            "RAFFM_BENCH_OUT": str(place / "out"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        try:
            subprocess.run(
                ["flwr", "run", str(place / "app"), "bench"],
                env=environment,
                cwd=place / "empty",
                check=True,
                stdout=sys.stderr,
            )
            sys.stdout.write(awaited(place / "out"))
        except BaseException:
            for log in place.glob("home/local-superlink/*.log"):
                sys.stderr.write(log.read_text()[-3000:])
            raise
        finally:
            end_all(mark)


def written(place: Path, actors: int) -> None:
    """The app's folder, under a name that no other run has, and Flower's settings."""
    name = f"bench{os.getpid()}"
    package = place / "app" / name
    package.mkdir(parents=True)
    (place / "empty").mkdir()  # the daemon keeps its working folder, and actors import from there first
    (place / "home").mkdir()
    (package / "__init__.py").touch()
    for part in ("server", "client"):
        (package / f"{part}.py").write_text(f"from benchmarks.others import flower_{part}\n\napp = flower_{part}.app\n")
    (place / "app" / "pyproject.toml").write_text(PROJECT.format(name=name))
    (place / "home" / "config.toml").write_text(CONNECTIONS.format(clients=CLIENTS, actors=actors))


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def awaited(path: Path) -> str:
    """What the server leaves when all rounds are done."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Flower's run did not end within {PATIENCE} s.")
        time.sleep(0.5)
    return path.read_text()


def end_all(mark: str) -> None:
    """End the daemon, its executors and Ray: everything that carries the mark."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(process, number)
        deadline = time.monotonic() + 10
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(0.2)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


if __name__ == "__main__":
    main()
