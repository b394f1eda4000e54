import pytest

from raffm.devices.budget import Budget
from raffm.errors import BudgetError


def test_a_budget_holds_only_the_limits_that_were_given():
    assert Budget(max_params=10, max_memory=20).limits == {"params": 10, "memory": 20}


def test_a_budget_is_a_value():
    assert Budget(max_flops=3) == Budget(max_flops=3)
    assert hash(Budget(max_flops=3)) == hash(Budget(max_flops=3))


def test_a_budget_without_limits_is_refused():
    with pytest.raises(BudgetError, match=r"no limit. Give at least one of max_params, max_bytes, max_flops, max_memory\."):
        Budget()


@pytest.mark.parametrize("limit", [0, -1, -2.5])
def test_a_limit_that_nothing_can_keep_is_refused(limit):
    with pytest.raises(BudgetError, match=rf"max_bytes is {limit}, but no submodel costs nothing\."):
        Budget(max_params=5, max_bytes=limit)


@pytest.mark.parametrize("limit", ["45M", True, float("nan")])
def test_a_limit_that_is_no_number_is_refused(limit):
    with pytest.raises(BudgetError, match=r"a limit is a number\."):
        Budget(max_params=limit)
