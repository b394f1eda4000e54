"""A client's training in bfloat16 against float32, and its dropout by bits: on one thread, models that people train on CPUs.

Weights and data are random.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from math import inf
from unittest.mock import patch

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

from benchmarks.rounds import federation, ratio, whole_round
from raffm import Evaluating, Federation, Local, Participation
from raffm.data.examples import Examples
from raffm.data.task import ImageClassification, Task, TextClassification
from raffm.devices.fleet import fleet_of
from raffm.methods import method_of
from raffm.models.labelled import Labelled
from raffm.models.load import trainable
from raffm.rounds.backend import Serial
from raffm.rounds.plan import Plan

TOKENS = 64
BERT = "BERT of 6 x 384"


def measure(repeats: int) -> list[tuple[str, float, float]]:
    """The ratio for every model, and that of dropout for the one that has some."""
    torch.set_num_threads(1)
    plans, what = _plans(), "a client in bfloat16 / in float32"
    found = [(f"{what}, {name}, CPU seconds", _measured(plan, repeats, name), inf) for name, plan in plans.items()]
    return [
        *found,
        (f"dropout by bits / by floats, a client in bfloat16, {BERT}, CPU seconds", _bits(plans[BERT], repeats), inf),
    ]


def _measured(plan: Plan, repeats: int, title: str) -> float:
    rounded, exact, tally = Serial(plan, "bfloat16"), Serial(plan), plan.tally()

    def run(backend: Serial) -> None:
        whole_round(plan, backend, tally)

    return ratio(lambda: run(rounded), lambda: run(exact), time.process_time, repeats, title)


def _bits(plan: Plan, repeats: int) -> float:
    backend, tally = Serial(plan, "bfloat16"), plan.tally()

    def by_bits() -> None:
        whole_round(plan, backend, tally)

    def by_floats() -> None:
        with patch("raffm.rounds.local.in_sixteen_bits", lambda _: nullcontext()):
            whole_round(plan, backend, tally)

    return ratio(by_bits, by_floats, time.process_time, repeats, "dropout")


def _plans() -> dict[str, Plan]:
    images = federation(2)
    vit = ViTConfig(
        image_size=32,
        patch_size=4,
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=6,
        intermediate_size=768,
        num_labels=10,
    )
    bert = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, num_labels=10)
    return {
        "ResNet-18": _plan(trainable("resnet18", "image", 10, (3, 32, 32)), images, ImageClassification()),
        "ViT of 12 x 192": _plan(ViTForImageClassification(vit), images, ImageClassification()),
        BERT: _plan(BertForSequenceClassification(bert), _texts(images), TextClassification()),
    }


def _plan(model: nn.Module, data: Federation, task: Task) -> Plan:
    return Plan(
        server=Labelled.of(model),
        method=method_of("fedavg"),
        task=task,
        data=data,
        fleet=fleet_of("full"),
        rounds=1,
        local=Local("sgd", lr=0.01, batch=20, steps=3),
        participation=Participation(1),
        evaluating=Evaluating(every=100),
    )


def _texts(images: Federation) -> Federation:
    """Random tokens with the labels, and the clients, of images."""
    labels = images.dataset.train.labels
    ids = torch.randint(0, 30_000, (len(labels), TOKENS), generator=torch.Generator().manual_seed(0))
    part = Examples({"input_ids": ids, "lengths": torch.full((len(labels),), TOKENS)}, labels)
    return replace(images, dataset=replace(images.dataset, train=part, test=part))
