"""`raffm edge init`: a ready Flower app folder; `raffm probe`: what this machine can do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Train across machines, over Flower.", no_args_is_help=True)

TRIAL: dict[str, Any] = {
    "method": "raffm",
    "rounds": 5,
    "model": {"name": "vit-small"},
    "data": {"source": "digits", "split": "dirichlet-balanced", "alpha": 1.0},
    "local": {"optimizer": "adamw", "lr": 0.002, "batch": 16, "steps": 60},
    "evaluate": {"every": 1},
}
"""A run that is over in minutes."""


@app.callback()
def edge() -> None:
    """Train across machines, over Flower."""


@app.command("init")
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder for the app.")],
    run: Annotated[
        Path | None, typer.Option(help="A TOML file with the settings of a run; by default digits and a small ViT.")
    ] = None,
    nodes: Annotated[int, typer.Option(help="How many nodes the trial on this machine has.", min=1)] = 3,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="The part of the model that each node holds, in turn; 'auto' lets nodes measure themselves. [default: those "
            "of the run's fleet, else 1, 1/4, 1/16]"
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="The name or address under which nodes reach this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The server's port; nodes take the next ones.", min=1024, max=65000)] = 8443,
) -> None:
    """Write a Flower app that trains a run across nodes, with certificates and keys for a trial on this machine."""
    from raffm.cli.show import quiet
    from raffm.deploy.folder import write_app
    from raffm.prepare import dataset_of, fleet_from, method_from
    from raffm.settings import read_file, read_settings

    quiet()
    content = dict(TRIAL if run is None else read_file(run))
    settings = read_settings(content)
    own = {"clients": nodes, "classes": list(dataset_of(settings, settings.data.source).classes)}
    content["data"] = {**content.get("data", {}), **own}
    content["participation"] = {"clients": 0, **content.get("participation", {})}
    if sizes is None and "fleet" in content:
        sizes = ", ".join(_exactly(tier.size) for tier in fleet_from(settings.fleet).tiers)
    sizes = sizes or "1, 1/4, 1/16"
    if sizes != "auto":
        content.setdefault("fleet", {"tiers": sizes})
    agreed = read_settings(content)
    method_from(agreed.method)
    fleet_from(agreed.fleet)
    agreed.participation.count(nodes)
    configs = [_config(number, nodes, sizes) for number in range(nodes)]
    write_app(folder, content, configs, port, host)
    typer.echo(f"{folder} is ready: its README.md says how to start {nodes} nodes on this machine.")


def checked_part(text: str) -> str:
    """A part of the model, as it was written."""
    from raffm.deploy.statement import part

    part(text)
    return text


def _exactly(size: float) -> str:
    """A size as a person would write it, or with all its digits: a node must hold the very size that the fleet has."""
    from fractions import Fraction

    from raffm.devices.fleet import size_name

    name = size_name(size)
    return name if float(Fraction(name)) == size else repr(size)


def _config(number: int, nodes: int, sizes: str) -> str:
    """What a node of the trial has, its part of the run's data, and what it can hold."""
    parts = [size.strip() for size in sizes.split(",")]
    holds = "auto=true" if sizes == "auto" else f"size='{checked_part(parts[number % len(parts)])}'"
    return f"partition-id={number} num-partitions={nodes} {holds}"


def probe(
    seconds: Annotated[float, typer.Option(help="How long training steps are timed.")] = 2.0,
    out: Annotated[Path | None, typer.Option(help="A JSON file to write the figures to.")] = None,
) -> None:
    """Measure this machine: free memory, and FLOP/s in training. Nodes with auto=true in their config do the same."""
    from dataclasses import asdict

    from raffm.cli.show import rows
    from raffm.devices.machine import measure
    from raffm.models.files import write_json

    found = measure(seconds)
    rows(
        ["machine", "free memory", "training speed", "threads"],
        [[found.name, f"{found.memory / 1e9:.1f} GB", f"{found.speed / 1e9:.1f} GFLOP/s", str(found.threads)]],
    )
    if out is not None:
        write_json(out, asdict(found))
        typer.echo(f"written to {out}")
