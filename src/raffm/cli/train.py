"""`raffm train`: a federated run from flags or from one TOML file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from raffm.report.tracker import TensorBoard
    from raffm.settings import Settings


OWNED = {"squad": "squad", "shakespeare": "tiny_shakespeare"}
"""Tasks whose examples have owners, articles and speakers: these are the clients unless another split is asked for."""


def train(
    run: Annotated[Path | None, typer.Argument(help="A TOML file with the settings of the run; flags win over it.")] = None,
    method: Annotated[str | None, typer.Option(help="raffm, fiarse, heterofl, ...: see docs/methods. [raffm]")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="vit-small, resnet18, family:tiny, a folder, also in $RAFFM_MODELS, or a Hugging Face name. [vit-small]"
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="digits, a set in $RAFFM_DATA, a file, a folder, or a Hugging Face name. [default: digits]"),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="A task of GLUE (cola, sst2, mrpc, ...), ag_news, squad or shakespeare.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="iid, dirichlet-balanced, dirichlet, shards, k-shot or column. [default: iid]")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="How many clients there are. [default: 30]")] = None,
    fleet: Annotated[
        str | None, typer.Option(help="quarters, fifths, a-e, full, a1-b1-e2, or sizes with shares: '1:10, 1/4:30'.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds. [default: 20]")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the clients. [default: 0.001]")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of every random choice. [default: 0]")] = None,
    backend: Annotated[
        str | None, typer.Option(help="serial, pooled (worker processes), or captured (graphs on a GPU). [serial]")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting, as in the file: --set local.epochs=3. May be repeated."),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where checkpoints, results and the report go.")] = Path("runs/latest"),
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint in the folder.")] = False,
    as_published: Annotated[
        bool,
        typer.Option(
            help="Train and test as FIARSE's code does: examples in one order; clients' tests unrelated to their training data "
            "and augmented; norms by test batches."
        ),
    ] = False,
    strict: Annotated[bool, typer.Option(help="Stop where a client's update is refused.")] = False,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard logs into the folder.")] = True,
) -> None:
    """Train one model across clients of different sizes. Ctrl-C saves the run; --resume goes on with it."""
    from raffm.cli.show import quiet
    from raffm.settings import read_file, read_settings

    quiet()
    content = read_file(run) if run is not None else {}
    given = {
        "method": method,
        "model.name": model,
        "data.source": _source(task, data),
        "data.split": "column" if split is None and task in OWNED and "split" not in content.get("data", {}) else split,
        "data.clients": clients,
        "fleet.tiers": fleet,
        "rounds": rounds,
        "local.lr": lr,
        "seed": seed,
        "backend.name": backend,
        "merging.strict": True if strict else None,
    }
    content = merged(content, {key: value for key, value in given.items() if value is not None}, set_ or [])
    run_settings(read_settings(published(content) if as_published else content), folder, resume, tensorboard)


def _source(task: str | None, data: str | None) -> str | None:
    """The data of a task, unless others are given."""
    from raffm.data.glue import METRICS
    from raffm.errors import RunError

    if task is None:
        return data
    known = {**{name: name for name in METRICS}, "ag_news": "ag_news", **OWNED}
    if task not in known:
        raise RunError(f"there is no task {task!r}. The tasks are: {', '.join(known)}.")
    if data is not None:
        raise RunError("--task says which data are meant. Leave out --data.")
    return known[task]


def published(content: dict[str, Any]) -> dict[str, Any]:
    """The settings with the habits of FIARSE's published code: not what we recommend, but what its figures come from."""
    from raffm.errors import RunError

    data = {"split": "dirichlet-balanced", **content.get("data", {})}
    if data["split"] != "dirichlet-balanced":
        raise RunError(
            "--as-published trains and tests as FIARSE's code does, with the split dirichlet-balanced, but this run has "
            f"{data['split']!r}. Leave out one of the two."
        )
    data = {"alpha": 0.3, "tests": "unrelated", **data}
    evaluate = {"norms": "test-batches", "augmented": True, **content.get("evaluate", {})}
    return {**content, "data": data, "evaluate": evaluate, "local": {"shuffle": False, **content.get("local", {})}}


def run_settings(settings: Settings, folder: Path, resume: bool, tensorboard: bool) -> None:
    """Run what settings describe, with a live display, and show what came out."""
    from raffm.prepare import plan_of, run_as
    from raffm.report.watch import Display, Together, Tracked

    plan = plan_of(settings)
    logs = _logs(folder) if tensorboard else None
    _introduce(plan, settings)
    with Display(settings.rounds) as display, told_when_stopped(folder, "Go on with the same command and --resume."):
        watcher = Together([display, *([Tracked(logs)] if logs is not None else [])])
        found = run_as(settings, plan, folder, resume, watcher)
    if logs is not None:
        logs.close()
    _conclude(found.results, folder)


def merged(content: dict[str, Any], flags: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """The settings of a file with those of the command line over them."""
    import tomllib

    from raffm.errors import RunError

    made = {key: dict(entry) if isinstance(entry, dict) else entry for key, entry in content.items()}
    for assignment in assignments:
        key, is_there, text = assignment.partition("=")
        if not is_there:
            raise RunError(f"--set takes key=value, as in --set local.epochs=3, but was given {assignment!r}.")
        try:
            flags[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            flags[key.strip()] = text.strip()  # a bare word is a text
    for key, value in flags.items():
        section, _, name = key.rpartition(".")
        if section:
            if not isinstance(made.setdefault(section, {}), dict):
                made[section] = {"name": made[section]}
            made[section][name] = value
        elif name != "method" or not _is_switched(made.get(name), value):
            made[name] = value
    return made


def _is_switched(known: Any, name: str) -> bool:
    """Whether the file has switches for this very method; those of another fall away, which is said."""
    from raffm.notices import notice

    if not isinstance(known, dict) or known.get("name") == name:
        return isinstance(known, dict)
    switches = [key for key in known if key != "name"]
    if switches:
        notice(f"the file's {', '.join(switches)} belong to {known.get('name')}, and not to {name}: they are left out.")
    return False


@contextmanager
def told_when_stopped(folder: Path, advice: str) -> Iterator[None]:
    """After Ctrl-C one sentence and exit 130."""
    from raffm.rounds.loop import Interrupted

    try:
        yield
    except Interrupted:
        typer.echo(f"stopped; the run is saved in {folder}. {advice}", err=True)
        raise SystemExit(130) from None


def _logs(folder: Path) -> TensorBoard | None:
    from importlib.util import find_spec

    from raffm.report.tracker import TensorBoard

    return TensorBoard(folder / "tensorboard") if find_spec("tensorboard") else None


def _introduce(plan: Any, settings: Settings) -> None:
    dataset = plan.data.dataset
    typer.echo(
        f"{plan.method.name}: {type(plan.server.model).__name__} on {dataset.name}, {len(dataset.train):,} examples of "
        f"{plan.data.clients:,} clients ({settings.data.split}), {plan.participation.count(plan.data.clients)} a round, "
        f"{plan.rounds} rounds, seed {plan.seed}"
    )


def _conclude(results: Any, folder: Path) -> None:
    from rich.console import Console

    from raffm.report.tables import as_rich

    console = Console()
    console.print(as_rich(results, console.width))
    typer.echo(f"report      {folder / 'report.html'}")
    typer.echo(f"submodels   {folder / 'submodels'}   (raffm.load_submodel reads each)")
