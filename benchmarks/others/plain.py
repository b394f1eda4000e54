"""The floor: a plain loop in one process. A resident module, weights copied in, a running sum of parameters."""

from __future__ import annotations

import torch

from benchmarks.others.clock import Clock, options
from benchmarks.others.workload import COHORT, cohort, examples, loss_of, model, own, train


def main() -> None:
    told, clock = options(), Clock()
    examples(told.samples)
    server, module = model(), model()
    theirs, ours = list(server.parameters()), list(module.parameters())
    sums = [torch.zeros_like(parameter) for parameter in theirs]
    for round in range(told.rounds):
        for client in cohort(round):
            with torch.no_grad():
                for parameter, sent in zip(ours, theirs, strict=True):
                    parameter.copy_(sent)
            train(module, *own(told.samples, client))
            with torch.no_grad():
                for total, parameter in zip(sums, ours, strict=True):
                    total.add_(parameter)
        with torch.no_grad():
            for sent, total in zip(theirs, sums, strict=True):
                sent.copy_(total.div_(COHORT))
                total.zero_()
        clock.tick()
    clock.report(loss_of(server, told.samples))


if __name__ == "__main__":
    main()
