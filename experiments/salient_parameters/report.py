"""Tables and plots of the experiment, from what lies in `results` and in those of the federated checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from experiments import checkpoints
from experiments.options import SMOKE_NOTE, Options
from experiments.running import Content, Runs, found_in
from experiments.salient_parameters.catalogue import ARRANGED, CLASSES
from experiments.tables import joined, table, write_report
from raffm.report.drawing import figure_of, look_of

HERE = Path(__file__).parent

Found = Mapping[str, Content]

NOTES = {
    "smoke": SMOKE_NOTE,
    "cpu": "Federated training for 12 rounds of 8 local steps (ViT) and 8 of 10 (MiniLM); the ViT on 2,000 test images.",
    "full": "",
}

TITLES = {"original": "original", "apart": "standard pruning rank (q and k sorted apart)", "spp": "RaFFM SPP"}

PUBLISHED = {
    "cifar10": {"original": (96.70, 96.26), "apart": (48.82, 46.53), "spp": (96.78, 96.53)},
    "flowers102": {"original": (98.20, 97.85), "apart": (55.60, 54.70), "spp": (98.50, 98.10)},
}
"""Accuracy and F1 of ViT-base at 224 pixels, from the README of the published code's `salient_parameter_prioritization`."""

SIDES = {"with": "with SPP", "without": "without"}


def tuning(options: Options) -> Runs:
    """Where fine-tuned models are: a CPU is enough for the whole of it, so that no scale but the tiny one has its own."""
    return Runs(Path("runs") / "salient_parameters-full", HERE / "results") if options.scale == "cpu" else options.runs


def write(options: Options) -> None:
    """Write the tables and plots of what is there."""
    write_report(options.out, text(options), _figures(*_found(options)))


def text(options: Options) -> str:
    """All tables."""
    found, federated = _found(options)
    published = "" if options.scale == "cpu" else _published(found)  # it stands with the full ones
    return joined([NOTES[options.scale], published, _sizes(found), _rounds(federated), _random(found)])


def _found(options: Options) -> tuple[Found, Found]:
    """The results of the experiment, and those of MiniLM's federated checkpoints."""
    found = {**found_in(tuning(options).results), **found_in(options.runs.results)}
    trained = found_in(checkpoints.runs_of(options).results)
    return found, {name: run for name, run in trained.items() if name.startswith("sst2")}


def _published(found: Found) -> str:
    sources = [source for source in (*CLASSES, "digits") if f"{source}-original" in found]
    rows = []
    for name in ARRANGED:
        cells = []
        for source in sources:
            run = found.get(f"{source}-{name}")
            published = PUBLISHED.get(source, {}).get(name)
            cells.append("" if run is None else _accuracy_and_f1(run))
            cells.append("" if published is None else f"{published[0]:.2f} / {published[1]:.2f}")
        rows.append([TITLES[name], *cells])
    head = ["", *(f"{source}{whose}" for source in sources for whose in ("", ", published (ViT-base)"))]
    return table("Full-width models after fine-tuning: accuracy / F1 in percent", head, rows) if sources else ""


def _accuracy_and_f1(run: Content) -> str:
    scores = run["evaluations"][-1]["sizes"]["1"]["test"]
    return f"{100 * scores['accuracy']:.2f} / {100 * scores['f1_macro']:.2f}"


# -- submodels of ten sizes ------------------------------------------------------------------------------------------


def _stages(found: Found) -> dict[str, Content]:
    """Before and after federated training, where each is known."""
    return {stage: found[f"sizes-{stage}"] for stage in ("before", "after") if f"sizes-{stage}" in found}


def _sizes(found: Found) -> str:
    stages = _stages(found)
    if not stages:
        return ""
    columns = {f"{stage}, {title}": content[side] for stage, content in stages.items() for side, title in SIDES.items()}
    first = next(iter(columns.values()))
    rows = []
    for place, entry in enumerate(first):
        scores = [f"{100 * column[place]['accuracy']:.1f}" for column in columns.values()]
        rows.append([f"{entry['size']:g}", f"{entry['params']:,}", f"{entry['flops'] / 2e6:,.0f}", *scores])
    head = ["size", "parameters", "M multiply-adds", *(f"{title} (%)" for title in columns)]
    return table("The ViT on CIFAR-10 cut to ten sizes, before and after federated training", head, rows)


# -- MiniLM on SST-2 -------------------------------------------------------------------------------------------------


def _rounds(federated: Found) -> str:
    rows = []
    for ranking, title in (("spp", "with SPP"), ("plain", "without")):
        run = federated.get(f"sst2-{ranking}")
        if run is not None:
            last = run["evaluations"][-1]
            sizes = {name: entry["test"]["accuracy"] for name, entry in last["sizes"].items()}
            rows.append([title, *(f"{100 * each:.1f}" for each in sizes.values()), f"{100 * fmean(sizes.values()):.1f}"])
    if not rows:
        return ""
    sizes = list(next(iter(federated.values()))["evaluations"][-1]["sizes"])
    last = next(iter(federated.values()))["evaluations"][-1]["round"]
    return table(f"MiniLM on SST-2, federated: accuracy in percent by size after {last} rounds", ["", *sizes, "mean"], rows)


def _random(found: Found) -> str:
    if "random" not in found:
        return ""
    content, rows = found["random"], []
    for side, title in SIDES.items():
        scores = sorted(100 * entry["accuracy"] for entry in content[side])
        others = [scores[round(part * (len(scores) - 1))] for part in (0, 0.25, 0.75, 1)]
        published = {"with": "about 91.3", "without": "about 90.4"}[side]
        rows.append([title, f"**{median(scores):.1f}**", *(f"{each:.1f}" for each in others), published])
    count = len(content["with"])
    low, high = content["about"]["budget"]
    title = f"{count} random submodels of MiniLM on SST-2 with {100 * low:g} to {100 * high:g} % of its parameters"
    head = ["", "median", "least", "lower quartile", "upper quartile", "greatest", "published median (BERT-large)"]
    return table(title, head, rows)


# -- plots -----------------------------------------------------------------------------------------------------------


def _figures(found: Found, federated: Found) -> dict[str, Any]:
    stages = _stages(found)
    return {
        **({"by_size": _by_size(stages)} if stages else {}),
        **({"by_round": _by_round(federated)} if federated else {}),
        **({"random": _boxes(found["random"])} if "random" in found else {}),
    }


def _by_size(stages: Mapping[str, Content]) -> Any:
    """Accuracy by parameters, a panel for each stage."""
    with figure_of(3.6, 4.2 * len(stages)) as figure:
        for axes, (stage, content) in zip(figure.subplots(1, len(stages), squeeze=False)[0], stages.items(), strict=True):
            for place, (side, title) in enumerate(SIDES.items()):
                look = look_of(place)
                points = [(entry["params"] / 1e6, 100 * entry["accuracy"]) for entry in content[side]]
                axes.plot(*zip(*points, strict=True), color=look.colour, marker=look.marker, linestyle=look.line, label=title)
            axes.set_title(f"{stage} federated training")
            axes.set_xlabel("parameters (millions)")
        figure.axes[0].set_ylabel("test accuracy (%)")
        figure.axes[0].legend(fontsize=8)
    return figure


def _by_round(federated: Found) -> Any:
    """Accuracy by round of MiniLM on SST-2: the full model, and the smallest size."""
    with figure_of(3.6) as figure:
        axes = figure.subplots()
        for place, (name, run) in enumerate(federated.items()):
            sizes = list(run["evaluations"][-1]["sizes"])
            for size, line in ((sizes[0], "-"), (sizes[-1], "--")):
                points = [(entry["round"], 100 * entry["sizes"][size]["test"]["accuracy"]) for entry in run["evaluations"]]
                title = f"size {size}, {SIDES['with' if name.endswith('spp') else 'without']}"
                axes.plot(*zip(*points, strict=True), color=look_of(place).colour, linestyle=line, marker=".", label=title)
        axes.set_xlabel("round")
        axes.set_ylabel("test accuracy (%)")
        axes.legend(fontsize=8)
    return figure


def _boxes(content: Content) -> Any:
    """The accuracies of random submodels: box from quartile to quartile, whiskers to the last within 1.5 boxes."""
    with figure_of(3.6, 4.6) as figure:
        axes = figure.subplots()
        several: Sequence[Sequence[float]] = [[100 * entry["accuracy"] for entry in content[side]] for side in SIDES]
        axes.boxplot(several, tick_labels=list(SIDES.values()), widths=0.5)
        axes.set_ylabel("test accuracy (%)")
        axes.set_title(f"{len(several[0])} random submodels of one budget")
    return figure
