"""Known defects of the published ScaleFL, by their numbers: what that code does, and that raffm does not."""

from collections import Counter
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from methods.runs import ALL, CLASSES, Says, drawn, federation, module_of, plan_of, rounds_of, run, snapshot
from raffm.data.examples import Federation
from raffm.data.splits import hold_out, split
from raffm.data.task import Batch
from raffm.methods import method_of
from raffm.methods.method import Client, Device, Share
from raffm.methods.scalefl import EIGHTHS, ScaleFL, exit_loss, pairs
from raffm.models.exits import ExitLogits
from raffm.models.labelled import Labelled
from raffm.models.load import tiny
from raffm.rounds import workshop
from raffm.rounds.backend import Serial
from raffm.rounds.costs import Costs
from raffm.rounds.evaluate import evaluate
from raffm.rounds.plan import Evaluating, Plan
from raffm.rounds.predict import Job, served
from raffm.rounds.results import Round
from raffm.rounds.workshop import Workshop


def level(plan: Plan, exit: int, ratio: float) -> Share:
    """The share of an exit and a width."""
    found = (pair.share for pair in pairs(plan.server, EIGHTHS))
    return next(share for share in found if share.numbers == {"exit": exit, "ratio": ratio})


def outputs_of(plan: Plan, share: Share, examples: Tensor) -> Tensor:
    """What the exits of a served level say to some test examples."""
    with torch.no_grad():
        found: ExitLogits = served(plan, Workshop(plan), Job(share, 1))(
            **plan.task.batch(plan.data.dataset.test, examples).inputs
        )
    return found.exits


def outspoken(plan: Plan) -> Plan:
    """The plan with exits that say all classes, each to other test examples."""
    dataset, model = plan.data.dataset, plan.server.model.eval()
    batch = plan.task.batch(dataset.test, torch.arange(len(dataset.test)))
    with torch.no_grad():
        for place, part in enumerate(model.exits):
            part.head.classifier.weight.copy_(torch.randn(CLASSES, 16, generator=drawn(place)))
            part.head.classifier.bias -= model(**batch.inputs).exits[:, place].mean(0)
    return plan


@pytest.mark.parametrize(
    ("family", "query", "up"),
    [("vit", "attention.q_proj", "mlp.fc1"), ("bert", "attention.self.query", "intermediate.dense")],
)
@pytest.mark.parametrize("ratio", [0.5, 0.75])
def test_d_sf1_channels_are_the_same_in_front_of_an_exit_and_behind_it(family: str, query: str, up: str, ratio: float) -> None:
    """Published: indices come from the gradient of the first exit, so behind it every layer keeps other channels."""
    plan = plan_of(family, "scalefl")
    module, full = module_of(plan, level(plan, 3, ratio)), plan.server.tensors
    stream, hidden = torch.arange(int(16 * ratio)), torch.arange(int(24 * ratio))
    rows = torch.tensor([head * 4 + row for head in range(4) for row in range(int(4 * ratio))])
    for part in range(3):
        name = f"exits.{part}.blocks.0"
        assert torch.equal(module.get_parameter(f"{name}.{query}.weight"), full[f"{name}.{query}.weight"][rows][:, stream])
        assert torch.equal(module.get_parameter(f"{name}.{up}.weight"), full[f"{name}.{up}.weight"][hidden][:, stream])
    assert {len(kept) for group, kept in level(plan, 3, ratio).selection.kept.items() if group == "residual"} == {len(stream)}


@pytest.mark.parametrize("family", ["bert", "raffm_resnet"])
def test_d_sf2_a_shallow_client_holds_and_receives_fewer_layers(family: str) -> None:
    """Published: every client holds all layers; only its forward pass ends early."""
    plan = plan_of(family, "scalefl")
    costs, layout = Costs(plan), plan.server.layout
    shallow, whole = level(plan, 1, 1.0), level(plan, layout.sizes["exits"], 1.0)
    module = module_of(plan, shallow)
    assert not [name for name in module.state_dict() if name.startswith(("exits.1.", "exits.2.", "exits.3."))]
    behind = [name for name in layout.tensors("parameter", "buffer") if name.startswith("exits.") and name[6] != "0"]
    saved = sum(plan.server.tensors[name].numel() * plan.server.tensors[name].element_size() for name in behind)
    assert costs.of(whole).bytes_down - costs.of(shallow).bytes_down == saved > 0
    assert costs.of(whole).bytes_up - costs.of(shallow).bytes_up == saved


def test_d_sf3_what_is_served_has_no_dropout() -> None:
    """Published: nothing calls eval(), so the reported accuracy is that of a model with dropout."""
    server = Labelled.of(tiny("bert", hidden_dropout_prob=0.5, classifier_dropout=0.5))
    plan = plan_of("bert", "scalefl", server=server)
    rounds_of(plan)
    shop, share = Workshop(plan), level(plan, 2, 0.5)
    shop.loaded(share, share.selection).module.train()  # as a client leaves it
    module = served(plan, shop, Job(share, 1))
    assert not [name for name, child in module.named_modules() if child.training]
    batch = plan.task.batch(plan.data.dataset.test, torch.arange(4))
    assert torch.equal(module(**batch.inputs).exits, module(**batch.inputs).exits)


def test_d_sf4_accuracy_is_that_of_the_last_exit() -> None:
    """Published: one meter counts all exits, so what is reported is their mean."""
    plan = outspoken(plan_of("vit", "scalefl", data=federation("vit", [ALL] * 3, tests=40)))
    exits = outputs_of(plan, Share(numbers={"ratio": 1.0, "exit": 3}), torch.arange(40))
    right = (exits.argmax(-1) == plan.data.dataset.test.labels[:, None]).double().mean(0)
    assert float((right.mean() - right[-1]).abs()) > 1e-3, "the mean over exits is the same, so nothing was tested"
    found = evaluate(plan, Serial(plan), 1)[0].sizes["1"].test["accuracy"]
    assert found == pytest.approx(float(right[-1]), abs=1e-9)


def test_d_sf5_validation_examples_are_no_training_examples() -> None:
    """Published: a validation set of size 0 is `[-0:]`, all training examples, augmented; the model is chosen by them."""
    whole = federation("vit", [ALL * 8]).dataset
    assert hold_out(whole, 0.0, 0).validation is None
    dataset = hold_out(whole, 0.25, 0)
    assert dataset.validation is not None
    trained, held = (
        {image.numpy().tobytes() for image in part.inputs["pixel_values"]} for part in (dataset.train, dataset.validation)
    )
    assert (len(trained), len(held)) == (30, 10)
    assert not trained & held
    data = Federation(dataset, split(dataset, 3, "iid", 0))
    assert sorted(np.concatenate([data.split.train[client] for client in range(3)])) == list(range(30))
    plan = plan_of("vit", "scalefl", "1, 1/2", data=data)
    scores = run(plan).evaluations[-1].sizes["1/2"]
    (share,) = plan.method.choose(plan.server, 0, [Device(0, 0.5)], 0)
    batch = plan.task.batch(dataset.validation, torch.arange(10))
    with torch.no_grad():
        logits = served(plan, Workshop(plan), Job(share, 1))(**batch.inputs).logits
    assert scores.validation["accuracy"] == pytest.approx(float((logits.argmax(1) == batch.labels).double().mean()))
    assert scores.validation["loss"] == pytest.approx(float(functional.cross_entropy(logits, batch.labels)), rel=1e-5)


def test_d_sf6_a_client_is_tested_on_its_own_test_examples() -> None:
    """Published: the test set is read at the places of the client's validation examples, which are those of the train set."""
    data = federation("vit", [ALL * 2, ALL * 4, ALL * 6], tests=17)
    own = [data.split.test[client] for client in range(3)]
    assert sorted(np.concatenate(own)) == list(range(17))
    plan = outspoken(plan_of("vit", "scalefl", "1, 1/2", data=data))
    evaluation, by_client = evaluate(plan, Serial(plan), 1)
    for name, size in (("1", 1.0), ("1/2", 0.5)):
        (share,) = plan.method.choose(plan.server, 0, [Device(0, size)], 0)
        losses, scores = [], []
        for client in range(3):
            picks = torch.from_numpy(own[client])
            logits, labels = outputs_of(plan, share, picks)[:, -1], data.dataset.test.labels[picks]
            scores.append(float((logits.argmax(1) == labels).double().mean()))
            losses.append(float(functional.cross_entropy(logits, labels)))
        assert by_client[name] == pytest.approx(scores)
        assert evaluation.sizes[name].clients_mean["loss"] == pytest.approx(fmean(losses), rel=1e-5)


def test_d_sf7_distillation_is_on_unless_switched_off() -> None:
    """Published: gamma is 0 by default, and the commands in the README rely on it."""
    assert (ScaleFL().gamma, ScaleFL().temperature, ScaleFL().distil_from) == (0.05, 3.0, 0)
    plan = plan_of("vit", "scalefl")
    batch = plan.task.batch(plan.data.dataset.train, torch.arange(5))
    (share,) = plan.method.choose(plan.server, 0, [Device(0, 1.0)], 0)
    client = Client(plan.task, torch.ones(CLASSES, dtype=torch.bool))
    model = plan.server.model.eval()
    with torch.no_grad():
        usual = plan.method.learn(plan.server, share, share.selection, client).loss(model, batch)
        off = method_of("scalefl", gamma=0.0).learn(plan.server, share, share.selection, client).loss(model, batch)
    assert float(usual) > float(off) + 1e-6


@pytest.mark.parametrize("how", ["dirichlet", "dirichlet-balanced"])
def test_d_sf7_alpha_may_be_a_fraction(how: str) -> None:
    """Published: alpha is read as an integer, so that nothing below 1 can be asked for."""
    dataset = federation("vit", [ALL * 60], tests=50).dataset

    def skew(alpha: float) -> float:
        """How large the most frequent class of a client is, on average."""
        found = split(dataset, 4, how, 0, alpha=alpha)
        counts = [np.bincount(dataset.train.labels[found.train[client]], minlength=CLASSES) for client in range(4)]
        return fmean(count.max() / count.sum() for count in counts)

    assert skew(0.1) > skew(100.0) + 0.2
    data = Federation(dataset, split(dataset, 4, how, 0, alpha=0.5))
    assert not run(plan_of("vit", "scalefl", "1, 1/2", data=data)).rounds[0].refused


def test_d_sf8_the_divergence_is_not_divided_by_the_classes_and_the_teacher_stays() -> None:
    """Published: the mean over all elements, too weak by the number of classes; and the teacher learns from its pupils."""
    model = Says(torch.randn(4, 2, CLASSES, generator=drawn(0), dtype=torch.float64))
    batch = Batch({}, torch.tensor([0, 1, 2, 3]))
    task = plan_of("vit", "scalefl").task
    plain, taught = (exit_loss(task, gamma, 3.0)(model, batch) for gamma in (0.0, 0.5))
    probabilities = torch.softmax(model.exits.detach() / 3, -1)
    terms = probabilities[:, 1] * (probabilities[:, 1] / probabilities[:, 0]).log()
    added = float((taught - plain).detach())
    assert added == pytest.approx(float(terms.sum(1).mean()) * 0.5 * 9 / 3)  # gamma T^2, and the first of two exits weighs 1/3
    assert added == pytest.approx(float(terms.mean()) * 0.5 * 9 / 3 * CLASSES)
    gradients = [torch.autograd.grad(loss, model.exits, retain_graph=True)[0] for loss in (plain, taught)]
    assert torch.equal(gradients[0][:, 1], gradients[1][:, 1])
    assert not torch.allclose(gradients[0][:, 0], gradients[1][:, 0])


@pytest.mark.parametrize(
    ("clients", "counts"), [(7, (3, 2, 2)), (10, (4, 3, 3)), (2, (1, 1, 0)), (1, (1, 0, 0)), (9, (3, 3, 3))]
)
def test_d_sf9_clients_that_do_not_divide_evenly_get_a_level_like_all_others(clients: int, counts: tuple[int, ...]) -> None:
    """Published: those that int() leaves over get level -1, meant as none, which is the largest."""
    plan = plan_of("vit", "scalefl", "1/5, 1/2, 1", [[0]] * clients)
    sizes = {size: (share.numbers["exit"], share.numbers["ratio"]) for size, share in levels_of(plan).items()}
    orders = plan.orders(0, range(clients))
    found = Counter((order.share.numbers["exit"], order.share.numbers["ratio"]) for order in orders)
    assert found == Counter({sizes[size]: count for size, count in zip((0.2, 0.5, 1.0), counts, strict=True)})
    assert sum(found.values()) == clients
    assert [order.share.numbers["exit"] for order in orders] == [
        sizes[plan.tier_of(client, 0).size][0] for client in range(clients)
    ]


def levels_of(plan: Plan) -> dict[float, Share]:
    sizes = plan.fleet.sizes
    shares = plan.method.choose(plan.server, 0, [Device(-1, size) for size in sizes], 0)
    return {size: share for size, share in zip(sizes, shares, strict=True) if share is not None}


def test_d_sf10_what_pads_a_text_changes_neither_its_loss_nor_its_scores() -> None:
    """Published: BERT is given padded ids and no mask, so it attends to the padding."""
    plan = plan_of("bert", "scalefl")
    dataset = plan.data.dataset
    lengths = dataset.train.inputs["lengths"]
    assert int(lengths.min()) < 8
    padding = torch.arange(8) >= lengths[:, None]
    ids = dataset.train.inputs["input_ids"]
    share = Share(numbers={"ratio": 1.0, "exit": 3, "teaches": 1.0})
    client = Client(plan.task, torch.ones(CLASSES, dtype=torch.bool))
    loss = plan.method.learn(plan.server, share, share.selection, client).loss
    model = plan.server.model.eval()
    found, exits = [], []
    for filler in (0, 17, 49):
        filled = replace(dataset.train, inputs={"input_ids": ids.masked_fill(padding, filler), "lengths": lengths})
        batch = plan.task.batch(filled, torch.arange(10))
        assert torch.equal(batch.inputs["attention_mask"] == 0, padding[:10])
        with torch.no_grad():
            found.append(float(loss(model, batch)))
            exits.append(model(**batch.inputs).exits)
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)
    assert all(torch.allclose(exits[0], other, atol=1e-5) for other in exits[1:])


def test_d_sf11_tracked_batch_norms_of_mixed_widths_join() -> None:
    """Published: with tracking on, the running statistics of clients of different widths cannot be averaged."""
    plan = plan_of("resnet", "scalefl", "1, 1/2, 1/8", [ALL * 2] * 3, evaluating=Evaluating(calibration_clients=2))
    norms = [module for module in plan.server.model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(norm.track_running_stats for norm in norms)
    widths = {share.numbers["ratio"] for share in levels_of(plan).values()}
    assert len(widths) > 1
    before = snapshot(plan.server)
    (entry,) = run(plan).rounds
    assert isinstance(entry, Round)
    assert entry.clients == (0, 1, 2)
    assert not entry.refused
    kept = [name for name in plan.server.layout.tensors("parameter", "buffer") if plan.server.tensors[name].is_floating_point()]
    assert all(bool(torch.isfinite(plan.server.tensors[name]).all()) for name in kept)
    convolutions = [name for name in kept if before[name].dim() == 4]
    assert all(not torch.equal(plan.server.tensors[name], before[name]) for name in convolutions)


def test_d_sf12_a_round_builds_one_module_a_level_and_evaluation_none_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published: the models of all clients are built before any trains, and again for each of them in validation."""
    built: list[Any] = []
    assembled = workshop.assembled

    def spy(*given: Any, **named: Any) -> nn.Module:
        built.append(given)
        return assembled(*given, **named)

    monkeypatch.setattr(workshop, "assembled", spy)
    plan = plan_of("vit", "scalefl", "1, 1/5", [[0, 1]] * 12)
    assert Counter(plan.tier_of(client, 0).size for client in range(12)) == {1.0: 6, 0.2: 6}
    backend = Serial(plan)
    outcomes = []
    for round in range(2):
        tally = workshop.Tally(plan.server.layout, plan.server.tensors)
        outcomes += backend.train(plan.orders(round, range(12)), tally, lambda _: None, lambda: None)
        tally.step()
        evaluate(plan, backend, round + 1)
    assert len(outcomes) == 24
    assert len(built) == 2
