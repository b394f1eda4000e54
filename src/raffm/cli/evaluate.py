"""`raffm evaluate`: a trained run at any sizes, also ones that it was not trained for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that `raffm train` wrote.")],
    sizes: Annotated[
        str | None, typer.Option(help="Parts of the full model, as in '1, 1/4, 1/256'. [default: the run's]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print plain JSON.")] = False,
) -> None:
    """Test a trained model at every size, on the global test set and on every client's. Changes nothing in the folder."""
    from dataclasses import asdict

    from raffm.cli.show import quiet, rows
    from raffm.devices.fleet import fleet_of
    from raffm.prepare import reopened
    from raffm.report.tables import percent
    from raffm.rounds.backend import Serial
    from raffm.rounds.costs import Costs
    from raffm.rounds.evaluate import evaluate as evaluated
    from raffm.rounds.evaluate import sizes_of

    quiet()
    plan, saved = reopened(folder, () if sizes is None else tuple(tier.size for tier in fleet_of(sizes).tiers))
    evaluation, _ = evaluated(plan, Serial(plan), saved.round)
    if as_json:
        typer.echo(json.dumps(asdict(evaluation), indent=1))
        return
    costs = {size.name: size for size in sizes_of(plan, Costs(plan))}
    metric = evaluation.metric
    rows(
        ["size", "parameters", "true fraction", f"test {metric}", "clients mean", "worst decile"],
        [
            [
                name,
                f"{costs[name].params:,}",
                percent(costs[name].fraction),
                percent(scores.test[metric]),
                percent(scores.clients_mean.get(metric)),
                percent(scores.clients_worst_decile.get(metric)),
            ]
            for name, scores in evaluation.sizes.items()
        ],
    )
