"""`examples/edge_three_nodes`, as its README says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from deploy.network import BIN, free_ports

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "edge_three_nodes"


def begun(folder: Path, port: int) -> subprocess.Popen[str]:
    variables = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PORT": str(port), "OMP_NUM_THREADS": "1"}
    words = ["sh", str(EXAMPLE / "run.sh"), str(folder)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables)


def left(folder: Path) -> list[str]:
    """Programs that still run for the app of a folder; Flower's own notice within seconds that their parents are gone."""
    end = time.monotonic() + 30
    while (found := running(folder)) and time.monotonic() < end:
        time.sleep(0.5)
    return found


def running(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_three_nodes_train_what_each_can_hold(tmp_path: Path) -> None:
    said, _ = begun(tmp_path / "app", free_ports(5)).communicate(timeout=400)
    results = json.loads((tmp_path / "app" / "run" / "results.json").read_text())
    assert len(results["rounds"]) == 4, said
    assert not any(entry["refused"] for entry in results["rounds"])
    known = json.loads((tmp_path / "app" / "run" / "nodes.json").read_text())["nodes"]
    assert [sorted(set(each["device"]) - {"speed"}) for each in known] == [["size"], ["max-params"], ["max-memory"]]
    assert known[2]["device"]["speed"] > 1e6
    assert "Test set after round 4" in said
    assert left(tmp_path / "app") == []


def test_a_port_that_is_taken_ends_the_example_and_everything_it_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        started = begun(tmp_path / "app", taken.getsockname()[1])
        said, _ = started.communicate(timeout=120)
    assert started.returncode != 0
    assert said
    assert left(tmp_path / "app") == []
