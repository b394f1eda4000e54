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
    from dataclasses import asdict, replace

    from raffm.cli.show import quiet, rows
    from raffm.data.text import agree_on_padding
    from raffm.devices.fleet import fleet_of
    from raffm.prepare import plan_of
    from raffm.report.tables import percent
    from raffm.rounds import checkpoint
    from raffm.rounds.backend import Serial
    from raffm.rounds.costs import Costs
    from raffm.rounds.evaluate import evaluate as evaluated
    from raffm.rounds.evaluate import sizes_of
    from raffm.settings import read_settings

    quiet()
    place = folder / "checkpoint"
    saved = checkpoint.load(place, identity=None)
    settings = read_settings(saved.results.run)
    if sizes is not None:
        asked = tuple(tier.size for tier in fleet_of(sizes).tiers)
        settings = replace(settings, evaluate=replace(settings.evaluate, sizes=asked))
    plan = plan_of(settings)
    checkpoint.restore(saved, plan.server, place)
    agree_on_padding(plan.server.model, plan.data.dataset.train.inputs)
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
