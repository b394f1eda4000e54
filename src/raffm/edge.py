"""Across machines: server and nodes as Flower apps, from a few lines of Python or from a run's TOML file.

    app = node_app(lambda context: my_examples(context))       # in the node's client_app.py
    app = server_app(lambda context, known: my_plan(known))    # in the server's server_app.py

`raffm edge init` writes a folder with both for a run.toml, and all that a trial on one machine needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from raffm.data.examples import Dataset, Examples
from raffm.deploy.statement import stated
from raffm.errors import RunError
from raffm.models.files import read_json
from raffm.notices import notice
from raffm.settings import Settings, read_file, read_settings

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

    from raffm.data.task import Task
    from raffm.deploy.flower import Serving
    from raffm.deploy.ledger import Known
    from raffm.devices.budget import Budget
    from raffm.federate import Trained
    from raffm.methods.method import Method
    from raffm.models.labelled import Labelled
    from raffm.rounds.loop import Watcher
    from raffm.rounds.plan import Plan

SERVING = ("nodes", "patience", "deadline")
"""What the app's run config may say of `Serving`."""


# -- from Python -----------------------------------------------------------------------------------------------------


def node_app(
    examples: Callable[[Context], Examples],
    device: Callable[[Context], Mapping[str, Any]] = lambda context: stated(context.node_config),
    task: Task | None = None,
    frame: Labelled | None = None,
) -> ClientApp:
    """The app of a node; `examples` loads the node's own data, which never leave it.

    `device` states what it can hold, by default what its config says. `task`, and `frame`, the full model (its weights are
    not used), are needed where they are the user's own.
    """
    from raffm.deploy import flower

    return flower.node_app(examples, device, task, frame)


def server_app(
    plan: Callable[[Context, list[Known]], Plan],
    folder: str | Path | None = None,
    serving: Serving | None = None,
    settings: Mapping[str, Any] | None = None,
    watcher: Watcher | None = None,
    done: Callable[[Trained], None] = lambda trained: None,
    check: Callable[[Known], None] = lambda known: None,
    save_every: int = 1,
) -> ServerApp:
    """The app of a server; `plan` makes the run's plan, once it is known who takes part, and `done` is told what came out.

    `watcher` is told of every client and round; by default the log is. `check` refuses nodes that cannot take part.
    `nodes`, `patience`, `deadline`, `folder` and `resume` can be set in the app's run config, too, and win there.
    """
    from flwr.serverapp import ServerApp

    from raffm.deploy.flower import GridPost, Serving
    from raffm.deploy.posted import Posted
    from raffm.federate import run_plan
    from raffm.report.watch import Display

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        told = context.run_config
        how = replace(serving or Serving(), **{key: told[key] for key in SERVING if key in told})  # type: ignore[arg-type]
        given = str(told.get("folder") or "") or folder
        place = None if given is None else Path(given)
        known = _known(grid, how, check, place, bool(told.get("resume", False)))
        made = plan(context, known)
        post = GridPost(grid, {each.client: each.node for each in known}, how.deadline)
        _tell(known, made)
        trained = run_plan(
            made,
            backend=lambda agreed: Posted(agreed, post),
            folder=place,
            save_every=save_every,
            resume=bool(told.get("resume", False)),
            settings=settings,
            watcher=watcher or Display(made.rounds),
        )
        if place is not None:
            notice(f"the report is in {place / 'report.html'}")
        done(trained)

    return app


NODES = "nodes.json"


def _known(grid: Grid, serving: Serving, check: Callable[[Known], None], folder: Path | None, is_resumed: bool) -> list[Known]:
    """Who takes part: those that come, or, in a run that goes on, those that it began with.

    What they said is kept beside the checkpoint: devices that measure themselves say something else each time.
    """
    from raffm.deploy.flower import gathered
    from raffm.deploy.ledger import known_from, numbered, returned
    from raffm.report.folder import write_file
    from raffm.rounds import checkpoint

    begun = folder is not None and checkpoint.exists(folder / "checkpoint")
    if begun and not is_resumed:
        raise RunError(
            f'{str(folder)!r} holds a run already. Go on with it: -c "resume=true"; or begin another: -c "folder=\'...\'".'
        )
    found = gathered(grid, serving, check)
    if folder is None:
        return numbered(found)
    if begun:
        before = read_json(folder / NODES)["nodes"]
        return returned([known_from(each["node"], each) for each in before], found)
    known = numbered(found)
    content = {"nodes": [each.to_json() for each in known]}
    write_file(folder / NODES, (json.dumps(content, indent=1) + "\n").encode())
    return known


def _tell(known: Sequence[Known], plan: Plan) -> None:
    """Say who takes part, and with what."""
    for each in known:
        size = plan.tier_of(each.client, 0).label
        notice(f"node {each.node} is client {each.client}: {each.examples:,} examples, size {size}")


# -- from a run's TOML file ------------------------------------------------------------------------------------------


def node(file: str | Path) -> ClientApp:
    """The app of a node of a run: its config says where its data are, and what its device can hold."""
    from raffm.deploy import flower

    settings = read_settings(read_file(file))
    return flower.node_app(
        lambda context: own_examples(settings, context.node_config),
        lambda context: own_device(settings, context.node_config),
        table=settings.model.table,
    )


def server(file: str | Path) -> ServerApp:
    """The app of a run's server."""
    settings = read_settings(read_file(file))
    office = Office(settings)
    return server_app(
        lambda context, known: office.plan(known),
        settings=settings.to_json(),
        check=office.check,
        save_every=settings.save.every,
    )


def own_examples(settings: Settings, config: Mapping[str, Any]) -> Examples:
    """A node's examples: those of the `data` that its config names, or its part (`partition-id`) of the run's own."""
    from raffm.prepare import data_of, dataset_of

    if "data" in config:
        source = str(config["data"])
        if not source or (source.startswith("/") and not Path(source).exists()):
            raise RunError(f"the node's `data` is {source!r}, but there is nothing. Name a folder, a parquet or a CSV file.")
        dataset = dataset_of(settings, source)
        return relabelled(dataset, settings.data.classes)
    if "partition-id" not in config:
        raise RunError("a node's config names its `data`, or which part of the run's data it takes: `partition-id`.")
    clients = _whole(config.get("num-partitions", settings.data.clients), "num-partitions")
    data = data_of(replace(settings, data=replace(settings.data, clients=clients)))
    place = _whole(config["partition-id"], "partition-id")
    if not 0 <= place < data.clients:
        raise RunError(f"partition-id is {place}; the run's data have the parts 0 to {data.clients - 1}.")
    return data.dataset.train.take(data.split.train[place])


def relabelled(dataset: Dataset, classes: Sequence[str]) -> Examples:
    """A node's training examples with the run's numbers for the classes, matched by their names; other labels stay."""
    labels = dataset.train.labels
    if not classes or labels.dim() > 1 or labels.is_floating_point():
        return dataset.train
    strange = [name for name in dataset.classes if name not in classes]
    if strange:
        raise RunError(f"{dataset.name!r} has examples of {strange[0]!r}; the run's classes are {', '.join(classes)}.")
    numbers = torch.tensor([classes.index(name) for name in dataset.classes])
    return Examples(dataset.train.inputs, numbers[labels])


def own_device(settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a node states; in Flower's simulation, where nodes have no config of their own, what the run's fleet deals it."""
    said = stated(config)
    if said or "num-partitions" not in config:
        return said
    from raffm.prepare import fleet_from

    fleet = fleet_from(settings.fleet)
    tiers = fleet.tiers_of(int(config["num-partitions"]), settings.seed)
    return {"size": fleet.tiers[int(tiers[int(config["partition-id"])])].size}


@dataclass(frozen=True, eq=False)
class Office:
    """What a server of a run has before any node comes: settings, a model, its own test examples."""

    settings: Settings

    @cached_property
    def _own(self) -> tuple[Dataset, Task, Labelled, Method]:
        from raffm.data.text import agree_on_padding
        from raffm.models.labelled import Labelled
        from raffm.prepare import data_of, method_from, model_for, task_of

        settings = self.settings
        own = data_of(replace(settings, data=replace(settings.data, clients=1, split="iid", parameters={}))).dataset
        model = model_for(settings, own)
        agree_on_padding(model, own.test.inputs)
        labelled = Labelled.of(model, settings.model.table or None)
        return own, task_of(settings, own, model), labelled, method_from(settings.method)

    @cached_property
    def _fits(self) -> Callable[[Budget], float]:
        from raffm.deploy.ledger import fitting
        from raffm.prepare import fleet_from

        sizes = [tier.size for tier in fleet_from(self.settings.fleet).tiers]
        return fitting(self._own[2], sizes, self.settings.local, self._own[3])

    def check(self, known: Known) -> None:
        """Refuse a node with other classes, or too small for the smallest size."""
        from raffm.deploy.ledger import refuse_classes, tier_for

        refuse_classes(known, len(self._own[0].classes))
        tier_for(known, self._fits)

    def plan(self, known: Sequence[Known]) -> Plan:
        """The plan of a run whose clients are nodes: each gets the largest of the fleet's sizes that it can hold."""
        from raffm.deploy.ledger import fleet_of, ledger
        from raffm.rounds.plan import Plan

        settings, (own, task, labelled, method) = self.settings, self._own
        return Plan(
            server=labelled,
            method=method,
            task=task,
            data=ledger(known, own),
            fleet=fleet_of(known, self._fits, method),
            rounds=settings.rounds,
            seed=settings.seed,
            local=settings.local,
            participation=replace(settings.participation, minimum=max(1, settings.participation.minimum)),
            merging=settings.merging,
            evaluating=settings.evaluate,
        )


def _whole(text: Any, what: str) -> int:
    try:
        return int(text)
    except (TypeError, ValueError):
        raise RunError(f"the node's `{what}` is {text!r}; it is a whole number.") from None
