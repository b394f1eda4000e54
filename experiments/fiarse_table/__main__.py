"""FIARSE's table: all methods on CIFAR-10 and CIFAR-100 with ResNet-18, honestly and as published.

python -m experiments.fiarse_table --scale smoke                              # minutes on a CPU: all of it, tiny
python -m experiments.fiarse_table                                            # hours on a GPU; `results` is not run again
python -m experiments.fiarse_table --what final unseen --methods fedrolex     # a part of it; stopped runs go on
python -m experiments.fiarse_table --what report                              # tables and plots from `results`, without a run
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.comparing import said
from experiments.fiarse_table import report
from experiments.fiarse_table.catalogue import UNSEEN, Catalogue
from experiments.options import Options, options_of, parser_of
from experiments.running import Runs, kept
from experiments.setting import METHODS, finals, rate_of
from raffm.errors import RaffmError
from raffm.measure import measured
from raffm.prepare import reopened

HERE = Path(__file__).parent

PARTS = ("rates", "final", "long", "cifar100", "habits", "published", "unseen")


def main() -> None:
    """Run what is asked for and missing, then write tables and plots."""
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--methods", nargs="+", default=tuple(METHODS), choices=tuple(METHODS), help="whose runs")
    given = parser.parse_args()
    options = options_of(given, HERE, report.SHARED)
    asked = [part for part in (("final",) if options.scale == "cpu" else PARTS) if part in options.what]
    rates = {method: rate_of(options.runs, options.scale, method) for method in given.methods} if asked else {}
    catalogue = Catalogue(options.scale, rates)
    for part in (part for part in asked if part not in ("rates", "unseen")):
        for name, content in getattr(catalogue, part)().items():
            print(said(name, options.runs.of(name, content)), flush=True)
    for method in rates if "unseen" in asked else ():
        unseen(options, method, rates[method])
    if "report" in options.what:
        report.write(options)


def unseen(options: Options, method: str, rate: float) -> None:
    """A method's first final model at sizes that it was trained for and others; its weights must be there, or are trained."""
    name, content = next(iter(finals(options.scale, method, rate).items()))
    trained_there = Runs(Path("runs") / f"nested-{options.scale}", options.runs.results)
    runs = trained_there if (trained_there.folder / name / "results.json").is_file() else options.runs
    sizes = UNSEEN[:3] if options.scale == "smoke" else UNSEEN

    def tested() -> dict[str, Any]:
        folder = runs.trained(name, content)
        found: dict[str, Any] = {"sizes": {}, "costs": {}, "refused": {}}
        for size in sizes:
            try:
                plan, saved = reopened(folder, (size,), is_last=True)
                one = measured(plan, saved.round, is_timed=False).to_json()
            except RaffmError as error:
                found["refused"][f"{size:g}"] = str(error)
                continue
            found["sizes"] |= one["sizes"]
            found["costs"] |= one["costs"]
        return found

    kept(options.runs.results / f"unseen-{method}.json", tested)


if __name__ == "__main__":
    main()
