"""Cut two pretrained models to half, by each metric and by random rankings; no further training.

python -m experiments.salience              # about three minutes on two cores
python -m experiments.salience --test 200   # a quick look
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from statistics import mean

import torch
from rich.progress import track

from experiments.preparing import query_and_key_apart, random_ranking
from experiments.salience.models import Subject, minilm, vit
from raffm.algebra.ranking import Ranking
from raffm.elastic import RaFFM

HERE = Path(__file__).parent
METRICS = ("l1_norm", "l2_norm", "taylor", "fisher")
RANDOM = 5


def main() -> None:
    """Measure, print a table, write `results.json` and the README's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--test", type=int, default=1000, help="test examples of each model (default 1000)")
    parser.add_argument("--out", type=Path, default=HERE, help="where results.json and table.md go")
    options = parser.parse_args()
    rows = [row for make in (vit, minilm) for row in measured(make(options.test))]
    about = {"date": date.today().isoformat(), "torch": torch.__version__, "machine": platform.machine(), "test": options.test}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    text = table(rows)
    (options.out / "table.md").write_text(text, encoding="utf-8")
    print(text)


def measured(subject: Subject) -> Iterator[dict[str, object]]:
    """The accuracy of the full model and of every way to cut it to half."""
    elastic = RaFFM(subject.model)
    half = {group: sizes[0] // 2 for group, sizes in elastic.space.sizes.items() if group.endswith((".ffn", ".qk"))}
    runs = ["full", "published baseline", "prefix", *METRICS, *(f"random {place}" for place in range(RANDOM))]
    for run in track(runs, subject.name):
        model = _cut(subject, elastic, run, half)
        yield {
            "model": subject.name,
            "task": subject.task,
            "run": run,
            "params": sum(parameter.numel() for parameter in model.parameters()),
            "accuracy": subject.accuracy(model),
        }


def _cut(subject: Subject, elastic: RaFFM, run: str, half: dict[str, int]) -> torch.nn.Module:
    if run == "full":
        return subject.model
    if run == "published baseline":
        return query_and_key_apart(elastic)
    if run == "prefix":
        elastic.ranking = Ranking()
    elif run in METRICS:
        elastic.salient_parameter_prioritization(run, batches=subject.train[:8], loss=subject.loss)
    else:
        elastic.ranking = random_ranking(elastic, run)
    return elastic.resource_aware_model(half)[0].eval()


def table(rows: list[dict[str, object]]) -> str:
    """A Markdown table: one line a model, one column a way to cut; random rankings as mean and range."""
    lines = [
        "| model | full | prefix | l1 | l2 | Taylor | Fisher | random (mean of 5, range) | q and k sorted apart, full width |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for model in dict.fromkeys(str(row["model"]) for row in rows):
        found = {str(row["run"]): float(str(row["accuracy"])) * 100 for row in rows if row["model"] == model}
        chance = [found[f"random {place}"] for place in range(RANDOM)]
        task = next(row["task"] for row in rows if row["model"] == model)
        cells = [f"{found[run]:.1f}" for run in ("full", "prefix", *METRICS)]
        spread = f"{mean(chance):.1f} ({min(chance):.1f} to {max(chance):.1f})"
        lines.append(f"| {model}, {task} | {' | '.join(cells)} | {spread} | {found['published baseline']:.1f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
