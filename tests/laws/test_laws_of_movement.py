"""Extraction, scattering, permutation: every law against an oracle of plain loops."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from laws import oracle
from laws.oracle import assert_equals_oracle, assert_same_bits
from laws.strategies import World, block_of, cuts, rankings, seeds, sizes, worlds
from raffm.algebra.axis import coordinates, names, parse, parse_label, value
from raffm.algebra.blocks import depth_of, is_place, place_value
from raffm.algebra.group import Group
from raffm.algebra.inside import inside, views, within
from raffm.algebra.layout import Layout
from raffm.algebra.move import extract, gather, moves, permute, put
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.errors import SelectionError

# -- layouts -------------------------------------------------------------------------------------------------------


@given(worlds())
def test_a_layout_finds_the_sizes_bases_and_guards_that_its_labels_mean(world: World) -> None:
    layout = world.layout()
    assert layout.sizes == world.sizes
    assert layout.bases == world.bases
    for name, group in layout.groups.items():
        guards = world.guards(name)
        assert group.guard == (guards.pop() if len(guards) == 1 else None)
    assert set(layout.depths) == {name for name, group in world.groups.items() if group.path}
    assert {name: label.shape(layout.sizes) for name, label in layout.labels.items()} == {
        name: world.shape(name) for name in world.tensors
    }
    for name, described in world.tensors.items():
        assert (layout.kind(name), layout.labels[name].guard) == (described.kind, described.guard)
        assert layout.labels[name].stack == described.stack


@given(worlds())
def test_the_uses_of_a_group_are_the_axes_that_its_name_stands_in(world: World) -> None:
    layout = world.layout()
    for group in layout.groups:
        expected = [
            (name, place)
            for name, described in world.tensors.items()
            for place, axis in enumerate(described.axes)
            if any(part == group for element in oracle.elements(axis, world.sizes) for part, _ in element)
        ]
        assert layout.uses(group) == expected
    assert layout.uses("no such group") == []


@given(worlds())
def test_coordinates_name_the_index_of_a_group_at_every_position(world: World) -> None:
    layout = world.layout()
    for name, described in world.tensors.items():
        for axis, expression in zip(described.axes, layout.labels[name].axes, strict=True):
            for group in layout.groups:
                expected = [dict(element).get(group, -1) for element in oracle.elements(axis, world.sizes)]
                assert coordinates(expression, layout.sizes, group).tolist() == expected


# -- extract and put -----------------------------------------------------------------------------------------------


@given(worlds(), seeds)
def test_extracting_everything_changes_nothing(world: World, seed: int) -> None:
    layout, tensors = world.layout(), world.values(seed)
    whole = extract(tensors, layout, Selection())
    assert_same_bits(whole, tensors)
    for name, tensor in whole.items():
        assert tensor.data_ptr() != tensors[name].data_ptr(), "a submodel has memory of its own"
    assert layout.select({name: size for name, size in world.sizes.items() if not world.groups[name].pinned}) == Selection()


@given(st.data(), worlds(), seeds)
def test_every_tensor_of_a_submodel_equals_the_oracle(data: st.DataObject, world: World, seed: int) -> None:
    layout, tensors = world.layout(), world.values(seed)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    kept = data.draw(cuts(world))
    selection = layout.select(kept)
    part = extract(tensors, layout, selection)
    assert_equals_oracle(part, oracle.extracted(world, tensors, kept))
    assert all(tensor.is_contiguous() for tensor in part.values())
    assert_same_bits(tensors, before)


@given(st.data(), worlds(), seeds)
def test_extracting_from_transposed_memory_equals_extracting_from_plain_memory(
    data: st.DataObject, world: World, seed: int
) -> None:
    layout, tensors = world.layout(), world.values(seed)
    strided = {name: tensor.T.contiguous().T if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}
    selection = layout.select(data.draw(cuts(world)))
    assert_same_bits(extract(strided, layout, selection), extract(tensors, layout, selection))


@given(st.data(), worlds(), seeds)
def test_extracting_into_given_memory_fills_that_memory(data: st.DataObject, world: World, seed: int) -> None:
    layout, tensors = world.layout(), world.values(seed)
    selection = layout.select(data.draw(cuts(world)))
    expected = extract(tensors, layout, selection)
    room = {name: torch.full_like(tensor, 7) for name, tensor in expected.items()}
    places = {name: tensor.data_ptr() for name, tensor in room.items()}
    found = extract(tensors, layout, selection, room)
    assert_same_bits(found, expected)
    assert_same_bits(room, expected)
    assert {name: tensor.data_ptr() for name, tensor in found.items()} == places


@given(st.data(), worlds(), seeds)
def test_extracting_some_tensors_gives_those_alone(data: st.DataObject, world: World, seed: int) -> None:
    layout, tensors = world.layout(), world.values(seed)
    kept = data.draw(cuts(world))
    selection = layout.select(kept)
    parameters = {name: tensors[name] for name in world.names("parameter")}
    part = extract(parameters, layout, selection)
    alive = [name for name in parameters if world.is_alive(world.tensors[name].guard, kept)]
    assert list(part) == [world.name_after(name, kept) for name in alive]
    into = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
    put(part, into, layout, selection)
    for name, tensor in parameters.items():
        assert torch.equal(into[name], tensor * torch.from_numpy(oracle.coverage(world, name, kept)))


@given(st.data(), worlds(), seeds)
def test_putting_back_restores_the_covered_elements_and_nothing_else(data: st.DataObject, world: World, seed: int) -> None:
    layout, tensors = world.layout(), world.values(seed)
    kept = data.draw(cuts(world))
    selection = layout.select(kept)
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    put(extract(tensors, layout, selection), into, layout, selection)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(into[name].numpy(), tensor.numpy() * oracle.coverage(world, name, kept), err_msg=name)


@given(st.data(), worlds(), seeds)
def test_putting_adds_to_what_is_there(data: st.DataObject, world: World, seed: int) -> None:
    layout, tensors = world.layout(), world.values(seed)
    kept = data.draw(cuts(world))
    selection = layout.select(kept)
    into = {name: tensor.clone() for name, tensor in tensors.items()}
    put(extract(tensors, layout, selection), into, layout, selection)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(
            into[name].numpy(), tensor.numpy() * (1 + oracle.coverage(world, name, kept)), err_msg=name
        )


@given(st.data(), worlds(), seeds)
def test_moves_cover_exactly_the_tensors_that_are_left(data: st.DataObject, world: World, seed: int) -> None:
    layout, tensors = world.layout(), world.values(seed)
    kept = data.draw(cuts(world))
    selection = layout.select(kept)
    found = moves(layout, selection)
    alive = [name for name, described in world.tensors.items() if world.is_alive(described.guard, kept)]
    assert list(found) == alive == list(layout.labels_of(selection))
    for name, move in found.items():
        assert move.name == world.name_after(name, kept) == layout.name_in(selection, name)
        expected = oracle.extracted(world, tensors, kept)[move.name]
        np.testing.assert_array_equal(gather(tensors[name], move.where).numpy(), expected)
    assert len({move.name for move in found.values()}) == len(found), "no two tensors share a name"


FUSED = {
    "kv*rep*qk + kv*qk + kv*vo": ["kv*rep*qk", "kv*qk", "kv*vo"],
    "kv*(qk + qk + vo)": ["kv*qk", "kv*qk", "kv*vo"],  # every head holds its own three parts
    "kv*rep*qk + kv*rep*qk": ["kv*rep*qk", "kv*rep*qk"],
}


def fuse(label: str, parts: list[Tensor], heads: int) -> Tensor:
    if label.startswith("kv*("):
        return torch.cat([part.reshape(heads, -1, 2) for part in parts], dim=1).flatten(0, 1)
    return torch.cat(parts)


@pytest.mark.parametrize("fused", FUSED)
@given(st.data(), st.tuples(*[st.integers(1, 3)] * 4), st.booleans(), st.booleans())
def test_slicing_a_fused_tensor_equals_fusing_the_slices(
    fused: str, data: st.DataObject, lengths: tuple[int, ...], is_fibred: bool, is_transposed: bool
) -> None:
    world = World()
    for name, size in zip(("kv", "rep", "qk", "vo"), lengths, strict=True):
        world.group(name, size, told=size, **({"base": "kv"} if is_fibred and name in ("qk", "vo") else {}))
        world.unit(**{name: 1})
    parts = [torch.randn(value(parse(text), world.sizes), 2) for text in FUSED[fused]]
    tensors = dict(enumerate([fuse(fused, parts, world.sizes["kv"]), *parts]))
    tensors = {str(place): tensor.T if is_transposed else tensor for place, tensor in tensors.items()}
    suffix = " transposed" if is_transposed else ""
    labels = {str(place): parse_label(f"2 -> {text}{suffix}") for place, text in enumerate([fused, *FUSED[fused]])}
    layout = Layout.build(labels, {name: tensor.shape for name, tensor in tensors.items()}, world.groups.values())
    selection = layout.select(data.draw(cuts(world)))
    cut, *slices = (part.T if is_transposed else part for part in extract(tensors, layout, selection).values())
    assert torch.equal(cut, fuse(fused, slices, layout.sizes_of(selection)["kv"]))


# -- compositions --------------------------------------------------------------------------------------------------


@given(st.data(), worlds())
def test_the_layout_of_a_submodel_equals_the_one_built_from_its_own_labels(data: st.DataObject, world: World) -> None:
    kept = data.draw(cuts(world))
    layout = world.layout()
    cut, built = layout.cut(layout.select(kept)), world.cut(kept).layout()
    assert {name: str(label) for name, label in cut.labels.items()} == {
        name: str(label) for name, label in built.labels.items()
    }
    assert list(cut.labels) == list(built.labels)
    assert {name: replace(group, guard=None) for name, group in cut.groups.items()} == {
        name: replace(group, guard=None) for name, group in built.groups.items()
    }
    assert cut.ties == built.ties
    assert cut.attributes == built.attributes
    assert cut.aliases == built.aliases
    assert cut.kinds == built.kinds
    assert cut.fingerprint == built.fingerprint


@given(st.data(), worlds())
def test_the_sizes_of_a_cut_layout_are_the_sizes_of_the_selection(data: st.DataObject, world: World) -> None:
    kept = data.draw(cuts(world))
    layout = world.layout()
    selection = layout.select(kept)
    assert layout.sizes_of(selection) == world.sizes_after(kept)
    renamed = {layout.group_in(selection, name): size for name, size in world.sizes_after(kept).items()}
    assert layout.cut(selection).sizes == renamed
    assert renamed == {world.group_after(name, kept): size for name, size in world.sizes_after(kept).items()}


@given(st.data(), worlds())
def test_the_integers_of_a_submodel_are_those_that_its_own_description_gives(data: st.DataObject, world: World) -> None:
    kept = data.draw(cuts(world))
    layout = world.layout()
    selection = layout.select(kept)
    found = {}
    for name, expression in layout.attributes_of(selection).items():
        new = layout.name_in(selection, name)
        places = {group: place_value(group, block_of(new)) for group in names(expression) if is_place(group)}
        assert all(depth_of(place) == "layers" for place in places)
        found[new] = value(expression, {**layout.sizes_of(selection), **places})
    assert found == {name: stored for name, (_, stored) in world.cut(kept).attributes.items()}


@given(st.data(), worlds(), seeds)
def test_extracting_a_composition_is_the_composition_of_extracts(data: st.DataObject, world: World, seed: int) -> None:
    layout, tensors = world.layout(), world.values(seed)
    first = data.draw(cuts(world))
    outer = layout.select(first)
    sub = world.cut(first)
    inner_layout = layout.cut(outer)
    inner = inner_layout.select(data.draw(cuts(sub)))
    twice = extract(extract(tensors, layout, outer), inner_layout, inner)
    both = layout.compose(outer, inner)
    assert_same_bits(extract(tensors, layout, both), twice)
    assert layout.cut(both).fingerprint == inner_layout.cut(inner).fingerprint


def one_in_another(data: st.DataObject, world: World, layout: Layout) -> tuple[Selection, Selection, Selection]:
    """A submodel, a submodel of that, and the same one as a submodel of the whole."""
    first = data.draw(cuts(world))
    outer = layout.select(first)
    inner = layout.cut(outer).select(data.draw(cuts(world.cut(first))))
    return outer, inner, layout.compose(outer, inner)


@given(st.data(), worlds(), seeds)
def test_a_smaller_submodel_is_seen_inside_a_larger_one_and_gradients_go_back_there(
    data: st.DataObject, world: World, seed: int
) -> None:
    layout, tensors = world.layout(), world.values(seed)
    outer, inner, both = one_in_another(data, world, layout)
    own = {name: tensor.double().requires_grad_() for name, tensor in extract(tensors, layout, outer).items()}
    seen = views(own, layout, outer, both)
    assert_same_bits({name: tensor.detach() for name, tensor in seen.items()}, _doubled(extract(tensors, layout, both)))
    weights = {name: torch.randn(tensor.shape, dtype=torch.float64) for name, tensor in seen.items()}
    total = sum((weights[name] * tensor).sum() for name, tensor in seen.items())
    total.backward()  # type: ignore[union-attr]
    grads = {name: tensor.grad for name, tensor in own.items()}
    expected = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    put(weights, expected, layout.cut(outer), inner)
    for name, gradient in grads.items():
        assert torch.equal(torch.zeros_like(own[name]) if gradient is None else gradient, expected[name])


@given(st.data(), worlds(), seeds)
def test_whoever_was_sent_a_submodel_finds_the_smaller_one_in_it_without_knowing_its_indices(
    data: st.DataObject, world: World, seed: int
) -> None:
    layout, tensors = world.layout(), world.values(seed)
    outer, _, both = one_in_another(data, world, layout)
    counts = {name: kept if name in layout.depths else kept.shape[-1] for name, kept in outer.kept.items()}
    sent, stood_in = extract(tensors, layout, outer), layout.select(counts)
    assert_same_bits(views(sent, layout, stood_in, within(layout, outer, both)), extract(tensors, layout, both))


def test_what_lies_in_a_block_that_the_smaller_one_lacks_is_not_looked_for() -> None:
    labels = {f"encoder.{block}.q": parse_label(f"4 -> heads*layers.{block}.qk when layers[{block}]") for block in range(3)}
    fibred = [Group(f"layers.{block}.qk", 3, base="heads") for block in range(3)]
    groups = [Group("layers", 3, path="encoder"), Group("heads", 2), *fibred]
    layout = Layout.build(labels, dict.fromkeys(labels, (6, 4)), groups)
    outer = layout.select({"layers": [0, 2], "layers.2.qk": [[2], [1]]})
    inner = layout.select({"layers": [0], "heads": [1]})
    tensors = {name: torch.randn(6, 4) for name in labels}
    stood_in = layout.select({"layers": [0, 2], "layers.2.qk": 1})
    seen = views(extract(tensors, layout, outer), layout, stood_in, within(layout, outer, inner))
    assert_same_bits(seen, extract(tensors, layout, inner))


def _doubled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in tensors.items()}


def test_a_submodel_that_does_not_lie_inside_another_is_refused() -> None:
    layout = Layout.build({"w": parse_label("a -> b")}, {"w": (4, 4)})
    with pytest.raises(SelectionError, match="positions of `w`"):
        inside(layout, layout.select({"a": [0, 1]}), layout.select({"a": [1, 2]}))


@given(st.data(), worlds())
def test_composing_with_everything_changes_nothing(data: st.DataObject, world: World) -> None:
    layout = world.layout()
    selection = layout.select(data.draw(cuts(world)))
    assert layout.compose(selection, Selection()) == selection
    assert layout.compose(Selection(), selection) == selection


# -- selections as values ------------------------------------------------------------------------------------------


@given(st.data(), worlds())
def test_a_selection_holds_sorted_indices_of_cut_groups_alone(data: st.DataObject, world: World) -> None:
    kept = data.draw(cuts(world))
    selection = world.layout().select(kept)
    assert {name: indices.tolist() for name, indices in selection.kept.items()} == world.normal(kept)
    assert list(selection.kept) == sorted(selection.kept)
    assert selection.is_everything == (not world.normal(kept))
    assert all(indices.dtype == torch.int64 for indices in selection.kept.values())


@given(st.data(), worlds())
def test_a_selection_survives_json_pickling_and_copying(data: st.DataObject, world: World) -> None:
    layout = world.layout()
    selection = layout.select(data.draw(cuts(world)))
    for other in (
        layout.select(json.loads(json.dumps(selection.to_json()))),
        pickle.loads(pickle.dumps(selection)),
        copy.deepcopy(selection),
        layout.select(dict(selection.kept)),
    ):
        assert other == selection
        assert hash(other) == hash(selection)
        assert repr(other) == repr(selection)
        assert {name: indices.tolist() for name, indices in other.kept.items()} == {
            name: indices.tolist() for name, indices in selection.kept.items()
        }


@given(st.data(), worlds())
def test_selections_are_equal_exactly_when_their_contents_are(data: st.DataObject, world: World) -> None:
    layout = world.layout()
    one, other = data.draw(cuts(world)), data.draw(cuts(world))
    first, second = layout.select(one), layout.select(other)
    assert (first == second) == (world.normal(one) == world.normal(other))
    assert len({first, second}) == (1 if world.normal(one) == world.normal(other) else 2)


def test_equal_selections_and_layouts_have_equal_digests_in_another_process() -> None:
    program = """
from raffm.algebra.axis import parse_label
from raffm.algebra.group import Group
from raffm.algebra.layout import Layout
labels = {"q": parse_label("r -> h*d"), "ffn": parse_label("r -> f")}
layout = Layout.build(labels, {"q": (6, 5), "ffn": (4, 5)}, [Group("h", 2), Group("d", 3, base="h")])
selection = layout.select({"f": [3, 1], "h": [1], "d": [[2, 0]]})
print(layout.fingerprint, selection.digest)
"""
    there = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    here: dict[str, object] = {}
    exec(program.replace("print(", "shown = ("), here)
    assert there.stdout.split() == list(here["shown"])


@given(st.data(), worlds())
def test_coverage_is_what_the_oracle_holds_and_the_outer_product_of_its_factors(data: st.DataObject, world: World) -> None:
    layout = world.layout()
    kept = data.draw(cuts(world))
    selection = layout.select(kept)
    for name in world.tensors:
        covered = selection.coverage(layout, name)
        assert covered.dtype == torch.bool
        np.testing.assert_array_equal(covered.numpy(), oracle.coverage(world, name, kept), err_msg=name)
        outer = np.ones((), dtype=bool)
        factors = selection.factors(layout, name)
        assert [len(factor) for factor in factors] == (list(world.shape(name)) or [1])
        for factor in factors:
            outer = np.logical_and.outer(outer, factor.numpy())
        np.testing.assert_array_equal(outer.reshape(covered.shape), covered.numpy())


@given(st.data(), worlds(), seeds)
def test_the_count_of_a_selection_is_the_number_of_elements_extracted(data: st.DataObject, world: World, seed: int) -> None:
    layout, tensors = world.layout(), world.values(seed)
    selection = layout.select(data.draw(cuts(world)))
    depths = [indices for name, indices in selection.kept.items() if name in layout.depths]
    for kinds in (("parameter",), ("buffer",), ("transient",), ("parameter", "buffer"), ("buffer", "parameter", "transient")):
        chosen = {name: tensors[name] for name in world.names(*kinds)}
        expected = sum(tensor.numel() for tensor in extract(chosen, layout, selection).values())
        assert set(layout.tensors(*kinds)) == set(chosen)
        assert layout.count(selection, *kinds) == expected
        if all(indices.tolist() == list(range(len(indices))) for indices in depths):
            assert layout.count_at(layout.sizes_of(selection), *kinds) == expected
    assert layout.count(selection) == layout.count(selection, "parameter")
    cut = layout.cut(selection)
    assert cut.count(Selection()) == layout.count(selection)


# -- rankings ------------------------------------------------------------------------------------------------------


def plain(order: Mapping[str, Tensor], world: World) -> dict[str, list]:
    """The orders that a permutation follows: all but those of blocks."""
    return {name: indices.tolist() for name, indices in order.items() if world.groups[name].path is None}


def best(world: World, ranking: Ranking, counts: Mapping[str, int]) -> dict[str, list]:
    """The best indices of every group, by plain lists."""
    kept: dict[str, list] = {}
    for name in sorted(counts, key=lambda name: name in world.bases):
        order = ranking.order[name].tolist() if name in ranking.order else None
        if name in world.bases:
            heads = kept.get(world.bases[name], range(world.sizes[world.bases[name]]))
            rows = [list(range(world.sizes[name])) if order is None else order[head] for head in heads]
            kept[name] = [row[: counts[name]] for row in rows]
            continue
        required = world.groups[name].required
        order = list(range(world.sizes[name])) if order is None else order
        kept[name] = sorted(order, key=lambda index: index not in required)[: counts[name]]
    return kept


@given(st.data(), worlds())
def test_a_ranking_cut_to_size_keeps_its_best_indices(data: st.DataObject, world: World) -> None:
    layout = world.layout()
    ranking, counts = data.draw(rankings(world)), data.draw(sizes(world))
    selection = ranking.cut(layout, counts)
    assert {name: indices.tolist() for name, indices in selection.kept.items()} == world.normal(best(world, ranking, counts))


@given(st.data(), worlds())
def test_a_ranking_cut_follows_the_count_ties(data: st.DataObject, world: World) -> None:
    layout = world.layout()
    ranking, counts = data.draw(rankings(world)), data.draw(sizes(world))
    leaders = {unit.leader for unit in world.units}
    led = {name: count for name, count in counts.items() if name in leaders}
    assert ranking.cut(layout, led) == ranking.cut(layout, counts)


@given(st.data(), worlds(), seeds)
def test_permuting_equals_the_oracle(data: st.DataObject, world: World, seed: int) -> None:
    layout, tensors = world.layout(), world.values(seed)
    ranking = data.draw(rankings(world))
    assert_equals_oracle(permute(tensors, layout, ranking), oracle.permuted(world, tensors, plain(ranking.order, world)))


@given(st.data(), worlds(), seeds)
def test_permuting_and_permuting_back_changes_nothing(data: st.DataObject, world: World, seed: int) -> None:
    layout, tensors = world.layout(), world.values(seed)
    order = dict(data.draw(rankings(world)).order)
    back = {name: indices.argsort(dim=-1) for name, indices in order.items()}
    for name, base in world.bases.items():
        if name in back and base in order:
            back[name] = back[name][order[base]]  # its rows go by the heads of the permuted model
    there = permute(tensors, layout, Ranking(order))
    assert_same_bits(permute(there, layout, Ranking(back)), tensors)


@given(st.data(), worlds(), seeds)
def test_permuting_twice_is_permuting_by_the_composed_order(data: st.DataObject, world: World, seed: int) -> None:
    layout, tensors = world.layout(), world.values(seed)
    first, second = dict(data.draw(rankings(world)).order), dict(data.draw(rankings(world)).order)
    both = {}
    for name in first.keys() | second.keys():
        size, base = world.sizes[name], world.bases.get(name)
        if base is None:
            one, two = first.get(name, torch.arange(size)), second.get(name, torch.arange(size))
            both[name] = one[two]
            continue
        heads = world.sizes[base]
        whole = torch.arange(size).expand(heads, -1)
        one, two = first.get(name, whole), second.get(name, whole)
        new_head = first.get(base, torch.arange(heads)).argsort()
        both[name] = torch.gather(one, 1, two[new_head])
    twice = permute(permute(tensors, layout, Ranking(first)), layout, Ranking(second))
    assert_same_bits(permute(tensors, layout, Ranking(both)), twice)


@given(st.data(), worlds(), seeds)
def test_a_prefix_of_the_permuted_model_is_the_best_part_of_the_model(data: st.DataObject, world: World, seed: int) -> None:
    """Up to the order of the indices, which each is free to choose: compared in the ranking's own order."""
    layout, tensors = world.layout(), world.values(seed)
    drawn = data.draw(rankings(world))
    ranking = Ranking({name: order for name, order in drawn.order.items() if name not in layout.depths})
    counts = {name: count for name, count in data.draw(sizes(world)).items() if name not in layout.depths}
    prefix = extract(permute(tensors, layout, ranking), layout, Ranking().cut(layout, counts))
    chosen = ranking.cut(layout, counts)
    # the selected submodel keeps its indices sorted: rank them inside it as the ranking does
    inner = {}
    for name, order in ranking.order.items():
        count, base = layout.sizes_of(chosen)[name], world.bases.get(name)
        rows = chosen.kept.get(base, torch.arange(world.sizes[base])) if base else None
        top = order[:count] if rows is None else order[rows, :count]
        inner[name] = top.argsort(dim=-1).argsort(dim=-1)
    best_part = extract(tensors, layout, chosen)
    assert_same_bits(permute(best_part, layout.cut(chosen), Ranking(inner)), prefix)


@given(st.data(), worlds(), seeds)
def test_ranking_by_scores_puts_the_greatest_first_and_keeps_the_order_of_equals(
    data: st.DataObject, world: World, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    scores = {
        name: torch.randint(0, 3, (world.sizes[world.bases[name]], size) if name in world.bases else (size,), generator=random)
        for name, size in world.sizes.items()
    }
    ranking = Ranking.by_scores(scores)
    assert set(ranking.order) == set(ranking.scores) == set(scores)
    for name, score in scores.items():
        rows = score.tolist() if score.dim() == 2 else [score.tolist()]
        expected = [sorted(range(len(row)), key=lambda index: (-row[index], index)) for row in rows]
        assert ranking.order[name].tolist() == (expected if score.dim() == 2 else expected[0])
