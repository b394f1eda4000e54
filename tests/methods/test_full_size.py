"""Where every device holds the whole model, every method is FedAvg."""

import pytest
import torch

from methods.runs import ALL, FAMILIES, NAMES, labelled, plan_of, rounds_of, run, same_bits, snapshot
from raffm.rounds.local import Local

SPLITS = {
    "one client": [ALL],
    "weights that are powers of two": [[*ALL, 0, 1, 2], [*ALL * 3, 3], [*ALL, 0, 1, 2]],
    "any weights": [ALL, ALL * 3, [*ALL * 2, 1, 2, 3]],
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "fedavg"])
def test_a_fleet_of_full_devices_gives_the_server_of_fedavg_bit_for_bit(name: str, family: str, split: str) -> None:
    """Invariant 57: all classes are present, the masked loss masks nothing, the scaler divides by 1, there is one exit."""
    local = Local("adamw", lr=0.01, batch=5, steps=2)
    reference = plan_of(family, "fedavg", labels=SPLITS[split], local=local)
    before = snapshot(reference.server)
    rounds_of(reference)
    given = labelled(family)  # trained in place, also where a method puts it into a model of its own
    switches = {"exits": 1} if name == "scalefl" else {}
    rounds_of(plan_of(family, name, labels=SPLITS[split], local=local, server=given, switches=switches))
    assert any(not torch.equal(before[name], tensor) for name, tensor in reference.server.tensors.items())
    for tensor, expected in reference.server.tensors.items():
        assert same_bits(given.tensors[tensor], expected), tensor


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_fleet_is_trained_served_and_scored(name: str, family: str) -> None:
    plan = plan_of(family, name, "1, 1/4", rounds=2)
    before = snapshot(plan.server)
    results = run(plan)
    assert any(not torch.equal(before[name], tensor) for name, tensor in plan.server.tensors.items())
    assert not any(entry.refused for entry in results.rounds)
    windows = ["1", "1/4 prefix", "1/4 windows"]
    special = {"fedavg": ["1"], "fedavg-capable": ["1"], "fedrolex": windows, "federated-dropout": windows}
    names = special.get(name, ["1", "1/4"])
    assert list(results.evaluations[-1].sizes) == [size.name for size in results.sizes] == names
