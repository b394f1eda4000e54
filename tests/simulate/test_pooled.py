"""Worker processes: the sums of the serial backend, every time the same, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raffm.errors import RunError
from raffm.rounds.backend import Serial, by_shape
from raffm.rounds.evaluate import evaluate
from raffm.rounds.local import Local
from raffm.rounds.loop import Interrupted
from raffm.rounds.plan import Evaluating, Merging, Plan
from raffm.rounds.results import Results
from raffm.simulate.pooled import Pooled, cores, spread
from raffm.simulate.shared import ALIGNED, Block, move_into, move_out
from rounds.made import METHODS, RESNET, VIT, are_equal, assert_near, nothing, plan, run, tally_of, values

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")


def children(of: int | None = None) -> set[int]:
    """The processes whose parent is this one, the dead that nobody waited for among them."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == (of or os.getpid()):
                found.add(int(entry.name))
    return found


@contextmanager
def pooled(made: Plan, workers: int = 2) -> Iterator[Pooled]:
    backend = Pooled(made, workers)
    try:
        yield backend
    finally:
        backend.close()


def ran(
    method: str, model: str, workers: int = 0, rounds: int = 1, config: dict[str, object] | None = None
) -> tuple[Plan, Results]:
    """A run on so many workers; on none of them, serially."""
    made = plan(method, model=model, rounds=rounds, config=config)
    return made, run(made, Pooled(made, workers) if workers else None)


# -- equal to the serial backend -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", [VIT, RESNET])
def test_pooled_is_serial(method: str, model: str) -> None:
    serial, expected = ran(method, model)
    made, found = ran(method, model, 2)
    assert_near(values(serial), values(made), 1e-6)
    assert found.rounds[0].loss == pytest.approx(expected.rounds[0].loss, abs=1e-6)
    assert found.rounds[0].clients == expected.rounds[0].clients
    assert found.sizes == expected.sizes
    for name, scores in expected.evaluations[0].sizes.items():
        other = found.evaluations[0].sizes[name]
        for part in ("test", "validation", "clients_mean", "clients_worst_decile"):
            assert getattr(other, part) == pytest.approx(getattr(scores, part), abs=1e-5), (name, part)
    assert found.client_scores.keys() == expected.client_scores.keys()


@pytest.mark.parametrize("method", ["fedrolex", "fiarse"])
def test_the_same_model_is_evaluated_alike_on_workers(method: str) -> None:
    made = plan(method, model=RESNET)
    expected = evaluate(made, Serial(made), 3)
    with pooled(made, 3) as backend:
        found = evaluate(made, backend, 3)
    for name, scores in expected[0].sizes.items():
        assert found[0].sizes[name].test == pytest.approx(scores.test, abs=1e-5)
    assert found[1] == expected[1]


@pytest.mark.parametrize(("method", "model"), [("heterofl", VIT), ("fiarse", RESNET)])
def test_a_pooled_run_is_the_same_every_time_bit_for_bit(method: str, model: str) -> None:
    (left, found), (right, again) = (ran(method, model, 2, rounds=2) for _ in range(2))
    assert are_equal(values(left), values(right))
    assert found == again


def test_any_number_of_workers_gives_the_same_sums() -> None:
    runs = {workers: values(ran("heterofl", VIT, workers)[0]) for workers in (1, 3, 5)}
    for workers in (1, 5):
        assert_near(runs[workers], runs[3], 1e-6)


def test_dropout_is_the_same_in_a_worker() -> None:
    config = {"hidden_dropout_prob": 0.3}
    assert_near(values(ran("raffm", VIT, 0, config=config)[0]), values(ran("raffm", VIT, 2, config=config)[0]), 1e-6)


def test_the_optimizer_of_the_server_works_over_workers() -> None:
    made, serial = (
        plan("heterofl", rounds=2, merging=Merging(optimizer="momentum"), local=Local(optimizer="sgd", lr=0.05, batch=6))
        for _ in range(2)
    )
    run(made, Pooled(made, 2))
    run(serial)
    assert_near(values(made), values(serial), 1e-5)


def test_a_model_of_float64_is_summed_in_float64() -> None:
    def wide() -> Plan:
        made = plan("fedavg", fleet="full")
        made.server.model.double()
        from dataclasses import replace

        from raffm.models.labelled import Labelled

        return replace(made, server=Labelled.of(made.server.model), task=_Double())

    made, serial = wide(), wide()
    run(made, Pooled(made, 2))
    run(serial)
    assert_near(values(made), values(serial), 1e-12)


class _Double:
    """Images in double precision."""

    def __init__(self) -> None:
        from raffm.data.task import ImageClassification

        self._task = ImageClassification()

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        return getattr(self._task, name)

    def batch(self, examples, picks, moves=None):  # type: ignore[no-untyped-def]
        from raffm.data.task import Batch

        made = self._task.batch(examples, picks, moves)
        return Batch({name: tensor.double() for name, tensor in made.inputs.items()}, made.labels)


def test_more_workers_than_clients_do_no_harm() -> None:
    made = plan("fedavg")
    with pooled(made, 3) as backend:
        tally = tally_of(made)
        outcomes = backend.train(made.orders(0, [2]), tally, nothing, nothing)
        assert [outcome.client for outcome in outcomes] == [2]
        assert backend.train([], tally_of(made), nothing, nothing) == []
        assert backend.predict([]) == []


def test_refused_updates_leave_no_trace_in_a_worker() -> None:
    made, serial = (plan("heterofl", merging=Merging(max_norm=0.3)) for _ in range(2))
    left, right = run(made, Pooled(made, 2)), run(serial)
    assert left.rounds[0].refused == right.rounds[0].refused
    assert len(left.rounds[0].refused) in (2, 4)
    assert_near(values(made), values(serial), 1e-6)


# -- processes -----------------------------------------------------------------------------------------------------


def test_closing_leaves_no_process_and_gives_the_model_its_own_memory() -> None:
    before = children()
    made = plan("fedavg", fleet="full")
    backend = Pooled(made, 2)
    assert len(children() - before) == 2
    backend.train(made.orders(0, range(4)), tally_of(made), nothing, nothing)
    held = values(made)
    backend.close()
    assert children() - before == set()
    backend.close()
    del backend
    assert are_equal(held, values(made))
    made.server.model(**made.task.batch(made.data.dataset.test, torch.arange(2)).inputs)


def test_workers_take_one_core_each_by_default() -> None:
    before = children()
    with pooled(plan("fedavg"), 0):
        assert len(children() - before) == cores()
    assert children() - before == set()


def test_a_worker_that_is_killed_in_a_round_is_told_in_plain_words() -> None:
    before = children()
    made = plan("fedavg", fleet="full")
    with pooled(made, 2) as backend:
        victims: list[int] = []

        def kill(*_: object) -> None:
            if not victims:
                victims.append(min(children() - before))
                os.kill(victims[0], signal.SIGKILL)

        orders = made.orders(0, range(4)) * 10
        with pytest.raises(RunError, match="a worker process died"):
            backend.train(orders, tally_of(made), kill, nothing)
    assert children() - before == set()


def test_a_worker_that_was_killed_between_rounds_is_told_in_plain_words() -> None:
    before = children()
    made = plan("fedavg", fleet="full")
    with pooled(made, 2) as backend:
        victim = min(children() - before)
        os.kill(victim, signal.SIGKILL)
        while Path(f"/proc/{victim}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        with pytest.raises(RunError, match="a worker process died"):
            backend.train(made.orders(0, range(4)), tally_of(made), nothing, nothing)
    assert children() - before == set()


def test_workers_that_are_stopped_in_a_round_say_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    before = children()
    made = plan("fedavg", fleet="full")

    def stop(*_: object) -> None:
        raise Interrupted

    with pooled(made, 2) as backend, pytest.raises(Interrupted):
        backend.train(made.orders(0, range(4)) * 3, tally_of(made), stop, nothing)
    assert children() - before == set()
    assert capfd.readouterr().err == ""


def test_an_error_in_a_worker_reaches_the_parent_with_its_kind() -> None:
    made = plan("fedavg", task=_Broken())
    before = children()
    with pytest.raises(RunError, match="a worker failed: ValueError: no such thing"):
        run(made, Pooled(made, 2))
    assert children() - before == set()


class _Broken:
    """A task whose loss cannot be computed."""

    def __init__(self) -> None:
        from raffm.data.task import ImageClassification

        self._task = ImageClassification()

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        return getattr(self._task, name)

    def losses(self, *_: object) -> None:
        raise ValueError("no such thing")


RUN_FOR_EVER = """
import sys, os
sys.path.insert(0, {tests!r})
from rounds.made import plan, run
from raffm.simulate.pooled import Pooled
made = plan("fedavg", rounds=10**6)
backend = Pooled(made, 2)
print("ready", flush=True)
run(made, backend)
"""


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_workers_die_with_a_parent_that_is_killed() -> None:
    script = RUN_FOR_EVER.format(tests=str(Path(__file__).parents[1]))
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        workers = children(parent.pid)
        assert len(workers) == 2
        time.sleep(0.3)
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()
    deadline = time.monotonic() + 10
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [worker for worker in workers if is_alive(worker)]


# -- dividing the work ---------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 6))
def test_every_job_goes_to_one_worker_and_none_has_much_more_to_do(work: list[int], workers: int) -> None:
    assigned = spread(work, workers)
    assert len(assigned) == workers
    assert sorted(place for places in assigned for place in places) == list(range(len(work)))
    loads = [sum(work[place] for place in places) for places in assigned]
    assert max(loads) - min(loads) <= max(work, default=0)


def test_orders_with_equal_shares_follow_each_other() -> None:
    made = plan("heterofl", fleet="1, 1/4")
    orders = by_shape(made.orders(0, [0, 1, 2, 3]))
    changes = sum(left.share != right.share for left, right in pairwise(orders))
    assert changes == 1
    assert sorted(order.client for order in orders) == [0, 1, 2, 3]


def test_shared_tensors_are_aligned_and_do_not_overlap() -> None:
    like = {"a": torch.ones(3), "empty": torch.ones(0), "b": torch.ones(5, 7), "c": torch.tensor(4, dtype=torch.int64)}
    block = Block(like)
    for number, tensor in enumerate(block.tensors.values()):
        tensor.fill_(number)
        assert not tensor.numel() or tensor.data_ptr() % ALIGNED == 0
    assert [tensor.unique().tolist() for tensor in block.tensors.values()] == [[0], [], [2], [3]]
    assert block.tensors["c"].dtype == torch.int64
    assert Block(like, torch.float64).tensors["b"].dtype == torch.float64
    move_into(block, like)
    assert like["a"].tolist() == [1, 1, 1]
    assert like["a"].data_ptr() == block.tensors["a"].data_ptr()
    move_out(like.values())
    assert like["a"].data_ptr() != block.tensors["a"].data_ptr()


def test_a_model_that_is_not_on_the_cpu_is_refused() -> None:
    from dataclasses import replace

    from raffm.models.labelled import Labelled

    made = plan("fedavg", evaluating=Evaluating(every=5))
    labelled = Labelled(made.server.model, made.server.layout, made.server.table, {"w": torch.empty(1, device="meta")})
    with pytest.raises(RunError, match="the model is on meta"):
        Pooled(replace(made, server=labelled), 1)
