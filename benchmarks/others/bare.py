"""The floor with workers: forked processes make the plain loop's steps; weights and sums lie in shared memory."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.others.clock import Clock, options
from benchmarks.others.workload import COHORT, cohort, examples, loss_of, model, own, train


def main() -> None:
    told, clock = options(), Clock()
    examples(told.samples)
    module = model()
    server = parameters_to_vector(module.parameters()).detach().share_memory_()
    sums = torch.zeros(told.workers, len(server)).share_memory_()
    context = multiprocessing.get_context("fork")
    pipes = []
    for total in sums:
        near, far = context.Pipe()
        context.Process(target=serve, args=(module, server, total, far, told.samples), daemon=True).start()
        pipes.append(near)
    for round in range(told.rounds):
        clients = cohort(round)
        for place, pipe in enumerate(pipes):
            pipe.send(clients[place :: told.workers])
        for pipe in pipes:
            pipe.recv()
        torch.div(sums.sum(0), COHORT, out=server)
        clock.tick()
    vector_to_parameters(server, module.parameters())
    clock.report(loss_of(module, told.samples))


def serve(module: nn.Module, server: Tensor, total: Tensor, pipe: Connection, samples: int) -> None:
    """Train the clients that come through the pipe, and leave the sum of their weights."""
    torch.set_num_threads(1)
    shapes = [parameter.shape for parameter in module.parameters()]
    lengths = [shape.numel() for shape in shapes]
    sent = [part.view(shape) for part, shape in zip(server.split(lengths), shapes, strict=True)]
    sums = [part.view(shape) for part, shape in zip(total.split(lengths), shapes, strict=True)]
    parameters = list(module.parameters())
    while True:
        clients = pipe.recv()
        total.zero_()
        for client in clients:
            with torch.no_grad():
                for parameter, start in zip(parameters, sent, strict=True):
                    parameter.copy_(start)
            train(module, *own(samples, client))
            with torch.no_grad():
                for part, parameter in zip(sums, parameters, strict=True):
                    part.add_(parameter)
        pipe.send(None)


if __name__ == "__main__":
    main()
