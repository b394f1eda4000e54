"""What nested steps take in memory: the bytes alive in training, counted exactly."""

import pytest
import torch

from devices.live import LiveBytes
from raffm.data.task import Batch, ImageClassification
from raffm.methods import method_of
from raffm.methods.method import Client, Device
from raffm.models.labelled import Labelled
from raffm.models.resnet import ResNet
from raffm.models.surgery import submodel
from raffm.rounds.local import Local, train

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
