"""Two rounds of ScaleFL, computed without raffm: plain tensors, a ViT written out, indices counted by hand.

The model has a residual stream of 8, three blocks with 2 heads of 4 rows and 6 hidden units, and exits after each block.
Three clients have the first exit at half width, the second at half width, and the whole. Each makes two steps of SGD over
all of its examples. Everything is float64, so that what differs is wrong and not rounded.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raffm.data.examples import Dataset, Examples, Federation, Parts, Split
from raffm.data.task import Batch, Classification
from raffm.devices.fleet import Fleet, Tier
from raffm.methods import method_of
from raffm.models.exits import Exits
from raffm.models.labelled import Labelled
from raffm.models.load import tiny
from raffm.rounds.backend import Serial
from raffm.rounds.local import Local
from raffm.rounds.loop import train
from raffm.rounds.plan import Participation, Plan

STREAM, HEADS, ROWS, HIDDEN, CLASSES = 8, 2, 4, 6, 3
RATE, GAMMA, TEMPERATURE, STEPS, ROUNDS = 0.2, 0.4, 2.0, 2, 2
OWN = ([0, 1], [2, 3, 4, 5], [6, 7, 8, 9])
"""The examples of the three clients: they weigh 2, 4 and 4."""

State = dict[str, Tensor]


@dataclass(frozen=True)
class Level:
    """The blocks up to an exit, and a width; `size` is a part of the parameters that just lets it through."""

    exit: int
    ratio: float
    size: float


def parameters_of(exit: int, stream: int, rows: int, hidden: int) -> int:
    """All that a level holds: one channel of 2 x 2 patches, 4 of them and the first token, blocks and heads."""
    stem = (4 + 1) * stream + stream + 5 * stream
    inner = HEADS * rows
    attention = 3 * (stream * inner + inner) + inner * stream + stream
    block = attention + stream * hidden + hidden + hidden * stream + stream + 4 * stream
    head = 2 * stream + stream * CLASSES + CLASSES
    return stem + exit * (block + head)


WHOLE = parameters_of(3, STREAM, ROWS, HIDDEN)
LEVELS = (
    Level(1, 0.5, (parameters_of(1, 4, 2, 3) + 0.5) / WHOLE),
    Level(2, 0.5, (parameters_of(2, 4, 2, 3) + 0.5) / WHOLE),
    Level(3, 1.0, 1.0),
)

# -- the same, written out -----------------------------------------------------------------------------------------


def held(name: str, level: Level) -> list[list[int]] | None:
    """The indices of every axis of a tensor that a level holds; None of a tensor behind its exit."""
    if name.startswith("exits.") and int(name.split(".")[1]) >= level.exit:
        return None
    stream = list(range(int(STREAM * level.ratio)))
    inner = [head * ROWS + row for head in range(HEADS) for row in range(int(ROWS * level.ratio))]
    hidden, classes = list(range(int(HIDDEN * level.ratio))), list(range(CLASSES))
    owner, _, kind = name.rpartition(".")
    maps = {"q_proj": (inner, stream), "k_proj": (inner, stream), "v_proj": (inner, stream), "o_proj": (stream, inner)}
    maps |= {"fc1": (hidden, stream), "fc2": (stream, hidden), "classifier": (classes, stream)}
    last = owner.rpartition(".")[2]
    if last in maps:
        return list(maps[last]) if kind == "weight" else [maps[last][0]]
    return {
        "stem.embeddings.cls_token": [[0], [0], stream],
        "stem.embeddings.position_embeddings": [[0], list(range(5)), stream],
        "stem.embeddings.patch_embeddings.projection.weight": [stream, [0], [0, 1], [0, 1]],
    }.get(name, [stream])  # norms, and the bias of the patches


def normed(state: State, name: str, hidden: Tensor) -> Tensor:
    mean, spread = hidden.mean(-1, keepdim=True), hidden.var(-1, unbiased=False, keepdim=True)
    return (hidden - mean) / torch.sqrt(spread + 1e-12) * state[f"{name}.weight"] + state[f"{name}.bias"]


def mapped(state: State, name: str, hidden: Tensor) -> Tensor:
    return hidden @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def block(state: State, name: str, hidden: Tensor, ratio: float) -> Tensor:
    """What every map gives is divided by the width's ratio; scores by the root of a full head's rows, however many are left."""
    read = normed(state, f"{name}.layernorm_before", hidden)
    query, key, value = (mapped(state, f"{name}.attention.{kind}_proj", read) / ratio for kind in "qkv")
    rows = query.shape[-1] // HEADS
    found = []
    for head in range(HEADS):
        own = slice(head * rows, (head + 1) * rows)
        scores = query[..., own] @ key[..., own].transpose(1, 2) / math.sqrt(ROWS)
        found.append(torch.softmax(scores, -1) @ value[..., own])
    hidden = hidden + mapped(state, f"{name}.attention.o_proj", torch.cat(found, -1)) / ratio
    read = mapped(state, f"{name}.mlp.fc1", normed(state, f"{name}.layernorm_after", hidden)) / ratio
    bent = read * 0.5 * (1 + torch.erf(read / math.sqrt(2)))
    return hidden + mapped(state, f"{name}.mlp.fc2", bent) / ratio


def exits_of(state: State, images: Tensor, level: Level) -> list[Tensor]:
    """What every exit of a level says; the patches are read whole, so what they give is not divided."""
    patches = images.unfold(2, 2, 2).unfold(3, 2, 2).reshape(len(images), 4, 4)  # (batch, patch, 2 * 2)
    kernel = state["stem.embeddings.patch_embeddings.projection.weight"]
    tokens = patches @ kernel.reshape(len(kernel), 4).T + state["stem.embeddings.patch_embeddings.projection.bias"]
    first = state["stem.embeddings.cls_token"].expand(len(images), 1, -1)
    hidden = torch.cat([first, tokens], 1) + state["stem.embeddings.position_embeddings"]
    said = []
    for exit in range(level.exit):
        hidden = block(state, f"exits.{exit}.blocks.0", hidden, level.ratio)
        said.append(mapped(state, f"exits.{exit}.head.classifier", normed(state, f"exits.{exit}.head.norm", hidden)[:, 0]))
    return said


def loss_of(said: list[Tensor], labels: Tensor) -> Tensor:
    """2 / (n (n + 1)) times the sum over j of j (CE_j + gamma T^2 KL(teacher, exit j)), the last without its KL."""
    count, total = len(said), torch.zeros((), dtype=torch.float64)
    teacher = torch.softmax(said[-1].detach() / TEMPERATURE, -1)
    for place, logits in enumerate(said, start=1):
        own = -torch.log_softmax(logits, -1)[torch.arange(len(labels)), labels].mean()
        if place < count:
            apart = teacher * (teacher.log() - torch.log_softmax(logits / TEMPERATURE, -1))
            own = own + GAMMA * TEMPERATURE**2 * apart.sum(-1).mean()
        total = total + place * own
    return total * 2 / (count * (count + 1))


def trained(server: State, level: Level, images: Tensor, labels: Tensor) -> tuple[State, float]:
    """A level's tensors after its steps, and the mean loss of them."""
    cut = {name: held(name, level) for name in server}
    own = {name: server[name][np.ix_(*axes)].clone().requires_grad_() for name, axes in cut.items() if axes is not None}
    losses = []
    for _ in range(STEPS):
        loss = loss_of(exits_of(own, images, level), labels)
        for name, gradient in zip(own, torch.autograd.grad(loss, list(own.values())), strict=True):
            own[name] = (own[name] - RATE * gradient).detach().requires_grad_()
        losses.append(float(loss.detach()))
    return {name: tensor.detach() for name, tensor in own.items()}, sum(losses) / STEPS


def a_round(server: State, levels: list[Level], images: Tensor, labels: Tensor) -> tuple[State, float]:
    """Every element becomes the mean of those who held it, by their examples; what nobody held stays."""
    sums = {name: torch.zeros_like(tensor) for name, tensor in server.items()}
    weights = {name: torch.zeros_like(tensor) for name, tensor in server.items()}
    losses = []
    for client, level in enumerate(levels):
        found, loss = trained(server, level, images[OWN[client]], labels[OWN[client]])
        losses.append(loss)
        for name, tensor in found.items():
            places = np.ix_(*(held(name, level) or []))
            sums[name][places] += len(OWN[client]) * tensor
            weights[name][places] += len(OWN[client])
    return {name: torch.where(weights[name] > 0, sums[name] / weights[name], server[name]) for name in server}, sum(losses) / 3


# -- by raffm ------------------------------------------------------------------------------------------------------


class Plain(Classification):
    """Images as they are stored."""

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.zeros((*shape, 0), dtype=torch.int64)

    def batch(self, examples: Examples, picks: Tensor, moves: Tensor | None = None) -> Batch:
        return Batch({"pixel_values": examples.inputs["pixel_values"][picks]}, examples.labels[picks])


def model() -> nn.Module:
    config = {"hidden_size": STREAM, "num_attention_heads": HEADS, "intermediate_size": HIDDEN, "num_labels": CLASSES}
    made = tiny("vit", **config, num_hidden_layers=3, image_size=4, patch_size=2, num_channels=1).double()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * 0.3)
    return made


def plan_of(images: Tensor, labels: Tensor) -> Plan:
    split = Split(
        Parts.of([np.array(own) for own in OWN]), Parts.of([np.arange(3)[client : client + 1] for client in range(3)])
    )
    test = Examples({"pixel_values": images[:3]}, labels[:3])
    dataset = Dataset("by hand", Examples({"pixel_values": images}, labels), test, ("a", "b", "c"))
    return Plan(
        server=Labelled.of(model()),
        method=method_of("scalefl", widths=(0.5, 1.0), gamma=GAMMA, temperature=TEMPERATURE),
        task=Plain(),
        data=Federation(dataset, split),
        fleet=Fleet(tuple(Tier(level.size) for level in LEVELS)),
        rounds=ROUNDS,
        local=Local("sgd", lr=RATE, batch=4, steps=STEPS),  # client 0 has 2 examples and sees each of them twice a step
        participation=Participation(3),
    )


class Look:
    """Notes the model and the loss after every round."""

    def __init__(self, server: Labelled) -> None:
        self.server = server
        self.after: list[tuple[State, float | None]] = []

    def client(self, round: int, done: int, of: int) -> None:
        pass

    def round(self, entry: object, *_: object) -> None:
        state = {name: tensor.detach().clone() for name, tensor in self.server.tensors.items()}
        self.after.append((state, entry.loss))  # type: ignore[attr-defined]


def test_two_rounds_of_scalefl() -> None:
    draw = torch.Generator().manual_seed(1)
    images, labels = torch.randn(10, 1, 4, 4, generator=draw, dtype=torch.float64), torch.arange(10) % CLASSES
    plan = plan_of(images, labels)
    assert isinstance(plan.server.model, Exits)
    dealt = [next(level for level in LEVELS if level.size == plan.tier_of(client, 0).size) for client in range(3)]
    assert set(dealt) == set(LEVELS)
    chosen = [order.share.numbers for order in plan.orders(0, range(3))]
    assert [(numbers["exit"], numbers["ratio"]) for numbers in chosen] == [(level.exit, level.ratio) for level in dealt]
    server = {name: tensor.detach().clone() for name, tensor in plan.server.tensors.items()}
    look = Look(plan.server)
    train(plan, Serial(plan), watcher=look)
    assert len(look.after) == ROUNDS
    for found, loss in look.after:
        before = server
        server, expected = a_round(server, dealt, images, labels)
        assert loss == pytest.approx(expected, rel=1e-6)
        assert set(found) == set(server)
        for name, tensor in server.items():
            assert torch.allclose(found[name], tensor, rtol=1e-9, atol=1e-11), name
            assert name.endswith("k_proj.bias") or not torch.allclose(tensor, before[name], atol=1e-4), name
