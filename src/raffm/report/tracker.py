"""Where a run's numbers go while it runs: one method, so that any other tracker is a class of three lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from raffm.errors import RunError
from raffm.rounds.results import Evaluation, Metrics, Round, Scores


class Tracker(Protocol):
    """Takes the numbers of a round."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep `values`, by tag, as those of round `step`."""


class TensorBoard:
    """Writes what `tensorboard --logdir FOLDER` shows.

    The first step that is logged hides all points that an earlier run left at that step or later, so a resumed run
    goes on from its checkpoint and shows no point twice.
    """

    def __init__(self, folder: str | Path) -> None:
        self._open = _summary_writer()
        self._folder = Path(folder)
        self._writer: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write `values` to disk as those of round `step`."""
        if self._writer is None:
            self._writer = self._open(log_dir=str(self._folder), purge_step=step)
        for tag, value in values.items():
            self._writer.add_scalar(_grouped(tag), value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file; what was logged is on disk already."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Several:
    """Hands every value to each of `trackers`, in their order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log to each tracker."""
        for tracker in self._trackers:
            tracker.log(step, values)


def values_of(round: Round) -> dict[str, float]:
    """What a round did, by tag; no loss where nobody came back."""
    return {
        **({} if round.loss is None else {"train/loss": round.loss}),
        "train/clients": len(round.clients),
        "train/dropped": len(round.dropped),
        "train/late": len(round.late),
        "train/refused": len(round.refused),
        "train/bytes_up": round.bytes_up,
        "train/bytes_down": round.bytes_down,
        "train/flops": round.flops,
        "train/seconds": round.seconds,
    }


def values_of_evaluation(evaluation: Evaluation, metric: str) -> dict[str, float]:
    """The scores after a round, by tag: `global/...` is the mean over sizes, `size 1/4/...` is one size. Nan is left out."""
    sizes = evaluation.sizes.values()
    found = {
        **_mean(f"global/{metric}", [scores.test for scores in sizes], metric),
        **_mean(f"global/validation {metric}", [scores.validation for scores in sizes], metric),
    }
    for name, scores in evaluation.sizes.items():
        found |= {f"size {name}/{tag}": value for tag, value in _of_size(scores, metric).items()}
    return {tag: value for tag, value in found.items() if not isnan(value)}


def _mean(tag: str, scores: Sequence[Metrics], metric: str) -> dict[str, float]:
    complete = bool(scores) and all(metric in entry for entry in scores)
    return {tag: fmean(entry[metric] for entry in scores)} if complete else {}


def _of_size(scores: Scores, metric: str) -> dict[str, float]:
    clients = {"clients mean": scores.clients_mean, "clients worst decile": scores.clients_worst_decile}
    return {**scores.test, **{tag: values[metric] for tag, values in clients.items() if metric in values}}


def _grouped(tag: str) -> str:
    """The tag with one slash: TensorBoard groups by what precedes the first, which would put 1/4 and 1/2 together."""
    group, slash, name = tag.rpartition("/")
    return group.replace("/", "\N{DIVISION SLASH}") + slash + name


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise RunError("tensorboard is not installed. Run `pip install raffm[tensorboard]`, or switch it off.") from None
    return SummaryWriter
