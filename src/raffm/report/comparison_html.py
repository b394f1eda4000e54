"""A comparison as one HTML page, made like that of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from raffm.report.comparison import Compared, caption, shown_lines, shown_reached, switches_of
from raffm.report.html import MEANINGS, as_toml, facts_of, figures, meanings, page, table_of, tests_lead
from raffm.report.tables import number

CAPTIONS = {
    "by_size": "Every method at every size that it serves, on the common test set after the last round; bars: one standard "
    "deviation over seeds.",
    "worst_decile": "The tenth of the clients that fares worst on its own test data: what the unluckiest get.",
    "by_client": "Every client's own test data after the last round. A mean can hide a poor tail.",
    "by_bytes": "What all clients had received and sent, one panel a size.",
    "by_time": "How long devices of the fleet would have taken, one panel a size.",
}

WORDS = ("Size", "Global", "Clients", "Worst decile", "Virtual time")


def as_html(compared: Sequence[Compared], drawings: Mapping[str, str] | None) -> str:
    """The whole page. `drawings` holds SVG files by the names of the figures; None says that nothing could draw them."""
    run = compared[0].runs[0]
    title = f"{len(compared)} method{'s' * (len(compared) != 1)} on {run.data.get('name', 'data')}"
    sections = [
        ("What each method reaches", _with_note(table_of(*shown_lines(compared)), caption(compared))),
        ("Sizes, clients, bytes and time", figures(drawings, CAPTIONS)),
        ("What it took to get there", _with_note(table_of(*shown_reached(compared)), REACHED)),
        ("Switches and learning rates", _rates(compared)),
        ("Settings that all methods share", f"<pre>{escape(as_toml(_shared(compared)))}</pre>"),
        ("What the words mean", meanings({word: MEANINGS[word] for word in WORDS})),
    ]
    note = "The same numbers are in comparison.json; every run has a folder and a report of its own."
    return page(title, _lead(compared), _facts(compared), sections, note)


REACHED = (
    "For every size, what each method had spent when it came to what all of them come to in the end: the lowest of their last "
    "values at that size. Means over seeds, to within one evaluation."
)


def _with_note(body: str, note: str) -> str:
    return f'{body}<p class="note">{escape(note)}</p>'


def _lead(compared: Sequence[Compared]) -> str:
    rounds, seeds = len(compared[0].runs[0].rounds), len(compared[0].runs)
    lead = f"{rounds} round{'s' * (rounds != 1)}, {seeds} seed{'s' * (seeds != 1)}"
    return lead + tests_lead(compared[0].runs[0].run)


def _facts(compared: Sequence[Compared]) -> str:
    run = compared[0].runs[0]
    examples = ", ".join(f"{run.data[key]:,} {key}" for key in ("train", "validation", "test") if key in run.data)
    return facts_of(
        [
            ("Methods", len(compared), ", ".join(entry.method for entry in compared)),
            ("Data", run.data.get("name", "-"), examples),
            ("Clients", run.data.get("clients", "-"), ""),
            ("Model", run.model.get("family", "-"), f"{_params(compared)} parameters"),
        ]
    )


def _params(compared: Sequence[Compared]) -> str:
    found = sorted({entry.runs[0].model.get("params", 0) for entry in compared})
    return " or ".join(f"{params:,}" for params in found)


def _rates(compared: Sequence[Compared]) -> str:
    """What switches every method was given, what every rate scored on validation data, and which was taken."""
    rates = list(compared[0].scores) if len(compared[0].scores) > 1 else []
    rows = [
        [
            entry.method,
            ", ".join(f"{key} = {value}" for key, value in switches_of(entry).items()) or "as usual",
            *(number(entry.scores[rate]) for rate in rates),
            f"{entry.rate:g}",
        ]
        for entry in compared
    ]
    return table_of(["method", "switches", *(f"validation at lr {rate:g}" for rate in rates), "lr taken"], rows)


def _shared(compared: Sequence[Compared]) -> dict[str, object]:
    """The settings of the first run, but for what differs between runs."""
    shared = {key: entry for key, entry in compared[0].runs[0].run.items() if key not in ("method", "seed")}
    local = shared.get("local")
    if isinstance(local, Mapping):
        shared["local"] = {key: entry for key, entry in local.items() if key != "lr"}
    return shared
