"""The explorer: a page on which one moves a budget and sees the best submodel within it. Needs nothing but a browser."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from raffm.models.files import read_json
from raffm.report.html import page

STYLE = """<style>
#explorer .controls { display: flex; flex-wrap: wrap; gap: .5rem 1.5rem; align-items: center; margin: .75rem 0; }
#explorer input[type=range] { flex: 1 1 16rem; min-width: 12rem; height: 2rem; accent-color: rgb(var(--accent)); }
#explorer label { display: inline-flex; gap: .35rem; align-items: center; min-height: 2rem; }
#explorer svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: var(--ink); }
#explorer .grid { stroke: var(--grid); } #explorer .judged { fill: var(--muted); opacity: .45; }
#explorer .finalist { fill: rgb(var(--accent)); cursor: pointer; } #explorer .front { fill: none; stroke: rgb(var(--accent)); }
#explorer .picked { fill: #d55e00; cursor: pointer; } #explorer .beyond { fill: var(--muted); opacity: .15; }
#explorer .whole { fill: var(--panel); stroke: var(--grid); } #explorer .kept { fill: rgb(var(--accent)); }
#explorer tr.picked td { background: rgba(var(--accent), .15); fill: none; }
#explorer th button { all: unset; cursor: pointer; }
#explorer th button:focus-visible { outline: 2px solid rgb(var(--accent)); }
#explorer th[aria-sort=descending] button::after { content: " \\25BE"; }
#explorer th[aria-sort=ascending] button::after { content: " \\25B4"; }
#explorer .pick { font-weight: 600; } #explorer pre { white-space: pre-wrap; overflow-wrap: anywhere; }
</style>"""

KINDS = {"params": "parameters", "flops": "FLOPs", "latency": "ms here", "memory": "bytes while it runs", "bytes": "bytes"}


def explorer_of(search: Mapping[str, Any], command: str) -> str:
    """The explorer of a search (the content of its search.json) as part of a page.

    `command` exports a finalist; NUMBER in it stands for the finalist's number.
    """
    entries = {name: [_entry(each, number) for number, each in enumerate(search[name])] for name in ("judged", "finalists")}
    known = [set(each["costs"]) for each in entries["finalists"]]
    kinds = [{"key": key, "title": title} for key, title in KINDS.items() if all(key in costs for costs in known)]
    data = {
        "metric": search["metric"],
        "kinds": kinds,
        "full": search["full"],
        "command": command,
        **entries,
    }
    return _body(kinds, search) + _script(data)


def explorer_page(search: Mapping[str, Any], command: str) -> str:
    """A page with nothing but the explorer."""
    lead = f"{len(search['judged'])} submodels judged, {len(search['finalists'])} of them on all validation examples"
    sections = [("The best submodel for a budget", explorer_of(search, command))]
    return page("Submodels", lead, "", sections, "The same numbers are in search.json.")


def explorer_in(folder: Path) -> str:
    """The explorer of the search that a run's folder holds; nothing where there is none."""
    path = folder / "search" / "search.json"
    if not path.is_file():
        return ""
    content = read_json(path)
    return explorer_of(content, command_for(folder, any_of(path), is_last=content.get("is_last", False)))


def command_for(run: Path, submodel: str, data: str | None = None, is_last: bool = False) -> str:
    """What exports a submodel of a search; `submodel` is its file, quoted, with what else picks it."""
    source = "" if data is None else f" --data {shlex.quote(data)}"
    return f"raffm export {shlex.quote(str(run))}{source}{' --last' if is_last else ''} --submodel {submodel} --format onnx"


def any_of(search: Path) -> str:
    """Any finalist of a search, for a command."""
    return f"{shlex.quote(str(search))} --pick NUMBER"


def _entry(candidate: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A candidate as the page reads it; its latency is the one that was measured, in milliseconds."""
    costs = dict(candidate["costs"])
    if candidate["latency"] is not None:
        costs["latency"] = 1000 * candidate["latency"][0]
    else:
        costs.pop("latency", None)
    return {"number": number, "sizes": candidate["sizes"], "costs": costs, "score": candidate["score"]}


def _body(kinds: list[dict[str, str]], search: Mapping[str, Any]) -> str:
    choices = "".join(
        f'<label><input type="radio" name="explorer-kind" value="{kind["key"]}"{" checked" * (place == 0)}>'
        f"{escape(kind['title'])}</label>"
        for place, kind in enumerate(kinds)
    )
    heads = [("number", "number"), ("score", escape(search["metric"])), *((kind["key"], kind["title"]) for kind in kinds)]
    head = "".join(
        f'<th scope="col" data-key="{key}"><button type="button">{escape(title)}</button></th>' for key, title in heads
    )
    return f"""{STYLE}<div id="explorer">
<p class="note">The space holds {search["submodels"]:.3g} submodels. Small dots were judged on a few validation examples,
large ones on all of them; the line is the front. Move the budget: the best submodel within it is picked.</p>
<fieldset class="controls" style="border: 0; padding: 0"><legend class="note">Cost</legend>{choices}</fieldset>
<div class="controls"><label for="explorer-budget">Budget</label>
<input id="explorer-budget" type="range" min="0" max="1000" step="1" aria-describedby="explorer-budget-text">
<output id="explorer-budget-text" for="explorer-budget"></output></div>
<div class="plots"><figure>
<svg id="explorer-scatter" viewBox="0 0 640 376" role="img" aria-label="Scores by cost"></svg></figure>
<figure><p class="pick" id="explorer-pick" aria-live="polite"></p>
<svg id="explorer-widths" role="img" viewBox="0 0 600 200"></svg>
<figcaption>What the picked submodel keeps of every layer; the outline is the full model.</figcaption></figure></div>
<pre><code id="explorer-command"></code></pre><button type="button" id="explorer-copy">copy</button>
<details><summary>All finalists</summary><div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>
<tbody id="explorer-rows"></tbody></table></div></details>
<noscript><p>The explorer needs JavaScript; search.json has the same numbers.</p></noscript></div>"""


def _script(data: Mapping[str, Any]) -> str:
    content = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    code = files("raffm.report").joinpath("explorer.js").read_text(encoding="utf-8")
    return f'<script type="application/json" id="explorer-data">{content}</script><script>{code}</script>'
