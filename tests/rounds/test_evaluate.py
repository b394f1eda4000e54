"""Scores against a plain computation, whatever the batch and the order, and the test set chooses nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import nan
from statistics import fmean
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raffm.data.examples import Federation, Parts, Split
from raffm.data.splits import split
from raffm.data.task import ImageClassification
from raffm.errors import RunError
from raffm.methods.method import Device, Share
from raffm.rounds.backend import Serial
from raffm.rounds.evaluate import evaluate
from raffm.rounds.local import Local
from raffm.rounds.plan import Evaluating, Participation, Plan
from raffm.rounds.predict import Job, served
from raffm.rounds.results import Evaluation, Results, Scores, from_json
from raffm.rounds.workshop import Workshop
from raffm.seeds import generator
from rounds.made import METHODS, RESNET, VIT, are_equal, dealt, digits, federation, plan, run, values


def logits(made: Plan, share: object, round: int) -> torch.Tensor:
    """What a submodel says to every test example, one after another."""
    module = served(made, Workshop(made), Job(share, round))  # type: ignore[arg-type]
    test = made.data.dataset.test
    with torch.no_grad():
        return torch.cat([made.task.forward(module, made.task.batch(test, torch.tensor([i]))) for i in range(len(test))])


# -- every size, everywhere ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_size_is_tested_globally_and_by_every_client(method: str) -> None:
    made = plan(method, fleet="1, 1/4, 1/16")
    results = run(made)
    names = {
        "fedavg": ["1"],
        "fedrolex": ["1", "1/4 prefix", "1/4 windows", "1/16 prefix", "1/16 windows"],
    }.get(method, ["1", "1/4", "1/16"])
    assert [size.name for size in results.sizes] == names
    assert list(results.evaluations[-1].sizes) == names
    for name in names:
        assert len(results.client_scores[name]) == made.data.clients
        assert all(score is not None for score in results.client_scores[name])
        scores = results.evaluations[-1].sizes[name]
        for part in (scores.test, scores.validation, scores.clients_mean, scores.clients_worst_decile):
            assert list(part) == ["accuracy", "f1_macro", "f1_weighted", "loss"]


class Noting(Serial):
    """A serial backend that notes what it is asked to test."""

    asked: Sequence[Job] = ()

    def predict(self, jobs: Sequence[Job]) -> list[list[Tensor]]:
        self.asked = (*self.asked, *jobs)
        return super().predict(jobs)


def test_a_submodel_that_several_sizes_get_is_tested_once_as_that_of_the_smallest() -> None:
    made = plan("smallest-for-all", model=RESNET, fleet="1, 1/4, 1/16")
    backend = Noting(made)
    evaluation, by_client = evaluate(made, backend, 1)
    assert [job.size for job in backend.asked] == [1 / 16]
    assert list(evaluation.sizes) == list(by_client) == ["1", "1/4", "1/16"]
    assert evaluation.sizes["1"] == evaluation.sizes["1/4"] == evaluation.sizes["1/16"]


def test_every_window_of_a_size_is_tested() -> None:
    made = plan("fedrolex", model=RESNET, fleet="1, 1/4")
    backend = Noting(made)
    evaluate(made, backend, 1)
    served_shares = {
        share
        for several in made.method.serve(made.server, 1, list(made.served.values()))
        for way in several
        for share in way.shares
    }
    assert len(backend.asked) == len(served_shares) > 2
    assert {job.share for job in backend.asked} == served_shares


@pytest.mark.parametrize(("method", "model"), [("heterofl", VIT), ("raffm", RESNET)])
def test_scores_are_those_of_a_plain_computation(method: str, model: str) -> None:
    made = plan(method, model=model, data=federation(20), fleet="1, 1/4", participation=Participation(clients=4))
    run(made)
    evaluation, by_client = evaluate(made, Serial(made), 1)
    labels = made.data.dataset.test.labels
    for size, name in ((1.0, "1"), (0.25, "1/4")):
        said = logits(made, made.method.serve(made.server, 1, [Device(-1, size)])[0][0].shares[0], 1)
        is_right = (said.argmax(1) == labels).double()
        losses = torch.nn.functional.cross_entropy(said, labels, reduction="none")
        own = [float(is_right[made.data.split.test[client]].mean()) for client in range(20)]
        scores = evaluation.sizes[name]
        assert scores.test["accuracy"] == pytest.approx(float(is_right.mean()), abs=1e-6)
        assert scores.test["loss"] == pytest.approx(float(losses.mean()), abs=1e-4)
        assert by_client[name] == pytest.approx(own, abs=1e-6)
        assert scores.clients_mean["accuracy"] == pytest.approx(fmean(own), abs=1e-6)
        assert scores.clients_worst_decile["accuracy"] == pytest.approx(fmean(sorted(own)[:2]), abs=1e-6)


def test_windows_of_fedrolex_are_averaged() -> None:
    made = plan("fedrolex", fleet="1/4")
    evaluation, _ = evaluate(made, Serial(made), 3)
    ((prefix, windows),) = made.method.serve(made.server, 3, [Device(-1, 0.25)])
    labels = made.data.dataset.test.labels
    each = [float((logits(made, share, 3).argmax(1) == labels).double().mean()) for share in windows.shares]
    assert len(each) == 4
    assert len(set(each)) > 1, "the windows differ, so that the mean means something"
    assert evaluation.sizes["1/4 windows"].test["accuracy"] == pytest.approx(fmean(each), abs=1e-9)
    assert evaluation.sizes["1/4 prefix"].test["accuracy"] == pytest.approx(each[0], abs=1e-9)
    assert prefix.shares == windows.shares[:1]


def test_a_client_without_test_examples_has_no_score_and_does_not_count() -> None:
    dataset = digits()
    tests = [list(range(12)), [], list(range(12, 24)), []]
    made = plan("fedavg", data=dealt(dataset, [list(range(i, 48, 4)) for i in range(4)], tests))
    results = run(made)
    scores = results.client_scores["1"]
    assert (scores[1], scores[3]) == (None, None)
    mean = results.evaluations[-1].sizes["1"].clients_mean["accuracy"]
    assert mean == pytest.approx((scores[0] + scores[2]) / 2)  # type: ignore[operator]
    assert from_json(json.loads(json.dumps(results.to_json()))).client_scores == results.client_scores


def test_where_nobody_has_test_examples_there_are_no_scores_of_clients() -> None:
    made = plan("fedavg", data=dealt(digits(), [list(range(i, 48, 4)) for i in range(4)], [[]] * 4))
    results = run(made)
    assert results.client_scores["1"] == [None] * 4
    assert results.evaluations[-1].sizes["1"].clients_mean == {}
    assert results.evaluations[-1].sizes["1"].clients_worst_decile == {}


# -- what evaluation does not depend on ----------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "tolerance"), [(VIT, 1e-6), (RESNET, 1e-4)])
def test_evaluation_does_not_depend_on_the_batch(model: str, tolerance: float) -> None:
    made = plan("heterofl", model=model, config={"norm": "batch"} if model == RESNET else None)
    run(made)
    found = [
        evaluate(replace(made, evaluating=Evaluating(every=1, batch=batch)), Serial(made), 1)[0] for batch in (1, 5, 24, 500)
    ]
    for other in found[1:]:
        for name, scores in found[0].sizes.items():
            assert other.sizes[name].test == pytest.approx(scores.test, abs=tolerance)


@pytest.mark.parametrize(("model", "tolerance"), [(VIT, 1e-6), (RESNET, 1e-4)])
def test_evaluation_does_not_depend_on_the_order_of_examples(model: str, tolerance: float) -> None:
    made = plan("heterofl", model=model, evaluating=Evaluating(every=1, batch=5))
    run(made)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    places = torch.argsort(order).numpy()
    dataset, parts = made.data.dataset, made.data.split
    turned = replace(dataset, test=dataset.test.take(order))
    mixed = replace(made, data=Federation(turned, Split(parts.train, Parts(places[parts.test.indices], parts.test.offsets))))
    (left, by_client), (right, others) = (evaluate(each, Serial(each), 1) for each in (made, mixed))
    for name, scores in left.sizes.items():
        assert right.sizes[name].test == pytest.approx(scores.test, abs=tolerance)
        assert right.sizes[name].clients_mean == pytest.approx(scores.clients_mean, abs=tolerance)
        assert others[name] == pytest.approx(by_client[name], abs=tolerance)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", [VIT, RESNET])
def test_two_evaluations_give_identical_numbers_and_leave_the_server_alone(method: str, model: str) -> None:
    made = plan(method, model=model, config={"hidden_dropout_prob": 0.3} if model == VIT else None)
    before = values(made)
    serial = Serial(made)
    first, second = evaluate(made, serial, 1), evaluate(made, serial, 1)
    assert first == second
    assert are_equal(values(made), before)


def test_calibration_does_not_keep_what_training_left_in_batch_norms() -> None:
    made = plan("fedavg", model=RESNET, fleet="full")
    run(made)
    expected = evaluate(made, Serial(made), 1)
    for name, tensor in made.server.tensors.items():
        if name.endswith("running_mean"):
            tensor.fill_(9.0)
    assert evaluate(made, Serial(made), 1) == expected


def test_norms_by_test_batches_are_those_of_a_client_s_own_batch() -> None:
    """As published (D-FI5): what is said to an image depends on which images of the client share its batch."""
    made = plan("fedavg", model=RESNET, evaluating=Evaluating(norms="test-batches"), local=Local(batch=7, steps=1))
    (test, validation) = Serial(made).predict([Job(Share(), 1)])[0]
    (honest, same) = Serial(plan("fedavg", model=RESNET, local=Local(batch=7, steps=1))).predict([Job(Share(), 1)])[0]
    assert not torch.allclose(test, honest, atol=1e-3)
    assert torch.equal(validation, same)
    module = served(made, Workshop(made), Job(Share(), 1)).train()
    for client in range(made.data.clients):
        own = torch.from_numpy(made.data.split.test[client])
        for picks in torch.split(own, 7):
            with torch.no_grad():
                said = made.task.forward(module, made.task.batch(made.data.dataset.test, picks))
            assert torch.allclose(test[picks], said, atol=1e-5)


@pytest.mark.parametrize("norms", ["clients", "test-batches"])
def test_augmented_tests_of_clients_are_moved_images(norms: Literal["clients", "test-batches"]) -> None:
    """As published (D-FI3): another crop after every round; the global test and validation stay as they are."""
    task = ImageClassification(crop=2, flip=True)
    honest = replace(plan("fedavg", model=VIT, evaluating=Evaluating(norms=norms)), task=task)
    made = replace(honest, evaluating=Evaluating(norms=norms, augmented=True))
    plain, same = Serial(honest).predict([Job(Share(), 1)])[0]
    test, validation, moved = Serial(made).predict([Job(Share(), 1)])[0]
    assert torch.equal(test, plain)
    assert torch.equal(validation, same)
    assert not torch.allclose(moved, plain, atol=1e-4)
    assert torch.equal(moved, Serial(made).predict([Job(Share(), 1)])[0][2])
    assert not torch.equal(moved, Serial(made).predict([Job(Share(), 2)])[0][2])
    moves = task.draw((len(made.data.dataset.test),), generator(made.seed, "augment tests", 1))
    with torch.no_grad():
        said = task.forward(made.server.model.eval(), task.batch(made.data.dataset.test, torch.arange(9), moves[:9]))
    assert torch.allclose(moved[:9], said, atol=1e-5)
    (found, by_client), (fair, fairly) = evaluate(made, Serial(made), 1), evaluate(honest, Serial(honest), 1)
    assert found.sizes["1"].test == fair.sizes["1"].test
    assert found.sizes["1"].clients_mean["loss"] != fair.sizes["1"].clients_mean["loss"]
    assert by_client.keys() == fairly.keys()


def test_without_batch_norms_it_makes_no_difference() -> None:
    first, second = (
        Serial(plan("fedavg", model=VIT, evaluating=Evaluating(norms=norms))).predict([Job(Share(), 1)])[0][0]
        for norms in ("clients", "test-batches")
    )
    assert torch.allclose(first, second, atol=1e-6)


def test_batches_of_one_example_can_be_calibrated() -> None:
    made = plan("fedavg", model=RESNET, fleet="full", local=Local(batch=1, steps=1))
    assert run(made).evaluations


# -- last, mean of last, best --------------------------------------------------------------------------------------


def results_of(tests: list[float], validations: list[float], last: int = 2) -> Results:
    evaluations = [
        Evaluation(round + 1, {"1": Scores({"accuracy": test}, {"accuracy": validation}, {}, {})})
        for round, (test, validation) in enumerate(zip(tests, validations, strict=True))
    ]
    return Results({}, "fedavg", {}, {}, "accuracy", (), (), tuple(evaluations), {}, last)


def test_last_mean_of_last_and_best_on_validation_are_apart() -> None:
    results = results_of([0.1, 0.9, 0.5, 0.3], [0.8, 0.2, 0.3, 0.4])
    assert results.last_round is not None
    assert results.last_round.round == 4
    assert results.mean_of_last("1", "accuracy") == pytest.approx(0.4)
    assert results.best_on_validation is not None
    assert results.best_on_validation.round == 1
    summary = results.to_json()["summary"]
    assert summary["last_round"] == {"round": 4, "1": 0.3}
    assert summary["mean_of_last"] == {"evaluations": 2, "1": pytest.approx(0.4)}
    assert summary["best_on_validation"] == {"round": 1, "1": 0.1}


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6), st.randoms())
@settings(max_examples=30)
def test_the_test_set_chooses_nothing(scores: list[tuple[float, float]], draw: object) -> None:
    tests, validations = map(list, zip(*scores, strict=True))
    best = results_of(tests, validations).best_on_validation
    draw.shuffle(tests)  # type: ignore[attr-defined]
    other = results_of(tests, validations).best_on_validation
    assert best is not None
    assert other is not None
    assert best.round == other.round == validations.index(max(validations)) + 1


def test_validation_that_is_no_number_is_never_best() -> None:
    best = results_of([0.1, 0.2, 0.3], [nan, 0.1, nan]).best_on_validation
    assert best is not None
    assert best.round == 2
    assert results_of([0.1], [nan]).best_on_validation is None


def test_without_validation_examples_there_is_no_best() -> None:
    dataset = digits(validation=0)
    results = run(plan("fedavg", data=Federation(dataset, split(dataset, 4, "iid", 0)), rounds=2))
    assert results.best_on_validation is None
    assert results.summary()["best_on_validation"] == {}
    assert results.evaluations[-1].sizes["1"].validation == {}


def test_evaluations_come_every_few_rounds_and_after_the_last() -> None:
    results = run(plan("fedavg", rounds=5, evaluating=Evaluating(every=2, last=2)))
    assert [entry.round for entry in results.evaluations] == [2, 4, 5]
    last = [entry.sizes["1"].test["accuracy"] for entry in results.evaluations[-2:]]
    assert results.mean_of_last("1", "accuracy") == pytest.approx(fmean(last))
    assert [entry.round for entry in results.rounds] == [1, 2, 3, 4, 5]


@given(st.lists(st.one_of(st.floats(0, 1), st.just(nan)), min_size=1, max_size=4))
@settings(max_examples=20)
def test_results_survive_json(scores: list[float]) -> None:
    results = results_of(scores, scores)
    text = json.dumps(results.to_json(), allow_nan=False)
    again = from_json(json.loads(text))
    assert json.dumps(again.to_json(), allow_nan=False) == text


def test_unseen_sizes_can_be_evaluated_and_small_ones_cost_less() -> None:
    made = plan("heterofl", fleet="1, 1/4", evaluating=Evaluating(every=1, sizes=(0.5, 1 / 16)))
    results = run(made)
    assert [size.name for size in results.sizes] == ["1", "1/2", "1/16"]
    for key in ("params", "bytes_up", "bytes_down", "flops", "fraction"):
        found = [getattr(size, key) for size in results.sizes]
        assert found == sorted(found, reverse=True)
        assert len(set(found)) == 3


@pytest.mark.parametrize(
    "given", [{"every": 0}, {"batch": 0}, {"last": 0}, {"sizes": (2.0,)}, {"calibration_clients": 0}, {"norms": "x"}]
)
def test_evaluation_that_makes_no_sense_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(RunError):
        Evaluating(**given)  # type: ignore[arg-type]


def test_worst_decile_is_a_tenth_of_the_clients_that_have_examples() -> None:
    dataset = digits(train=60, test=60)
    tests = [[i] if i < 25 else [] for i in range(60)]
    made = plan("fedavg", data=dealt(dataset, [[i] for i in range(60)], tests), participation=Participation(clients=2))
    evaluation, by_client = evaluate(made, Serial(made), 0)
    known = sorted(score for score in by_client["1"] if score is not None)
    assert len(known) == 25
    assert evaluation.sizes["1"].clients_worst_decile["accuracy"] == pytest.approx(np.mean(known[:2]))
