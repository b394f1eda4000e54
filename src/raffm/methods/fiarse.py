"""FIARSE: a device of size g trains the g largest weights, and training pushes weights to be clearly kept or dropped.

Wu et al., "FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel Extraction", NeurIPS 2024.
`docs/methods/fiarse.md` says where we differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from raffm.algebra.layout import Layout
from raffm.algebra.mask import Mask
from raffm.algebra.selection import Selection
from raffm.algebra.tally import Tally
from raffm.data.task import Batch
from raffm.errors import RunError
from raffm.methods.method import Client, Device, Held, Learn, Served, Share, Update, counted_mean, plain_loss
from raffm.models.labelled import Labelled


@dataclass(frozen=True)
class Fiarse:
    """Unstructured submodels: the largest weights of the whole model, by one threshold.

    The module stays dense: bytes shrink, work and memory do not. Norms are always held. At size 1 nothing is masked.
    """

    name: ClassVar[str] = "fiarse"

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """It needs weights to mask."""
        if not maskable(server.layout):
            raise RunError(f"fiarse masks weights of linear maps, but {type(server.model).__name__} has none.")

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share]:
        """The threshold of every device's size."""
        shares = thresholds(server, sorted({device.size for device in devices}))
        return [shares[device.size] for device in devices]

    def held(self, server: Labelled, share: Share) -> Held:
        """The elements above the threshold, and of those at it the first ones."""
        return mask_of(server, share) if share.numbers else Selection()

    def learn(self, server: Labelled, share: Share, held: Held, client: Client) -> Learn:
        """With the threshold-controlled gradient; what falls below the threshold leaves until the round ends."""
        loss = plain_loss(client.task)
        return _learn_masked(loss, held.kept, share.numbers["threshold"]) if isinstance(held, Mask) else Learn(loss)

    def merge(self, tally: Tally, server: Labelled, update: Update) -> None:
        """The counted mean over the masks that were sent, whatever moved."""
        counted_mean(tally, update, self.held(server, update.share))

    def serve(self, server: Labelled, round: int, devices: Sequence[Device]) -> list[list[Served]]:
        """The largest weights of the current model."""
        return [[Served((share,))] for share in self.choose(server, round, devices, 0)]


def maskable(layout: Layout) -> tuple[str, ...]:
    """Weights of maps and embeddings, and the biases of maps; norms are not."""

    def is_map(name: str) -> bool:
        return name in layout.labels and len(layout.labels[name].axes) > 1

    names = layout.tensors("parameter")
    return tuple(name for name in names if is_map(name) or (name.endswith(".bias") and is_map(f"{name[:-5]}.weight")))


def kept_count(size: float, count: int) -> int:
    """How many of `count` elements a size keeps."""
    return min(count, max(1, round(size * count)))


@torch.no_grad()
def thresholds(server: Labelled, sizes: Sequence[float]) -> dict[float, Share]:
    """For every size the magnitude of the smallest kept element, and the last place at which an equal one is kept.

    One partial sort serves all sizes. Of equal magnitudes the first in the layout's order are kept, so a size keeps
    exactly its number of elements, and smaller sizes are contained in larger ones.
    """
    shares = {size: Share() for size in sizes}
    cut = [size for size in sizes if size < 1]
    if not cut:
        return shares
    flat = torch.cat([server.tensors[name].detach().abs().flatten() for name in maskable(server.layout)]).float().cpu().numpy()
    kept = {size: kept_count(size, len(flat)) for size in cut}
    ordered = np.partition(flat, [len(flat) - count for count in kept.values()])
    for size, count in kept.items():
        threshold = ordered[len(flat) - count]
        missing = count - int((flat > threshold).sum())
        last = int(np.flatnonzero(flat == threshold)[missing - 1])
        shares[size] = Share(Selection(), {"threshold": float(threshold), "last": last})
    return shares


@torch.no_grad()
def mask_of(server: Labelled, share: Share) -> Mask:
    """The mask that a threshold stands for in the server's current model."""
    threshold, last = share.numbers["threshold"], int(share.numbers["last"])
    kept, begin = {}, 0
    for name in maskable(server.layout):
        magnitude = server.tensors[name].detach().abs()
        kept[name] = magnitude > threshold if last < begin else magnitude >= threshold
        if begin <= last < begin + magnitude.numel():
            beyond = kept[name].view(-1)[last - begin + 1 :]
            beyond &= magnitude.view(-1)[last - begin + 1 :] > threshold
        begin += magnitude.numel()
    return Mask(kept)


# -- training ------------------------------------------------------------------------------------------------------


def _learn_masked(loss: Callable[[nn.Module, Batch], Tensor], kept: Mapping[str, Tensor], threshold: float) -> Learn:
    """Parameters outside the active set are 0 in the module. One that leaves is parked, and comes back at the end.

    Lists of tensors, moved by one call each: there are many small ones.
    """
    weights: list[Tensor] = []
    active: list[Tensor] = []
    parked: list[Tensor] = []

    @torch.no_grad()
    def prepare(module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if name in kept:
                weights.append(parameter)
                active.append(kept[name].to(parameter))
                parked.append(torch.zeros_like(parameter))
        torch._foreach_mul_(weights, active)

    @torch.no_grad()
    def after_backward(module: nn.Module) -> None:
        trained = [(weight, weight.grad, mask) for weight, mask in zip(weights, active, strict=True) if weight.grad is not None]
        gradients = [gradient for _, gradient, _ in trained]
        torch._foreach_mul_(gradients, factors([weight for weight, _, _ in trained], threshold))
        torch._foreach_mul_(gradients, [mask for _, _, mask in trained])

    @torch.no_grad()
    def after_step(module: nn.Module) -> None:
        torch._foreach_mul_(weights, active)  # momentum moves what has left; its place in the module is 0
        if threshold > 0:
            for mask, magnitude in zip(active, torch._foreach_abs(weights), strict=True):
                torch.ge(magnitude, threshold, out=mask)
            torch._foreach_add_(parked, weights)
            torch._foreach_mul_(weights, active)
            torch._foreach_sub_(parked, weights)

    @torch.no_grad()
    def finish(module: nn.Module) -> None:
        torch._foreach_add_(weights, parked)

    return Learn(loss, prepare, after_backward, after_step, finish)


def factors(weights: list[Tensor], threshold: float) -> tuple[Tensor, ...]:
    """What the gradients of kept weights are multiplied by: 1.5 at the threshold, 1 far above it.

    The derivative of w * M(w), with (|w| - th) / (|w| + th) in the place of the step function M.
    """
    magnitudes = torch._foreach_abs(weights)
    if threshold == 0:
        return tuple(torch.ones_like(weight) for weight in weights)
    below = torch._foreach_add(magnitudes, threshold)
    torch._foreach_mul_(below, below)
    torch._foreach_mul_(magnitudes, 2 * threshold)
    torch._foreach_div_(magnitudes, below)
    torch._foreach_add_(magnitudes, 1)
    return tuple(magnitudes)
