"""pfl-research: FederatedAveraging on its SimulatedBackend; under torchrun with several workers."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor
from torch.nn import functional

from benchmarks.others.clock import Clock, options
from benchmarks.others.workload import BATCH, CLIENTS, CNN, COHORT, RATE, loss_of, model, own


class Module(CNN):
    """The CNN with what pfl asks of a module."""

    def loss(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy."""
        return functional.cross_entropy(self(pixels), labels)

    def metrics(self, pixels: Tensor, labels: Tensor) -> dict[str, Weighted]:
        """The loss, for its evaluations."""
        with torch.no_grad():
            return {"loss": Weighted(float(self.loss(pixels, labels)) * len(labels), len(labels))}


class Timed(TrainingProcessCallback):  # type: ignore[misc]
    """Looks at the clock at the end of every round."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """A round has ended."""
        self._clock.tick()
        return False, Metrics()


def main() -> None:
    told, clock = options(), Clock()
    np.random.seed(0)  # pfl draws from it
    module = Module()
    module.load_state_dict(model().state_dict())
    trained = PyTorchModel(module, partial(torch.optim.SGD, fused=True), torch.optim.SGD(module.parameters(), 1.0))
    users = [Dataset(list(own(told.samples, client))) for client in range(CLIENTS)]  # resident, batches kept
    data = FederatedDataset(users.__getitem__, get_user_sampler("random", range(CLIENTS)))
    FederatedAveraging().run(
        NNAlgorithmParams(told.rounds, evaluation_frequency=10**9, train_cohort_size=COHORT, val_cohort_size=None),
        SimulatedBackend(data, data),
        trained,
        NNTrainHyperParams(local_learning_rate=RATE, local_num_epochs=1, local_batch_size=BATCH),
        callbacks=[Timed(clock)],
    )
    if os.environ.get("RANK", "0") == "0":
        clock.report(loss_of(module, told.samples))


if __name__ == "__main__":
    main()
