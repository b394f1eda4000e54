"""`raffm export`: a trained submodel as a file that a device runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from torch import nn

    from raffm.export.bundle import Bundle
    from raffm.rounds.plan import Plan


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run that `raffm train` wrote, or a pretrained classifier.")],
    data: Annotated[
        str | None, typer.Option(help="Other data than the run's; needed where RUN is a pretrained model and no run.")
    ] = None,
    size: Annotated[str, typer.Option(help="The part of the model that the device holds, as its method serves it.")] = "1",
    submodel: Annotated[
        Path | None,
        typer.Option(help="Instead of a size: a JSON file with the sizes of a submodel's groups."),
    ] = None,
    pick: Annotated[int | None, typer.Option(help="Which finalist, where that file is the search.json of a search.")] = None,
    format: Annotated[
        str, typer.Option(help="onnx, onnx-int8, openvino, tensorrt, stock, or nested: all sizes in one.")
    ] = "onnx",
    dynamic: Annotated[bool, typer.Option(help="8 bits for weights alone; activations are quantised as they come.")] = False,
    most_lost: Annotated[float, typer.Option(help="What accuracy may lose by 8 bits.")] = 0.02,
    is_timed: Annotated[
        bool, typer.Option("--time/--no-time", help="Time one example in torch and in the file, and measure their memory.")
    ] = True,
    is_last: Annotated[bool, typer.Option("--last", help="The last model, where the run kept an average.")] = False,
    out: Annotated[Path | None, typer.Option(help="A new folder. [default: RUN/export/FORMAT-SIZE]")] = None,
) -> None:
    """Write a submodel for a device, run the file in its runtime, and compare it with torch: above tolerance it fails."""
    from raffm.cli.show import busy, quiet, rows
    from raffm.errors import ExportError
    from raffm.export.bundle import write_bundle
    from raffm.prepare import opened, tokenizer_at

    quiet()
    if format == "nested":
        given = {"--size": size != "1", "--submodel": submodel is not None, "--data": data is not None}
        if any(given.values()):
            words = ", ".join(option for option, is_given in given.items() if is_given)
            raise ExportError(f"nested holds all sizes of a run in one file: leave {words} out.")
        return _nested(run, out or run / "export" / "nested", is_last)
    plan, _ = opened(run, data, is_last=is_last)
    module, name = _chosen(plan, size, submodel, pick)
    folder = out or (run if run.is_dir() else Path()) / "export" / f"{format}-{name}"
    if folder.exists() and any(folder.iterdir()):
        raise ExportError(f"{str(folder)!r} is not empty. Give another --out.")
    more = {"most_lost": most_lost, "is_timed": is_timed, "tokenizer": tokenizer_at(run)}
    made = write_bundle(module, plan.task, plan.data.dataset, folder, format, dynamic, **more)  # type: ignore[arg-type]
    rows(*table(made))
    if made.in_torch is not None and made.in_runtime is not None:
        costs = [["torch", *made.in_torch.words], ["this file", *made.in_runtime.words]]
        rows(["one example here, in", "ms (10 % to 90 %)", "peak MB, libraries not counted"], costs)
        busy()
    if format == "tensorrt":
        typer.echo("No engine was built: run build.sh on the device that will run it.")


def _chosen(plan: Plan, size: str, submodel: Path | None, pick: int | None) -> tuple[nn.Module, str]:
    """The submodel of a file of sizes, or of a size, and what to call it."""
    from raffm.devices.fleet import fleet_of
    from raffm.errors import ExportError
    from raffm.federate import submodel_of
    from raffm.pick import read_recipe, space_of
    from raffm.search.judge import judge_of

    if submodel is None:
        tiers = fleet_of(size).tiers
        if len(tiers) > 1:
            raise ExportError(f"a file holds one size, but --size is {size!r}. For all in one: --format nested.")
        return submodel_of(plan, tiers[0].size), size.strip().replace("/", "_")
    recipe = read_recipe(submodel, pick)
    module = judge_of(plan, recipe["ranking"]).module(space_of(plan, None).to_sizes(recipe["config"]))
    return module, submodel.stem if pick is None else f"{submodel.stem}-{pick}"


def table(made: Bundle) -> tuple[list[str], list[list[str]]]:
    """What was written, and how it compares with torch."""
    metric = next(iter(made.torch))
    line = [
        str(made.folder / made.file),
        f"{made.bytes / 1e6:.2f}",
        f"{made.params:,}",
        f"{made.gap:.1e}",
        f"{made.torch[metric]:.4f}",
        f"{made.exported[metric]:.4f}",
    ]
    return ["file", "MB", "parameters", "largest difference", f"{metric} in torch", f"{metric} in the file"], [line]


def _nested(run: Path, folder: Path, is_last: bool) -> None:
    """All sizes in one folder."""
    from raffm.cli.show import rows
    from raffm.errors import ExportError
    from raffm.share import share

    if folder.exists() and any(folder.iterdir()):
        raise ExportError(f"{str(folder)!r} is not empty. Give another --out.")
    made = share(run, folder, is_last=is_last)
    metric = next(iter(made.pieces[0].metrics))
    lines = [[piece.name, f"{piece.params:,}", f"{piece.flops:,}", f"{piece.metrics[metric]:.4f}"] for piece in made.pieces]
    rows(["size", "parameters", "FLOPs", f"test {metric}"], lines)
    typer.echo(f"\nOne file, every size: raffm.share.from_pretrained({str(folder)!r}).submodel(NAME)")
