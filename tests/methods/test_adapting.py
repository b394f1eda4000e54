"""LoRA of every rank: what is averaged, what travels, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from raffm.algebra.selection import Selection
from raffm.devices.budget import Budget
from raffm.devices.fleet import Fleet, Tier
from raffm.errors import CheckpointError, RunError, UpdateError
from raffm.methods import ADAPTING, method_of
from raffm.methods.method import Method
from raffm.methods.products import ProductTally, adapters_of, factored
from raffm.models.labelled import Labelled
from raffm.models.load import trainable
from raffm.models.lora import merged, with_lora
from raffm.rounds.costs import Costs
from raffm.rounds.local import Local
from raffm.rounds.loop import Keeping
from raffm.rounds.plan import Merging, Plan
from raffm.simulate.pooled import Pooled
from rounds.made import VIT, are_equal, assert_near, plan, run, values

peft = pytest.importorskip("peft")

each_method = pytest.mark.parametrize("name", ADAPTING)


def adapted(method: str | Method = "lora", rank: int = 4, fleet: str = "1, 1/2, 1/4", rounds: int = 1) -> Plan:
    made = plan("fedavg", fleet=fleet, rounds=rounds, local=Local("adamw", 1e-2, 6))
    model = with_lora(trainable(VIT, "image", 10, (1, 8, 8)), rank)
    return replace(made, server=Labelled.of(model), method=method_of(method) if isinstance(method, str) else method)


def product(tensors: dict[str, Tensor], adapter: object) -> Tensor:
    return adapter.scale * tensors[adapter.second] @ tensors[adapter.first]  # type: ignore[attr-defined]


def clients_of(server: Labelled, ranks: tuple[int, ...]) -> list[tuple[dict[str, Tensor], Selection]]:
    """Updates with random numbers in them, of clients with so many ranks each."""
    draw = torch.Generator().manual_seed(7)
    found = []
    for rank in ranks:
        held = server.layout.select({name: rank for name in server.layout.groups if name.endswith(".rank")})
        sizes, labels = server.layout.sizes_of(held), server.layout.labels
        names = server.layout.tensors("parameter", "buffer")
        found.append(({name: torch.randn(labels[name].shape(sizes), generator=draw) for name in names}, held))
    return found


# -- the rules -----------------------------------------------------------------------------------------------------


def test_equal_ranks_give_fedavg_of_adapters() -> None:
    ours, theirs = adapted("lora", fleet="full", rounds=2), adapted("fedavg", fleet="full", rounds=2)
    run(ours), run(theirs)
    assert_near(values(ours), values(theirs), 1e-6)


@pytest.mark.parametrize("ranks", [(16, 16), (16, 8, 4), (4, 4, 8)])
def test_flexlora_s_product_is_the_mean_of_products(ranks: tuple[int, ...]) -> None:
    """At a rank that loses nothing. Averaging A and B apart gives another product."""
    server = adapted("flexlora", rank=16).server
    updates = clients_of(server, ranks)
    tally = ProductTally(server, [16])
    for place, (update, held) in enumerate(updates):
        tally.add(update, held, weight=place + 1.0)
    tally.step()
    total = sum(range(1, len(ranks) + 1))
    for each in adapters_of(server):
        expected = sum(weight * product(update, each) for weight, (update, _) in enumerate(updates, 1)) / total
        found = product(dict(server.tensors), each)
        assert torch.allclose(found, expected, atol=1e-5 * float(expected.abs().max()))
        if len(set(ranks)) == 1:
            apart = {
                name: sum(weight * update[name] for weight, (update, _) in enumerate(updates, 1)) / total
                for name in (each.first, each.second)
            }
            assert float((product(apart, each) - expected).abs().max()) > 0.1 * float(expected.abs().max())


def test_raflora_divides_a_rank_by_those_who_have_it_and_flexlora_by_everybody() -> None:
    updates = clients_of(adapted(rank=16).server, (16, 4))
    found = {}
    for ends in ((16,), (4, 16)):
        server = adapted(rank=16).server
        tally = ProductTally(server, ends)
        for update, held in updates:
            tally.add(update, held)
        tally.step()
        found[ends] = server
    (large, _), (small, _) = updates
    for each in adapters_of(found[(16,)]):
        low = each.scale * (large[each.second][:, :4] @ large[each.first][:4] + small[each.second] @ small[each.first]) / 2
        high = each.scale * large[each.second][:, 4:] @ large[each.first][4:]
        for ends, expected in (((16,), low + high / 2), ((4, 16), low + high)):
            assert torch.allclose(product(dict(found[ends].tensors), each), expected, atol=2e-5 * float(expected.abs().max()))


def test_what_nobody_has_keeps_its_product() -> None:
    server = adapted("raflora", rank=8).server
    with torch.no_grad():
        for name in server.layout.tensors("parameter"):
            server.tensors[name].add_(torch.randn_like(server.tensors[name]))
    before = {name: tensor.detach().clone() for name, tensor in server.tensors.items()}
    tally = ProductTally(server, (2, 8))
    ((update, held),) = clients_of(server, (2,))
    tally.add(update, held)
    tally.step()
    for each in adapters_of(server):
        kept = each.scale * before[each.second][:, 2:] @ before[each.first][2:]
        expected = kept + each.scale * update[each.second] @ update[each.first]
        assert torch.allclose(product(dict(server.tensors), each), expected, atol=1e-4 * float(expected.abs().max()))


@each_method
def test_a_round_in_which_nobody_took_part_changes_nothing(name: str) -> None:
    made = adapted(name)
    before = values(made)
    tally = made.tally()
    tally.step()
    assert are_equal(before, values(made))


def test_factors_are_ordered_and_a_rank_that_does_nothing_can_still_learn() -> None:
    weak = torch.outer(torch.arange(5.0), torch.ones(7))
    first, second = factored(weak, 3)
    assert torch.allclose(second @ first, weak, atol=1e-5)
    assert torch.allclose(first[1:].norm(dim=1), torch.tensor(0.5))
    assert torch.allclose(second[:, 1:], torch.zeros(5, 2), atol=1e-6)
    strong = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    lengths = factored(strong, 4)[0].norm(dim=1)
    assert bool((lengths[:-1] >= lengths[1:]).all())


# -- runs ----------------------------------------------------------------------------------------------------------


@each_method
@pytest.mark.parametrize("base", ["whole", "fitted"])
def test_only_adapters_and_heads_travel(name: str, base: str) -> None:
    made = adapted(method_of(name, base=base), rounds=2)
    before = values(made)
    results = run(made)
    layout = made.server.layout
    for tensor in layout.tensors("frozen"):
        assert torch.equal(made.server.tensors[tensor], before[tensor])
    moved = [tensor for tensor in layout.tensors("parameter") if not torch.equal(made.server.tensors[tensor], before[tensor])]
    assert any(".lora_" in tensor for tensor in moved)
    assert any("classifier" in tensor for tensor in moved)
    costs = Costs(made)
    orders = made.orders(0, made.cohort(0).present)
    own = [4 * layout.count(order.share.selection, "parameter") for order in orders]
    assert [costs.of(order.share).bytes_up for order in orders] == own
    assert results.rounds[0].bytes_up == results.rounds[0].bytes_down == sum(own)
    ranks = sorted(layout.sizes_of(order.share.selection)["layers.0.attention.q_proj.rank"] for order in orders)
    assert set(ranks) == {1, 2, 4}


@each_method
def test_workers_agree_with_one_process(name: str) -> None:
    alone, shared = adapted(name, rounds=2), adapted(name, rounds=2)
    run(alone)
    run(shared, Pooled(shared, 2))
    assert_near(values(shared), values(alone), 1e-4)


@each_method
def test_a_run_goes_on_where_it_stopped_and_only_on_the_same_frozen_weights(name: str, tmp_path: Path) -> None:
    whole, half = adapted(name, rounds=2), adapted(name, rounds=1)
    run(whole)
    run(half, keeping=Keeping(tmp_path / "saved"))
    again = adapted(name, rounds=2)
    run(again, keeping=Keeping(tmp_path / "saved", resume=True))
    assert_near(values(again), values(whole), 0.0)
    from raffm.rounds import checkpoint

    saved = checkpoint.load(tmp_path / "saved", None)
    assert all(".lora_" in tensor or "classifier" in tensor for tensor in saved.server)
    other = adapted(name)
    with torch.no_grad():
        next(iter(other.server.tensors.values())).add_(1)
    with pytest.raises(CheckpointError, match="other frozen weights"):
        checkpoint.restore(saved, other.server, tmp_path)


def test_a_served_submodel_merges_into_a_plain_model() -> None:
    from raffm.federate import submodel_of

    made = adapted("flexlora", rounds=1)
    run(made)
    small = submodel_of(made, 0.5)
    inputs = made.task.batch(made.data.dataset.test, torch.arange(4)).inputs
    with torch.no_grad():
        assert torch.allclose(merged(small).eval()(**inputs).logits, small.eval()(**inputs).logits, atol=1e-5)


def test_what_makes_no_sense_is_refused() -> None:
    for wrong, error in (
        ({"metric": "loudest"}, "lora ranks by l1_norm"),
        ({"base": "half"}, "leaves the base 'whole'"),
    ):
        with pytest.raises(RunError, match=error):
            adapted(method_of("lora", **wrong))
    with pytest.raises(RunError, match="the model has none"):
        plan("flexlora")
    with pytest.raises(RunError, match="singular values"):
        adapted(method_of("raflora", metric="l1_norm"))


def test_limits_are_kept_or_refused() -> None:
    fleet = Fleet(tuple(Tier(1.0, budget=Budget(max_params=limit)) for limit in (100_000_000, 6_000)))
    with pytest.raises(RunError, match=r"does not read limits\. Have it cut"):
        replace(adapted("lora"), fleet=fleet)
    made = replace(adapted(method_of("lora", base="fitted")), fleet=fleet)
    counts = {made.server.layout.count(order.share.selection) for order in made.orders(0, made.cohort(0).present)}
    assert len(counts) == 2
    assert min(counts) <= 6_000 < max(counts)


def test_products_have_no_median_and_one_rank() -> None:
    with pytest.raises(RunError, match="which has no median"):
        replace(adapted("flexlora"), merging=Merging(combine="median"))
    mixed = trainable(VIT, "image", 10, (1, 8, 8))
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], rank_pattern={"v_proj": 4})
    peft.inject_adapter_in_model(config, mixed)
    with pytest.raises(RunError, match="divides the ranks of all adapters alike"):
        replace(adapted("raflora"), server=Labelled.of(mixed))


def test_factors_that_are_missing_or_misshapen_are_an_update_s_fault() -> None:
    server = adapted("flexlora").server
    ((update, held),) = clients_of(server, (2,))
    name = adapters_of(server)[0].first
    for wrong in ({key: value for key, value in update.items() if key != name}, {**update, name: update[name][:1]}):
        tally = ProductTally(server, [4])
        with pytest.raises(UpdateError, match="its submodel has"):
            tally.add(wrong, held)
