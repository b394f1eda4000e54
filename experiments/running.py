"""What experiments share: runs that are begun or gone on with, kept in folders, and their results as files."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import raffm
from raffm.devices.fleet import size_name
from raffm.models.files import read_json
from raffm.prepare import plan_of, run_as
from raffm.report.folder import RESULTS
from raffm.report.watch import Display
from raffm.rounds.average import AVERAGE
from raffm.rounds.costs import Costs
from raffm.rounds.plan import Plan
from raffm.settings import Settings, read_settings

Content = Mapping[str, Any]
"""Settings, as a run's TOML file has them."""


@dataclass(frozen=True)
class Runs:
    """Runs of an experiment: their folders, which stay out of the repository, and their results, which do not.

    What lies in `others`, the results of other experiments, is taken from there where it was found by the same settings.
    """

    folder: Path
    results: Path
    others: tuple[Path, ...] = ()

    def of(self, name: str, content: Content) -> dict[str, Any]:
        """The results of a run, from the repository, or from training it now to its end."""
        settings = read_settings(content)
        return self._known(name, settings) or self._trained(name, settings)

    def has(self, name: str, content: Content) -> bool:
        """Whether the results of a run are there."""
        return self._known(name, read_settings(content)) is not None

    def trained(self, name: str, content: Content) -> Path:
        """The folder of a run with its weights, from before, or from training it now; results that are known stay."""
        settings, place = read_settings(content), self.folder / name
        if (place / RESULTS).is_file():
            _refuse_others(place / RESULTS, settings)
        else:
            self._trained(name, settings)
        return place

    def _trained(self, name: str, settings: Settings) -> dict[str, Any]:
        settings = fitting(settings)
        plan = plan_of(settings)
        costs = client_costs(plan)
        place = self.folder / name
        with Display(settings.rounds) as display:
            found = run_as(settings, plan, place, (place / "checkpoint").is_dir(), display)
        known = self._known(name, settings)
        if known is None:
            known = {"where": where(), "clients": costs, **found.results.to_json()}
            write_plainly(self.results / f"{name}.json", known)
        return known

    def _known(self, name: str, settings: Settings) -> dict[str, Any] | None:
        own = self.results / f"{name}.json"
        if own.is_file():
            return _refuse_others(own, settings)
        shared = (found for folder in self.others for found in found_in(folder).values() if "run" in found)
        return next((found for found in shared if is_asked_for(found, settings)), None)


def _refuse_others(path: Path, settings: Settings) -> dict[str, Any]:
    """The results of a file, which must be those of a run with some settings."""
    found = read_json(path)
    if not is_asked_for(found, settings):
        raise SystemExit(f"{str(path)!r} was found with other settings than those asked for now. Move it away to run anew.")
    return found


def fitting(settings: Settings) -> Settings:
    """Settings for this machine: graphs need a GPU; without one clients train on all cores, as precisely."""
    if settings.backend.name != "captured" or torch.cuda.is_available():
        return settings
    return replace(settings, backend=replace(settings.backend, name="pooled"))


def is_asked_for(found: Content, settings: Settings) -> bool:
    """Whether results are those of a run with some settings, wherever it ran, its model and its data lay."""
    return essential(found["run"]) == essential(settings.to_json())


def essential(content: Content) -> dict[str, Any]:
    """What tells a run from others: its settings but for places, how it ran, and how often it was saved."""
    settings = json.loads(json.dumps(read_settings(content).to_json()))
    for section, key in (("model", "name"), ("data", "source"), ("data", "tokenizer")):
        settings[section][key] = Path(settings[section][key]).name
    return {key: entry for key, entry in settings.items() if key not in ("backend", "save")}


def write_plainly(path: Path, content: Content) -> None:
    """JSON on one line: raw results, for programs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps(content) + "\n", encoding="utf-8")
    fresh.replace(path)


def kept(path: Path, about: Content, make: Callable[[], Content]) -> dict[str, Any]:
    """What lies at a path, or is made now and put there, with where it was made.

    `about` is what it follows from, such as a run's settings: what was made from something else is refused.
    """
    plain = json.loads(json.dumps(about))
    if not path.is_file():
        write_plainly(path, {"where": where(), "about": plain, **make()})
    found = read_json(path)
    if found["about"] != plain:
        raise SystemExit(
            f"{str(path)!r} was made from something else than what is asked for now. Move it away to make it anew."
        )
    return found


@cache
def _read(path: Path, modified: float) -> dict[str, Any]:
    return read_json(path)


def found_in(results: Path) -> dict[str, dict[str, Any]]:
    """All results of a folder, by name."""
    return {path.stem: _read(path, path.stat().st_mtime) for path in sorted(results.glob("*.json"))}


def client_costs(plan: Plan) -> dict[str, dict[str, int]]:
    """What a client of every size takes in a round: bytes both ways, FLOPs of training on one example."""
    costs, found = Costs(plan), dict[str, dict[str, int]]()
    first = {plan.tier_of(client, 0).size: client for client in reversed(range(plan.data.clients))}
    for size, client in sorted(first.items(), reverse=True):
        for order in plan.orders(0, [client]):
            cost = costs.of(order.share)
            entry = {"bytes_down": cost.bytes_down, "bytes_up": cost.bytes_up, "training_flops": cost.work(1)}
            found[size_name(size)] = entry
    return found


def is_average(size: str) -> bool:
    """Whether a row of results is that of the server's average."""
    return size.endswith(AVERAGE)


def where() -> dict[str, str]:
    """The versions, the commit where there is one, the machine and the day."""
    versions = {"raffm": raffm.__version__, "torch": torch.__version__, "transformers": version("transformers")}
    return {**versions, **_commit(), "device": device(), "date": date.today().isoformat()}


def device() -> str:
    """The GPU, or the processor and its cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    about = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:\s*(.+)$", about.read_text(), re.MULTILINE) if about.is_file() else None
    return f"{named[1] if named else platform.machine()}, {os.cpu_count()} cores"


def _commit() -> dict[str, str]:
    """The commit of the code, with a plus where files differ from it; nothing outside a repository."""
    git = shutil.which("git")
    if git is None:
        return {}
    asked = [git, "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    said = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return {} if said.returncode else {"commit": said.stdout.strip()}


def changed(content: Content, *several: Content) -> dict[str, Any]:
    """Settings with others over them, section by section."""
    made = {key: dict(entry) if isinstance(entry, Mapping) else entry for key, entry in content.items()}
    for changes in several:
        for key, entry in changes.items():
            is_section = isinstance(entry, Mapping) and isinstance(made.get(key), dict)
            made[key] = {**made[key], **entry} if is_section else entry
    return made


def tail_mean(results: Content, size: str, metric: str = "accuracy", part: str = "test") -> float:
    """The mean of a metric over the last evaluations of a run."""
    last = results["evaluations"][-results["last"] :]
    return sum(entry["sizes"][size][part][metric] for entry in last) / len(last)
