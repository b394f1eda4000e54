"""Where every device holds the whole model, every method is FedAvg."""

import pytest
import torch

from methods.runs import ALL, FAMILIES, NAMES, plan_of, run, same_bits, snapshot
from raffm.rounds.local import Local

# The first has one client. The second has weights that are powers of two, the third has any.
SPLITS = {"alone": [ALL], "powers": [ALL[:4] + [4, 0, 1, 2], ALL * 3 + [3], ALL[:4] + [4, 0, 1, 2]], "uneven": [ALL, ALL * 3, ALL * 2 + [1, 2, 3]]}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "fedavg"])
def test_a_fleet_of_full_devices_gives_the_server_of_fedavg_bit_for_bit(name: str, family: str, split: str) -> None:
    """Invariant 57: all classes are present, so the masked loss masks nothing, and the scaler divides by 1."""
    local = Local("adamw", lr=0.01, batch=5, steps=2)
    reference = plan_of(family, "fedavg", labels=SPLITS[split], local=local, rounds=2)
    before = snapshot(reference.server)
    run(reference)
    plan = plan_of(family, name, labels=SPLITS[split], local=local, rounds=2)
    run(plan)
    assert any(not torch.equal(before[name], tensor) for name, tensor in reference.server.tensors.items())
    for tensor, expected in reference.server.tensors.items():
        assert same_bits(plan.server.tensors[tensor], expected), tensor
