"""Who has which device, who is asked in a round, and how long devices take."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raffm.data.examples import Dataset, Examples, Federation, Parts, Split
from raffm.devices.budget import Budget
from raffm.devices.fleet import BANDWIDTH, NAMED, SPEED, Fleet, Tier, fleet_of, size_name, tier_of
from raffm.devices.profiles import PROFILES, SUSTAINED
from raffm.errors import DataError, RunError
from raffm.rounds.backend import Serial
from raffm.rounds.costs import Cost, Costs
from raffm.rounds.local import Local
from raffm.rounds.plan import Evaluating, Merging, Participation, Plan
from rounds.made import federation, plan, run, values

# -- fleets --------------------------------------------------------------------------------------------------------


def counts(fleet: Fleet, clients: int, round: int = 0) -> list[int]:
    return torch.bincount(fleet.tiers_of(clients, 0, round), minlength=len(fleet.tiers)).tolist()


def test_devices_are_dealt_by_largest_remainder() -> None:
    assert counts(fleet_of("1:10, 1/4:30, 1/16:60"), 10) == [1, 3, 6]
    assert counts(fleet_of("1:1, 1/4:1, 1/16:1"), 10) == [4, 3, 3], "of equal remainders the first tiers"
    assert counts(fleet_of("1:5, 1/4:3, 1/16:2"), 7) == [4, 2, 1], "3.5, 2.1, 1.4"
    assert counts(fleet_of("1:0, 1/4:1"), 5) == [0, 5]


@given(st.integers(1, 500), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_every_client_has_a_device_and_every_tier_its_share_to_within_one(clients: int, shares: list[float]) -> None:
    fleet = Fleet(tuple(Tier(1 / (place + 1), share) for place, share in enumerate(shares)))
    dealt = counts(fleet, clients)
    assert sum(dealt) == clients
    for count, share in zip(dealt, shares, strict=True):
        assert abs(count - clients * share / sum(shares)) < 1


def test_fleets_by_name_have_the_published_sizes() -> None:
    assert fleet_of("quarters").sizes == (1, 1 / 4, 1 / 16, 1 / 64)
    assert fleet_of("fifths").sizes == (1, 0.64, 0.36, 0.16, 0.04)
    assert fleet_of("a-e").sizes == (1, 1 / 4, 1 / 16, 1 / 64, 1 / 256)
    assert fleet_of(" full ").sizes == (1,)
    for name in NAMED:
        assert len({tier.share for tier in fleet_of(name).tiers}) == 1


def test_levels_are_widths_with_shares() -> None:
    assert fleet_of("a1-b1-e2").tiers == (Tier(1.0, 1.0), Tier(0.25, 1.0), Tier(0.0625**2, 2.0))
    assert counts(fleet_of("a1-b1-e2"), 8) == [2, 2, 4]


def test_sizes_are_typed_as_fractions_or_decimals_with_shares_or_without() -> None:
    assert fleet_of("1:10, 1/4:30 ,0.0625:60").tiers == (Tier(1.0, 10.0), Tier(0.25, 30.0), Tier(0.0625, 60.0))
    assert fleet_of("1, 1/4").tiers == (Tier(1.0), Tier(0.25))
    assert fleet_of("1/4, 1, 1/4").sizes == (1.0, 0.25), "different sizes, largest first"


def test_a_size_is_named_as_people_write_it() -> None:
    assert [size_name(size) for size in (1.0, 0.25, 1 / 256, 1 / 3, 0.36, 0.64)] == ["1", "1/4", "1/256", "1/3", "0.36", "0.64"]
    assert Tier(0.25).label == "1/4"
    assert Tier(0.25, name="phone").label == "phone"


def test_clients_keep_their_devices_unless_these_are_redrawn() -> None:
    fixed, redrawn = fleet_of("1, 1/4"), fleet_of("1, 1/4", redraw=True)
    assert torch.equal(fixed.tiers_of(40, 0, 0), fixed.tiers_of(40, 0, 7))
    assert not torch.equal(redrawn.tiers_of(40, 0, 0), redrawn.tiers_of(40, 0, 7))
    assert torch.equal(redrawn.tiers_of(40, 0, 7), redrawn.tiers_of(40, 0, 7))
    assert counts(redrawn, 40, 3) == [20, 20]
    assert not torch.equal(fixed.tiers_of(40, 0), fixed.tiers_of(40, 1)), "another seed deals otherwise"


def test_a_plan_deals_as_its_fleet_does() -> None:
    for redraw in (False, True):
        made = plan("fedavg", data=federation(12), fleet=fleet_of("1, 1/4, 1/16", redraw))
        for round in (0, 3, 0):
            dealt = made.fleet.tiers_of(12, made.seed, round).tolist()
            assert [made.tier_of(client, round) for client in range(12)] == [made.fleet.tiers[place] for place in dealt]


@pytest.mark.parametrize(
    "text", ["", "nobody", "1/0", "1:", "a1-f2", "a", "1:x", "2", "0", "-1/4", "1:-3", "1:0", "1:nan", "nan", "1;1/4", "inf"]
)
def test_a_fleet_that_makes_no_sense_is_refused(text: str) -> None:
    if text == "1:":
        assert fleet_of(text).tiers == (Tier(1.0),), "an empty share is 1"
        return
    with pytest.raises(RunError):
        fleet_of(text)


def test_an_infinite_share_is_refused() -> None:
    with pytest.raises(RunError):
        fleet_of("1:inf, 1/4:1").tiers_of(4, 0)


def test_an_unknown_fleet_is_told_what_there_is() -> None:
    with pytest.raises(RunError, match="there is no fleet 'halves'") as error:
        fleet_of("halves")
    assert all(name in str(error.value) for name in NAMED)


@pytest.mark.parametrize(
    "given", [{"size": 0}, {"size": 1.5}, {"size": 1, "share": -1}, {"size": 1, "speed": 0}, {"size": 1, "bandwidth": -1}]
)
def test_a_tier_that_makes_no_sense_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(RunError):
        Tier(**given)  # type: ignore[arg-type]


def test_a_fleet_without_devices_is_refused() -> None:
    for tiers in ((), (Tier(1, 0),)):
        with pytest.raises(RunError, match="at least one tier"):
            Fleet(tiers)


# -- who is asked --------------------------------------------------------------------------------------------------


def many(clients: int, sizes: list[int] | None = None) -> Federation:
    """Clients of given numbers of examples that hold nothing."""
    sizes = sizes or [1] * clients
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    count = int(offsets[-1])
    examples = Examples(
        {"pixel_values": torch.zeros((count, 1, 8, 8), dtype=torch.uint8)}, torch.zeros(count, dtype=torch.int64)
    )
    dataset = Dataset("made up", examples, examples.take(torch.arange(1)), ("a", "b"))
    nobody = Parts(np.zeros(0, np.int64), np.zeros(clients + 1, np.int64))
    return Federation(dataset, Split(Parts(np.arange(count), offsets), nobody))


def asked(participation: Participation, data: Federation, rounds: int = 400, seed: int = 0) -> np.ndarray:
    """How often each client is asked."""
    made = plan("fedavg", data=data, participation=participation, seed=seed)
    found = np.zeros(data.clients)
    for round in range(rounds):
        cohort = made.cohort(round)
        assert len(set(cohort.asked)) == len(cohort.asked), "nobody is asked twice"
        assert set(cohort.dropped) <= set(cohort.asked)
        assert set(cohort.present) == set(cohort.asked) - set(cohort.dropped)
        found[list(cohort.asked)] += 1
    return found


def test_uniform_sampling_asks_everybody_equally_often() -> None:
    found = asked(Participation(clients=5), many(20))
    assert found.sum() == 5 * 400
    assert abs(found - 100).max() < 45, "5 standard deviations"


def test_sampling_by_data_asks_those_with_more_examples_more_often() -> None:
    sizes = [1] * 5 + [3] * 5
    found = asked(Participation(clients=1, by="data"), many(10, sizes), 800)
    assert abs(found[5:].sum() / 800 - 15 / 20) < 0.08
    together = asked(Participation(clients=4, by="data"), many(10, sizes), 200)
    assert together[5:].sum() > together[:5].sum()
    assert together.sum() == 4 * 200


def test_availability_has_the_mean_that_was_asked_for() -> None:
    data = many(400)
    for mean in (0.2, 0.5, 0.8):
        made = plan("fedavg", data=data, participation=Participation(clients=400, by="availability", availability=mean))
        reached = [len(made.cohort(round).asked) / 400 for round in range(20)]
        assert abs(np.mean(reached) - mean) < 0.06


def test_some_clients_are_always_more_reachable_than_others() -> None:
    found = asked(Participation(clients=50, by="availability"), many(50), 200)
    assert found.min() < 40
    assert found.max() > 160


def test_a_round_that_reaches_nobody_changes_nothing() -> None:
    participation = Participation(clients=4, by="availability", availability=1e-9)
    made = plan("heterofl", participation=participation)
    before = values(made)
    (entry,) = run(made).rounds
    assert (entry.clients, entry.loss, entry.seconds, entry.bytes_up) == ((), None, 0.0, 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in made.server.tensors.items())


def test_a_share_of_the_clients_is_rounded_and_is_at_least_one() -> None:
    assert Participation(clients=0.1).count(30) == 3
    assert Participation(clients=0.001).count(30) == 1
    assert Participation(clients=0).count(30) == 30
    assert Participation(clients=7).count(30) == 7
    with pytest.raises(RunError, match="asks 31 clients, but there are 30"):
        Participation(clients=31).count(30)
    with pytest.raises(RunError, match="asks 5 clients, but there are 4"):
        plan(participation=Participation(clients=5))


def test_clients_drop_out_by_chance_and_do_not_train() -> None:
    made = plan("fedavg", data=many(40), participation=Participation(clients=20, dropout=0.3))
    dropped = [len(made.cohort(round).dropped) for round in range(200)]
    assert abs(np.mean(dropped) / 20 - 0.3) < 0.04
    small = plan("fedavg", participation=Participation(clients=4, dropout=0.5), rounds=3)
    for round, entry in enumerate(run(small).rounds):
        assert entry.dropped == tuple(sorted(small.cohort(round).dropped))
        assert entry.clients == tuple(sorted(small.cohort(round).present))


def test_a_cohort_depends_on_seed_and_round_alone() -> None:
    made, again = (plan("fedavg", data=many(40), participation=Participation(clients=8, dropout=0.2)) for _ in range(2))
    backwards = [again.cohort(round) for round in (2, 1, 0)]
    assert [made.cohort(round) for round in (0, 1, 2)] == backwards[::-1]
    other = plan("fedavg", data=many(40), participation=Participation(clients=8, dropout=0.2), seed=1)
    assert made.cohort(0) != other.cohort(0)


@pytest.mark.parametrize(
    "given",
    [
        {"by": "size"},
        {"clients": -3},
        {"dropout": 1.0},
        {"dropout": -0.1},
        {"availability": 0.0},
        {"availability": 1.0},
        {"deadline": -1.0},
    ],
)
def test_participation_that_makes_no_sense_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(RunError):
        Participation(**given)  # type: ignore[arg-type]


def test_clients_count_by_their_examples_or_equally() -> None:
    data = many(3, [1, 5, 2])
    assert [plan("fedavg", data=data).weight(client) for client in range(3)] == [1, 5, 2]
    equal = plan("fedavg", data=data, merging=Merging(weighting="equal"))
    assert [order.weight for order in equal.orders(0, (2, 0, 1))] == [1, 1, 1]


def test_a_client_without_training_data_is_refused_by_its_number() -> None:
    with pytest.raises(DataError, match="client 1 has no training data"):
        plan("fedavg", data=many(3, [1, 0, 2]))


def test_a_budget_of_a_tier_reaches_the_method() -> None:
    fleet = Fleet((Tier(1.0), Tier(1.0, budget=Budget(max_params=4000))))
    made = plan("raffm", fleet=fleet)
    held = {
        made.tier_of(order.client, 0).budget is None: made.server.layout.count(order.share.selection)
        for order in made.orders(0, range(4))
    }
    assert held[True] == 6450
    assert held[False] <= 4000


# -- the virtual clock ---------------------------------------------------------------------------------------------


def test_seconds_are_work_by_speed_and_bytes_by_bandwidth() -> None:
    cost = Cost(params=10, bytes_down=3000, bytes_up=1000, flops=500)
    assert cost.seconds(Tier(1.0, speed=1e4, bandwidth=2e3), examples=40) == 500 * 3 * 40 / 1e4 + 4000 / 2e3
    assert cost.seconds(Tier(1.0), 1) == 1500 / SPEED + 4000 / BANDWIDTH


def test_a_round_takes_as_long_as_its_slowest_client() -> None:
    fleet = Fleet((Tier(1.0, speed=1e6, bandwidth=1e4), Tier(0.25, speed=1e7, bandwidth=1e4)))
    made = plan("heterofl", fleet=fleet, local=Local(batch=5, epochs=2))
    costs = Costs(made)
    (entry,) = run(made).rounds
    orders = made.orders(0, range(4))
    each = [costs.of(order.share).seconds(made.tier_of(order.client, 0), made.local.steps_of(12) * 5) for order in orders]
    assert made.local.steps_of(12) == 5
    assert entry.seconds == pytest.approx(max(each), rel=1e-12)
    assert entry.bytes_up == sum(costs.of(order.share).bytes_up for order in orders)
    assert entry.bytes_down == sum(costs.of(order.share).bytes_down for order in orders)
    assert entry.flops == sum(3 * costs.of(order.share).flops * 25 for order in orders)


def test_energy_is_the_power_of_every_device_times_the_time_it_took() -> None:
    fleet = Fleet((Tier(1.0, speed=1e6, bandwidth=1e4, power=60), Tier(0.25, speed=1e7, bandwidth=1e4, power=7)))
    made = plan("heterofl", fleet=fleet, local=Local(batch=5, epochs=2))
    costs = Costs(made)
    (entry,) = run(made).rounds
    tiers = {order.client: made.tier_of(order.client, 0) for order in made.orders(0, range(4))}
    each = [
        tiers[order.client].power * costs.of(order.share).seconds(tiers[order.client], 25) for order in made.orders(0, range(4))
    ]
    assert entry.joules == pytest.approx(sum(each), rel=1e-12)


def test_who_is_too_late_draws_power_until_the_deadline() -> None:
    fleet = Fleet((Tier(1.0, speed=1e3, power=8), Tier(0.25, speed=1e12, bandwidth=1e12, power=0)))
    made = plan("heterofl", fleet=fleet, participation=Participation(clients=4, deadline=0.5))
    assert run(made).rounds[0].joules == 2 * 8 * 0.5


def test_late_clients_lose_their_work_and_the_round_takes_the_deadline() -> None:
    fleet = Fleet((Tier(1.0, speed=1e3), Tier(0.25, speed=1e12, bandwidth=1e12)))
    made = plan("heterofl", fleet=fleet, participation=Participation(clients=4, deadline=0.5))
    slow = {client for client in range(4) if made.tier_of(client, 0).size == 1}
    (entry,) = run(made).rounds
    assert len(slow) == 2
    assert set(entry.late) == slow
    assert set(entry.clients) == set(range(4)) - slow
    assert entry.seconds == 0.5
    alone = plan("heterofl", fleet=fleet)
    tally_orders = [order for order in alone.orders(0, made.cohort(0).present) if order.client not in slow]
    _train_only(alone, tally_orders)
    assert all(torch.equal(made.server.tensors[name], tensor) for name, tensor in alone.server.tensors.items())
    assert entry.bytes_down > entry.bytes_up, "the model was sent to those who were late, too"


def _train_only(made: Plan, orders: list) -> None:  # type: ignore[type-arg]
    from rounds.made import nothing, tally_of

    tally = tally_of(made)
    Serial(made).train(orders, tally, nothing, nothing)
    tally.step()


def test_a_deadline_that_nobody_misses_changes_nothing() -> None:
    made, free = (plan("fedavg", participation=Participation(clients=4, deadline=deadline)) for deadline in (1e6, 0.0))
    left, right = run(made), run(free)
    assert left.rounds == right.rounds
    assert 0 < left.rounds[0].seconds < 1e6


def test_the_full_model_is_always_among_what_is_served() -> None:
    assert list(plan(fleet="1/16, 1/4").served) == ["1", "1/4", "1/16"]
    assert list(plan(evaluating=Evaluating(sizes=(0.25, 0.5))).served) == ["1", "1/2", "1/4"]
    assert list(plan(fleet="1/4, 1/4").served) == ["1", "1/4"]
    assert [device.size for device in plan(fleet=Fleet((Tier(0.25, name="phone"),))).served.values()] == [1.0, 0.25]


@pytest.mark.parametrize(
    "tiers",
    [
        (Tier(1.0), Tier(1.0, budget=Budget(max_params=4000))),
        (Tier(0.5, budget=Budget(max_params=3000)), Tier(0.5, budget=Budget(max_params=2000))),
        (Tier(0.25, name="1"),),
    ],
)
def test_every_device_of_the_fleet_is_served_and_the_full_model_too(tiers: tuple[Tier, ...]) -> None:
    served = [(device.size, device.budget) for device in plan(fleet=Fleet(tiers)).served.values()]
    assert {(1.0, None), *((tier.size, tier.budget) for tier in tiers)} == set(served)


# -- many clients --------------------------------------------------------------------------------------------------

REGISTERED = """
import sys, time, resource
import torch
torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
from devices.test_fleet import many
from rounds.made import plan
from raffm.rounds.plan import Participation

def resident():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * resource.getpagesize()

warm = plan("raffm", data=many(10), participation=Participation(clients=10))
warm.orders(0, warm.cohort(0).present)
for clients in (100, 100_000):
    before = resident()
    data = many(clients)
    start = time.process_time()
    for by in ("uniform", "data", "availability"):
        made = plan("raffm", data=data, participation=Participation(clients=20, by=by))
        orders = made.orders(0, made.cohort(0).present)
    print((time.process_time() - start) / 3, resident() - before, len(orders))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_hundred_thousand_registered_clients_cost_little_time_and_memory() -> None:
    script = REGISTERED.format(tests=str(Path(__file__).parents[1]))
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100)
    few, many = ([float(word) for word in line.split()] for line in ran.stdout.splitlines())
    assert many[0] < 1
    assert many[1] - few[1] < 50e6
    assert few[2] == many[2] == 20


def test_a_plan_may_be_replaced_in_part() -> None:
    made = plan("fedavg")
    assert replace(made, rounds=5).rounds == 5
    with pytest.raises(RunError, match="at least one round"):
        replace(made, rounds=0)


@settings(max_examples=10)
@given(st.integers(0, 100))
def test_orders_follow_the_devices_of_the_clients(round: int) -> None:
    made = plan("heterofl", data=federation(6), fleet=fleet_of("1, 1/4, 1/16", redraw=True))
    for order in made.orders(round, (5, 0, 3)):
        assert order.share.numbers["ratio"] == made.tier_of(order.client, round).size ** 0.5
        assert order.round == round


# -- devices by name -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("xsmall", {"Raspberry Pi 4": 80, "Raspberry Pi 5": 20}),
        ("small", {"Raspberry Pi 4": 40, "Raspberry Pi 5": 40, "Dell XPS 15": 20}),
        ("medium", {"Raspberry Pi 5": 30, "Dell XPS 15": 40, "Jetson AGX Orin": 30}),
        ("large", {"Dell XPS 15": 20, "Jetson AGX Orin": 40, "Tesla V100": 40}),
        ("xlarge", {"Jetson AGX Orin": 10, "Tesla V100": 90}),
    ],
)
def test_the_published_fleets_have_the_published_devices(name: str, counts: dict[str, int]) -> None:
    fleet = fleet_of(name)
    dealt = torch.bincount(fleet.tiers_of(100, seed=0)).tolist()
    assert {tier.name: count for tier, count in zip(fleet.tiers, dealt, strict=True)} == counts


def test_every_figure_of_a_device_has_a_source_or_is_assumed() -> None:
    for name, profile in PROFILES.items():
        tier = tier_of(name, 3)
        assert (tier.size, tier.share, tier.power) == (profile.size.value, 3, profile.power.value)
        assert tier.speed == SUSTAINED * profile.peak.value
        for figure in profile.figures().values():
            assert figure.value > 0
            assert figure.source == "assumed" or len(figure.source) > 10
    with pytest.raises(RunError, match="there is no device 'pi3'"):
        tier_of("pi3")


def test_a_fleet_of_named_devices_serves_every_size_once() -> None:
    assert list(plan("heterofl", fleet=fleet_of("large")).served) == ["1", "Dell XPS 15"]
    assert list(plan("heterofl", fleet=fleet_of("xsmall")).served) == ["1", "Raspberry Pi 5", "Raspberry Pi 4"]
