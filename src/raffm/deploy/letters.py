"""What travels between server and nodes: plain values, and arrays of numbers. Nothing is pickled.

    Parcel    the tensors of one submodel: made once for all nodes that get the same one
    Letter    to a node: a parcel, what is this node's alone, and what it shall do: train, or give moments
    Reply     from a node: the tensors it trained and its mean loss, or what its batch norms saw

Of a masked tensor the kept values alone travel, in their order; the mask goes to the node coded, and never comes back: the
server knows it. Parameters that are not trained go to a node once: it keeps them on its disk under the digest that later
letters name. Numbers that numpy does not have (bfloat16) travel as 16-bit integers of the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raffm.algebra.coding import decode, encode
from raffm.algebra.inside import within
from raffm.algebra.layout import Layout
from raffm.algebra.mask import Mask
from raffm.algebra.move import extract, moves
from raffm.algebra.selection import Selection
from raffm.data.answers import SpanAnswers, WrittenAnswers
from raffm.data.task import ImageClassification, LanguageModelling, Task, TextClassification, TextRegression, stated
from raffm.errors import RunError, UpdateError
from raffm.methods import described
from raffm.methods.method import Client, Held, Share
from raffm.models.checkpoint import dtype_name, model_described
from raffm.models.labelled import Labelled
from raffm.models.moments import Moments
from raffm.models.rows import rows_of
from raffm.rounds.plan import Order, Plan

Arrays = dict[str, NDArray[Any]]

FORMAT = 3

TENSOR, MASK, CONSTANT, MOMENTS = "tensor/", "mask/", "constant/", "moments/"
"""What the names of arrays begin with."""


@dataclass(frozen=True, eq=False)
class Parcel:
    """One submodel: its tensors, apart from them those that are not trained, and what is to be known of it (JSON)."""

    about: Mapping[str, Any]
    arrays: Arrays
    frozen: Arrays = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Letter:
    """To a node. `about` is JSON; `arrays` and `frozen` are those of a parcel, `own` is for this node alone."""

    about: Mapping[str, Any]
    arrays: Arrays
    frozen: Arrays = field(default_factory=dict)
    own: Arrays = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Reply:
    """From a node. `about` is JSON."""

    about: Mapping[str, Any]
    arrays: Arrays


# -- to a node -------------------------------------------------------------------------------------------------------


def parcel_of(plan: Plan, share: Share, held: Held, folded: Mapping[str, float] | None = None) -> Parcel:
    """The tensors of a share, some of them multiplied by factors, where these are given."""
    server, selection = plan.server, share.selection
    masks = held.kept if isinstance(held, Mask) else {}
    tensors = extract(server.tensors, server.layout, selection)
    for name, factor in (folded or {}).items():
        tensors[name] = tensors[name] * factor
    untrained = frozen_names(server, selection)
    still = untrained - set(masks) - set(folded or {})
    arrays = {name: to_array(tensor[masks[name]] if name in masks else tensor) for name, tensor in tensors.items()}
    frozen = {TENSOR + name: array for name, array in arrays.items() if name in still}
    rest = {TENSOR + name: array for name, array in arrays.items() if name not in still}
    about = {
        "sizes": sizes_of(server.layout, selection),
        "numbers": dict(share.numbers),
        "inner": [within(server.layout, selection, inner).to_json() for inner in share.inner],
        "drawn": share.drawn,
        "dtypes": {name: dtype_name(tensor) for name, tensor in tensors.items()},
        "shapes": {name: list(tensors[name].shape) for name in masks},
        "untrained": sorted(untrained),
        "frozen": digest_of(frozen) if frozen else "",
    }
    return Parcel(about, rest | {MASK + name: np.frombuffer(encode(kept), np.uint8) for name, kept in masks.items()}, frozen)


def letter_of(plan: Plan, order: Order, held: Held, parcel: Parcel, has_frozen: bool = False) -> Letter:
    """What a client needs for one round; without what is not trained, where it has that already."""
    client = Client(plan.task, plan.present(order.client))
    constants = plan.method.learn(plan.server, order.share, held, client).constants
    about = {"local": asdict(plan.local), "round": order.round, "seed": plan.seed}
    own = {f"{CONSTANT}{place}": to_array(constant) for place, constant in enumerate(constants)}
    return _letter(plan, "train", order.client, about, parcel, has_frozen, own)


def inquiry_of(plan: Plan, client: int, parcel: Parcel, has_frozen: bool = False) -> Letter:
    """Ask a client what the batch norms of a submodel see on its examples."""
    return _letter(plan, "moments", client, {"examples": plan.evaluating.calibration_examples}, parcel, has_frozen)


def _letter(
    plan: Plan,
    kind: Literal["train", "moments"],
    client: int,
    about: Mapping[str, Any],
    parcel: Parcel,
    has_frozen: bool,
    own: Arrays | None = None,
) -> Letter:
    common = {
        "format": FORMAT,
        "kind": kind,
        "client": client,
        "layout": plan.server.layout.fingerprint,
        "model": model_described(plan.server.model),
        "rows": rows_of(plan.server.layout),
        "task": task_described(plan.task),
        "method": described(plan.method),
    }
    return Letter({**common, **parcel.about, **about}, parcel.arrays, {} if has_frozen else parcel.frozen, own or {})


def frozen_names(server: Labelled, selection: Selection) -> set[str]:
    """The parameters of a submodel that are not trained."""
    return {move.name for name, move in moves(server.layout, selection).items() if server.layout.kind(name) == "frozen"}


def digest_of(arrays: Arrays) -> str:
    """What tells these arrays from all others."""
    found = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


OURS = (ImageClassification, TextClassification, TextRegression, LanguageModelling, SpanAnswers, WrittenAnswers)

TASKS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in OURS}
"""The tasks that can be described by their fields."""


def task_described(task: Task) -> dict[str, Any]:
    """A task in plain values; one of the user's own by its name alone: its nodes must bring it."""
    return stated(task) if type(task).__name__ in TASKS else {"task": type(task).__name__}


def task_from(content: Mapping[str, Any]) -> Task:
    """The task that was described."""
    if content["task"] not in TASKS:
        raise RunError(f"the task {content['task']!r} is not one of ours: give the node the task itself.")
    lists = {key: tuple(entry) for key, entry in content.items() if isinstance(entry, list)}
    task: Task = TASKS[content["task"]](**{key: entry for key, entry in {**content, **lists}.items() if key != "task"})
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
    """The tensors of the submodel that came, with 0 where a mask keeps nothing."""
    found = _tensors(letter.arrays, letter.about["dtypes"])
    return {name: _spread(tensor, held.kept[name]) if _is_masked(held, name) else tensor for name, tensor in found.items()}


def frozen_of(letter: Letter) -> dict[str, Tensor]:
    """The tensors that came and are not trained; the server counts on their being kept under their digest."""
    if not letter.frozen:
        raise RunError(f"the frozen weights {letter.about['frozen'][:12]} are not here any more; the next letter brings them.")
    return _tensors(letter.frozen, letter.about["dtypes"])


def constants_of(letter: Letter) -> list[Tensor]:
    """The tensors that belong to the client, in their order."""
    return [torch.from_numpy(np.array(letter.own[f"{CONSTANT}{place}"])) for place in range(len(letter.own))]


def reply_to(letter: Letter, held: Held, tensors: Mapping[str, Tensor], examples: int, loss: float) -> Reply:
    """What a node sends back: of masked tensors the values that it was given."""
    about = {"examples": examples, "loss": loss, "dtypes": {name: dtype_name(tensor) for name, tensor in tensors.items()}}
    values = {name: tensor[held.kept[name]] if _is_masked(held, name) else tensor for name, tensor in tensors.items()}
    return Reply(_signed(letter, about), {TENSOR + name: to_array(tensor) for name, tensor in values.items()})


def moments_to(letter: Letter, found: Mapping[str, Moments]) -> Reply:
    """What a node's batch norms saw: sums over its examples."""
    arrays = {MOMENTS + name: torch.stack([each.total, each.squares]).numpy() for name, each in found.items()}
    return Reply(_signed(letter, {"counts": {name: each.count for name, each in found.items()}}), arrays)


def _signed(letter: Letter, about: Mapping[str, Any]) -> dict[str, Any]:
    """Which letter is answered."""
    asked = {key: letter.about.get(key) for key in ("kind", "client", "round")}
    return {"format": FORMAT, **asked, **about}


# -- back at the server ----------------------------------------------------------------------------------------------


def update_of(reply: Reply, order: Order, held: Held, server: Labelled) -> dict[str, Tensor]:
    """The tensors of a reply, in full; an answer to another question is refused."""
    _refuse_other(reply, {"kind": "train", "client": order.client, "round": order.round})
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


def loss_of(reply: Reply, order: Order) -> float:
    """The mean loss that a node states."""
    loss = reply.about.get("loss")
    if isinstance(loss, bool) or not isinstance(loss, int | float) or not abs(loss) <= LARGEST:
        raise UpdateError(f"client {order.client}: its reply cannot be read: its loss is {str(loss)[:40]!r}.")
    return float(loss)


LARGEST = 1e300
"""No count and no loss that means something is larger."""


def moments_of(reply: Reply, client: int, expected: Mapping[str, int]) -> dict[str, Moments]:
    """The moments of a reply, for these batch norms with so many channels each."""
    _refuse_other(reply, {"kind": "moments", "client": client})
    found, counts = {}, reply.about.get("counts")
    for name, channels in expected.items():
        sums, count = reply.arrays.get(MOMENTS + name), counts.get(name) if isinstance(counts, dict) else None
        is_whole = sums is not None and sums.shape == (2, channels) and bool(np.isfinite(sums).all())
        if not is_whole or not isinstance(count, int | float) or not 0 < count < LARGEST:
            raise UpdateError(f"client {client}: its moments of `{name}` are missing, not finite or of another shape.")
        total, squares = torch.from_numpy(np.array(sums, np.float64))
        found[name] = Moments(float(count), total, squares)
    return found


def _refuse_other(reply: Reply, asked: Mapping[str, Any]) -> None:
    for key, expected in {"format": FORMAT, **asked}.items():
        found = reply.about.get(key)
        if found != expected:
            raise UpdateError(f"client {asked['client']}: its reply has the {key} {found!r}; {expected!r} was asked for.")


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
