"""After training, in a few lines: the best submodel of a run for a device.

picked = best_submodel("runs/vit", max_params=45_000_000)
print(picked.found.best.score, picked.found.best.sizes)
module = picked.module()
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from raffm.algebra.selection import Selection
from raffm.devices.probe import read_inference
from raffm.devices.profiles import PROFILES
from raffm.errors import ExportError, RunError
from raffm.methods.raffm import RaFFM
from raffm.models.files import read_json
from raffm.models.rows import whole as whole_of
from raffm.models.space import Space, read_space
from raffm.notices import notice
from raffm.prepare import opened
from raffm.report.explorer import any_of, command_for, explorer_page
from raffm.report.folder import write_file
from raffm.rounds.checkpoint import digest
from raffm.rounds.plan import Plan
from raffm.search.find import Effort, Found, Tick, find
from raffm.search.front import Candidate
from raffm.search.judge import Judge, judge_of, own_metric
from raffm.search.log import Log
from raffm.search.price import Prices, Runtime

FORMAT = 1


@dataclass(frozen=True, eq=False)
class Target:
    """A device that is not here: what it holds and computes, and where that was read."""

    name: str
    memory: float
    speed: float
    size: float | None = None


@dataclass(frozen=True, eq=False)
class Picked:
    """What a search found, and the judge that makes its submodels."""

    found: Found
    judge: Judge
    metric: str
    is_last: bool = False

    def module(self, candidate: Candidate | None = None) -> nn.Module:
        """The submodel of a candidate, ready to run; by default the best."""
        return self.judge.module((candidate or self.found.best).sizes)

    def scores(self, candidate: Candidate | None = None) -> dict[str, float]:
        """Its metrics on the test set, which the search has not seen."""
        return self.judge.scores(self.module(candidate), self.judge.plan.data.dataset.test)

    def save(self, folder: Path) -> None:
        """Write `search.json` (everything) and `best.json` (for `raffm export --submodel`)."""
        found = self.found
        plan = self.judge.plan
        content = {
            "format": FORMAT,
            "metric": self.judge.main_metric(),
            "full": {group: plan.server.layout.sizes[group] for group in found.best.sizes},
            "ranking": self.metric,
            "is_last": self.is_last,
            "cost": found.cost,
            "limits": dict(found.limits),
            "submodels": found.submodels,
            "judged": [each.to_json() for each in found.judged],
            "finalists": [each.to_json() for each in found.finalists],
        }
        for name, entry in (("search.json", content), ("best.json", recipe(found.best.to_json(), self.metric))):
            write_file(folder / name, (json.dumps(entry, indent=1) + "\n").encode())


def read_recipe(path: Path, number: int | None = None) -> dict[str, Any]:
    """Sizes and ranking from a file: a `best.json`, a finalist of a `search.json`, or plain sizes."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"{str(path)!r} is no JSON file of sizes: {error}.") from None
    if not isinstance(content, dict):
        raise ExportError(f"{str(path)!r} is no JSON file of sizes: it holds a {type(content).__name__}.")
    if "finalists" in content:
        finalists = content["finalists"]
        if number is None or not 0 <= number < len(finalists):
            raise ExportError(f"{str(path)!r} has {len(finalists)} finalists: say which, --pick 0 to {len(finalists) - 1}.")
        return recipe(finalists[number], content["ranking"])
    return content if "config" in content else {"config": content, "ranking": None}


def recipe(candidate: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """What makes a submodel again: sizes, and the ranking that they cut."""
    return {"config": candidate["sizes"], "ranking": metric, "score": candidate["score"], "costs": candidate["costs"]}


def best_submodel(
    run: str | Path,
    *,
    data: str | None = None,
    max_params: float | None = None,
    max_bytes: float | None = None,
    max_flops: float | None = None,
    max_memory: float | None = None,
    max_latency: float | None = None,
    device: str | None = None,
    runtime: Runtime = "torch",
    metric: str | None = None,
    space: Mapping[str, Any] | str | Path | None = None,
    effort: Effort | None = None,
    examples: int = 512,
    seed: int = 0,
    folder: Path | None = None,
    is_last: bool = False,
    tick: Tick = lambda done, total: None,
) -> Picked:
    """Search a trained run for the best submodel within limits, on its validation examples.

    With `data`, `run` may be any pretrained classifier; a tenth of the training examples is taken to judge.
    `max_latency` is in seconds, for one example, measured in `runtime`: "torch", or "onnx" or "openvino" once exported to it.
    `device` is a known device, or a file that `raffm probe` wrote there: its latency is estimated, not measured. `folder`
    keeps the search, so that one that was stopped goes on. Of a run that kept an average that is searched, or, if `is_last`,
    its last model.
    """
    if runtime not in get_args(Runtime):
        raise RunError(f"latency is measured in {', '.join(get_args(Runtime))}, not in {runtime!r}.")
    plan, _ = opened(Path(run), data, is_last=is_last)
    given = {"params": max_params, "bytes": max_bytes, "flops": max_flops, "memory": max_memory, "latency": max_latency}
    limits = {kind: _limit(kind, limit) for kind, limit in given.items() if limit is not None}
    target = None if device is None else target_of(device)
    if target is not None:
        limits = _for_device(plan, limits, target)
    metric = metric or own_metric(plan)
    judge = judge_of(plan, metric, examples, seed)
    if plan.data.dataset.validation is None:
        notice("the run held out no validation examples, so training examples judge; scores will be too good.")
    chosen = space_of(plan, space)
    effort = effort or Effort(workers=torch.get_num_threads())
    asked = {*limits, "flops"} | ({"latency"} if target is not None else set())
    prices = Prices(judge, chosen, tuple(asked), None if target is None else target.speed, runtime)
    log = Log(None if folder is None else folder / "log.jsonl", _about(judge, chosen, metric))
    found = find(judge, chosen, prices, limits, effort, log, tick)
    picked = Picked(found, judge, metric, is_last)
    if folder is not None:
        picked.save(folder)
        _write_page(folder, Path(run), data, is_last)
    return picked


def _write_page(folder: Path, run: Path, data: str | None, is_last: bool) -> None:
    """The page that shows a search."""
    command = command_for(run, any_of(folder / "search.json"), data, is_last)
    write_file(folder / "explorer.html", explorer_page(read_json(folder / "search.json"), command).encode())


def _limit(kind: str, given: float) -> float:
    if not isinstance(given, int | float) or not 0 < given < float("inf"):
        raise RunError(f"max_{kind} is {given!r}; give a number above 0.")
    return float(given)


def _about(judge: Judge, space: Space, metric: str) -> dict[str, Any]:
    """What tells one search from another, but for its limits."""
    plan = judge.plan
    return {
        "layout": plan.server.layout.fingerprint,
        "weights": _fingerprint(plan),
        "space": space.to_json(),
        "ranking": metric,
        "examples": judge.few,
        "data": [plan.data.dataset.name, digest({"labels": judge.validation.labels}, plan.task)],
        "seed": judge.seed,
    }


def space_of(plan: Plan, given: Mapping[str, Any] | str | Path | None) -> Space:
    """The sizes to choose from: those given, those that RaFFM trained, or quarters."""
    if given is None and isinstance(plan.method, RaFFM):
        return plan.method.trained_space(plan.server)
    return read_space(plan.server.layout, plan.server.table, given)


def target_of(device: str) -> Target:
    """A device by name, or from a file of `raffm probe`."""
    if device in PROFILES:
        profile = PROFILES[device]
        return Target(profile.title, profile.memory.value, profile.speed, profile.size.value)
    path = Path(device)
    if not path.is_file():
        raise RunError(
            f"there is no device {device!r}. Known are {', '.join(PROFILES)}; for another, run `raffm probe --out device.json` "
            "on it and give that file."
        )
    content = read_json(path)
    try:
        target = Target(str(content["name"]), float(content["memory"]), float(content["speed"]))
    except (KeyError, TypeError, ValueError):
        raise RunError(f"{device!r} was not written by `raffm probe`: it lacks name, memory or speed.") from None
    if not (0 < target.memory < float("inf") and 0 < target.speed < float("inf")):
        raise RunError(f"{device!r} has memory {target.memory!r} and speed {target.speed!r}; both must be above 0.")
    return target


def _for_device(plan: Plan, limits: Mapping[str, float], target: Target) -> dict[str, float]:
    """The limits, and the device's part of the model where nothing else is asked for; its memory, where that is too little."""
    server = plan.server
    whole = server.layout.count(whole_of(server.layout))
    usual = {"params": target.size * whole} if target.size is not None and not limits else {}
    memory = min(limits.get("memory", target.memory), target.memory)
    is_enough = "memory" not in limits and read_inference(server.model, server.layout, server.table, Selection()) <= memory
    return {**usual, **limits, **({} if is_enough else {"memory": memory})}


def _fingerprint(plan: Plan) -> list[float]:
    """Numbers that other weights would not give."""
    floats = [tensor.detach() for tensor in plan.server.tensors.values() if tensor.is_floating_point()]
    return [float(torch.stack([tensor.double().sum().cpu() for tensor in floats]).sum()), float(sum(map(torch.numel, floats)))]
