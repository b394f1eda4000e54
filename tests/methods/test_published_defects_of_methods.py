"""Known defects of the published methods, by their numbers: what that code does, and that raffm does not."""

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from methods.runs import (
    ALL,
    CLASSES,
    FAMILIES,
    drawn,
    examples,
    federation,
    labelled,
    module_of,
    plan_of,
    rounds_of,
    run,
    same_bits,
    snapshot,
)
from raffm.algebra.mask import Mask
from raffm.algebra.selection import Selection
from raffm.algebra.tally import Tally
from raffm.data.examples import Federation
from raffm.data.splits import hold_out
from raffm.data.task import ImageClassification
from raffm.devices.fleet import fleet_of
from raffm.methods import method_of
from raffm.methods.fiarse import mask_of, maskable, thresholds
from raffm.methods.method import Client, Device, Share, Update
from raffm.rounds.backend import Serial
from raffm.rounds.costs import Costs, coded_bytes
from raffm.rounds.evaluate import entries_of, evaluate
from raffm.rounds.local import Local, batches_of, order_of, train
from raffm.rounds.plan import Evaluating, Merging, Plan
from raffm.rounds.predict import Job, calibrating
from raffm.rounds.results import Evaluation, Results, Scores


def weighed(plan: Plan, rows: dict[int, Tensor], shares: dict[int, Share], name: str) -> Tensor:
    """Tally updates that differ from the server by a constant each; give what one tensor moved by."""
    server = plan.server
    tally = Tally(server.layout, server.tensors)
    before = server.tensors[name].detach().clone()
    for client, change in rows.items():
        sent = {key: server.tensors[key].detach() for key in server.layout.tensors("parameter", "buffer")}
        tensors = {key: tensor + change if tensor.is_floating_point() else tensor for key, tensor in sent.items()}
        present = torch.ones(CLASSES, dtype=torch.bool)
        held = plan.method.held(server, shares[client])
        plan.method.merge(tally, server, Update(client, shares[client], held, tensors, plan.weight(client), present))
    tally.step()
    return server.tensors[name].detach() - before


# -- FIARSE --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["raffm_resnet", "vit"])
@pytest.mark.parametrize("size", [1 / 4, 1 / 64])
def test_d_fi1_masks_save_bytes_and_no_work(family: str, size: float) -> None:
    """Published: costs are counted as if a masked model were a smaller one, though every client computes the dense model."""
    plan = plan_of(family, "fiarse", str(size))
    share = thresholds(plan.server, [size])[size]
    mask = mask_of(plan.server, share)
    layout, tensors = plan.server.layout, plan.server.tensors
    costs = Costs(plan)
    found, dense = costs.of(share), costs.of(Share())
    kept = sum(int(part.sum()) for part in mask.kept.values())
    norms = sum(tensors[name].numel() for name in layout.tensors("parameter") if name not in mask.kept)
    buffers = sum(tensors[name].numel() * tensors[name].element_size() for name in layout.tensors("buffer"))
    assert found.flops == dense.flops > 0
    assert found.params == kept + norms < dense.params
    assert found.bytes_up == 4 * (kept + norms) + buffers
    assert found.bytes_down == found.bytes_up + coded_bytes(mask)
    bits = -(-sum(part.numel() for part in mask.kept.values()) // 8) + len(mask.kept)
    assert 0 < coded_bytes(mask) <= bits
    assert dense.bytes_down == dense.bytes_up == 4 * dense.params + buffers


def test_d_fi1_a_round_reports_the_bytes_of_the_masks_that_were_sent() -> None:
    """Published: no bytes at all."""
    plan = plan_of("vit", "fiarse", "1/4", local=Local("sgd", lr=0.5, batch=5, steps=4))
    share = thresholds(plan.server, [1 / 4])[1 / 4]
    mask = mask_of(plan.server, share)
    sent = sum(mask.kept[name].sum() if name in mask.kept else tensor.numel() for name, tensor in plan.server.tensors.items())
    expected = 4 * 4 * int(sent)  # 4 clients, 4 bytes
    down = expected + 4 * coded_bytes(mask)
    (entry,) = run(plan).rounds
    assert (entry.bytes_up, entry.bytes_down) == (expected, down)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_d_fi6_a_held_weight_that_did_not_move_counts_in_the_mean(dtype: torch.dtype) -> None:
    """Published: who held a weight is inferred from a change that is not 0, so those that changed nothing are left out."""
    plan = plan_of("vit", "fiarse", "1/4", [ALL, ALL * 3], merging=Merging("equal"))
    share = thresholds(plan.server, [1 / 4])[1 / 4]
    name = "vit.layers.0.mlp.fc1.weight"
    held = mask_of(plan.server, share).kept[name]
    changes = {0: torch.tensor(0.25, dtype=dtype).float(), 1: torch.tensor(0.0)}
    moved = weighed(plan, changes, {0: share, 1: share}, name)
    assert torch.allclose(moved[held], torch.tensor(0.125), atol=1e-6)
    assert bool((moved[~held] == 0).all())


def test_d_fi7_the_smallest_sizes_keep_something_and_ties_keep_no_more_than_their_number() -> None:
    """Published: k = int(g * n) may be 0, which fails, and `>=` keeps all equal weights, however many."""
    server = labelled("vit")
    count = sum(server.tensors[name].numel() for name in maskable(server.layout))
    assert int(sum(part.sum() for part in mask_of(server, thresholds(server, [1e-9])[1e-9]).kept.values())) == 1
    with torch.no_grad():
        for name in maskable(server.layout):
            server.tensors[name].fill_(-0.5)
    for size in (0.01, 1 / 4, 0.77):
        kept = mask_of(server, thresholds(server, [size])[size]).kept
        assert sum(int(part.sum()) for part in kept.values()) == round(size * count)


def test_d_fi7_a_full_device_loses_no_weight_that_shrinks() -> None:
    """Published: at size 1 the threshold is the smallest magnitude, and a weight that falls below it is trained no more."""
    local = Local("sgd", lr=1.0, batch=5, steps=2, weight_decay=0.75)
    plan, reference = (plan_of("vit", name, "1", local=local) for name in ("fiarse", "fedavg"))
    for server in (plan.server, reference.server):
        with torch.no_grad():
            for name in maskable(server.layout):
                server.tensors[name].copy_(0.5 + torch.rand(server.tensors[name].shape, generator=drawn(0)) / 2)
    rounds_of(plan)
    rounds_of(reference)
    below = sum(int((plan.server.tensors[name].abs() < 0.5).sum()) for name in maskable(plan.server.layout))
    assert below > 1000, "no weights fell below the smallest, so nothing was tested"
    assert all(same_bits(plan.server.tensors[name], tensor) for name, tensor in reference.server.tensors.items())


@pytest.mark.parametrize("family", ["raffm_resnet", "vit"])
def test_d_fi15_the_true_fraction_is_shown_beside_the_nominal_one(family: str) -> None:
    """Published: "1/64" counts the weights that can be masked alone; norms come on top, and no bytes are reported."""
    plan = plan_of(family, "fiarse", "1, 1/4, 1/64")
    whole = plan.server.layout.count(Selection())
    masked = sum(plan.server.tensors[name].numel() for name in maskable(plan.server.layout))
    sizes = {size.name: size for size in run(plan).sizes}
    assert list(sizes) == ["1", "1/4", "1/64"]
    for name, nominal in (("1/4", 1 / 4), ("1/64", 1 / 64)):
        true = round(nominal * masked) + whole - masked
        assert sizes[name].size == nominal
        assert sizes[name].params == true
        assert nominal < sizes[name].fraction == pytest.approx(true / whole)
        assert sizes[name].bytes_down > 4 * true
        assert sizes[name].flops == sizes["1"].flops
    assert sizes["1"].fraction == 1


def test_d_fi17_momentum_moves_nothing_that_has_left_the_submodel() -> None:
    """Published: only gradients are masked, so the momentum of AdamW goes on moving weights below the threshold."""
    local = Local("adamw", lr=0.05, batch=5, steps=8)
    plan = plan_of("vit", "fiarse", "1/4", local=local)
    (share,) = plan.method.choose(plan.server, 0, [Device(0, 1 / 4)], 0)
    held = plan.method.held(plan.server, share)
    assert isinstance(held, Mask)
    module = module_of(plan, share)
    learn = plan.method.learn(plan.server, share, held, Client(plan.task, torch.ones(CLASSES, dtype=torch.bool)))
    picks = order_of(plan.data.split.train[0], local, 0, 0, 0)
    name = "vit.layers.0.mlp.fc1.weight"
    seen: list[Tensor] = []
    stepped: list[Tensor] = []
    learn = replace(
        learn,
        after_step=lambda module, inner=learn.after_step: (
            stepped.append(module.get_parameter(name).detach().clone()),
            inner(module),
        ),
    )
    batches = batches_of(plan.task, plan.data.dataset.train, picks, 0, 0, 0)
    train(module, learn, local, batches, 0, len(picks), lambda: seen.append(module.get_parameter(name).detach().clone()))
    sent = module.get_parameter(name).detach()
    left_at_once = held.kept[name] & (seen[0] == 0)
    assert bool(left_at_once.any())
    assert bool((stepped[1][left_at_once] != 0).any()), "AdamW moved nothing, so nothing was tested"
    assert all(bool((weights[left_at_once] == 0).all()) for weights in seen)
    assert torch.equal(sent[left_at_once], stepped[0][left_at_once])  # where it stood when it left


def test_d_fi3_what_is_tested_is_not_augmented() -> None:
    """Published: a client's test images go through the training transform, random crops and flips."""
    task = ImageClassification(crop=2, flip=True)
    data = examples("vit", torch.arange(6) % CLASSES, 0)
    picks = torch.arange(6)
    plain = ImageClassification().batch(data, picks)
    for _ in range(3):
        assert torch.equal(task.batch(data, picks).inputs["pixel_values"], plain.inputs["pixel_values"])
    moved = task.batch(data, picks, task.draw((6,), drawn(0)))
    assert not torch.equal(moved.inputs["pixel_values"], plain.inputs["pixel_values"])
    plan = plan_of("vit", "fiarse", "1/4", task=task)
    outputs = [Serial(plan).predict([Job(Share(), 1)])[0][0] for _ in range(2)]
    assert torch.equal(*outputs)


def test_d_fi4_the_order_differs_between_epochs_rounds_and_clients() -> None:
    """Published: loaders never shuffle, so every epoch of every round has the same batches."""
    own = np.arange(100, 140)
    local = Local(batch=10, epochs=2)
    first = order_of(own, local, 0, 0, 0)
    assert first.shape == (8, 10)
    epochs = first.view(2, 40)
    assert all(sorted(epoch.tolist()) == own.tolist() for epoch in epochs)
    assert not torch.equal(*epochs)
    assert torch.equal(first, order_of(own, local, 0, 0, 0))
    for other in (order_of(own, local, 0, 1, 0), order_of(own, local, 0, 0, 1), order_of(own, local, 1, 0, 0)):
        assert not torch.equal(first, other)


def assert_scores_do_not_depend_on_the_batch(name: str) -> None:
    outputs, scores = [], []
    data = federation("raffm_resnet", [ALL * 2] * 4, tests=23)
    for batch in (1, 4, 7, 23):
        evaluating = Evaluating(every=100, batch=batch, calibration_clients=2)
        plan = plan_of("raffm_resnet", name, "1, 1/4", data=data, evaluating=evaluating)
        jobs = [Job(share, 1) for entry in entries_of(plan, 1) for share in entry.served.shares]
        outputs.append(torch.stack([found[0] for found in Serial(plan).predict(jobs)]))
        scores.append({size: entry.test["accuracy"] for size, entry in evaluate(plan, Serial(plan), 1)[0].sizes.items()})
    assert all(torch.allclose(outputs[0], other, atol=1e-4) for other in outputs[1:])
    assert scores == [scores[0]] * 4


def test_d_fi5_scores_of_fiarse_do_not_depend_on_the_test_batch() -> None:
    """Published: norms have no statistics of their own and use those of test batches of one client."""
    assert_scores_do_not_depend_on_the_batch("fiarse")


# -- FedRolex ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["vit", "bert"])
def test_d_fr1_the_server_of_a_transformer_changes_in_a_round(family: str) -> None:
    """Published: the new parameters of the transformer are computed and dropped; the old ones are loaded back."""
    plan = plan_of(family, "fedrolex", "1/4")
    before = snapshot(plan.server)
    rounds_of(plan)
    trained = [name for name in plan.server.layout.tensors("parameter") if "mask_token" not in name]
    same = [name for name in trained if torch.equal(plan.server.tensors[name], before[name])]
    # Softmax does not see what all keys have in common: their biases may have no gradient beyond rounding.
    assert not [name for name in same if "key.bias" not in name and "k_proj.bias" not in name]


@pytest.mark.parametrize("family", FAMILIES)
def test_d_fr2_every_client_weighs_the_same_in_every_tensor(family: str) -> None:
    """Published: from the second tensor on the m-th client weighs m more, so later clients count up to ten times."""
    plan = plan_of(family, "fedrolex", merging=Merging("equal"))
    changes = {client: torch.tensor(float(2**client)) for client in range(4)}
    before = snapshot(plan.server)
    share = plan.method.choose(plan.server, 0, [Device(0, 1.0)], 0)[0]
    weighed(plan, changes, dict.fromkeys(range(4), share), plan.server.layout.tensors("parameter")[0])
    for name in plan.server.layout.tensors("parameter"):
        moved = plan.server.tensors[name].detach() - before[name]
        assert torch.allclose(moved, torch.tensor(15 / 4), atol=1e-4), name


@pytest.mark.parametrize(
    ("family", "query", "output"),
    [
        ("vit", "vit.layers.0.attention.q_proj", "vit.layers.0.attention.o_proj"),
        ("bert", "bert.encoder.layer.0.attention.self.query", "bert.encoder.layer.0.attention.output.dense"),
    ],
)
def test_d_fr3_a_window_stays_inside_every_head(family: str, query: str, output: str) -> None:
    """Published: the roll goes over all heads before they are split, so a head straddles two of the server's."""
    plan = plan_of(family, "fedrolex")
    for round in range(9):
        (share,) = plan.method.choose(plan.server, round, [Device(0, 1 / 4)], 0)
        module = module_of(plan, share)
        inside = sorted((round + place) % 4 for place in range(2))
        rows = [head * 4 + row for head in range(4) for row in inside]
        stream = sorted((round + place) % 16 for place in range(8))
        full = plan.server.tensors[f"{query}.weight"]
        assert torch.equal(module.get_submodule(query).weight, full[rows][:, stream])
        assert torch.equal(module.get_submodule(output).weight, plan.server.tensors[f"{output}.weight"][stream][:, rows])


@pytest.mark.parametrize("round", [0, 1, 5, 11])
def test_d_fr4_what_an_identity_shortcut_adds_are_the_same_channels(round: int) -> None:
    """Published: every convolution has random channels of its own, though shortcuts add them by their place."""
    plan = plan_of("raffm_resnet", "fedrolex")
    (share,) = plan.method.choose(plan.server, round, [Device(0, 1 / 4)], 0)
    module, full = module_of(plan, share), plan.server.tensors
    for stage, width in enumerate((8, 12, 16)):
        window = sorted((round + place) % width for place in range(width // 2))
        blocks = module.stages[stage]
        for place in range(1, len(blocks)):
            assert isinstance(blocks[place].shortcut, nn.Identity)
            name = f"stages.{stage}.{place}"
            written, read = full[f"{name}.conv2.weight"], full[f"{name}.conv1.weight"]
            assert torch.equal(blocks[place].conv2.weight, written[window][:, window])
            assert torch.equal(blocks[place].conv1.weight, read[window][:, window])
            assert torch.equal(blocks[place].norm2.weight, full[f"{name}.norm2.weight"][window])
        assert torch.equal(blocks[0].conv2.weight, full[f"stages.{stage}.0.conv2.weight"][window][:, window])


@pytest.mark.parametrize("family", FAMILIES)
def test_d_fr5_the_window_moves_by_exactly_one_index_a_round(family: str) -> None:
    """Published: channels are reshuffled in every round but each 512th, the condition being inverted."""
    plan = plan_of(family, "fedrolex")
    before = None
    for round in range(508, 540):
        kept = plan.method.choose(plan.server, round, [Device(0, 0.36)], 0)[0].selection.kept
        if before is not None:
            for name, indices in kept.items():
                size = plan.server.layout.sizes[name]
                assert torch.equal(((before[name] + 1) % size).sort(-1).values, indices), (round, name)
        before = kept


def test_d_fr6_scores_of_fedrolex_do_not_depend_on_the_test_batch() -> None:
    """Published: no statistics; the model is evaluated with those of the test batches."""
    assert_scores_do_not_depend_on_the_batch("fedrolex")


def test_d_fr10_devices_stay_what_they_are_unless_redrawn_by_switch() -> None:
    """Published: every device draws its capacity anew each round, so that each is full sooner or later."""
    fixed, redrawn = fleet_of("quarters"), fleet_of("quarters", redraw=True)
    assert fixed.redraw is False
    deals = [[fleet.tiers_of(40, 3, round).tolist() for round in range(5)] for fleet in (fixed, redrawn)]
    assert deals[0] == [deals[0][0]] * 5
    assert all(one != other for place, one in enumerate(deals[1]) for other in deals[1][:place])
    assert all(sorted(deal) == sorted(deals[0][0]) for deal in deals[1])
    for fleet, count in ((fixed, 1), (redrawn, 4)):
        plan = plan_of("vit", "heterofl", labels=[ALL] * 8, fleet="full")
        plan = replace(plan, fleet=fleet)
        sizes = [{plan.tier_of(client, round).size for round in range(30)} for client in range(8)]
        assert max(map(len, sizes)) == count
        assert [order.share.numbers["ratio"] for order in plan.orders(7, range(8))] == [
            plan.tier_of(client, 7).size ** 0.5 for client in range(8)
        ]


# -- HeteroFL ------------------------------------------------------------------------------------------------------


def spoiled(plan: Plan, clients: list[int], first: int = 0) -> Plan:
    """The same plan with other examples at these clients, from their `first` on."""
    dataset = plan.data.dataset
    pixels = dataset.train.inputs["pixel_values"].clone()
    for client in clients:
        pixels[torch.from_numpy(plan.data.split.train[client][first:])] = 255
    train = type(dataset.train)({"pixel_values": pixels}, dataset.train.labels)
    return replace(plan, data=Federation(replace(dataset, train=train), plan.data.split))


def test_d_hf1_statistics_come_from_a_few_clients_and_no_other_data_are_looked_at() -> None:
    """Published: the server computes them over all training data, pooled, in every round."""
    evaluating = Evaluating(calibration_clients=2, calibration_examples=6)
    plan = plan_of("raffm_resnet", "heterofl", "1, 1/4", [ALL * 2] * 6, evaluating=evaluating)
    asked = calibrating(plan, 3)
    assert len(asked) == len(set(asked)) == 2
    others = [client for client in range(6) if client not in asked]

    def outputs(plan: Plan) -> Tensor:
        jobs = [Job(share, 3) for entry in entries_of(plan, 3) for share in entry.served.shares]
        return torch.stack([found[0] for found in Serial(plan).predict(jobs)])

    expected = outputs(plan)
    assert torch.equal(outputs(spoiled(plan, others)), expected)
    assert torch.equal(outputs(spoiled(plan, asked, first=6)), expected)
    assert not torch.allclose(outputs(spoiled(plan, asked[:1])), expected)
    assert len({tuple(calibrating(plan, round)) for round in range(20)}) > 1
    assert torch.equal(outputs(plan), expected)


def test_d_hf2_absent_classes_never_win_and_have_no_probability() -> None:
    """Published: their logits are set to 0, which beats every negative one and keeps probability."""
    plan = plan_of("vit", "heterofl")
    present = torch.tensor([True, True, False, False, False])
    logits = torch.tensor([[-3.0, -1.0, 7.0, 7.0, 7.0]], requires_grad=True)
    told: list[Tensor] = []

    class Fixed(ImageClassification):
        def forward(self, module: nn.Module, batch: object) -> Tensor:
            return logits

        def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
            told.append(outputs.detach())
            return super().losses(outputs, labels)

    (share,) = plan.method.choose(plan.server, 0, [Device(0, 1.0)], 0)
    loss = plan.method.learn(plan.server, share, share.selection, Client(Fixed(), present)).loss
    batch = plan.task.batch(plan.data.dataset.train, torch.tensor([1]))
    value = loss(plan.server.model, batch)
    (outputs,) = told
    probabilities = outputs.softmax(1)[0]
    assert probabilities[2:].tolist() == [0, 0, 0]
    assert probabilities[:2].tolist() == pytest.approx([0.1192029, 0.8807971])  # 1 / (1 + e^2) and the rest
    assert int(outputs.argmax()) == 1
    assert float(value.detach()) == pytest.approx(0.1269280)  # log(1 + e^-2)
    value.backward()
    assert logits.grad is not None and logits.grad[0, 2:].tolist() == [0, 0, 0]
    published = outputs.masked_fill(outputs == float("-inf"), 0.0)
    assert int(published.argmax()) == 2


@pytest.mark.parametrize("name", ["heterofl", "fedrolex"])
def test_d_hf3_no_class_is_masked_in_evaluation(name: str) -> None:
    """Published: a client is tested on the classes it has alone, so "local" accuracy presumes what is to be told."""
    data = federation("vit", [[0] * 5, [1] * 5, [2] * 5, [3] * 5, [4] * 5])
    plan = plan_of("vit", name, data=data)
    with torch.no_grad():
        plan.server.tensors["classifier.weight"].zero_()
        plan.server.tensors["classifier.bias"].copy_(torch.tensor([0.0, 0, 0, 0, 1]))
    found, by_client = evaluate(plan, Serial(plan), 1)
    assert by_client["1"] == [0, 0, 0, 0, 1]  # everything is called class 4
    assert found.sizes["1"].test["accuracy"] == pytest.approx(0.2)


def scores(test: float, validation: float) -> Scores:
    return Scores({"accuracy": test}, {"accuracy": validation}, {}, {})


def results_of(*pairs: tuple[float, float]) -> Results:
    evaluations = [Evaluation(place + 1, {"1": scores(*pair)}) for place, pair in enumerate(pairs)]
    return Results({}, "heterofl", {}, {}, "accuracy", (), (), tuple(evaluations))


def test_d_hf4_the_best_round_is_the_best_on_validation_whatever_the_test_says() -> None:
    """Published: the checkpoint that is reported is the one that is best on the test set."""
    found = results_of((0.9, 0.3), (0.4, 0.8), (0.7, 0.8))
    assert found.best_on_validation is not None
    assert found.best_on_validation.round == 2
    assert found.summary()["best_on_validation"] == {"round": 2, "1": 0.4}
    assert found.summary()["last_round"] == {"round": 3, "1": 0.7}
    assert found.mean_of_last("1", "accuracy") == pytest.approx(fmean([0.9, 0.4, 0.7]))


def test_d_hf4_without_validation_examples_no_round_is_best() -> None:
    found = replace(results_of((0.9, 0.0)), evaluations=(Evaluation(1, {"1": Scores({"accuracy": 0.9}, {}, {}, {})}),))
    assert found.best_on_validation is None
    assert found.summary()["best_on_validation"] == {}


def test_d_hf4_a_run_with_other_test_labels_trains_the_same_and_has_the_same_best_round() -> None:
    found, servers = [], []
    for shift in (0, 2):
        data = federation("vit", [ALL, ALL * 2], validation=True)
        test = replace(data.dataset.test, labels=(data.dataset.test.labels + shift) % CLASSES)
        data = replace(data, dataset=replace(data.dataset, test=test))
        local = Local("sgd", lr=1.0, batch=5, steps=3)
        plan = plan_of("vit", "heterofl", "1, 1/4", data=data, rounds=4, evaluating=Evaluating(every=1), local=local)
        results = run(plan)
        assert results.best_on_validation is not None
        found.append((results.best_on_validation.round, [entry.sizes["1"].validation for entry in results.evaluations]))
        servers.append(plan.server)
    assert found[0] == found[1]
    assert all(same_bits(tensor, servers[1].tensors[name]) for name, tensor in servers[0].tensors.items())


def test_d_ra14_the_validation_split_follows_from_the_seed() -> None:
    """Published: a fifth of the training set, drawn anew in every run, so a resumed run validates on what it trained on."""
    dataset = federation("vit", [ALL * 20]).dataset

    def held(seed: int) -> Tensor:
        found = hold_out(dataset, 0.2, seed).validation
        assert found is not None
        assert torch.bincount(found.labels).tolist() == [4] * 5
        return found.inputs["pixel_values"]

    assert torch.equal(held(1), held(1))
    assert not torch.equal(held(1), held(2))
    assert torch.equal(hold_out(dataset, 0.2, 1).test.labels, dataset.test.labels)


def test_d_hf7_clients_weigh_by_their_examples_and_equally_by_switch() -> None:
    """Published: a client with one example counts as much as one with a thousand."""
    for weighting, expected in (("examples", 0.75), ("equal", 0.5)):
        plan = plan_of("vit", "heterofl", "full", [ALL, ALL * 3], merging=Merging(weighting))  # type: ignore[arg-type]
        assert [plan.weight(client) for client in (0, 1)] == ([5, 15] if weighting == "examples" else [1, 1])
        (share,) = plan.method.choose(plan.server, 0, [Device(0, 1.0)], 0)
        shares = {0: share, 1: share}
        moved = weighed(plan, {0: torch.tensor(0.0), 1: torch.tensor(1.0)}, shares, "vit.layers.0.mlp.fc1.weight")
        assert torch.allclose(moved, torch.tensor(expected), atol=1e-6)


# -- RaFFM ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_d_ra9_sizes_fit_the_device(family: str) -> None:
    """Published: what a client gets does not depend on its device, and one client a round must hold the full model."""
    server = labelled(family)
    whole = server.layout.count(Selection())
    method = method_of("raffm")
    devices = [Device(client, size, place) for place, (client, size) in enumerate([(5, 0.64), (3, 0.36), (1, 1.0), (0, 0.64)])]
    shares = method.choose(server, 0, devices, 0)
    counts = [server.layout.count(share.selection) for share in shares]
    assert all(count <= device.size * whole for count, device in zip(counts, devices, strict=True))
    assert counts[2] == whole
    assert counts[1] < counts[0] == counts[3] < whole
    assert method.choose(server, 0, devices[::-1], 0) == shares[::-1]
    assert all(count > 0.8 * device.size * whole for count, device in zip(counts, devices, strict=True)), counts


@pytest.mark.parametrize("family", FAMILIES)
def test_d_ra9_the_sandwich_by_switch_is_full_smallest_and_random(family: str) -> None:
    server = labelled(family)
    method = method_of("raffm", sizes="sandwich")
    devices = [Device(10 + place, 1 / 64, place) for place in range(6)]
    counts = [server.layout.count(share.selection) for share in method.choose(server, 0, devices, 0)]
    smallest = min(
        server.layout.count(share.selection)
        for round in range(30)
        for share in method.choose(server, round, [Device(client, 1 / 64, 2) for client in range(3)], 0)
    )
    assert counts[0] == server.layout.count(Selection())
    assert counts[1] <= smallest
    assert all(counts[1] <= count <= counts[0] for count in counts)
    assert len(set(counts[2:])) > 1
    assert method.choose(server, 0, devices, 0) == method.choose(server, 0, devices, 0)
    assert method.choose(server, 1, devices, 0)[2:] != method.choose(server, 0, devices, 0)[2:]


@pytest.mark.parametrize("family", FAMILIES)
def test_d_ra1_rows_that_few_hold_do_not_shrink_in_rounds_of_mixed_sizes(family: str) -> None:
    """Published: a sum of zero-padded tensors over the number of clients, which shrinks what few of them hold."""
    tiny_steps = Local("sgd", lr=1e-12, batch=5, steps=1)
    plan = plan_of(family, "raffm", local=tiny_steps, rounds=5, switches={"sizes": "sandwich"})
    before = snapshot(plan.server)
    sizes = {plan.server.layout.count(order.share.selection) for order in plan.orders(0, range(4))}
    assert len(sizes) > 1
    rounds_of(plan)
    for name in plan.server.layout.tensors("parameter"):
        assert torch.allclose(plan.server.tensors[name], before[name], atol=1e-6), name


def test_d_ra1_what_one_client_holds_takes_its_whole_change() -> None:
    """Published: it would take a half of it, and lose a half of its value."""
    plan = plan_of("vit", "raffm", switches={"metric": "none"})
    small = Share(plan.server.layout.select({"layers.0.ffn": 6}))
    server = plan.server
    name = "vit.layers.0.mlp.fc1.bias"
    before = server.tensors[name].detach().clone()
    tally = Tally(server.layout, server.tensors)
    for client, share in enumerate((Share(), small)):
        sent = dict(module_of(plan, share).named_parameters())
        tensors = {name: tensor.detach() + 1 for name, tensor in sent.items()}
        present = torch.ones(CLASSES, dtype=torch.bool)
        plan.method.merge(tally, server, Update(client, share, share.selection, tensors, 1.0, present))
    tally.step()
    assert torch.allclose(server.tensors[name].detach() - before, torch.ones(24), atol=1e-6)
