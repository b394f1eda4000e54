"""Splits: every example is dealt once, sizes are as promised, and a client's test is like its training."""

import hashlib
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raffm.data.examples import Dataset, Examples, Parts, Split
from raffm.data.rounding import place
from raffm.data.splits import (
    balanced_dirichlet,
    by_column,
    dirichlet,
    hold_out,
    iid,
    k_shot,
    shards,
    split,
    stratified,
)
from raffm.errors import DataError

CIFAR_TRAIN, CIFAR_TEST = np.arange(50_000) % 10, np.arange(10_000) % 10

WAYS = {
    "iid": {},
    "dirichlet-balanced": {"alpha": 0.3},
    "dirichlet": {"alpha": 0.5},
    "shards": {"classes_per_client": 2},
    "k-shot": {"k": 5},
}


def labelled(train, test, owners=None):
    def part(labels):
        labels = torch.as_tensor(labels)
        return Examples({"pixel_values": torch.arange(len(labels))}, labels)

    classes = int(max(*train, *test)) + 1
    return Dataset("made", part(train), part(test), tuple(map(str, range(classes))), owners=owners)


def small():
    return labelled(np.arange(1000) % 10, np.arange(200) % 10)


def histograms(labels, parts, classes):
    return np.stack([np.bincount(labels[parts[client]], minlength=classes) for client in range(len(parts))])


def same(one: Parts, other: Parts) -> bool:
    return np.array_equal(one.indices, other.indices) and np.array_equal(one.offsets, other.offsets)


def mean_cosine(one, other):
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return ((one * other).sum(1) / norms).mean()


def dealt_once(parts: Parts, count: int) -> bool:
    return np.array_equal(np.sort(parts.indices), np.arange(count))


labels_of_any_kind = st.lists(st.integers(0, 5), min_size=1, max_size=60).map(lambda values: np.array(values, np.int64))


@given(labels_of_any_kind, labels_of_any_kind, st.data())
def test_an_iid_split_deals_every_example_once_and_evenly(train, test, data):
    clients = data.draw(st.integers(1, len(train)))
    made = iid(train, test, clients, data.draw(st.integers(0, 3)))
    assert dealt_once(made.train, len(train)) and dealt_once(made.test, len(test))
    assert np.ptp(made.train.counts) <= 1 and np.ptp(made.test.counts) <= 1


@given(labels_of_any_kind, labels_of_any_kind, st.sampled_from([0.01, 0.3, 1.0, 100.0]), st.data())
def test_a_balanced_dirichlet_split_always_ends_and_deals_every_example_once(train, test, alpha, data):
    clients = data.draw(st.integers(1, len(train)))
    made = balanced_dirichlet(train, test, clients, data.draw(st.integers(0, 3)), alpha)
    assert dealt_once(made.train, len(train)) and dealt_once(made.test, len(test))
    assert np.ptp(made.train.counts) <= 1


@given(labels_of_any_kind, labels_of_any_kind, st.data())
def test_the_test_table_is_the_training_table_scaled_and_rounded_up_or_down_in_cells_and_rows(train, test, data):
    clients = data.draw(st.integers(1, len(train)))
    made = balanced_dirichlet(train, test, clients, 0, 0.5)
    totals = np.bincount(test, minlength=6)
    counts = histograms(train, made.train, 6)
    weights = np.where(counts.any(0), counts, 1)
    exact = weights * totals / weights.sum(0)
    found = histograms(test, made.test, 6)
    assert (found >= np.floor(exact - 1e-6)).all() and (found <= np.ceil(exact + 1e-6)).all()
    assert (found.sum(1) >= np.floor(exact.sum(1) - 1e-6)).all() and (found.sum(1) <= np.ceil(exact.sum(1) + 1e-6)).all()


@given(labels_of_any_kind, labels_of_any_kind, st.data())
def test_a_client_has_no_test_class_that_it_did_not_train_on_if_anyone_did(train, test, data):
    clients = data.draw(st.integers(1, len(train)))
    made = balanced_dirichlet(train, test, clients, 0, 0.3)
    trained = histograms(train, made.train, 6)
    tested = histograms(test, made.test, 6)
    assert not (tested[:, trained.any(0)] > 0)[trained[:, trained.any(0)] == 0].any()


def test_a_balanced_split_of_cifar_gives_every_client_500_training_and_100_test_examples():
    made = balanced_dirichlet(CIFAR_TRAIN, CIFAR_TEST, 100, 0, 0.3)
    assert (made.train.counts == 500).all() and (made.test.counts == 100).all()
    assert dealt_once(made.train, 50_000) and dealt_once(made.test, 10_000)


@pytest.mark.parametrize("seed", range(3))
def test_a_client_has_the_same_label_mix_in_train_and_test(seed):
    made = balanced_dirichlet(CIFAR_TRAIN, CIFAR_TEST, 100, seed, 0.3)
    train, test = histograms(CIFAR_TRAIN, made.train, 10), histograms(CIFAR_TEST, made.test, 10)
    assert mean_cosine(train, test) > 0.99
    assert mean_cosine(train, np.roll(test, 1, 0)) < 0.6
    assert not (test[train == 0]).any()


@pytest.mark.parametrize("seed", range(3))
def test_unrelated_tests_are_dealt_once_and_say_nothing_of_a_client(seed):
    """As published (D-FI2): the own test of a client is then no more like its training than anybody else's."""
    own, other = (balanced_dirichlet(CIFAR_TRAIN, CIFAR_TEST, 100, seed, 0.3, tests=tests) for tests in ("own", "unrelated"))
    assert same(own.train, other.train)
    assert dealt_once(other.test, len(CIFAR_TEST))
    assert set(other.test.counts.tolist()) == {100}
    trained = histograms(CIFAR_TRAIN, other.train, 10)
    assert mean_cosine(trained, histograms(CIFAR_TEST, own.test, 10)) > 0.95
    assert mean_cosine(trained, histograms(CIFAR_TEST, other.test, 10)) < 0.5


def test_a_small_alpha_makes_clients_differ_and_a_large_one_makes_them_alike():
    def spread(alpha):
        made = balanced_dirichlet(CIFAR_TRAIN, CIFAR_TEST, 100, 0, alpha)
        return histograms(CIFAR_TRAIN, made.train, 10).std(0).mean()

    assert spread(0.1) > 2 * spread(1.0) > 4 * spread(100.0)


def test_a_client_whose_classes_are_exhausted_gets_what_is_left():
    train = np.array([0] * 4 + [1] * 96)
    made = balanced_dirichlet(train, train, 4, 0, 1e-3)  # each client wants one class only
    assert (made.train.counts == 25).all() and dealt_once(made.train, 100)


def test_a_unit_moves_to_make_room_for_another_and_a_class_without_a_way_waits():
    fractions = np.array([[0.5, 0, 0], [0, 0.9, 0.8], [0, 0.7, 0]])  # (clients, classes)
    placed, lack, room = np.zeros((3, 3), np.bool_), np.array([1, 1, 1]), np.array([0, 1, 1])
    place(fractions, placed, lack, room, np.random.default_rng(0))
    assert np.argwhere(placed).tolist() == [[1, 2], [2, 1]]
    assert lack.tolist() == [1, 0, 0] and not room.any()


def test_a_class_that_only_the_test_set_has_is_dealt_to_somebody():
    made = balanced_dirichlet(np.zeros(20, np.int64), np.array([0, 1, 1, 1, 1]), 2, 0, 1.0)
    assert dealt_once(made.test, 5)


def test_a_thousand_clients_with_a_hundred_classes_take_seconds_at_most():
    began = time.perf_counter()
    made = balanced_dirichlet(np.arange(50_000) % 100, np.arange(10_000) % 100, 1000, 0, 0.3)
    assert time.perf_counter() - began < 5
    assert (made.train.counts == 50).all() and (made.test.counts == 10).all()


def test_a_hundred_thousand_clients_are_divided_within_two_seconds():
    labels, owners = np.arange(1_000_000) % 10, np.arange(1_000_000) % 100_000
    began = time.perf_counter()
    assert len(iid(labels, labels[:1000], 100_000, 0).train) == 100_000
    assert len(by_column(owners, owners[:1000]).train) == 100_000
    assert time.perf_counter() - began < 2


def test_an_unbalanced_dirichlet_split_has_the_least_size_and_the_same_mix_in_train_and_test():
    made = dirichlet(CIFAR_TRAIN, CIFAR_TEST, 100, 0, 0.3)
    assert made.train.counts.min() >= 10 and np.ptp(made.train.counts) > 100
    assert dealt_once(made.train, 50_000) and dealt_once(made.test, 10_000)
    assert mean_cosine(histograms(CIFAR_TRAIN, made.train, 10), histograms(CIFAR_TEST, made.test, 10)) > 0.99


def test_a_class_without_training_examples_is_no_obstacle_to_a_dirichlet_split():
    made = dirichlet(np.arange(100) % 2 * 2, np.arange(30) % 3, 4, 0, 1.0, least=5)
    assert dealt_once(made.train, 100) and dealt_once(made.test, 30)


def test_the_published_agnews_split_is_possible():
    labels = np.arange(42_000) % 4
    assert dirichlet(labels, labels[:7600], 200, 0, 1.0, least=4).train.counts.min() >= 4


def test_a_dirichlet_split_gives_up_with_advice():
    with pytest.raises(DataError, match=r"1000 Dirichlet draws with alpha 0\.01 .* larger alpha"):
        dirichlet(np.arange(1000) % 2, np.arange(10) % 2, 50, 0, 0.01)


@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 3))
def test_shards_give_each_client_its_number_of_classes_and_each_class_as_many_clients(clients, each, seed):
    train, test = np.arange(600) % 6, np.arange(120) % 6
    made = shards(train, test, clients, seed, each)
    has, tested = histograms(train, made.train, 6) > 0, histograms(test, made.test, 6) > 0
    assert (has.sum(1) == each).all() and np.ptp(has.sum(0)) <= 1
    assert np.array_equal(has, tested)
    if clients * each >= 6:
        assert dealt_once(made.train, 600) and dealt_once(made.test, 120)


def test_two_classes_for_each_of_100_clients_are_250_training_examples_of_each():
    made = shards(CIFAR_TRAIN, CIFAR_TEST, 100, 0, 2)
    counts = histograms(CIFAR_TRAIN, made.train, 10)
    assert set(np.unique(counts)) == {0, 250}
    assert np.array_equal(histograms(CIFAR_TEST, made.test, 10) * 5, counts)


def test_classes_that_nobody_has_are_left_out_of_train_and_test():
    made = shards(np.arange(100) % 10, np.arange(100) % 10, 2, 0, 3)
    assert len(made.train.indices) == len(made.test.indices) == 60


def test_k_shots_are_k_examples_of_each_class_for_everyone():
    made = k_shot(np.arange(1000) % 10, np.arange(200) % 10, 20, 0, 5)
    assert (histograms(np.arange(1000) % 10, made.train, 10) == 5).all()
    assert dealt_once(made.test, 200) and len(set(made.train.indices.tolist())) == 1000


def test_natural_clients_are_those_of_the_column():
    made = by_column(np.array([7, 3, 7, 9, 3, 7]), np.array([9, 7, 5]))
    assert [made.train[client].tolist() for client in range(3)] == [[1, 4], [0, 2, 5], [3]]
    assert [made.test[client].tolist() for client in range(3)] == [[], [1], [0]]


def test_the_natural_clients_with_most_examples_are_kept():
    made = by_column(np.array([7, 3, 7, 9, 3, 7]), np.array([9, 7, 5]), 2)
    assert [made.train[client].tolist() for client in range(2)] == [[1, 4], [0, 2, 5]]
    assert made.test.indices.tolist() == [1]


@pytest.mark.parametrize("how", WAYS)
def test_a_seed_gives_the_same_split_again_and_another_seed_another(how):
    one, again, other = (split(small(), 10, how, seed, **WAYS[how]) for seed in (1, 1, 2))
    assert same(one.train, again.train) and same(one.test, again.test)
    assert not same(one.train, other.train) and not same(one.test, other.test)


@pytest.mark.parametrize("how", WAYS)
def test_no_example_is_dealt_twice_and_every_client_has_some(how):
    made = split(small(), 10, how, 0, **WAYS[how])
    for parts in (made.train, made.test):
        assert len(np.unique(parts.indices)) == len(parts.indices)
    assert made.train.counts.min() > 0


def digest(made: Split) -> str:
    return hashlib.sha256(made.train.indices.tobytes() + made.test.indices.tobytes()).hexdigest()


def test_another_process_makes_the_same_split():
    code = (
        "import hashlib, numpy as np; from raffm.data.splits import balanced_dirichlet as b;"
        "s = b(np.arange(1000) % 10, np.arange(200) % 10, 10, 3, .3);"
        "import sys; sys.stdout.write(hashlib.sha256(s.train.indices.tobytes() + s.test.indices.tobytes()).hexdigest())"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there == digest(balanced_dirichlet(np.arange(1000) % 10, np.arange(200) % 10, 10, 3, 0.3))


def test_parameters_change_the_draw_and_integers_are_numbers_like_any_other():
    train, test = np.arange(1000) % 10, np.arange(200) % 10
    assert digest(balanced_dirichlet(train, test, 10, 0, 1)) == digest(balanced_dirichlet(train, test, 10, 0, 1.0))
    assert digest(iid(train, test, 10, 0)) != digest(iid(train, test, 11, 0))


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("clients", "message"), [(0, "at least 1"), (-1, "at least 1"), (1001, "more clients than samples")])
def test_a_wrong_number_of_clients_is_refused(how, clients, message):
    with pytest.raises(DataError, match=message):
        split(small(), clients, how, 0, **WAYS[how])


@pytest.mark.parametrize(
    ("how", "parameters", "message"),
    [
        ("random", {}, "no split 'random'. There are: iid, dirichlet-balanced, dirichlet, shards, k-shot, column"),
        ("iid", {"alpha": 1}, "no parameter 'alpha'. It has: none"),
        ("dirichlet", {"beta": 1}, "no parameter 'beta'. It has: alpha, least"),
        ("dirichlet", {}, "needs the parameter 'alpha'"),
        ("dirichlet", {"alpha": 0}, "alpha is 0; it must be a positive"),
        ("dirichlet-balanced", {"alpha": -1.0}, "alpha is -1.0"),
        ("dirichlet-balanced", {"alpha": float("nan")}, "alpha is nan"),
        ("dirichlet-balanced", {"alpha": float("inf")}, "alpha is inf"),
        ("dirichlet", {"alpha": 1.0, "least": 0}, "`least` is 0"),
        ("dirichlet", {"alpha": 1.0, "least": 101}, "need 1010, but there are 1000"),
        ("shards", {"classes_per_client": 0}, "classes_per_client is 0, but the training examples have 10 classes"),
        ("shards", {"classes_per_client": 11}, "classes_per_client is 11"),
        ("k-shot", {"k": 0}, "k is 0"),
        ("k-shot", {"k": 11}, "need 110, but class 0 has 100"),
        ("column", {}, "has no owners. Load it with Columns"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_exists(how, parameters, message):
    with pytest.raises(DataError, match=message):
        split(small(), 10, how, 0, **parameters)


def test_only_natural_clients_need_no_number():
    owned = labelled([0, 1, 0], [1], owners=(np.array([4, 5, 4]), np.array([5])))
    assert len(split(owned, None, "column", 0).train) == 2
    with pytest.raises(DataError, match="needs a number of clients"):
        split(owned, None, "iid", 0)
    with pytest.raises(DataError, match="3 clients were asked for, but the owner column has 2"):
        split(owned, 3, "column", 0)


def test_a_client_that_would_have_nothing_is_refused():
    with pytest.raises(DataError, match="would have no training data"):
        shards(np.array([0, 1, 1, 1, 1, 1]), np.array([0]), 4, 0, 1)


@given(labels_of_any_kind, st.data())
def test_stratified_parts_have_their_sizes_and_the_same_mix(labels, data):
    count = data.draw(st.integers(0, len(labels)))
    kept, held = stratified(labels, count, 0)
    assert len(held) == count and np.array_equal(np.sort(np.concatenate([kept, held])), np.arange(len(labels)))
    exact = np.bincount(labels, minlength=6) * count / len(labels)
    assert (np.abs(np.bincount(labels[held], minlength=6) - exact) < 1).all()


def test_a_held_out_share_leaves_the_training_set_and_not_the_test_set():
    owned = labelled(np.arange(100) % 10, np.arange(50) % 10, owners=(np.arange(100), np.arange(50)))
    held = hold_out(owned, 0.2, 0)
    assert held.validation is not None
    assert held.test is owned.test
    assert (len(held.train), len(held.validation)) == (80, 20)
    assert torch.equal(held.validation.labels.bincount(), torch.full((10,), 2))
    together = torch.cat([held.train.inputs["pixel_values"], held.validation.inputs["pixel_values"]])
    assert torch.equal(together.sort().values, torch.arange(100))
    assert held.owners is not None and np.array_equal(held.owners[0], held.train.inputs["pixel_values"].numpy())


def test_a_held_out_share_depends_on_the_seed_alone():
    one, again, other = (hold_out(small(), 0.1, seed).train.inputs["pixel_values"] for seed in (0, 0, 1))
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_nothing_is_held_out_of_a_share_of_zero_or_where_there_is_a_validation_set():
    dataset = small()
    assert hold_out(dataset, 0, 0) is dataset
    held = hold_out(dataset, 0.1, 0)
    assert hold_out(held, 0.5, 0) is held


@pytest.mark.parametrize(
    ("share", "message"), [(1.0, "less than 1"), (-0.1, "at least 0"), (1e-9, "leaves none"), (0.9999, "none")]
)
def test_a_share_that_leaves_a_side_empty_is_refused(share, message):
    with pytest.raises(DataError, match=message):
        hold_out(small(), share, 0)
