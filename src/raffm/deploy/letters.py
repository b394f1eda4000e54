"""What travels between server and nodes: plain values, and arrays of numbers. Nothing is pickled.

    Letter    to a node: the tensors of its submodel, its sizes, and how it shall learn
    Reply     from a node: the tensors it trained, how many examples it has, its mean loss

Of a masked tensor the kept values alone travel, in their order; the mask goes to the node coded, and never comes back: the
server knows it. Numbers that numpy does not have (bfloat16) travel as 16-bit integers of the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raffm.algebra.coding import decode, encode
from raffm.algebra.layout import Layout
from raffm.algebra.mask import Mask
from raffm.algebra.move import extract
from raffm.algebra.selection import Selection
from raffm.data.task import ImageClassification, Task, TextClassification
from raffm.errors import RunError, UpdateError
from raffm.methods import described
from raffm.methods.method import Client, Held
from raffm.models.checkpoint import dtype_name, model_described
from raffm.rounds.plan import Order, Plan

Arrays = dict[str, NDArray[Any]]

FORMAT = 1

TENSOR, MASK, CONSTANT = "tensor/", "mask/", "constant/"
"""What the names of arrays begin with."""


@dataclass(frozen=True, eq=False)
class Letter:
    """To a node. `about` is JSON."""

    about: Mapping[str, Any]
    arrays: Arrays


@dataclass(frozen=True, eq=False)
class Reply:
    """From a node. `about` is JSON."""

    about: Mapping[str, Any]
    arrays: Arrays


# -- to a node -------------------------------------------------------------------------------------------------------


def letter_of(plan: Plan, order: Order, held: Held) -> Letter:
    """What a client needs for one round."""
    server, selection = plan.server, order.share.selection
    tensors = extract(server.tensors, server.layout, selection)
    masks = held.kept if isinstance(held, Mask) else {}
    client = Client(plan.task, plan.present(order.client))
    constants = plan.method.learn(server, order.share, held, client).constants
    about = {
        "format": FORMAT,
        "layout": server.layout.fingerprint,
        "model": model_described(server.model),
        "task": task_described(plan.task),
        "method": described(plan.method),
        "local": asdict(plan.local),
        "sizes": sizes_of(server.layout, selection),
        "numbers": dict(order.share.numbers),
        "round": order.round,
        "client": order.client,
        "seed": plan.seed,
        "dtypes": {name: dtype_name(tensor) for name, tensor in tensors.items()},
        "shapes": {name: list(tensors[name].shape) for name in masks},
    }
    arrays = {TENSOR + name: to_array(tensor[masks[name]] if name in masks else tensor) for name, tensor in tensors.items()}
    arrays |= {MASK + name: np.frombuffer(encode(kept), np.uint8) for name, kept in masks.items()}
    arrays |= {f"{CONSTANT}{place}": to_array(constant) for place, constant in enumerate(constants)}
    return Letter(about, arrays)


TASKS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in (ImageClassification, TextClassification)}
"""The tasks that can be described by their fields."""


def task_described(task: Task) -> dict[str, Any]:
    """A task in plain values; one of the user's own by its name alone: its nodes must bring it."""
    return {"kind": type(task).__name__, **(asdict(task) if type(task).__name__ in TASKS and is_dataclass(task) else {})}


def task_from(content: Mapping[str, Any]) -> Task:
    """The task that was described."""
    if content["kind"] not in TASKS:
        raise RunError(f"the task {content['kind']!r} is not one of ours: give the node the task itself.")
    lists = {key: tuple(entry) for key, entry in content.items() if isinstance(entry, list)}
    task: Task = TASKS[content["kind"]](**{key: entry for key, entry in {**content, **lists}.items() if key != "kind"})
    return task


def sizes_of(layout: Layout, selection: Selection) -> dict[str, int | list[int]]:
    """What a node must know of a Selection: how many indices of every cut group there are, and which blocks."""
    kept = selection.kept
    return {name: kept[name].tolist() if name in layout.depths else kept[name].shape[-1] for name in kept}


# -- at the node -----------------------------------------------------------------------------------------------------


def held_of(letter: Letter) -> Held:
    """The mask that came with a letter; without one, everything that came is held."""
    kept = {name[len(MASK) :]: content.tobytes() for name, content in letter.arrays.items() if name.startswith(MASK)}
    if not kept:
        return Selection()
    shapes = letter.about["shapes"]
    return Mask({name: decode(content, torch.Size(shapes[name])) for name, content in kept.items()})


def tensors_of(letter: Letter, held: Held) -> dict[str, Tensor]:
    """The tensors of the submodel, with 0 where a mask keeps nothing."""
    found = _tensors(letter.arrays, letter.about["dtypes"])
    return {name: _spread(tensor, held.kept[name]) if _is_masked(held, name) else tensor for name, tensor in found.items()}


def constants_of(letter: Letter) -> list[Tensor]:
    """The tensors that belong to the client, in their order."""
    count = sum(name.startswith(CONSTANT) for name in letter.arrays)
    return [torch.from_numpy(np.array(letter.arrays[f"{CONSTANT}{place}"])) for place in range(count)]


def reply_to(letter: Letter, held: Held, tensors: Mapping[str, Tensor], examples: int, loss: float) -> Reply:
    """What a node sends back: of masked tensors the values that it was given."""
    about = {
        "format": FORMAT,
        "client": letter.about["client"],
        "round": letter.about["round"],
        "examples": examples,
        "loss": loss,
        "dtypes": {name: dtype_name(tensor) for name, tensor in tensors.items()},
    }
    values = {name: tensor[held.kept[name]] if _is_masked(held, name) else tensor for name, tensor in tensors.items()}
    return Reply(about, {TENSOR + name: to_array(tensor) for name, tensor in values.items()})


# -- back at the server ----------------------------------------------------------------------------------------------


def update_of(reply: Reply, order: Order, held: Held) -> dict[str, Tensor]:
    """The tensors of a reply, in full; an answer to another question is refused."""
    for key, expected in {"format": FORMAT, "client": order.client, "round": order.round}.items():
        found = reply.about.get(key)
        if found != expected:
            raise UpdateError(f"client {order.client}: its reply has the {key} {found!r}; {expected!r} was asked for.")
    try:
        tensors = _tensors(reply.arrays, reply.about["dtypes"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UpdateError(f"client {order.client}: its reply cannot be read: {error!r}.") from None
    for name, kept in held.kept.items() if isinstance(held, Mask) else ():
        if name in tensors:
            if tensors[name].shape != (int(kept.sum()),):
                came = tensors[name].numel()
                raise UpdateError(f"client {order.client}: `{name}` has {came} values; its mask keeps {int(kept.sum())}.")
            tensors[name] = _spread(tensors[name], kept)
    return tensors


# -- numbers ---------------------------------------------------------------------------------------------------------


def to_array(tensor: Tensor) -> NDArray[Any]:
    """The numbers of a tensor; bfloat16 as 16-bit integers of the same bits."""
    plain = tensor.detach().cpu().contiguous()
    return (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy()


def _tensors(arrays: Arrays, dtypes: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors among arrays, in memory that may be written."""
    named = {name[len(TENSOR) :]: array for name, array in arrays.items() if name.startswith(TENSOR)}
    return {name: _from_array(array, dtypes[name]) for name, array in named.items()}


def _from_array(array: NDArray[Any], dtype: str) -> Tensor:
    tensor = torch.from_numpy(np.array(array))
    wanted = getattr(torch, dtype)
    found = tensor.view(wanted) if wanted == torch.bfloat16 and tensor.dtype == torch.int16 else tensor
    if found.dtype != wanted:
        raise ValueError(f"an array of {array.dtype} is no tensor of {dtype}")
    return found


def _is_masked(held: Held, name: str) -> bool:
    return isinstance(held, Mask) and name in held.kept


def _spread(values: Tensor, kept: Tensor) -> Tensor:
    whole = torch.zeros(kept.shape, dtype=values.dtype)
    whole[kept] = values
    return whole
