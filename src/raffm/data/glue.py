"""GLUE: what each task is judged by. Its columns are found by their names.

Wang et al., "GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding", ICLR 2019. The labels of
its test sets are hidden, so the validation set is the test set, and validation examples are held out of the training set.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

METRICS: Mapping[str, tuple[str, ...]] = {
    "cola": ("matthews",),
    "sst2": ("accuracy",),
    "mrpc": ("f1", "accuracy"),
    "qqp": ("f1", "accuracy"),
    "stsb": ("pearson", "spearman"),
    "mnli": ("accuracy",),
    "qnli": ("accuracy",),
    "rte": ("accuracy",),
    "wnli": ("accuracy",),
}

CLASSES = 2
"""What F1 and Matthews' correlation are of; tasks with more are judged by accuracy."""

HUB = "nyu-mll/glue"
"""Where Hugging Face has them, each as a config."""


def task_name(source: str) -> str | None:
    """The task that a source is, by the end of its name: "cola", "glue_small/cola", "nyu-mll/glue:cola"."""
    name = Path(source.rpartition(":")[2]).name
    return name if name in METRICS else None


def source_of(name: str, data: Path) -> str:
    """Where a task's data are: in the data folder, alone or among others, or else on the hub."""
    for place in (name, *(f"{folder.name}/{name}" for folder in sorted(data.glob("glue*")) if folder.is_dir())):
        if (data / place).is_dir() or any((data / place).parent.glob(f"{name}-train.*")):
            return place
    return f"{HUB}:{name}"
