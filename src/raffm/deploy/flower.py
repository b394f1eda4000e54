"""Nodes, and a server's way to them, over Flower. The network is Flower's; the rounds are those of every other backend."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from safetensors.numpy import load, save

from raffm.data.examples import Examples
from raffm.data.task import Task
from raffm.deploy.ledger import UNNUMBERED, Known, known_from
from raffm.deploy.letters import Arrays, Letter, Reply
from raffm.deploy.node import Node
from raffm.deploy.statement import stated
from raffm.errors import RunError
from raffm.models.labelled import Labelled
from raffm.notices import notice

POLL = 0.5
"""Seconds between two looks at whether somebody has answered."""

AGAIN, LEAST = 5.0, 10.0
"""Seconds after which a node that failed to say what it has is asked again, and those that it is given at least."""


# -- records ---------------------------------------------------------------------------------------------------------


WHOLE = "safetensors"


class Records:
    """Arrays as Flower's records: one array of bytes for all, since Flower fetches every array by requests of its own.

    Of arrays that come several times in a row one record is made, which travels once.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[Arrays, ArrayRecord]] = {}

    def of(self, about: Mapping[str, Any], **named: Arrays) -> RecordDict:
        """JSON and arrays, those under a name together."""
        records = {name: self._record(name, arrays) for name, arrays in named.items() if arrays}
        return RecordDict({"about": ConfigRecord({"json": json.dumps(about)}), **records})

    def _record(self, name: str, arrays: Arrays) -> ArrayRecord:
        if name not in self._last or self._last[name][0] is not arrays:
            whole = np.frombuffer(save({key: np.asarray(array, order="C") for key, array in arrays.items()}), np.uint8)
            self._last[name] = arrays, ArrayRecord(array_dict={WHOLE: Array.from_numpy_ndarray(whole)})
        return self._last[name][1]


def about_of(content: RecordDict) -> dict[str, Any]:
    """The JSON of a message."""
    about = json.loads(str(content.config_records["about"]["json"]))
    if not isinstance(about, dict):
        raise ValueError("what came is no table")
    return about


def arrays_of(content: RecordDict, name: str) -> Arrays:
    """The arrays of a message under a name; none where there are none."""
    record = content.array_records.get(name)
    return {} if record is None else load(record[WHOLE].numpy().tobytes())


def read_letter(content: RecordDict) -> Letter:
    """A letter that came."""
    return Letter(about_of(content), *(arrays_of(content, name) for name in ("arrays", "frozen", "own")))


# -- nodes -----------------------------------------------------------------------------------------------------------


def node_app(
    examples: Callable[[Context], Examples],
    device: Callable[[Context], Mapping[str, Any]] = lambda context: stated(context.node_config),
    task: Task | None = None,
    frame: Labelled | None = None,
    table: str = "",
) -> ClientApp:
    """The app of a node; `examples` loads the node's own data, `device` states what it can hold (see `statement.py`).

    `task`, and `frame`, the full model (its weights are not used), or only its `table`, where they are the user's own.
    """
    app = ClientApp()

    @app.query()
    def say(message: Message, context: Context) -> Message:
        own = examples(context)
        about = {
            "client": int(context.node_config.get("partition-id", UNNUMBERED)),
            "examples": len(own),
            "classes": own.present(1).nonzero().flatten().tolist(),
            "device": dict(device(context)),
        }
        return Message(Records().of(about), reply_to=message)

    @app.train()
    def learn(message: Message, context: Context) -> Message:
        reply = Node(examples(context), frame, task, table).answer(read_letter(message.content))
        return Message(Records().of(reply.about, arrays=reply.arrays), reply_to=message)

    return app


# -- the server ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Serving:
    """How a server deals with its nodes: how many it waits for, and how long (seconds) it waits for them and for answers."""

    nodes: int = 2
    patience: float = 120.0
    deadline: float = 3600.0


def gathered(grid: Grid, serving: Serving, check: Callable[[Known], None] = lambda known: None) -> list[Known]:
    """Wait until enough nodes have said what they have, and pass `check`; those that fail are asked again meanwhile."""
    end = time.monotonic() + serving.patience
    found: dict[int, Known] = {}
    reasons: dict[int, str] = {}
    asked: dict[int, float] = {}
    while len(found) < serving.nodes:
        if time.monotonic() > end:
            silent = f"{len(found)} nodes can take part; {serving.nodes} are needed, and {serving.patience:g} s were waited."
            raise RunError(" ".join([silent, *(reason for node, reason in reasons.items() if node not in found)]))
        due = time.monotonic() - AGAIN
        here = sorted(grid.get_node_ids())
        nodes = [node for node in here if node not in found and asked.get(node, due) <= due]
        left = max(LEAST, end - time.monotonic())
        for place, message in exchanged(grid, [(node, Records().of({})) for node in nodes], "query", left):
            node, asked[nodes[place]] = nodes[place], time.monotonic()
            said = _said(node, message, check)
            if isinstance(said, Known):
                said = _alone(said, found, here)
            if isinstance(said, Known):
                found[node] = said
            elif node not in reasons or not isinstance(message, Silence):
                reasons[node] = said
                notice(said)
        time.sleep(POLL)
    return list(found.values())


def _alone(said: Known, found: dict[int, Known], here: Sequence[int]) -> Known | str:
    """A node whose part of the data no other has: one that had it and has gone is forgotten, as after a restart."""
    twin = next((node for node, each in found.items() if each.client == said.client != UNNUMBERED), None)
    if twin in here:
        return f"node {said.node} says that it is client {said.client}, as node {twin} does."
    if twin is not None:
        del found[twin]
    return said


def _said(node: int, message: Message | str, check: Callable[[Known], None]) -> Known | str:
    """What a node stated, or why nothing can be made of it."""
    if isinstance(message, str):
        return f"node {node} did not say what it has: {message}."
    try:
        known = known_from(node, about_of(message.content))
        check(known)
    except Exception as error:  # it comes from another machine, and may be anything
        return str(error) or repr(error)
    return known


class GridPost:
    """Letters through Flower's grid; replies come one by one."""

    def __init__(self, grid: Grid, nodes: Mapping[int, int], deadline: float) -> None:
        """`nodes` gives the node of every client."""
        self._grid, self._nodes, self._deadline = grid, nodes, deadline

    def __call__(self, letters: Iterable[tuple[int, Letter]]) -> Iterator[tuple[int, Reply | str]]:
        """Send every letter as it is made, and give every reply as it comes, or why there is none."""
        records = Records()
        contents = (
            (self._nodes[client], records.of(letter.about, arrays=letter.arrays, frozen=letter.frozen, own=letter.own))
            for client, letter in letters
        )
        for place, message in exchanged(self._grid, contents, "train", self._deadline):
            yield place, message if isinstance(message, str) else _reply(message)


def _reply(message: Message) -> Reply | str:
    try:
        return Reply(about_of(message.content), arrays_of(message.content, "arrays"))
    except Exception as error:  # it comes from another machine, and may be anything
        return f"its reply cannot be read: {error!r}"


class Silence(str):
    """Why there is no answer: it was waited for in vain."""


def exchanged(
    grid: Grid, contents: Iterable[tuple[int, RecordDict]], kind: str, seconds: float
) -> Iterator[tuple[int, Message | str]]:
    """Send to nodes, one after another; give every answer as it comes, with the place of what it answers, or why not.

    Answers are matched by the message that they answer, and fetched one by one: no two are in memory.
    """
    waiting: dict[str, int] = {}
    for place, (node, content) in enumerate(contents):
        sent = "".join(grid.push_messages([Message(content, dst_node_id=node, message_type=kind)]))
        if sent:
            waiting[sent] = place
        else:
            yield place, "Flower does not know this node, or did not take what was sent to it"
    end = time.monotonic() + seconds
    while waiting and time.monotonic() < end:
        for sent, place in list(waiting.items()):
            for message in grid.pull_messages([sent]):
                if message.metadata.reply_to_message_id == sent and waiting.pop(sent, None) is not None:
                    yield place, f"it failed: {message.error.reason}" if message.has_error() else message
        if waiting:
            time.sleep(POLL)
    for place in waiting.values():
        yield place, Silence(f"it did not answer within {seconds:g} s")
