"""A run as one HTML page that needs nothing else: no script, no network, light and dark, wide and narrow screens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import isfinite
from typing import Any

from raffm.report import tables
from raffm.report.drawing import GRID, INK, MUTED
from raffm.rounds.results import Results, Round, Scores

CAPTIONS = {
    "by_round": "Every size on the common test set, by round, and the mean training loss of the clients that came back.",
    "by_parameters": "What a larger model buys: every size after the last evaluation.",
    "by_client": "Every client's own test data, after the last evaluation, one panel a size. A mean can hide a poor tail.",
    "by_time": "The same curves by virtual time: how long devices of the fleet would have taken.",
}

MEANINGS = {
    "Size": "A submodel that devices are given, named by its nominal share of the full model's parameters. "
    "The true fraction is what it really holds.",
    "Down, up": "Bytes that one client receives and sends in one round when it trains this size.",
    "FLOPs": "Operations of the forward pass of one example.",
    "Global": "The submodel on one common test set that no client trained on.",
    "Clients": "The submodel on each client's own test data, each counted once. Clients without test data do not count.",
    "Worst decile": "The mean of the tenth of the clients that fare worst: what the unluckiest get.",
    "Last round": "After the last evaluation, whatever it gave.",
    "Mean of last": "The mean over the last evaluations: less a matter of luck than one of them.",
    "Best on validation": "The test value in the round whose validation value, mean over sizes, was best. "
    "The test set never chooses anything: not this round, not a setting, not a size.",
    "Virtual time": "How long the rounds would have taken on the fleet's devices: work over speed plus bytes over bandwidth, "
    "by the slowest client that was waited for. Speeds and bandwidths that the fleet does not state are assumed.",
}

STYLE = """
:root { color-scheme: light dark; --ink: #1b2330; --muted: #5b6475; --page: #ffffff; --panel: #f6f7f9; --grid: #dfe3ea;
  --accent: 0, 114, 178; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaf0; --muted: #a3acbc; --page: #14171c; --panel: #1d2129;
  --grid: #363c47; --accent: 86, 180, 233; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem clamp(1rem, 4vw, 2.5rem) 4rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .75rem; font-size: 1.15rem; }
.lead, .note, figcaption, footer { color: var(--muted); }
.lead { margin: .25rem 0 1.25rem; }
footer { margin-top: 2.5rem; }
.note { font-size: .9rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .75rem; margin: 0; }
.facts div { padding: .6rem .8rem; background: var(--panel); border-radius: .5rem; overflow-wrap: anywhere; }
.facts dt { color: var(--muted); font-size: .8rem; }
.facts dd { margin: 0; font-weight: 600; }
.facts small { display: block; color: var(--muted); font-weight: 400; }
.wide { overflow-x: auto; border: 1px solid var(--grid); border-radius: .5rem; }
table { width: 100%; border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .42rem; text-align: right; white-space: nowrap; }
th { vertical-align: bottom; font-weight: 600; white-space: normal; text-wrap: balance; }
th:first-child, td:first-child { padding-left: .7rem; position: sticky; left: 0; background: var(--page);
  text-align: left; white-space: nowrap; }
thead th { border-bottom: 1px solid var(--grid); }
tbody tr + tr > * { border-top: 1px solid var(--grid); }
.words td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.words th { text-align: left; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 1.5rem;
  align-items: start; }
figure { margin: 0; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif !important; }
figcaption { margin-top: .4rem; font-size: .85rem; }
.matrix { max-width: 42rem; }
details { margin: .75rem 0; }
summary { cursor: pointer; font-weight: 600; }
details > .wide { margin-top: .75rem; max-height: 32rem; overflow-y: auto; }
pre { margin: .75rem 0 0; padding: 1rem; overflow-x: auto; background: var(--panel); border-radius: .5rem; font-size: .85rem; }
.meanings { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: .5rem 1.25rem; margin: 0;
  font-size: .92rem; }
.meanings dt { font-weight: 600; }
.meanings dd { margin: 0; }
@media (max-width: 34rem) { .meanings { grid-template-columns: 1fr; gap: 0; } .meanings dd { margin-bottom: .75rem; } }
@media print { details > * { display: block; } .wide { overflow: visible; } }
"""


def as_html(results: Results, drawings: Mapping[str, str] | None, explorer: str = "") -> str:
    """The whole page. `drawings` holds SVG files by the names of `plots.FIGURES`; None says that nothing could draw them.

    `explorer` is that of a search, if there was one.
    """
    title = f"{results.method} on {results.data.get('name', 'data')}"
    note = "The same numbers are in results.json and metrics.csv."
    sections = _sections(results, drawings)
    sections.insert(1, ("The best submodel for a budget", explorer))
    return page(title, _progress(results) + tests_lead(results.run), _facts(results), sections, note)


def tests_lead(run: Mapping[str, Any]) -> str:
    """What the first line adds where tests are as published, so that nobody overlooks it."""
    note = tables.habits_note(run)
    return f".{note}" if note else ""


def page(title: str, lead: str, facts: str, sections: Iterable[tuple[str, str]], note: str) -> str:
    """A page: a title, a sentence, facts as HTML, sections with HTML in them, and a note at the end."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} - raffm</title>
<style>{STYLE}</style>
</head>
<body>
<header><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>{facts}</header>
<main>
{"".join(_section(heading, body) for heading, body in sections if body)}
</main>
<footer class="note">Written by raffm. {escape(note)}</footer>
</body>
</html>
"""


def _sections(results: Results, drawings: Mapping[str, str] | None) -> list[tuple[str, str]]:
    return [
        ("What each size reaches", _headline(results)),
        ("Curves and spread", figures(drawings, CAPTIONS)),
        (f"Global and clients: {tables.name_of(results.metric)} after the last evaluation", _matrix(results)),
        ("Refused clients", _refused(results)),
        ("Every round", _rounds(results)),
        ("Settings", f"<pre>{escape(as_toml(results.run))}</pre>" if results.run else ""),
        ("What the words mean", meanings(MEANINGS)),
    ]


def _section(heading: str, body: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>\n{body}\n</section>\n"


def _progress(results: Results) -> str:
    rounds, evaluations = len(results.rounds), len(results.evaluations)
    return f"{rounds} round{'s' * (rounds != 1)}, {evaluations} evaluation{'s' * (evaluations != 1)}"


def _facts(results: Results) -> str:
    """What was run and what it cost, as a grid of small cards."""
    model, data = results.model, results.data
    parts = [f"{data[key]:,} {key}" for key in ("train", "validation", "test") if isinstance(data.get(key), int)]
    classes = f"{data['classes']} classes; " if data.get("classes") else ""
    size = f"{tables.count(model.get('params'))} parameters"
    facts = [
        ("Method", results.method, ""),
        ("Model", model.get("class", "-"), "; ".join([*filter(None, [_plain(model.get("family"))]), size])),
        ("Data", data.get("name", "-"), classes + ", ".join(parts)),
        ("Clients", data.get("clients", "-"), ""),
        ("Fleet", _fleet(results.run) or ", ".join(entry.name for entry in results.sizes), ""),
        ("Seed", _plain(_setting(results.run, "seed")) or "-", ""),
        *[(name, value, "") for name, value in tables.totals(results)],
    ]
    return facts_of(facts)


def facts_of(facts: Iterable[tuple[str, Any, str]]) -> str:
    """Names, values and remarks as a grid of small cards."""
    return f'<dl class="facts">{"".join(_fact(*fact) for fact in facts)}</dl>'


def _fact(name: str, value: Any, remark: str) -> str:
    small = f"<small>{escape(remark)}</small>" if remark else ""
    return f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}{small}</dd></div>"


def _fleet(run: Mapping[str, Any]) -> str:
    """The fleet by its name, or size by size with how many devices of each there are to the others."""
    fleet = _setting(run, "fleet")
    tiers = fleet.get("tiers", fleet) if isinstance(fleet, Mapping) else fleet
    if isinstance(tiers, list | tuple) and all(isinstance(tier, Mapping) for tier in tiers):
        return ", ".join(f"{_plain(tier.get('size'))} ({tier.get('share', 1):g})" for tier in tiers)
    return _plain(tiers)


def _plain(value: Any) -> str:
    """A setting in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return "" if value is None else str(value)


def _headline(results: Results) -> str:
    return table_of(*tables.shown_table(results)) + f'<p class="note">{escape(tables.caption(results))}</p>'


def table_of(titles: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table of texts."""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return _framed(f'<table class="{kind}"><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>')


def _framed(table: str, kind: str = "") -> str:
    """A table that scrolls by itself on a narrow screen, also by keyboard."""
    return f'<div class="wide {kind}" tabindex="0">{table}</div>'


def figures(drawings: Mapping[str, str] | None, captions: Mapping[str, str]) -> str:
    """SVG files by name as figures with their captions."""
    if drawings is None:
        return '<p class="note">No plots: matplotlib is not installed. Run <code>pip install raffm[plots]</code>.</p>'
    return f'<div class="plots">{"".join(_figure(name, drawing, captions[name]) for name, drawing in drawings.items())}</div>'


def _figure(name: str, drawing: str, caption: str) -> str:
    caption = escape(caption)
    return f"<figure>{_inline(name, drawing, caption)}<figcaption>{caption}</figcaption></figure>\n"


def _inline(name: str, drawing: str, label: str) -> str:
    """An SVG file as part of a page: in the page's colours, with names of its own, and without addresses."""
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r' xmlns(:\w+)?="[^"]*"', "", drawing)
    drawing = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", drawing).replace("xlink:href", "href")
    for colour, variable in ((INK, "--ink"), (GRID, "--grid"), (MUTED, "--muted")):
        drawing = drawing.replace(colour, f"var({variable})")
    return drawing.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _matrix(results: Results) -> str:
    """Sizes against what is measured, darker where better."""
    last = results.last_round
    if last is None:
        return ""
    rows = {name: _three(scores, results.metric) for name, scores in last.sizes.items()}
    known = [value for row in rows.values() for value in row if value is not None and isfinite(value)]
    titles = ("size", "global test", "clients mean", "clients worst decile")
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(_cell(value, known) for value in row)}</tr>\n'
        for name, row in rows.items()
    )
    return _framed(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>", "matrix")


def _three(scores: Scores, metric: str) -> list[float | None]:
    return [part.get(metric) for part in (scores.test, scores.clients_mean, scores.clients_worst_decile)]


def _cell(value: float | None, known: Sequence[float]) -> str:
    if value is None or not isfinite(value):
        return "<td>-</td>"
    spread = max(known) - min(known)
    strength = 0.04 + 0.36 * ((value - min(known)) / spread if spread else 0.0)
    return f'<td style="background: rgba(var(--accent), {strength:.2f})">{tables.number(value)}</td>'


def _refused(results: Results) -> str:
    refusals = [
        (str(entry.round), client, reason) for entry in results.rounds for client, reason in sorted(entry.refused.items())
    ]
    return table_of(("round", "client", "why its update was refused"), refusals, "words") if refusals else ""


def _rounds(results: Results) -> str:
    if not results.rounds:
        return ""
    scores = {entry.round: entry.sizes for entry in results.evaluations}
    names = [size.name for size in results.sizes]
    titles = ["round", "loss", "clients", "dropped", "late", "refused", "down", "up", "FLOPs", "virtual time"]
    metric = tables.name_of(results.metric)
    rows = [[*_round(entry), *_scored(scores.get(entry.round, {}), names, results.metric)] for entry in results.rounds]
    table = table_of([*titles, *[f"{name} {metric}" for name in names]], rows)
    return f"<details><summary>Show all {len(rows)} rounds</summary>{table}</details>"


def _round(entry: Round) -> list[str]:
    people = [len(entry.clients), len(entry.dropped), len(entry.late), len(entry.refused)]
    sent = [tables.size_of(entry.bytes_down), tables.size_of(entry.bytes_up)]
    return [str(entry.round), tables.number(entry.loss), *map(str, people), *sent, tables.count(entry.flops), _time(entry)]


def _time(entry: Round) -> str:
    return tables.duration(entry.seconds)


def _scored(sizes: Mapping[str, Scores], names: Sequence[str], metric: str) -> list[str]:
    return [tables.number(sizes[name].test.get(metric)) if name in sizes else "" for name in names]


def meanings(terms: Mapping[str, str]) -> str:
    """Words and what they mean."""
    return f'<dl class="meanings">{"".join(f"<dt>{term}</dt><dd>{meaning}</dd>" for term, meaning in terms.items())}</dl>'


def as_toml(settings: Mapping[str, Any]) -> str:
    """The settings as text that reads like the TOML file they came from."""
    return _toml(settings, "").strip() + "\n"


def _setting(settings: Mapping[str, Any], key: str) -> Any:
    """A setting by its name, from the top or from one of the tables; None where there is none."""
    if key in settings:
        return settings[key]
    return next((table[key] for table in settings.values() if isinstance(table, Mapping) and key in table), None)


def _toml(settings: Mapping[str, Any], path: str) -> str:
    lines = [f"{_key(key)} = {_value(entry)}\n" for key, entry in settings.items() if not isinstance(entry, Mapping | None)]
    tables = {key: entry for key, entry in settings.items() if isinstance(entry, Mapping)}
    for key, entry in tables.items():
        place = f"{path}.{_key(key)}" if path else _key(key)
        lines.append(f"\n[{place}]\n{_toml(entry, place)}")
    return "".join(lines)


def _key(key: Any) -> str:
    bare = str(key).replace("-", "").replace("_", "")
    return str(key) if bare.isascii() and bare.isalnum() else json.dumps(str(key), ensure_ascii=False)


def _value(entry: Any) -> str:
    if isinstance(entry, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in entry.items()) + " }"
    if isinstance(entry, list | tuple):
        return "[" + ", ".join(map(_value, entry)) + "]"
    if isinstance(entry, bool | str):
        return json.dumps(entry, ensure_ascii=False)
    return str(entry)
