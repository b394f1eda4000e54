"""Laws of the front: what is on it, and what is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raffm.search.front import Candidate, best, fits, front, promising

CANDIDATES = st.lists(
    st.builds(
        lambda params, score: Candidate({"a": params}, {"params": float(params)}, score),
        st.integers(1, 20),
        st.integers(0, 20).map(lambda tenths: tenths / 20),
    ),
    max_size=30,
)


@given(CANDIDATES)
def test_nothing_on_the_front_is_beaten_and_everything_else_is(candidates: list[Candidate]) -> None:
    found = front(candidates, "params")
    assert [each.costs["params"] for each in found] == sorted({each.costs["params"] for each in found})
    for candidate in candidates:
        better = [each for each in found if each.costs["params"] <= candidate.costs["params"] and each.score >= candidate.score]
        assert better
    for each in found:
        rivals = [other for other in candidates if other.costs["params"] <= each.costs["params"] and other.score > each.score]
        assert not rivals


@given(CANDIDATES, st.integers(0, 20))
def test_the_best_is_the_last_of_the_front_that_fits(candidates: list[Candidate], limit: int) -> None:
    limits = {"params": float(limit)}
    found = best(candidates, limits, "params")
    within = [each for each in front(candidates, "params") if fits(each.costs, limits)]
    assert (found is None) == (not within)
    if found is not None:
        assert (found.score, found.costs["params"]) == (within[-1].score, within[-1].costs["params"])


@given(CANDIDATES, st.integers(1, 10))
def test_a_closer_look_is_for_the_front_where_nothing_is_limited(candidates: list[Candidate], count: int) -> None:
    chosen = promising(candidates, {}, "params", count)
    assert len(chosen) == min(count, len(candidates))
    assert len({id(each) for each in chosen}) == len(chosen)
    first = {id(each) for each in front(candidates, "params")}
    assert {id(each) for each in chosen[: len(first)]} <= first
    assert not candidates or chosen[0].score == max(each.score for each in candidates)


@given(CANDIDATES, st.integers(0, 20), st.integers(1, 10))
def test_a_closer_look_is_for_the_best_within_limits(candidates: list[Candidate], limit: int, count: int) -> None:
    limits = {"params": float(limit)}
    within = [each for each in candidates if fits(each.costs, limits)]
    chosen = promising(candidates, limits, "params", count)
    assert [each.score for each in chosen] == sorted((each.score for each in within), reverse=True)[:count]
    assert {id(each) for each in chosen} <= {id(each) for each in within}


def test_candidates_survive_json() -> None:
    for latency in (None, (0.1, 0.05, 0.2)):
        candidate = Candidate({"a": 3}, {"params": 7.0, "flops": 9.0}, 0.5, 12, latency)
        assert Candidate.from_json(candidate.to_json()) == candidate
