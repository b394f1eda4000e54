"""`raffm compare`: several methods, seeds and learning rates, one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from raffm.report.watch import Display


def compare(
    run: Annotated[Path | None, typer.Argument(help="A TOML file with the settings that all methods share.")] = None,
    methods: Annotated[
        str, typer.Option(help="Methods by name, separated by commas, or all; the others are compared with the first.")
    ] = "smallest-for-all,heterofl,raffm,fiarse",
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas. [default: the file's, or 0]")] = None,
    lr: Annotated[
        str | None, typer.Option(help="Learning rates, separated by commas; each method takes the best on validation data.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting, as in the file. May be repeated.")] = None,
    as_published: Annotated[
        bool, typer.Option(help="Train and test as FIARSE's code does; see the same flag of `raffm train`.")
    ] = False,
    folder: Annotated[
        Path, typer.Option(help="Where runs and the comparison go; finished runs there are not repeated.")
    ] = Path("runs/comparison"),
) -> None:
    """Compare methods on the same data, cohorts and learning rates. Stop it and start it again at any time."""
    from raffm.cli.show import quiet
    from raffm.cli.train import merged, published, told_when_stopped
    from raffm.compare import Contest
    from raffm.compare import compare as compared
    from raffm.methods import METHODS
    from raffm.report.comparison import as_markdown
    from raffm.settings import read_file, read_settings

    quiet()
    content = merged(read_file(run) if run is not None else {}, {}, set_ or [])
    content = published(content) if as_published else content
    given = content.pop("method", {})
    switches = given if isinstance(given, dict) else {}
    settings = read_settings(content)
    everything = sorted(METHODS, key=lambda name: name != "smallest-for-all")  # what the others must beat comes first
    chosen = everything if methods == "all" else [name.strip() for name in methods.split(",") if name.strip()]
    named = {name: _switched(name, switches) for name in chosen}
    contest = Contest(
        settings,
        named,
        tuple(_numbers(seeds, int)) if seeds is not None else (settings.seed,),
        tuple(_numbers(lr or "", float)),
    )
    with told_when_stopped(folder, "Start it again to go on."):
        found = compared(contest, folder, _shown)
    typer.echo(as_markdown(found))
    typer.echo(f"report  {folder / 'report.html'}")


def _switched(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A method with those of the given switches that it has; each must be one of somebody's."""
    from dataclasses import fields

    from raffm.errors import RunError
    from raffm.methods import METHODS

    known = {method: {entry.name for entry in fields(kind)} for method, kind in METHODS.items()}
    for switch in given:
        if switch != "name" and not any(switch in switches for switches in known.values()):
            raise RunError(f"no method has the switch {switch!r}.")
    return {"name": name, **{key: entry for key, entry in given.items() if key in known.get(name, ())}}


Number = TypeVar("Number", int, float)


def _numbers(text: str, kind: type[Number]) -> list[Number]:
    from raffm.errors import RunError

    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise RunError(f"{text!r} is no list of numbers, separated by commas.") from None


@contextmanager
def _shown(name: str, rounds: int) -> Iterator[Display]:
    from raffm.report.watch import Display

    typer.echo(name, err=True)
    with Display(rounds) as display:
        yield display
