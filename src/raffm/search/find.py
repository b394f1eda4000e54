"""The search: from submodels that a ranking promises, generation after generation, to the front of those that are good.

Optuna's NSGA-II breeds them: it handles two goals and limits, is asked for candidates and told their scores, so that we judge
them as we like (many at a time, none twice), and it is the best kept of its kind. A search that is begun again judges nothing
that its log knows: with the same seed it breeds the same candidates.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from raffm.devices.budget import Budget
from raffm.devices.fit import Shares, even_shares, fit, kept_shares
from raffm.errors import BudgetError, RunError
from raffm.libraries import library
from raffm.models.salience import rank
from raffm.models.space import Space
from raffm.search.front import Candidate, Sizes, best, fits, front, promising
from raffm.search.guess import Guess
from raffm.search.judge import Judge
from raffm.search.log import Log
from raffm.search.price import Prices
from raffm.seeds import generator

GENERATION = 16
"""Candidates that are judged at a time."""

POPULATION = 32
"""Candidates that others are bred from."""

POOL = 256
"""Candidates that are bred at a time; those that promise the most are judged."""

SMALL = 5.0
"""How near to its parents' a changed width stays: mostly a step or two of eight away."""

CHANGED = 0.1
"""The part of a child's widths that is changed."""

IDLE = 3
"""Generations without anything new after which the search ends."""

PROMISED = 6
"""Sizes, evenly spread below the limit, at which the first generation is cut evenly and as the ranking says."""

VARIED = 24
"""Of the first generation, those that differ from these in every width by a step or none."""

STRICTER = 0.9
"""The part of a limit on latency, at most, that is asked for next, where no finalist kept it."""

NEAR = 0.8
"""The part of a limit above which submodels are judged first: the best within a limit is seldom much smaller."""

Key = tuple[int, ...]

Tick = Callable[[int, int], None]
"""Told how many candidates are judged, and how many will be."""


@dataclass(frozen=True)
class Effort:
    """How long to search: candidates judged on a few examples, those of them judged on all, and how many at a time."""

    evaluations: int = 200
    finalists: int = 16
    workers: int = 1

    def __post_init__(self) -> None:
        for name in ("evaluations", "finalists", "workers"):
            if getattr(self, name) < 1:
                raise RunError(f"a search needs {name} of at least 1, but was given {getattr(self, name)!r}.")


@dataclass(frozen=True, eq=False)
class Found:
    """What a search gives: all that it judged, the finalists' front, and the best of them within the limits."""

    judged: tuple[Candidate, ...]
    finalists: tuple[Candidate, ...]
    limits: Mapping[str, float]
    cost: str
    submodels: int
    """How many the space holds."""

    @property
    def front(self) -> list[Candidate]:
        """The finalists that no other beats at a lower cost."""
        return front([each for each in self.finalists if fits(each.costs, self.limits)], self.cost)

    @property
    def best(self) -> Candidate:
        """The best within the limits."""
        found = best(self.finalists, self.limits, self.cost)
        if found is None:
            fastest = min(each.costs["latency"] for each in self.finalists)
            raise BudgetError(
                f"none of {len(self.finalists)} finalists keeps {worded(self.limits)} when measured: the fastest takes "
                f"{_in_words('latency', fastest)}. Raise the limit, or give a space with smaller sizes (--space)."
            )
        return found


def find(
    judge: Judge,
    space: Space,
    prices: Prices,
    limits: Mapping[str, float],
    effort: Effort | None = None,
    log: Log | None = None,
    tick: Tick = lambda done, total: None,
    is_timed: bool = True,
) -> Found:
    """Search a space for the best submodels within limits.

    Where all finalists take longer than was estimated, and too long, others are bred that should be faster.
    """
    effort = effort or Effort()
    cost = next(iter(limits), "params")
    _refuse_too_small(prices, space, limits)
    panel = _Panel(judge, prices, Log() if log is None else log, effort)
    bounds, judged, finalists = dict(limits), dict[Key, Candidate](), list[Candidate]()
    while fits(prices.of(space.smallest()), bounds):
        bred = panel.bred(space, bounds, cost, tick)
        fresh = promising(Guess(space, bred).revised(bred), bounds, cost, effort.finalists)
        looked_at = panel.looked_at(fresh)
        timed = [_timed(prices, each) for each in looked_at] if is_timed else looked_at
        judged |= {_key(each): each for each in bred}
        finalists += timed
        if "latency" not in limits or best(finalists, limits, cost) is not None:
            break
        slower = min(each.costs["latency"] / one.costs["latency"] for each, one in zip(timed, fresh, strict=True))
        bounds["latency"] = min(limits["latency"] / slower, STRICTER * bounds["latency"])
    return Found(tuple(judged.values()), tuple(finalists), limits, cost, space.count())


def _timed(prices: Prices, candidate: Candidate) -> Candidate:
    """With the latency that it has here; that of a device which is not here stays an estimate."""
    taken = prices.timed(candidate.sizes)
    costs = dict(candidate.costs)
    if "latency" in costs and prices.speed is None:
        costs["latency"] = taken.median
    return replace(candidate, costs=costs, latency=(taken.median, taken.low, taken.high))


def _refuse_too_small(prices: Prices, space: Space, limits: Mapping[str, float]) -> None:
    least = prices.of(space.smallest())
    for kind, limit in limits.items():
        if least[kind] > limit:
            raise BudgetError(
                f"no submodel fits: the smallest of the space has {kind} {_in_words(kind, least[kind])}, above the limit "
                f"{_in_words(kind, limit)}. "
                "Raise the limit, or give a space with smaller sizes (--space)."
            )


def worded(limits: Mapping[str, float]) -> str:
    """Limits in words."""
    return " and ".join(f"{kind} at most {_in_words(kind, limit)}" for kind, limit in limits.items()) or "no limit"


def _in_words(kind: str, cost: float) -> str:
    return f"{1000 * cost:,.6g} ms" if kind == "latency" else f"{cost:,.6g}"


# -- breeding and judging ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Panel:
    """Judges candidates, several at a time, and none twice."""

    judge: Judge
    prices: Prices
    log: Log
    effort: Effort

    def bred(self, space: Space, limits: Mapping[str, float], cost: str, tick: Tick) -> list[Candidate]:
        """Candidates within the limits, until enough of them are judged."""
        study, judged = _study(self.judge.seed), dict[Key, Candidate]()
        first, choices = _first(self.prices, limits), _distributions(space)
        for sizes in first:
            study.enqueue_trial({knob: space.sizes[knob].index(sizes[knob]) for knob in space.sizes})
        idle = 0
        while len(judged) < self.effort.evaluations and idle < IDLE:
            trials = [_asked(study, choices) for _ in range(POOL if judged else len(first))]
            bred = self._guessed(space, [_sizes(space, trial) for trial in trials], list(judged.values()))
            fresh = {_key(each): each for each in bred if _key(each) not in judged and fits(each.costs, limits)}
            left = self.effort.evaluations - len(judged)
            chosen = _chosen(list(fresh.values()), limits, cost) if judged else list(fresh.values())
            idle = 0 if chosen else idle + 1
            for candidate in self._scored(chosen[:left], self.judge.few):
                judged[_key(candidate)] = candidate
                tick(len(judged), self.effort.evaluations)
            for trial, candidate in zip(trials, bred, strict=True):
                _tell(study, trial, judged.get(_key(candidate), candidate), limits, cost)
        return list(judged.values())

    def _guessed(self, space: Space, chosen: Sequence[Sizes], judged: Sequence[Candidate]) -> list[Candidate]:
        """Candidates with their costs, and the scores that those judged so far let expect."""
        expected = Guess(space, judged).scores(chosen) if judged else [0.0] * len(chosen)
        costs = self.prices.many(chosen)
        return [Candidate(*each) for each in zip(chosen, costs, expected, strict=True)]

    def looked_at(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The same candidates, judged on all examples."""
        return list(self._scored(candidates, len(self.judge.validation)))

    def _scored(self, candidates: Sequence[Candidate], examples: int) -> Iterator[Candidate]:
        """In their order, as soon as they are ready."""
        known = [self.log.score(candidate.sizes, examples) for candidate in candidates]
        new = [candidate.sizes for candidate, score in zip(candidates, known, strict=True) if score is None]
        with _workers(self.effort.workers) as pool:
            fresh = pool.map(lambda sizes: self.judge.score(sizes, examples), new)
            for candidate, logged in zip(candidates, known, strict=True):
                score = next(fresh) if logged is None else logged
                if logged is None:
                    self.log.add(candidate.sizes, examples, score)
                yield replace(candidate, score=score, examples=examples)


def _chosen(fresh: Sequence[Candidate], limits: Mapping[str, float], cost: str) -> list[Candidate]:
    """The next to be judged: the most promising of those that use up most of a limit, then of the others."""
    near = [each for each in fresh if any(each.costs[kind] >= NEAR * limit for kind, limit in limits.items())]
    found = promising(near, limits, cost, GENERATION)
    others = [each for each in fresh if all(each is not one for one in near)]
    return found + promising(others, limits, cost, GENERATION - len(found))


def _workers(count: int) -> ThreadPoolExecutor:
    """Threads: torch lets others run while it computes. Each computes alone, so that results do not depend on how many."""
    return ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))


def _asked(study: Any, choices: Mapping[str, Any]) -> Any:
    """A trial of the current generation, also where its widths are given: only then others are bred from it."""
    trial = study.ask(choices)
    assert isinstance(trial.relative_params, dict)  # reading it is what counts the trial among its generation
    return trial


def _tell(study: Any, trial: Any, candidate: Candidate, limits: Mapping[str, float], cost: str) -> None:
    """Others are bred from candidates that were judged, and those beyond a limit are known as such; the rest is forgotten."""
    for kind, limit in limits.items():
        trial.set_constraint(kind, candidate.costs[kind] / limit - 1)
    if candidate.examples or not fits(candidate.costs, limits):
        study.tell(trial, (candidate.score, max(candidate.costs[cost], limits.get(cost, 0.0))))
    else:
        study.tell(trial, state=_optuna().trial.TrialState.FAIL)


def _study(seed: int) -> Any:
    optuna = _optuna()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():  # that its interface may change, which the pinned version settles
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        steps = optuna.samplers.nsgaii.PolynomialMutation(eta=SMALL)
    sampler = optuna.samplers.NSGAIISampler(population_size=POPULATION, mutation=steps, mutation_prob=CHANGED, seed=seed)
    return optuna.create_study(directions=("maximize", "minimize"), sampler=sampler)


def _optuna() -> Any:
    return library("optuna", RunError("a search needs optuna: pip install 'raffm[search]'."))


def _sizes(space: Space, trial: Any) -> Sizes:
    return {knob: sizes[trial.params[knob]] for knob, sizes in space.sizes.items()}


def _key(candidate: Candidate) -> Key:
    return tuple(candidate.sizes.values())


def _distributions(space: Space) -> dict[str, Any]:
    return {knob: _optuna().distributions.IntDistribution(0, len(sizes) - 1) for knob, sizes in space.sizes.items()}


# -- what is promising before anything is judged -------------------------------------------------------------------


def _first(prices: Prices, limits: Mapping[str, float]) -> list[Sizes]:
    """The first generation: cut evenly and as the ranking says, and such submodels with some widths changed."""
    draw = generator(prices.judge.seed, "search", "first")
    even, kept = _promised(prices, limits)
    first = [*even, kept, *(_varied(prices.space, even[place % len(even)], draw) for place in range(VARIED))]
    if any(fits(costs, limits) for costs in prices.many(first)):
        return first
    return [*first, prices.space.smallest()]


def _promised(prices: Prices, limits: Mapping[str, float]) -> tuple[list[Sizes], Sizes]:
    """Submodels that are cut evenly, the largest first, and the one that keeps the most of the ranking's score."""
    judge, space, cost = prices.judge, prices.space, prices.model
    server = judge.plan.server
    ranking = judge.ranking if judge.ranking.scores else rank(server.model, server.layout)
    even, kept = even_shares(server.layout, space.sizes), kept_shares(server.layout, ranking, space.sizes)
    least, most = prices.of(space.smallest()), prices.of(space.largest())
    bounds = {kind: min(most[kind], limits.get(kind, most[kind])) for kind in ("params", "bytes", "flops") if kind in most}

    def cut(shares: Shares, part: float) -> Sizes:
        budget = Budget(**{f"max_{kind}": int(max(least[kind], part * bound)) for kind, bound in bounds.items()})
        return {**space.largest(), **fit(server.layout, cost, budget, space.sizes, shares, judge.ranking)}

    return [cut(even, part) for part in np.linspace(1, NEAR if limits else 0, PROMISED)], cut(kept, 1)


def _varied(space: Space, sizes: Sizes, draw: torch.Generator) -> Sizes:
    """The same with every width one step up or down, or as it was."""
    found = {}
    for knob, levels in space.sizes.items():
        step = int(torch.randint(-1, 2, (1,), generator=draw))
        found[knob] = levels[min(max(levels.index(sizes[knob]) + step, 0), len(levels) - 1)]
    return found
