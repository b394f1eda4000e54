"""The algebra once more, slowly: plain loops over what lies at every position, and numpy. It calls nothing of raffm's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laws.strategies import Axis, Kept, World, elements


def is_held(element: Sequence[tuple[str, int]], world: World, kept: Kept) -> bool:
    """Whether an element of an axis stays: every index that it stands for must."""
    place = dict(element)
    for group, index in element:
        if group not in kept:
            continue
        indices = kept[group]
        if group in world.bases:
            base = world.bases[group]
            heads = list(kept.get(base, range(world.sizes[base])))
            indices = indices[heads.index(place[base])] if place[base] in heads else []
        if index not in indices:
            return False
    return True


def held_positions(axis: Axis, world: World, kept: Kept) -> list[int]:
    return [place for place, element in enumerate(elements(axis, world.sizes)) if is_held(element, world, kept)]


def index_of(world: World, name: str, kept: Kept) -> tuple[np.ndarray, ...]:
    return np.ix_(*(held_positions(axis, world, kept) for axis in world.tensors[name].axes))


def extracted(world: World, values: Mapping[str, Tensor], kept: Kept) -> dict[str, np.ndarray]:
    """Every tensor of the submodel, by its name there."""
    return {
        world.name_after(name, kept): values[name].numpy()[index_of(world, name, kept)]
        for name, described in world.tensors.items()
        if world.is_alive(described.guard, kept)
    }


def coverage(world: World, name: str, kept: Kept) -> np.ndarray:
    covered = np.zeros(world.shape(name), dtype=bool)
    if world.is_alive(world.tensors[name].guard, kept):
        covered[index_of(world, name, kept)] = True
    return covered


def permuted(world: World, values: Mapping[str, Tensor], order: Mapping[str, list]) -> dict[str, np.ndarray]:
    """The model whose index i of a group is the old index order[i]; the rows of a fibred order go by old heads."""

    def old(element: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
        found: dict[str, int] = {}
        for group, index in element:
            row = order.get(group)
            if row is not None and group in world.bases:
                row = row[found[world.bases[group]]]
            found[group] = index if row is None else row[index]
        return tuple((group, found[group]) for group, _ in element)

    def positions(axis: Axis) -> list[int]:
        along = elements(axis, world.sizes)
        place = {element: position for position, element in enumerate(along)}
        return [place[old(element)] for element in along]

    return {
        name: tensor.numpy()[np.ix_(*(positions(axis) for axis in world.tensors[name].axes))] for name, tensor in values.items()
    }


@dataclass(frozen=True)
class Client:
    """What a client held, trained and sent back. `masks` holds elements of full tensors, where it had no submodel."""

    update: Mapping[str, Tensor]
    kept: Kept
    weight: float
    masks: Mapping[str, Tensor] | None = None


def merged(world: World, server: Mapping[str, Tensor], clients: Sequence[Client]) -> dict[str, np.ndarray]:
    """The server after a round, in float64: one element at a time, over the clients that held it."""
    after = {}
    for name in world.names("parameter", "buffer"):
        before = server[name].to(torch.float64 if server[name].is_floating_point() else torch.int64).numpy()
        total, count, largest = np.zeros(before.shape), np.zeros(before.shape), before.copy()
        for client in clients:
            if not world.is_alive(world.tensors[name].guard, client.kept):
                continue
            where = index_of(world, name, client.kept)
            new = client.update[world.name_after(name, client.kept)].to(torch.float64).numpy()
            held = np.ones(new.shape)
            if client.masks is not None and name in client.masks:
                held = client.masks[name].numpy().astype(float)
            total[where] += client.weight * held * (new - before[where])
            count[where] += client.weight * held
            if client.weight and before.ndim == 0:
                largest = np.maximum(largest, new)
        is_counter = not server[name].is_floating_point()
        after[name] = largest if is_counter else before + np.divide(total, count, out=np.zeros_like(total), where=count > 0)
    return after


BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16, torch.int64: torch.int64}


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].view(BITS[tensor.dtype]), tensor.view(BITS[tensor.dtype])), name


def assert_equals_oracle(found: Mapping[str, Tensor], expected: Mapping[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name].numpy(), array, err_msg=name)
