"""After training: what 200 submodels of one federated checkpoint score, without further training.

python -m experiments.post_training --scale smoke               # a minute on a CPU: all of it, tiny
python -m experiments.post_training --scale cpu                 # an hour and a half on a core: short federated training
python -m experiments.post_training                             # minutes on a GPU; what is in `results` is not run again
python -m experiments.post_training --what report               # the tables and plots from `results`, without a run

`python -m experiments.post_training.search` compares a search with random submodels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments import checkpoints
from experiments.options import Options, options_of, parser_of
from experiments.post_training import report
from experiments.running import kept
from experiments.submodels import Subject
from raffm.pick import space_of
from raffm.search.judge import own_metric

HERE = Path(__file__).parent

DRAWN = {"full": 200, "cpu": 200, "smoke": 6}

TESTED = {"full": 0, "cpu": 1000, "smoke": 50}
"""Test examples; 0: all."""

PARTS = ("vit", "sst2", "half")


def main() -> None:
    """Test what is asked for and missing, then write the tables and plots."""
    options = options_of(parser_of(__doc__, PARTS).parse_args(), HERE)
    for part in (part for part in options.what if part in PARTS):
        make = report.half_of_vit_base if part == "half" else lambda part=part: submodels(options, part)
        kept(options.runs.results / f"{part}.json", make)
    if "report" in options.what:
        report.write(options)


def submodels(options: Options, name: str) -> dict[str, Any]:
    """The full model, RaFFM's smallest one, and random ones of all sizes, of the checkpoint with salient parameters first."""
    runs = checkpoints.runs_of(options)
    run = runs.trained(f"{name}-spp", checkpoints.contents(options.scale, runs.folder, name)[f"{name}-spp"])
    subject = Subject.of(run, "l1_norm", TESTED[options.scale])
    space = space_of(subject.judge.plan, None)
    assert own_metric(subject.judge.plan) == "l1_norm", "submodels are cut as they were trained"
    shapes = [{}, space.smallest(), *subject.drawn(space, DRAWN[options.scale])]
    full, smallest, *others = subject.tested(shapes, f"submodels, {name}")
    return {"test": len(subject.test), "full": full, "smallest": smallest, "submodels": others}


if __name__ == "__main__":
    main()
