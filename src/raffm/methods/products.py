"""A tally of products: what adapters do to a weight is B A, and the mean of products is not the product of means.

Updates are multiplied out and counted as changes of the weight that the adapter stands beside, rank by rank in parts; when
the round ends, the server's factors become the best ones of its rank for their sum (by singular values, the largest first).
Memory: one more tensor of the weight's shape for every adapter and part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from raffm.algebra.axis import Label, Name
from raffm.algebra.group import Group
from raffm.algebra.layout import Layout
from raffm.algebra.mask import Mask
from raffm.algebra.move import Tensors
from raffm.algebra.selection import Selection
from raffm.algebra.sums import shapes_of
from raffm.algebra.tally import Change, Tally, Total
from raffm.errors import RunError, UpdateError
from raffm.models.adapters import Part, part_of
from raffm.models.labelled import Labelled


@dataclass(frozen=True)
class Adapter:
    """The two factors of an adapter by name, what their product is multiplied by, and the group of its ranks."""

    first: str
    second: str
    scale: float
    rank: str

    @property
    def product(self) -> str:
        """The name of what is counted in their place; it stands in the same block."""
        return f"{self.first.rpartition('.lora_A.')[0]}.lora_product"

    @property
    def parts(self) -> str:
        """The group of the parts that its ranks are counted in."""
        return f"{self.rank}.parts"


def adapters_of(server: Labelled) -> list[Adapter]:
    """The adapters of a model."""
    found = []
    for name in server.layout.labels:
        part = part_of(name)
        if part is not None and part.side == "A":
            module = server.model.get_submodule(part.module)
            scale = float(module.scaling[part.adapter])  # type: ignore[index]
            found.append(Adapter(name, _second(part), scale, str(server.layout.labels[name].axes[0])))
    return found


def _second(part: Part) -> str:
    return f"{part.module}.lora_B.{part.adapter}.weight"


class ProductTally(Tally):
    """Counts products. `ends` are the ranks that parts end at, the last one the full rank; who lacks a part is not counted."""

    def __init__(self, server: Labelled, ends: Sequence[int]) -> None:
        self._adapters, self._ends, self._factors = adapters_of(server), tuple(ends), server
        factors = {name for each in self._adapters for name in (each.first, each.second)}
        products = {each.product: _label(server.layout, each) for each in self._adapters}
        groups = {each.parts: self._group(each) for each in self._adapters}
        layout = replace(
            server.layout,
            labels={**{name: label for name, label in server.layout.labels.items() if name not in factors}, **products},
            groups={**server.layout.groups, **groups},
        )
        blank = {each.product: self._blank(each) for each in self._adapters}
        super().__init__(layout, {**server.tensors, **blank})
        self._is_stale = True

    def _group(self, adapter: Adapter) -> Group:
        return Group(adapter.parts, len(self._ends), guard=self._factors.layout.groups[adapter.rank].guard)

    def _blank(self, adapter: Adapter) -> Tensor:
        first, second = (self._factors.tensors[name] for name in (adapter.first, adapter.second))
        return torch.zeros(len(self._ends), second.shape[0], first.shape[1], device=first.device)

    @torch.no_grad()
    def add(
        self,
        update: Tensors,
        held: Selection | Mask,
        weight: float = 1.0,
        sent: Tensors | None = None,
        client: object = "?",
        counted: Tensors | None = None,
    ) -> None:
        """Add one client's update, its factors multiplied out."""
        if isinstance(held, Mask):
            raise RunError("products of adapters are counted by index, not by mask.")
        self._refresh()
        known = self._factors.layout
        named = {name: known.name_in(held, name) for each in self._adapters for name in (each.first, each.second)}
        rest = {name: tensor for name, tensor in update.items() if name not in set(named.values())}
        parts: dict[str, int | Tensor] = {}
        self._refuse_factors(update, held, named, client)
        for each in self._adapters:
            if known.is_held(held, each.first):
                first, second = update[named[each.first]], update[named[each.second]]
                indices = held.kept.get(each.rank, torch.arange(known.sizes[each.rank]))
                product = self._products(first, second, each.scale, indices)
                rest[self._layout.name_in(held, each.product)] = product
                parts[each.parts] = len(product)
        wider = self._layout.select({**held.kept, **parts})
        super().add(rest, wider, weight, sent, client, counted)

    def _refuse_factors(self, update: Tensors, held: Selection, named: Mapping[str, str], client: object) -> None:
        """Factors that are missing or of another shape cannot be multiplied."""
        shapes = shapes_of(self._factors.layout, held)
        for name, inner in named.items():
            if name in shapes and (inner not in update or tuple(update[inner].shape) != shapes[name]):
                found = tuple(update[inner].shape) if inner in update else "missing"
                raise UpdateError(f"client {client!r}: `{inner}` is {found}; its submodel has {shapes[name]}.")

    def _products(self, first: Tensor, second: Tensor, scale: float, indices: Tensor) -> Tensor:
        """One product for every part that a client has ranks in; `indices` are those that it holds."""
        found = []
        for begin, end in pairwise((0, *self._ends)):
            inside = ((indices >= begin) & (indices < end)).to(first.device)
            if bool(inside.any()):
                found.append(scale * second.float()[:, inside] @ first.float()[inside])
        return torch.stack(found)

    @torch.no_grad()
    def step(self, move: Callable[[str, Change], Tensor] | None = None) -> None:
        """Move the server, and factor anew the products that somebody held."""
        self._refresh()
        held = set[str]()

        def noted(name: str, change: Change) -> Tensor:
            if bool((change.coverage > 0).any()):
                held.add(name)
            return change.mean if move is None else move(name, change)

        super().step(noted)
        for each in self._adapters:
            if each.product not in held:
                continue
            first, second = (self._factors.tensors[name].detach() for name in (each.first, each.second))
            factors = factored(self._server[each.product].sum(0) / each.scale, len(first))
            first.zero_()[: len(factors[0])].copy_(factors[0])
            second.zero_()[:, : len(factors[0])].copy_(factors[1])
        self._is_stale = True

    def totals(self) -> dict[str, Total]:
        """Everything added so far, products in the place of factors."""
        self._is_stale = True
        return super().totals()

    def absorb(self, totals: Mapping[str, Total], counters: Tensors) -> None:
        """Add what another such tally has summed up."""
        self._refresh()
        super().absorb(totals, counters)

    @torch.no_grad()
    def _refresh(self) -> None:
        """Multiply the server's factors out, once a round: they change between rounds."""
        if not self._is_stale:
            return
        for each in self._adapters:
            first, second = (self._factors.tensors[name] for name in (each.first, each.second))
            self._server[each.product].copy_(self._products(first, second, each.scale, torch.arange(len(first))))
        self._is_stale = False


USUAL, NOTHING = 0.5, 1e-6
"""The length of a row of A as LoRA begins with it, and the singular value below which a rank does nothing."""


def factored(product: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The factors A and B of a rank whose product is nearest, equally long; the sign of each rank is that of its largest entry.

    A rank that does nothing gets a row of A of the usual length and no B, as at the beginning: with 0 for both it would never
    move again.
    """
    left, values, right = torch.linalg.svd(product.double(), full_matrices=False)
    left, values, right = left[:, :rank], values[:rank], right[:rank]
    largest = right.abs().argmax(1, keepdim=True)
    signs = right.gather(1, largest).sign()
    root = torch.where(values > NOTHING, values.sqrt(), USUAL)
    return (signs * root[:, None] * right).to(product.dtype), (signs.T * left * (values / root)).to(product.dtype)


def _label(layout: Layout, adapter: Adapter) -> Label:
    """Parts of a product: each has the axes of the weight."""
    first, second = layout.labels[adapter.first], layout.labels[adapter.second]
    return Label((Name(adapter.parts), second.axes[0], first.axes[1]), guard=first.guard, stack=first.stack)
