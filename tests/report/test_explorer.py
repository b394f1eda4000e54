"""The explorer in a real browser: it moves, it says what to do, it fetches nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raffm.report.explorer import command_for, explorer_of, explorer_page

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def candidate(params: int, score: float, latency: float | None) -> dict[str, Any]:
    return {
        "sizes": {"layers.0.ffn": params // 10, "layers.1.ffn": params // 20, "width": 8},
        "costs": {"params": params, "flops": 3 * params},
        "score": score,
        "examples": 10,
        "latency": None if latency is None else [latency, latency, latency],
    }


SEARCH = {
    "metric": "accuracy",
    "submodels": 1e12,
    "cost": "params",
    "limits": {},
    "ranking": "l1_norm",
    "full": {"layers.0.ffn": 100, "layers.1.ffn": 100, "width": 8},
    "judged": [candidate(place * 10, place / 100, None) for place in range(10, 100, 5)],
    "finalists": [
        candidate(200, 0.5, 0.003),
        candidate(400, 0.7, 0.001),
        candidate(600, 0.6, 0.002),
        candidate(900, 0.9, 0.004),
    ],
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Shown:
    """A page that was opened, with all that it complained of or asked for."""

    def __init__(self, browser: Any, path: Path, width: int = 1200) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900})
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def text(self, name: str) -> str:
        found: str = self.page.inner_text(f"#explorer-{name}")
        return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    page = tmp_path / "explorer.html"
    page.write_text(explorer_page(SEARCH, command_for(Path("runs/a"), Path("runs/a/search/search.json"))), encoding="utf-8")
    return page


def test_the_slider_moves_and_the_pick_changes(browser: Any, path: Path) -> None:
    shown = Shown(browser, path)
    assert shown.text("pick").startswith("Number 3: 90.00 % accuracy")
    assert shown.text("command") == "raffm export runs/a --submodel runs/a/search/search.json --pick 3 --format onnx"
    shown.page.focus("#explorer-budget")
    shown.page.keyboard.press("Home")
    assert shown.text("pick").startswith("Number 0: 50.00 %")
    assert shown.text("budget-text") == "at most 200 parameters"
    shown.page.fill("#explorer-budget", "650")  # 655 parameters: number 2 fits, but number 1 is better and smaller
    assert shown.text("pick").startswith("Number 1: 70.00 %")
    assert "--pick 1 " in shown.text("command")
    assert shown.page.locator("#explorer-widths .kept").count() == 3
    assert shown.page.locator("#explorer-scatter .finalist").count() == 3
    assert shown.page.locator("#explorer-scatter .judged").count() == len(SEARCH["judged"])  # type: ignore[arg-type]
    assert shown.complaints == []
    assert shown.asked == [path.as_uri()], "nothing is fetched"


def test_another_cost_gives_another_pick(browser: Any, path: Path) -> None:
    shown = Shown(browser, path)
    shown.page.check("input[value=latency]")
    assert shown.text("pick").startswith("Number 3")
    shown.page.focus("#explorer-budget")
    shown.page.keyboard.press("Home")
    assert shown.text("pick").startswith("Number 1")
    assert shown.text("budget-text") == "at most 1 ms here"
    assert shown.complaints == []


def test_a_dot_sets_the_budget_and_tables_are_sorted_by_keyboard(browser: Any, path: Path) -> None:
    shown = Shown(browser, path)
    shown.page.locator("#explorer-scatter .finalist").nth(1).click()
    assert shown.text("pick").startswith("Number 1")
    shown.page.locator("summary").click()
    firsts = shown.page.locator("#explorer-rows td:first-child")
    assert firsts.all_inner_texts() == ["3", "1", "2", "0"], "by score"
    shown.page.focus("th[data-key=params] button")
    shown.page.keyboard.press("Enter")
    assert firsts.all_inner_texts() == ["0", "1", "2", "3"]
    assert shown.page.get_attribute("th[data-key=params]", "aria-sort") == "ascending"
    shown.page.keyboard.press("Enter")
    assert firsts.all_inner_texts() == ["3", "2", "1", "0"]


@pytest.mark.parametrize("width", [360, 1200])
def test_it_fits_a_phone(browser: Any, path: Path, width: int) -> None:
    shown = Shown(browser, path, width)
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width


def test_names_cannot_break_out_of_the_page() -> None:
    odd = json.loads(json.dumps(SEARCH).replace("width", "</script><script>alert(1)</script>"))
    assert "<script>alert" not in explorer_of(odd, "command")
