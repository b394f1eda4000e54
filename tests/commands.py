"""`raffm` as a person runs it: in this process, to save imports, or in one of its own, to be killed."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from raffm.cli.main import main

RAFFM = str(Path(sys.executable).parent / "raffm")
QUICK = (
    "--model=vit:tiny",
    "--method=heterofl",
    "--fleet=1, 1/4",
    "--clients=20",
    "--set=participation.clients=2",
    "--set=local.lr=0.01",
    "--set=evaluate.every=2",
)
"""Rounds of a few hundredths of a second, on digits."""


@dataclass(frozen=True)
class Ran:
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


def raffm(*words: object) -> Ran:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["raffm", *map(str, words)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        code = 0
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    finally:
        sys.argv = before
    return Ran(code, out.getvalue(), err.getvalue())


def trained(folder: Path, *words: object) -> Ran:
    """Train a quick run into a folder, in this process."""
    return raffm("train", *QUICK, f"--folder={folder}", *words)


def started(folder: Path, *words: object) -> subprocess.Popen[str]:
    """Train a quick run into a folder, in a process of its own."""
    command = [RAFFM, "train", *QUICK, f"--folder={folder}", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], seconds: float = 60) -> Ran:
    """Wait for a process; what it said."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return Ran(process.returncode, out, err)


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 60) -> None:
    """Wait until a file is there, or the process has ended."""
    deadline = time.monotonic() + seconds
    while not path.exists() and process.poll() is None:
        assert time.monotonic() < deadline, f"{path} did not appear in {seconds} s"
        time.sleep(0.002)
