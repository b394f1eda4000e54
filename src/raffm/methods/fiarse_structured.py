"""Structured FIARSE: importance summed over neurons, head dimensions and channels, so that submodels are really smaller.

The next step that Wu et al. announce in "FIARSE", NeurIPS 2024; the rule is ours: `docs/methods/fiarse-structured.md`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from raffm.algebra.axis import coordinates
from raffm.algebra.layout import Layout
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.errors import RunError
from raffm.methods.method import Client, Device, Held, Learn, Served, Share, Usual, plain_loss
from raffm.methods.widths import cut_share, refuse_widths, width_groups
from raffm.models.labelled import Labelled
from raffm.models.salience import scores, total

SMALL = 1e-30
"""What a sum of magnitudes is at least, so that 0 / 0 is 0."""


@dataclass(frozen=True)
class FiarseStructured(Usual):
    """The most important indices of every width; an index is as important as the sum of the magnitudes of its weights.

    `gradient`: "importance" adds what the soft edge of the cut pulls at, "plain" does not.
    """

    name: ClassVar[str] = "fiarse-structured"
    gradient: Literal["importance", "plain"] = "importance"

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """It needs widths to cut."""
        if self.gradient not in ("importance", "plain"):
            raise RunError(f"{self.name} trains by the importance or the plain gradient, not by {self.gradient!r}.")
        refuse_widths(server, self.name, scaler=False, masked_loss=False)

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share]:
        """The round's order of importance, cut to the width of every device's size."""
        ranking = Ranking.by_scores(importances(server))
        shares = {size: cut_share(server, ranking, size) for size in {device.size for device in devices}}
        return [shares[device.size] for device in devices]

    def learn(self, server: Labelled, share: Share, held: Held, client: Client) -> Learn:
        """By the task's own loss, and the pull of the cut's soft edge."""
        loss = plain_loss(client.task)
        if share.selection.is_everything or self.gradient == "plain":
            return Learn(loss)
        return _learn_pulled(Learn(loss), server.layout.cut(share.selection), pulls(server, share.selection))

    def serve(self, server: Labelled, round: int, devices: Sequence[Device]) -> list[list[Served]]:
        """The most important indices of the current model."""
        return [[Served((share,))] for share in self.choose(server, round, devices, 0)]


@torch.no_grad()
def importances(server: Labelled) -> dict[str, Tensor]:
    """For every index of every width the sum of the magnitudes of all weights that it touches; by head in a fibred group."""
    magnitudes = {name: server.tensors[name].detach().abs() for name in server.layout.tensors("parameter")}
    found = scores(magnitudes, server.layout, total)
    return {name: found[name] for name in width_groups(server.layout)}


def pulls(server: Labelled, selection: Selection) -> dict[str, Tensor]:
    """The slope of (s - th) / (s + th) at the importance s of every kept index; th is that of the least kept one.

    By the names of groups in the submodel, counted through all heads of a fibred group; the last is 0.
    """
    found = {}
    for name, importance in importances(server).items():
        if name in selection.kept:
            kept = selection.kept[name]
            own = importance.gather(1, kept) if name in server.layout.bases else importance[kept]
            threshold = own.min(-1, keepdim=True).values
            slope = 2 * threshold / (own + threshold).square().clamp_min(SMALL)
            found[server.layout.group_in(selection, name)] = torch.cat([slope.flatten(), slope.new_zeros(1)]).to(server.device)
    return found


def _learn_pulled(plain: Learn, layout: Layout, slopes: Mapping[str, Tensor]) -> Learn:
    """Adds the derivative of every index's soft mask to the gradients of its weights.

    With w M(s) in the place of w and s the sum of |w| over the index, dL/dw = g M + sign(w) M'(s) <g, w>.
    """
    edges: list[_Edge] = []

    def prepare(module: nn.Module) -> tuple[()]:
        parameters = dict(module.named_parameters())
        for group, slope in slopes.items():
            uses = [use for use in layout.uses(group) if use[0] in parameters]
            device = parameters[uses[0][0]].device
            places = [_places(layout, name, axis, group).to(device) for name, axis in uses]
            weights = [(parameters[name], axis) for name, axis in uses]
            edges.append(_Edge(slope, weights, places))
        return ()

    @torch.no_grad()
    def after_backward(module: nn.Module) -> None:
        strengths = [edge.strength() for edge in edges]  # all from the plain gradients
        for edge, strength in zip(edges, strengths, strict=True):
            edge.pull(strength)

    return Learn(plain.loss, prepare, after_backward, constants=tuple(slopes.values()))


@dataclass(frozen=True, eq=False)
class _Edge:
    """The indices of one group: the slopes of their masks, the weights along them, and whose each position is."""

    slope: Tensor
    weights: Sequence[tuple[nn.Parameter, int]]
    places: Sequence[Tensor]

    def strength(self) -> Tensor:
        """The slope times <g, w>, for every index."""
        sums = torch.zeros_like(self.slope)
        for (weight, axis), places in zip(self.weights, self.places, strict=True):
            if weight.grad is not None:
                product = (weight.grad * weight).movedim(axis, 0).reshape(len(places), -1).sum(1)
                sums.index_add_(0, places, product.to(sums))
        return self.slope * sums

    def pull(self, strength: Tensor) -> None:
        """Add it to the gradients, by the sign of every weight."""
        for (weight, axis), places in zip(self.weights, self.places, strict=True):
            if weight.grad is not None:
                shape = [1] * weight.dim()
                shape[axis] = -1
                weight.grad += weight.sign() * strength[places].view(shape).to(weight)


def _places(layout: Layout, name: str, axis: int, group: str) -> Tensor:
    """For every position of an axis the index of the group, counted through all heads; where it has none, one too many."""
    expression = layout.labels[name].axes[axis]
    found = coordinates(expression, layout.sizes, group)
    count, base = layout.sizes[group], layout.bases.get(group)
    if base is not None:
        found = torch.where(found >= 0, found + count * coordinates(expression, layout.sizes, base), found)
        count *= layout.sizes[base]
    return torch.where(found < 0, count, found)
