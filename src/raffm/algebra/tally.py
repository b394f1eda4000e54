"""A Tally: the running sum of what clients changed, and of who held what.

Rule, for every element j of a parameter or of a floating-point buffer (batch-norm statistics among them):

    server_j  +=  sum_i w_i * held_ij * (update_ij - sent_ij)  /  sum_i w_i * held_ij

An element that nobody held keeps its value, and clients that changed nothing change nothing, bit for bit. An integer
buffer (a counter of batches) takes the largest value reported. Transient buffers are not part of an update.

Memory: the sum (one model), the coverage (at most one model: axes that nobody cut take no room) and the change of one
client, whatever the number of clients. Sums are float32, or wider where the model is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from raffm.algebra.axis import Name, Where
from raffm.algebra.check import some
from raffm.algebra.layout import TRAVELLING, Layout
from raffm.algebra.mask import Mask
from raffm.algebra.move import Tensors, gather, moves, part_of, scatter
from raffm.algebra.selection import Selection
from raffm.algebra.sums import SMALL, Memory, added, count_at, largest_in, largest_of, outline_of, pieces, shapes_of
from raffm.errors import SelectionError, UpdateError

FOLD = 8
"""Different Selections that are remembered before their coverage is written out."""

HEADROOM = 2.0**-20
"""The part of the number range that an update may use, so that a million of them can be summed."""


@dataclass(frozen=True)
class Change:
    """The mean change of one tensor and the total weight that covers each of its elements (0: nobody held it)."""

    mean: Tensor
    coverage: Tensor


@dataclass(frozen=True)
class Total:
    """The weighted sum of changes of one tensor and the weight that covers each element, before they are divided."""

    sum: Tensor
    coverage: Tensor


class Tally:
    """Adds up clients' updates one at a time; `step` moves the server by their mean. May be used round after round."""

    def __init__(self, layout: Layout, server: Tensors) -> None:
        """Tally against these server tensors, which must not change before the round ends."""
        self._layout = layout
        self._server = {name: server[name].detach() for name in layout.tensors(*TRAVELLING)}
        self._sums: dict[str, Tensor] = {}
        self._dense: dict[str, Tensor] = {}
        self._weights: dict[Selection, float] = {}
        self._open: Selection | None = None
        self._memory = Memory()
        self._open_sums: dict[str, Tensor] = {}
        self._counters: dict[str, Tensor] = {}
        self._gated: set[str] = set()

    @property
    def counted(self) -> Tensors:
        """The server's tensors that updates change, by name."""
        return self._server

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
        """Add one client's tensors, which it held at `held`; a refused update changes nothing.

        `sent` is what the client started from; by default the server's values at `held`. `counted` leaves held indices
        out of the mean: a bool for every index of a group that is not cut (the classes a client has). Updates that share
        a Selection and come one after another are cheapest.
        """
        names = self._checked(update, held, weight, sent, client)
        gates = self._gates(counted or {}, held, client)
        if weight == 0:
            return
        if isinstance(held, Mask):
            self._add_masked(update, held, weight, sent)
            return
        if gates or self._gated:
            names = self._add_gated(update, held, names, weight, sent, gates)
        self._count(update, names)
        if held != self._open:
            self._close()
        self._weights[held] = self._weights.get(held, 0.0) + weight
        self._add_selected(update, held, names, weight, sent)
        self._open = held

    @torch.no_grad()
    def changes(self) -> dict[str, Change]:
        """The mean change of every tensor that somebody held; read it before the next `add`."""
        totals = self.totals()
        sums, coverages = [total.sum for total in totals.values()], [total.coverage for total in totals.values()]
        if totals:
            torch._foreach_div_(sums, torch._foreach_clamp_min(coverages, [torch.finfo(total.dtype).tiny for total in sums]))
        return {name: Change(*pair) for name, *pair in zip(totals, sums, coverages, strict=True)}

    @torch.no_grad()
    def step(self, move: Callable[[str, Change], Tensor] | None = None) -> None:
        """Move the server's tensors, in place, and begin anew: by the mean changes, or by what `move` makes of them.

        An element whose move is 0 keeps its bits.
        """
        for name, change in self.changes().items():
            self._server[name].copy_(stepped(self._server[name], change.mean if move is None else move(name, change)))
        for name, counter in self.counters().items():
            self._server[name].copy_(counter)

    def forget(self) -> None:
        """Begin anew, as if nothing had been added."""
        self.changes()
        self.counters()

    # -- tallies of tallies --------------------------------------------------------------------------------------

    @torch.no_grad()
    def totals(self) -> dict[str, Total]:
        """Everything added so far, for another tally to absorb; read it before the next `add`. The tally begins anew."""
        self._close()
        coverages = self._coverages(self._sums)
        found = {name: Total(total, coverages[name]) for name, total in self._sums.items()}
        self._sums, self._dense, self._weights, self._gated = {}, {}, {}, set()
        return found

    def counters(self) -> dict[str, Tensor]:
        """The integer buffers as clients reported them; the tally forgets them."""
        found, self._counters = self._counters, {}
        return found

    @torch.no_grad()
    def absorb(self, totals: Mapping[str, Total], counters: Tensors) -> None:
        """Add what another tally of the same server has summed up."""
        self._close()
        self._write_coverage()
        for name, total in totals.items():
            self._sum(name).add_(total.sum)
            self._dense[name] = added(self._dense.get(name), total.coverage.clone())
        for name, counter in counters.items():
            self._counters[name] = torch.maximum(self._counters.get(name, counter), counter)

    # -- one update ----------------------------------------------------------------------------------------------

    def _checked(
        self, update: Tensors, held: Selection | Mask, weight: float, sent: Tensors | None, client: object
    ) -> dict[str, str]:
        """Refuse what cannot be added; give the name in the update of every tensor it must hold."""
        if isinstance(held, Mask):
            self._check_mask(held, client)
        if not 0 <= weight < float("inf"):
            raise UpdateError(f"client {client!r}: the weight {weight!r} is not a finite number of at least 0.")
        selection = held if isinstance(held, Selection) else Selection()
        try:
            plan = moves(self._layout, selection)
        except SelectionError as error:
            raise UpdateError(f"client {client!r}: what it held does not fit the model: {error}") from None
        shapes = shapes_of(self._layout, selection)
        names = {name: move.name for name, move in plan.items() if name in self._server}
        missing, unknown = set(names.values()) - set(update), set(update) - set(names.values())
        if missing or unknown:
            found = "lacks " + some(sorted(missing), 3) if missing else "has the unknown tensors " + some(sorted(unknown), 3)
            raise UpdateError(f"client {client!r}: the update {found}. Send exactly the tensors of its submodel.")
        largest = largest_of({inner: update[inner] for name, inner in names.items() if self._is_small(name, update[inner])})
        for name, inner in names.items():
            self._check_tensor(name, inner, update[inner], shapes[name], weight, client, largest.get(inner))
            if sent is not None and (inner not in sent or sent[inner].shape != update[inner].shape):
                raise UpdateError(f"client {client!r}: what was sent to it has no `{inner}` of the shape that came back.")
        return names

    def _check_tensor(
        self,
        name: str,
        inner: str,
        tensor: Tensor,
        expected: tuple[int, ...],
        weight: float,
        client: object,
        known: float | None,
    ) -> None:
        server = self._server[name]
        if tuple(tensor.shape) != expected:
            raise UpdateError(f"client {client!r}: `{inner}` has shape {tuple(tensor.shape)}; its submodel has {expected}.")
        if tensor.is_floating_point() != server.is_floating_point():
            raise UpdateError(f"client {client!r}: `{inner}` is {tensor.dtype}; the server's is {server.dtype}.")
        if tensor.is_floating_point():
            wide = torch.promote_types(server.dtype, torch.float32)
            largest = largest_in(tensor.to(server.dtype)) if known is None else known
            if not isfinite(largest):
                raise UpdateError(f"client {client!r}: `{inner}` holds a NaN or an infinity.")
            if largest * max(weight, 1.0) > torch.finfo(wide).max * HEADROOM:
                raise UpdateError(f"client {client!r}: `{inner}` holds {largest:.1e}, too large to be averaged.")

    def _check_mask(self, mask: Mask, client: object) -> None:
        for name, kept in mask.kept.items():
            if name not in self._server:
                raise UpdateError(f"client {client!r}: the mask names `{name}`, which the model does not have.")
            if kept.dtype != torch.bool or kept.shape != self._server[name].shape:
                raise UpdateError(
                    f"client {client!r}: the mask of `{name}` is {kept.dtype} of shape {tuple(kept.shape)}; it must be bool of "
                    f"shape {tuple(self._server[name].shape)}."
                )

    def _gates(self, counted: Tensors, held: Selection | Mask, client: object) -> dict[str, list[tuple[int, Tensor]]]:
        """For every tensor that a counted group runs through, its axis and which positions count."""
        gates: dict[str, list[tuple[int, Tensor]]] = {}
        for group, indices in counted.items():
            size = self._layout.sizes.get(group)
            if indices.dtype != torch.bool or tuple(indices.shape) != (size,):
                raise UpdateError(
                    f"client {client!r}: what counts of `{group}` is {indices.dtype} of shape {tuple(indices.shape)}; it must "
                    f"be a bool for each of its {size} indices."
                )
            if isinstance(held, Mask) or group in held.kept:
                raise UpdateError(f"client {client!r}: `{group}` is cut, so its indices cannot be counted apart.")
            for name, axis in self._layout.uses(group):
                if name in self._server and self._layout.labels[name].axes[axis] == Name(group):
                    gates.setdefault(name, []).append((axis, indices))
        return gates

    def _add_gated(
        self,
        update: Tensors,
        held: Selection,
        names: dict[str, str],
        weight: float,
        sent: Tensors | None,
        gates: Mapping[str, list[tuple[int, Tensor]]],
    ) -> dict[str, str]:
        """Add the tensors of which not every index counts, in full; give the names that are left.

        Once a tensor was gated it stays so until the round ends, and its coverage is written out.
        """
        for name in set(gates) - self._gated:
            self._close()
            if name in self._sums:
                self._dense |= self._coverages([name])
            self._gated.add(name)
        plan = moves(self._layout, held)
        for name in self._gated & set(names):
            total, where, inner = self._sum(name), plan[name].where, names[name]
            start = gather(self._server[name], where) if sent is None else sent[inner]
            change = (update[inner].to(total.dtype) - start.to(total.dtype)).mul_(weight)
            covered = held.coverage(self._layout, name).to(total).mul_(weight)
            for axis, indices in gates.get(name, []):
                gate = indices.to(total).view([-1 if place == axis else 1 for place in range(total.dim())])
                change, covered = change * gate, covered * gate
            scatter(change, total, where)
            self._dense[name] = added(self._dense.get(name), covered)
        return {name: inner for name, inner in names.items() if name not in self._gated}

    def _count(self, update: Tensors, names: Mapping[str, str]) -> None:
        for name, inner in names.items():
            server = self._server[name]
            if not server.is_floating_point():
                before = self._counters.get(name, server)
                self._counters[name] = torch.maximum(before, update[inner].to(before)) if server.dim() == 0 else before

    def _add_selected(
        self, update: Tensors, held: Selection, names: Mapping[str, str], weight: float, sent: Tensors | None
    ) -> None:
        """Add to a sum of the submodel's own shape; `_close` brings it into the full one."""
        plan = moves(self._layout, held)
        small = {name: inner for name, inner in names.items() if self._is_small(name, update[inner])}
        self._add_small(update, held, small, weight, sent)
        for name, inner in names.items():
            server = self._server[name]
            if name in small or not server.is_floating_point():
                continue
            wide = torch.promote_types(server.dtype, torch.float32)
            start = self._start(name, inner, plan[name].where, sent)
            total = self._memory.take(("open", name), update[inner].shape, server, wide)
            for new, old, part in zip(*map(pieces, (update[inner], start, total)), strict=True):
                if held == self._open:
                    change = torch.sub(new.to(wide), old.to(wide), out=self._memory.take(("change", ""), part.shape, total))
                    part.add_(change, alpha=weight)
                else:
                    torch.sub(new.to(wide), old.to(wide), out=part).mul_(weight)
            self._open_sums[name] = total

    def _start(self, name: str, inner: str, where: tuple[Where, ...], sent: Tensors | None) -> Tensor:
        """What a client started from; good until the next is asked for. A tensor that is not cut is the server's own."""
        if sent is not None:
            return sent[inner]
        server = self._server[name]
        if all(place is None for place in where):
            return server
        shape = torch.Size(count_at(place, length) for place, length in zip(where, server.shape, strict=True))
        return gather(server, where, self._memory.take(("sent", ""), shape, server))

    def _is_small(self, name: str, update: Tensor) -> bool:
        """Whether it is added in one call with others; on a GPU everything is: there a call costs more than its work."""
        is_little = update.is_cuda or update.numel() <= SMALL
        return 0 < update.numel() and is_little and update.dtype == self._server[name].dtype == torch.float32

    def _add_small(
        self, update: Tensors, held: Selection, names: Mapping[str, str], weight: float, sent: Tensors | None
    ) -> None:
        """The same for small tensors, whose sums would take less time than asking for them one by one."""
        if not names:
            return
        plan = moves(self._layout, held)
        lost = [self._memory.take(("lost", name), update[inner].shape, self._server[name]) for name, inner in names.items()]
        starts = [
            part_of(self._server[name], plan[name].where) if sent is None else sent[inner] for name, inner in names.items()
        ]
        torch._foreach_copy_(lost, starts)
        torch._foreach_sub_(lost, [update[inner] for inner in names.values()])
        totals = [self._memory.take(("open", name), update[inner].shape, self._server[name]) for name, inner in names.items()]
        if held == self._open:
            torch._foreach_add_(totals, lost, alpha=-weight)
        else:
            torch._foreach_mul_(lost, -weight)
            torch._foreach_copy_(totals, lost)
        self._open_sums.update(zip(names, totals, strict=True))

    def _add_masked(self, update: Tensors, held: Mask, weight: float, sent: Tensors | None) -> None:
        self._close()
        start = self._server if sent is None else sent
        self._count(update, {name: name for name in self._server})
        for name, server in self._server.items():
            if not server.is_floating_point():
                continue
            total = self._sum(name)
            change = update[name].to(total) - start[name].to(total)
            if name in held.kept:
                covered = held.kept[name].to(total)
                change.mul_(covered)
            else:  # held whole: of length 1 along every axis
                covered = total.new_ones([1] * total.dim())
            total.add_(change, alpha=weight)
            self._dense[name] = added(self._dense.get(name), covered.mul_(weight))

    # -- sums and coverage ---------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Bring the open Selection's sum into the full one, and write the coverage out once it is long."""
        if self._open is None:
            return
        plan = moves(self._layout, self._open)
        for name, part in self._open_sums.items():
            scatter(part, self._sum(name), plan[name].where)
        self._open, self._open_sums = None, {}
        if len(self._weights) >= FOLD:
            self._write_coverage()

    def _write_coverage(self) -> None:
        self._dense.update(self._coverages(self._sums))
        self._weights = {}

    def _sum(self, name: str) -> Tensor:
        if name not in self._sums:
            server = self._server[name]
            wide = torch.promote_types(server.dtype, torch.float32)
            self._sums[name] = self._memory.take(("sum", name), server.shape, server, wide).zero_()
        return self._sums[name]

    def _coverages(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The total weight over every element of these tensors, of length 1 along axes that nobody cut.

        An outer product of the axes for each Selection, all added up by one matrix product.
        """
        held = tuple(sorted(self._weights, key=self._layout.count))  # clients come in any order: one outline for all
        weights = torch.tensor([self._weights[each] for each in held], dtype=torch.float64)
        found, twins = {}, dict[object, str]()
        for name in names:
            written = self._dense.get(name)
            if written is not None and (not held or name in self._gated):
                found[name] = written
                continue
            total = self._sum(name)
            label = self._layout.labels[name]
            twin = twins.setdefault((label.axes, label.guard), name)  # many tensors are cut alike
            outline = outline_of(self._layout, held, twin, total.device)
            wide = total.dtype if total.device.type == "cpu" else torch.float64
            weights = weights.to(total.device, wide)
            covered = ((outline.rows.to(wide) * weights) @ outline.columns.to(wide)).to(total.dtype)
            found[name] = added(written, covered.view(outline.shape))
        return found


def stepped(server: Tensor, change: Tensor) -> Tensor:
    """The server's tensor after a change; elements that do not change keep their bits (adding 0 to -0.0 would not)."""
    moved = (server.to(change.dtype) + change).to(server.dtype)
    return torch.where(change == 0, server, moved)
