"""Tables in Markdown, and where an experiment's tables and plots go."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raffm.report.drawing import save

MARKS = "<!-- results -->\n", "<!-- end of results -->\n"


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a heading."""
    return f"### {title}\n\n{plain_table(head, rows)}"


def plain_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table by itself."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def joined(parts: Iterable[str]) -> str:
    """The tables that are there, one after the other."""
    return "\n\n".join(part for part in parts if part) + "\n"


def filled(readme: str, text: str) -> str:
    """A README with its results' part filled."""
    inside = re.compile(f"{re.escape(MARKS[0])}.*{re.escape(MARKS[1])}", re.DOTALL)
    if not inside.search(readme):
        raise ValueError(f"a README has no place for results: {MARKS[0].strip()} and {MARKS[1].strip()}.")
    return inside.sub(lambda _: f"{MARKS[0]}\n{text}\n{MARKS[1]}", readme)


def write_report(out: Path, text: str, figures: Mapping[str, Any]) -> None:
    """Write `table.md` and the plots; `make docs` puts the tables into READMEs and on the page of results."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(text, encoding="utf-8")
    for name, figure in figures.items():
        save(figure, out / f"{name}.png")
    print(text)
