from functools import cache
from itertools import pairwise
from random import Random

import pytest
import torch
from tiny_models import cost_of, groups_to_cut, possible_sizes, random_ranking

from raffm.algebra.axis import names
from raffm.algebra.ranking import Ranking, complete
from raffm.devices.budget import Budget
from raffm.devices.cost import CostModel
from raffm.devices.fit import fit, kept_shares
from raffm.errors import BudgetError, SpaceError
from raffm.models.space import default_sizes

FITTED = ("vit", "bert", "our resnet", "resnet of bottlenecks")


# -- an independent account of what a config costs and keeps ---------------------------------------------------------


class Case:
    """A model, a space, a ranking: everything that `fit` is asked, and everything that is checked of its answer."""

    def __init__(self, name, seed, space):
        self.cost = cost_of(name)
        self.layout = self.cost.layout
        self.space = space
        self.ranking = random_ranking(self.layout, seed)
        self.shares = kept_shares(self.layout, self.ranking, space)
        self.weights = {group: touched(self.layout, group, tuple(space)) for group in space}

    def fit(self, **limits):
        return fit(self.layout, self.cost, Budget(**limits), self.space, self.shares, self.ranking)

    def sizes(self, config):
        """The sizes that are left: those of the config, of what is tied to it, of the blocks that the ranking keeps."""
        depth = {group: size for group, size in config.items() if group in self.layout.depths}
        chosen = complete(self.layout, config)
        return {group: chosen.get(group, size) for group, size in self.whole(tuple(depth.items())).items()}

    @cache  # noqa: B019
    def whole(self, depth):
        return self.layout.sizes_of(self.ranking.cut(self.layout, dict(depth)))

    def fits(self, config, limits):
        sizes = self.sizes(config)
        return all(getattr(self.cost, name.removeprefix("max_"))(sizes) <= limit for name, limit in limits.items())

    def kept(self, config):
        """The weighted mean share; what belongs to dropped blocks keeps nothing."""
        alive = self.sizes(config)
        kept = {group: self.weights[group] * self.shares[group][config[group]] for group in self.space if group in alive}
        return sum(kept.values()) / sum(self.weights.values())

    def random_config(self, random):
        return {group: random.choice(sizes) for group, sizes in self.space.items()}

    def steps_up(self, config):
        for group, size in config.items():
            larger = sorted(other for other in self.space[group] if other > size)
            if larger:
                yield {**config, group: larger[0]}

    def limits(self, share, *kinds):
        """Limits at a share of the way from the smallest to the largest config."""
        ends = [self.sizes({group: end(sizes) for group, sizes in self.space.items()}) for end in (min, max)]
        costs = {kind: [getattr(self.cost, kind)(sizes) for sizes in ends] for kind in kinds}
        return {f"max_{kind}": int(least + share * (most - least)) for kind, (least, most) in costs.items()}


@cache
def touched(layout, group, space):
    """The parameters that a group runs through, or one that is tied to it, or that its blocks hold."""
    full = layout.sizes
    sides = [{*names(tie.left), *names(tie.right)} for tie in layout.ties]
    moving = {group, *(other for side in sides if group in side for other in side if other not in space)}
    count = 0
    for name in layout.tensors("parameter"):
        label = layout.labels[name]
        if moving & set(label.groups()) or (label.guard is not None and label.guard[0] == group):
            count += torch.Size(label.shape(full)).numel()
    return count


def widths(name):
    cost = cost_of(name)
    return default_sizes(cost.layout, cost.table)


def everything(name):
    """Three sizes for every group that can be cut, depth and residual too."""
    layout = cost_of(name).layout
    space = {}
    for group in groups_to_cut(layout):
        sizes = possible_sizes(layout, group)
        space[group] = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    return space


def check(case, limits, seed=0):
    """The laws of `fit`."""
    config = case.fit(**limits)
    assert case.fits(config, limits)
    assert not any(case.fits(step, limits) for step in case.steps_up(config))
    random = Random(seed)
    fitting = [drawn for drawn in (case.random_config(random) for _ in range(1000)) if case.fits(drawn, limits)]
    best = max((case.kept(drawn) for drawn in fitting), default=0.0)
    assert case.kept(config) >= best - 1e-12
    return config


# -- laws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("name", FITTED)
def test_fit_fits_cannot_grow_and_beats_a_thousand_random_configs(name, share):
    case = Case(name, seed=int(share * 10), space=widths(name))
    check(case, case.limits(share, "params"), seed=1)


@pytest.mark.parametrize("kinds", [("flops",), ("memory",), ("params", "flops", "memory", "bytes")], ids=" ".join)
@pytest.mark.parametrize("name", ["vit", "our resnet"])
def test_every_limit_of_a_budget_is_kept(name, kinds):
    case = Case(name, seed=2, space=widths(name))
    check(case, case.limits(0.35, *kinds), seed=2)


@pytest.mark.parametrize("name", FITTED)
def test_depth_and_residual_may_be_cut_too(name):
    case = Case(name, seed=3, space=everything(name))
    config = check(case, case.limits(0.3, "params"), seed=3)
    assert set(config) == set(case.space) & set(case.sizes(config))


def test_fit_is_deterministic():
    case = Case("vit", seed=4, space=widths("vit"))
    limits = case.limits(0.5, "params")
    assert case.fit(**limits) == case.fit(**limits)


def test_a_budget_that_the_full_model_fits_gives_the_full_model():
    case = Case("bert", seed=5, space=everything("bert"))
    full = {group: case.layout.sizes[group] for group in case.space}
    assert case.fit(max_params=case.cost.params(case.layout.sizes)) == full


def test_a_budget_of_the_smallest_config_gives_the_smallest_config():
    case = Case("bert", seed=5, space=widths("bert"))
    assert case.fit(**case.limits(0.0, "params", "flops")) == {group: min(sizes) for group, sizes in case.space.items()}


def test_a_group_that_matters_is_kept_before_one_that_does_not():
    case = Case("vit", seed=0, space={"layers.0.ffn": [40, 10], "layers.1.ffn": [40, 10]})
    flat, steep = [count / 40 for count in range(41)], [0.0, *[1.0] * 40]
    case.shares = {"layers.0.ffn": steep, "layers.1.ffn": flat}
    assert case.fit(**case.limits(0.5, "params")) == {"layers.0.ffn": 10, "layers.1.ffn": 40}


def test_the_blocks_that_the_ranking_prefers_stay():
    case = Case("vit", seed=0, space={"layers": [3, 2, 1], "layers.0.ffn": [40, 10], "layers.2.ffn": [40, 10]})
    case.ranking = Ranking({"layers": torch.tensor([2, 0, 1])})
    config = case.fit(**case.limits(0.0, "params"))
    assert config == {"layers": 1, "layers.2.ffn": 10}
    assert "layers.0.ffn" not in case.sizes(config)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["params", "bytes", "flops", "memory"])
def test_a_budget_below_the_smallest_config_is_refused_with_both_numbers(kind):
    case = Case("vit", seed=0, space=widths("vit"))
    least = case.limits(0.0, kind)[f"max_{kind}"]
    with pytest.raises(BudgetError, match=rf"max_{kind} is {least - 1:,}, but even the smallest submodel .* {least:,} "):
        case.fit(**{f"max_{kind}": least - 1})


def test_a_space_that_makes_no_sense_is_refused():
    case = Case("vit", seed=0, space=widths("vit"))
    limits = Budget(max_params=10**9)

    def refusal(space, shares, cost=case.cost):
        with pytest.raises(SpaceError) as error:
            fit(case.layout, cost, limits, space, shares)
        return str(error.value)

    ffn = kept_shares(case.layout, Ranking(), ["layers.0.ffn"])
    assert "which the model does not have" in refusal({"layers.9.ffn": [3]}, {})
    assert "between 1 and 40, but the space has [0, 41]" in refusal({"layers.0.ffn": [0, 41]}, ffn)
    assert "an entry for every size from 0 to 40" in refusal({"layers.0.ffn": [4]}, {"layers.0.ffn": [0.0, 1.0]})
    tied = {"layers.0.qk": [6, 3], "layers.0.vo": [6, 3]}
    assert "Leave `layers.0.vo` out of the space" in refusal(tied, kept_shares(case.layout, Ranking(), tied))
    other = CostModel(case.cost.model, case.layout, case.cost.table, free=["layers.1.ffn"])
    assert "Name it in `free`" in refusal({"layers.0.ffn": [4]}, ffn, other)


# -- shares ----------------------------------------------------------------------------------------------------------


def test_shares_rise_from_nothing_to_all_and_ever_more_slowly():
    layout = cost_of("vit").layout
    for name, curve in kept_shares(layout, random_ranking(layout, 0), layout.free).items():
        rises = [after - before for before, after in pairwise(curve)]
        assert curve[0] == 0.0 and curve[-1] == pytest.approx(1.0) and len(curve) == layout.groups[name].size + 1
        assert all(first >= second - 1e-9 for first, second in pairwise(rises))


def test_shares_of_a_fibred_group_are_summed_over_its_rows():
    layout = cost_of("vit").layout
    scores = torch.tensor([[3.0, 1.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 4.0, 0.0, 0.0, 0.0], *[[0.0] * 6] * 2])
    curve = kept_shares(layout, Ranking.by_scores({"layers.0.qk": scores}), ["layers.0.qk"])["layers.0.qk"]
    assert curve == pytest.approx([0, 7 / 8, 1, 1, 1, 1, 1])


def test_a_ranking_without_an_order_keeps_the_first():
    layout = cost_of("vit").layout
    ranking = Ranking({}, {"layers.0.heads": torch.tensor([1.0, 0.0, 2.0, 1.0])})
    assert kept_shares(layout, ranking, ["layers.0.heads"]) == {"layers.0.heads": pytest.approx([0, 0.25, 0.25, 0.75, 1])}


def test_blocks_that_must_stay_come_first():
    layout = cost_of("our resnet").layout
    ranking = Ranking.by_scores({"stages.1.blocks": torch.tensor([1.0, 2.0, 5.0])})
    assert kept_shares(layout, ranking, ["stages.1.blocks"])["stages.1.blocks"] == pytest.approx([0, 1 / 8, 6 / 8, 1])


@pytest.mark.parametrize("scores", [{}, {"layers.0.heads": torch.zeros(4)}], ids=["none", "zeros"])
def test_without_scores_all_indices_count_alike(scores):
    layout = cost_of("vit").layout
    assert kept_shares(layout, Ranking({}, scores), ["layers.0.heads"])["layers.0.heads"] == [0, 0.25, 0.5, 0.75, 1]
