"""Tables and plots of submodels after training, next to what was published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from experiments.options import SMOKE_NOTE, Options
from experiments.post_training.search import summary
from experiments.post_training.search import table as compared
from experiments.running import Content, found_in
from experiments.tables import joined, table, write_report
from raffm.algebra.selection import Selection
from raffm.devices.cost import CostModel
from raffm.elastic import RaFFM
from raffm.measure import WITH, WITHOUT
from raffm.models.files import read_json
from raffm.report.drawing import figure_of, look_of

HERE = Path(__file__).parent

TITLES = {"vit": "ViT, CIFAR-10", "sst2": "MiniLM, SST-2"}

NOTES = {
    "smoke": SMOKE_NOTE,
    "cpu": "Checkpoints of 12 rounds of 8 local steps (ViT) and 8 of 10 (MiniLM); the ViT on 1,000 test images.",
    "full": "",
}

PUBLISHED = (
    ("vit", "large budget (fm_scaling notebook)", 75.72, 85.55, 97.60),
    ("vit", "large budget (fm_scaling notebook)", 72.67, 85.55, 97.52),
    ("vit", "small budget (post_training_deployment notebook)", 69.23, 85.55, 95.99),
    ("vit", "small budget (post_training_deployment notebook)", 67.46, 85.55, 93.16),
    ("vit", 'claim "45M, 75 % FLOPs less"', 45.0, 85.55, 94.5),
    ("sst2", "small budget (notebook)", 81.36, 109.38, 81.08),
    ("sst2", "smallest (notebook)", 66.62, 109.38, 81.31),
)
"""Which model, where from, millions of parameters, those of the full model (ViT-base, BERT-base), and the accuracy."""

HALF = 45_000_000
"""Parameters of the half of ViT-base that a published claim is about."""

NEAR = 0.03
"""Submodels whose part of the parameters is this close stand beside a published one."""


def write(options: Options) -> None:
    """Write the tables and plots of what is there."""
    known = _known(options)
    write_report(options.out, text(options), {"submodels": _scatter(known)} if known else {})


def text(options: Options) -> str:
    """All tables."""
    known, half = _known(options), found_in(options.runs.results).get("half")
    bins = [_bins(name, content) for name, content in known.items()]
    earlier = [_searched(), _cut()] if options.scale == "full" else []
    return joined([NOTES[options.scale] if known else "", *bins, _published(known), _half(half), *earlier])


def _searched() -> str:
    """What `search.py` found."""
    return (
        f"### A search against as many random submodels\n\n{compared(summary(read_json(HERE / 'search.json')['rows']))}".strip()
    )


def _cut() -> str:
    """What `raffm evaluate` found at some sizes, with and without SPP."""
    content = read_json(HERE / "sizes.json")
    sizes = {name.partition(" ")[0]: None for name in content["sizes"]}
    rows = []
    for size in sizes:
        whole = content["sizes"][size]["test"]["accuracy"]
        both = [content["sizes"].get(f"{size} {view}", {"test": {"accuracy": whole}}) for view in (WITH, WITHOUT)]
        part = content["costs"][size]["params"] / content["costs"]["1"]["params"]
        rows.append([f"{part:.0%}", *(f"{100 * each['test']['accuracy']:.1f}" for each in both)])
    return table("Parts of the ViT, with and without salience, 10,000 test images", ["parameters", WITH, WITHOUT], rows)


def _known(options: Options) -> dict[str, Content]:
    found = found_in(options.runs.results)
    return {name: found[name] for name in TITLES if name in found}


def _bins(name: str, content: Content) -> str:
    """Submodels by their part of the parameters, in tenths."""
    rows = [["full", "1", *_row([content["full"]])]]
    for tenth in range(9, -1, -1):
        inside = [entry for entry in content["submodels"] if min(9, int(10 * entry["fraction"])) == tenth]
        if inside:
            rows.append([f"{10 * tenth} to {10 * tenth + 10} %", str(len(inside)), *_row(inside)])
    rows.append([f"smallest ({content['smallest']['fraction']:.0%})", "1", *_row([content["smallest"]])])
    head = ["parameters", "submodels", "M multiply-adds (mean)", "least accuracy (%)", "median", "best"]
    title = f"{TITLES[name]}: {len(content['submodels'])} random submodels, {content['test']:,} test examples"
    return table(title, head, rows)


def _row(entries: Sequence[Content]) -> list[str]:
    scores = [100 * entry["accuracy"] for entry in entries]
    work = fmean(entry["flops"] for entry in entries) / 2e6
    return [f"{work:,.0f}", f"{min(scores):.1f}", f"{median(scores):.1f}", f"{max(scores):.1f}"]


def _published(known: Mapping[str, Content]) -> str:
    rows = []
    for name, source, params, whole, accuracy in PUBLISHED:
        if name in known:
            part = params / whole
            near = [100 * entry["accuracy"] for entry in known[name]["submodels"] if abs(entry["fraction"] - part) <= NEAR]
            ours = f"{median(near):.1f} ({min(near):.1f} to {max(near):.1f}, {len(near)} submodels)" if near else "none so near"
            full = f"{100 * known[name]['full']['accuracy']:.1f}"
            rows.append([TITLES[name].partition(",")[0], source, f"{params:g} M ({part:.0%})", f"{accuracy:.2f}", ours, full])
    head = ["", "published", "parameters", "published accuracy", "ours at that part: median (range)", "ours, full"]
    return table("The published figures (ViT-base, BERT-base) next to ours", head, rows) if rows else ""


# -- the FLOPs of a half -----------------------------------------------------------------------------------------------


def half_of_vit_base() -> dict[str, Any]:
    """What a ViT-base of 45 million parameters computes, by the published claim's budget."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)  # which widths keep most depends on the weights, a little
    elastic = RaFFM(ViTForImageClassification(ViTConfig(num_labels=10)))
    cost = CostModel(elastic.model, elastic.layout, elastic.table)
    _, params, config = elastic.fit(max_params=HALF)
    sizes = elastic.layout.sizes
    return {
        "params": {"full": elastic.layout.count(Selection()), "half": params},
        "flops": {"full": cost.flops(sizes), "half": cost.flops({**sizes, **config})},
    }


def _half(half: Content | None) -> str:
    if half is None:
        return ""
    params, flops = half["params"], half["flops"]
    row = [
        f"{params['half']:,} of {params['full']:,}",
        f"{flops['half'] / 2e9:.2f} of {flops['full'] / 2e9:.2f}",
        f"{1 - flops['half'] / flops['full']:.0%}",
    ]
    head = ["parameters", "G multiply-adds for an image", "fewer"]
    return table("ViT-base at 45 million parameters: half of the parameters is half of the work, not a quarter", head, [row])


# -- plot ----------------------------------------------------------------------------------------------------------------


def _scatter(known: Mapping[str, Content]) -> Any:
    """Accuracy against parameters, a panel for each model."""
    with figure_of(3.8, 4.4 * len(known)) as figure:
        for axes, (name, content) in zip(figure.subplots(1, len(known), squeeze=False)[0], known.items(), strict=True):
            points = [(entry["params"] / 1e6, 100 * entry["accuracy"]) for entry in content["submodels"]]
            axes.scatter(*zip(*points, strict=True), s=12, color=look_of(0).colour, label="random submodels")
            for place, (key, title) in enumerate({"full": "full model", "smallest": "smallest"}.items(), 1):
                entry, look = content[key], look_of(place)
                axes.scatter(entry["params"] / 1e6, 100 * entry["accuracy"], s=45, color=look.colour, marker="D", label=title)
            axes.set_title(TITLES[name])
            axes.set_xlabel("parameters (millions)")
        figure.axes[0].set_ylabel("test accuracy (%)")
        figure.axes[0].legend(fontsize=8)
    return figure
