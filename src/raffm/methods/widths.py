"""What HeteroFL and FedRolex share: uniform widths, the scaler, the masked loss, and classes counted by their owners."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor, nn

from raffm.algebra.axis import names, value
from raffm.algebra.layout import Layout
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.algebra.tally import Tally
from raffm.data.task import Batch, Task
from raffm.errors import RunError
from raffm.methods.method import Client, Learn, Scaling, Share, Update, plain_loss
from raffm.models.labelled import Labelled

CLASSES = "classes"
"""The group that a family's table calls the classes of its head."""


def ratio_of(size: float) -> float:
    """The width that makes a model of dense layers a given part of its parameters: they grow with its square."""
    return sqrt(size)


def width_groups(layout: Layout) -> tuple[str, ...]:
    """The groups that are widths: all that can be cut, but neither blocks nor heads, whose number never changes."""
    return tuple(group for group in layout.free if group not in layout.depths and group not in layout.heads)


def width_sizes(layout: Layout, ratio: float) -> dict[str, int]:
    """Every width, by one ratio; those that a count tie gives follow."""
    return {name: layout.groups[name].narrowed(ratio) for name in width_groups(layout) if name not in layout.followers}


def cut_share(server: Labelled, ranking: Ranking, size: float) -> Share:
    """The first sqrt(size) of every width in the order of a ranking."""
    ratio = ratio_of(size)
    return Share(ranking.cut(server.layout, width_sizes(server.layout, ratio)), {"ratio": ratio})


def refuse_widths(server: Labelled, method: str, scaler: bool, masked_loss: bool) -> None:
    """A model needs at least one width, modules to scale, and classes to mask."""
    if not width_groups(server.layout):
        raise RunError(f"{method} cuts widths, but {type(server.model).__name__} has none that can be cut.")
    if scaler:
        _refuse_unscalable(server, method)
    if masked_loss:
        _refuse_classless(server, method)


def _refuse_classless(server: Labelled, method: str) -> None:
    """The masked loss needs a head with classes."""
    if not server.layout.uses(CLASSES):
        raise RunError(
            f"{method} masks the classes that a client does not have, but the layout of {type(server.model).__name__} has no "
            f"group `{CLASSES}`. Name the rows of its head so in its table, or set masked_loss = false."
        )


# -- training ------------------------------------------------------------------------------------------------------


def learn_widths(server: Labelled, share: Share, client: Client, scaler: bool, masked_loss: bool) -> Learn:
    """Training with HeteroFL's two additions, each by switch."""
    present = client.present.clone()
    learn = Learn(masked(client.task, present), constants=(present,)) if masked_loss else Learn(plain_loss(client.task))
    return scaled(learn, server, share) if scaler else learn


def scaled(learn: Learn, server: Labelled, share: Share) -> Learn:
    """The same training with everything that a cut map gives divided by the width's ratio."""
    ratios = scaled_modules(server.layout, share.selection, share.numbers.get("ratio"))
    if all(ratio == 1 for ratio in ratios.values()):
        return learn
    hooks: list[torch.utils.hooks.RemovableHandle] = []

    def prepare(module: nn.Module) -> tuple[()]:
        hooks.extend(module.get_submodule(name).register_forward_hook(_divided_by(ratio)) for name, ratio in ratios.items())
        return ()

    def finish(module: nn.Module) -> None:
        for hook in hooks:
            hook.remove()

    scaling = Scaling({name: 1 / ratio for name, ratio in ratios.items()})
    return replace(learn, prepare=prepare, finish=finish, key=(*learn.key, *ratios.values()), scaling=scaling)


def scaled_modules(layout: Layout, selection: Selection, ratio: float | None = None) -> dict[str, float]:
    """The linear maps, by their names in the submodel, that read a cut group, and the part of their inputs that they have.

    That part is `ratio`, or, where it is None, what each has itself. A map that reads everything (the first convolution, the
    patches) sums over as many inputs as in the full model, and the head is none of them.
    """
    cut, sizes = set(selection.kept), layout.sizes_of(selection)
    held, found = layout.labels_of(selection), {}
    for name, reads in _inner_maps(layout).items():
        if name in held and cut & reads:
            label = layout.labels[name]
            source = label.axes[label.source]  # type: ignore[index]
            own = value(source, sizes) / value(source, layout.sizes)
            found[layout.name_in(selection, name).removesuffix(".weight")] = own if ratio is None else ratio
    return found


def _inner_maps(layout: Layout) -> dict[str, set[str]]:
    """The linear maps but for heads, whose outputs are pinned, and the groups that each of them reads."""
    found = {}
    for name, label in layout.labels.items():
        if label.source is not None and label.target is not None:
            is_head = all(layout.groups[group].pinned for group in names(label.axes[label.target]))
            if not is_head:
                found[name] = set(names(label.axes[label.source]))
    return found


def _refuse_unscalable(server: Labelled, method: str) -> None:
    """The scaler divides what a module gives; a map that is a bare parameter has none."""
    for name in _inner_maps(server.layout):
        if not name.endswith(".weight"):
            raise RunError(
                f"{method} scales what linear maps give, but `{name}` is a parameter without a module of its own. Set "
                "scaler = false."
            )


def _divided_by(ratio: float) -> Callable[[nn.Module, object, Tensor], Tensor]:
    return lambda module, _, output: output / ratio if module.training else output


def masked(task: Task, present: Tensor) -> Callable[[nn.Module, Batch], Tensor]:
    """The task's loss over the classes that the client has; the others get no probability and no gradient."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        outputs = task.forward(module, batch)
        outputs = outputs.masked_fill(~present.to(outputs.device), float("-inf"))
        return task.losses(outputs, batch.labels).mean()

    return loss


def merge_by_class(tally: Tally, update: Update, masked_loss: bool) -> None:
    """The counted mean; rows of the head enter for a client's own classes alone, as it trained no others."""
    counted: Mapping[str, Tensor] = {CLASSES: update.present} if masked_loss and not bool(update.present.all()) else {}
    tally.add(update.tensors, update.share.selection, update.weight, client=update.client, counted=counted)
