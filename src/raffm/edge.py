"""Across machines: server and nodes as Flower apps, from a few lines of Python or from a run's TOML file.

    app = node_app(lambda context: my_examples(context))       # in the node's client_app.py
    app = server_app(lambda context, known: my_plan(known))    # in the server's server_app.py

`raffm edge init` writes a folder with both for a run.toml, and all that a trial on one machine needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from raffm.data.examples import Dataset, Examples
from raffm.deploy.statement import stated
from raffm.errors import RunError
from raffm.settings import Settings, read_file, read_settings

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

    from raffm.deploy.flower import Serving
    from raffm.deploy.ledger import Known
    from raffm.federate import Trained
    from raffm.rounds.loop import Watcher
    from raffm.rounds.plan import Plan

SERVING = ("nodes", "patience", "deadline")
"""What the app's run config may say of `Serving`."""


# -- from Python -----------------------------------------------------------------------------------------------------


def node_app(examples: Callable[[Context], Examples]) -> ClientApp:
    """The app of a node; `examples` loads the node's own data, which never leave it."""
    from raffm.deploy import flower

    return flower.node_app(examples)


def server_app(
    plan: Callable[[Context, list[Known]], Plan],
    folder: str | Path | None = None,
    serving: Serving | None = None,
    settings: Mapping[str, Any] | None = None,
    watcher: Watcher | None = None,
    done: Callable[[Trained], None] = lambda trained: None,
) -> ServerApp:
    """The app of a server; `plan` makes the run's plan, once it is known who takes part, and `done` is told what came out.

    `watcher` is told of every client and round; by default the log is.
    `nodes`, `patience`, `deadline`, `folder` and `resume` can be set in the app's run config, too, and win there.
    """
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        done(_served(grid, context, plan, folder, serving, settings, watcher))

    return app


def _served(
    grid: Grid,
    context: Context,
    plan: Callable[[Context, list[Known]], Plan],
    folder: str | Path | None,
    serving: Serving | None,
    settings: Mapping[str, Any] | None,
    watcher: Watcher | None,
) -> Trained:
    from raffm.deploy.flower import GridPost, Serving, gathered
    from raffm.deploy.posted import Posted
    from raffm.federate import run_plan
    from raffm.report.watch import Display

    told = context.run_config
    how = replace(serving or Serving(), **{key: told[key] for key in SERVING if key in told})  # type: ignore[arg-type]
    known = gathered(grid, how)
    post = GridPost(grid, {each.client: each.node for each in known}, how.deadline)
    agreed = plan(context, known)
    return run_plan(
        agreed,
        backend=lambda made: Posted(made, post),
        folder=str(told.get("folder") or "") or folder,
        resume=bool(told.get("resume", False)),
        settings=settings,
        watcher=watcher or Display(agreed.rounds),
    )


# -- from a run's TOML file ------------------------------------------------------------------------------------------


def node(file: str | Path) -> ClientApp:
    """The app of a node of a run: its config says where its data are, and what its device can hold."""
    from raffm.deploy import flower

    settings = read_settings(read_file(file))
    return flower.node_app(
        lambda context: own_examples(settings, context.node_config), lambda context: own_device(settings, context.node_config)
    )


def server(file: str | Path) -> ServerApp:
    """The app of a run's server."""
    settings = read_settings(read_file(file))
    return server_app(lambda context, known: plan_for(settings, known), settings=settings.to_json())


def own_examples(settings: Settings, config: Mapping[str, Any]) -> Examples:
    """A node's examples: those of the `data` that its config names, or its part (`partition-id`) of the run's own."""
    from raffm.prepare import data_of, dataset_of

    if "data" in config:
        dataset = dataset_of(settings, str(config["data"]))
        return relabelled(dataset, settings.data.classes)
    if "partition-id" not in config:
        raise RunError("a node's config names its `data`, or which part of the run's data it takes: `partition-id`.")
    clients = int(config.get("num-partitions", settings.data.clients))
    data = data_of(replace(settings, data=replace(settings.data, clients=clients)))
    place = int(config["partition-id"])
    if not 0 <= place < data.clients:
        raise RunError(f"partition-id is {place}; the run's data have the parts 0 to {data.clients - 1}.")
    return data.dataset.train.take(data.split.train[place])


def relabelled(dataset: Dataset, classes: Sequence[str]) -> Examples:
    """A node's training examples with the run's numbers for the classes, matched by their names."""
    if not classes:
        return dataset.train
    strange = [name for name in dataset.classes if name not in classes]
    if strange:
        raise RunError(f"{dataset.name!r} has examples of {strange[0]!r}; the run's classes are {', '.join(classes)}.")
    numbers = torch.tensor([classes.index(name) for name in dataset.classes])
    return Examples(dataset.train.inputs, numbers[dataset.train.labels])


def own_device(settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a node states; in Flower's simulation, where nodes have no config of their own, what the run's fleet deals it."""
    said = stated(config)
    if said or "num-partitions" not in config:
        return said
    from raffm.prepare import fleet_from

    fleet = fleet_from(settings.fleet)
    tiers = fleet.tiers_of(int(config["num-partitions"]), settings.seed)
    return {"size": fleet.tiers[int(tiers[int(config["partition-id"])])].size}


def plan_for(settings: Settings, known: Sequence[Known]) -> Plan:
    """The plan of a run whose clients are nodes: each gets the largest of the fleet's sizes that it can hold."""
    from raffm.data.text import agree_on_padding
    from raffm.deploy.ledger import fitting, fleet_of, ledger
    from raffm.models.labelled import Labelled
    from raffm.prepare import data_of, fleet_from, method_from, model_for, task_of
    from raffm.rounds.plan import Plan

    own = data_of(replace(settings, data=replace(settings.data, clients=1, split="iid", parameters={}))).dataset
    model, method = model_for(settings, own), method_from(settings.method)
    agree_on_padding(model, own.test.inputs)
    labelled = Labelled.of(model, settings.model.table or None)
    sizes = [tier.size for tier in fleet_from(settings.fleet).tiers]
    return Plan(
        server=labelled,
        method=method,
        task=task_of(settings, own, model),
        data=ledger(known, own),
        fleet=fleet_of(known, fitting(labelled, sizes, settings.local), method),
        rounds=settings.rounds,
        seed=settings.seed,
        local=settings.local,
        participation=replace(settings.participation, minimum=max(1, settings.participation.minimum)),
        merging=settings.merging,
        evaluating=settings.evaluate,
    )
