"""Which examples belong to which client: one draw of what is typical of a client, for training and test alike."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.random import PCG64, Generator

from raffm.data.examples import Dataset, Examples, Integers, Parts, Split
from raffm.data.questions import QUESTION
from raffm.data.rounding import Flags, Floats, proportional
from raffm.errors import DataError

TRIES = 1000  # draws of the unbalanced Dirichlet split before it gives up


def iid(train_labels: Integers, test_labels: Integers, clients: int, seed: int) -> Split:
    """Shuffled, the same number of examples for every client to within one."""
    _refuse_clients(clients, len(train_labels))
    draw = _generator(seed, "iid", clients)
    return Split(_evenly_dealt(len(train_labels), clients, draw), _evenly_dealt(len(test_labels), clients, draw))


def balanced_dirichlet(
    train_labels: Integers, test_labels: Integers, clients: int, seed: int, alpha: float, tests: str = "own"
) -> Split:
    """Clients of one size, each with its own mix of classes drawn from Dir(alpha), as FIARSE has them.

    Examples are dealt one by one to a random client that is not full yet, of a class by the client's mix over the
    classes that are left. Test examples follow what the client got for training; with `tests` = "unrelated" they are dealt
    by another draw of mixes, as the published code does.
    """
    _refuse_clients(clients, len(train_labels))
    _refuse_alpha(alpha)
    if tests not in ("own", "unrelated"):
        raise DataError(f'the tests of a client are its "own" or "unrelated" ones, not {tests!r}.')
    draw = _generator(seed, "dirichlet-balanced", clients, float(alpha))
    totals = _totals(train_labels, test_labels)
    mixes = draw.dirichlet(np.full(len(totals), float(alpha)), clients)
    sizes = _apportioned(np.ones(clients), len(train_labels))
    found = _alike(train_labels, test_labels, _dealt_by_mix(mixes, totals, sizes, draw), draw)
    if tests == "own":
        return found
    others = draw.dirichlet(np.full(len(totals), float(alpha)), clients)
    there = np.bincount(test_labels, minlength=len(totals)).astype(np.int64)
    counts = _dealt_by_mix(others, there, _apportioned(np.ones(clients), len(test_labels)), draw)
    return replace(found, test=_dealt(test_labels, counts, draw))


def dirichlet(train_labels: Integers, test_labels: Integers, clients: int, seed: int, alpha: float, least: int = 10) -> Split:
    """Every class divided among the clients by Dir(alpha), so that sizes differ; each client has at least `least`.

    A client that already has its even share gets nothing of further classes. The draw is repeated until all have enough.
    """
    _refuse_clients(clients, len(train_labels))
    _refuse_alpha(alpha)
    _refuse_least(least, clients, len(train_labels))
    draw = _generator(seed, "dirichlet", clients, float(alpha), least)
    totals = _totals(train_labels, test_labels)
    for _ in range(TRIES):
        counts = _unbalanced(totals, clients, float(alpha), draw)
        if counts.sum(1).min() >= least:
            return _alike(train_labels, test_labels, counts, draw)
    raise DataError(
        f"none of {TRIES} Dirichlet draws with alpha {alpha!r} gave each of {clients} clients {least} of the"
        f" {len(train_labels)} training examples. Take a larger alpha, fewer clients or a smaller `least`."
    )


def shards(train_labels: Integers, test_labels: Integers, clients: int, seed: int, classes_per_client: int) -> Split:
    """Every client has `classes_per_client` classes, each divided evenly among those that have it (HeteroFL).

    All classes have the same number of clients to within one. Where clients x classes_per_client is less than the
    number of classes, some classes are nobody's and their examples are left out.
    """
    _refuse_clients(clients, len(train_labels))
    totals = _totals(train_labels, test_labels)
    present = np.flatnonzero(totals)
    if not 1 <= classes_per_client <= len(present):
        raise DataError(f"classes_per_client is {classes_per_client!r}, but the training examples have {len(present)} classes.")
    draw = _generator(seed, "shards", clients, classes_per_client)
    has = np.zeros((clients, len(totals)), np.bool_)
    has[:, present] = _assigned(clients, len(present), classes_per_client, draw)
    counts = np.zeros(has.shape, np.int64)
    for label in np.flatnonzero(has.any(0)):
        counts[has[:, label], label] = _apportioned(np.ones(has[:, label].sum()), int(totals[label]))
    return _alike(train_labels, test_labels, counts, draw)


def k_shot(train_labels: Integers, test_labels: Integers, clients: int, seed: int, k: int) -> Split:
    """Every client has k training examples of each class; test examples are dealt evenly, whatever their class."""
    _refuse_clients(clients, len(train_labels))
    totals = _totals(train_labels, train_labels)
    if k < 1:
        raise DataError(f"k is {k!r}, but every client needs at least 1 example of a class.")
    rarest = int(np.where(totals > 0, totals, totals.max()).argmin())
    if totals[rarest] < clients * k:
        raise DataError(
            f"{clients} clients with {k} examples of each class need {clients * k}, but class {rarest} has"
            f" {totals[rarest]}. Take fewer clients or a smaller k."
        )
    draw = _generator(seed, "k-shot", clients, k)
    counts = np.where(totals > 0, k, 0) * np.ones((clients, 1), np.int64)
    return Split(_dealt(train_labels, counts, draw), _evenly_dealt(len(test_labels), clients, draw))


def by_column(train_owners: Integers, test_owners: Integers, clients: int | None = None) -> Split:
    """The natural clients, in the order of their numbers; `clients` keeps those with most training examples.

    Test examples of owners who have no training example, or are not kept, are left out.
    """
    owners, counts = np.unique(train_owners, return_counts=True)
    kept = len(owners) if clients is None else clients
    _refuse_clients(kept, len(train_owners))
    if kept > len(owners):
        raise DataError(f"{kept} clients were asked for, but the owner column has {len(owners)}. Take at most {len(owners)}.")
    owners = np.sort(owners[np.argsort(-counts, kind="stable")[:kept]])
    return Split(_grouped(_places(train_owners, owners), kept), _grouped(_places(test_owners, owners), kept))


@dataclass(frozen=True)
class _Way:
    """A way to split, and the parameters that it must and may have."""

    divide: Callable[..., Split]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


_WAYS: Mapping[str, _Way] = {
    "iid": _Way(iid),
    "dirichlet-balanced": _Way(balanced_dirichlet, ("alpha",), ("tests",)),
    "dirichlet": _Way(dirichlet, ("alpha",), ("least",)),
    "shards": _Way(shards, ("classes_per_client",)),
    "k-shot": _Way(k_shot, ("k",)),
    "column": _Way(by_column),
}


def split(dataset: Dataset, clients: int | None, how: str, seed: int, **parameters: Any) -> Split:
    """The clients of a data set, by "iid", "dirichlet-balanced", "dirichlet", "shards", "k-shot" or "column".

    "column" takes the owners that the source gives, all of them where `clients` is None, and no seed matters.
    """
    way = _way(how, parameters)
    if how == "column":
        if dataset.owners is None:
            raise DataError(
                f"the data set {dataset.name!r} has no owners. Load it with Columns(owner=...) to split by a column."
            )
        return by_column(*dataset.owners, clients)
    if clients is None:
        raise DataError(f'the split {how!r} needs a number of clients; only "column" finds it by itself.')
    train, test = _Units.of(dataset, dataset.train), _Units.of(dataset, dataset.test)
    found = way.divide(train.strata, test.strata, clients, seed, **parameters)
    return Split(train.dealt(found.train), test.dealt(found.test))


def hold_out(dataset: Dataset, share: float, seed: int) -> Dataset:
    """The data set with a share of its training examples, of every class alike, as validation examples.

    A data set that has validation examples stays as it is; the test examples always do.
    """
    if not 0 <= share < 1:
        raise DataError(f"the validation share is {share!r}; it must be at least 0 and less than 1.")
    if share == 0 or dataset.validation is not None:
        return dataset
    units = _Units.of(dataset, dataset.train)
    count = round(share * len(units.strata))
    if not 0 < count < len(units.strata):
        raise DataError(f"a share of {share!r} of {len(units.strata)} training examples leaves none on one side.")
    kept, held = map(units.examples, stratified(units.strata, count, seed))
    owners = dataset.owners and (dataset.owners[0][kept], dataset.owners[1])
    return replace(dataset, train=dataset.train.take(kept), validation=dataset.train.take(held), owners=owners)


@dataclass(frozen=True)
class _Units:
    """What is dealt as a whole: an example, or all windows of a question. `places` has the unit of every example."""

    strata: Integers
    places: Integers | None = None

    @staticmethod
    def of(dataset: Dataset, examples: Examples) -> _Units:
        if dataset.questions is None or dataset.questions.spans is None:
            return _Units(examples.strata)
        _, first, places = np.unique(examples.labels[:, QUESTION].cpu().numpy(), return_index=True, return_inverse=True)
        return _Units(examples.strata[first], places)

    def examples(self, units: Integers) -> Integers:
        """The examples of some units, in order."""
        return units if self.places is None else np.flatnonzero(np.isin(self.places, units))

    def dealt(self, parts: Parts) -> Parts:
        """The examples of clients who have these units."""
        if self.places is None:
            return parts
        owners = np.full(len(self.strata), -1)
        owners[parts.indices] = np.repeat(np.arange(len(parts)), parts.counts)
        return _grouped(owners[self.places], len(parts))


def stratified(labels: Integers, count: int, seed: int) -> tuple[Integers, Integers]:
    """Two sets of positions, in order: the second has `count`, both have the same mix of classes."""
    draw = _generator(seed, "stratified", count)
    taken = _apportioned(_totals(labels, labels).astype(np.float64), count)
    parts = _dealt(labels, taken[None], draw)
    return np.setdiff1d(np.arange(len(labels)), parts[0]), parts[0]


def _way(how: str, parameters: Mapping[str, Any]) -> _Way:
    """The way of this name, once its parameters are known to fit."""
    if how not in _WAYS:
        raise DataError(f"there is no split {how!r}. There are: {', '.join(_WAYS)}.")
    way = _WAYS[how]
    known = (*way.required, *way.optional)
    for name in parameters:
        if name not in known:
            raise DataError(f"the split {how!r} has no parameter {name!r}. It has: {', '.join(known) or 'none'}.")
    for name in way.required:
        if name not in parameters:
            raise DataError(f"the split {how!r} needs the parameter {name!r}.")
    return way


def _generator(seed: int, *purpose: str | int | float) -> Generator:
    """A generator that depends on the seed and the purpose alone, as `raffm.seeds` has them for torch."""
    text = "/".join(map(str, (seed, "split", *purpose)))
    return Generator(PCG64(int.from_bytes(hashlib.sha256(text.encode()).digest(), "little")))


def _refuse_clients(clients: int, examples: int) -> None:
    if clients < 1:
        raise DataError(f"{clients} clients were asked for; there must be at least 1.")
    if clients > examples:
        raise DataError(f"more clients than samples: {clients} clients, {examples} training examples. Take fewer clients.")


def _refuse_alpha(alpha: float) -> None:
    if not 0 < alpha < math.inf:
        raise DataError(
            f"alpha is {alpha!r}; it must be a positive number: small for clients that differ, large for alike ones."
        )


def _refuse_least(least: int, clients: int, examples: int) -> None:
    if least < 1:
        raise DataError(f"`least` is {least!r}, but every client needs at least 1 training example.")
    if clients * least > examples:
        raise DataError(
            f"{clients} clients with at least {least} examples need {clients * least}, but there are {examples}."
            " Take fewer clients or a smaller `least`."
        )


def _totals(train_labels: Integers, test_labels: Integers) -> Integers:
    """How many training examples every class has, for all classes that training or test examples have."""
    classes = int(max(train_labels.max(initial=0), test_labels.max(initial=0))) + 1
    return np.bincount(train_labels, minlength=classes).astype(np.int64)


def _grouped(owners: Integers, clients: int) -> Parts:
    """The examples of every client, in order, where `owners` says whose each example is (-1: nobody's)."""
    order = np.argsort(owners, kind="stable")
    ends = np.cumsum(np.bincount(owners[owners >= 0], minlength=clients))
    return Parts(order[len(owners) - ends[-1] :], np.concatenate([[0], ends]).astype(np.int64))


def _places(values: Integers, among: Integers) -> Integers:
    """Where each value stands in a sorted array, -1 where it does not."""
    places = np.searchsorted(among, values).clip(max=len(among) - 1)
    return np.where(among[places] == values, places, -1)


def _evenly_dealt(examples: int, clients: int, draw: Generator) -> Parts:
    owners = np.empty(examples, np.int64)
    owners[draw.permutation(examples)] = np.arange(examples) % clients
    return _grouped(owners, clients)


def _apportioned(weights: Floats, total: int) -> Integers:
    """Whole numbers in the proportions of the weights that sum to `total`, by largest remainders."""
    exact = weights / weights.sum() * total
    whole: Integers = np.floor(exact).astype(np.int64)
    whole[np.argsort(whole - exact, kind="stable")[: total - int(whole.sum())]] += 1
    return whole


def _alike(train_labels: Integers, test_labels: Integers, counts: Integers, draw: Generator) -> Split:
    """Training examples by a table of counts (clients, classes), and test examples in the same proportions."""
    if not counts.any(1).all():
        raise DataError(
            f"client {int(counts.any(1).argmin())} of {len(counts)} would have no training data. Take fewer clients."
        )
    train, test = (np.bincount(labels, minlength=counts.shape[1]) for labels in (train_labels, test_labels))
    test[(train > 0) & ~counts.any(0)] = 0  # a class whose training examples are left out
    return Split(_dealt(train_labels, counts, draw), _dealt(test_labels, proportional(counts, test, draw), draw))


def _dealt(labels: Integers, counts: Integers, draw: Generator) -> Parts:
    """Random examples of each class, as many for every client as the table (clients, classes) says."""
    shuffled = draw.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    begins = np.concatenate([[0], np.cumsum(np.bincount(labels, minlength=counts.shape[1]))])
    owners = np.full(len(labels), -1)
    for label, begin in enumerate(begins[:-1]):
        dealt = np.repeat(np.arange(len(counts)), counts[:, label])
        owners[by_class[begin : begin + len(dealt)]] = dealt
    return _grouped(owners, len(counts))


def _dealt_by_mix(mixes: Floats, totals: Integers, sizes: Integers, draw: Generator) -> Integers:
    """How many examples of each class every client gets, one example after the other; it always ends."""
    left, room = totals.tolist(), sizes.tolist()
    below = list(range(len(room)))
    cells, is_stale = [], True
    for pick, height in draw.random((int(totals.sum()), 2)).tolist():
        if is_stale:
            ladders, is_stale = _ladders(mixes, np.array(left)), False
        place = int(pick * len(below))
        client = below[place]
        label = int(ladders[client].searchsorted(height, side="right"))
        cells.append(client * len(left) + label)
        left[label] -= 1
        is_stale = left[label] == 0
        room[client] -= 1
        if room[client] == 0:
            below[place] = below[-1]
            below.pop()
    return np.bincount(cells, minlength=mixes.size).reshape(mixes.shape).astype(np.int64)


def _ladders(mixes: Floats, left: Integers) -> Floats:
    """Each client's cumulative chances of the classes that are left; by what is left where its mix has none of them."""
    chances = np.where(left > 0, mixes, 0.0)
    chances[~chances.any(1)] = left
    steps: Floats = chances.cumsum(1)
    steps /= steps[:, -1:].copy()
    return steps


def _unbalanced(totals: Integers, clients: int, alpha: float, draw: Generator) -> Integers:
    """Counts (clients, classes), class by class; a client with its even share gets no more."""
    counts = np.zeros((clients, len(totals)), np.int64)
    for label, total in enumerate(totals):
        is_open = counts.sum(1) < totals.sum() / clients
        shares = draw.dirichlet(np.full(clients, alpha)) * is_open
        if total:
            counts[:, label] = _apportioned(shares if shares.any() else is_open.astype(np.float64), int(total))
    return counts


def _assigned(clients: int, classes: int, each: int, draw: Generator) -> Flags:
    """Which classes a client has: each time the least common ones, at random among equals."""
    has = np.zeros((clients, classes), np.bool_)
    owners = np.zeros(classes, np.int64)
    for row in has:
        row[np.argsort(owners + draw.random(classes))[:each]] = True
        owners += row
    return has
