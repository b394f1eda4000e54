"""The runs of the experiment: RaFFM on every published fleet.

In XLarge every device holds the full model, and RaFFM is FedAvg there, bit for bit: that run is the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.preparing import few
from experiments.running import Content, changed
from raffm.devices.profiles import FLEETS
from raffm.prepare import plan_of
from raffm.rounds.costs import Clock, Costs
from raffm.rounds.plan import Order
from raffm.settings import read_file, read_settings

HERE = Path(__file__).parent

REFERENCE = "xlarge"

SMOKE: Content = {
    "rounds": 2,
    "model": {"name": "vit-small"},
    "data": {"source": "digits", "clients": 20},
    "local": {"steps": 2},
    "participation": {"clients": 6},
    "evaluate": {"every": 1, "last": 1, "batch": 500},
    "backend": {"name": "serial", "precision": "float32"},
}

CPU: Content = {
    "local": {"steps": 3},
    "evaluate": {"every": 10, "last": 1, "batch": 250},
    "backend": {"name": "serial", "precision": "float32"},
    "save": {"every": 5},
}

TESTED = 2000
"""Test images on a CPU."""


def contents(scale: str, folder: Path) -> Mapping[str, dict[str, Any]]:
    """The settings of RaFFM on every fleet."""
    base = changed(read_file(HERE / "base.toml"), {"smoke": SMOKE, "cpu": CPU, "full": {}}[scale])
    if scale == "cpu":
        base["data"]["source"] = few("cifar10", folder, train=50_000, test=TESTED)
    return {fleet: changed(base, {"fleet": {"tiers": fleet}}) for fleet in FLEETS}


def full_size_rounds(content: Content) -> dict[str, Any]:
    """What every round of FedAvg on the full model takes on a fleet.

    What it learns does not depend on the fleet, so it is trained once, and its time is counted for each.
    """
    plan = plan_of(read_settings(changed(content, {"method": {"name": "fedavg"}})))
    clock = Clock(plan, Costs(plan))
    return {"rounds": [_taken(clock, plan.orders(round, plan.cohort(round).present)) for round in range(plan.rounds)]}


def _taken(clock: Clock, orders: Sequence[Order]) -> dict[str, float]:
    costs = [clock.costs.of(order.share) for order in orders]
    return {
        "bytes_up": sum(cost.bytes_up for cost in costs),
        "bytes_down": sum(cost.bytes_down for cost in costs),
        "seconds": max(clock.seconds(order) for order in orders),
        "joules": sum(clock.joules(order) for order in orders),
    }
