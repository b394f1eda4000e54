"""Flower's ClientApp. Module and examples stay in the actor, where a careful user would keep them."""

from __future__ import annotations

import os
from functools import cache

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.others import workload

app = ClientApp()


@cache
def resident() -> workload.CNN:
    """The actor's module."""
    return workload.model()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Load the weights, train, send the weights back."""
    samples = int(os.environ["RAFFM_BENCH_SAMPLES"])
    module = resident()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    workload.train(module, *workload.own(samples, int(context.node_config["partition-id"])))
    content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": samples})})
    return Message(content=content, reply_to=message)
