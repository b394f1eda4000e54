import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import run
from xml.etree import ElementTree

import pytest
from PIL import Image

from raffm.report.drawing import LINES, rendered, save
from raffm.report.plots import FIGURES, by_client, by_parameters, by_round, by_time, looks
from raffm.rounds.results import Results
from report.sample import PLAIN, VIEWED, hostile, results

MANY = tuple((f"1/{2**power}", 0.5**power, "") for power in range(9))

RUNS: dict[str, Callable[[], Results]] = {
    "plain": results,
    "viewed": lambda: results(VIEWED),
    "three views": lambda: results((("1", 1.0, "a"), ("1 b", 1.0, "b"), ("1 c", 1.0, "windows"))),
    "many sizes": lambda: results(MANY),
    "one size": lambda: results(PLAIN[:1]),
    "no sizes": lambda: results((), evaluations=0),
    "no evaluations": lambda: results(evaluations=0),
    "one evaluation": lambda: results(evaluations=1),
    "another metric": lambda: results(metric="perplexity"),
    "hostile": hostile,
    "nobody came back": lambda: replace(results(), rounds=tuple(replace(entry, loss=None) for entry in results().rounds)),
    "no virtual time": lambda: replace(results(), rounds=tuple(replace(entry, seconds=0.0) for entry in results().rounds)),
    "no client with test data": lambda: replace(results(), client_scores={"1": [None, None], "1/4": [0.5]}),
    "client scores above one": lambda: replace(results(), client_scores={"1": [3.0, 9.0], "1/4": [3.0]}),
}


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("name", FIGURES)
def test_every_run_can_be_drawn(name: str, kind: str) -> None:
    drawing = rendered(FIGURES[name](RUNS[kind]()), "svg")
    assert ElementTree.fromstring(drawing).tag.endswith("svg")


def test_the_same_run_gives_the_same_drawing() -> None:
    assert rendered(by_round(results()), "svg") == rendered(by_round(results()), "svg")


def test_a_png_has_150_dots_an_inch(tmp_path: Path) -> None:
    save(by_time(results()), tmp_path / "time.png")
    with Image.open(tmp_path / "time.png") as image:
        assert image.size == (960, 570)
        assert image.info["dpi"] == pytest.approx((150, 150), abs=0.1)


def test_views_of_a_size_share_its_colour_and_differ_in_line() -> None:
    found = looks(results(VIEWED))
    assert found["1/4"].colour == found["1/4 windows"].colour != found["1/16"].colour
    assert (found["1/4"].line, found["1/4 windows"].line) == LINES[:2]


def test_a_size_keeps_its_colour_in_every_plot() -> None:
    figures = [by_round(results()), by_time(results()), by_parameters(results())]
    colours = [[line.get_color() for line in figure.axes[0].lines] for figure in figures]
    assert colours[0] == colours[1] == colours[2] == [look.colour for look in looks(results()).values()]


def test_curves_show_the_scores() -> None:
    run = results()
    line = by_round(run).axes[0].lines[1]
    assert list(line.get_xdata()) == [entry.round for entry in run.evaluations]
    assert list(line.get_ydata()) == [entry.sizes["1/4"].test["accuracy"] for entry in run.evaluations]


def test_time_adds_up_over_rounds() -> None:
    run = results()
    minutes = by_time(run).axes[0].lines[0].get_xdata()
    assert minutes[0] == pytest.approx(sum(entry.seconds for entry in run.rounds[:5]) / 60)
    assert minutes[-1] == pytest.approx(sum(entry.seconds for entry in run.rounds) / 60)


def test_every_client_with_test_data_is_in_the_histogram() -> None:
    run = results()
    known = [value for value in run.client_scores["1/4"] if value is not None]
    assert len(known) < len(run.client_scores["1/4"])
    assert sum(bar.get_height() for bar in by_client(run).axes[1].patches) == len(known)


@pytest.mark.parametrize("kind", ["plain", "viewed", "three views", "one size", "many sizes"])
def test_labels_of_points_do_not_overlap(kind: str) -> None:
    figure = by_parameters(RUNS[kind]())
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert not any(box.overlaps(other) for place, box in enumerate(boxes) for other in boxes[:place])


def test_numbers_below_the_axis_do_not_overlap() -> None:
    figure = by_parameters(results(MANY))
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
    assert not any(box.overlaps(other) for place, box in enumerate(boxes) for other in boxes[:place])


def test_drawing_never_imports_pyplot_or_opens_a_window() -> None:
    code = (
        "import sys; from report.sample import results; from raffm.report.drawing import rendered;"
        "from raffm.report.plots import by_round;"
        "rendered(by_round(results()), 'png'); sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=False).returncode == 0
