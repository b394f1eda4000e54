"""FIARSE's thresholds for parts of a model, and pruning-greedy, which is FIARSE without its factor."""

import pytest
import torch

from methods.runs import ALL, FAMILIES, labelled, plan_of, rounds_of, same_bits, snapshot
from raffm.algebra.mask import Mask
from raffm.errors import RunError
from raffm.methods import method_of
from raffm.methods.fiarse import kept_count, mask_of, maskable, scopes, thresholds
from raffm.methods.method import Device
from raffm.models.labelled import Labelled

SCOPES = ("global", "part", "block", "layer")


@pytest.mark.parametrize("size", [1 / 4, 1 / 64])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_scope_keeps_exactly_its_part(family: str, scope: str, size: float) -> None:
    """Invariant 34, second part: round(g n) of every layer, block or part, and the largest of each."""
    server = labelled(family)
    mask = mask_of(server, thresholds(server, [size], scope)[size], scope)
    together = scopes(server.layout, scope)
    assert sorted(name for names in together for name in names) == sorted(maskable(server.layout))
    for names in together:
        kept = torch.cat([mask.kept[name].flatten() for name in names])
        values = torch.cat([server.tensors[name].detach().abs().flatten() for name in names])
        assert int(kept.sum()) == kept_count(size, len(kept))
        assert bool(kept.all()) or values[kept].min() >= values[~kept].max()


def test_a_weight_and_its_bias_are_one_layer() -> None:
    names = scopes(labelled("vit").layout, "layer")
    assert ("vit.layers.0.mlp.fc1.weight", "vit.layers.0.mlp.fc1.bias") in names
    assert all(len({name.rpartition(".")[0] for name in each}) == 1 for each in names)


def test_the_parts_of_a_resnet_are_its_stem_its_stages_and_its_head() -> None:
    """The published "layer-wise" ablation has one threshold a stage."""
    server = labelled("raffm_resnet")
    parts = scopes(server.layout, "part")
    stages = len(server.layout.depths)
    assert len(parts) == stages + 2
    assert [len({name.split(".")[1] for name in part}) for part in parts[1:-1]] == [1] * stages


@pytest.mark.parametrize("family", FAMILIES)
def test_d_fi16_the_scope_of_a_threshold_is_stated(family: str) -> None:
    """Published: the runs on text have three thresholds and are called global."""
    server = labelled(family)
    (share,) = method_of("fiarse").choose(server, 0, [Device(0, 1 / 4)], 0)
    assert set(share.numbers) == {"threshold", "last"}
    (share,) = method_of("fiarse", scope="part").choose(server, 0, [Device(0, 1 / 4)], 0)
    assert len(share.numbers) == 2 * len(scopes(server.layout, "part")) > 2


@pytest.mark.parametrize("scope", SCOPES)
def test_a_scope_is_trained_merged_and_served(scope: str) -> None:
    plan = plan_of("raffm_resnet", "fiarse", "1/4, 1/16", switches={"scope": scope})
    before = snapshot(plan.server)
    orders = plan.orders(0, range(4))
    masks = {order.share: plan.method.held(plan.server, order.share) for order in orders}
    rounds_of(plan)
    held = {}
    for mask in masks.values():
        assert isinstance(mask, Mask)
        for name, kept in mask.kept.items():
            held[name] = held.get(name, torch.zeros_like(kept)) | kept
    for name, kept in held.items():
        assert same_bits(plan.server.tensors[name][~kept], before[name][~kept]), name
    assert any(not torch.equal(plan.server.tensors[name], before[name]) for name in held)


@pytest.mark.parametrize("family", FAMILIES)
def test_pruning_greedy_is_fiarse_with_the_factor_1(family: str) -> None:
    """Invariant 34, first part."""
    trained = []
    for method, switches in (("pruning-greedy", {}), ("fiarse", {"gradient": "plain"}), ("fiarse", {})):
        plan = plan_of(family, method, "1/4, 1/16", switches=switches, labels=[ALL, ALL * 2])
        rounds_of(plan)
        trained.append(snapshot(plan.server))
    greedy, plain, aware = trained
    assert all(same_bits(tensor, plain[name]) for name, tensor in greedy.items())
    assert any(not same_bits(tensor, aware[name]) for name, tensor in greedy.items())


def test_of_a_model_with_one_layer_all_scopes_are_the_same() -> None:
    from torch import nn

    from raffm.models.table import read

    torch.manual_seed(0)
    table = read('family = "one"\n[groups]\nclasses = { pinned = true }\n[tensors]\n"0" = "a -> classes"')
    server = Labelled.of(nn.Sequential(nn.Linear(6, 5)), table)
    shares = [thresholds(server, [0.3], scope)[0.3] for scope in SCOPES]
    assert all(share == shares[0] for share in shares)


@pytest.mark.parametrize(("switch", "words"), [({"scope": "stage"}, "not by 'stage'"), ({"gradient": "none"}, "not by 'none'")])
def test_unknown_scopes_and_gradients_are_refused(switch: dict[str, str], words: str) -> None:
    with pytest.raises(RunError, match=words):
        method_of("fiarse", **switch).refuse(labelled("vit"), [])


def test_pruning_greedy_has_no_other_gradient() -> None:
    with pytest.raises(RunError, match="choose fiarse"):
        method_of("pruning-greedy", gradient="importance").refuse(labelled("vit"), [])


@pytest.mark.parametrize("family", ["vit", "bert"])
def test_embeddings_can_be_left_whole(family: str) -> None:
    server = labelled(family)
    left = set(maskable(server.layout)) - set(maskable(server.layout, embeddings=False))
    assert left and all("embedding" in name for name in left)
    assert not any(name.endswith("projection.weight") for name in left), "patches are a map"
    plan = plan_of(family, "fiarse", "1/4", switches={"embeddings": False})
    (order,) = plan.orders(0, [0])
    held = plan.method.held(plan.server, order.share)
    assert isinstance(held, Mask) and not set(held.kept) & left
    kept, whole = (sum(int(part.sum()) for part in held.kept.values()), sum(part.numel() for part in held.kept.values()))
    assert kept == kept_count(1 / 4, whole)
    rounds_of(plan)
