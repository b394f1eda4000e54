"""A search: the same by the same seed, resumable, within limits, and blind to the test set."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from optuna.distributions import IntDistribution

from raffm.data.examples import Examples
from raffm.devices.timing import Timing
from raffm.errors import BudgetError, CheckpointError, RunError
from raffm.models.moments import batch_norms
from raffm.models.space import Space, read_space
from raffm.rounds.plan import Plan
from raffm.search.find import POPULATION, Effort, Found, _asked, _study, _tell, find
from raffm.search.front import Candidate, Sizes
from raffm.search.judge import Judge, judge_of, ranking_of
from raffm.search.log import Log
from raffm.search.price import Prices
from rounds.made import RESNET, plan

EFFORT = Effort(evaluations=30, finalists=5)


def space_of(plan: Plan) -> Space:
    return read_space(plan.server.layout, plan.server.table, None)


def searched(plan: Plan, limits: dict[str, float], effort: Effort = EFFORT, log: Log | None = None, seed: int = 0) -> Found:
    judge, space = judge_of(plan, "l1_norm", few=8, seed=seed), space_of(plan)
    return find(judge, space, Prices(judge, space, tuple(limits)), limits, effort, log, is_timed=False)


@pytest.fixture(scope="module")
def vit() -> Plan:
    return plan("raffm")


def costs(plan: Plan, *kinds: str) -> tuple[dict[str, float], dict[str, float]]:
    judge, space = judge_of(plan, "none"), space_of(plan)
    prices = Prices(judge, space, kinds)
    return prices.of(space.smallest()), prices.of(space.largest())


@pytest.mark.parametrize("kind", ["flops", "memory"])
def test_everything_that_is_judged_keeps_the_limit(vit: Plan, kind: str) -> None:
    least, most = costs(vit, kind)
    limit = (least[kind] + most[kind]) / 2
    found = searched(vit, {kind: limit}, replace(EFFORT, evaluations=8))
    assert all(each.costs[kind] <= limit for each in found.judged)
    assert found.cost == kind
    assert len(found.judged) == 8
    assert found.best in found.finalists
    assert found.submodels == space_of(vit).count()


class Slowing(Prices):
    """A clock that goes by the work, and half as fast once the estimates are made: a machine that got busy."""

    def timed(self, sizes: Sizes) -> Timing:
        taken = self._exact([sizes])["flops"][0] * (2 if "_latency" in vars(self) else 1)
        return Timing(taken, taken, taken, 1)


def test_where_finalists_are_slower_than_expected_faster_ones_join_them(vit: Plan) -> None:
    judge, space = judge_of(vit, "l1_norm", few=8), space_of(vit)
    prices = Slowing(judge, space, ("latency",))
    limit = 0.7 * (prices.timed(space.smallest()).median + prices.timed(space.largest()).median)
    found = find(judge, space, prices, {"latency": limit}, Effort(evaluations=40, finalists=1))
    assert found.finalists[0].costs["latency"] > limit
    assert found.best.costs["latency"] <= limit
    assert len(found.finalists) > 1


@pytest.mark.slow
def test_a_limit_that_only_the_smallest_keeps_gives_the_smallest(vit: Plan) -> None:
    least, _ = costs(vit, "memory")
    found = searched(vit, {"memory": least["memory"]}, replace(EFFORT, evaluations=3))
    assert dict(found.best.sizes) == dict(space_of(vit).smallest())


def test_others_are_bred_from_the_first_generation() -> None:
    knobs = {f"layers.{layer}.ffn": (8, 6, 4, 2) for layer in range(10)}
    study = _study(0)
    for _ in range(POPULATION):
        study.enqueue_trial(dict.fromkeys(knobs, 0))
    choices = {knob: IntDistribution(0, 3) for knob in knobs}
    for trial in [_asked(study, choices) for _ in range(POPULATION)]:
        _tell(study, trial, Candidate(dict.fromkeys(knobs, 8), {"params": 9.0}, 0.5, 8), {"params": 10.0}, "params")
    children = [_asked(study, choices).params for _ in range(20)]
    kept = [level == 0 for child in children for level in child.values()]
    assert sum(kept) > 0.8 * len(kept)  # drawn anew it would be a quarter


def test_costs_are_those_of_the_submodels_that_are_made(vit: Plan) -> None:
    judge, space = judge_of(vit, "l1_norm"), space_of(vit)
    prices = Prices(judge, space, ("bytes", "flops", "memory"))
    for seed in range(3):
        sizes = space.draw(torch.Generator().manual_seed(seed))
        module, price = judge.module(sizes), prices.of(sizes)
        assert price["params"] == sum(parameter.numel() for parameter in module.parameters())
        tensors = [*module.parameters(), *module.buffers()]
        assert price["memory"] > sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_a_seed_says_everything_and_workers_say_nothing(vit: Plan) -> None:
    one, two, other = (
        searched(vit, {}, EFFORT),
        searched(vit, {}, replace(EFFORT, workers=3)),
        searched(vit, {}, EFFORT, seed=1),
    )
    assert one.judged == two.judged
    assert one.finalists == two.finalists
    assert one.judged != other.judged


@pytest.mark.parametrize("left", ["", '{"seed": 0, "sp'])
def test_a_search_that_was_stopped_in_its_first_line_begins_anew(left: str, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(left)
    Log(tmp_path / "log.jsonl", {"seed": 0}).add({"a": 1}, 5, 0.5)
    assert Log(tmp_path / "log.jsonl", {"seed": 0}).score({"a": 1}, 5) == 0.5


def test_a_stopped_search_goes_on_and_judges_nothing_twice(vit: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "log.jsonl", []
    scored = Judge.score

    def counting(self: Judge, sizes: dict[str, int], examples: int) -> float:
        asked.append(examples)
        if len(asked) == 20:
            raise KeyboardInterrupt
        return scored(self, sizes, examples)

    monkeypatch.setattr(Judge, "score", counting)
    with pytest.raises(KeyboardInterrupt):
        searched(vit, {}, log=Log(path, {"a": 1}))
    with path.open("a") as file:
        file.write('{"sizes": {"la')  # as a kill leaves it
    begun, before = len(Log(path, {"a": 1})), len(asked)
    assert 0 < begun < 20
    whole = searched(vit, {}, log=Log(path, {"a": 1}))
    assert len(asked) - before == EFFORT.evaluations + EFFORT.finalists - begun
    before = len(asked)
    assert searched(vit, {}, log=Log(path, {"a": 1})).finalists == whole.finalists
    assert len(asked) == before
    with pytest.raises(CheckpointError, match="another search"):
        Log(path, {"a": 2})
    assert all("score" in json.loads(line) for line in path.read_text().splitlines()[1:])


def test_the_test_set_has_no_say(vit: Plan) -> None:
    dataset = vit.data.dataset
    turned = Examples(dataset.test.inputs, dataset.test.labels.roll(1))
    other = replace(vit, data=replace(vit.data, dataset=replace(dataset, test=turned)))
    assert searched(vit, {}).judged == searched(other, {}).judged


def test_batch_norms_are_calibrated_for_every_submodel() -> None:
    resnet = plan("raffm", model=RESNET)
    judge, space = judge_of(resnet, "l1_norm"), space_of(resnet)
    module = judge.module(space.smallest())
    norms = batch_norms(module)
    assert norms
    assert all(bool((norm.running_var != 1).any()) for norm in norms.values())


def test_a_limit_below_everything_is_refused_with_what_would_fit(vit: Plan) -> None:
    with pytest.raises(BudgetError, match=r"no submodel fits: the smallest of the space has params [\d,]+, above the limit 10"):
        searched(vit, {"params": 10.0})


@pytest.mark.parametrize("metric", ["l1_norm", "l2_norm", "taylor", "fisher"])
def test_a_ranking_by_any_metric_scores_every_group(vit: Plan, metric: str) -> None:
    assert set(ranking_of(vit, metric).scores) == set(vit.server.layout.free)


def test_wrong_words_are_refused(vit: Plan) -> None:
    with pytest.raises(RunError, match="not by 'loud'"):
        ranking_of(vit, "loud")
    with pytest.raises(RunError, match="finalists of at least 1"):
        Effort(finalists=0)
