"""FIARSE's table: all methods on CIFAR-10 and CIFAR-100 with ResNet-18, honestly and as published.

python -m experiments.fiarse_table --scale smoke                              # minutes on a CPU: all of it, tiny
python -m experiments.fiarse_table                                            # hours on a GPU; `results` is not run again
python -m experiments.fiarse_table --what final unseen --methods fedrolex     # a part of it; stopped runs go on
python -m experiments.fiarse_table --what report                              # tables and plots from `results`, without a run
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.comparing import said
from experiments.fiarse_table import report
from experiments.fiarse_table.catalogue import FURTHER, UNSEEN, Catalogue
from experiments.options import Options, options_of, parser_of
from experiments.running import Content, essential, kept
from experiments.setting import METHODS, PUBLISHED_RATE, rate_of
from raffm.errors import RaffmError
from raffm.measure import measured
from raffm.prepare import reopened
from raffm.report.folder import RESULTS

HERE = Path(__file__).parent

TRAINED: Mapping[str, Callable[[Catalogue], dict[str, Content]]] = {
    "final": Catalogue.final,
    "long": Catalogue.long,
    "cifar100": Catalogue.cifar100,
    "habits": Catalogue.habits,
    "published": Catalogue.published,
}
"""Parts that are runs."""

PARTS = ("rates", *TRAINED, "unseen")


def main() -> None:
    """Run what is asked for and missing, then write tables and plots."""
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--methods", nargs="+", default=tuple(METHODS), choices=tuple(METHODS), help="whose runs")
    given = parser.parse_args()
    options = options_of(given, HERE, report.SHARED)
    asked = [part for part in (("final",) if options.scale == "cpu" else PARTS) if part in options.what]
    is_tuned = bool(set(asked) - {"habits", "published"})  # these have the published rate
    rates = {method: rate_of(options.runs, options.scale, method) if is_tuned else PUBLISHED_RATE for method in given.methods}
    catalogue = Catalogue(options.scale, rates)
    for part in (part for part in asked if part in TRAINED):
        for name, content in TRAINED[part](catalogue).items():
            print(said(name, options.runs.of(name, content)), flush=True)
    for method in FURTHER if "unseen" in asked else ():
        if method in rates:
            unseen(options, method, rates[method])
    if "report" in options.what:
        report.write(options)


def unseen(options: Options, method: str, rate: float) -> None:
    """A method's longest run at sizes that it was trained for and others; its weights must be there, or are trained."""
    catalogue = Catalogue(options.scale, {method: rate})
    name, content = next(iter((catalogue.long() | catalogue.final()).items()))
    sizes = UNSEEN[:3] if options.scale == "smoke" else UNSEEN
    path = options.runs.results / f"unseen-{method}.json"
    kept(path, {"run": essential(content), "sizes": sizes}, lambda: _at_sizes(_weights(options, name, content), sizes))


def _weights(options: Options, name: str, content: Content) -> Path:
    """The folder of a finished run, also of one that another experiment left here."""
    left = [Path("runs") / f"{other}-{options.scale}" / name for other in report.SHARED if options.scale == "full"]
    there = [place for place in left if (place / RESULTS).is_file()]
    runs = replace(options.runs, folder=there[0].parent) if there else options.runs
    return runs.trained(name, content)


def _at_sizes(folder: Path, sizes: Sequence[float]) -> dict[str, Any]:
    """All sizes at once, or, where one is refused, one by one."""
    try:
        plan, saved = reopened(folder, tuple(sizes), is_last=True)
        found = measured(plan, saved.round, is_timed=False).to_json()
        return {"sizes": found["sizes"], "costs": found["costs"], "refused": {}}
    except RaffmError as error:
        if len(sizes) == 1:
            return {"sizes": {}, "costs": {}, "refused": {f"{sizes[0]:g}": str(error)}}
    each = [_at_sizes(folder, (size,)) for size in sizes]
    return {key: {name: entry for found in each for name, entry in found[key].items()} for key in each[0]}


if __name__ == "__main__":
    main()
