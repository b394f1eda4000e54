"""ScaleFL: devices cut in depth and width; every exit on their way is trained, and taught by the last.

Ilhan, Su and Liu, "ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients", CVPR 2023.
`docs/methods/scalefl.md` says where we differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.data.task import Batch, Task
from raffm.errors import RunError
from raffm.methods.method import Client, Device, Held, Learn, Served, Share, Usual
from raffm.methods.widths import refuse_widths, scaled, scaled_modules, width_sizes
from raffm.models.anatomy import anatomy_of
from raffm.models.exits import DEPTH, ExitLogits, Exits, evenly, with_exits
from raffm.models.labelled import Labelled

EIGHTHS = tuple(part / 8 for part in range(1, 9))


@dataclass(frozen=True)
class ScaleFL(Usual):
    """The largest pair of an exit and a width that a device can hold; with fewer layers it gets fewer layers.

    `exits` is how many exits stand evenly between the blocks; `after` gives the blocks before each early one instead.
    `convolutions` stand in an early head of a ResNet. `widths` are the ratios to choose from. `scaler` divides what a cut
    map gives by its ratio. `gamma` weighs the distillation from the last exit into the others, at `temperature`, from
    round `distil_from` on.
    """

    name: ClassVar[str] = "scalefl"
    exits: int = 4
    after: tuple[int, ...] = ()
    convolutions: int = 3
    widths: tuple[float, ...] = EIGHTHS
    scaler: bool = True
    gamma: float = 0.05
    temperature: float = 3.0
    distil_from: int = 0

    def adapt(self, server: Labelled, seed: int, fleet: Sequence[float]) -> Labelled:
        """The model with early exits."""
        self._refuse_switches()
        if isinstance(server.model, Exits):
            return self._with_its_exits(server, server.model)
        after = self.after or evenly(len(anatomy_of(server).blocks), self.exits)
        return with_exits(server, after, self.convolutions, seed)

    def _with_its_exits(self, server: Labelled, model: Exits) -> Labelled:
        """A model that was given its exits before: they must be the ones that are asked for."""
        after = self.after or evenly(model.blocks, self.exits)
        if (after, self.convolutions) != (model.recipe.after, model.recipe.convolutions):
            raise RunError(
                f"the model has exits after {model.recipe.after} blocks with {model.recipe.convolutions} convolutions, but "
                f"{self.name} was asked for {after} with {self.convolutions}. Give it the model without exits."
            )
        return server

    def _refuse_switches(self) -> None:
        if self.exits < 1 or self.convolutions < 0:
            raise RunError(
                f"{self.name} needs at least 1 exit and 0 convolutions, not {self.exits!r} and {self.convolutions!r}."
            )
        if 1 not in self.widths or not all(0 < width <= 1 for width in self.widths):
            raise RunError(f"the widths of {self.name} lie above 0, and one of them is 1, but they are {self.widths!r}.")
        if not 0 <= self.gamma < inf or not 0 < self.temperature < inf:
            found = f"{self.gamma!r} and {self.temperature!r}"
            raise RunError(f"{self.name} needs a gamma of at least 0 and a temperature above 0, both finite, not {found}.")

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """It needs exits, widths, and something small enough for every device."""
        refuse_widths(server, self.name, self.scaler, masked_loss=False)
        for device in devices:
            self._share(server, device.size)

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share]:
        """Every device's exit and width, and whether the last exit teaches."""
        teaches = {"teaches": float(round >= self.distil_from)}
        shares = {size: self._share(server, size) for size in {device.size for device in devices}}
        shares = {size: Share(share.selection, {**share.numbers, **teaches}) for size, share in shares.items()}
        return [shares[device.size] for device in devices]

    def learn(self, server: Labelled, share: Share, held: Held, client: Client) -> Learn:
        """By the weighted losses of all exits that the client has."""
        gamma = self.gamma if share.numbers["teaches"] else 0.0
        learn = Learn(exit_loss(client.task, gamma, self.temperature), key=(gamma,))
        return scaled(learn, server, share) if self.scaler else learn

    def serve(self, server: Labelled, round: int, devices: Sequence[Device]) -> list[list[Served]]:
        """The same exits and widths."""
        return [[Served((self._share(server, device.size),))] for device in devices]

    def folded(self, server: Labelled, share: Share) -> Mapping[str, float]:
        """The scaler belongs to the model: what it divides in training is divided in every use."""
        ratio = share.numbers["ratio"]
        if not self.scaler or ratio == 1:
            return {}
        names = set(scaled_modules(server.layout, share.selection))
        tensors = {server.layout.name_in(share.selection, name) for name in server.layout.labels_of(share.selection)}
        return {name: 1 / ratio for name in tensors if name.rpartition(".")[0] in names}

    def _share(self, server: Labelled, size: float) -> Share:
        """The pair with the most parameters that are no more than this part of the model's; of equals, the deepest."""
        whole = server.layout.count(Selection())
        fitting = [pair for pair in self._pairs(server) if pair.params <= size * whole + 1e-6]  # of a parameter
        if not fitting:
            least = min(pair.params for pair in self._pairs(server))
            raise RunError(
                f"{self.name} has nothing for a device of size {size:g}: its smallest exit and width hold {least:,} of "
                f"{whole:,} parameters. Add smaller widths, or an earlier exit."
            )
        return max(fitting, key=lambda pair: (pair.params, pair.share.numbers["exit"])).share

    def _pairs(self, server: Labelled) -> list[_Pair]:
        key = server.layout.fingerprint
        if key not in self._known:
            self._known[key] = pairs(server, self.widths)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[str, list[_Pair]]:
        return {}


@dataclass(frozen=True)
class _Pair:
    share: Share
    params: int


def pairs(server: Labelled, widths: Sequence[float]) -> list[_Pair]:
    """Every exit with every width: the first parts, and the first indices of all that is wide in them."""
    layout = server.layout
    found = []
    for exit in range(1, layout.groups[DEPTH].size + 1):
        for ratio in widths:
            selection = Ranking().cut(layout, {**width_sizes(layout, ratio), DEPTH: exit})
            found.append(_Pair(Share(selection, {"ratio": ratio, "exit": exit}), layout.count(selection)))
    return found


def exit_loss(task: Task, gamma: float, temperature: float) -> Callable[[nn.Module, Batch], Tensor]:
    """The losses of all exits, weighted by their places; all but the last also learn from what the last says."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        said = exit_outputs(task, module, batch)
        teacher = said[-1].detach()
        total = torch.zeros((), device=teacher.device)
        for place, outputs in enumerate(said, start=1):
            own = task.losses(outputs, batch.labels).mean()
            if gamma and place < len(said):
                own = own + gamma * temperature**2 * divergence(teacher, outputs, temperature)
            total = total + exit_weight(place, len(said)) * own
        return total

    return loss


def exit_weight(place: int, count: int) -> float:
    """The weight of an exit's loss, counted from 1: in proportion to its place, 1 in all."""
    return 2 * place / (count * (count + 1))


def divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """KL(teacher || student) at a temperature, summed over classes: the mean of the batch."""
    goal, said = functional.softmax(teacher / temperature, -1), functional.log_softmax(student / temperature, -1)
    return functional.kl_div(said, goal, reduction="batchmean")


def exit_outputs(task: Task, module: nn.Module, batch: Batch) -> list[Tensor]:
    """What every exit says, as the task reads it; the model runs once."""
    said: ExitLogits = module(**batch.inputs)
    return [task.forward(_Echo(ExitLogits(said.exits[:, :place])), batch) for place in range(1, said.exits.shape[1] + 1)]


class _Echo(nn.Module):
    """Says what it was told, whatever it is asked."""

    def __init__(self, said: ExitLogits) -> None:
        super().__init__()
        self.said = said

    def forward(self, *_: Any, **__: Any) -> ExitLogits:
        return self.said
