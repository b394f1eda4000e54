"""Clients that compute in bfloat16: every product is, nothing that is kept is, and what comes out is nearly the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from methods.runs import ALL, FAMILIES, NAMES, plan_of
from raffm.federate import backend_of
from raffm.models.rounding import Precision
from raffm.prepare import plan_of as plan_from
from raffm.prepare import run_as
from raffm.rounds.backend import Serial
from raffm.rounds.evaluate import evaluate
from raffm.rounds.local import Local
from raffm.rounds.plan import Plan
from raffm.settings import read_settings
from raffm.simulate.pooled import Pooled
from rounds.made import RESNET, VIT, are_equal, assert_near, nothing, plan, run, values

PRODUCTS = ("mm", "addmm", "bmm", "convolution", "convolution_backward")

ALIKE = {"raffm_resnet": 0.8, "vit": 0.999, "bert": 0.999}
"""The least cosine. Batch norms over few values are sensitive: rounding a ResNet's weights alone costs as much."""

LABELS = [[0, 1, 2], ALL * 2, ALL, [3, 4, 1]]


class Products(TorchDispatchMode):
    """What matrices were multiplied in."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if function.overloadpacket.__name__ in PRODUCTS:
            self.found |= {entry.dtype for entry in given if isinstance(entry, Tensor)}
        return function(*given, **(named or {}))


def change(family: str, method: str, precision: Precision) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    """What a round changes in the server's model, and what its products were computed in."""
    made = plan_of(family, method, "1, 1/4", LABELS, local=Local("sgd", lr=0.01, batch=5, steps=2))
    for drop in (child for child in made.server.model.modules() if isinstance(child, nn.Dropout)):
        drop.p = 0.0  # attention of another precision is computed, and dropped, otherwise
    before = {name: tensor.clone() for name, tensor in values(made).items()}
    tally = made.tally()
    with Products() as products:
        Serial(made, precision).train(made.orders(0, range(4)), tally, nothing, nothing)
    tally.step()
    names = set(made.server.layout.tensors("parameter"))
    return {name: tensor - before[name] for name, tensor in values(made).items() if name in names}, products.found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", NAMES)
def test_every_product_is_rounded_and_what_is_learnt_is_nearly_the_same(family: str, method: str) -> None:
    (exact, usual), (rounded, found) = (change(family, method, precision) for precision in ("float32", "bfloat16"))
    assert usual == {torch.float32}
    assert found == {torch.bfloat16}
    left, right = (torch.cat([tensor.flatten() for tensor in each.values()]) for each in (exact, rounded))
    assert not torch.equal(left, right)
    assert torch.cosine_similarity(left, right, dim=0) > ALIKE[family]
    assert all(tensor.dtype == torch.float32 for tensor in rounded.values())


@pytest.mark.parametrize(("method", "model"), [("nested", RESNET), ("fiarse", VIT)])
def test_workers_round_as_the_serial_backend_does(method: str, model: str) -> None:
    made: list[Plan] = [plan(method, model=model) for _ in range(3)]
    run(made[0], Serial(made[0], "bfloat16"))
    for each in made[1:]:
        run(each, Pooled(each, 2, "bfloat16"))
    assert_near(values(made[0]), values(made[1]), 1e-5)
    assert are_equal(values(made[1]), values(made[2]))


def test_submodels_are_evaluated_in_the_precision_of_their_training() -> None:
    made = plan("heterofl", model=VIT)
    with Products() as products:
        evaluate(made, Serial(made, "bfloat16"), 1)
    assert products.found == {torch.bfloat16}


ELSEWHERE = pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU, captured trains serially, as precisely")


@pytest.mark.parametrize("backend", ["serial", pytest.param("captured", marks=ELSEWHERE)])
def test_settings_choose_the_precision(tmp_path: Any, backend: str) -> None:
    content = {"rounds": 1, "data": {"source": "digits", "clients": 4}, "fleet": {"tiers": "1"}, "local": {"steps": 1}}
    seen = []
    for precision in ("bfloat16", "tf32"):
        settings = read_settings({**content, "backend": {"name": backend, "precision": precision}})
        with Products() as products:
            run_as(settings, plan_from(settings), tmp_path / precision, False, None)
        seen.append(torch.bfloat16 in products.found)
    assert seen == [True, False]


def test_a_processor_without_instructions_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    made = plan("fedavg", fleet="full")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    backend_of("serial", made)
    assert not caplog.records
    backend_of("serial", made, precision="bfloat16")
    assert "no instructions for bfloat16" in caplog.text
