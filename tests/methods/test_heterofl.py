"""HeteroFL: prefixes, the scaler, the masked loss and classes counted by their owners."""

from math import ceil, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from methods.runs import ALL, CLASSES, FAMILIES, drawn, labelled, module_of, plan_of, rounds_of, same_bits, snapshot
from raffm.algebra.tally import Tally
from raffm.errors import RunError
from raffm.methods import method_of
from raffm.methods.method import Client, Device, Share, Update
from raffm.methods.widths import width_groups
from raffm.models.labelled import Labelled
from raffm.models.table import read
from raffm.rounds.plan import Plan

SERVERS = {family: labelled(family) for family in FAMILIES}
HEADS = {"raffm_resnet": "head", "vit": "classifier", "bert": "classifier"}


def share_of(server: Labelled, size: float, round: int = 0, name: str = "heterofl") -> Share:
    return method_of(name).choose(server, round, [Device(0, size)], 0)[0]


@settings(max_examples=25)
@given(family=st.sampled_from(FAMILIES), size=st.floats(0.004, 1), less=st.floats(0.1, 1))
def test_every_width_is_a_prefix_of_ceil_n_s_and_smaller_ones_are_contained(family: str, size: float, less: float) -> None:
    """Invariant 12."""
    server = SERVERS[family]
    layout, large, small = server.layout, share_of(server, size).selection, share_of(server, size * less).selection
    for name, full in layout.sizes.items():
        is_width = name in width_groups(layout)
        expected = ceil(full * sqrt(size) - 1e-9) if is_width else full
        assert layout.sizes_of(large)[name] == expected, name
    assert {"classes", "channels"} & set(layout.groups) <= set(layout.groups) - set(large.kept)
    for name, kept in large.kept.items():
        rows = kept if kept.dim() == 1 else kept[0]
        assert rows.tolist() == list(range(len(rows)))
        assert set(small.kept[name].flatten().tolist()) <= set(rows.tolist())


@pytest.mark.parametrize(
    ("family", "shapes"),
    [
        ("raffm_resnet", {"stem.conv": (4, 3, 3, 3), "stages.1.0.conv1": (6, 4, 3, 3), "head": (5, 8)}),
        ("vit", {"vit.embeddings.patch_embeddings.projection": (8, 3, 4, 4), "classifier": (5, 8)}),
        ("bert", {"bert.embeddings.word_embeddings": (50, 8), "bert.encoder.layer.0.intermediate.dense": (12, 8)}),
    ],
)
def test_a_quarter_is_a_really_smaller_module_with_all_inputs_and_classes(family: str, shapes: dict[str, tuple[int]]) -> None:
    plan = plan_of(family, "heterofl", server=SERVERS[family])
    module = module_of(plan, share_of(plan.server, 1 / 4))
    assert {name: tuple(module.get_submodule(name).weight.shape) for name in shapes} == shapes
    assert module.get_submodule(HEADS[family]).weight.shape[0] == CLASSES


@pytest.mark.parametrize(
    ("family", "query"), [("vit", "vit.layers.1.attention.q_proj"), ("bert", "bert.encoder.layer.1.attention.self.query")]
)
@pytest.mark.parametrize(("size", "rows"), [(1 / 4, 2), (0.5, 3), (1 / 16, 1)])
def test_rows_of_queries_are_the_first_ones_of_every_head(family: str, query: str, size: float, rows: int) -> None:
    """Invariant 13: 4 heads of 4 rows; the rows of head h are h*4 + j."""
    plan = plan_of(family, "heterofl", server=SERVERS[family])
    module = module_of(plan, share_of(plan.server, size))
    columns = ceil(16 * sqrt(size) - 1e-9)
    picked = [head * 4 + row for head in range(4) for row in range(rows)]
    full = plan.server.tensors[f"{query}.weight"]
    assert torch.equal(module.get_submodule(query).weight, full[picked, :columns])
    assert torch.equal(module.get_submodule(query).bias, plan.server.tensors[f"{query}.bias"][picked])


# -- the scaler ----------------------------------------------------------------------------------------------------


def outputs_of_maps(module: nn.Module, plan: Plan) -> dict[str, tuple[Tensor, Tensor]]:
    """What every linear map gives in a forward pass, and what its weights alone make of the same input."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str) -> object:
        def note(child: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            found[name] = output.detach(), type(child).forward(child, *inputs).detach()

        return note

    maps = [(name, child) for name, child in module.named_modules() if isinstance(child, nn.Linear | nn.Conv2d)]
    hooks = [child.register_forward_hook(watch(name)) for name, child in maps]
    plan.task.forward(module, plan.task.batch(plan.data.dataset.train, torch.arange(4)))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", ["heterofl", "fedrolex"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_scaler_divides_what_cut_maps_give_in_training_and_is_gone_afterwards(family: str, name: str) -> None:
    """Invariant 14: before the norm, as the maps themselves are divided; not the head, nor what reads all inputs."""
    plan = plan_of(family, name, server=SERVERS[family])
    share = share_of(plan.server, 1 / 4, 1, name)
    module = module_of(plan, share)
    learn = plan.method.learn(plan.server, share, share.selection, Client(plan.task, torch.ones(CLASSES, dtype=torch.bool)))
    whole = {HEADS[family], "stem.conv", "vit.embeddings.patch_embeddings.projection"}
    learn.prepare(module)
    for child, (output, plain) in outputs_of_maps(module.train(), plan).items():
        assert torch.equal(output, plain if child in whole else plain / 0.5), child
    for child, (output, plain) in outputs_of_maps(module.eval(), plan).items():
        assert torch.equal(output, plain), child
    learn.finish(module)
    for child, (output, plain) in outputs_of_maps(module.train(), plan).items():
        assert torch.equal(output, plain), child


@pytest.mark.parametrize("switches", [{"scaler": False}, {}])
def test_without_the_switch_or_at_full_size_nothing_is_scaled(switches: dict[str, bool]) -> None:
    plan = plan_of("vit", "heterofl", server=SERVERS["vit"], switches=switches)
    share = share_of(plan.server, 1 if not switches else 1 / 4)
    module = module_of(plan, share)
    plan.method.learn(plan.server, share, share.selection, Client(plan.task, torch.ones(5, dtype=torch.bool))).prepare(module)
    assert all(torch.equal(output, plain) for output, plain in outputs_of_maps(module.train(), plan).values())


class Bare(nn.Module):
    """Maps that are parameters of the model itself, in no module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 5)
        self.middle = nn.Parameter(torch.rand(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.linear(self.first(x), self.middle))


BARE = read(
    """
family = "bare"
[groups]
classes = { pinned = true }
pixels = { pinned = true }
[tensors]
"first" = "pixels -> a"
"middle" = "a -> b"
"last" = "b -> classes"
"""
)


def test_the_scaler_refuses_a_map_without_a_module_of_its_own() -> None:
    server = Labelled.of(Bare(), BARE)
    with pytest.raises(RunError, match=r"`middle` is a parameter without a module.* scaler = false"):
        method_of("heterofl").refuse(server, [Device(-1, 1.0)])
    method_of("heterofl", scaler=False).refuse(server, [Device(-1, 1.0)])


# -- the masked loss -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_masked_loss_over_all_classes_is_the_plain_one(family: str) -> None:
    """Invariant 15, first half."""
    plan = plan_of(family, "heterofl", server=SERVERS[family])
    batch = plan.task.batch(plan.data.dataset.train, torch.arange(5))
    module = plan.server.model.eval()
    present = torch.ones(CLASSES, dtype=torch.bool)
    losses = []
    for masked_loss in (True, False):
        method = method_of("heterofl", masked_loss=masked_loss)
        losses.append(method.learn(plan.server, share_of(plan.server, 1), Share().selection, Client(plan.task, present)).loss)
    assert torch.equal(losses[0](module, batch), losses[1](module, batch))


@settings(max_examples=20)
@given(present=st.sets(st.integers(0, 4), min_size=1), seed=st.integers(0, 5))
def test_absent_classes_have_no_probability_and_no_gradient(present: set[int], seed: int) -> None:
    """Invariant 15, second half: the loss is the cross-entropy over the classes that are there."""
    plan = plan_of("vit", "heterofl", server=SERVERS["vit"])
    owned = torch.tensor([label in present for label in range(CLASSES)])
    labels = torch.tensor(sorted(present))[torch.randint(len(present), (6,), generator=drawn(seed))]
    batch = plan.task.batch(plan.data.dataset.train, torch.arange(6))
    batch = type(batch)(batch.inputs, labels)
    model = plan.server.model.eval()
    share = share_of(plan.server, 1)
    loss = plan.method.learn(plan.server, share, share.selection, Client(plan.task, owned)).loss(model, batch)
    logits = plan.task.forward(model, batch)
    places = torch.tensor([sorted(present).index(int(label)) for label in labels])
    expected = functional.cross_entropy(logits[:, owned], places)
    assert torch.allclose(loss, expected, atol=1e-6)
    gradient = torch.autograd.grad(loss, [model.classifier.weight, model.classifier.bias])
    assert all(bool((part[~owned] == 0).all()) for part in gradient)
    assert len(present) == 1 or all(bool((part[owned] != 0).any()) for part in gradient)


@pytest.mark.parametrize("name", ["heterofl", "fedrolex"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_class_that_nobody_has_stay_and_others_are_counted_by_their_owners(family: str, name: str) -> None:
    """Invariant 16: classes 3 and 4 occur nowhere; class 2 at client 1 alone, which therefore moves it by itself."""
    labels = [[0, 1] * 4, [1, 2] * 6]
    plan, alone = (plan_of(family, name, "1", labels) for _ in range(2))
    before = snapshot(plan.server)
    rounds_of(plan)
    rounds_of(alone, [1])
    for tensor in (f"{HEADS[family]}.weight", f"{HEADS[family]}.bias"):
        after, by_one = plan.server.tensors[tensor], alone.server.tensors[tensor]
        assert same_bits(after[3:], before[tensor][3:])
        assert all(not torch.equal(after[row], before[tensor][row]) for row in range(3))
        assert torch.allclose(after[2], by_one[2], rtol=1e-6, atol=1e-7)
        assert not torch.allclose(after[1], by_one[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 1, 0], [2, 0, 1]])
def test_counting_by_class_does_not_depend_on_who_answers_first(order: list[int]) -> None:
    """One client has all classes, the others have some: the weights of row c are the examples of those who have c."""
    plan = plan_of("vit", "heterofl", "full", [ALL, [0, 1] * 5, [1, 1, 2] * 5])
    server, share = plan.server, share_of(plan.server, 1)
    before = snapshot(server)["classifier.bias"]
    tally = Tally(server.layout, server.tensors)
    for client in order:
        tensors = {name: server.tensors[name].detach() + 2**client for name in server.layout.tensors("parameter", "buffer")}
        plan.method.merge(
            tally, server, Update(client, share, share.selection, tensors, plan.weight(client), plan.present(client))
        )
    tally.step()
    # Weights 5, 10, 15, changes 1, 2, 4. Class 0: (5*1 + 10*2)/15; class 1: (5 + 20 + 60)/30; class 2: (5 + 60)/20.
    moved = server.tensors["classifier.bias"].detach() - before
    assert moved.tolist() == pytest.approx([25 / 15, 85 / 30, 65 / 20, 1, 1], abs=1e-6)


@pytest.mark.parametrize("name", ["heterofl", "fedrolex"])
def test_without_the_masked_loss_every_row_of_the_head_is_trained(name: str) -> None:
    plan = plan_of("vit", name, "1", [[0, 1] * 4], switches={"masked_loss": False})
    before = snapshot(plan.server)["classifier.weight"]
    rounds_of(plan)
    assert all(not torch.equal(one, other) for one, other in zip(plan.server.tensors["classifier.weight"], before, strict=True))


def test_what_a_small_client_does_not_hold_moves_as_if_the_full_one_were_alone() -> None:
    plan, alone = (plan_of("vit", "heterofl", "1, 1/4", [ALL, ALL * 2]) for _ in range(2))
    large = [plan.tier_of(client, 0).size for client in (0, 1)].index(1)
    before = snapshot(plan.server)["vit.layers.0.mlp.fc1.weight"]
    rounds_of(plan)
    rounds_of(alone, [large])
    after, by_one = (each.server.tensors["vit.layers.0.mlp.fc1.weight"] for each in (plan, alone))
    assert torch.allclose(after[12:], by_one[12:], rtol=1e-6, atol=1e-7)
    assert torch.allclose(after[:, 8:], by_one[:, 8:], rtol=1e-6, atol=1e-7)
    assert not torch.allclose(after[:12, :8], by_one[:12, :8], rtol=1e-6, atol=1e-7)
    assert not torch.equal(after[12:], before[12:])
