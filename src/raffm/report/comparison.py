"""Several methods in one table: means and spread over seeds, and a paired test over clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import isfinite
from statistics import fmean, stdev
from typing import Any

from raffm.report.tables import count, duration, habits_note, percent, size_of
from raffm.rounds.results import Results, Round, Size, without_nan


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
        spread=stdev(tested) if len(tested) > 1 and all(map(isfinite, tested)) else None,
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


# -- what it took to get there ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reached:
    """What a method had spent when a size reached a goal, means over seeds: rounds, bytes of all clients, virtual seconds."""

    method: str
    size: str
    goal: float
    rounds: float
    bytes: float
    seconds: float


def first_views(results: Results) -> dict[float, str]:
    """The name of every nominal size, largest first; of several views the first."""
    found: dict[float, str] = {}
    for size in sorted(results.sizes, key=lambda size: -size.size):
        found.setdefault(size.size, size.name)
    return found


def path_of(run: Results, name: str, cost: Callable[[Round], float]) -> list[tuple[float, float]]:
    """What had been spent at every evaluation of a size, and its test metric there."""
    spent = dict(zip((entry.round for entry in run.rounds), accumulate(map(cost, run.rounds)), strict=True))
    return [(spent.get(entry.round, 0.0), entry.sizes[name].test[run.metric]) for entry in run.evaluations]


def mean_path(runs: Sequence[Results], size: float, cost: Callable[[Round], float]) -> list[tuple[float, float]]:
    """The same, mean over seeds."""
    paths = [path_of(run, first_views(run)[size], cost) for run in runs]
    return [(fmean(spent for spent, _ in points), fmean(value for _, value in points)) for points in zip(*paths, strict=False)]


def reached(compared: Sequence[Compared]) -> list[Reached]:
    """What every method took at every size to what all that serve it come to: the lowest of their last values."""
    found = []
    for size in sorted({size for entry in compared for size in first_views(entry.runs[0])}, reverse=True):
        serving = [entry for entry in compared if size in first_views(entry.runs[0])]
        goal = min(mean_path(entry.runs, size, _rounds)[-1][1] for entry in serving)
        found += [_reached(entry, size, goal) for entry in serving]
    return found


def _reached(entry: Compared, size: float, goal: float) -> Reached:
    """What was spent at the first evaluation at the goal; the last is always there, unless it is no number."""
    values = [value for _, value in mean_path(entry.runs, size, _rounds)]
    place = next((place for place, value in enumerate(values) if value >= goal), len(values) - 1)
    spent = [mean_path(entry.runs, size, cost)[place][0] for cost in (_rounds, _bytes, _seconds)]
    return Reached(entry.method, first_views(entry.runs[0])[size], goal, *spent)


def _rounds(entry: Round) -> float:
    return 1.0


def _bytes(entry: Round) -> float:
    return float(entry.bytes_up + entry.bytes_down)


def _seconds(entry: Round) -> float:
    return entry.seconds


# -- for people ------------------------------------------------------------------------------------------------------


def shown_lines(compared: Sequence[Compared]) -> tuple[list[str], list[list[str]]]:
    """The headings and rows of the table as people read them."""
    titles = ["method", "lr", "size", "parameters", compared[0].runs[0].metric, "clients", "worst decile"]
    rates = {entry.method: entry.rate for entry in compared}
    rows = []
    for line in lines_of(compared):
        spread = "" if line.spread is None else f" ± {100 * line.spread:.1f}"
        against = "" if line.against is None else f"{100 * line.against:+.1f}"
        p = "" if line.p is None else "< 0.001" if line.p < 0.001 else f"{line.p:.3f}"
        scores = [f"{percent(line.metric)}{spread}", percent(line.clients_mean), percent(line.worst_decile)]
        rows.append([line.method, f"{rates[line.method]:g}", line.size, count(line.params), *scores, against, p])
    return [*titles, f"against {compared[0].method}", "p"], rows


def shown_reached(compared: Sequence[Compared]) -> tuple[list[str], list[list[str]]]:
    """What it took, as people read it."""
    titles = ["size", "to", "method", "rounds", "bytes", "virtual time"]
    return titles, [
        [found.size, percent(found.goal), found.method, f"{found.rounds:g}", size_of(found.bytes), duration(found.seconds)]
        for found in reached(compared)
    ]


def caption(compared: Sequence[Compared]) -> str:
    """What the numbers of the table are."""
    first, metric, seeds = compared[0].method, compared[0].runs[0].metric, len(compared[0].runs)
    return (
        f"Test {metric} after the last round, mean over {seeds} seed{'s' if seeds > 1 else ''}"
        f"{' with the standard deviation' if seeds > 1 else ''}; the mean over clients of their own test examples, and over "
        f"the tenth that scores worst. Against {first}: the mean difference in points over the same clients and seeds, and the "
        "p-value of a two-sided Wilcoxon signed-rank test over them; it speaks of clients, not of further seeds."
        f"{' Learning rates were chosen on validation data.' if len(compared[0].scores) > 1 else ''}"
        f"{_full_models(compared)}{habits_note(compared[0].runs[0].run)}"
    )


def _full_models(compared: Sequence[Compared]) -> str:
    """A sentence where methods train full models of different sizes."""
    found = {entry.method: entry.runs[0].model.get("params") for entry in compared}
    usual = Counter(found.values()).most_common(1)[0][0]
    others = [f"{method}'s has {count(params)} parameters" for method, params in found.items() if params != usual]
    if not others:
        return ""
    return f" A size is a part of each method's own full model: {', '.join(others)} (early heads), the others' {count(usual)}."


def as_markdown(compared: Sequence[Compared]) -> str:
    """The table for people."""
    titles, rows = shown_lines(compared)
    lines = [titles, ["---", "---:", "---", *["---:"] * (len(titles) - 3)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{caption(compared)}\n"


def switches_of(entry: Compared) -> dict[str, Any]:
    """The switches that a method was given; others have their usual values."""
    given = entry.runs[0].run.get("method", {})
    return {key: value for key, value in given.items() if key != "name"} if isinstance(given, Mapping) else {}


def as_json(compared: Sequence[Compared]) -> dict[str, Any]:
    """Everything in plain values."""
    content = {
        "metric": compared[0].runs[0].metric,
        "seeds": [run.run.get("seed") for run in compared[0].runs],
        "tests": habits_note(compared[0].runs[0].run).strip() or "honest",
        "methods": [
            {
                "method": entry.method,
                "switches": switches_of(entry),
                "lr": entry.rate,
                "validation": {f"{rate:g}": score for rate, score in entry.scores.items()},
            }
            for entry in compared
        ],
        "table": [asdict(line) for line in lines_of(compared)],
        "reached": [asdict(found) for found in reached(compared)],
    }
    plain: dict[str, Any] = without_nan(content)
    return plain
