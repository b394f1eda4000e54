"""Federate all-MiniLM-L6-v2 by adapters of rank 8, 4 and 2 on SST-2 and AG News, joined in three ways.

python -m experiments.adapters                                      # two hours on two cores
python -m experiments.adapters --tasks sst2 --methods flexlora      # a few minutes
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from experiments.preparing import minilm
from raffm.federate import Trained
from raffm.prepare import plan_of, run_as
from raffm.settings import read_file, read_settings

HERE = Path(__file__).parent
TASKS = ("sst2", "ag_news")
METHODS = ("lora", "flexlora", "raflora")


def main() -> None:
    """Run, print a table, write `results.json` and the README's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--rounds", type=int, help="fewer or more rounds than the files say")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/adapters"), help="where the runs go; those that are there go on"
    )
    parser.add_argument("--out", type=Path, default=HERE, help="where results.json and table.md go")
    parser.add_argument("--backend", default="pooled", help="where clients train: pooled, or captured on a GPU")
    options = parser.parse_args()
    pairs = [(task, method) for task in options.tasks for method in options.methods]
    changes = {"backend": {"name": options.backend}, **({} if options.rounds is None else {"rounds": options.rounds})}
    rows = [row_of(*pair, changes, options.runs / "-".join(pair)) for pair in track(pairs, "runs")]
    about = {"date": date.today().isoformat(), "torch": torch.__version__, "machine": machine(), "seed": 0}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    (options.out / "table.md").write_text(table(rows), encoding="utf-8")
    print(table(rows))


def row_of(task: str, method: str, changes: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What a run came to: accuracy of every rank on the test set, and what travelled."""
    results = trained(task, method, folder, changes).results
    last = results.evaluations[-1]
    return {
        "task": task,
        "method": method,
        "rounds": last.round,
        "accuracy": {name: scores.test["accuracy"] for name, scores in last.sizes.items()},
        "bytes_down": {size.name: size.bytes_down for size in results.sizes},
    }


def trained(task: str, method: str, folder: Path, changes: Mapping[str, Any]) -> Trained:
    """A run of one of the files beside this one, with some settings changed."""
    settings = read_settings({**read_file(HERE / f"{task}.toml"), "method": method, "model": {"name": minilm()}, **changes})
    return run_as(settings, plan_of(settings), folder, resume=(folder / "checkpoint").is_dir(), watcher=None)


def machine() -> str:
    """What it ran on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def table(rows: list[dict[str, Any]]) -> str:
    """Accuracies by task, method and size, with the KB that a client is sent in a round."""
    sizes = list(rows[0]["accuracy"])
    lines = [
        f"| | method | {' | '.join(f'size {size}' for size in sizes)} | KB down a round |",
        "|---" * (len(sizes) + 3) + "|",
    ]
    for row in rows:
        accuracy = " | ".join(f"{100 * row['accuracy'][size]:.1f}" for size in sizes)
        sent = " / ".join(f"{row['bytes_down'][size] / 1000:.0f}" for size in sizes)
        lines.append(f"| {row['task']} | {row['method']} | {accuracy} | {sent} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
