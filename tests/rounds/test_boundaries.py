"""Runs at their edges: nobody takes part, a device that nothing fits, weights that are too coarse, batches of one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raffm.errors import RaffmError, RunError
from raffm.methods import ADAPTING, METHODS
from raffm.models.labelled import Labelled
from raffm.models.load import trainable
from raffm.rounds.local import Local
from raffm.rounds.plan import Evaluating, Participation
from raffm.rounds.predict import _batches_by_client
from rounds.made import RESNET, VIT, are_equal, plan, run, values


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ADAPTING])
def test_a_round_in_which_nobody_takes_part_changes_nothing(method: str) -> None:
    never = Participation(clients=2, by="availability", availability=1e-9)
    made = plan(method, model=RESNET, rounds=2, fleet="1, 1/4", participation=never)
    before = values(made)
    found = run(made)
    assert [(entry.clients, entry.loss) for entry in found.rounds] == [((), None)] * 2
    assert are_equal(before, values(made))


@pytest.mark.parametrize("method", ["raffm", "scalefl"])
@pytest.mark.parametrize("sizes", [(), (1.0,)])
def test_a_device_that_nothing_fits_is_refused_before_the_first_round(method: str, sizes: tuple[float, ...]) -> None:
    with pytest.raises(RaffmError):
        plan(method, model=RESNET, fleet="1:3, 1/10000:1", evaluating=Evaluating(sizes=sizes))


def test_weights_in_which_small_changes_are_lost_are_refused() -> None:
    made = plan("fedavg")
    server = Labelled.of(trainable(VIT, "image", 10, (1, 8, 8)).to(torch.bfloat16))
    with pytest.raises(RunError, match=r"is torch\.bfloat16, too coarse .* `model\.float\(\)`"):
        replace(made, server=server, given=None)


@pytest.mark.parametrize("batch", [1, 2, 6])
def test_batches_of_test_examples_are_as_large_as_those_of_training(batch: int) -> None:
    made = plan("fedavg", model=RESNET, fleet="1", local=Local(lr=1e-2, batch=batch))
    assert {len(found) for found in _batches_by_client(made)} == {batch}
    assert set(made.data.split.test.counts.tolist()) == {6}
