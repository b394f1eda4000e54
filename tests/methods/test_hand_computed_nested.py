"""Two rounds of nested, computed by hand.

The model is out = v (s * (w x)): `w` (two channels from one pixel), `s`, which stands for a norm and only scales, `v` (two
classes). The loss of an example is the output of its class y; a smaller shape is taught by the sum of its outputs times the
teacher's. With i for a channel and h[i] = s[i] w[i] x

    own shape       dw[i] = v[y,i] s[i] x        ds[i] = v[y,i] w[i] x        dv[y,i] = h[i]
    smaller shape   has channel 0 and a scale r of its own; with t for the own shape's outputs, a = 1/2 and
                    B = v[y,0] / 2 + (t[0] v[0,0] + t[1] v[1,0]) / 2
                    dw[0] = r x B       dr = w[0] x B       dv[c,0] = r w[0] x ([c = y] + t[c]) / 2

Client 0 is full and has one example, x = 1 of class 0. Client 1 is small and has three, all x = 2 of class 1. Both make one
step of SGD, lr = 1/16, so means have the weights 1/4 and 3/4 where both hold an element.
"""

import pytest
import torch
from torch import Tensor, nn

from methods import test_hand_computed as by_hand
from raffm.methods import method_of
from raffm.models.labelled import Labelled
from raffm.models.table import read
from raffm.rounds.backend import Serial
from raffm.rounds.loop import train
from raffm.rounds.plan import Merging, Plan

TABLE = read(
    """
family = "scaled"
[groups]
classes = { pinned = true }
pixels = { pinned = true }
[tensors]
"w" = "pixels -> a"
"s" = "a"
"v" = "a -> classes"
[inputs]
x = ["pixels = 1"]
"""
)


class ScaleNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.s, self.v = nn.Linear(1, 2, bias=False), ScaleNorm(), nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.w.weight.fill_(1.0)
            self.v.weight.copy_(torch.tensor([[2.0, 1.0], [1.0, 1.0]]))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.v(self.s(self.w(x)))
        return outputs


class Teaching(by_hand.OutputOfTheClass):
    def taught(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        return (outputs * teacher).sum(1)


def plan_of(model: Scaled, **switches: object) -> Plan:
    like = by_hand.plan_of(by_hand.Chain(by_hand.ONES, [by_hand.ONES] * 4, [by_hand.ONES] * 2), "heterofl", (1.0, 1 / 4))
    return Plan(
        server=Labelled.of(model, TABLE),
        method=method_of("nested", shapes="uniform", **switches),
        task=Teaching(),
        data=like.data,
        fleet=like.fleet,
        rounds=2,
        seed=like.seed,
        local=like.local,
        participation=like.participation,
        merging=Merging(average=0.0),
    )


class Look:
    """Notes the numbers of the server after every round."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.after = plan, list[dict[str, list[float]]]()

    def client(self, round: int, done: int, of: int) -> None:
        pass

    def round(self, *_: object) -> None:
        self.after.append({name: tensor.flatten().tolist() for name, tensor in self.plan.server.tensors.items()})


def test_two_rounds_of_nested() -> None:
    model = Scaled()
    plan = plan_of(model)
    look = Look(plan)
    results = train(plan, Serial(plan), watcher=look)
    # Round 1. Client 0: t (3, 2), B 2/2 + (3*2 + 2*1)/2 = 5; dw (2 + 5, 1), ds (2, 1), dr 5, dv[0] (1 + 2, 1), dv[1] (1, 0).
    #          Client 1: dw[0] 1*1*2 = 2, dr 2, dv[1,0] 2.
    # w (1 - (7 + 3*2)/64, 1 - 1/16)        s (1 - 2/16, 1 - 1/16)      r (1 - (5 + 3*2)/64, 1)
    # v[0] (2 - 3/64, 1 - 1/16)             v[1] (1 - (1 + 3*2)/64, 1)
    assert look.after[0] == {
        "w.weight": [0.796875, 0.9375],
        "s.weight_rows": [0.875, 0.9375, 0.828125, 1.0],
        "v.weight": [1.953125, 0.9375, 0.890625, 1.0],
    }
    # What clients report is the loss of their own shape: 3 and 2, then 2.1858 and 1.1755.
    assert results.rounds[0].loss == 2.5
    assert results.rounds[1].loss == pytest.approx((2.185821533203125 + 1.1754684448242188) / 2)
    # Round 2, from these, by the same formulas.
    expected = {
        "w.weight": [0.6521276644198224, 0.882568359375],
        "s.weight_rows": [0.7777252197265625, 0.882568359375, 0.7145350530045107, 1.0],
        "v.weight": [1.9258055198588409, 0.882568359375, 0.8210253667202778, 1.0],
    }
    for name, numbers in look.after[1].items():
        assert numbers == pytest.approx(expected[name], rel=1e-6), name
    assert model.s.weight.tolist() == pytest.approx([0.7777252197265625, 0.882568359375]), "the model is trained in place"


def test_without_nested_steps_and_own_norms_it_is_heterofl_without_its_additions() -> None:
    models = Scaled(), Scaled()
    plans = [plan_of(models[0], steps="none", own_norms=False), plan_of(models[1], own_norms=False)]
    plans[1] = Plan(
        **{
            **{name: getattr(plans[1], name) for name in plans[1].__dataclass_fields__ if name not in ("given", "server")},
            "server": Labelled.of(models[1], TABLE),
            "method": method_of("heterofl", scaler=False, masked_loss=False),
        }
    )
    for plan in plans:
        train(plan, Serial(plan))
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
