"""`raffm search`: the best submodel of a trained model for a device, without further training."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from raffm.search.find import Found
    from raffm.search.front import Candidate


def search(
    run: Annotated[Path, typer.Argument(help="The folder of a run that `raffm train` wrote, or a pretrained classifier.")],
    data: Annotated[
        str | None, typer.Option(help="Other data than the run's; needed where RUN is a pretrained model and no run.")
    ] = None,
    max_params: Annotated[str | None, typer.Option(help="The most parameters, as in 45M.")] = None,
    max_bytes: Annotated[str | None, typer.Option(help="The most bytes of weights, as in 20M.")] = None,
    max_flops: Annotated[str | None, typer.Option(help="The most FLOPs for one example, as in 2G.")] = None,
    max_memory: Annotated[str | None, typer.Option(help="The most bytes while it runs on one example, as in 100M.")] = None,
    max_latency_ms: Annotated[float | None, typer.Option(help="The most milliseconds for one example.")] = None,
    device: Annotated[
        str | None, typer.Option(help="A device that is not here, by name (pi4, ...): its latency is estimated.")
    ] = None,
    runtime: Annotated[str, typer.Option(help="Where latency is measured: torch, onnx or openvino.")] = "torch",
    metric: Annotated[
        str | None, typer.Option(help="Ranks the indices: l1_norm, l2_norm, taylor, fisher, none. [default: the run's]")
    ] = None,
    space: Annotated[Path | None, typer.Option(help="A JSON file with the sizes to choose from.")] = None,
    evaluations: Annotated[int, typer.Option(help="Submodels that are judged on a few validation examples.")] = 200,
    finalists: Annotated[int, typer.Option(help="Those of them that are judged on all.")] = 16,
    examples: Annotated[int, typer.Option(help="How many are a few.")] = 512,
    workers: Annotated[int | None, typer.Option(help="Submodels judged at a time. [default: one a core]")] = None,
    seed: Annotated[int, typer.Option(help="The seed of every random choice.")] = 0,
    is_last: Annotated[bool, typer.Option("--last", help="The last model, where the run kept an average.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where the search goes. [default: RUN/search]")] = None,
) -> None:
    """Find the best submodels within limits, on validation data alone. Stopped, it goes on where it was."""
    from raffm.cli.show import busy, counted, quiet, rows, ticking
    from raffm.pick import best_submodel
    from raffm.report.explorer import command_for
    from raffm.report.folder import read_results, write_results
    from raffm.search.find import Effort

    quiet()
    folder = out or (run if run.is_dir() else Path()) / "search"
    with ticking("submodels") as tick:
        picked = best_submodel(
            run,
            data=data,
            max_params=counted(max_params, "--max-params"),
            max_bytes=counted(max_bytes, "--max-bytes"),
            max_flops=counted(max_flops, "--max-flops"),
            max_memory=counted(max_memory, "--max-memory"),
            max_latency=None if max_latency_ms is None else _seconds(max_latency_ms),
            device=device,
            runtime=runtime,  # type: ignore[arg-type]
            metric=metric,
            space=space,
            effort=Effort(evaluations, finalists, workers or os.cpu_count() or 1),
            examples=examples,
            seed=seed,
            folder=folder,
            is_last=is_last,
            tick=tick,
        )
    if folder == run / "search" and (run / "results.json").is_file():
        write_results(read_results(run), run)  # the report shows the search
    found = picked.found
    typer.echo(
        f"The space holds {found.submodels:.3g} submodels. {len(found.judged)} were judged on {picked.judge.few} validation "
        f"examples, the best {len(found.finalists)} of them on {len(picked.judge.validation)}."
    )
    rows(*table(found, device))
    busy()
    typer.echo(f"\nTo look at: {folder / 'explorer.html'}. The best: {folder / 'best.json'}. As a file for the device:")
    typer.echo(f"  {command_for(run, shlex.quote(str(folder / 'best.json')), data, is_last)}")


def _seconds(milliseconds: float) -> float:
    from raffm.errors import RunError

    if not 0 < milliseconds < float("inf"):
        raise RunError(f"--max-latency-ms is {milliseconds!r}; give a number above 0.")
    return milliseconds / 1000


def table(found: Found, device: str | None) -> tuple[list[str], list[list[str]]]:
    """The front as rows of a table, the best marked."""
    kinds = [kind for kind in ("bytes", "memory") if kind in found.limits]
    heading = ["", "parameters", "FLOPs", "validation score", "ms here (10 % to 90 %)", *kinds]
    heading += [] if device is None else [f"ms on {device} (estimated)"]
    lines = []
    for each in found.front:
        costs = [f"{each.costs['params']:,.0f}", f"{each.costs['flops']:,.0f}"]
        more = [f"{each.costs[kind]:,.0f}" for kind in kinds]
        more += [] if device is None else [f"{1000 * each.costs['latency']:.2f}"]
        lines.append(["best" if each is found.best else "", *costs, f"{each.score:.4f}", _spread(each), *more])
    return heading, lines


def _spread(candidate: Candidate) -> str:
    if candidate.latency is None:
        return "-"
    median, low, high = (1000 * seconds for seconds in candidate.latency)
    return f"{median:.2f} ({low:.2f} to {high:.2f})"
