"""Two rounds of every method, computed by hand.

The model is out = v u w x, three linear maps without biases: `w` (a from one pixel), `u` (b from a), `v` (classes from b).
The loss of an example is the output of its class c, so that with h = u w x

    dv[c, b] = h[b]          du[b, a] = v[c, b] w[a] x          dw[a] = sum over b of v[c, b] u[b, a] x

and nothing else moves. Client 0 has one example, x = 1 of class 0. Client 1 has three, all x = 2 of class 1. Both make one
step of plain SGD, lr = 1/16 (FIARSE: 1/64), so means have the weights 1/4 and 3/4 where both hold an element. All numbers
are short binary fractions, so float32 holds them exactly.
"""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raffm.data.examples import Dataset, Examples, Federation, Parts, Split
from raffm.data.task import Batch
from raffm.devices.fleet import Fleet, Tier
from raffm.methods import method_of
from raffm.models.labelled import Labelled
from raffm.models.table import read
from raffm.rounds.backend import Serial
from raffm.rounds.local import Local
from raffm.rounds.loop import train
from raffm.rounds.plan import Participation, Plan
from raffm.rounds.results import Results

TABLE = read(
    """
family = "chain"
[groups]
classes = { pinned = true }
pixels = { pinned = true }
[tensors]
"w" = "pixels -> a"
"u" = "a -> b"
"v" = "b -> classes"
[inputs]
x = ["pixels = 1"]
"""
)

Rows = list[list[float]]


class Chain(nn.Module):
    def __init__(self, w: list[float], u: Rows, v: Rows) -> None:
        super().__init__()
        self.w, self.u, self.v = nn.Linear(1, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            self.w.weight.copy_(torch.tensor(w)[:, None])
            self.u.weight.copy_(torch.tensor(u))
            self.v.weight.copy_(torch.tensor(v))

    def forward(self, x: Tensor) -> Tensor:
        return self.v(self.u(self.w(x)))


class OutputOfTheClass:
    """A task whose loss is linear in the output."""

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.zeros((*shape, 0), dtype=torch.int64)

    def batch(self, examples: Examples, picks: Tensor, moves: Tensor | None = None) -> Batch:
        return Batch({"x": examples.inputs["x"][picks]}, examples.labels[picks])

    def forward(self, module: nn.Module, batch: Batch) -> Tensor:
        outputs: Tensor = module(**batch.inputs)
        return outputs

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.gather(1, labels[:, None])[:, 0]

    def metrics(self, outputs: Tensor, labels: Tensor) -> dict[str, float]:
        return {"score": float(outputs.sum())}


def plan_of(model: Chain, method: str, sizes: tuple[float, float], lr: float = 1 / 16, **switches: object) -> Plan:
    """Two rounds with both clients; `sizes` are those of client 0 and client 1."""
    xs, labels = torch.tensor([[1.0], [2.0], [2.0], [2.0]]), torch.tensor([0, 1, 1, 1])
    test = Examples({"x": torch.tensor([[1.0], [1.0]])}, torch.tensor([0, 1]))
    split = Split(Parts.of([np.array([0]), np.array([1, 2, 3])]), Parts.of([np.array([0]), np.array([1])]))
    tiers = tuple(Tier(size) for size in dict.fromkeys(sizes))
    seed = 0
    while [int(tier) for tier in Fleet(tiers).tiers_of(2, seed)] != list(range(2))[: len(tiers)] + [0] * (2 - len(tiers)):
        seed += 1  # the first seed that deals the devices so
    plan = Plan(
        server=Labelled.of(model, TABLE),
        method=method_of(method, **switches),
        task=OutputOfTheClass(),
        data=Federation(Dataset("by hand", Examples({"x": xs}, labels), test, ("zero", "one")), split),
        fleet=Fleet(tiers),
        rounds=2,
        seed=seed,
        local=Local("sgd", lr=lr, batch=1, steps=1),
        participation=Participation(2),
    )
    assert [plan.tier_of(client, 0).size for client in (0, 1)] == list(sizes)
    return plan


class Look:
    """Notes the model after every round."""

    def __init__(self, model: Chain) -> None:
        self.model = model
        self.after: list[tuple[list[float], Rows, Rows]] = []

    def client(self, round: int, done: int, of: int) -> None:
        pass

    def round(self, *_: object) -> None:
        model = self.model
        self.after.append((model.w.weight[:, 0].tolist(), model.u.weight.tolist(), model.v.weight.tolist()))


def rounds(plan: Plan) -> tuple[list[tuple[list[float], Rows, Rows]], Results]:
    assert isinstance(plan.server.model, Chain)
    look = Look(plan.server.model)
    results = train(plan, Serial(plan), watcher=look)
    return look.after, results


ONES = [1.0, 1.0, 1.0, 1.0]


def test_two_rounds_of_fedavg() -> None:
    """All are full, so all numbers of w are equal, those of u too, and those of each row of v."""
    model = Chain(ONES, [ONES] * 4, [[4.0] * 4, ONES])
    (first, second), results = rounds(plan_of(model, "fedavg", (1.0, 1.0)))
    # Round 1. Client 1 (x 2, class 1): h 8, dv 8, du 1*1*2 = 2, dw 4*1*1*2 = 8.
    #          Client 0 (x 1, class 0): h 4, dv 4, du 4*1*1 = 4, dw 4*4*1*1 = 16.
    # w 1 - (3*8 + 16)/64 = 0.375       u 1 - (3*2 + 4)/64 = 0.84375
    # v[0] 4 - (0 + 4)/64 = 3.9375      v[1] 1 - (3*8 + 0)/64 = 0.625
    assert first == ([0.375] * 4, [[0.84375] * 4] * 4, [[3.9375] * 4, [0.625] * 4])
    # Losses: client 1 has 4*1*8 = 32, client 0 has 4*4*4 = 64.
    assert results.rounds[0].loss == 48
    # Round 2. Client 1: h 4*0.84375*0.375*2 = 2.53125, dv the same, du 0.625*0.375*2 = 0.46875,
    #                    dw 4*0.625*0.84375*2 = 4.21875.
    #          Client 0: h 4*0.84375*0.375 = 1.265625, dv the same, du 3.9375*0.375 = 1.4765625,
    #                    dw 4*3.9375*0.84375 = 13.2890625.
    # w 0.375 - (3*4.21875 + 13.2890625)/64           u 0.84375 - (3*0.46875 + 1.4765625)/64
    # v[0] 3.9375 - 1.265625/64                       v[1] 0.625 - 3*2.53125/64
    assert second == ([-0.0303955078125] * 4, [[0.7987060546875] * 4] * 4, [[3.917724609375] * 4, [0.50634765625] * 4])


AFTER_ONE = (
    [0.375, 0.5, 1.0, 1.0],
    [[0.5625, 0.75, 1.0, 1.0], [0.75, 0.75, 1.0, 1.0], ONES, ONES],
    [[3.75, 4.0, 4.0, 4.0], [0.5, 0.5, 1.0, 1.0]],
)
"""After the first round of HeteroFL, and of FedRolex, whose first window is the prefix.

Client 1 is 1/4 and holds 2 of the 4 indices of a and b; the scaler divides u's output by 1/2. Client 0 is 1/16 and holds
1 of 4; its scaler divides by 1/4. So x / ratio is 4 for both, and stands in the place of x in all derivatives.
Client 1 (class 1): h (1 + 1)*4 = 8, dv 8, du 1*1*4 = 4, dw 2*1*1*4 = 8.
Client 0 (class 0): h 1*4 = 4, dv 4, du 4*1*4 = 16, dw 4*1*4 = 16.
w[0] 1 - (3*8 + 16)/64 = 0.375        w[1] 1 - 8/16 = 0.5 (client 1 alone)        w[2], w[3] nobody
u[0, 0] 1 - (3*4 + 16)/64 = 0.5625    the rest of u[:2, :2] 1 - 4/16 = 0.75       others nobody
v[0, 0] 4 - 4/16 = 3.75: class 0 is counted by client 0 alone. It does not hold v[0, 1], client 1 has no class 0: nobody
v[1, :2] 1 - 8/16 = 0.5: class 1 is counted by client 1 alone
"""


def test_two_rounds_of_heterofl() -> None:
    model = Chain(ONES, [ONES] * 4, [[4.0] * 4, ONES])
    (first, second), results = rounds(plan_of(model, "heterofl", (1 / 16, 1 / 4)))
    assert first == AFTER_ONE
    # Losses: client 1 has v[1] h = 8 + 8 = 16, client 0 has 4*4 = 16.
    assert results.rounds[0].loss == 16
    # Round 2, the same prefixes. Client 1: h[0] (0.5625*0.375 + 0.75*0.5)*4 = 2.34375, h[1] (0.75*0.375 + 0.75*0.5)*4 = 2.625
    #   du[b, a] 0.5*w[a]*4: 0.75 and 1        dw[0] 0.5*(0.5625 + 0.75)*4 = 2.625, dw[1] 0.5*(0.75 + 0.75)*4 = 3
    # Client 0: h 0.5625*0.375*4 = 0.84375, du 3.75*0.375*4 = 5.625, dw 3.75*0.5625*4 = 8.4375
    assert second == (
        # 0.375 - (3*2.625 + 8.4375)/64, 0.5 - 3/16
        [0.1201171875, 0.3125, 1.0, 1.0],
        # 0.5625 - (3*0.75 + 5.625)/64, 0.75 - 1/16; 0.75 - 0.75/16, 0.75 - 1/16
        [[0.439453125, 0.6875, 1.0, 1.0], [0.703125, 0.6875, 1.0, 1.0], ONES, ONES],
        # 3.75 - 0.84375/16; 0.5 - 2.34375/16, 0.5 - 2.625/16
        [[3.697265625, 4.0, 4.0, 4.0], [0.353515625, 0.3359375, 1.0, 1.0]],
    )


def test_two_rounds_of_fedrolex() -> None:
    model = Chain(ONES, [ONES] * 4, [[4.0] * 4, ONES])
    (first, second), _ = rounds(plan_of(model, "fedrolex", (1 / 16, 1 / 4)))
    assert first == AFTER_ONE
    # Round 2: client 1 holds the indices 1 and 2, client 0 holds 1.
    # Client 1: w 0.5, 1; u 0.75, 1; 1, 1; v 0.5, 1.   h[1] (0.75*0.5 + 1*1)*4 = 5.5, h[2] (0.5 + 1)*4 = 6
    #   du[1, 1] 0.5*0.5*4 = 1, du[1, 2] 0.5*1*4 = 2, du[2, 1] 1*0.5*4 = 2, du[2, 2] 4
    #   dw[1] (0.5*0.75 + 1*1)*4 = 5.5, dw[2] (0.5*1 + 1*1)*4 = 6
    # Client 0: w 0.5, u 0.75, v 4.   h 0.75*0.5*4 = 1.5, du 4*0.5*4 = 8, dw 4*0.75*4 = 12
    assert second == (
        # index 0 is out of the window; 0.5 - (3*5.5 + 12)/64; 1 - 6/16
        [0.375, 0.0546875, 0.625, 1.0],
        # 0.75 - (3*1 + 8)/64, 1 - 2/16; 1 - 2/16, 1 - 4/16
        [[0.5625, 0.75, 1.0, 1.0], [0.75, 0.578125, 0.875, 1.0], [1.0, 0.875, 0.75, 1.0], ONES],
        # 4 - 1.5/16; 0.5 - 5.5/16, 1 - 6/16
        [[3.75, 3.90625, 4.0, 4.0], [0.5, 0.15625, 0.625, 1.0]],
    )


def test_two_rounds_of_raffm() -> None:
    """Only b may be cut, to 1 or 2 of 4: 10 or 16 of the 28 parameters, which 0.36 and 0.6 of them allow.

    Index b is as salient as the sum of row b of u, times that of column b of v.
    """
    model = Chain(ONES, [ONES] * 4, [[1.0, 1.0, 4.0, 1.0], [1.0, 1.0, 2.0, 2.0]])
    plan = plan_of(model, "raffm", (0.36, 0.6), space={"b": [1, 2, 4]})
    (first, second), _ = rounds(plan)
    # Salience 4*2, 4*2, 4*6, 4*3: client 1 holds the indices 2 and 3, client 0 holds 2.
    # Client 1: h 8, du 2*1*2 = 4 in both rows, dw (2 + 2)*2 = 8.   Client 0: h 4, du 4, dw 4.
    assert first == (
        # held by both: 1 - (3*8 + 4)/64
        [0.5625] * 4,
        # row 2 by both: 1 - (3*4 + 4)/64; row 3 by client 1: 1 - 4/16; rows 0 and 1 by nobody
        [ONES, ONES, [0.75] * 4, [0.75] * 4],
        # v[0, 2] both hold, client 0 moves: 4 - 4/64; v[1, 2] 2 - 3*8/64; v[1, 3] by client 1: 2 - 8/16
        [[1.0, 1.0, 3.9375, 1.0], [1.0, 1.0, 1.625, 1.5]],
    )
    # Salience 4*2 = 8, 8, 3*5.5625, 3*2.5 = 7.5: index 3 has fallen behind index 0, so client 1 holds 2 and 0.
    # Client 1: h[0] 4*0.5625*2 = 4.5, h[2] 4*0.75*0.5625*2 = 3.375; du[0] 1*0.5625*2 = 1.125,
    #   du[2] 1.625*0.5625*2 = 1.828125; dw (1*1 + 1.625*0.75)*2 = 4.4375
    # Client 0: h[2] 4*0.75*0.5625 = 1.6875, du[2] 3.9375*0.5625 = 2.21484375, dw 3.9375*0.75 = 2.953125
    assert second == (
        # 0.5625 - (3*4.4375 + 2.953125)/64
        [0.308349609375] * 4,
        # 1 - 1.125/16; nobody; 0.75 - (3*1.828125 + 2.21484375)/64; nobody
        [[0.9296875] * 4, ONES, [0.62969970703125] * 4, [0.75] * 4],
        # 3.9375 - 1.6875/64; 1 - 4.5/16, 1.625 - 3*3.375/64
        [[1.0, 1.0, 3.9111328125, 1.0], [0.71875, 1.0, 1.466796875, 1.5]],
    )


def test_two_rounds_of_fiarse() -> None:
    """Client 1 (0.2) holds round(0.2*28) = 6 weights, client 0 (0.1) holds 3. The factor at n thresholds: 1 + 2n/(n + 1)^2."""
    low = [0.25] * 4
    model = Chain(
        [3.0, 1.0, 0.25, 0.25], [[3.0, 1.0, 0.25, 0.25], low, low, low], [[3.0, 0.25, 0.25, 0.25], [1.0, 0.25, 0.25, 0.25]]
    )
    (first, second), results = rounds(plan_of(model, "fiarse", (0.1, 0.2), lr=1 / 64))
    # Client 1: threshold 1, the factor is 1.5 at 1 and 1 + 6/16 = 1.375 at 3. It sees w 3, 1; u[0] 3, 1; v[:, 0] 3, 1.
    #   h[0] (3*3 + 1*1)*2 = 20: dv[1, 0] 20*1.5 = 30    du[0, 0] 1*3*2*1.375 = 8.25, du[0, 1] 1*1*2*1.5 = 3
    #   dw[0] 1*3*2*1.375 = 8.25, dw[1] 1*1*2*1.5 = 3
    # Client 0: threshold 3, the factor is 1.5. It sees w[0] = u[0, 0] = v[0, 0] = 3: all derivatives are 9*1.5 = 13.5.
    assert first == (
        # 3 - (3*8.25 + 13.5)/256; 1 - 3/64 (client 1 alone)
        [2.8505859375, 0.953125, 0.25, 0.25],
        [[2.8505859375, 0.953125, 0.25, 0.25], low, low, low],
        # v[0, 0] both hold, client 0 moves: 3 - 13.5/256.   v[1, 0] 1 - 30/64: below the threshold, sent back all the same
        [[2.947265625, 0.25, 0.25, 0.25], [0.53125, 0.25, 0.25, 0.25]],
    )
    # Losses: client 1 has 1*20, client 0 has 3*9.
    assert results.rounds[0].loss == 23.5
    # Round 2: the same elements are largest; client 1's threshold is 0.53125, client 0's 2.8505859375. With
    # p = 2.8505859375 (w[0], u[0, 0]), q = 0.953125 (w[1], u[0, 1]), r = 2.947265625, s = 0.53125 (v[0, 0], v[1, 0]), and
    # f(m, th) = 1 + 2 m th / (m + th)^2: f(p, s) 1.2648244, f(q, s) 1.4596122, f(r, p) 1.4998610.
    # Client 1: dv[1, 0] (p*p + q*q)*2*1.5 = 27.1028624, dw[0] = du[0, 0] = s*p*2*f(p, s) = 3.8308338,
    #   dw[1] = du[0, 1] = s*q*2*f(q, s) = 1.4781424
    # Client 0: dv[0, 0] p*p*f(r, p) = 12.1876306, dw[0] = du[0, 0] = r*p*1.5 = 12.6021509
    expected = (
        # p - (3*3.8308338 + 12.6021509)/256, q - 1.4781424/64
        [2.7564662, 0.9300290, 0.25, 0.25],
        [[2.7564662, 0.9300290, 0.25, 0.25], low, low, low],
        # r - 12.1876306/256; s - 27.1028624/64
        [[2.8996577, 0.25, 0.25, 0.25], [0.1077678, 0.25, 0.25, 0.25]],
    )
    for found, hand in zip(second, expected, strict=True):
        assert np.asarray(found) == pytest.approx(np.asarray(hand), abs=1e-6)
    # What nobody held is exactly as it was.
    assert second[1][1:] == [low, low, low]


def test_two_rounds_of_fedavg_capable() -> None:
    """Client 1 cannot hold the model and sits out: client 0 alone moves it, with x = 1 of class 0."""
    model = Chain(ONES, [ONES] * 4, [[4.0] * 4, ONES])
    (first, second), results = rounds(plan_of(model, "fedavg-capable", (1.0, 1 / 4)))
    # h 4, dv[0] 4, du 4*1*1 = 4, dw 4*4*1*1 = 16
    # w 1 - 16/16        u 1 - 4/16        v[0] 4 - 4/16        class 1 nobody
    assert first == ([0.0] * 4, [[0.75] * 4] * 4, [[3.75] * 4, ONES])
    assert [entry.clients for entry in results.rounds] == [(0,), (0,)]
    # w is 0, so h, dv and du are 0; dw 4*3.75*0.75 = 11.25, w 0 - 11.25/16
    assert second == ([-0.703125] * 4, [[0.75] * 4] * 4, [[3.75] * 4, ONES])


def test_two_rounds_of_smallest_for_all() -> None:
    """Both train the model of 1/16, index 0 alone, without scaler and label mask; all other elements are nobody's."""
    model = Chain(ONES, [ONES] * 4, [[4.0] * 4, ONES])
    (first, second), results = rounds(plan_of(model, "smallest-for-all", (1 / 16, 1 / 4)))
    # Client 1 (x 2, class 1): h 2, dv 2, du 1*1*2 = 2, dw 2.   Client 0 (x 1, class 0): h 1, dv 1, du 4, dw 4.
    # w and u 1 - (3*2 + 4)/64 = 0.84375       v[0, 0] 4 - 1/64       v[1, 0] 1 - 3*2/64
    rest = [ONES, ONES, ONES]
    assert first == ([0.84375, *ONES[1:]], [[0.84375, *ONES[1:]], *rest], [[3.984375, 4, 4, 4], [0.90625, *ONES[1:]]])
    assert results.rounds[0].loss == 3  # 1*2 and 4*1
    # Client 1: h 0.84375^2*2 = 1.423828125, du and dw 0.90625*0.84375*2 = 1.529296875
    # Client 0: h 0.7119140625, du and dw 3.984375*0.84375 = 3.36181640625
    # w and u 0.84375 - (3*1.529296875 + 3.36181640625)/64
    # v[0, 0] 3.984375 - 0.7119140625/64       v[1, 0] 0.90625 - 3*1.423828125/64
    moved = 0.71953582763671875
    assert second == (
        [moved, *ONES[1:]],
        [[moved, *ONES[1:]], *rest],
        [[3.9732513427734375, 4, 4, 4], [0.839508056640625, *ONES[1:]]],
    )


def test_two_rounds_of_federated_dropout() -> None:
    """With HeteroFL's scaler, x / ratio is 4 for both clients. The seed deals these indices of a and b to them."""
    model = Chain(ONES, [ONES] * 4, [[4.0] * 4, ONES])
    plan = plan_of(model, "federated-dropout", (1 / 16, 1 / 4))
    drawn = [
        [{group: kept.tolist() for group, kept in order.share.selection.kept.items()} for order in plan.orders(round, (0, 1))]
        for round in range(2)
    ]
    assert drawn == [
        [{"a": [2], "b": [3]}, {"a": [1, 3], "b": [2, 3]}],
        [{"a": [1], "b": [1]}, {"a": [0, 1], "b": [0, 2]}],
    ]
    (first, second), results = rounds(plan)
    # Client 1: h 2*4 = 8, dv 8, du 4, dw 2*4 = 8.   Client 0: h 4, dv 4, du 4*4 = 16, dw 16.   No element is both's.
    assert first == (
        [1.0, 0.5, 0.0, 0.5],
        [ONES, ONES, [1.0, 0.75, 1.0, 0.75], [1.0, 0.75, 0.0, 0.75]],
        [[4.0, 4.0, 4.0, 3.75], [1.0, 1.0, 0.5, 0.5]],
    )
    assert results.rounds[0].loss == 16
    # Client 1: h[0] (1*1 + 1*0.5)*4 = 6, h[2] (1*1 + 0.75*0.5)*4 = 5.5; du[0] 1*w*4: 4, 2; du[2] 0.5*w*4: 2, 1
    #   dw[0] (1*1 + 0.5*1)*4 = 6, dw[1] (1*1 + 0.5*0.75)*4 = 5.5
    # Client 0: h[1] 1*0.5*4 = 2, du[1, 1] 4*0.5*4 = 8, dw[1] 4*1*4 = 16
    assert second == (
        # 1 - 6/16; both: 0.5 - (3*5.5 + 16)/64
        [0.625, -0.0078125, 0.0, 0.5],
        [[0.75, 0.875, 1.0, 1.0], [1.0, 0.5, 1.0, 1.0], [0.875, 0.6875, 1.0, 0.75], [1.0, 0.75, 0.0, 0.75]],
        # 4 - 2/16; 1 - 6/16, 0.5 - 5.5/16
        [[4.0, 3.875, 4.0, 3.75], [0.625, 1.0, 0.15625, 0.5]],
    )


def test_two_rounds_of_pruning_greedy() -> None:
    """FIARSE's masks of the test above with the factor 1."""
    low = [0.25] * 4
    model = Chain(
        [3.0, 1.0, 0.25, 0.25], [[3.0, 1.0, 0.25, 0.25], low, low, low], [[3.0, 0.25, 0.25, 0.25], [1.0, 0.25, 0.25, 0.25]]
    )
    (first, second), _ = rounds(plan_of(model, "pruning-greedy", (0.1, 0.2), lr=1 / 64))
    # Client 1: h[0] (9 + 1)*2 = 20, dv[1, 0] 20, du[0] 1*w*2: 6, 2, dw 6, 2.   Client 0: all derivatives are 9.
    p, q, r, s = 2.89453125, 0.96875, 2.96484375, 0.6875  # 3 - (3*6 + 9)/256, 1 - 2/64, 3 - 9/256, 1 - 20/64
    assert first == ([p, q, 0.25, 0.25], [[p, q, 0.25, 0.25], low, low, low], [[r, 0.25, 0.25, 0.25], [s, 0.25, 0.25, 0.25]])
    # Round 2, the same elements. Client 1: h[0] (p p + q q)*2 = 18.633575439453125, du[0] s w 2: 3.97998046875, 1.33203125.
    # Client 0: h[0] p p = 8.3783111572265625, du[0, 0] and dw[0] r p = 8.5818328857421875
    assert second[0][:2] == pytest.approx([2.8143680691719055, 0.947937011718750], abs=1e-7)
    assert second[1][0][:2] == pytest.approx(second[0][:2], abs=1e-7)
    assert second[2][0][0] == pytest.approx(2.9321159720420837, abs=1e-7)
    assert second[2][1][0] == pytest.approx(0.3963503837585449, abs=1e-7)
    assert second[0][2:] == [0.25, 0.25]


def test_two_rounds_of_fiarse_by_layer() -> None:
    """A threshold for each of w (4), u (16) and v (8): client 1 (1/2) keeps 2, 8 and 4 of them, client 0 (1/4) 1, 4 and 2."""
    model = Chain(
        [4.0, 2.0, 0.5, 0.5],
        [[4.0, 2.0, 0.5, 0.5], [2.0, 2.0, 0.5, 0.5], [1.0, 1.0, 0.5, 0.5], [1.0, 1.0, 0.5, 0.5]],
        model_v := [[4.0, 2.0, 0.5, 0.5], [2.0, 1.0, 0.5, 0.5]],
    )
    (first, second), _ = rounds(plan_of(model, "fiarse", (1 / 4, 1 / 2), lr=1 / 64, scope="layer"))
    # Client 1: thresholds 2, 1, 1. It sees w 4, 2; the columns 0 and 1 of u; v[:, :2]. h (16 + 4, 8 + 4, 4 + 2, 4 + 2)*2.
    #   dv[1, :2] 40, 24, factors at 2 and 1 times the threshold 1 + 4/9 and 1.5; du[b, a] v[1, b] w[a] 2 for b < 2:
    #   16, 8; 8, 4, factors at 4, 2, 2, 2 times: 1.32, 1 + 4/9, ...; dw[a] (2 u[0, a] + u[1, a]) 2: 20, 12, times 1 + 4/9, 1.5
    # Client 0: thresholds 4, 2, 2. It sees w 4; u 4, 2; 2, 2; v[0, 0], and of the equal 2s the first, v[0, 1].
    #   h[0] 16, h[1] 8: dv[0, :2] 16, 8 times 1 + 4/9 and 1.5; du[0, 0] 4*4 = 16 times 1 + 4/9, du[1, 0] 2*4 = 8 times 1.5;
    #   u[0, 1] and u[1, 1] read w[1], which it does not hold: 0; dw[0] 4*4 + 2*2 = 20 times 1.5
    third = 13 / 9  # 1 + 4/9
    assert first[0] == pytest.approx([4 - (3 * 20 * third + 20 * 1.5) / 256, 2 - 12 * 1.5 / 64, 0.5, 0.5], abs=1e-6)
    assert first[1][0] == pytest.approx([4 - (3 * 16 * 1.32 + 16 * third) / 256, 2 - 3 * 8 * third / 256, 0.5, 0.5], abs=1e-6)
    assert first[1][1] == pytest.approx([2 - (3 * 8 * third + 8 * 1.5) / 256, 2 - 3 * 4 * third / 256, 0.5, 0.5], abs=1e-6)
    assert first[1][2:] == [[1.0, 1.0, 0.5, 0.5]] * 2  # v[1, 2] and v[1, 3] are masked, so their rows get no gradient
    assert first[2][0] == pytest.approx([4 - 16 * third / 256, 2 - 8 * 1.5 / 256, 0.5, 0.5], abs=1e-6)
    assert first[2][1] == pytest.approx([2 - 40 * third / 64, 1 - 24 * 1.5 / 64, 0.5, 0.5], abs=1e-6)
    # The same rules once more, step by step; on the first round's start they give the numbers above.
    before = ([4.0, 2.0, 0.5, 0.5], [[4.0, 2, 0.5, 0.5], [2.0, 2, 0.5, 0.5], *[[1.0, 1, 0.5, 0.5]] * 2], model_v)
    for start, found in ((before, first), (first, second)):
        for tensor, expected in zip(found, a_round_by_layer(*start), strict=True):
            assert np.asarray(tensor) == pytest.approx(expected, abs=1e-6)


def a_round_by_layer(w: object, u: object, v: object) -> list[np.ndarray]:
    """Both clients' steps from these weights, and the counted mean of their changes."""
    weights = [np.asarray(w)[:, None], np.asarray(u), np.asarray(v)]
    sums, counts = [np.zeros_like(weight) for weight in weights], [np.zeros_like(weight) for weight in weights]
    for size, x, label, share in ((1 / 4, 1.0, 0, 1.0), (1 / 2, 2.0, 1, 3.0)):
        masks, thresholds = zip(*(_largest(weight, size) for weight in weights), strict=True)
        (w, u, v) = (weight * mask for weight, mask in zip(weights, masks, strict=True))
        one = np.arange(2)[:, None] == label
        gradients = [(v[label] @ u)[:, None] * x, np.outer(v[label], w[:, 0]) * x, one * (u @ w[:, 0] * x)]
        for place, (weight, mask, th) in enumerate(zip(weights, masks, thresholds, strict=True)):
            factor = 1 + 2 * abs(weight) * th / (abs(weight) + th) ** 2
            sums[place] -= share * mask * gradients[place] * factor / 64
            counts[place] += share * mask
    moved = [weight + change / np.maximum(count, 1) for weight, change, count in zip(weights, sums, counts, strict=True)]
    return [moved[0][:, 0], *moved[1:]]


def _largest(weight: np.ndarray, size: float) -> tuple[np.ndarray, float]:
    """Which elements are the largest, of equals the first, and the smallest of them."""
    order = np.argsort(-abs(weight).ravel(), kind="stable")[: round(size * weight.size)]
    mask = np.zeros(weight.size)
    mask[order] = 1
    return mask.reshape(weight.shape), float(abs(weight).ravel()[order[-1]])


def test_two_rounds_of_structured_fiarse() -> None:
    """Client 1 holds the 2 most important indices of a and b, client 0 the most important one.

    Index a counts |w[a]| and column a of u, index b row b of u and column b of v. With g the plain gradient, s the sum of
    magnitudes on the server and th that of the least kept index, weights along an index get sign(w) 2 th / (s + th)^2 <g, w>
    more, where <g, w> sums over the weights of the index that the client holds.
    """
    u = [[1.0, 0.5, 0.5, 0.5], [0.5, 2.0, 0.5, 1.0], [0.5, 1.0, 1.0, 2.0], [0.5, 0.5, 0.5, 0.5]]
    model = Chain([1.0, 2.0, 0.5, 1.0], u, [[1.0, 2.0, 0.5, 0.5], [0.5, 1.0, 2.0, 0.5]])
    (first, second), _ = rounds(plan_of(model, "fiarse-structured", (1 / 16, 1 / 4), lr=1 / 64))
    # Importance of a: 3.5, 6, 3, 5; of b: 4, 7, 7, 3. Client 1 holds a 1, 3 and b 1, 2; client 0 holds a 1 and b 1.
    # Client 0 (x 1, class 0): h 4, dv 4, du 4, dw 4; th = s: 2 th / (2 th)^2 is 1/12 for a and 1/14 for b.
    #   <g, w> of a: 4*2 + 4*2 = 16, of b: 4*2 + 4*2 = 16; so dw 4 + 16/12, du 4 + 16/12 + 16/14, dv[0] 4 + 16/14, dv[1] 16/14
    # Client 1 (x 2, class 1): h 10, 8; du 4, 2; 8, 4; dw 8, 10; slopes 10/121, 10/100 for a, 1/14 for both b.
    #   <g, w> of a: 8*2 + 4*2 + 8*1 = 32, 10*1 + 2*1 + 4*2 = 20; of b: 4*2 + 2*1 + 10*1 = 20, 8*1 + 4*2 + 8*2 = 32
    assert first[0] == pytest.approx([1.0, 1.8544249311294765, 0.5, 0.8125], abs=1e-6)
    assert first[1][1] == pytest.approx([0.5, 1.8800945739866195, 0.5, 0.9151785714285714], abs=1e-6)
    assert first[1][2] == pytest.approx([0.5, 0.7979634002361274, 1.0, 1.8705357142857144], abs=1e-6)
    assert first[2][0] == pytest.approx([1.0, 1.9631696428571428, 0.4642857142857143, 0.5], abs=1e-6)
    assert first[2][1] == pytest.approx([0.5, 0.8616071428571428, 1.8392857142857144, 0.5], abs=1e-6)
    # Round 2 holds the same indices.
    assert second[0] == pytest.approx([1.0, 1.7387595029232525, 0.5, 0.6569928245778742], abs=1e-6)
    assert second[1][1] == pytest.approx([0.5, 1.7826025908054355, 0.5, 0.8527476197180359], abs=1e-6)
    assert second[1][2] == pytest.approx([0.5, 0.6326702121332054, 1.0, 1.7738445121719448], abs=1e-6)
    assert second[2][0] == pytest.approx([1.0, 1.9326099351642647, 0.4376468635746189, 0.5], abs=1e-6)
    assert second[2][1] == pytest.approx([0.5, 0.7455241273903409, 1.7189101919688732, 0.5], abs=1e-6)
    assert (first[1][0], first[1][3], second[1][0], second[1][3]) == (u[0], u[3], u[0], u[3])
