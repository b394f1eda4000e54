"""Nested: what it chooses, what its loss is, what it serves, and what it refuses."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from methods.runs import ALL, FAMILIES, federation, labelled, plan_of, rounds_of, run, same_bits, snapshot
from raffm.algebra.layout import TRAVELLING
from raffm.algebra.move import extract, put
from raffm.data.task import Batch, LanguageModelling, TextRegression, teaching
from raffm.devices.balance import Widths
from raffm.errors import BudgetError, CheckpointError, RunError, SpaceError
from raffm.federate import Trained, run_plan, submodel_of
from raffm.measure import measured
from raffm.methods import method_of
from raffm.methods.method import Client, Device
from raffm.methods.shapes import sizes_at
from raffm.models.checkpoint import load_submodel
from raffm.models.label import named_tensors
from raffm.models.labelled import Labelled
from raffm.models.load import tiny
from raffm.models.resnet import ResNet, ResNetConfig
from raffm.models.rows import SIZES, bare
from raffm.models.surgery import submodel
from raffm.pick import space_of
from raffm.rounds.backend import Serial
from raffm.rounds.costs import Costs
from raffm.rounds.local import Local
from raffm.rounds.loop import Keeping, train
from raffm.rounds.plan import Evaluating, Merging, Plan
from raffm.rounds.predict import outputs_of
from raffm.search.judge import judge_of
from raffm.search.price import Prices
from raffm.simulate.pooled import Pooled

FLEET = "1, 1/2, 1/5"
LABELS: Sequence[Sequence[int]] = [ALL, ALL * 2, ALL, ALL, ALL, ALL]


def doubled(plan: Plan) -> Plan:
    """The same plan with float64 numbers."""
    for tensor in plan.server.tensors.values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.double()
    return plan


def random_norms(plan: Plan) -> None:
    """Give every size norms that differ from those of the others."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in plan.server.tensors.items():
            if name.endswith("_rows"):
                tensor.add_(torch.randn(tensor.shape, generator=draw).to(tensor) * 0.2)


def batch_of(plan: Plan) -> Batch:
    batch = plan.task.batch(plan.data.dataset.train, torch.arange(5))
    inputs = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in batch.inputs.items()}
    return Batch(inputs, batch.labels)


def trained_module(plan: Plan, size: float) -> tuple[Any, nn.Module]:
    (share,) = plan.method.choose(plan.server, 0, [Device(0, size, fleet=plan.dealt)], 0)
    module = submodel(plan.server.model, plan.server.layout, share.selection).train()
    return share, module


def gradients(module: nn.Module, terms: Sequence[Tensor] | Any) -> dict[str, Tensor]:
    for term in terms:
        term.backward()
    named = named_tensors(module)[0]
    found = {name: tensor.grad for name, tensor in named.items() if isinstance(tensor, nn.Parameter)}
    return {name: torch.zeros_like(named[name]) if grad is None else grad for name, grad in found.items()}


@pytest.mark.parametrize("own_norms", [True, False])
@pytest.mark.parametrize("distil", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("ranking", ["none", "l1_norm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_the_sum_of_those_of_submodels_that_were_cut_out(
    family: str, ranking: str, distil: float, own_norms: bool
) -> None:
    """Every size's own term on a submodel of its own, the teacher's outputs as constants, scattered back."""
    switches = {"distil": distil, "own_norms": own_norms, "ranking": ranking}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if family == "bert" else {}
    server = Labelled.of(tiny(family, **dropout))
    plan = doubled(plan_of(family, "nested", FLEET, labels=LABELS, server=server, switches=switches))
    random_norms(plan)
    layout, task, batch = plan.server.layout, plan.task, batch_of(plan)
    share, module = trained_module(plan, 1.0)
    learn = plan.method.learn(plan.server, share, share.selection, Client(task, torch.ones(5, dtype=torch.bool)))
    learn.prepare(module)
    found = gradients(module, learn.terms(0, module, batch))
    expected = {name: torch.zeros_like(tensor) for name, tensor in plan.server.tensors.items()}
    teacher = task.forward(module, batch).detach()
    for selection in (share.selection, *share.inner):
        cut = submodel(plan.server.model, layout, selection).train()
        outputs = task.forward(cut, batch)
        loss = task.losses(outputs, batch.labels).mean()
        if selection is not share.selection:
            spoken = -(teacher.softmax(-1) * outputs.log_softmax(-1)).sum(-1).mean()
            loss = (1 - distil) * loss + distil * spoken
        put(gradients(cut, [loss]), expected, layout, selection)
    mine = extract(expected, layout, share.selection)
    assert len(share.inner) == 2
    for name, gradient in found.items():
        assert torch.allclose(gradient, mine[name], rtol=1e-6, atol=1e-9), name


def test_a_client_holds_the_norms_of_its_own_size_and_of_smaller_ones() -> None:
    plan = plan_of("vit", "nested", FLEET, labels=LABELS)
    sizes = {1.0: [0, 1, 2], 1 / 2: [1, 2], 1 / 5: [2]}
    for size, rows in sizes.items():
        share, _ = trained_module(plan, size)
        kept = share.selection.kept.get(SIZES, torch.arange(3))
        assert kept.tolist() == rows
        assert [inner.kept[SIZES].tolist() for inner in share.inner] == [[row] for row in rows[1:]]
    alone = plan_of("vit", "nested", FLEET, labels=LABELS, switches={"steps": "none"})
    share, _ = trained_module(alone, 1.0)
    assert share.selection.kept[SIZES].tolist() == [0] and not share.inner


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("switches", [{"own_norms": False}, {"shapes": "balanced"}, {"steps": "one"}], ids=str)
def test_among_full_devices_it_is_fedavg(family: str, switches: dict[str, Any]) -> None:
    local = Local("sgd", lr=0.05, batch=5, steps=2, momentum=0.9)
    plans = [plan_of(family, "fedavg", local=local), plan_of(family, "nested", local=local, switches=switches)]
    for plan in plans:
        rounds_of(plan)
    assert plans[0].given is not None and plans[1].given is not None
    for name, tensor in plans[0].given.tensors.items():
        assert same_bits(plans[1].given.tensors[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_indices_in_the_order_of_their_salience_are_the_same_model(family: str) -> None:
    server = labelled(family)
    inputs = plan_of(family, "fedavg", server=labelled(family)).task.batch(
        federation(family, [ALL]).dataset.test, torch.arange(4)
    )
    before = server.model.eval()(**inputs.inputs).logits
    plan = plan_of(family, "nested", FLEET, labels=LABELS, server=server, switches={"ranking": "l1_norm"})
    after = plan.server.model.eval()(**inputs.inputs).logits
    assert torch.allclose(before, after, atol=1e-5)
    again = snapshot(plan.server)
    replace(plan, rounds=3)  # a plan is adapted once
    assert all(same_bits(tensor, again[name]) for name, tensor in plan.server.tensors.items())


def test_one_drawn_shape_a_step_comes_from_a_table_of_its_client_and_counts_for_all() -> None:
    plan = plan_of("vit", "nested", FLEET, labels=LABELS, switches={"steps": "one"}, local=Local("sgd", batch=5, steps=300))
    fleet, client = plan.dealt, Client(plan.task, torch.ones(5, dtype=torch.bool))
    shares = plan.method.choose(plan.server, 4, [Device(each, 1.0, fleet=fleet) for each in (0, 1)], 0)
    drawn = [plan.method.learn(plan.server, share, share.selection, client) for share in shares]
    tables = [[learn.turn(step) for step in range(300)] for learn in drawn]
    assert tables[0] != tables[1]
    assert all(100 < count < 200 for table in tables for count in Counter(table).values())
    again = plan.method.learn(plan.server, shares[0], shares[0].selection, client)
    assert again.turn(299) == tables[0][299], "in any order of questions"
    module = submodel(plan.server.model, plan.server.layout, shares[0].selection).train()
    batch = plan.task.batch(plan.data.dataset.train, torch.arange(5))
    together = plan_of("vit", "nested", FLEET, labels=LABELS)
    whole, other = trained_module(together, 1.0)
    every = together.method.learn(together.server, whole, whole.selection, client)
    for learn, host in ((drawn[0], module), (every, other)):
        learn.prepare(host)
    own, *rest = every.terms(0, other, batch)
    for turn, term in enumerate(rest):
        first, single = drawn[0].terms(turn, module, batch)
        assert torch.allclose(first, own) and torch.allclose(single, 2 * term)


@pytest.mark.parametrize("steps", ["all", "one", "none"])
def test_workers_give_the_server_that_one_process_gives(steps: str) -> None:
    plans = [plan_of("raffm_resnet", "nested", FLEET, labels=LABELS, switches={"steps": steps}) for _ in range(2)]
    pool = Pooled(plans[0], 2)
    try:
        tally = plans[0].tally()
        pool.train(plans[0].orders(0, range(6)), tally, lambda _: None, lambda: None)
        tally.step()
    finally:
        pool.close()
    rounds_of(plans[1], range(6))
    for name, tensor in plans[1].server.tensors.items():
        assert torch.allclose(plans[0].server.tensors[name], tensor, atol=1e-6), name


def test_what_nested_steps_cost_is_counted() -> None:
    plans = {
        steps: plan_of("vit", "nested", FLEET, labels=LABELS, switches={"steps": steps}) for steps in ("all", "one", "none")
    }
    shares = {steps: trained_module(plan, 1.0)[0] for steps, plan in plans.items()}
    costs = {steps: Costs(plan).of(shares[steps]) for steps, plan in plans.items()}
    flops = [Costs(plans["all"]).flops(inner) for inner in shares["all"].inner]
    own = costs["none"].work(1)
    assert costs["all"].work(1) == own + 3 * sum(flops)
    assert costs["one"].work(1) == own + 3 * round(sum(flops) / 2)
    rows = sum(tensor[0].numel() for name, tensor in plans["all"].server.tensors.items() if name.endswith("_rows"))
    assert costs["all"].bytes_up - costs["none"].bytes_up == 4 * 2 * rows, "the norms of two smaller sizes"
    layout = bare(plans["all"].server).layout
    assert costs["none"].params == layout.count(layout.select({}))


def test_sizes_are_parts_of_the_model_that_was_given() -> None:
    plan = plan_of("raffm_resnet", "nested", FLEET, labels=LABELS)
    given = labelled("raffm_resnet")
    results = run(plan)
    sizes = {size.name: size for size in results.sizes}
    assert results.model["params"] == sizes["1"].params == given.layout.count(given.layout.select({}))
    assert sizes["1"].fraction == 1
    for name in ("1/2", "1/5"):
        expected = given.layout.count(given.layout.select(sizes_at(given, plan.served[name].size, plan.dealt, "uniform")))
        assert sizes[name].params == expected


# -- what is served ------------------------------------------------------------------------------------------------


def small_resnet() -> Labelled:
    torch.manual_seed(0)
    return Labelled.of(ResNet(ResNetConfig(widths=(24, 48), depths=(1, 1), classes=5, image_size=16)))


def balanced_plan(fleet: str = "1, 1/4", **rest: Any) -> Plan:
    return plan_of(
        "raffm_resnet", "nested", fleet, labels=LABELS, server=small_resnet(), switches={"shapes": "balanced"}, **rest
    )


def test_a_size_that_nobody_has_gets_a_shape_between_others_and_the_norms_of_the_next_larger(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "raffm"):
        plan = balanced_plan("1/2, 1/8", evaluating=Evaluating(sizes=(1 / 2, 1 / 4, 1 / 8)))
    assert "no client has size 1:" in caplog.text and "that of size 1/2" in caplog.text
    assert "no client has size 1/4: its devices get a shape inside that of size 1/2, with the norms" in caplog.text
    shares = {
        size: plan.method.serve(plan.server, 0, [Device(-1, size, fleet=plan.dealt)])[0][0].shares[0]
        for size in (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 10)
    }
    rows = {size: share.selection.kept[SIZES].tolist() for size, share in shares.items()}
    assert rows == {1.0: [0], 1 / 2: [0], 1 / 4: [0], 1 / 8: [1], 1 / 10: [1]}
    assert shares[1.0] == shares[1 / 2]
    layout = plan.server.layout
    sizes = [layout.sizes_of(shares[size].selection) for size in (1 / 2, 1 / 4, 1 / 8, 1 / 10)]
    for larger, smaller in pairwise(sizes):
        assert all(smaller[group] <= larger[group] for group in layout.sizes)
    count = layout.count(shares[1 / 4].selection)
    assert count <= Widths(bare(plan.server)).budget(1 / 4).limits["params"]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "raffm"):
        submodel_of(plan, 1 / 6)
    assert "no client has size 1/6" in caplog.text


def test_served_submodels_are_plain_and_say_what_the_server_says(tmp_path: Path) -> None:
    plan = balanced_plan(rounds=2)
    results = train(plan, Serial(plan))
    folders = Trained(results, plan).save(tmp_path)
    assert list(folders) == ["1", "1/4"]
    for name, folder in folders.items():
        module = load_submodel(folder)
        assert not [key for key in module.state_dict() if "rows" in key]
        made = submodel_of(plan, plan.served[name].size)
        said = outputs_of(plan, made, plan.data.dataset.test)
        assert torch.equal(outputs_of(plan, module, plan.data.dataset.test), said)
        accuracy = plan.task.metrics(said, plan.data.dataset.test.labels)["accuracy"]
        assert accuracy == results.evaluations[-1].sizes[name].test["accuracy"]


def test_a_submodel_of_other_sizes_has_the_norms_of_the_smallest_shape_that_holds_it() -> None:
    plan = balanced_plan("1, 1/2, 1/8")
    layout = plan.server.layout
    shapes = [sizes_at(bare(plan.server), size, plan.dealt, "balanced") for size in plan.dealt]
    for place, shape in enumerate(shapes):
        smaller = {group: size - 1 for group, size in shape.items()}
        done = plan.method.completed(plan.server, plan.dealt, layout.select(smaller))
        assert done.kept[SIZES].tolist() == [place]
    assert method_of("nested", own_norms=False).completed(small_resnet(), (1.0,), layout.select({})) == layout.select({})


def test_the_trained_model_is_the_one_that_was_given_with_the_norms_of_the_largest_size() -> None:
    given = small_resnet()
    plan = plan_of("raffm_resnet", "nested", "1, 1/4", labels=LABELS, server=given, switches={"shapes": "balanced"})
    trained = run_plan(plan)
    assert trained.model is given.model
    whole = submodel_of(plan, 1.0)
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, given.tensors[name]), name


class Stops:
    """Somebody who presses Ctrl-C after the second round."""

    def client(self, *_: object) -> None:
        pass

    def round(self, entry: Any, *_: object) -> None:
        if entry.round == 2:
            raise KeyboardInterrupt


def test_a_run_that_is_stopped_leaves_norms_that_belong_to_the_weights() -> None:
    given = small_resnet()
    plan = plan_of("raffm_resnet", "nested", "1, 1/4", labels=LABELS, server=given, rounds=5, switches={"shapes": "balanced"})
    with pytest.raises(KeyboardInterrupt):
        train(plan, Serial(plan), watcher=Stops())
    for name, tensor in plan.server.tensors.items():
        if name.endswith("_rows"):
            assert torch.equal(given.tensors[name.removesuffix("_rows")], tensor[0])
            assert name.endswith("bias_rows") or not torch.equal(tensor[0], torch.ones_like(tensor[0]))


def test_submodels_by_raffm_of_a_nested_run_have_the_norms_of_the_largest_size() -> None:
    plan = balanced_plan("1, 1/4")
    found = measured(plan, 0, "l1_norm", is_timed=False)
    layout = bare(plan.server).layout
    for name, size in found.sizes.items():
        assert size.fraction == size.params / layout.count(layout.select({})), name
    assert len(found.sizes) == 4, "both sizes, and the smaller one by RaFFM with salience and without"
    judge = judge_of(plan, "l1_norm")
    space = space_of(plan, None)
    prices = Prices(judge, space, ("params",))
    for sizes in (space.smallest(), space.largest()):
        assert prices.of(sizes)["params"] == sum(parameter.numel() for parameter in judge.module(sizes).parameters())


# -- saving --------------------------------------------------------------------------------------------------------


def test_the_average_is_on_and_all_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    def plan(rounds: int) -> Plan:
        return balanced_plan("1, 1/2, 1/8", rounds=rounds, merging=Merging(), evaluating=Evaluating(every=2))

    whole, first, second = plan(4), plan(2), plan(4)
    assert whole.decay == 0.95
    results = train(whole, Serial(whole))
    folder = tmp_path / "checkpoint"
    train(first, Serial(first), Keeping(folder))
    resumed = train(second, Serial(second), Keeping(folder, resume=True))
    assert resumed.to_json()["evaluations"] == results.to_json()["evaluations"]
    assert {"1/8", "1/8 average"} <= set(results.evaluations[-1].sizes)
    for name in whole.server.layout.tensors(*TRAVELLING):
        assert same_bits(whole.server.tensors[name], second.server.tensors[name]), name


def test_a_checkpoint_of_another_chain_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = balanced_plan("1, 1/4")
    run_plan(plan, folder=tmp_path)
    before = {path: path.read_bytes() for path in files_in(tmp_path)}
    other = balanced_plan("1, 1/2")
    with pytest.raises(CheckpointError, match="another run"):
        run_plan(other, folder=tmp_path, resume=True)
    monkeypatch.setattr("raffm.devices.balance.STEP", 4)  # as another version might cut
    monkeypatch.setattr("raffm.methods.shapes._balanced", lambda model, size, fleet: (24, 48) if size == 1 else (12, 12))
    with pytest.raises(CheckpointError, match="other shapes: size 1/4 had"):
        run_plan(balanced_plan("1, 1/4"), folder=tmp_path, resume=True)
    assert {path: path.read_bytes() for path in files_in(tmp_path)} == before


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


# -- what makes no sense -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        ({"steps": "some"}, '"all" smaller shapes in a step, "one" or "none"'),
        ({"distil": 1.5}, "part of 0 to 1"),
        ({"ranking": "magic"}, "ranks by l1_norm, l2_norm or none"),
        ({"shapes": "round"}, '"uniform", "balanced"'),
        ({"shapes": {"1": [8, 8], "1/4": [8, 16]}}, "does not lie inside"),
        ({"shapes": {"small": [8, 8]}}, "sizes such as 1/4, but one is for 'small'"),
        ({"shapes": {"1/4": [8.0, 8.0]}}, "does not fit; the widths"),
        ({"distil": "half"}, "part of 0 to 1"),
    ],
    ids=str,
)
def test_switches_that_make_no_sense_are_refused(switches: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        plan_of("raffm_resnet", "nested", "1, 1/4", labels=LABELS, server=small_resnet(), switches=switches)


def test_a_size_below_the_smallest_shape_is_refused_and_says_what_else_there_is() -> None:
    with pytest.raises(BudgetError, match=r'size 1/64: .*no shape fits.* Or cut all widths alike: method.shapes = "uniform"'):
        balanced_plan("1, 1/64")


class WithoutNorms(nn.Module):
    """A network whose parts have no norms."""

    config = ResNetConfig()

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.second(self.first(x))
        return outputs


def test_a_model_whose_norms_cannot_be_kept_apart_is_refused() -> None:
    from raffm.models.table import read

    table = read(
        'family = "plain"\n[groups]\nclasses = { pinned = true }\npixels = { pinned = true }\n'
        '[tensors]\n"first" = "pixels -> a"\n"second" = "a -> classes"\n[inputs]\nx = ["pixels = 4"]\n'
    )
    server = Labelled.of(WithoutNorms(), table)
    with pytest.raises(SpaceError, match=r"norms of WithoutNorms cannot be kept apart by size: there are none. .*own_norms"):
        method_of("nested", shapes="uniform").adapt(server, 0, (1.0, 0.25))
    assert method_of("nested", shapes="uniform", own_norms=False).adapt(server, 0, (1.0, 0.25)) is server


def test_tasks_say_whether_one_model_can_teach_another() -> None:
    assert teaching(LanguageModelling()) is None
    taught = teaching(TextRegression())
    assert taught is not None
    assert taught(torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [3.0]])).tolist() == [1.0, 0.0]
