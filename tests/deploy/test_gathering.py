"""How a server finds its nodes, against a grid that behaves as Flower's does when things go wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from raffm.deploy import flower
from raffm.deploy.flower import GridPost, Serving, Silence, exchanged, gathered
from raffm.deploy.ledger import Known
from raffm.deploy.letters import Letter
from raffm.errors import RunError

Answer = Callable[[Message], Message | None]


class Grid:
    """Flower's grid as far as we use it: nodes by number, each with what it answers; None keeps it silent."""

    def __init__(self, nodes: dict[int, Answer], unknown: Sequence[int] = ()) -> None:
        self.nodes, self.unknown = nodes, set(unknown)
        self.sent: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def push_messages(self, messages: Sequence[Message]) -> list[str]:
        ids = []
        for message in messages:
            name = "" if message.metadata.dst_node_id in self.unknown else f"m{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = name
            ids.append(name)
            if name:
                self.sent[name] = message
        return ids

    def pull_messages(self, ids: Sequence[str]) -> list[Message]:
        answers = [self.nodes[self.sent[name].metadata.dst_node_id](self.sent[name]) for name in ids]
        return [answer for answer in answers if answer is not None]


def says(**about: object) -> Answer:
    content = {"examples": 5, "classes": [0], "device": {}, **about}
    return lambda asked: Message(RecordDict({"about": ConfigRecord({"json": json.dumps(content)})}), reply_to=asked)


def fails(reason: str) -> Answer:
    return lambda asked: Message(Error(code=0, reason=reason), reply_to=asked)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    for name, seconds in {"POLL": 0.01, "AGAIN": 0.05, "LEAST": 0.05}.items():
        monkeypatch.setattr(flower, name, seconds)


def test_nodes_that_answer_take_part_and_others_are_named(caplog: pytest.LogCaptureFixture) -> None:
    grid = Grid({1: says(client=0), 2: fails("no folder /nowhere"), 3: says(client=1)})
    assert [each.node for each in gathered(grid, Serving(nodes=2, patience=5))] == [1, 3]  # type: ignore[arg-type]
    assert "node 2 did not say what it has: it failed: no folder /nowhere" in caplog.text


def test_the_true_reason_is_said_and_not_that_time_ran_out() -> None:
    calls: list[Message] = []

    def once(asked: Message) -> Message | None:
        calls.append(asked)
        return fails("the CSV file has no label")(asked) if len({id(each) for each in calls}) == 1 else None

    with pytest.raises(RunError, match=r"0 nodes can take part; 1 are needed.*the CSV file has no label"):
        gathered(Grid({1: once}), Serving(nodes=1, patience=0.3))  # type: ignore[arg-type]


def test_a_node_that_fails_at_first_is_asked_again() -> None:
    calls: list[int] = []

    def later(asked: Message) -> Message | None:
        calls.append(1)
        return fails("not yet")(asked) if len(calls) < 3 else says()(asked)

    assert len(gathered(Grid({4: later}), Serving(nodes=1, patience=5))) == 1  # type: ignore[arg-type]


def test_of_two_nodes_with_one_part_the_second_is_named_and_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    grid = Grid({1: says(client=0), 2: says(client=0)})
    with pytest.raises(RunError, match=r"1 nodes can take part; 2 are needed.*node 2 says that it is client 0, as node 1 does"):
        gathered(grid, Serving(nodes=2, patience=0.3))  # type: ignore[arg-type]
    grid.nodes[3] = says(client=1)
    assert [each.node for each in gathered(grid, Serving(nodes=2, patience=5))] == [1, 3]  # type: ignore[arg-type]


def test_a_node_that_comes_back_under_another_number_takes_its_own_place() -> None:
    grid, heard = Grid({}), []

    def first(asked: Message) -> Message | None:
        del grid.nodes[1]  # it ends as soon as it has answered
        grid.nodes[2] = again
        return says(client=0)(asked)

    def again(asked: Message) -> Message | None:
        heard.append(2)
        return says(client=0)(asked)

    def other(asked: Message) -> Message | None:
        return says(client=1)(asked) if heard else fails("not yet")(asked)

    grid.nodes |= {1: first, 3: other}
    assert {each.node for each in gathered(grid, Serving(nodes=2, patience=5))} == {2, 3}  # type: ignore[arg-type]


def test_a_node_that_cannot_take_part_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    def check(known: Known) -> None:
        if max(known.classes) > 3:
            raise RunError(f"node {known.node} has examples of class 9; there are 4.")

    grid = Grid({1: says(classes=[9]), 2: says(classes=[2])})
    assert [each.node for each in gathered(grid, Serving(nodes=1, patience=5), check)] == [2]  # type: ignore[arg-type]
    assert "node 1 has examples of class 9; there are 4." in caplog.text


def test_too_few_nodes_end_the_wait_with_a_count() -> None:
    with pytest.raises(RunError, match=r"0 nodes can take part; 2 are needed, and 0\.1 s were waited"):
        gathered(Grid({}), Serving(nodes=2, patience=0.1))  # type: ignore[arg-type]


def test_a_node_that_flower_does_not_know_is_not_waited_for() -> None:
    grid = Grid({1: says(), 2: says()}, unknown=[1])
    found = dict(exchanged(grid, [(1, RecordDict()), (2, RecordDict())], "train", 60.0))  # type: ignore[arg-type]
    assert found[0] == "Flower does not know this node, or did not take what was sent to it"
    assert isinstance(found[1], Message)


def test_a_node_that_stalls_costs_its_own_contribution_at_the_deadline() -> None:
    grid = Grid({1: says(), 2: lambda asked: None})
    post = GridPost(grid, {0: 1, 1: 2}, deadline=0.2)  # type: ignore[arg-type]
    found = dict(post([(client, Letter({}, {})) for client in range(2)]))
    assert not isinstance(found[0], str)
    assert isinstance(found[1], Silence)
    assert found[1] == "it did not answer within 0.2 s"
