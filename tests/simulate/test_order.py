"""Terms of a loss on streams of their own: whatever order events allow, a step is the same, and all streams are joined."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from methods.runs import ALL, plan_of
from raffm.rounds.local import Local
from raffm.rounds.plan import Order as Given
from raffm.simulate.inset import Inset
from raffm.simulate.lane import Lane
from raffm.simulate.sheet import Style
from simulate.order import Order, Stream, watched
from simulate.test_lane import learn_of

FLEET = "1, 1/2, 1/4"
LOCAL = Local("sgd", lr=0.05, momentum=0.9, batch=5, steps=2, clip=1.0)


class Client:
    """A client of the full size on a lane and a stream of its own, with streams for its smaller submodels."""

    def __init__(self, family: str, style: Style, streams: int = 2, **switches: Any) -> None:
        self.aside = [Stream() for _ in range(streams)]
        plan = plan_of(family, "nested", FLEET, labels=[ALL] * 6, local=LOCAL, switches=switches)
        self.order: Given = max(plan.orders(0, range(6)), key=lambda order: len(order.share.inner))
        self.held, self.learn = learn_of(plan, self.order)
        self.lane = Lane(plan, self.order, self.learn, style, self.aside)  # type: ignore[arg-type]
        self.own = Stream()

    @property
    def is_joined(self) -> bool:
        return all(self.own.is_joined(stream) for stream in self.aside)

    def run(self) -> None:
        """All steps, and a look at what came out, on another stream than the lane was made on."""
        main, own = torch.cuda.current_stream(), self.own
        with torch.cuda.stream(own):
            own.wait_stream(main)
            self.lane.load(self.order, self.held, self.learn)
            self.lane.fill(0)
            for step in range(self.lane.steps):
                self.lane.step(self.lane.turn(step))
                assert self.is_joined
            for tensor in self.lane.state():
                tensor.clone()
        main.wait_stream(own)  # type: ignore[arg-type]


def early(patch: pytest.MonkeyPatch, family: str, style: Style = Style(), **switches: Any) -> Order:  # noqa: B008
    """What could come too early."""
    with watched(patch) as order:
        Client(family, style, **switches).run()
    return order


@pytest.mark.parametrize("style", [Style(), Style("bfloat16", channels_last=True)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("switches", [{}, {"steps": "one"}, {"own_norms": False}], ids=["all", "one", "shared"])
def test_terms_beside_each_other_read_nothing_too_early(
    switches: dict[str, Any], style: Style, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not early(monkeypatch, "raffm_resnet", style, **switches).found


@pytest.mark.parametrize("streams", [0, 1])
def test_terms_share_streams_where_there_are_few(streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not early(monkeypatch, "vit", streams=streams).found


def test_what_comes_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading before it is written, writing over what is read, and memory that another stream still uses."""
    for waits, expected in ((True, set()), (False, {"reads what is not written", "writes what is used", "takes memory"})):
        one, other = Stream(), Stream()
        with watched(monkeypatch) as order:
            with torch.cuda.stream(one):
                numbers = torch.ones(4)
            with torch.cuda.stream(other):
                if waits:
                    other.wait_stream(one)
                numbers + 1
            with torch.cuda.stream(one):
                if waits:
                    one.wait_stream(other)
                numbers.zero_()
            with torch.cuda.stream(other):
                if waits:
                    other.wait_stream(one)
                numbers + 1
            del numbers
            with torch.cuda.stream(one):
                if waits:
                    one.wait_stream(other)
                torch.ones(4)
        assert {words for words in expected if any(words in found for found in order.found)} == expected
        assert bool(order.found) is not waits


def test_a_smaller_submodel_that_does_not_wait_for_its_teacher_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Inset.forward

    def hasty(inset: Inset, *values: Any, **inputs: Any) -> Any:
        inset.spoken = None
        return forward(inset, *values, **inputs)

    monkeypatch.setattr(Inset, "forward", hasty)
    found = early(monkeypatch, "raffm_resnet").found
    assert any("reads what is not written" in words for words in found)


def test_streams_that_are_not_joined_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lane, "_join", lambda *_: None)
    with pytest.raises(AssertionError):
        early(monkeypatch, "raffm_resnet")


def test_streams_are_joined_also_where_a_term_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a capture could not be ended, and what it took would be lost."""

    def failing(inset: Inset, gradients: object) -> None:
        raise RuntimeError("CUDA out of memory")

    with watched(monkeypatch):
        client = Client("raffm_resnet", Style())
        monkeypatch.setattr(Inset, "collect", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            client.run()
    assert client.aside[0].past[client.aside[0]], "it had begun"
    assert client.is_joined
