"""What experiments share: runs that are begun or gone on with, kept in folders, and their results as files."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

import raffm
from raffm.models.files import read_json
from raffm.prepare import plan_of, run_as
from raffm.report.watch import Display
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
        with Display(settings.rounds) as display:
            found = run_as(settings, plan_of(settings), place, (place / "checkpoint").is_dir(), display)
        self.results.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"where": where(), **found.results.to_json()}) + "\n", encoding="utf-8")
        return read_json(path)


def where() -> dict[str, str]:
    """The versions, the machine and the day."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    return {"raffm": raffm.__version__, "torch": torch.__version__, "device": device, "date": date.today().isoformat()}


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
