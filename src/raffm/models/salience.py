"""How much every index of every group matters: the scores that salient parameter prioritization ranks by.

The published rule scores row j of a head by the mean of the norms of that row in the query and in the key, and sorts
inside the head. Said over labels: a group that is only written by maps is scored by the mean norm of the incoming
weights. A group that is also read by maps (FFN neurons, `vo`, heads, channels, the residual stream) is scored by the
incoming times the outgoing norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from raffm.algebra.axis import as_stretch, coordinates
from raffm.algebra.group import Group
from raffm.algebra.layout import PARAMETERS, Layout
from raffm.algebra.ranking import Ranking
from raffm.errors import SpaceError
from raffm.models.label import named_tensors

Role = Literal["in", "out", "side"]


class Use(tuple[Tensor, int]):
    """A tensor and the axis along which a group runs through it, one entry per index.

    Unpacks as `tensor, axis`. `role` says whether the weights write the group ("in"), read it ("out") or neither
    ("side": a bias, a norm).
    """

    role: Role

    def __new__(cls, tensor: Tensor, axis: int, role: Role) -> Use:
        """A pair with its role."""
        made = super().__new__(cls, (tensor, axis))
        made.role = role
        return made


Metric = Callable[[Group, Sequence[Use]], Tensor]


def l1_norm(group: Group, uses: Sequence[Use]) -> Tensor:
    """The sum of magnitudes of an index's weights: incoming times outgoing."""
    return _in_times_out(uses, lambda rows: rows.abs().sum(1))


def l2_norm(group: Group, uses: Sequence[Use]) -> Tensor:
    """The Euclidean length of an index's weights: incoming times outgoing."""
    return _in_times_out(uses, lambda rows: rows.square().sum(1).sqrt())


def total(group: Group, uses: Sequence[Use]) -> Tensor:
    """The plain sum over an index's entries, for tensors that are importances already."""
    return torch.stack([_rows(use).sum(1) for use in uses]).sum(0)


METRICS: Mapping[str, Metric] = {"l1_norm": l1_norm, "l2_norm": l2_norm}


def rank(
    model: nn.Module, layout: Layout, metric: str | Metric = "l1_norm", batches: Iterable[Any] = (), loss: Any = None
) -> Ranking:
    """A ranking of every group that can be cut, by a metric.

    `metric` is "l1_norm", "l2_norm", "taylor" or "fisher", or a function of a group and its uses. The last two
    read gradients, so they need a few `batches` of the model's own inputs (with `labels`), or a `loss(model, batch)`.
    """
    tensors = {name: tensor.detach() for name, tensor in named_tensors(model)[0].items()}
    if metric in ("taylor", "fisher"):
        importances = _importances(model, str(metric), list(batches), loss)
        return Ranking.by_scores(scores(importances, layout, total))
    if isinstance(metric, str) and metric not in METRICS:
        raise SpaceError(f"there is no metric {metric!r}. Use l1_norm, l2_norm, taylor, fisher or a function.")
    return Ranking.by_scores(scores(tensors, layout, METRICS[metric] if isinstance(metric, str) else metric))


def scores(tensors: Mapping[str, Tensor], layout: Layout, metric: Metric) -> dict[str, Tensor]:
    """One score per index of every group that can be cut; (base, index) for a fibred one."""
    return {name: _score(tensors, layout, layout.groups[name], metric) for name in layout.free}


def _score(tensors: Mapping[str, Tensor], layout: Layout, group: Group, metric: Metric) -> Tensor:
    if group.path is not None:
        return _checked(group, metric(group, _block_uses(tensors, layout, group)))
    if not layout.uses(group.name):  # a count that others are tied to
        return torch.zeros(group.size)
    if group.base is None:
        return _checked(group, metric(group, _uses(tensors, layout, group.name)))
    rows = range(layout.groups[group.base].size)
    return torch.stack([_checked(group, metric(group, _uses(tensors, layout, group.name, row))) for row in rows])


def _checked(group: Group, score: Tensor) -> Tensor:
    if tuple(score.shape) != (group.size,):
        raise SpaceError(f"the metric gave {tuple(score.shape)} scores for `{group.name}`, which has {group.size} indices.")
    if not bool(torch.isfinite(score).all()):
        raise SpaceError(f"the metric gave a NaN or an infinity for group `{group.name}`. Are the weights finite?")
    return score.float().cpu()


def _uses(tensors: Mapping[str, Tensor], layout: Layout, name: str, row: int | None = None) -> list[Use]:
    """The floating-point tensors that a group runs through, each with the group alone on its axis."""
    return [
        _use(tensors[tensor], axis, _role(layout, tensor, axis), _positions(layout, tensor, axis, name, row))
        for tensor, axis in layout.uses(name)
        if tensor in tensors and tensors[tensor].is_floating_point() and layout.kind(tensor) in PARAMETERS
    ]


def _role(layout: Layout, tensor: str, axis: int) -> Role:
    label = layout.labels[tensor]
    if label.source == axis:
        return "out"
    if any(layout.groups[group].apart for group in label.groups()):
        return "side"
    return "in" if label.target == axis or len(label.axes) > 1 else "side"


def _positions(layout: Layout, tensor: str, axis: int, name: str, row: int | None) -> Tensor:
    """Where the group's indices lie on an axis, an array (indices, positions of each); of one row of a fibred group."""
    expression = layout.labels[tensor].axes[axis]
    found = coordinates(expression, layout.sizes, name)
    if row is not None:
        found = torch.where(coordinates(expression, layout.sizes, layout.bases[name]) == row, found, -1)
    places = torch.nonzero(found >= 0).flatten()
    return places[found[places].argsort(stable=True)].view(layout.groups[name].size, -1)


def _use(tensor: Tensor, axis: int, role: Role, positions: Tensor) -> Use:
    where = as_stretch(positions.flatten())
    if isinstance(where, slice):
        part = tensor.narrow(axis, where.start, where.stop - where.start)
    else:
        part = tensor.index_select(axis, positions.flatten().to(tensor.device))
    shape = (*part.shape[:axis], *positions.shape, *part.shape[axis + 1 :])
    return Use(part.reshape(shape), axis, role)


def _block_uses(tensors: Mapping[str, Tensor], layout: Layout, depth: Group) -> list[Use]:
    """The tensors that all blocks have in the same shape, one block after another along axis 0."""
    blocks: dict[str, list[Tensor]] = {}
    for name, label in layout.labels.items():
        if label.guard is not None and label.guard[0] == depth.name and name in tensors and tensors[name].is_floating_point():
            leaf = name.removeprefix(f"{depth.path}.").partition(".")[2]
            blocks.setdefault(leaf, []).append(tensors[name])
    stacks = [parts for parts in blocks.values() if len(parts) == depth.size and len({part.shape for part in parts}) == 1]
    return [Use(torch.stack(parts), 0, "in" if parts[0].dim() > 1 else "side") for parts in stacks]


def _rows(use: Use) -> Tensor:
    tensor, axis = use
    return tensor.detach().float().movedim(axis, 0).flatten(1) if tensor.dim() > 1 else tensor.detach().float()[:, None]


def _in_times_out(uses: Sequence[Use], norm: Callable[[Tensor], Tensor]) -> Tensor:
    by_role = {role: [norm(_rows(use)) for use in uses if use.role == role] for role in ("in", "out", "side")}
    incoming, outgoing = by_role["in"] or by_role["side"], by_role["out"]
    score = torch.stack(incoming).mean(0) if incoming else torch.ones_like(outgoing[0])
    return score * torch.stack(outgoing).mean(0) if outgoing else score


def _importances(model: nn.Module, metric: str, batches: Sequence[Any], loss: Any) -> dict[str, Tensor]:
    """Per element, from the gradients of a few batches: |w * gradient| ("taylor") or (w * gradient)^2 ("fisher")."""
    if not batches:
        raise SpaceError(f"the metric {metric!r} reads gradients: give it a few batches, `batches=[...]`.")
    was_training = model.training
    model.eval()
    parameters = {name: tensor for name, tensor in named_tensors(model)[0].items() if isinstance(tensor, nn.Parameter)}
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for batch in batches:
        value = model(**batch).loss if loss is None else loss(model, batch)
        if value is None:
            raise SpaceError("the model gave no loss: put `labels` into the batches, or give `loss=...`.")
        gradients = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
        for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
            if gradient is not None:
                effect = (parameter.detach() * gradient).abs()
                sums[name] += effect if metric == "taylor" else effect.square()
    model.train(was_training)
    return sums
