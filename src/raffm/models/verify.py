"""Labels are claims; running the model proves them.

Every parameter and buffer is first perturbed, because zeros and ones at initialisation hide mistakes. Then, in float64:

- a group permuted at random must leave the outputs alone;
- a group cut to half must give what the full model gives with the other half zeroed;
- a depth group cut to half must give what the full model gives with the other blocks passed by.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from raffm.algebra.axis import Expression, positions
from raffm.algebra.layout import Layout
from raffm.algebra.move import gather, permute
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.models.label import layout_of, named_tensors, output_labels, table_of
from raffm.models.sample import sample_inputs, with_padding
from raffm.models.surgery import submodel
from raffm.models.table import Table

Verdict = Literal["exact", "approximate", "wrong"]


@dataclass(frozen=True)
class Row:
    """What was found about one group, or about all groups of one pattern (`layers.*.ffn`)."""

    group: str
    size: int
    permuted: float | None
    """Largest relative change of an output when the group was permuted; None for depth."""
    cut: float | None
    """The same between cutting and zeroing; None where the group cannot be cut further."""
    verdict: Verdict
    note: str = ""


@dataclass(frozen=True)
class Verification:
    """One row per pattern of groups."""

    rows: tuple[Row, ...]

    @property
    def holds(self) -> bool:
        """Whether no claim is wrong."""
        return all(row.verdict != "wrong" for row in self.rows)


def verify(model: nn.Module, table: Table | str | Path | None = None, tolerance: float = 1e-4, seed: int = 0) -> Verification:
    """Prove by running the model that its axis labels are right; the model itself is not changed."""
    return Verification(tuple(verified_rows(model, table, tolerance, seed)))


def verified_rows(
    model: nn.Module,
    table: Table | str | Path | None = None,
    tolerance: float = 1e-4,
    seed: int = 0,
    first: Container[str] = (),
) -> Iterator[Row]:
    """The rows of `verify`, each as soon as it is found; those of the patterns in `first` before the others."""
    trial = _Trial(model, table_of(model, table), seed)
    patterns: dict[str, list[str]] = {}
    for name in trial.layout.free:
        patterns.setdefault(pattern_of(name), []).append(name)
    for pattern in sorted(patterns, key=lambda pattern: pattern not in first):
        yield _row(trial, pattern, patterns[pattern], tolerance)


def pattern_of(group: str) -> str:
    """The name that groups of all blocks share: `layers.*.ffn`."""
    return re.sub(r"\.\d+(?=\.)", ".*", group)


class _Trial:
    """A perturbed float64 copy of the model, its inputs and its outputs."""

    def __init__(self, model: nn.Module, table: Table, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.model = with_padding(copy.deepcopy(model).to("cpu", torch.float64).eval())
        self.layout = layout_of(self.model, table)
        self.tensors, _ = named_tensors(self.model)
        for tensor in self.tensors.values():
            _perturb(tensor, self.generator)
        self.inputs = sample_inputs(self.model, table, generator=self.generator)
        self.axes = output_labels(self.model, table)
        self.outputs = self.run(self.model)

    def run(self, module: nn.Module) -> dict[str, Tensor]:
        with torch.no_grad():
            return named_outputs(module(**self.inputs))

    def run_with(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs of the full model with other numbers in its tensors."""
        with torch.no_grad():
            return named_outputs(functional_call(self.model, dict(tensors), kwargs=self.inputs))

    def random_ranking(self, groups: list[str]) -> Ranking:
        order = {}
        for name in groups:
            group = self.layout.groups[name]
            rows = (self.layout.groups[group.base].size,) if group.base else ()
            order[name] = torch.rand((*rows, group.size), generator=self.generator).argsort(-1)
        return Ranking(order)


def _perturb(tensor: Tensor, generator: torch.Generator) -> None:
    """Make every number different from its neighbours; what is not negative stays so (variances)."""
    if not tensor.is_floating_point():
        return
    with torch.no_grad():
        noise = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            spread = tensor.std() if tensor.numel() > 1 else tensor.abs().mean()
            tensor.add_((noise - 0.5) * (2 * spread + 0.2))
        else:
            tensor.mul_(0.5 + noise).add_(0.1 * noise)


def _row(trial: _Trial, pattern: str, groups: list[str], tolerance: float) -> Row:
    size = max(trial.layout.groups[name].size for name in groups)
    if trial.layout.groups[groups[0]].path is not None:
        permuted, passed = None, ""
    else:
        permuted, passed = _worst(trial, groups, _permuted, tolerance)
    cut, failed = _worst(trial, groups, _cut, tolerance)
    claim = trial.layout.groups[groups[0]].approximate
    if passed or (permuted or 0.0) > tolerance:
        return Row(pattern, size, permuted, cut, "wrong", passed)
    if failed.startswith("the cut model does not run"):
        return Row(pattern, size, permuted, cut, "wrong", failed)
    if (cut or 0.0) > tolerance:
        return Row(pattern, size, permuted, cut, "approximate" if claim else "wrong", claim or failed)
    return Row(pattern, size, permuted, cut, "exact")


def _worst(
    trial: _Trial, groups: list[str], check: Callable[[_Trial, list[str]], float | None], tolerance: float
) -> tuple[float | None, str]:
    """The change with all groups of a pattern moved at once and, where that is too large, which of them did it."""
    together, problem = _tried(check, trial, groups)
    if not problem and (together is None or together <= tolerance):
        return together, ""
    if len(groups) == 1:
        return together, problem
    guilty = []
    for name in groups:
        alone, trouble = _tried(check, trial, [name])
        if trouble or (alone is not None and alone > tolerance):
            guilty.append(name)
    named = ", ".join(f"`{name}`" for name in guilty[:3]) or "all of them together"
    return together, f"{problem or 'outputs differ'} ({named})"


def _tried(check: Callable[[_Trial, list[str]], float | None], trial: _Trial, groups: list[str]) -> tuple[float | None, str]:
    """A model whose labels are wrong may fail in any way when it is cut; that is a finding, not a crash."""
    try:
        return check(trial, groups), ""
    except Exception as error:
        return None, f"the cut model does not run: {str(error).splitlines()[0]}"


def _permuted(trial: _Trial, groups: list[str]) -> float | None:
    ranking = trial.random_ranking(groups)
    moved = permute(trial.tensors, trial.layout, ranking)
    return largest_change(_along(trial, dict(ranking.order)), trial.run_with(moved))


def _cut(trial: _Trial, groups: list[str]) -> float | None:
    layout = trial.layout
    halves = {name: _half(layout, name) for name in groups}
    halves = {name: count for name, count in halves.items() if count < layout.groups[name].size}
    if not halves:
        return None
    ranking = trial.random_ranking(groups)
    chosen = [ranking.cut(layout, halves)]
    if any(name in layout.depths and not layout.groups[name].ordered for name in groups):  # one may serve all others: drop it
        chosen.append(layout.select({name: _others(layout, name, chosen[0].kept[name]) for name in halves}))
    return max(_cut_to(trial, selection) for selection in chosen)


def _others(layout: Layout, name: str, kept: Tensor) -> list[int]:
    """The blocks that are not among these, and those that are required."""
    depth = layout.groups[name]
    return [place for place in range(depth.size) if place not in kept.tolist() or place in depth.required]


def _cut_to(trial: _Trial, selection: Selection) -> float:
    """The change between cutting and zeroing."""
    layout = trial.layout
    small = trial.run(submodel(trial.model, layout, selection))
    held = layout.labels_of(selection)
    zeroed = {
        name: tensor * selection.coverage(layout, name) if name in held else tensor for name, tensor in trial.tensors.items()
    }
    with _passing_by(trial.model, layout, selection):
        expected = trial.run_with(zeroed)
    return largest_change(_along(trial, dict(selection.kept), expected), small)


def _half(layout: Layout, name: str) -> int:
    group = layout.groups[name]
    count = max(-(-group.size // 2), group.least, len(group.required))
    return min(group.size, -(-count // group.step) * group.step)


def _along(trial: _Trial, chosen: Mapping[str, Tensor], outputs: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The outputs with their labelled axes in the chosen order, so that they can be compared."""
    return {
        name: _axis_chosen(trial, output, trial.axes[name], chosen) if name in trial.axes else output
        for name, output in (outputs or trial.outputs).items()
    }


def _axis_chosen(trial: _Trial, output: Tensor, labelled: tuple[int, Expression], chosen: Mapping[str, Tensor]) -> Tensor:
    axis, expression = labelled
    where = positions(expression, trial.layout.sizes, chosen, trial.layout.bases)
    return gather(output, tuple(where if place == axis % output.dim() else None for place in range(output.dim())))


def largest_change(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """The largest change of any output, relative to its scale; infinite where a number is not."""
    changes = [_relative(before[name], after[name]) for name in before]
    return max(change if isfinite(change) else inf for change in changes)


def _relative(before: Tensor, after: Tensor) -> float:
    gap, scale = float((before - after).abs().max()), float(before.abs().max())
    return 0.0 if gap == scale == 0 else gap / scale if scale else inf


@contextmanager
def _passing_by(model: nn.Module, layout: Layout, selection: Selection) -> Iterator[None]:
    """Within this, dropped blocks hand on their input."""

    def hand_on(_: nn.Module, given: tuple[Any, ...], output: Any) -> Any:
        return (given[0], *output[1:]) if isinstance(output, tuple) else given[0]

    hooks = []
    for depth in layout.depths.values():
        blocks = list(model.get_submodule(str(depth.path)).children())
        kept = set(selection.kept[depth.name].tolist()) if depth.name in selection.kept else set(range(depth.size))
        hooks += [blocks[place].register_forward_hook(hand_on) for place in range(depth.size) if place not in kept]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def named_outputs(output: Any) -> dict[str, Tensor]:
    """The floating-point tensors that a model returns, by name where it names them."""
    if isinstance(output, Tensor):
        return {"output": output}
    if isinstance(output, Mapping):
        entries = dict(output)
    elif isinstance(output, tuple | list):
        entries = {str(place): entry for place, entry in enumerate(output)}
    else:
        entries = dict(vars(output))
    return {name: entry for name, entry in entries.items() if isinstance(entry, Tensor) and entry.is_floating_point()}
