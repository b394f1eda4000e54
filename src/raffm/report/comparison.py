"""Several methods in one table: means and spread over seeds, and a paired test over clients."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from raffm.report import plots
from raffm.report.folder import write_file
from raffm.report.tables import count, percent
from raffm.rounds.results import Results, Size, without_nan


@dataclass(frozen=True)
class Compared:
    """A method in a comparison: the learning rate it took, what each rate scored on validation, and a run for every seed."""

    method: str
    rate: float
    scores: Mapping[float, float]
    runs: tuple[Results, ...]


@dataclass(frozen=True)
class Line:
    """One method at one size. Metrics are means over seeds of the test scores after the last round."""

    method: str
    size: str
    nominal: float
    params: int
    flops: int
    bytes_round: float
    """To and from all clients, a round."""
    seconds: float
    """Virtual, of the whole run."""
    metric: float
    spread: float | None
    """Standard deviation over seeds; None for one."""
    clients_mean: float | None
    worst_decile: float | None
    against: float | None
    """The mean difference to the first method at the same size over (seed, client) pairs; None for itself."""
    p: float | None
    """Of a two-sided Wilcoxon signed-rank test of those differences."""


def lines_of(compared: Sequence[Compared]) -> list[Line]:
    """The table: for every method every size that it serves."""
    return [_line(entry, size, compared[0]) for entry in compared for size in entry.runs[0].sizes]


def _line(entry: Compared, size: Size, first: Compared) -> Line:
    metric = entry.runs[0].metric
    last = [run.evaluations[-1].sizes[size.name] for run in entry.runs]
    tested = [scores.test[metric] for scores in last]
    against, p = (None, None) if entry is first else paired(entry, first, size)
    return Line(
        method=entry.method,
        size=size.name,
        nominal=size.size,
        params=size.params,
        flops=size.flops,
        bytes_round=fmean(sum(each.bytes_up + each.bytes_down for each in run.rounds) / len(run.rounds) for run in entry.runs),
        seconds=fmean(sum(each.seconds for each in run.rounds) for run in entry.runs),
        metric=fmean(tested),
        spread=stdev(tested) if len(tested) > 1 else None,
        clients_mean=_mean([scores.clients_mean.get(metric) for scores in last]),
        worst_decile=_mean([scores.clients_worst_decile.get(metric) for scores in last]),
        against=against,
        p=p,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """None where no client has test examples."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def paired(entry: Compared, first: Compared, size: Size) -> tuple[float | None, float | None]:
    """The mean difference between two methods on the same clients at the same seeds, and how likely chance alone gives it."""
    from scipy.stats import wilcoxon

    other = _partner(first.runs[0].sizes, size)
    if other is None:
        return None, None
    gaps = [
        round(ours - theirs, 9)  # differences that are equal must be so: accuracies are fractions
        for mine, reference in zip(entry.runs, first.runs, strict=True)
        for ours, theirs in zip(mine.client_scores[size.name], reference.client_scores[other.name], strict=True)
        if ours is not None and theirs is not None and isfinite(ours) and isfinite(theirs)
    ]
    if not gaps:
        return None, None
    return fmean(gaps), float(wilcoxon(gaps).pvalue) if any(gaps) else 1.0


def _partner(sizes: Sequence[Size], size: Size) -> Size | None:
    """What a size is compared with: the same by name, else the same part of the model, if possible in the same view."""
    alike = sorted(sizes, key=lambda other: (other.name != size.name, other.view != size.view))
    return next((other for other in alike if other.name == size.name or other.size == size.size), None)


def as_markdown(compared: Sequence[Compared]) -> str:
    """The table for people."""
    first, metric, seeds = compared[0].method, compared[0].runs[0].metric, len(compared[0].runs)
    titles = ["method", "lr", "size", "parameters", metric, "clients", "worst decile", f"against {first}", "p"]
    rows = [titles, ["---", "---:", "---", *["---:"] * (len(titles) - 3)]]
    rates = {entry.method: entry.rate for entry in compared}
    for line in lines_of(compared):
        spread = "" if line.spread is None else f" ± {100 * line.spread:.1f}"
        against = "" if line.against is None else f"{100 * line.against:+.1f}"
        p = "" if line.p is None else "< 0.001" if line.p < 0.001 else f"{line.p:.3f}"
        scores = [f"{percent(line.metric)}{spread}", percent(line.clients_mean), percent(line.worst_decile)]
        rows.append([line.method, f"{rates[line.method]:g}", line.size, count(line.params), *scores, against, p])
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return (
        f"{table}\nTest {metric} after the last round, mean over {seeds} seed{'s' if seeds > 1 else ''}"
        f"{' with the standard deviation' if seeds > 1 else ''}; the mean over clients of their own test examples, and over "
        f"the tenth that scores worst. Against {first}: the mean difference in points over the same clients and seeds, and the "
        "p-value of a two-sided Wilcoxon signed-rank test over them; it speaks of clients, not of further seeds."
        f"{' Learning rates were chosen on validation data.' if len(compared[0].scores) > 1 else ''}\n"
    )


def write_comparison(compared: Sequence[Compared], folder: Path) -> None:
    """Write comparison.json, comparison.md and, where matplotlib is installed, comparison.png."""
    write_file(
        folder / "comparison.json", (json.dumps(without_nan(_plain(compared)), indent=1, allow_nan=False) + "\n").encode()
    )
    write_file(folder / "comparison.md", as_markdown(compared).encode())
    if plots.is_available():
        figure = plots.by_method({entry.method: entry.runs for entry in compared})
        write_file(folder / "comparison.png", plots.rendered(figure, "png"))


def _plain(compared: Sequence[Compared]) -> dict[str, Any]:
    return {
        "metric": compared[0].runs[0].metric,
        "seeds": [run.run.get("seed") for run in compared[0].runs],
        "methods": [
            {
                "method": entry.method,
                "lr": entry.rate,
                "validation": {f"{rate:g}": score for rate, score in entry.scores.items()},
            }
            for entry in compared
        ],
        "table": [asdict(line) for line in lines_of(compared)],
    }
