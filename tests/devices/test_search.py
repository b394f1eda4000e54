import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raffm.devices.search import Field, first_guess, solve


def random_field(seed, knobs, limits=1, levels=4):
    """Values and costs that rise with every level; each limit is somewhere between the least and the most."""
    random = np.random.default_rng(seed)
    counts = random.integers(1, levels + 1, knobs)
    rises = random.random((knobs, levels)) ** 2
    values = np.where(np.arange(levels) < counts[:, None], np.cumsum(rises, 1), -np.inf)
    costs = np.cumsum(random.random((limits, knobs, levels)), 2)
    least, most = costs[:, :, 0].sum(1), costs[:, np.arange(knobs), counts - 1].sum(1)
    bounds = least + random.random(limits) * (most - least)

    def usage(choices):
        return costs[:, np.arange(knobs), choices].sum(2).T / bounds

    return Field(values, usage), random


def all_choices(field):
    return np.indices((field.top + 1).tolist()).reshape(len(field.top), -1).T


def steps_up(field, choice):
    return [choice + step for step in np.eye(len(choice), dtype=np.int64) if (choice + step <= field.top).all()]


problems = {"seed": st.integers(0, 9999), "knobs": st.integers(1, 14), "limits": st.integers(1, 3)}


@given(**problems)
def test_what_is_found_fits_and_no_level_of_it_can_be_raised(seed, knobs, limits):
    field, _ = random_field(seed, knobs, limits)
    for choice in (first_guess(field), solve(field)):
        assert field.fits(choice[None]).all()
        assert not any(field.fits(step[None]).any() for step in steps_up(field, choice))


@given(**{**problems, "knobs": st.integers(1, 6)})
def test_a_small_field_is_solved_exactly(seed, knobs, limits):
    field, _ = random_field(seed, knobs, limits)
    assert field.value(solve(field)) == pytest.approx(float(field.value(field.best(all_choices(field)))), abs=1e-12)


@given(**{**problems, "knobs": st.integers(8, 20)})
def test_no_random_choice_of_a_thousand_is_better(seed, knobs, limits):
    field, random = random_field(seed, knobs, limits)
    drawn = field.best((random.random((1000, knobs)) * (field.top + 1)).astype(np.int64))
    assert drawn is None or field.value(solve(field)) >= field.value(drawn) - 1e-12


@given(seed=st.integers(0, 9999))
def test_the_same_field_gives_the_same_choice(seed):
    assert solve(random_field(seed, 12)[0]).tolist() == solve(random_field(seed, 12)[0]).tolist()


def test_a_peak_that_no_single_step_lowers_is_passed():
    def highest(choices):
        return (1.0 + choices.max(1, keepdims=True)) / 2

    values = np.cumsum(np.ones((9, 4)), 1)
    assert solve(Field(values, highest)).tolist() == [1] * 9


def test_a_field_without_knobs_has_one_choice():
    field = Field(np.zeros((0, 0)), lambda choices: np.zeros((len(choices), 1)))
    assert solve(field).tolist() == []
