"""`raffm evaluate`: a trained run at any sizes, also ones that it was not trained for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from raffm.measure import Measured


def evaluate(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that `raffm train` wrote, or a pretrained classifier.")],
    data: Annotated[
        str | None, typer.Option(help="Other data than the run's; needed where FOLDER is a pretrained model and no run.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Parts of the full model, as in '1, 1/4, 1/256'. [default: the run's]")
    ] = None,
    spp: Annotated[
        str | None,
        typer.Option(
            help="Add RaFFM's submodels of these sizes with and without salient parameters first, ranked by l1_norm or l2_norm."
        ),
    ] = None,
    is_timed: Annotated[bool, typer.Option("--time/--no-time", help="Time one example at every size, on this machine.")] = True,
    is_last: Annotated[bool, typer.Option("--last", help="The last model, where the run kept an average.")] = False,
    plot: Annotated[Path | None, typer.Option(help="A picture of it: .png, .svg or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print plain JSON.")] = False,
) -> None:
    """Test a trained model at every size, on the global test set and on every client's. Changes nothing in the folder."""
    from raffm.cli.show import busy, quiet, rows
    from raffm.devices.fleet import fleet_of
    from raffm.measure import measured
    from raffm.prepare import opened
    from raffm.report.drawing import refuse_kind, save
    from raffm.report.plots import by_cost

    quiet()
    if plot is not None:
        refuse_kind(plot)
    wanted = () if sizes is None else tuple(tier.size for tier in fleet_of(sizes).tiers)
    plan, rounds = opened(folder, data, wanted, is_last)
    found = measured(plan, rounds, spp, is_timed)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    else:
        rows(*table(found))
        if is_timed:
            busy()
    if plot is not None:
        save(by_cost(found.evaluation, found.sizes, {name: each.median for name, each in found.latency.items()}), plot)


def table(found: Measured) -> tuple[list[str], list[list[str]]]:
    """A row for every size."""
    from raffm.report.tables import count, percent

    metric = found.evaluation.metric
    others = [name for name in next(iter(found.evaluation.sizes.values())).test if name.startswith("f1")]
    heading = ["size", "parameters", "true fraction", "FLOPs", f"test {metric}", *others, "clients mean", "worst decile"]
    lines = []
    for name, scores in found.evaluation.sizes.items():
        cost = found.sizes[name]
        line = [name, f"{cost.params:,}", percent(cost.fraction), count(cost.flops)]
        line += [percent(scores.test[each]) for each in (metric, *others)]
        line += [percent(scores.clients_mean.get(metric)), percent(scores.clients_worst_decile.get(metric))]
        if found.latency:
            timing = found.latency[name]
            line.append(f"{1000 * timing.median:.2f} ({1000 * timing.low:.2f} to {1000 * timing.high:.2f})")
        lines.append(line)
    return [*heading, *(["ms here (10 % to 90 %)"] if found.latency else [])], lines
