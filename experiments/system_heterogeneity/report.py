"""The table and plots of the experiment, from what lies in `results`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from experiments.options import SMOKE_NOTE, Options
from experiments.running import Content, found_in
from experiments.system_heterogeneity.catalogue import REFERENCE
from experiments.tables import joined, table, write_report
from raffm.devices.fleet import fleet_of
from raffm.devices.profiles import FLEETS
from raffm.report.drawing import figure_of, look_of, time_unit
from raffm.report.tables import duration, size_of

KWH = 3.6e6
"""Joules of a kilowatt hour."""

PUBLISHED_KWH = {"xsmall": 0.62, "small": 3.20, "medium": 7.34, "large": 16.28, "xlarge": 25.71}
"""Peak energy of BERT-base on SST-2, from the README of the published code's `system_heterogeneous`."""

NOTES = {"smoke": SMOKE_NOTE, "cpu": "3 local steps of 32 images instead of 50, and 2,000 test images.", "full": ""}


def write(options: Options) -> None:
    """Write the tables and plots of what is there."""
    runs, clocks = _found(options)
    figures = {"by_time": _by_time(runs, clocks), "by_round": _by_round(runs)} if runs else {}
    write_report(options.out, text(options), figures)


def text(options: Options) -> str:
    """All tables."""
    runs, clocks = _found(options)
    if not runs:
        return ""
    return joined([NOTES[options.scale], _accuracies(runs), _costs(runs, clocks), _times(runs, clocks), _published(runs)])


def _found(options: Options) -> tuple[dict[str, Content], dict[str, Sequence[Content]]]:
    """The run of every fleet, and the rounds of FedAvg on it; nothing without the reference."""
    found = found_in(options.runs.results)
    fleets = [fleet for fleet in FLEETS if fleet in found and f"fedavg-{fleet}" in found] if REFERENCE in found else []
    return {fleet: found[fleet] for fleet in fleets}, {fleet: found[f"fedavg-{fleet}"]["rounds"] for fleet in fleets}


def on_devices(run: Content) -> list[float]:
    """At every evaluation: the accuracy of what a device of the fleet is served, mean over its clients."""
    tiers = fleet_of(run["run"]["fleet"]["tiers"]).tiers
    known = {size["name"] for size in run["sizes"]}
    shares = {tier.label if tier.label in known else "1": 0.0 for tier in tiers}
    for tier in tiers:
        shares[tier.label if tier.label in known else "1"] += tier.share / sum(each.share for each in tiers)
    return [
        sum(share * entry["sizes"][name]["test"]["accuracy"] for name, share in shares.items()) for entry in run["evaluations"]
    ]


def _accuracies(runs: Mapping[str, Content]) -> str:
    rows = []
    for fleet, run in runs.items():
        last = run["evaluations"][-1]["sizes"]
        by_size = ", ".join(f"{size['name']} ({size['fraction']:.0%}) {_accuracy(last, size['name'])}" for size in run["sizes"])
        trained = "FedAvg of the full model" if fleet == REFERENCE else ""
        rows.append([fleet, f"**{100 * on_devices(run)[-1]:.1f}**", by_size, trained])
    return table(
        "Test accuracy in percent after the last round",
        ["fleet", "what its devices are served, mean over clients", "by device (part of the parameters)", ""],
        rows,
    )


def _accuracy(sizes: Mapping[str, Any], name: str) -> str:
    return f"{100 * sizes[name]['test']['accuracy']:.1f}"


def _costs(runs: Mapping[str, Content], clocks: Mapping[str, Sequence[Content]]) -> str:
    rows = []
    for fleet, run in runs.items():
        ours, full = _totals(run["rounds"]), _totals(clocks[fleet])
        rows.append(
            [
                fleet,
                f"{size_of(ours['bytes'])} / {size_of(full['bytes'])}",
                f"{full['bytes'] / ours['bytes']:.2f}x",
                f"{duration(ours['seconds'] / len(run['rounds']))} / {duration(full['seconds'] / len(run['rounds']))}",
                f"{full['seconds'] / ours['seconds']:.2f}x",
                f"{ours['joules'] / KWH:.3g} / {full['joules'] / KWH:.3g}",
                f"{full['joules'] / ours['joules']:.2f}x",
            ]
        )
    head = ["fleet", "bytes of all rounds", "fewer", "virtual time of a round", "faster", "kWh of all devices", "less"]
    return table("What it takes: RaFFM / full-size FedAvg on the same fleet", head, rows)


def _totals(rounds: Sequence[Content]) -> dict[str, float]:
    sums = {key: sum(entry[key] for entry in rounds) for key in ("bytes_up", "bytes_down", "seconds", "joules")}
    return {**sums, "bytes": sums["bytes_up"] + sums["bytes_down"]}


def _levels(runs: Mapping[str, Content]) -> list[float]:
    """Accuracies in steps of five points, up to what the best fleet comes to."""
    best = max(max(on_devices(run)) for run in runs.values())
    return [level / 100 for level in range(5, 100, 5) if best - 0.3 < level / 100 <= best]


def _times(runs: Mapping[str, Content], clocks: Mapping[str, Sequence[Content]]) -> str:
    reference = runs[REFERENCE]
    levels = _levels(runs)
    rows = []
    for fleet, run in runs.items():
        ours = [_when(_path(run["rounds"], run, on_devices(run)), level) for level in levels]
        full = [_when(_path(clocks[fleet], reference, on_devices(reference)), level) for level in levels]
        rows.append([fleet, *(f"{mine} / {theirs}" for mine, theirs in zip(ours, full, strict=True))])
    title = "Virtual time until what devices are served is so accurate: RaFFM / full-size FedAvg on the same fleet"
    return table(title, ["fleet", *(f"{level:.0%}" for level in levels)], rows)


def _path(rounds: Sequence[Content], run: Content, accuracies: Sequence[float]) -> list[tuple[float, float]]:
    """The virtual seconds that had passed at every evaluation of a run by some clock, and the accuracy there."""
    passed = list(accumulate(entry["seconds"] for entry in rounds))
    return [(passed[entry["round"] - 1], each) for entry, each in zip(run["evaluations"], accuracies, strict=True)]


def _when(path: Sequence[tuple[float, float]], level: float) -> str:
    """The time of the first evaluation above a level; of the very first it is an upper bound."""
    found = (("≤ " if place == 0 else "") + duration(seconds) for place, (seconds, each) in enumerate(path) if each >= level)
    return next(found, "-")


def _published(runs: Mapping[str, Content]) -> str:
    """Published energies, which grow as the power of the devices does, next to power and to energy as we count it."""
    largest = _energy(runs[REFERENCE])
    rows = []
    for fleet, run in runs.items():
        published = PUBLISHED_KWH[fleet]
        parts = [published / PUBLISHED_KWH[REFERENCE], _power(fleet) / _power(REFERENCE), _energy(run) / largest]
        cells = [f"{published:.2f}", f"{_power(fleet) / 1000:.2f}", f"{_energy(run):.3g}"]
        rows.append([fleet, *(cell for pair in zip(cells, (f"{part:.3f}" for part in parts), strict=True) for cell in pair)])
    head = [
        "fleet",
        "published kWh (BERT-base, SST-2)",
        "of XLarge's",
        "kW of all devices",
        "of XLarge's",
        "our kWh",
        "of XLarge's",
    ]
    return table("Energy next to the published figures", head, rows)


def _energy(run: Content) -> float:
    return _totals(run["rounds"])["joules"] / KWH


def _power(fleet: str) -> float:
    """Of 100 devices, in watts."""
    return sum(tier.share * tier.power for tier in fleet_of(fleet).tiers)


def _by_time(runs: Mapping[str, Content], clocks: Mapping[str, Sequence[Content]]) -> Any:
    """Accuracy by virtual time: a panel for every fleet, RaFFM and full-size FedAvg."""
    reference = runs[REFERENCE]
    unit, length = time_unit(max(sum(entry["seconds"] for entry in rounds) for rounds in clocks.values()))
    with figure_of(3.0, 2.4 * len(runs)) as figure:
        for axes, (fleet, run) in zip(figure.subplots(1, len(runs), sharey=True, squeeze=False)[0], runs.items(), strict=True):
            paths = {
                "RaFFM": _path(run["rounds"], run, on_devices(run)),
                "FedAvg, full size": _path(clocks[fleet], reference, on_devices(reference)),
            }
            for place, (name, path) in enumerate(paths.items()):
                look = look_of(place)
                points = [(seconds / length, 100 * accuracy) for seconds, accuracy in path]
                axes.plot(*zip(*points, strict=True), color=look.colour, marker=look.marker, linestyle=look.line, label=name)
            axes.set_title(fleet)
            axes.locator_params(axis="x", nbins=4)
        figure.axes[0].set_ylabel("test accuracy on devices (%)")
        figure.supxlabel(f"virtual time ({unit})", fontsize=10)
        figure.axes[-1].legend(fontsize=8, loc="lower right")
    return figure


def _by_round(runs: Mapping[str, Content]) -> Any:
    """Accuracy of what devices are served, by round."""
    with figure_of(4.0) as figure:
        axes = figure.subplots()
        for place, (fleet, run) in enumerate(runs.items()):
            look = look_of(place)
            rounds = [entry["round"] for entry in run["evaluations"]]
            accuracies = [100 * each for each in on_devices(run)]
            axes.plot(rounds, accuracies, color=look.colour, marker=look.marker, linestyle=look.line, label=fleet)
        axes.set_xlabel("round")
        axes.set_ylabel("test accuracy on devices (%)")
        axes.legend(fontsize=8)
    return figure
