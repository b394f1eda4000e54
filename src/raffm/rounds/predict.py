"""What submodels say to test and validation examples, with batch norms calibrated by clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raffm.data.examples import Examples
from raffm.data.task import predicted_by
from raffm.methods.method import Share
from raffm.models.moments import Moments, batch_norms, calibrate, moments, pooled
from raffm.rounds.plan import Plan
from raffm.rounds.workshop import Workshop
from raffm.seeds import generator


@dataclass(frozen=True, eq=False)
class Job:
    """A submodel to be tested after a round, and the size of the devices that it is for."""

    share: Share
    round: int
    size: float = 1.0


Change = Callable[[nn.Module], nn.Module]

CACHED = 50
"""Examples that a CPU runs forward at a time: with 500 at a time small ResNets took up to twice as long."""


def unchanged(module: nn.Module) -> nn.Module:
    """The module as it is."""
    return module


Statistics = Callable[[Plan, nn.Module, Job], Mapping[str, Moments]]
"""What the batch norms of a submodel see, together, on the data of some clients."""


def of_clients(plan: Plan, module: nn.Module, job: Job) -> Mapping[str, Moments]:
    """The moments of the round's calibrating clients, whose data are here."""
    return pooled(_moments(plan, module, several) for several in _alike(plan, calibrating(plan, job.round)))


@torch.no_grad()
def predicted(
    plan: Plan, workshop: Workshop, job: Job, change: Change = unchanged, statistics: Statistics = of_clients
) -> list[Tensor]:
    """The outputs for all test examples, then for all validation examples (none: an empty tensor), on the CPU.

    Where clients' own tests are augmented, a third tensor has the outputs for the test examples as they are moved. `change`
    is what a backend makes of the module before it is used.
    """
    module = served(plan, workshop, job, change, statistics)
    dataset = plan.data.dataset
    validation = torch.empty(0) if dataset.validation is None else outputs_of(plan, module, dataset.validation)
    batches = in_order(dataset.test, plan.evaluating.batch)
    if plan.evaluating.norms == "test-batches":
        batches = _batches_by_client(plan)
        for norm in batch_norms(module).values():
            norm.train()
    test = _outputs(plan, module, dataset.test, batches)
    if not plan.evaluating.augmented:
        return [test, validation]
    return [test, validation, _outputs(plan, module, dataset.test, batches, _moves(plan, job.round))]


def _moves(plan: Plan, round: int) -> Tensor:
    """How every test example is augmented after a round."""
    return plan.task.draw((len(plan.data.dataset.test),), generator(plan.seed, "augment tests", round))


@torch.no_grad()
def served(
    plan: Plan, workshop: Workshop, job: Job, change: Change = unchanged, statistics: Statistics = of_clients
) -> nn.Module:
    """A share's module in evaluation mode, with the server's weights and calibrated norms; good until the next is made."""
    resident = workshop.loaded(job.share, plan.method.held(plan.server, job.share))
    for name, factor in plan.method.folded(plan.server, job.share).items():
        resident.tensors[name].mul_(factor)
    module = change(resident.module.eval())
    if batch_norms(module):
        calibrate(module, statistics(plan, module, job))
    return module


def calibrating(plan: Plan, round: int) -> list[int]:
    """The clients whose moments make the statistics of a round."""
    count = min(plan.evaluating.calibration_clients, plan.data.clients)
    draw = generator(plan.seed, "calibrate", round)
    return sorted(torch.randperm(plan.data.clients, generator=draw)[:count].tolist())


def _alike(plan: Plan, clients: Sequence[int]) -> list[list[Tensor]]:
    """The first training examples of clients, those together that have as many, up to a batch of evaluation."""
    own = [torch.from_numpy(plan.data.split.train[client][: plan.evaluating.calibration_examples]) for client in clients]
    together = _fitting(plan.data.dataset.train, plan.evaluating.batch)
    found: list[list[Tensor]] = []
    for count in sorted({len(part) for part in own}):
        same = [part for part in own if len(part) == count]
        each = max(1, together // count)
        found += [same[begin : begin + each] for begin in range(0, len(same), each)]
    return found


def _moments(plan: Plan, module: nn.Module, several: Sequence[Tensor]) -> dict[str, Moments]:
    """What clients compute on their own training examples, without augmentation, each by itself: in one pass."""

    def run() -> Iterator[None]:
        plan.task.forward(module, plan.task.batch(plan.data.dataset.train, torch.cat(list(several))))
        yield

    return moments(module, run(), len(several))


def outputs_of(plan: Plan, module: nn.Module, examples: Examples) -> Tensor:
    """What a module says to all examples, in their order."""
    return _outputs(plan, module, examples, in_order(examples, plan.evaluating.batch))


def in_order(examples: Examples, size: int) -> Sequence[Tensor]:
    """Batches of all examples, of at most a size; texts of one length share a batch, so that little is padded."""
    lengths = examples.inputs.get("lengths")
    order = torch.arange(len(examples)) if lengths is None else lengths.cpu().argsort(stable=True)
    return torch.split(order, _fitting(examples, size))


def _fitting(examples: Examples, size: int) -> int:
    """A batch of evaluation of at most a size that the device is quick with."""
    return min(size, CACHED) if examples.labels.device.type == "cpu" else size


def _outputs(
    plan: Plan, module: nn.Module, examples: Examples, batches: Sequence[Tensor], moves: Tensor | None = None
) -> Tensor:
    """What a module says to all examples, batch by batch, in the order of the examples; `moves` has a row for each."""
    made = (plan.task.batch(examples, picks, None if moves is None else moves[picks]) for picks in batches)
    said = torch.cat([predicted_by(plan.task, module, batch).float() for batch in made]).cpu()
    return said[torch.cat(list(batches)).argsort()]


def _batches_by_client(plan: Plan) -> list[Tensor]:
    """All test examples in batches as training has them, of one client after the other, then what nobody owns.

    One example alone has no spread: it joins the batch before it, or the one after it, unless all were trained so.
    """
    parts = [torch.from_numpy(plan.data.split.test[client]) for client in range(plan.data.clients)]
    owned = torch.cat(parts)
    alone = torch.ones(len(plan.data.dataset.test), dtype=torch.bool).index_fill(0, owned, False).nonzero().flatten()
    batches: list[Tensor] = []
    for batch in (batch for part in (*parts, alone) for batch in torch.split(part, plan.local.batch) if len(batch)):
        if plan.local.batch > 1 and batches and min(len(batch), len(batches[-1])) == 1:
            batches[-1] = torch.cat([batches[-1], batch])
        else:
            batches.append(batch)
    return batches
