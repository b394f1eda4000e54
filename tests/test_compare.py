"""Several methods side by side: what is run, what is chosen, what the table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scipy.stats import wilcoxon

from commands import raffm
from raffm.compare import Contest, compare
from raffm.errors import CheckpointError, RunError
from raffm.methods import METHODS
from raffm.report.comparison import Compared, as_markdown, lines_of, reached
from raffm.report.folder import read_results
from raffm.rounds.results import Evaluation, Results, Round, Scores, Size
from raffm.settings import Settings, read_settings

QUICK = {
    "rounds": 2,
    "model": {"name": "vit:tiny"},
    "data": {"clients": 10},
    "fleet": {"tiers": "1, 1/4"},
    "participation": {"clients": 3},
    "evaluate": {"every": 2},
}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAFFM_CACHE", str(tmp_path_factory.getbasetemp() / "raffm-cache"))


def quick(**changes: object) -> Settings:
    return read_settings({**QUICK, **changes})


def contest(*methods: str, **rest: object) -> Contest:
    return Contest(quick(), {name: {"name": name} for name in methods}, **rest)  # type: ignore[arg-type]


def test_every_method_takes_the_rate_that_is_best_on_validation_and_runs_all_seeds(tmp_path: Path) -> None:
    found = compare(contest("heterofl", "fedavg", seeds=(0, 3), rates=(1e-6, 0.02)), tmp_path)
    for entry in found:
        assert entry.rate == max(entry.scores, key=lambda rate: entry.scores[rate])
        assert [run.run["seed"] for run in entry.runs] == [0, 3]
        assert {run.run["local"]["lr"] for run in entry.runs} == {entry.rate}
        tried = {path.name for path in (tmp_path / entry.method).iterdir()}
        assert tried == {"lr-1e-06-seed-0", "lr-0.02-seed-0", f"lr-{entry.rate:g}-seed-3"}
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert [entry["method"] for entry in written["methods"]] == ["heterofl", "fedavg"]
    assert set(written["methods"][0]["validation"]) == {"1e-06", "0.02"}
    assert len(written["table"]) == 3  # heterofl at two sizes, fedavg at one
    assert (tmp_path / "plots" / "by_size.png").read_bytes().startswith(b"\x89PNG")


def test_the_cohorts_of_all_methods_are_the_same_at_the_same_seed(tmp_path: Path) -> None:
    found = compare(contest("heterofl", "fiarse"), tmp_path)
    first, second = (entry.runs[0] for entry in found)
    assert [entry.clients for entry in first.rounds] == [entry.clients for entry in second.rounds]


class _LightsOut:
    """A watcher that stops everything in the second round."""

    def __init__(self, name: str, rounds: int) -> None:
        pass

    def __enter__(self) -> _LightsOut:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def client(self, round: int, done: int, of: int) -> None:
        if round == 1:
            raise RuntimeError("lights out")

    def round(self, *_: object) -> None:
        pass


def test_finished_runs_are_read_and_stopped_ones_go_on(tmp_path: Path) -> None:
    whole = compare(contest("heterofl", "fedavg"), tmp_path / "whole")
    compare(contest("heterofl"), tmp_path / "parts")
    done = tmp_path / "parts" / "heterofl" / "lr-0.001-seed-0" / "results.json"
    before = done.stat().st_mtime_ns
    stopped = tmp_path / "parts" / "fedavg" / "lr-0.001-seed-0"
    with pytest.raises(RuntimeError, match="lights out"):
        compare(contest("heterofl", "fedavg"), tmp_path / "parts", _LightsOut)
    assert (stopped / "checkpoint").exists()
    assert not (stopped / "results.json").exists()
    again = compare(contest("heterofl", "fedavg"), tmp_path / "parts")
    assert done.stat().st_mtime_ns == before
    assert [run.to_json() for entry in again for run in entry.runs] == [run.to_json() for entry in whole for run in entry.runs]
    assert (tmp_path / "parts" / "comparison.md").read_text() == (tmp_path / "whole" / "comparison.md").read_text()


def test_what_cannot_run_is_refused_before_anything_does(tmp_path: Path) -> None:
    for methods in (("fedavg", "typo"), ("fedavg", "fedavg-capable")):
        settings = quick(fleet={"tiers": "1/2, 1/4"})
        with pytest.raises(RunError):
            compare(Contest(settings, {name: {"name": name} for name in methods}), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_stopped_between_two_checkpoints_goes_on_also_on_another_backend(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="lights out"):
        compare(contest("fedavg"), tmp_path, _LightsOut)
    place = tmp_path / "fedavg" / "lr-0.001-seed-0"
    (place / "checkpoint").rename(place / "checkpoint.previous")
    compare(contest("fedavg"), tmp_path)
    other = Contest(quick(backend={"workers": 3}), {"fedavg": {"name": "fedavg"}})
    assert len(compare(other, tmp_path)[0].runs[0].rounds) == 2


def test_a_folder_with_other_runs_is_refused(tmp_path: Path) -> None:
    compare(contest("fedavg"), tmp_path)
    other = Contest(quick(rounds=3), {"fedavg": {"name": "fedavg"}})
    with pytest.raises(CheckpointError, match="other settings"):
        compare(other, tmp_path)
    assert len(read_results(tmp_path / "fedavg" / "lr-0.001-seed-0").rounds) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": {}}, "at least one method"),
        ({"seeds": ()}, "one seed"),
        ({"seeds": (1, 1)}, "given twice"),
        ({"rates": (0.1, 0.2)}, "data.validation is 0"),
    ],
)
def test_contests_that_make_no_sense_are_refused(changes: dict[str, object], words: str) -> None:
    given = {"methods": {"fedavg": {"name": "fedavg"}}, "settings": quick(data={"clients": 10, "validation": 0.0}), **changes}
    with pytest.raises(RunError, match=words):
        Contest(**given)  # type: ignore[arg-type]


# -- the table -----------------------------------------------------------------------------------------------------


def made(method: str, by_seed: list[list[float]]) -> Compared:
    """A method with these accuracies of its clients, seed by seed."""
    size = Size("1/4", 0.25, "", 10, 0.25, 100, 100, 7)
    rounds = (Round(1, 1.0, (0,), bytes_up=30, bytes_down=50, seconds=2.0), Round(2, 1.0, (0,), bytes_up=10, seconds=4.0))
    runs = []
    for seed, clients in enumerate(by_seed):
        mean = sum(clients) / len(clients)
        scores = Scores({"accuracy": mean}, {}, {"accuracy": mean}, {"accuracy": min(clients)})
        found = (Evaluation(2, {"1/4": scores}),)
        runs.append(Results({"seed": seed}, method, {}, {}, "accuracy", (size,), rounds, found, {"1/4": clients}))
    return Compared(method, 0.1, {0.1: 0.5}, tuple(runs))


def test_the_table_has_means_spreads_and_paired_differences() -> None:
    first = made("first", [[0.5, 0.6, 0.7, 0.8, 0.4, 0.3], [0.3, 0.4, 0.5, 0.6, 0.2, 0.1]])
    second = made("second", [[0.61, 0.72, 0.83, 0.94, 0.55, 0.46], [0.37, 0.48, 0.59, 0.6975, 0.3125, 0.215]])
    one, other = lines_of([first, second])
    assert one.metric == pytest.approx(0.45)
    assert one.spread == pytest.approx(0.2 / 2**0.5)
    assert (one.against, one.p) == (None, None)
    assert other.against == pytest.approx(0.1145833, abs=1e-6)
    assert other.p == pytest.approx(2 / 2**12)  # all twelve differences have one sign
    assert (one.bytes_round, one.seconds) == (45.0, 6.0)
    assert one.worst_decile == pytest.approx(0.2)


def test_what_it_took_is_told_for_what_all_methods_come_to() -> None:
    def run(method: str, values: list[float], sent: int) -> Compared:
        size = Size("1/4", 0.25, "", 10, 0.25, 100, 100, 7)
        rounds = tuple(Round(place + 1, 1.0, (0,), bytes_up=sent, bytes_down=sent, seconds=2.0) for place in range(4))
        found = tuple(
            Evaluation(place + 1, {"1/4": Scores({"accuracy": value}, {}, {}, {})}) for place, value in enumerate(values)
        )
        return Compared(method, 0.1, {}, (Results({}, method, {}, {}, "accuracy", (size,), rounds, found, {}),))

    slow, fast = reached([run("slow", [0.2, 0.3, 0.4, 0.5], 10), run("fast", [0.3, 0.6, 0.4, 0.9], 100)])
    assert (slow.goal, slow.rounds, slow.bytes, slow.seconds) == (0.5, 4, 80, 8)
    assert (fast.goal, fast.rounds, fast.bytes, fast.seconds) == (0.5, 2, 400, 4)


def test_the_page_has_every_figure_and_needs_nothing_else(tmp_path: Path) -> None:
    compare(contest("heterofl", "fedavg", "fedrolex", seeds=(0, 1)), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<figure>") == 5
    assert page.count("<svg") == 5
    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page
    for words in ("heterofl", "worst decile", "virtual time", "1/4 windows", "What it took"):
        assert words in page


@pytest.mark.slow
def test_all_methods_on_digits(tmp_path: Path) -> None:
    """The comparison of the documentation, shorter: one seed, one rate, 10 rounds. Everybody is far above chance at size 1."""
    words = ["--methods=all", "--lr=0.01", "--set=rounds=10", f"--folder={tmp_path}"]
    raffm("compare", "experiments/methods/run.toml", *words)
    table = json.loads((tmp_path / "comparison.json").read_text())["table"]
    assert {line["method"] for line in table} == set(METHODS)
    assert all(line["metric"] > 0.5 for line in table if line["size"] == "1" and line["method"] != "fedavg-capable")


def test_the_files_say_which_switches_methods_had_and_whose_full_model_is_larger(tmp_path: Path) -> None:
    methods = {"heterofl": {"name": "heterofl", "scaler": False}, "scalefl": {"name": "scalefl", "exits": 2}}
    compare(Contest(quick(), methods), tmp_path)
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert [entry["switches"] for entry in written["methods"]] == [{"scaler": False}, {"exits": 2}]
    assert written["tests"] == "honest"
    assert "exits = 2" in (tmp_path / "report.html").read_text()
    assert "A size is a part of each method's own full model: scalefl's has" in (tmp_path / "comparison.md").read_text()


def test_a_score_that_is_no_number_has_no_spread() -> None:
    broken = made("broken", [[0.5, 0.6], [float("nan"), 0.6]])
    (line,) = lines_of([broken])
    assert line.spread is None
    assert "nan" not in as_markdown([broken]).lower()


def test_equal_differences_of_fractions_are_equal() -> None:
    """0.8 - 0.7 is not 0.6 - 0.5 in floating point, and ranks would be decided by the last bit."""
    first = made("first", [[place / 10 for place in (7, 5, 3, 6, 2, 8, 4, 1)]])
    second = made("second", [[place / 10 for place in (8, 6, 4, 5, 1, 9, 6, 3)]])
    _, other = lines_of([first, second])
    assert other.p == pytest.approx(float(wilcoxon([1, 1, 1, -1, -1, 1, 2, 2]).pvalue))


def test_a_size_is_compared_with_the_one_of_the_same_name_and_view() -> None:
    def several(method: str, scores: dict[str, float]) -> Compared:
        sizes = tuple(Size(name, 0.25, name.partition(" ")[2], 10, 0.25, 1, 1, 1) for name in scores)
        found = {name: Scores({"accuracy": value}, {}, {}, {}) for name, value in scores.items()}
        clients = {name: [value, value] for name, value in scores.items()}
        run = Results({}, method, {}, {}, "accuracy", sizes, (Round(1, 1.0, (0,)),), (Evaluation(1, found),), clients)
        return Compared(method, 0.1, {}, (run,))

    first = several("first", {"1/4 prefix": 0.2, "1/4 windows": 0.6})
    lines = lines_of([first, several("second", {"1/4 prefix": 0.3, "1/4 windows": 0.5}), several("third", {"1/4": 0.4})])
    assert [line.against for line in lines[2:]] == pytest.approx([0.1, -0.1, 0.2])
    assert lines[0].clients_mean is None


def test_equal_methods_do_not_differ() -> None:
    scores = [[0.5, 0.6, 0.7]]
    _, other = lines_of([made("one", scores), made("other", scores)])
    assert (other.against, other.p, other.spread) == (0.0, 1.0, None)


def test_the_command_shows_the_table_and_refuses_nonsense(tmp_path: Path) -> None:
    words = ["--methods=fedavg,heterofl", "--set=rounds=1", "--set=data.clients=10", "--set=participation.clients=2"]
    words += ["--set=model.name=vit:tiny", "--set=fleet.tiers=1, 1/4"]
    ran = raffm("compare", *words, f"--folder={tmp_path / 'runs'}")
    assert ran.returncode == 0, ran.stderr
    assert "| heterofl | 0.001 | 1/4 |" in ran.stdout
    assert "Wilcoxon" in ran.stdout
    switched = raffm("compare", *words, "--set=method.masked_loss=false", f"--folder={tmp_path / 'switched'}")
    assert switched.returncode == 0, switched.stderr
    runs = {name: read_results(tmp_path / "switched" / name / "lr-0.001-seed-0").run for name in ("fedavg", "heterofl")}
    assert [run["method"] for run in runs.values()] == [{"name": "fedavg"}, {"name": "heterofl", "masked_loss": False}]
    for wrong, expected in (
        ("--set=method.mask=1", "no method has the switch 'mask'"),
        ("--seeds=a", "no list of numbers"),
        ("--methods=fedprox", "there is no method 'fedprox'"),
    ):
        ran = raffm("compare", *words, wrong, f"--folder={tmp_path / 'wrong'}")
        assert ran.returncode == 2
        assert expected in ran.stderr
