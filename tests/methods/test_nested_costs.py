"""What nested steps take: the bytes alive in training, counted exactly, and the work."""

import numpy as np
import pytest
import torch

from devices.live import LiveBytes
from raffm.algebra.selection import Selection
from raffm.data.examples import Dataset, Examples, Federation, Parts, Split
from raffm.data.task import Batch, ImageClassification
from raffm.devices.fleet import fleet_of
from raffm.methods import method_of
from raffm.methods.method import Client, Device
from raffm.models.labelled import Labelled
from raffm.models.resnet import ResNet
from raffm.models.surgery import submodel
from raffm.rounds.costs import Costs
from raffm.rounds.local import Local, train
from raffm.rounds.plan import Plan

FLEET = (1.0, 1 / 4, 1 / 16, 1 / 64)


def peak(steps: str, size: float) -> int:
    """The most bytes alive in two steps of SGD on 20 images."""
    method = method_of("nested", steps=steps)
    server = method.adapt(Labelled.of(ResNet()), 0, FLEET)
    (share,) = method.choose(server, 0, [Device(0, size, fleet=FLEET)], 0)
    assert share is not None
    module = submodel(server.model, server.layout, share.selection)
    task = ImageClassification((0.5,) * 3, (0.5,) * 3)
    learn = method.learn(server, share, share.selection, Client(task, torch.ones(10, dtype=torch.bool)))
    batch = Batch({"pixel_values": torch.randn(20, 3, 32, 32)}, torch.arange(20) % 10)
    meter = LiveBytes()
    meter.follow([*module.parameters(), *module.buffers(), *batch.inputs.values()])
    with meter:
        train(module, learn, Local("sgd", lr=0.1, batch=20), [batch] * 2, 0, 2, lambda: None)
    return int(meter.peak)


@pytest.mark.parametrize(("size", "limit"), [(1.0, 1.5), (1 / 4, 1.2), (1 / 16, 1.2)])
def test_terms_one_after_another_take_little_more_memory_than_the_first_alone(size: float, limit: float) -> None:
    """ResNet-18 as it is published; one summed loss would take about 2.4 times as much at the full size."""
    assert peak("all", size) <= limit * peak("none", size)


def test_a_client_of_the_published_setting_does_the_work_that_the_page_states() -> None:
    """Training steps of the four sizes in full steps, and what is deployed in full models (docs/methods/nested.md)."""
    pixels = torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
    examples = Examples({"pixel_values": pixels}, torch.arange(8))
    parts = Parts.of([np.arange(place, place + 2) for place in range(0, 8, 2)])
    classes = tuple("abcdefghij")
    plan = Plan(
        server=Labelled.of(ResNet()),
        method=method_of("nested"),
        task=ImageClassification((0.5,) * 3, (0.5,) * 3),
        data=Federation(Dataset("zeros", examples, examples, classes), Split(parts, parts)),
        fleet=fleet_of("quarters"),
        rounds=1,
    )
    costs = Costs(plan)
    whole = costs.flops(Selection())
    by_size = {plan.tier_of(order.client, 0).size: order.share for order in plan.orders(0, range(4))}
    work = [costs.of(by_size[size]).work(1) / (3 * whole) for size in FLEET]
    deployed = [costs.flops(by_size[size].selection) / whole for size in FLEET]
    assert work == pytest.approx([2.15, 1.15, 0.49, 0.10], abs=0.005)
    assert sum(work) / 4 == pytest.approx(0.97, abs=0.005)
    assert deployed == pytest.approx([1, 0.66, 0.39, 0.10], abs=0.005)
    sent = [costs.of(by_size[size]).bytes_down / 1e6 for size in FLEET]
    assert sent == pytest.approx([44.85, 11.22, 2.77, 0.70], abs=0.005)
