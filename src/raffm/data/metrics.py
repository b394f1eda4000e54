"""Metrics by name, from scikit-learn and SciPy; higher is better. One that chance leaves undefined is 0."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from raffm.errors import DataError
from raffm.libraries import library

NEEDS = DataError("this metric needs scikit-learn and scipy: pip install 'raffm[train]'.")

Values = NDArray[Any]


def _of_classes(name: str, **given: Any) -> Callable[[Values, Values], float]:
    """A metric of scikit-learn on the class with the largest logit."""

    def metric(outputs: Values, labels: Values) -> float:
        return float(getattr(library("sklearn.metrics", NEEDS), name)(labels, outputs.argmax(1), **given))

    return metric


def _of_numbers(name: str) -> Callable[[Values, Values], float]:
    """A correlation of SciPy between numbers and what was predicted."""

    def metric(outputs: Values, labels: Values) -> float:
        found = outputs.reshape(len(labels))
        return float(getattr(library("scipy.stats", NEEDS), name)(labels, found).statistic) if len(labels) > 1 else 0.0

    return metric


NAMED: Mapping[str, Callable[[Values, Values], float]] = {
    "accuracy": _of_classes("accuracy_score"),
    "f1": _of_classes("f1_score", zero_division=0),
    "matthews": _of_classes("matthews_corrcoef"),
    "pearson": _of_numbers("pearsonr"),
    "spearman": _of_numbers("spearmanr"),
}


def named_metrics(names: Sequence[str], outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """These metrics of some examples, in this order."""
    unknown = [name for name in names if name not in NAMED]
    if unknown:
        raise DataError(f"there is no metric {unknown[0]!r}. There are: {', '.join(NAMED)}.")
    said, truth = outputs.detach().float().cpu().numpy(), labels.cpu().numpy()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # constant predictions: the answer is not a number, and 0 below
        return {name: float(np.nan_to_num(NAMED[name](said, truth))) for name in names}
