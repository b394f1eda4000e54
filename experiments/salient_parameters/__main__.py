"""Salient parameters first (SPP): the published table, and what the ranking does to submodels, before and after training.

python -m experiments.salient_parameters --scale smoke               # a minute or two on a CPU: all of it, tiny
python -m experiments.salient_parameters --scale cpu                 # an hour and a half on two cores: few federated rounds
python -m experiments.salient_parameters                             # minutes on a GPU; what is in `results` is not run again
python -m experiments.salient_parameters --what table before         # the published table and ten sizes: an hour on one core
python -m experiments.salient_parameters --what report               # tables and plots from `results`, without a run
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments import checkpoints
from experiments.comparing import said
from experiments.options import Options, options_of, parser_of
from experiments.preparing import is_missing
from experiments.running import Content, essential, kept
from experiments.salient_parameters import report
from experiments.salient_parameters.catalogue import tuned
from experiments.submodels import Subject
from raffm.pick import space_of

HERE = Path(__file__).parent

SIZES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15)

WITH, WITHOUT = "l1_norm", "none"

BUDGET = (0.73, 0.75)
"""Parts of MiniLM's parameters that its random submodels have; half of all are embeddings, which stay whole."""

DRAWN = {"full": 100, "cpu": 100, "smoke": 4}


def main() -> None:
    """Run what is asked for and missing, then write tables and plots."""
    options = options_of(parser_of(__doc__, tuple(PARTS)).parse_args(), HERE)
    for part in (part for part in options.what if part in PARTS):
        PARTS[part](options)
    if "report" in options.what:
        report.write(options)


def table(options: Options) -> None:
    """The fine-tuned models of the published table."""
    runs = report.tuning(options)
    for name, content in tuned(options.scale, runs.folder).items():
        scores = runs.of(name, content)["evaluations"][-1]["sizes"]["1"]["test"]
        print(f"{name}: accuracy {scores['accuracy']:.4f}, F1 {scores['f1_macro']:.4f}", flush=True)


def before(options: Options) -> None:
    """The fine-tuned model, which was trained whole, cut to ten sizes with SPP and without."""
    runs = report.tuning(options)
    name, content = next(iter(tuned(options.scale, runs.folder).items()))

    def sizes() -> dict[str, Any]:
        run = runs.trained(name, content)
        return {"with": _sizes(run, WITH), "without": _sizes(run, WITHOUT)}

    kept(runs.results / "sizes-before.json", {"run": essential(content), "sizes": SIZES}, sizes)


def federated(options: Options) -> None:
    """The federated checkpoints, with SPP and without."""
    runs = checkpoints.runs_of(options)
    for model in ("vit", "sst2"):
        for name, content in _asked(options, model).items():
            print(said(name, runs.of(name, content)), flush=True)


def after(options: Options) -> None:
    """The federated ViTs cut to ten sizes, each as it was trained: by salience, or the first indices."""
    asked = _asked(options, "vit")

    def sizes() -> dict[str, Any]:
        runs = _trained(options, asked)
        return {"with": _sizes(runs["vit-spp"], WITH), "without": _sizes(runs["vit-plain"], WITHOUT)}

    kept(options.runs.results / "sizes-after.json", {**_about(asked), "sizes": SIZES}, sizes)


def random(options: Options) -> None:
    """Random submodels of MiniLM within one budget, the same shapes of the two checkpoints."""
    asked, drawn = _asked(options, "sst2"), DRAWN[options.scale]
    low, high = (0.0, 1.0) if options.scale == "smoke" else BUDGET

    def submodels() -> dict[str, Any]:
        runs = _trained(options, asked)
        salient, plain = Subject.of(runs["sst2-spp"], WITH), Subject.of(runs["sst2-plain"], WITHOUT)
        shapes = list(salient.drawn(space_of(salient.judge.plan, None), drawn, low, high))
        return {
            "with": salient.tested(shapes, "submodels with SPP"),
            "without": plain.tested(shapes, "submodels without SPP"),
        }

    if asked:
        kept(options.runs.results / "random.json", {**_about(asked), "drawn": drawn, "budget": [low, high]}, submodels)


PARTS: Mapping[str, Callable[[Options], None]] = {
    "table": table,
    "before": before,
    "federated": federated,
    "after": after,
    "random": random,
}


def _sizes(run: Path, metric: str) -> list[dict[str, Any]]:
    subject = Subject.of(run, metric)
    found = subject.tested(subject.fitted(SIZES), f"sizes, {metric}")
    return [{"size": size, **entry} for size, entry in zip(SIZES, found, strict=True)]


def _asked(options: Options, model: str) -> dict[str, dict[str, Any]]:
    """The settings of a model's federated runs; none where its texts are not there."""
    missing = model == "sst2" and is_missing("sst2")
    return {} if missing else checkpoints.contents(options.scale, checkpoints.runs_of(options).folder, model)


def _trained(options: Options, asked: Mapping[str, Content]) -> dict[str, Path]:
    """The folders of federated runs, trained now where they are not there."""
    runs = checkpoints.runs_of(options)
    return {name: runs.trained(name, content) for name, content in asked.items()}


def _about(asked: Mapping[str, Content]) -> dict[str, Any]:
    return {"runs": {name: essential(content) for name, content in asked.items()}}


if __name__ == "__main__":
    main()
