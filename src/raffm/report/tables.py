"""The numbers of a run as a table, one row a size: for people (readable units) and for programs (CSV, full precision)."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from math import isfinite, isnan
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from raffm.rounds.results import Evaluation, Metrics, Results, Scores, Size

if TYPE_CHECKING:
    from rich.table import Table

Value = str | int | float | None

NAMES = {"accuracy": "accuracy", "f1_macro": "macro F1", "f1_weighted": "weighted F1", "loss": "loss"}
"""How people call the metrics, in the order they are shown."""


@dataclass(frozen=True)
class Column:
    """One column: its heading for programs and for people, its value for a size, and how that reads."""

    key: str
    title: str
    value: Callable[[Size], Value]
    show: Callable[[Value], str]


def metrics_table(results: Results) -> list[dict[str, Value]]:
    """One row a size, in plain numbers by column; None where there is nothing yet."""
    return [{column.key: column.value(size) for column in columns(results)} for size in results.sizes]


def shown_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """The headings and the rows of the same table as people read them."""
    heads = columns(results)
    return [column.title for column in heads], [[column.show(column.value(size)) for column in heads] for size in results.sizes]


def as_csv(results: Results) -> str:
    """The table as CSV, in plain numbers."""
    text = StringIO()
    writer = csv.DictWriter(text, [column.key for column in columns(results)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(metrics_table(results))
    return text.getvalue()


def as_markdown(results: Results) -> str:
    """The table as Markdown, in readable units, and a sentence that says what it holds."""
    titles, rows = shown_table(results)
    rule = ["---", *["---:"] * (len(titles) - 1)]
    lines = [rule if line is rule else [_unpiped(cell) for cell in line] for line in (titles, rule, *rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{caption(results)}\n"


def as_rich(results: Results, width: int | None = None) -> Table:
    """The table for a terminal; where it is too narrow, what `metrics.csv` alone holds is left out."""
    from rich import box, get_console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=Text(caption(results)), caption_justify="left"
    )
    heads = _fitting(results, width or get_console().width)
    for position, column in enumerate(heads):
        side: Literal["left", "right"] = "right" if position else "left"
        table.add_column(Text(_wrapped(column.title)), justify=side)
    for size in results.sizes:
        table.add_row(*[Text(column.show(column.value(size))) for column in heads])
    return table


def caption(results: Results) -> str:
    """What the numbers of the table are, in a sentence or two."""
    last, best = results.last_round, results.best_on_validation
    if last is None:
        return "No evaluations yet."
    chosen = "" if best is None else f" Best on validation: round {best.round}; the test set had no say."
    words = f"Test set after round {last.round}.{chosen} Mean, best and clients: {name_of(results.metric)}."
    return words + habits_note(results.run)


def habits_note(run: Mapping[str, Any]) -> str:
    """A sentence that says where a run is not as it should be, but as published; nothing where it is honest."""
    data, tested, trained = (_section(run, part) for part in ("data", "evaluate", "local"))
    found = []
    if data.get("parameters", data).get("tests") == "unrelated":
        found.append("a client's test examples are unrelated to its training data")
    if tested.get("augmented"):
        found.append("the images of clients' tests are cropped and mirrored at random")
    if tested.get("norms") == "test-batches":
        found.append("batch norms use the statistics of test batches")
    if trained.get("shuffle") is False:
        found.append("clients train in one order of examples")
    return f" As published: {', and '.join(found)}." if found else ""


def _section(run: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table of a run's settings; empty where a run from Python has something else there."""
    found = run.get(name)
    return found if isinstance(found, Mapping) else {}


def _fitting(results: Results, width: int) -> list[Column]:
    """The columns that fit into so many characters, the most needed ones in any case."""
    found = columns(results)
    others = [f"last_{metric}" for metric in reversed(metrics_of(results)[1:])]
    for spare in ("bytes_down", "bytes_up", "flops", *others, "fraction", "best_on_validation_round"):
        if sum(_width(column, results) + 2 for column in found) <= width:
            return found
        found = [column for column in found if column.key != spare]
    return found


def _width(column: Column, results: Results) -> int:
    cells = [column.show(column.value(size)) for size in results.sizes]
    return max(len(line) for line in (*cells, *_wrapped(column.title).splitlines()))


def _wrapped(title: str) -> str:
    return fill(title, max(8, *map(len, title.split())), break_long_words=False)


def columns(results: Results) -> list[Column]:
    """The columns that a run has something to say in."""
    return [*_costs(), *_last(results), *_whole_run(results), *_clients(results)]


def _costs() -> list[Column]:
    return [
        Column("size", "size", lambda size: size.name, text),
        Column("fraction", "true fraction", lambda size: size.fraction, percent),
        Column("params", "parameters", lambda size: size.params, count),
        Column("bytes_down", "down", lambda size: size.bytes_down, size_of),
        Column("bytes_up", "up", lambda size: size.bytes_up, size_of),
        Column("flops", "FLOPs", lambda size: size.flops, count),
    ]


def _last(results: Results) -> list[Column]:
    last = results.last_round
    metrics = metrics_of(results)
    return [
        Column(f"last_{metric}", name_of(metric), _from(last, metric, lambda scores: scores.test), number) for metric in metrics
    ]


def _whole_run(results: Results) -> list[Column]:
    metric, best = results.metric, results.best_on_validation
    evaluations = len(results.evaluations[-results.last :]) or results.last
    return [
        Column(f"mean_of_last_{metric}", f"mean of last {evaluations}", lambda size: _mean_of_last(results, size.name), number),
        Column(f"best_on_validation_{metric}", "best on validation", _from(best, metric, lambda scores: scores.test), number),
        Column("best_on_validation_round", "in round", lambda size: best.round if best else None, text),
    ]


def _clients(results: Results) -> list[Column]:
    metric, last = results.metric, results.last_round
    worst = _from(last, metric, lambda scores: scores.clients_worst_decile)
    return [
        Column(f"clients_mean_{metric}", "clients mean", _from(last, metric, lambda scores: scores.clients_mean), number),
        Column(f"clients_worst_decile_{metric}", "clients worst decile", worst, number),
    ]


def _from(evaluation: Evaluation | None, metric: str, part: Callable[[Scores], Metrics]) -> Callable[[Size], Value]:
    """A look at one metric of a size, None where it was not measured."""
    sizes: Mapping[str, Scores] = evaluation.sizes if evaluation else {}
    return lambda size: part(sizes[size.name]).get(metric) if size.name in sizes else None


def _mean_of_last(results: Results, size: str) -> float | None:
    recent = results.evaluations[-results.last :]
    measured = all(size in entry.sizes and results.metric in entry.sizes[size].test for entry in recent)
    return results.mean_of_last(size, results.metric) if recent and measured else None


def metrics_of(results: Results) -> list[str]:
    """The test metrics of a run: the main one, then those that people know, then others by name."""
    last = results.last_round
    found = {metric for scores in last.sizes.values() for metric in scores.test} if last else set()
    known = [metric for metric in NAMES if metric in found]
    return list(dict.fromkeys([results.metric, *known, *sorted(found)]))


def name_of(metric: str) -> str:
    """What people call a metric."""
    return NAMES.get(metric, metric.replace("_", " "))


def text(value: Value) -> str:
    """The value itself, or a dash."""
    return "-" if value is None else str(value)


def number(value: Value) -> str:
    """Four decimals, fewer where the number is large; a dash where there is none."""
    if not isinstance(value, int | float) or isnan(value):
        return "-"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.5g}"


def percent(value: Value) -> str:
    """A fraction in percent."""
    return f"{100 * value:.3g} %" if isinstance(value, int | float) and isfinite(value) else "-"


def count(value: Value) -> str:
    """A number in three digits: 1.2 M."""
    return _scaled(value, "").rstrip()


def size_of(value: Value) -> str:
    """A number of bytes in three digits: 340 kB."""
    return _scaled(value, "B")


def energy(joules: float) -> str:
    """Watt hours with three digits, 1.2 kWh for 4.32e6 J."""
    hours = joules / 3600
    return f"{hours / 1000:.3g} kWh" if hours >= 1000 else f"{hours:.3g} Wh"


def duration(seconds: float) -> str:
    """A time in the two units that matter: 2 h 5 min."""
    if not isfinite(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.3g} s"
    for unit, smaller, length, rest in (("min", "s", 60, 1), ("h", "min", 3600, 60)):
        if seconds < 60 * length:
            return f"{int(seconds // length)} {unit} {int(seconds % length // rest)} {smaller}"
    return f"{int(seconds // 86400)} d {int(seconds % 86400 // 3600)} h"


def _scaled(value: Value, unit: str) -> str:
    if not isinstance(value, int | float) or not isfinite(value):
        return "-"
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}" if abs(value) < 999.5 else f"{value:,.0f} P{unit}"


def _unpiped(cell: str) -> str:
    return " ".join(cell.replace("|", "\\|").split())


def totals(results: Results) -> Sequence[tuple[str, str]]:
    """What the whole run cost, as people read it."""
    rounds = results.rounds
    return (
        ("Sent to clients", size_of(sum(entry.bytes_down for entry in rounds))),
        ("Sent by clients", size_of(sum(entry.bytes_up for entry in rounds))),
        ("FLOPs of clients", count(sum(entry.flops for entry in rounds))),
        ("Virtual time", duration(sum(entry.seconds for entry in rounds))),
        ("Energy of clients", energy(sum(entry.joules for entry in rounds))),
    )
