"""Nested: shapes inside each other, each trained by all clients that can hold it, with norms of its own.

Our own composition of known ideas; `docs/methods/nested.md` has the rule, what comes from whom, and what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from raffm.algebra.move import permute
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.data.task import Batch, Task, Taught, teaching
from raffm.devices.fleet import size_name
from raffm.errors import RunError
from raffm.methods.method import Client, Device, Held, Learn, Loss, Served, Share, Turns, Usual, plain_loss
from raffm.methods.shapes import Shapes, refuse_shapes, sizes_at
from raffm.methods.widths import refuse_widths
from raffm.models.labelled import Labelled
from raffm.models.rows import SIZES, bare, with_rows, with_some
from raffm.models.salience import METRICS, rank
from raffm.models.smaller import Smaller
from raffm.notices import notice
from raffm.seeds import generator


@dataclass(frozen=True)
class Nested(Usual):
    """A chain of shapes, each inside the next larger one; a client trains its own and, inside of it, the smaller ones.

    `shapes`: "balanced", "uniform", or widths for every size. `steps`: in every step "all" smaller shapes are trained, "one"
    of them, which is drawn, or "none". They learn from labels and, by a part of `distil`, from what the client's own shape
    says. With `own_norms` every size has its own norms. `ranking` puts the indices of every width into the order of their
    salience before the first round ("none": they stay as they are).
    """

    name: ClassVar[str] = "nested"
    average: ClassVar[float] = 0.95
    shapes: Shapes = "balanced"
    steps: Literal["all", "one", "none"] = "all"
    distil: float = 0.5
    own_norms: bool = True
    ranking: str = "none"

    def adapt(self, server: Labelled, seed: int, fleet: Sequence[float]) -> Labelled:
        """The model with its indices in order, and a row for every size in its norms."""
        self._refuse_switches()
        if self.ranking != "none":
            self._put_in_order(server, fleet)
        return with_rows(server, len(_sorted(fleet))) if self.own_norms else server

    @torch.no_grad()
    def _put_in_order(self, server: Labelled, fleet: Sequence[float]) -> None:
        """Put the most salient indices of every group that shapes cut first; the model says what it said before."""
        found = rank(server.model, server.layout, self.ranking).order
        cut = with_some(server.layout, self._sizes(server, min(fleet), fleet), [0]).kept
        moved = [group for group in cut if not server.layout.is_still(group)]
        order = Ranking({group: found[group] for group in moved if group in found})
        for name, tensor in permute(server.tensors, server.layout, order).items():
            server.tensors[name].copy_(tensor)

    def _refuse_switches(self) -> None:
        if self.steps not in ("all", "one", "none"):
            raise RunError(f'{self.name} trains "all" smaller shapes in a step, "one" or "none", not {self.steps!r}.')
        if not isinstance(self.distil, int | float) or not 0 <= self.distil <= 1:
            raise RunError(f"smaller shapes learn by a part of 0 to 1 from larger ones, but distil is {self.distil!r}.")
        if self.ranking not in ("none", *METRICS):
            raise RunError(f"{self.name} ranks by {', '.join(METRICS)} or none, not by {self.ranking!r}.")

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """It needs widths, and shapes inside each other; a size that nobody trains is served, and that is said."""
        refuse_widths(bare(server), self.name, scaler=False, masked_loss=False)
        fleet = devices[0].fleet
        refuse_shapes(bare(server), [Device(-1, size, fleet=fleet) for size in fleet], self.shapes)
        for size in sorted({device.size for device in devices} - set(fleet), reverse=True):
            self._sizes(server, size, fleet)
            notice(f"no client has size {size_name(size)}: {_instead(size, fleet)}.")

    def choose(self, server: Labelled, round: int, devices: Sequence[Device], seed: int) -> list[Share]:
        """Every device's shape, the smaller ones inside of it, and the norms of all of them."""
        if not devices:
            return []
        fleet = _sorted(devices[0].fleet)
        chain = [self._sizes(server, size, fleet) for size in fleet]
        shares = [self._trained(server, chain, place) for place in range(len(fleet))]
        found = [shares[fleet.index(device.size)] for device in devices]
        if self.steps != "one":
            return found
        pairs = zip(found, devices, strict=True)
        return [_with_draws(share, generator(seed, "nested", round, device.client)) for share, device in pairs]

    def _trained(self, server: Labelled, chain: Sequence[dict[str, int]], place: int) -> Share:
        smaller = range(place + 1, len(chain)) if self.steps != "none" else range(0)
        own = with_some(server.layout, chain[place], [place, *smaller])
        return Share(own, inner=tuple(with_some(server.layout, chain[each], [each]) for each in smaller))

    def learn(self, server: Labelled, share: Share, held: Held, client: Client) -> Learn:
        """By the loss of its own shape, then by those of the smaller ones."""
        if not share.inner:
            return Learn(plain_loss(client.task))
        runs: list[Smaller] = []

        def prepare(module: nn.Module) -> Sequence[Smaller]:
            runs[:] = [Smaller(module, server, share.selection, inner) for inner in share.inner]
            return runs

        rule = _Rule(client.task, teaching(client.task), self.distil)
        every = range(len(share.inner))
        key = (self.distil, float(len(every)))
        if share.drawn is None:
            return Learn(_nested_loss(rule, runs, every), prepare, key=key)
        losses = tuple(_nested_loss(rule, runs, (place,), len(every)) for place in every)
        return Learn(losses[0], prepare, key=key, turns=Turns(losses, _drawn(share.drawn, len(every))))

    def serve(self, server: Labelled, round: int, devices: Sequence[Device]) -> list[list[Served]]:
        """A device's shape with its own norms; where its size was not trained, with those of the next larger one."""
        return [[Served((self._served(server, device),))] for device in devices]

    def _served(self, server: Labelled, device: Device) -> Share:
        fleet = _sorted(device.fleet)
        place = max((place for place, trained in enumerate(fleet) if trained >= device.size), default=0)
        return Share(with_some(server.layout, self._sizes(server, device.size, fleet), [place]))

    def completed(self, server: Labelled, fleet: Sequence[float], selection: Selection) -> Selection:
        """With the norms of the smallest size whose shape holds it."""
        if SIZES not in server.layout.groups:
            return selection
        sizes = server.layout.sizes_of(selection)
        chain = [self._sizes(server, size, fleet) for size in _sorted(fleet)]
        holding = [place for place, shape in enumerate(chain) if all(sizes[group] <= shape[group] for group in shape)]
        kept = {name: indices for name, indices in selection.kept.items() if name != SIZES}
        return server.layout.select({**kept, SIZES: [max(holding, default=0)]})

    def _sizes(self, server: Labelled, size: float, fleet: Sequence[float]) -> dict[str, int]:
        """The sizes of the groups that the shape of a size has, or the largest that is trained.

        A shape's budget covers the norms of its own size alone.
        """
        return sizes_at(bare(server), min(size, max(fleet)), fleet, self.shapes)


def _sorted(fleet: Sequence[float]) -> list[float]:
    """The different sizes, the largest first: the places of their norms."""
    return sorted(set(fleet), reverse=True)


def _instead(size: float, fleet: Sequence[float]) -> str:
    """What a device of a size that nobody trained gets."""
    larger = [trained for trained in fleet if trained > size]
    if not larger:
        return f"its devices get the largest shape that is trained, that of size {size_name(max(fleet))}"
    return f"its devices get a shape inside that of size {size_name(min(larger))}, with the norms of that size"


def _with_draws(share: Share, source: torch.Generator) -> Share:
    return replace(share, drawn=source.initial_seed()) if share.inner else share


# -- training ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    """What a smaller shape learns from: labels, and by a part of `distil` what the client's own shape says."""

    task: Task
    taught: Taught | None
    distil: float

    def loss(self, outputs: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
        own = self.task.losses(outputs, labels).mean()
        if self.taught is None or not self.distil:
            return own
        return own.lerp(self.taught(outputs, teacher).mean(), self.distil)


def _nested_loss(rule: _Rule, runs: Sequence[nn.Module], places: Sequence[int], times: int = 1) -> Loss:
    """The terms of the client's own shape and of some smaller ones, whose terms count several times."""

    def terms(module: nn.Module, batch: Batch) -> Iterator[Tensor]:
        outputs = rule.task.forward(module, batch)
        teacher = outputs.detach()
        own = rule.task.losses(outputs, batch.labels).mean()
        del outputs  # what it was computed from goes with the backward pass
        yield own
        for place in places:
            term = rule.loss(rule.task.forward(runs[place], batch), batch.labels, teacher)
            yield term if times == 1 else times * term

    return terms


def _drawn(seed: int, count: int) -> Callable[[int], int]:
    """Which of so many shapes a step trains, drawn one after the other."""
    source, known = torch.Generator().manual_seed(seed), list[int]()

    def turn(step: int) -> int:
        while len(known) <= step:
            known.append(int(torch.randint(count, (), generator=source)))
        return known[step]

    return turn
