"""Looking on while a run goes: a live line for people, numbers for trackers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from raffm.report.tables import percent
from raffm.report.tracker import Tracker, values_of, values_of_evaluation
from raffm.rounds.loop import Watcher
from raffm.rounds.results import Evaluation, Results, Round


class Tracked:
    """A watcher that logs the numbers of every round to a tracker."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def client(self, round: int, done: int, of: int) -> None:
        """Clients are not logged one by one."""

    def round(self, entry: Round, evaluation: Evaluation | None, results: Results) -> None:
        """Log a round, and its evaluation where it had one."""
        values = values_of(entry)
        if evaluation is not None:
            values |= values_of_evaluation(evaluation, results.metric)
        self._tracker.log(entry.round, values)


class Together:
    """Several watchers as one."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers

    def client(self, round: int, done: int, of: int) -> None:
        """Tell all."""
        for watcher in self._watchers:
            watcher.client(round, done, of)

    def round(self, entry: Round, evaluation: Evaluation | None, results: Results) -> None:
        """Tell all."""
        for watcher in self._watchers:
            watcher.round(entry, evaluation, results)


class Display:
    """A live line with round, loss, accuracy by size and the time that is left; use it in a `with` block.

    Where the output is no terminal, one plain line an evaluation.
    """

    def __init__(self, rounds: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(
            *columns, TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[state]}"), console=self._console
        )
        self._bar = self._progress.add_task("rounds", total=rounds, state="")
        self._rounds = rounds
        self._loss = self._scores = ""

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def client(self, round: int, done: int, of: int) -> None:
        """Show how far a round is."""
        self._show(round + done / of, f"client {done}/{of}")

    def round(self, entry: Round, evaluation: Evaluation | None, results: Results) -> None:
        """Show what a round found."""
        self._loss = "" if entry.loss is None else f"loss {entry.loss:.3f}"
        if evaluation is not None:
            found = [f"{name} {percent(scores.test[results.metric])}" for name, scores in evaluation.sizes.items()]
            self._scores = f"{results.metric}: " + "  ".join(found)
        for client, reason in entry.refused.items():
            self._console.print(f"round {entry.round}: an update was refused: {reason or client}", highlight=False)
        self._show(entry.round, "")
        if evaluation is not None and not self._console.is_terminal:
            line = f"round {entry.round}/{self._rounds}  {self._loss}  {self._scores}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def _show(self, completed: float, doing: str) -> None:
        state = "  ".join(part for part in (self._loss, self._scores, doing) if part)
        self._progress.update(self._bar, completed=completed, state=state)
