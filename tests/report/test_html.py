import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from raffm.report.drawing import rendered
from raffm.report.html import as_html, as_toml
from raffm.report.plots import FIGURES
from raffm.report.tables import number, shown_table
from raffm.rounds.results import Results
from report.sample import HOSTILE, VIEWED, hostile, results

VOID = {"meta", "br", "link", "img"}


class Page(HTMLParser):
    """Tags, attributes and texts of a page whose tags must close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def written(run: Results) -> str:
    return as_html(run, {name: rendered(draw(run), "svg").decode() for name, draw in FIGURES.items()})


@pytest.fixture(scope="module")
def page() -> str:
    return written(results(VIEWED))


def test_the_page_is_well_formed_and_has_all_plots(page: str) -> None:
    assert Page(page).tags.count("svg") == len(FIGURES)


def test_the_page_loads_nothing(page: str) -> None:
    assert "http://" not in page
    assert "https://" not in page
    assert not re.search(r"@import|url\((?!#)|src=|<link|<script", page)
    assert all((value or "").startswith("#") for name, value in Page(page).attributes if name.endswith("href"))


def test_names_inside_drawings_are_unique_and_resolve(page: str) -> None:
    names = [value for name, value in Page(page).attributes if name == "id"]
    assert len(names) == len(set(names))
    assert set(re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', page)) <= {(name, "") for name in names} | {
        ("", name) for name in names
    }


def test_drawings_follow_the_colours_of_the_page(page: str) -> None:
    body = page.split("</head>")[1]
    assert "var(--ink)" in body
    assert "#1b2330" not in body
    assert "#ffffff" not in body


def test_the_page_holds_every_number_of_the_table(page: str) -> None:
    titles, rows = shown_table(results(VIEWED))
    text = Page(page).text
    assert all(cell in text for line in (titles, *rows) for cell in line)


def test_the_page_tells_what_was_run(page: str) -> None:
    text = Page(page).text
    for words in (
        "raffm on cifar100",
        "ViTForImageClassification",
        "85.8 M parameters",
        "1/16: 0.5",
        "45,000 train",
        "alpha = 0.1",
    ):
        assert words in text


def test_the_page_says_that_the_test_set_never_chooses(page: str) -> None:
    assert "The test set never chooses anything" in page


def test_every_round_is_there_but_folded(page: str) -> None:
    run = results(VIEWED)
    assert "<details>" in page
    assert all(number(entry.loss) in page for entry in run.rounds)


def test_refused_clients_are_named_where_there_are_any(page: str) -> None:
    assert "the update holds nan" in page
    none = replace(results(), rounds=tuple(replace(entry, refused={}) for entry in results().rounds))
    assert "Refused clients" not in as_html(none, {})


def test_hostile_strings_stay_text() -> None:
    found = Page(written(hostile()))
    assert "script" not in found.tags
    assert found.text.count(HOSTILE) > 20
    assert "https://example.org/x.css" in found.text
    assert all("example.org" not in (value or "") for _, value in found.attributes)


@pytest.mark.parametrize("evaluations", [0, 1])
def test_a_young_run_has_a_page(evaluations: int) -> None:
    text = Page(written(results(evaluations=evaluations))).text
    assert f"{evaluations} evaluation" in text


def test_a_run_without_any_facts_has_a_page() -> None:
    bare = Results(run={}, method="fedavg", model={}, data={}, metric="accuracy", sizes=())
    text = Page(as_html(bare, {})).text
    assert "fedavg on data" in text
    assert "Settings" not in text


def test_without_matplotlib_the_page_says_so() -> None:
    assert "pip install raffm[plots]" in Page(as_html(results(), None)).text


def test_clients_without_test_data_leave_a_dash() -> None:
    run = results(evaluations=1)
    (entry,) = run.evaluations
    sizes = {name: replace(scores, clients_mean={}, clients_worst_decile={}) for name, scores in entry.sizes.items()}
    assert "<td>-</td>" in as_html(replace(run, evaluations=(replace(entry, sizes=sizes),)), {})


def test_a_round_from_which_nobody_came_back_has_a_dash_for_its_loss() -> None:
    run = results(evaluations=1)
    page = as_html(replace(run, rounds=(replace(run.rounds[0], loss=None, clients=()),)), {})
    assert "<tr><td>1</td><td>-</td><td>0</td>" in page


def test_settings_read_like_the_toml_they_came_from() -> None:
    import tomllib

    settings = {"seed": 7, "on": True, "a b": [1, 'x"y'], "data": {"name": "c", "more": {"1/4": 0.5}}, "many": [{"k": 1}]}
    assert tomllib.loads(as_toml(settings)) == settings
