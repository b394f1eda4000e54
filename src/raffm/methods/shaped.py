"""What HeteroFL and those built on it do alike: cut widths to shapes, scale, mask, and count classes by their owners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from raffm.algebra.ranking import Ranking
from raffm.algebra.tally import Tally
from raffm.methods.method import Client, Device, Held, Learn, Share, Update, Usual
from raffm.methods.shapes import Shapes, refuse_shapes, sizes_at
from raffm.methods.widths import learn_widths, merge_by_class, ratio_of, refuse_widths
from raffm.models.labelled import Labelled


@dataclass(frozen=True)
class Shaped(Usual):
    """All but the choice of indices."""

    name: ClassVar[str]
    scaler: bool = True
    masked_loss: bool = True
    shapes: Shapes = "uniform"

    def refuse(self, server: Labelled, devices: Sequence[Device]) -> None:
        """It needs widths, classes to mask, and a shape for every device."""
        refuse_widths(server, self.name, self.scaler, self.masked_loss)
        refuse_shapes(server, devices, self.shapes)

    def share(self, server: Labelled, size: float, fleet: Sequence[float], ranking: Ranking | None = None) -> Share:
        """The first indices of every width in the order of a ranking, as many as the shape of a size has."""
        return shaped_share(server, size, fleet, self.shapes, ranking)

    def learn(self, server: Labelled, share: Share, held: Held, client: Client) -> Learn:
        """With scaler and masked loss."""
        return learn_widths(server, share, client, self.scaler, self.masked_loss)

    def merge(self, tally: Tally, server: Labelled, update: Update) -> None:
        """The counted mean, by class in the head."""
        merge_by_class(tally, update, self.masked_loss)


def shaped_share(
    server: Labelled, size: float, fleet: Sequence[float], shapes: Shapes, ranking: Ranking | None = None
) -> Share:
    """The first indices of every width in the order of a ranking; a uniform shape has one ratio, which its scaler takes."""
    numbers = {"ratio": ratio_of(size)} if shapes == "uniform" else {}
    return Share((ranking or Ranking()).cut(server.layout, sizes_at(server, size, fleet, shapes)), numbers)
