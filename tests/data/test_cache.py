"""The cache: what was made once is read again, unless anything it depends on has changed."""

import json
import time

import numpy as np
import pytest
import torch

from raffm.data.cache import cached, is_cached, prune, split_cached, stamp
from raffm.data.examples import Dataset, Examples
from raffm.data.splits import split
from raffm.errors import DataError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RAFFM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Maker:
    """Makes tensors and counts how often."""

    def __init__(self):
        self.times = 0

    def __call__(self):
        self.times += 1
        return {"pixels": torch.arange(6, dtype=torch.uint8).view(2, 3), "lengths": torch.tensor([1, 2])}


def dataset(labels=10, owners=None):
    train, test = torch.arange(100) % labels, torch.arange(40) % labels
    return Dataset("made", Examples({}, train), Examples({}, test), tuple("abcdefghij"), owners=owners)


def entries(folder):
    return sorted(path.parent for path in folder.glob("*/*/key.json"))


def test_what_was_made_once_is_not_made_again():
    make = Maker()
    first, second = cached("kind", {"a": 1}, make), cached("kind", {"a": 1}, make)
    assert make.times == 1
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) and first[name].dtype == second[name].dtype for name in first)


def test_any_part_of_the_key_and_the_kind_tell_entries_apart(folder):
    make = Maker()
    for kind, key in [("one", {"a": 1}), ("one", {"a": 2}), ("one", {"a": 1, "b": None}), ("two", {"a": 1})]:
        cached(kind, key, make)
    assert make.times == len(entries(folder)) == 4


def test_what_was_used_last_is_kept():
    make = Maker()
    for number in (1, 2, 3):
        cached("kind", {"a": number}, make)
        time.sleep(0.02)
    cached("kind", {"a": 1}, make)
    prune("kind", 2)
    assert [is_cached("kind", {"a": number}) for number in (1, 2, 3)] == [True, False, True]


def test_the_order_of_a_key_and_tuples_in_it_do_not_matter():
    make = Maker()
    cached("kind", {"a": 1, "b": (1, 2)}, make)
    cached("kind", {"b": [1, 2], "a": 1}, make)
    assert make.times == 1


def test_the_key_lies_beside_the_tensors_for_people_to_read(folder):
    cached("kind", {"seed": 7}, Maker())
    (entry,) = entries(folder)
    assert json.loads((entry / "key.json").read_text())["seed"] == 7


@pytest.mark.parametrize("name", ["key.json", "tensors.safetensors"])
@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-3])])
def test_a_damaged_entry_is_made_anew(folder, name, damage):
    make = Maker()
    cached("kind", {}, make)
    damage(entries(folder)[0] / name)
    assert torch.equal(cached("kind", {}, make)["lengths"], torch.tensor([1, 2]))
    cached("kind", {}, make)
    assert make.times == 2


def test_an_entry_of_another_key_is_not_believed(folder):
    make = Maker()
    cached("kind", {"a": 1}, make)
    (entry,) = entries(folder)
    (entry / "key.json").write_text(json.dumps({"a": 2}))
    cached("kind", {"a": 1}, make)
    assert make.times == 2


def test_a_cache_that_cannot_be_written_only_stores_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("RAFFM_CACHE", str(tmp_path / "file"))
    make = Maker()
    for _ in range(2):
        assert torch.equal(cached("kind", {}, make)["lengths"], torch.tensor([1, 2]))
    assert make.times == 2


def test_an_error_while_making_leaves_no_entry(folder):
    def fail():
        raise DataError("no")

    with pytest.raises(DataError):
        cached("kind", {}, fail)
    assert not entries(folder)


def test_the_default_folder_is_in_the_home_of_the_user(tmp_path, monkeypatch):
    monkeypatch.delenv("RAFFM_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    cached("kind", {}, Maker())
    assert entries(tmp_path / ".cache" / "raffm")


def test_a_file_that_changed_has_another_stamp(tmp_path):
    file = tmp_path / "data"
    file.write_text("one")
    before = stamp(file)
    file.write_text("three")
    assert stamp(file) != before == {**before, "path": str(file.resolve()), "size": 3}


def test_a_cached_split_is_the_split(folder):
    plain = split(dataset(), 5, "dirichlet-balanced", 1, alpha=0.3)
    for _ in range(2):
        made = split_cached(dataset(), 5, "dirichlet-balanced", 1, alpha=0.3)
        for one, other in ((made.train, plain.train), (made.test, plain.test)):
            assert np.array_equal(one.indices, other.indices) and np.array_equal(one.offsets, other.offsets)
            assert one.indices.dtype == one.offsets.dtype == np.int64
    assert len(entries(folder)) == 1


def test_a_new_seed_number_parameter_way_label_or_owner_makes_a_new_split(folder):
    split_cached(dataset(), 5, "dirichlet-balanced", 1, alpha=0.3)
    split_cached(dataset(), 5, "dirichlet-balanced", 2, alpha=0.3)
    split_cached(dataset(), 6, "dirichlet-balanced", 1, alpha=0.3)
    split_cached(dataset(), 5, "dirichlet-balanced", 1, alpha=0.4)
    split_cached(dataset(), 5, "iid", 1)
    split_cached(dataset(labels=9), 5, "iid", 1)
    for shift in (0, 1):
        split_cached(dataset(owners=((np.arange(100) + shift) // 10, np.arange(40) // 10)), None, "column", 1)
    assert len(entries(folder)) == 8


def test_a_refused_split_is_not_stored(folder):
    with pytest.raises(DataError, match="more clients than samples"):
        split_cached(dataset(), 1000, "iid", 1)
    assert not entries(folder)
