"""raffm: FedAvg over a user's own module with a table of its own, serial or pooled, rounds as `train` runs them."""

from __future__ import annotations

import numpy as np

from benchmarks.others.clock import Clock, options
from benchmarks.others.workload import BATCH, CLASSES, CLIENTS, COHORT, RATE, loss_of, model, stored
from raffm.data.examples import Dataset, Examples, Federation, Parts, Split
from raffm.data.task import ImageClassification
from raffm.devices.fleet import fleet_of
from raffm.federate import backend_of
from raffm.methods import method_of
from raffm.models.labelled import Labelled
from raffm.models.table import read
from raffm.rounds.local import Local
from raffm.rounds.loop import Nobody, train
from raffm.rounds.plan import Evaluating, Participation, Plan
from raffm.rounds.results import Evaluation, Results, Round

TABLE = """
family = "cnn"

[groups]
channels = { pinned = true }
classes = { pinned = true }

[tensors]
"first" = "channels -> narrow, 3, 3"
"second" = "narrow -> wide, 3, 3"
"hidden" = "wide*64 -> hidden"
"head" = "hidden -> classes"

[inputs]
pixel_values = ["channels = 3", "size = 32", "size = 32"]

[outputs]
output = "classes"
"""


class Timed(Nobody):
    """Looks at the clock at the end of every round."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def round(self, entry: Round, evaluation: Evaluation | None, results: Results) -> None:
        """A round has ended."""
        self._clock.tick()


def federation(samples: int) -> Federation:
    """The clients' examples; nobody has test examples but the server, which has ten."""
    images, labels = stored(samples)
    train_examples = Examples({"pixel_values": images}, labels)
    dataset = Dataset("synthetic", train_examples, train_examples.take(np.arange(10)), tuple(map(str, range(CLASSES))))
    parts = Parts.of(list(np.arange(CLIENTS * samples).reshape(CLIENTS, samples)))
    return Federation(dataset, Split(parts, Parts.of([np.arange(0)] * CLIENTS)))


def main() -> None:
    told, clock = options(), Clock()
    server = Labelled.of(model(), read(TABLE))
    plan = Plan(
        server=server,
        method=method_of("fedavg"),
        task=ImageClassification((0.5,) * 3, (0.5,) * 3),
        data=federation(told.samples),
        fleet=fleet_of("full"),
        rounds=told.rounds,
        local=Local("sgd", RATE, BATCH),
        participation=Participation(COHORT),
        evaluating=Evaluating(every=told.rounds),
    )
    backend = backend_of("serial" if told.workers == 1 else "pooled", plan, told.workers)
    try:
        train(plan, backend, watcher=Timed(clock))
    finally:
        backend.close()
    clock.report(loss_of(server.model, told.samples))


if __name__ == "__main__":
    main()
