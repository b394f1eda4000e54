"""Flower's ServerApp: its FedAvg, without evaluation; the clock is read where a central evaluation would stand."""

from __future__ import annotations

import os
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from benchmarks.others.clock import Clock
from benchmarks.others.workload import CLIENTS, COHORT, loss_of, model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds and leave what was measured in a file."""
    clock, module = Clock(), model()

    def look(round: int, arrays: ArrayRecord) -> None:
        if round:
            clock.tick()

    strategy = FedAvg(COHORT / CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
    rounds = int(os.environ["RAFFM_BENCH_ROUNDS"])
    result = strategy.start(grid, ArrayRecord(module.state_dict()), num_rounds=rounds, evaluate_fn=look)
    module.load_state_dict(result.arrays.to_torch_state_dict())
    out = Path(os.environ["RAFFM_BENCH_OUT"])
    with out.with_suffix(".part").open("w") as stream:
        clock.report(loss_of(module, int(os.environ["RAFFM_BENCH_SAMPLES"])), stream)
    out.with_suffix(".part").rename(out)
