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
from experiments.preparing import is_missing
from experiments.running import essential, kept
from experiments.submodels import Subject
from raffm.pick import space_of

HERE = Path(__file__).parent

DRAWN = {"full": 200, "cpu": 200, "smoke": 6}

TESTED = {"full": 0, "cpu": 1000, "smoke": 50}
"""Test examples; 0: all."""

PARTS = ("vit", "sst2", "half")


def main() -> None:
    """Test what is asked for and missing, then write the tables and plots."""
    options = options_of(parser_of(__doc__, PARTS).parse_args(), HERE)
    for name in (part for part in options.what if part in ("vit", "sst2")):
        submodels(options, name)
    if "half" in options.what:
        kept(options.runs.results / "half.json", {"params": report.HALF}, report.half_of_vit_base)
    if "report" in options.what:
        report.write(options)


def submodels(options: Options, name: str) -> None:
    """The full model, RaFFM's smallest one, and random ones of all sizes, of the checkpoint with salient parameters first."""
    if name == "sst2" and is_missing("sst2"):
        return
    runs = checkpoints.runs_of(options)
    content = checkpoints.contents(options.scale, runs.folder, name)[f"{name}-spp"]
    drawn, most = DRAWN[options.scale], TESTED[options.scale]

    def tested() -> dict[str, Any]:
        subject = Subject.of(runs.trained(f"{name}-spp", content), "l1_norm", most)
        space = space_of(subject.judge.plan, None)
        shapes = [{}, space.smallest(), *subject.drawn(space, drawn)]
        full, smallest, *others = subject.tested(shapes, f"submodels, {name}")
        return {"test": len(subject.test), "full": full, "smallest": smallest, "submodels": others}

    kept(options.runs.results / f"{name}.json", {"run": essential(content), "drawn": drawn, "most": most}, tested)


if __name__ == "__main__":
    main()
