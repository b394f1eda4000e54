import csv
from dataclasses import replace
from io import StringIO
from math import nan

import pytest
from rich.console import Console

from raffm.report.tables import as_csv, as_markdown, as_rich, count, duration, metrics_table, number, percent, size_of
from raffm.rounds.results import Evaluation, Results, Scores
from report.sample import VIEWED, hostile, results


def printed(run: Results, width: int) -> list[str]:
    console = Console(width=width, file=StringIO(), color_system=None)
    console.print(as_rich(run, width))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.splitlines()


def test_a_row_holds_what_the_results_say() -> None:
    run = results(VIEWED)
    row = metrics_table(run)[2]
    last, best = run.evaluations[-1].sizes["1/4 windows"], run.best_on_validation
    assert best is not None
    assert (row["size"], row["params"], row["bytes_up"]) == ("1/4 windows", run.sizes[2].params, run.sizes[2].bytes_up)
    assert row["last_f1_macro"] == last.test["f1_macro"]
    assert row["mean_of_last_accuracy"] == run.mean_of_last("1/4 windows", "accuracy")
    assert row["best_on_validation_accuracy"] == best.sizes["1/4 windows"].test["accuracy"]
    assert row["best_on_validation_round"] == best.round != run.evaluations[-1].round
    assert row["clients_worst_decile_accuracy"] == last.clients_worst_decile["accuracy"]


def test_the_main_metric_comes_first_and_unknown_ones_keep_their_names() -> None:
    run = results(metric="exact_match")
    heads = as_csv(run).splitlines()[0].split(",")
    assert heads[6:10] == ["last_exact_match", "last_f1_macro", "last_f1_weighted", "last_loss"]
    assert "clients_mean_exact_match" in heads
    assert "| exact match | macro F1 |" in as_markdown(run)


def test_without_evaluations_the_costs_are_still_told() -> None:
    rows = metrics_table(results(evaluations=0))
    assert [row["params"] for row in rows] == [size.params for size in results().sizes]
    assert rows[0]["last_accuracy"] is rows[0]["mean_of_last_accuracy"] is rows[0]["clients_mean_accuracy"] is None
    assert "No evaluations yet." in as_markdown(results(evaluations=0))


def test_without_validation_nothing_is_called_best() -> None:
    run = results(evaluations=1)
    (entry,) = run.evaluations
    bare = {name: replace(scores, validation={}) for name, scores in entry.sizes.items()}
    run = replace(run, evaluations=(Evaluation(entry.round, bare),))
    assert metrics_table(run)[0]["best_on_validation_round"] is None
    assert "Best on validation" not in as_markdown(run)


def test_a_size_that_was_not_evaluated_has_dashes() -> None:
    run = replace(results(), evaluations=(Evaluation(5, {"1": Scores({"accuracy": 0.5}, {}, {}, {})}),))
    first, second, _ = metrics_table(run)
    assert (first["mean_of_last_accuracy"], second["mean_of_last_accuracy"]) == (0.5, None)


def test_csv_reads_back_exactly() -> None:
    run = results(VIEWED)
    rows = list(csv.DictReader(StringIO(as_csv(run))))
    assert [float(row["last_accuracy"]) for row in rows] == [row["last_accuracy"] for row in metrics_table(run)]


def test_every_line_of_markdown_has_the_same_columns() -> None:
    lines = as_markdown(hostile()).split("\n\n")[0].splitlines()
    assert {line.replace("\\|", "").count("|") for line in lines} == {16}


@pytest.mark.parametrize("width", [80, 100, 150, 200])
def test_the_terminal_table_fits_and_keeps_the_clients(width: int) -> None:
    lines = printed(results(VIEWED), width)
    assert max(map(len, lines)) <= width
    row = next(line for line in lines if "1/16 windows" in line)
    assert row.split()[-1] == number(results(VIEWED).evaluations[-1].sizes["1/16 windows"].clients_worst_decile["accuracy"])
    assert ("31.1 MB" in row) == (width >= 150)


def test_the_terminal_table_shows_brackets_as_they_are() -> None:
    run = results()
    run = replace(run, sizes=(replace(run.sizes[0], name="[red]1"),))
    assert any("[red]1" in line for line in printed(run, 120))


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (count(1_234_567), "1.23 M"),
        (count(999_600), "1 M"),
        (count(0), "0"),
        (count(7 * 10**18), "7,000 P"),
        (count(None), "-"),
        (size_of(340_000), "340 kB"),
        (size_of(12), "12 B"),
        (percent(0.0625), "6.25 %"),
        (percent(nan), "-"),
        (number(0.81234), "0.8123"),
        (number(123.456), "123.46"),
        (number(nan), "-"),
        (number(None), "-"),
        (duration(2.5), "2.5 s"),
        (duration(125), "2 min 5 s"),
        (duration(7500), "2 h 5 min"),
        (duration(300_000), "3 d 11 h"),
        (duration(nan), "-"),
    ],
)
def test_numbers_read_well(shown: str, expected: str) -> None:
    assert shown == expected
