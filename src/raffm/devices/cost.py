"""What a submodel costs, predicted from its sizes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import nn

from raffm.algebra.layout import PARAMETERS, Layout
from raffm.devices.basis import Array, Basis, varying_groups
from raffm.devices.budget import Kind
from raffm.devices.probe import read_flops, read_memory
from raffm.devices.regress import EXACT, SMOOTH, Regression, regress
from raffm.errors import BudgetError, LabelError
from raffm.models.label import named_tensors
from raffm.models.table import Table

HELD_BACK = 1.15
"""What a process holds, in live bytes: allocators keep freed pieces, kernels need scratch.

Between 1.0 (every large tensor mapped on its own) and 1.4 (a fragmented heap) were measured on the CPU after a few
steps; this lies within 20 % of both.
"""

_STATES = {"adamw": 2, "sgd": 0, "sgd-momentum": 1}
_STEP_SCRATCH = {"adamw": 2, "sgd": 0, "sgd-momentum": 0}
"""Copies of one parameter, the largest, that the optimizer's step makes meanwhile."""


@dataclass(frozen=True, eq=False)
class CostModel:
    """Predicts parameters, bytes, FLOPs and training memory of every submodel.

    Sizes are those that `layout.sizes_of(selection)` gives; blocks whose groups are missing there are dropped. The
    first question about FLOPs or memory measures a few submodels without weights, which takes a second for ViT-base.
    `free` names the groups that will be cut (by default all that can be): fewer groups take fewer measurements.
    """

    model: nn.Module
    layout: Layout
    table: Table
    batch: int = 16
    optimizer: str = "adamw"
    free: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in _STATES:
            raise BudgetError(f"the memory of the optimizer {self.optimizer!r} is not known. Known are {', '.join(_STATES)}.")
        if self.batch < 1:
            raise BudgetError(f"a training step needs a batch of at least 1, but was given {self.batch!r}.")

    # -- one submodel --------------------------------------------------------------------------------------------

    def params(self, sizes: Mapping[str, int]) -> int:
        """The exact number of parameters, tied ones once."""
        return self.layout.count_at(sizes)

    def bytes(self, sizes: Mapping[str, int]) -> int:
        """The exact size of all parameters and saved buffers in the model's own dtypes."""
        return self._one("bytes", sizes)

    def flops(self, sizes: Mapping[str, int]) -> int:
        """The exact FLOPs of the forward pass of one example (128 tokens of text), a multiply-add counted as 2."""
        return self._one("flops", sizes)

    def memory(self, sizes: Mapping[str, int]) -> int:
        """The peak bytes of a training step: weights, gradients, optimizer state, activations; to about 20 %."""
        return self._one("memory", sizes)

    def _one(self, kind: Kind, sizes: Mapping[str, int]) -> int:
        for name, size in sizes.items():
            if size != self.layout.sizes[name] and name not in self.basis.varying and name not in self.layout.depths:
                raise BudgetError(f"the cost model was made for other cuts: `{name}` is {size}, but it is not in `free`.")
        return round(float(self.many(kind, self.basis.rows([sizes]))[0]))

    # -- many submodels ------------------------------------------------------------------------------------------

    @cached_property
    def basis(self) -> Basis:
        """The terms that all costs are sums of; `basis.rows` turns sizes into rows of numbers."""
        return Basis(self.layout, varying_groups(self.layout, self.free))

    def many(self, kind: Kind, rows: Array) -> Array:
        """One cost of many submodels at once, a row of sizes each."""
        features = self.basis.features(rows)
        if kind == "memory":
            return self._peak(features)
        coefficients: Array = getattr(self, f"_{kind}")  # one alone: those of FLOPs take measuring
        cost: Array = features @ coefficients
        return cost

    @cached_property
    def _params(self) -> Array:
        return self._sum(self.layout.tensors(*PARAMETERS), dict.fromkeys(self.layout.labels, 1))

    @cached_property
    def _bytes(self) -> Array:
        return self._sum(self.layout.tensors(*PARAMETERS, "buffer"), self._widths)

    @cached_property
    def _flops(self) -> Array:
        found = regress(self.basis, lambda selection: read_flops(self.model, self.layout, self.table, selection), held_out=2)
        if found.error > 1e-9:
            raise LabelError(
                f"the FLOPs of {type(self.model).__name__} do not follow from its group sizes (off by {found.error:.1e}): "
                "is an axis labelled with a number that changes when a group is cut?"
            )
        total: Array = found.coefficients[:, :, 0].sum(1)
        return total

    # -- memory --------------------------------------------------------------------------------------------------

    def _peak(self, features: Array) -> Array:
        """The greatest of the moments of a step, in which weights and optimizer state are always there."""
        gradients = features @ self._gradients
        peak = np.maximum(self._backward_peak(features), gradients)
        if scratch := _STEP_SCRATCH[self.optimizer]:
            is_close = peak < gradients + scratch * self._largest(self.basis.features(self.basis.rows([self.layout.sizes])))
            step = gradients[is_close] + scratch * self._largest(features[is_close])
            peak[is_close] = np.maximum(peak[is_close], step)
        total: Array = HELD_BACK * (features @ self._weights + gradients * _STATES[self.optimizer] + peak)
        return total

    def _largest(self, features: Array) -> Array:
        """The bytes of the largest trained parameter."""
        most: Array = (features @ self._each_trained).max(1, initial=0)
        return most

    def _backward_peak(self, features: Array) -> Array:
        """When the backward pass reaches a stretch, those up to it still hold their activations, later ones left gradients."""
        held, left, rise = (features @ self._stretches.coefficients[:, :, value] for value in range(3))
        start = held.cumsum(1) + left.sum(1, keepdims=True) - left.cumsum(1)
        peak: Array = (start + rise).max(1)
        return peak

    @cached_property
    def _stretches(self) -> Regression:
        return regress(
            self.basis,
            lambda selection: read_memory(self.model, self.layout, self.table, selection, self.batch),
            cutoffs=(EXACT, EXACT, SMOOTH),  # held, left, and the rise, which is a maximum
        )

    @cached_property
    def _widths(self) -> dict[str, int]:
        """The bytes of one element of every tensor."""
        return {name: tensor.element_size() for name, tensor in named_tensors(self.model)[0].items()}

    @cached_property
    def _weights(self) -> Array:
        return self._sum(self.layout.labels, self._widths)

    @cached_property
    def _gradients(self) -> Array:
        return self._sum(self._trained, self._widths)

    @cached_property
    def _trained(self) -> tuple[str, ...]:
        tensors = named_tensors(self.model)[0]
        return tuple(name for name in self.layout.tensors("parameter") if tensors[name].requires_grad)

    @cached_property
    def _each_trained(self) -> Array:
        """The bytes of every single trained parameter, equal ones once, an array (terms, parameters)."""
        return np.unique([self._sum([name], self._widths) for name in self._trained], axis=0).T.copy()

    def _sum(self, names: Iterable[str], widths: Mapping[str, int]) -> Array:
        """The coefficients of a sum of element counts, each weighted by its width."""
        return self.basis.vector(*((self.basis.of_labels[name], widths[name]) for name in names))
