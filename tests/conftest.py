"""How all tests run: one thread a process, and examples that are the same in every run of CI."""

import os
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
os.environ.setdefault("RAFFM_DATA", str(Path(__file__).parents[2] / "shared" / "data"))  # real sets, where there are any
torch.set_num_threads(1)
settings.register_profile(
    "raffm",
    max_examples=50,
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("raffm")
