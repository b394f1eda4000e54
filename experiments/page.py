"""`docs/results.md` and all tables of experiments, made anew from committed results, so that they cannot drift."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from experiments import fiarse_table, missing, nested, post_training, salient_parameters, system_heterogeneity
from experiments.fiarse_table import report as fiarse_report
from experiments.nested import report as nested_report
from experiments.options import Options, options_at
from experiments.post_training import report as post_report
from experiments.salient_parameters import report as salient_report
from experiments.system_heterogeneity import report as system_report
from experiments.tables import filled

ROOT = Path(__file__).parent.parent

SCALES = {"full": "", "cpu": "On a CPU: "}


@dataclass(frozen=True)
class Shown:
    """An experiment on the page."""

    place: Path
    title: str
    text: Callable[[Options], str]
    others: Sequence[str] = ()

    @cached_property
    def scales(self) -> dict[str, tuple[Options, str]]:
        """The scales that have tables, with these."""
        every = {scale: options_at(self.place, scale, self.others) for scale in SCALES}
        there = {scale: each for scale, each in every.items() if scale == "full" or each.runs.results.is_dir()}
        found = {scale: (options, self.text(options)) for scale, options in there.items()}
        return {scale: (options, text) for scale, (options, text) in found.items() if text.strip()}


def _at(module: object) -> Path:
    return Path(str(module.__file__)).parent  # type: ignore[attr-defined]


EXPERIMENTS: Mapping[str, Shown] = {
    "fiarse_table": Shown(
        _at(fiarse_table), "FIARSE's table: all methods on CIFAR-10 and CIFAR-100", fiarse_report.text, fiarse_report.SHARED
    ),
    "nested": Shown(_at(nested), "Nested: submodels that are really smaller, against masks", nested_report.text),
    "salient_parameters": Shown(_at(salient_parameters), "Salient parameters first", salient_report.text),
    "post_training": Shown(_at(post_training), "After training: submodels of one checkpoint", post_report.text),
    "system_heterogeneity": Shown(_at(system_heterogeneity), "Five fleets, from Raspberry Pis to GPUs", system_report.text),
}


def tables() -> Iterator[tuple[Path, str]]:
    """Every file that holds tables, and what it should hold."""
    for shown in EXPERIMENTS.values():
        for options, text in shown.scales.values():
            yield options.out / "table.md", text
        readme = shown.place / "README.md"
        yield readme, filled(readme.read_text(encoding="utf-8"), "\n\n".join(_tables(shown)) + "\n")


def _tables(shown: Shown) -> list[str]:
    """The tables of every scale that has some."""
    return [f"{SCALES[scale]}{text.strip()}" for scale, (_, text) in shown.scales.items()]


def page() -> str:
    """All tables and plots, experiment by experiment, and what is still to come."""
    sections = (_section(name, shown) for name, shown in EXPERIMENTS.items())
    return "\n\n".join([*sections, "## Still to come", missing.table()])


def glance() -> str:
    """All methods on CIFAR-10, a row each."""
    return fiarse_report.overview(EXPERIMENTS["fiarse_table"].scales["full"][0])


def _section(name: str, shown: Shown) -> str:
    about = f"Question, command and what it means: [experiments/{name}](../experiments/{name}/README.md)."
    drawn = [path for options, _ in shown.scales.values() for path in sorted(options.out.glob("*.png"))]
    plots = [f"![{path.stem}](../{path.relative_to(ROOT).as_posix()})" for path in drawn]
    return "\n\n".join([f"## {shown.title}", about, *_tables(shown), *plots])
