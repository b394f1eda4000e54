"""ScaleFL: levels of depth and width, the losses of all exits, distillation, and the scaler that stays in the model."""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from math import ceil, floor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from methods.runs import (
    ALL,
    CLASSES,
    Says,
    drawn,
    federation,
    labelled,
    module_of,
    plan_of,
    rounds_of,
    run,
    same_bits,
    snapshot,
)
from raffm.algebra.selection import Selection
from raffm.data.task import Batch, ImageClassification
from raffm.errors import RunError, SpaceError
from raffm.methods import method_of
from raffm.methods.method import Client, Device, Learn, Method, Share
from raffm.methods.scalefl import EIGHTHS, ScaleFL, divergence, exit_loss, exit_weight, pairs
from raffm.models.exits import Exits
from raffm.models.labelled import Labelled
from raffm.models.load import tiny, trainable
from raffm.models.surgery import skeleton
from raffm.rounds.backend import Serial
from raffm.rounds.costs import Costs
from raffm.rounds.evaluate import evaluate
from raffm.rounds.plan import Plan
from raffm.rounds.predict import Job, served
from raffm.rounds.workshop import Workshop

FAMILIES = ("vit", "bert", "raffm_resnet", "resnet")
each_family = pytest.mark.parametrize("family", FAMILIES)
Floats = NDArray[np.float64]


@cache
def server_of(family: str) -> Labelled:
    """A tiny model with exits; shared by tests that train nothing."""
    return ScaleFL().adapt(labelled(family), 0, (1.0,))


@cache
def shares_of(family: str) -> dict[tuple[int, float], Share]:
    """The share of every exit and width."""
    found = [pair.share for pair in pairs(server_of(family), EIGHTHS)]
    return {(int(share.numbers["exit"]), share.numbers["ratio"]): share for share in found}


@cache
def method(**switches: Hashable) -> Method:
    """The method with these switches; it remembers the parameters of all levels."""
    return method_of("scalefl", **switches)


def share_for(server: Labelled, size: float, **switches: Hashable) -> Share:
    (share,) = method(**switches).choose(server, 0, [Device(0, size)], 0)
    assert share is not None
    return share


def size_of(family: str, exit: int, ratio: float) -> float:
    """A size that lets a device hold just this exit and width."""
    layout = server_of(family).layout
    return (layout.count(shares_of(family)[exit, ratio].selection) + 0.5) / layout.count(Selection())


def learn_of(plan: Plan, share: Share) -> Learn:
    return plan.method.learn(plan.server, share, share.selection, Client(plan.task, torch.ones(CLASSES, dtype=torch.bool)))


def bytes_of(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())


# -- levels --------------------------------------------------------------------------------------------------------


@each_family
@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_a_level_has_no_parameter_behind_its_exit(family: str, ratio: float) -> None:
    """Invariant 23."""
    plan = plan_of(family, "scalefl", server=server_of(family))
    full = plan.server.model.state_dict()
    count = len(plan.server.model.exits)
    assert count == (4 if "resnet" in family else 3)
    sizes = []
    for exit in range(1, count + 1):
        share = shares_of(family)[exit, ratio]
        module = module_of(plan, share)
        state = module.state_dict()
        behind = tuple(f"exits.{place}." for place in range(exit, count))
        assert set(state) == {name for name in full if not name.startswith(behind)}
        assert any(name.startswith(f"exits.{exit - 1}.blocks") for name in state)
        assert all(state[name].numel() <= full[name].numel() for name in state)
        sizes.append(sum(parameter.numel() for parameter in module.parameters()))
        assert sizes[-1] == plan.server.layout.count(share.selection)
    assert sizes == sorted(set(sizes))
    assert (sizes[-1] == plan.server.layout.count(Selection())) is (ratio == 1)


@each_family
def test_a_shallow_client_is_sent_its_layers_alone_and_computes_no_others(family: str) -> None:
    """Invariant 23, on the wire and in the work."""
    plan = plan_of(family, "scalefl", server=server_of(family))
    costs = Costs(plan)
    levels = [shares_of(family)[exit, 0.5] for exit in range(1, len(plan.server.model.exits) + 1)]
    for share in levels:
        assert costs.of(share).bytes_down == costs.of(share).bytes_up == bytes_of(module_of(plan, share))
    flops = [costs.of(share).flops for share in levels]
    assert flops == sorted(set(flops))
    assert flops[0] > 0


QUARTERS = (1 / 4, 1 / 2, 3 / 4, 1.0)


@cache
def counted_by_hand(family: str) -> dict[tuple[int, float], int]:
    """The parameters of every exit and width, counted in skeletons cut by ceil(n * s)."""
    server = server_of(family)
    layout = server.layout
    widths = [name for name in layout.free if name != "exits" and not name.endswith("heads")]
    found = {}
    for exit in range(1, layout.sizes["exits"] + 1):
        for ratio in QUARTERS:
            kept = {name: ceil(layout.sizes[name] * ratio - 1e-9) for name in widths}
            frame = skeleton(server.model, layout, layout.select({**kept, "exits": exit}))
            found[exit, ratio] = sum(parameter.numel() for parameter in frame.parameters())
    return found


@settings(max_examples=40)
@given(family=st.sampled_from(FAMILIES[:3]), size=st.floats(0.1, 1))
def test_a_device_gets_the_most_parameters_that_fit(family: str, size: float) -> None:
    known = counted_by_hand(family)
    most = max(count for count in known.values() if count <= size * max(known.values()) + 1e-6)  # of a parameter
    deepest = max(exit for (exit, _), count in known.items() if count == most)
    numbers = share_for(server_of(family), size, widths=QUARTERS).numbers
    assert known[int(numbers["exit"]), numbers["ratio"]] == most
    assert numbers["exit"] == deepest


def test_a_full_device_gets_the_full_model() -> None:
    for family in FAMILIES:
        share = share_for(server_of(family), 1.0)
        assert share.selection == Selection()
        assert share.numbers["ratio"] == 1


@pytest.mark.parametrize(
    ("ffn", "classes", "params", "deeper", "flatter"),
    [(4, 8, 377, (3, 1 / 8), (1, 1 / 4)), (12, 5, 1422, (3, 3 / 8), (2, 1 / 2)), (32, 8, 2758, (2, 5 / 8), (1, 7 / 8))],
)
def test_of_equal_pairs_the_deeper_one_is_chosen(
    ffn: int, classes: int, params: int, deeper: tuple[int, float], flatter: tuple[int, float]
) -> None:
    server = ScaleFL().adapt(Labelled.of(tiny("vit", intermediate_size=ffn, num_labels=classes)), 0, (1.0,))
    known = {(pair.share.numbers["exit"], pair.share.numbers["ratio"]): pair.params for pair in pairs(server, EIGHTHS)}
    assert known[deeper] == known[flatter] == params
    for widths in (EIGHTHS, EIGHTHS[::-1]):
        numbers = share_for(server, (params + 0.5) / known[3, 1], widths=widths).numbers
        assert (numbers["exit"], numbers["ratio"]) == deeper


def test_a_wider_choice_of_exits_and_widths_is_used() -> None:
    server = ScaleFL(after=(2,), widths=(0.3, 1.0)).adapt(labelled("vit"), 0, (1.0,))
    assert server.model.recipe.after == (2,)
    assert {tuple(sorted(pair.share.numbers.items())) for pair in pairs(server, (0.3, 1.0))} == {
        (("exit", exit), ("ratio", ratio)) for exit in (1, 2) for ratio in (0.3, 1.0)
    }
    assert share_for(server, 0.999, widths=(0.3, 1.0)).numbers["exit"] == 1


def assert_dealt(counts: list[int], shares: list[int]) -> None:
    """Everybody has the whole part of its share, and those with the largest remainders have one more."""
    exact = [Fraction(sum(counts) * share, sum(shares)) for share in shares]
    more = [count - floor(part) for count, part in zip(counts, exact, strict=True)]
    assert set(more) <= {0, 1}
    remainders = [part - floor(part) for part in exact]
    without = [remainder for remainder, extra in zip(remainders, more, strict=True) if not extra]
    assert all(remainder >= max(without, default=0) for remainder, extra in zip(remainders, more, strict=True) if extra)


@settings(max_examples=12)
@given(
    clients=st.integers(1, 23), shares=st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any), seed=st.integers(0, 9)
)
def test_every_client_has_a_level_and_levels_have_their_share(clients: int, shares: list[int], seed: int) -> None:
    """Invariant 27."""
    sizes = (1.0, 0.5, 0.2)
    fleet = ", ".join(f"{size}:{share}" for size, share in zip(sizes, shares, strict=True))
    plan = plan_of("vit", "scalefl", fleet, [[0]] * clients, server=server_of("vit"), seed=seed)
    orders = plan.orders(0, range(clients))
    assert [order.client for order in orders] == list(range(clients))
    levels = {size: share_for(plan.server, size).numbers for size in sizes}
    assert len({(numbers["exit"], numbers["ratio"]) for numbers in levels.values()}) == 3
    found = Counter((order.share.numbers["exit"], order.share.numbers["ratio"]) for order in orders)
    counts = [found.pop((numbers["exit"], numbers["ratio"]), 0) for numbers in levels.values()]
    assert not found
    assert sum(counts) == clients
    assert_dealt(counts, shares)
    assert [order.share for order in plan.orders(5, range(clients))] == [order.share for order in orders]


# -- what is refused -----------------------------------------------------------------------------------------------


def test_a_device_too_small_for_every_level_is_refused() -> None:
    message = (
        r"nothing for a device of size 0\.001: its smallest exit and width hold 200 of 7,111 parameters\. Add smaller widths"
    )
    with pytest.raises(RunError, match=message):
        plan_of("vit", "scalefl", "1, 0.001")
    with pytest.raises(RunError, match=message):
        share_for(server_of("vit"), 0.001)


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"exits": 0}, "at least 1 exit and 0 convolutions, not 0 and 3"),
        ({"convolutions": -1}, "at least 1 exit and 0 convolutions, not 4 and -1"),
        ({"widths": (0.5,)}, r"one of them is 1, but they are \(0\.5,\)"),
        ({"widths": (0.0, 1.0)}, "lie above 0"),
        ({"widths": (1.0, 1.5)}, "lie above 0, and one of them is 1"),
        ({"widths": ()}, "one of them is 1"),
        ({"gamma": -0.1}, "gamma of at least 0"),
        ({"temperature": 0.0}, "a temperature above 0"),
        ({"temperature": float("nan")}, "a temperature above 0"),
    ],
)
def test_switches_that_make_no_sense_are_refused(switches: dict[str, object], message: str) -> None:
    with pytest.raises(RunError, match=message):
        plan_of("vit", "scalefl", switches=switches)


@pytest.mark.parametrize("after", [(0, 1), (1, 3), (2, 1), (1, 1)])
def test_exits_outside_of_the_model_are_refused(after: tuple[int, ...]) -> None:
    with pytest.raises(SpaceError, match="after 1 to 2 of the model's 3 blocks, in ascending order"):
        plan_of("vit", "scalefl", switches={"after": after})


def test_a_family_without_exits_is_refused_and_told_which_have_them() -> None:
    model = trainable("gpt2:tiny", "text", CLASSES)
    with pytest.raises(SpaceError) as caught:
        plan_of("bert", "scalefl", server=Labelled.of(model))
    kinds = ("ViTForImage", "DeiTForImage", "BertForSequence", "RobertaForSequence", "ResNetForImage")
    assert "GPT2ForSequenceClassification cannot be given early exits; these can:" in str(caught.value)
    assert all(f"{kind}Classification" in str(caught.value) for kind in kinds)


# -- the loss ------------------------------------------------------------------------------------------------------


def logarithms(logits: Floats) -> Floats:
    """Log-probabilities."""
    raised: Floats = np.exp(logits - logits.max(-1, keepdims=True))
    return logits - logits.max(-1, keepdims=True) - np.log(raised.sum(-1, keepdims=True))


def divergence_by_hand(teacher: Floats, student: Floats, temperature: float) -> float:
    """Over all examples, the mean of the sum over classes of p (log p - log q)."""
    total = 0.0
    for row, other in zip(logarithms(teacher / temperature), logarithms(student / temperature), strict=True):
        total += sum(float(np.exp(p) * (p - q)) for p, q in zip(row, other, strict=True))
    return total / len(teacher)


def loss_by_hand(exits: Floats, labels: list[int], gamma: float, temperature: float) -> float:
    """`exits` is (batch, exits, classes)."""
    count, total = exits.shape[1], 0.0
    for place in range(count):
        said = logarithms(exits[:, place])
        own = -sum(said[row, label] for row, label in enumerate(labels)) / len(labels)
        if place < count - 1:
            own += gamma * temperature**2 * divergence_by_hand(exits[:, -1], exits[:, place], temperature)
        total += (place + 1) * own
    return total * 2 / (count * (count + 1))


def spoken(seed: int, exits: int = 3, batch: int = 4, scale: float = 3.0) -> Says:
    return Says(scale * torch.randn(batch, exits, CLASSES, generator=drawn(seed), dtype=torch.float64))


BATCH = Batch({}, torch.tensor([4, 0, 2, 2]))
TASK = ImageClassification()


@given(count=st.integers(1, 200))
def test_exits_weigh_by_their_place_and_one_in_all(count: int) -> None:
    """Invariant 24."""
    weights = [exit_weight(place, count) for place in range(1, count + 1)]
    assert sum(weights) == pytest.approx(1, abs=1e-12)
    assert all(weight == pytest.approx(place * weights[0]) for place, weight in enumerate(weights, start=1))


@given(seed=st.integers(0, 1000), temperature=st.floats(0.5, 10), batch=st.integers(1, 5))
def test_the_divergence_is_summed_over_classes_and_the_mean_of_the_batch(seed: int, temperature: float, batch: int) -> None:
    """Invariant 25."""
    teacher, student = (spoken(seed + more, 1, batch).exits[:, 0].detach() for more in (0, 5000))
    found = float(divergence(teacher, student, temperature))
    assert found == pytest.approx(divergence_by_hand(teacher.numpy(), student.numpy(), temperature), abs=1e-9)
    assert found > 0


def test_nothing_diverges_from_itself() -> None:
    """Invariant 24."""
    said = spoken(0).exits[:, 0].detach()
    assert float(divergence(said, said, 3.0)) == pytest.approx(0, abs=1e-12)
    assert float(divergence(said, said + 7, 3.0)) == pytest.approx(0, abs=1e-12)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000), exits=st.integers(1, 5), gamma=st.sampled_from([0.0, 0.05, 2.0]), temperature=st.floats(0.5, 9)
)
def test_the_loss_is_the_one_computed_by_hand(seed: int, exits: int, gamma: float, temperature: float) -> None:
    """Invariants 24 and 25, with the square of the temperature."""
    model = spoken(seed, exits)
    found = float(exit_loss(TASK, gamma, temperature)(model, BATCH).detach())
    expected = loss_by_hand(model.exits.detach().numpy(), BATCH.labels.tolist(), gamma, temperature)
    assert found == pytest.approx(expected, rel=1e-9)


@each_family
def test_without_gamma_the_loss_is_the_weighted_cross_entropy(family: str) -> None:
    """Invariant 24, on real models; with one exit it is that exit's loss alone."""
    plan = plan_of(family, "scalefl", server=server_of(family), switches={"gamma": 0.0})
    batch = plan.task.batch(plan.data.dataset.train, torch.arange(5))
    for exit in (1, 2, len(plan.server.model.exits)):
        share = replace(shares_of(family)[exit, 1.0], numbers={"ratio": 1.0, "exit": exit, "teaches": 1.0})
        module = module_of(plan, share).eval()
        with torch.no_grad():
            exits = module(**batch.inputs).exits
            found = float(learn_of(plan, share).loss(module, batch))
        assert exits.shape == (5, exit, CLASSES)
        assert found == pytest.approx(loss_by_hand(exits.double().numpy(), batch.labels.tolist(), 0, 1), rel=1e-5)


def test_equal_exits_have_nothing_to_teach() -> None:
    """Invariant 24: later blocks that pass on what they get, and heads that begin as copies, say the same everywhere."""
    server = labelled("vit")
    with torch.no_grad():
        for layer in server.model.vit.layers[1:]:
            for module in (layer.attention.o_proj, layer.mlp.fc2):
                module.weight.zero_()
                module.bias.zero_()
    plan = plan_of("vit", "scalefl", server=server)
    batch = plan.task.batch(plan.data.dataset.train, torch.arange(5))
    model = plan.server.model.eval()
    exits = model(**batch.inputs).exits
    assert torch.equal(exits[:, 0], exits[:, 2])
    plain, taught = (float(exit_loss(plan.task, gamma, 3.0)(model, batch).detach()) for gamma in (0.0, 100.0))
    assert taught == pytest.approx(plain, abs=1e-4)
    with torch.no_grad():
        model.exits[0].head.classifier.bias[0] += 3
    assert float(exit_loss(plan.task, 100.0, 3.0)(model, batch).detach()) > plain + 1


@pytest.mark.parametrize(("gamma", "temperature"), [(0.5, 3.0), (2.0, 1.0)])
def test_the_teacher_is_not_moved_by_its_pupils(gamma: float, temperature: float) -> None:
    """Invariant 24: and a pupil is pulled by weight * gamma * T * (q - p) / batch."""
    model = spoken(1)
    (plain,) = torch.autograd.grad(exit_loss(TASK, 0.0, temperature)(model, BATCH), model.exits)
    (taught,) = torch.autograd.grad(exit_loss(TASK, gamma, temperature)(model, BATCH), model.exits)
    assert torch.equal(plain[:, -1], taught[:, -1])
    said = np.exp(logarithms(model.exits.detach().numpy() / temperature))
    for place in (0, 1):
        pull = (place + 1) / 6 * gamma * temperature * (said[:, place] - said[:, -1]) / 4
        assert np.allclose((taught - plain)[:, place].numpy(), pull, atol=1e-12)
        assert np.abs(pull).max() > 1e-3


def test_what_only_the_last_exit_uses_learns_the_same_with_and_without_pupils() -> None:
    """Invariant 24, in a model."""
    plan = plan_of("vit", "scalefl", server=server_of("vit"))
    batch = plan.task.batch(plan.data.dataset.train, torch.arange(5))
    model = plan.server.model.eval()
    names, parameters = zip(*model.named_parameters(), strict=True)
    plain, taught = (torch.autograd.grad(exit_loss(plan.task, gamma, 3.0)(model, batch), parameters) for gamma in (0.0, 1.0))
    for name, one, other in zip(names, plain, taught, strict=True):
        assert torch.equal(one, other) is name.startswith("exits.2."), name


def test_before_its_round_the_last_exit_does_not_teach() -> None:
    server = server_of("vit")
    plan = plan_of("vit", "scalefl", server=server, switches={"distil_from": 3, "gamma": 0.7, "temperature": 2.0})
    batch = plan.task.batch(plan.data.dataset.train, torch.arange(5))
    model = server.model.eval()
    with torch.no_grad():
        plain, taught = (float(exit_loss(plan.task, gamma, 2.0)(model, batch)) for gamma in (0.0, 0.7))
        assert taught > plain + 1e-3
        for round in range(6):
            (share,) = plan.method.choose(server, round, [Device(0, 1.0)], 0)
            assert float(learn_of(plan, share).loss(model, batch)) == (taught if round >= 3 else plain)


# -- scores --------------------------------------------------------------------------------------------------------


def with_labels_of_the_last_exit(plan: Plan) -> Plan:
    """The plan with test examples whose labels are what the full model says to them, after it was made to say them all."""
    dataset, model = plan.data.dataset, plan.server.model.eval()
    batch = plan.task.batch(dataset.test, torch.arange(len(dataset.test)))
    with torch.no_grad():
        model.exits[-1].head.classifier.bias -= model(**batch.inputs).logits.mean(0)
        labels = model(**batch.inputs).exits[:, -1].argmax(1)
    assert len(labels.unique()) == CLASSES
    return replace(plan, data=replace(plan.data, dataset=replace(dataset, test=replace(dataset.test, labels=labels))))


def test_a_level_is_scored_by_its_own_last_exit() -> None:
    """Invariant 26: whatever the other exits say."""
    data = federation("vit", [ALL] * 4, tests=40)
    plan = with_labels_of_the_last_exit(plan_of("vit", "scalefl", "1, 0.42", data=data))
    assert share_for(plan.server, 0.42).numbers == {"ratio": 1.0, "exit": 1, "teaches": 1.0}
    before, by_client = evaluate(plan, Serial(plan), 1)
    assert before.sizes["1"].test["accuracy"] == 1
    assert by_client["1"] == [1.0] * 4
    assert before.sizes["0.42"].test["accuracy"] < 0.7
    with torch.no_grad():
        head = plan.server.model.exits[0].head.classifier
        head.weight.copy_(1e4 * torch.randn(head.weight.shape, generator=drawn(2)))
    after, _ = evaluate(plan, Serial(plan), 1)
    assert after.sizes["1"] == before.sizes["1"]
    assert after.sizes["0.42"].test["loss"] > 100 * before.sizes["0.42"].test["loss"]


def test_two_evaluations_give_the_same_numbers() -> None:
    """Invariant 28, with more dropout than signal."""
    chances = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5, "classifier_dropout": 0.5}
    server = Labelled.of(tiny("bert", **chances).train())
    plan = plan_of("bert", "scalefl", "1, 1/2, 1/5", server=server, data=federation("bert", [ALL] * 3, tests=30))
    backend = Serial(plan)
    found = [evaluate(plan, backend, 1) for _ in range(2)]
    assert found[0] == found[1] == evaluate(plan, Serial(plan), 1)
    assert len(found[0][0].sizes) == 3
    rounds_of(plan)
    assert evaluate(plan, backend, 2) == evaluate(plan, backend, 2) != found[0]
    batch = plan.task.batch(plan.data.dataset.test, torch.arange(5))
    noisy = [plan.server.model.train()(**batch.inputs).exits for _ in range(2)]
    assert not torch.allclose(*noisy), "there was no dropout, so nothing was tested"


# -- the scaler ----------------------------------------------------------------------------------------------------


def group_normed() -> Labelled:
    config = {"widths": [16, 24], "depths": [2, 2], "norm": "group", "group_width": 4}
    return Labelled.of(tiny("raffm_resnet", **config))


@pytest.mark.parametrize("make", [lambda: labelled("vit"), group_normed], ids=["vit", "group norm"])
@pytest.mark.parametrize(("exit", "ratio"), [(1, 0.5), (2, 0.25), (3, 0.5)])
def test_a_served_level_says_what_it_said_in_training(make: Callable[[], Labelled], exit: int, ratio: float) -> None:
    """The factors of the scaler are folded into the tensors of what is served; its norms know nothing of modes."""
    server = make()
    plan = plan_of("vit" if server.table.family == "vit" else "raffm_resnet", "scalefl", server=server)
    share = next(pair.share for pair in pairs(plan.server, EIGHTHS) if pair.share.numbers == {"exit": exit, "ratio": ratio})
    share = replace(share, numbers={**share.numbers, "teaches": 1.0})
    batch = plan.task.batch(plan.data.dataset.train, torch.arange(5))
    module, learn = module_of(plan, share), learn_of(plan, share)
    learn.prepare(module)
    with torch.no_grad():
        trained = module.train()(**batch.inputs).exits
        learn.finish(module)
        unscaled = module(**batch.inputs).exits
        found = served(plan, Workshop(plan), Job(share, 1))(**batch.inputs).exits
    assert found.shape == (5, exit, CLASSES)
    assert torch.allclose(found, trained, rtol=1e-5, atol=1e-5)
    assert server.table.family != "vit" or not torch.allclose(unscaled, trained, atol=1e-2)


def test_every_map_that_reads_less_is_folded_and_nothing_else() -> None:
    plan = plan_of("vit", "scalefl", server=server_of("vit"))
    maps = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj", "mlp.fc1", "mlp.fc2")
    parts = [f"exits.{part}.blocks.0.{name}.{kind}" for part in range(2) for name in maps for kind in ("weight", "bias")]
    assert plan.method.folded(plan.server, shares_of("vit")[2, 0.25]) == dict.fromkeys(parts, 4.0)


def test_what_is_served_is_not_what_is_trained_next() -> None:
    plan = plan_of("vit", "scalefl", server=server_of("vit"))
    share, workshop = shares_of("vit")[2, 0.5], Workshop(plan)
    before = {name: tensor.clone() for name, tensor in workshop.loaded(share, share.selection).tensors.items()}
    factors = plan.method.folded(plan.server, share)
    folded = dict(served(plan, workshop, Job(share, 1)).named_parameters())
    assert all(torch.equal(folded[name], tensor * factors.get(name, 1.0)) for name, tensor in before.items())
    again = workshop.loaded(share, share.selection).tensors
    assert all(same_bits(again[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(("exit", "ratio", "scaler"), [(2, 0.5, False), (1, 1.0, True), (3, 1.0, True)])
def test_without_the_switch_or_at_full_width_nothing_is_folded(exit: int, ratio: float, scaler: bool) -> None:
    plan = plan_of("vit", "scalefl", server=server_of("vit"), switches={"scaler": scaler})
    share = replace(shares_of("vit")[exit, ratio], numbers={"ratio": ratio, "exit": exit, "teaches": 1.0})
    assert plan.method.folded(plan.server, share) == {}
    plain = module_of(plan, share).state_dict()
    found = served(plan, Workshop(plan), Job(share, 1)).state_dict()
    assert all(same_bits(found[name], plain[name]) for name in plain)
    module = module_of(plan, share)
    learn_of(plan, share).prepare(module)
    assert not [child for child in module.modules() if child._forward_hooks]


# -- rounds --------------------------------------------------------------------------------------------------------


@each_family
def test_a_round_moves_what_is_held_and_leaves_the_rest_bit_for_bit(family: str) -> None:
    """A fleet of small devices alone, of the first exit at 3/4 and the second at 1/2: nobody holds the last part."""
    plan = plan_of(family, "scalefl", f"{size_of(family, 1, 3 / 4)}, {size_of(family, 2, 1 / 2)}")
    shares = [order.share for order in plan.orders(0, range(4))]
    assert {(share.numbers["exit"], share.numbers["ratio"]) for share in shares} == {(1, 3 / 4), (2, 1 / 2)}
    before = snapshot(plan.server)
    rounds_of(plan)
    layout = plan.server.layout
    for name in layout.tensors("parameter"):
        after, own = plan.server.tensors[name].detach(), before[name]
        held = torch.zeros(own.shape, dtype=torch.bool)
        for share in shares:
            held |= share.selection.coverage(layout, name).bool()
        assert same_bits(after[~held], own[~held]), name
        is_behind = name.startswith(("exits.2.", "exits.3."))
        assert bool(held.any()) is not is_behind, name
        is_key_bias = name.endswith(("key.bias", "k_proj.bias"))  # softmax does not see what all keys share
        assert is_behind or is_key_bias or not torch.equal(after, own), name


def test_a_run_trains_the_given_model_and_reports_its_levels() -> None:
    """The model that was given is part of the one with exits: it is trained in place."""
    server = labelled("vit")
    before = snapshot(server)
    plan = plan_of("vit", "scalefl", "1, 1/2, 1/5", server=server)
    results = run(plan)
    assert isinstance(plan.server.model, Exits)
    assert any(not torch.equal(before[name], tensor) for name, tensor in server.tensors.items())
    whole = plan.server.layout.count(Selection())
    sizes = {size.name: size for size in results.sizes}
    assert list(sizes) == ["1", "1/2", "1/5"]
    for name, nominal in (("1", 1.0), ("1/2", 0.5), ("1/5", 0.2)):
        assert sizes[name].params == plan.server.layout.count(share_for(plan.server, nominal).selection) <= nominal * whole
    assert set(results.evaluations[-1].sizes) == set(sizes)
