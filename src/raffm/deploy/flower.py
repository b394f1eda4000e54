"""Server and nodes as Flower apps. The network is Flower's; the rounds are those of every other backend.

    app = node_app(lambda context: my_examples(context))       # in the node's client_app.py
    app = server_app(lambda context, known: my_plan(known))    # in the server's server_app.py

A node states in its config (`--node-config`) as which client it takes part (`partition-id`) and which part of the model it
can hold (`size`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from raffm.data.examples import Examples
from raffm.deploy.ledger import Known, numbered
from raffm.deploy.letters import Arrays, Letter, Reply
from raffm.deploy.node import Node, classes_of
from raffm.deploy.posted import Posted
from raffm.errors import RaffmError, RunError
from raffm.rounds.loop import Keeping, train
from raffm.rounds.plan import Plan
from raffm.rounds.results import Results

POLL = 0.5
"""Seconds between two looks at whether somebody has answered."""


# -- records ---------------------------------------------------------------------------------------------------------


def content_of(about: Mapping[str, Any], arrays: Arrays) -> RecordDict:
    """JSON and arrays as Flower's records."""
    named = {name: Array.from_numpy_ndarray(array) for name, array in arrays.items()}
    return RecordDict({"arrays": ArrayRecord(array_dict=named), "about": ConfigRecord({"json": json.dumps(about)})})


def read_content(content: RecordDict) -> tuple[dict[str, Any], Arrays]:
    """The same the other way round."""
    about: dict[str, Any] = json.loads(str(content.config_records["about"]["json"]))
    return about, {name: array.numpy() for name, array in content.array_records["arrays"].items()}


# -- nodes -----------------------------------------------------------------------------------------------------------


def node_app(examples: Callable[[Context], Examples]) -> ClientApp:
    """The app of a node; `examples` loads the node's own data."""
    app = ClientApp()

    @app.query()
    def say(message: Message, context: Context) -> Message:
        own = examples(context)
        about = {
            "client": int(context.node_config.get("partition-id", -1)),
            "examples": len(own),
            "classes": classes_of(own, 1).nonzero().flatten().tolist(),
            "size": float(Fraction(str(context.node_config.get("size", "1")))),
        }
        return Message(content_of(about, {}), reply_to=message)

    @app.train()
    def learn(message: Message, context: Context) -> Message:
        reply = Node(examples(context)).answer(Letter(*read_content(message.content)))
        return Message(content_of(reply.about, reply.arrays), reply_to=message)

    return app


# -- the server ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Serving:
    """How a server deals with its nodes: how many it waits for, and how long (seconds) it waits for them and for answers."""

    nodes: int = 2
    patience: float = 120.0
    deadline: float = 3600.0


def server_app(
    plan: Callable[[Context, list[Known]], Plan],
    serving: Serving = Serving(),  # noqa: B008 (frozen)
    folder: str | Path | None = None,
    resume: bool = False,
    done: Callable[[Results], None] = lambda results: None,
) -> ServerApp:
    """The app of a server; `plan` makes the run's plan, once it is known who takes part, and `done` is told its results."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        done(serve(grid, lambda known: plan(context, known), serving, folder, resume))

    return app


def serve(
    grid: Grid, plan: Callable[[list[Known]], Plan], serving: Serving, folder: str | Path | None = None, resume: bool = False
) -> Results:
    """Wait for nodes, ask what they have, and train."""
    known = asked(grid, waited_for(grid, serving), serving)
    made = plan(known)
    post = GridPost(grid, {each.client: each.node for each in known}, serving.deadline)
    keeping = Keeping(None if folder is None else Path(folder) / "checkpoint", resume=resume)
    return train(made, Posted(made, post), keeping)


def waited_for(grid: Grid, serving: Serving) -> list[int]:
    """The nodes that are there, once there are enough."""
    end = time.monotonic() + serving.patience
    while True:
        nodes = sorted(grid.get_node_ids())
        if len(nodes) >= serving.nodes:
            return nodes
        if time.monotonic() > end:
            raise RunError(f"{len(nodes)} nodes came within {serving.patience:g} s; {serving.nodes} were waited for.")
        time.sleep(POLL)


def asked(grid: Grid, nodes: list[int], serving: Serving) -> list[Known]:
    """What every node says of itself."""
    contents = dict.fromkeys(nodes, content_of({}, {}))
    found = []
    for node, message in exchanged(grid, contents, "query", serving.patience):
        if isinstance(message, str):
            raise RunError(f"node {node} did not say what it has: {message}")
        about, _ = read_content(message.content)
        found.append(Known(node, about["client"], about["examples"], tuple(about["classes"]), about["size"]))
    return numbered(found)


class GridPost:
    """Letters through Flower's grid; replies come one by one."""

    def __init__(self, grid: Grid, nodes: Mapping[int, int], deadline: float) -> None:
        """`nodes` gives the node of every client."""
        self._grid, self._nodes, self._deadline = grid, nodes, deadline

    def __call__(self, letters: Mapping[int, Letter]) -> Iterator[tuple[int, Reply | str]]:
        """Send all letters, and give every reply as it comes, or why there is none."""
        contents = {self._nodes[client]: content_of(letter.about, letter.arrays) for client, letter in letters.items()}
        clients = {node: client for client, node in self._nodes.items()}
        for node, message in exchanged(self._grid, contents, "train", self._deadline):
            yield clients[node], message if isinstance(message, str) else _reply(message)


def _reply(message: Message) -> Reply | str:
    try:
        return Reply(*read_content(message.content))
    except (KeyError, TypeError, ValueError, RaffmError) as error:
        return f"its reply cannot be read: {error!r}"


def exchanged(grid: Grid, contents: Mapping[int, RecordDict], kind: str, seconds: float) -> Iterator[tuple[int, Message | str]]:
    """Send to nodes; give every answer as it comes, matched by the message that it answers, or why there is none."""
    messages = [Message(content, dst_node_id=node, message_type=kind) for node, content in contents.items()]
    waiting = dict(zip(grid.push_messages(messages), contents, strict=True))
    end = time.monotonic() + seconds
    while waiting and time.monotonic() < end:
        for message in grid.pull_messages(list(waiting)):
            node = waiting.pop(message.metadata.reply_to_message_id, None)
            if node is not None:
                yield node, f"it failed: {message.error.reason}" if message.has_error() else message
        if waiting:
            time.sleep(POLL)
    for node in waiting.values():
        yield node, f"it did not answer within {seconds:g} s"
