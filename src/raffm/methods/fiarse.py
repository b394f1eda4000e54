"""FIARSE: a device of size g trains the g largest weights, and training pushes weights to be clearly kept or dropped.

Wu et al., "FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel Extraction", NeurIPS 2024.
`docs/methods/fiarse.md` says where we differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from raffm.algebra.layout import Layout
from raffm.algebra.mask import Mask
from raffm.algebra.selection import Selection
from raffm.data.task import Batch
from raffm.errors import RunError
from raffm.methods.method import Client, Device, Fading, Held, Learn, Served, Share, Usual, plain_loss
from raffm.models.labelled import Labelled

Scope = Literal["global", "part", "block", "layer"]
"""What shares a threshold: everything; a stack of blocks (a stage) or a module outside of them; a block; a map."""


@dataclass(frozen=True)
class Fiarse(Usual):
    """Unstructured submodels: the largest weights, by one threshold for everything or for each part of the model.

    The module stays dense: bytes shrink, work and memory do not. Norms are always held. At size 1 nothing is masked.
    `scope` says what shares a threshold, `gradient` whether that of a kept weight is "importance"-aware or "plain". With
    `embeddings` false, tables and tokens are held whole, also where a head is tied to one, and sizes are parts of all else.
    """

    name: ClassVar[str] = "fiarse"
    scope: Scope = "global"
    gradient: Literal["importance", "plain"] = "importance"
    embeddings: bool = True

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """It needs weights to mask, and known switches."""
        if self.scope not in get_args(Scope):
            raise RunError(f"{self.name} has thresholds by {', '.join(get_args(Scope))}, not by {self.scope!r}.")
        if self.gradient not in ("importance", "plain"):
            raise RunError(f"{self.name} trains by the importance or the plain gradient, not by {self.gradient!r}.")
        if not maskable(server.layout, self.embeddings):
            raise RunError(f"{self.name} masks weights of linear maps, but {type(server.model).__name__} has none.")

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share]:
        """The thresholds of every device's size."""
        shares = thresholds(server, sorted({device.size for device in devices}), self.scope, self.embeddings)
        return [shares[device.size] for device in devices]

    def held(self, server: Labelled, share: Share) -> Held:
        """The elements above their threshold, and of those at it the first ones."""
        return mask_of(server, share, self.scope, self.embeddings) if share.numbers else Selection()

    def learn(self, server: Labelled, share: Share, held: Held, client: Client) -> Learn:
        """With the threshold-controlled gradient; what falls below its threshold leaves until the round ends."""
        loss = plain_loss(client.task)
        if not isinstance(held, Mask):
            return Learn(loss)
        limits = {
            name: share.numbers[_key("threshold", place)]
            for place, names in enumerate(scopes(server.layout, self.scope, self.embeddings))
            for name in names
        }
        return _learn_masked(loss, held.kept, limits, self.gradient == "importance")

    def serve(self, server: Labelled, round: int, devices: Sequence[Device]) -> list[list[Served]]:
        """The largest weights of the current model."""
        return [[Served((share,))] for share in self.choose(server, round, devices, 0)]


def maskable(layout: Layout, embeddings: bool = True) -> tuple[str, ...]:
    """Weights of maps and, unless they are left out, embeddings, and the biases of maps; norms are not."""

    def is_map(name: str) -> bool:
        label = layout.labels.get(name)
        return label is not None and len(label.axes) > 1 and (embeddings or label.source is not None)

    names = layout.tensors("parameter")
    return tuple(name for name in names if is_map(name) or (name.endswith(".bias") and is_map(f"{name[:-5]}.weight")))


def scopes(layout: Layout, scope: Scope, embeddings: bool = True) -> list[tuple[str, ...]]:
    """The maskable tensors, those together that share a threshold."""

    def key(name: str) -> object:
        module, guard = name.rpartition(".")[0], layout.labels[name].guard
        if scope == "global":
            return None
        if scope == "layer" or guard is None:
            return module
        return guard[0] if scope == "part" else guard

    found: dict[object, list[str]] = {}
    for name in maskable(layout, embeddings):
        found.setdefault(key(name), []).append(name)
    return [tuple(names) for names in found.values()]


def kept_count(size: float, count: int) -> int:
    """How many of `count` elements a size keeps."""
    return min(count, max(1, round(size * count)))


@torch.no_grad()
def thresholds(
    server: Labelled, sizes: Sequence[float], scope: Scope = "global", embeddings: bool = True
) -> dict[float, Share]:
    """For every size and scope the magnitude of the smallest kept element, and the last place at which an equal one is kept.

    One partial sort serves all sizes. Of equal magnitudes the first in the layout's order are kept, so a size keeps
    exactly its number of elements, and smaller sizes are contained in larger ones.
    """
    cut = [size for size in sizes if size < 1]
    numbers: dict[float, dict[str, float]] = {size: {} for size in sizes}
    for place, names in enumerate(scopes(server.layout, scope, embeddings) if cut else []):
        flat = torch.cat([server.tensors[name].detach().abs().flatten() for name in names]).float()
        points = _sorted_cut_points(flat, cut) if flat.is_cuda else _cut_points(flat.numpy(), cut)
        for size, (threshold, last) in points.items():
            numbers[size].update({_key("threshold", place): threshold, _key("last", place): last})
    lengths = [sum(server.tensors[name].numel() for name in names) for names in scopes(server.layout, scope, embeddings)]
    counts = {size: tuple(kept_count(size, length) for length in lengths) if size < 1 else () for size in sizes}
    return {size: Share(Selection(), found, counts[size]) for size, found in numbers.items()}


def _cut_points(flat: NDArray[np.float32], sizes: Sequence[float]) -> dict[float, tuple[float, int]]:
    kept = {size: kept_count(size, len(flat)) for size in sizes}
    ordered = np.partition(flat, [len(flat) - count for count in kept.values()])
    found = {}
    for size, count in kept.items():
        threshold = ordered[len(flat) - count]
        missing = count - int((flat > threshold).sum())
        found[size] = float(threshold), int(np.flatnonzero(flat == threshold)[missing - 1])
    return found


def _sorted_cut_points(flat: Tensor, sizes: Sequence[float]) -> dict[float, tuple[float, int]]:
    """The same on a GPU, where sorting everything once takes a millisecond."""
    kept = {size: kept_count(size, len(flat)) for size in sizes}
    ordered = flat.sort(descending=True).values
    thresholds = ordered[torch.tensor([count - 1 for count in kept.values()], device=flat.device)]
    found = {}
    for (size, count), threshold in zip(kept.items(), thresholds, strict=True):
        missing = count - int((flat > threshold).sum())
        found[size] = float(threshold), int((flat == threshold).nonzero()[missing - 1])
    return found


def _key(what: str, place: int) -> str:
    """The name of a scope's number: the first, often the only one, needs none of its own."""
    return f"{what} {place}" if place else what


@torch.no_grad()
def mask_of(server: Labelled, share: Share, scope: Scope = "global", embeddings: bool = True) -> Mask:
    """The mask that thresholds stand for in the server's current model."""
    kept: dict[str, Tensor] = {}
    for place, names in enumerate(scopes(server.layout, scope, embeddings)):
        kept.update(_masks(server, names, share.numbers[_key("threshold", place)], int(share.numbers[_key("last", place)])))
    return Mask({name: kept[name] for name in maskable(server.layout, embeddings)})


def _masks(server: Labelled, names: Sequence[str], threshold: float, last: int) -> dict[str, Tensor]:
    kept, begin = {}, 0
    for name in names:
        magnitude = server.tensors[name].detach().abs()
        kept[name] = magnitude > threshold if last < begin else magnitude >= threshold
        if begin <= last < begin + magnitude.numel():
            beyond = kept[name].view(-1)[last - begin + 1 :]
            beyond &= magnitude.view(-1)[last - begin + 1 :] > threshold
        begin += magnitude.numel()
    return kept


# -- training ------------------------------------------------------------------------------------------------------


def _learn_masked(
    loss: Callable[[nn.Module, Batch], Tensor], kept: Mapping[str, Tensor], limits: Mapping[str, float], is_aware: bool
) -> Learn:
    """Parameters outside the active set are 0 in the module. One that leaves is parked, and comes back at the end.

    Lists of tensors, moved by one call each: there are many small ones.
    """
    weights: list[Tensor] = []
    active: list[Tensor] = []
    parked: list[Tensor] = []
    bounds: list[float] = []

    @torch.no_grad()
    def prepare(module: nn.Module) -> tuple[()]:
        for name, parameter in module.named_parameters():
            if name in kept:
                weights.append(parameter)
                active.append(kept[name].to(parameter))
                parked.append(torch.zeros_like(parameter))
                bounds.append(limits[name])
        torch._foreach_mul_(weights, active)
        return ()

    @torch.no_grad()
    def after_backward(module: nn.Module) -> None:
        lists = zip(weights, active, bounds, strict=True)
        trained = [(weight, weight.grad, mask, bound) for weight, mask, bound in lists if weight.grad is not None]
        gradients = [gradient for _, gradient, _, _ in trained]
        if is_aware:
            torch._foreach_mul_(gradients, factors([weight for weight, *_ in trained], [bound for *_, bound in trained]))
        torch._foreach_mul_(gradients, [mask for _, _, mask, _ in trained])

    @torch.no_grad()
    def after_step(module: nn.Module) -> None:
        torch._foreach_mul_(weights, active)  # momentum moves what has left; its place in the module is 0
        if any(bounds):
            for mask, magnitude, bound in zip(active, torch._foreach_abs(weights), bounds, strict=True):
                if bound > 0:  # at 0 nothing can fall below
                    torch.ge(magnitude, bound, out=mask)
            torch._foreach_add_(parked, weights)
            torch._foreach_mul_(weights, active)
            torch._foreach_sub_(parked, weights)

    @torch.no_grad()
    def finish(module: nn.Module) -> None:
        torch._foreach_add_(weights, parked)

    return Learn(loss, prepare, after_backward, after_step, finish, fading=Fading(limits, is_aware))


SMALL = 1e-38
"""What a square of magnitudes is at least, so that 0 / 0 is 0."""


def factors(weights: list[Tensor], thresholds: Sequence[float]) -> tuple[Tensor, ...]:
    """What the gradients of kept weights are multiplied by: 1.5 at their threshold, 1 far above it.

    The derivative of w * M(w), with (|w| - th) / (|w| + th) in the place of the step function M.
    """
    magnitudes = torch._foreach_abs(weights)
    below = torch._foreach_add(magnitudes, list(thresholds))
    torch._foreach_mul_(below, below)
    torch._foreach_clamp_min_(below, SMALL)
    torch._foreach_mul_(magnitudes, [2 * threshold for threshold in thresholds])
    torch._foreach_div_(magnitudes, below)
    torch._foreach_add_(magnitudes, 1)
    return tuple(magnitudes)
