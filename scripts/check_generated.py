"""Keep the generated parts of the documentation true: fails when they are stale, `--write` renews them.

Also fails when CHANGELOG, package and pyproject name different versions.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from experiments import page
from torch import nn

import raffm
from raffm.algebra.layout import Layout
from raffm.devices.profiles import FLEETS, PROFILES
from raffm.errors import RaffmError
from raffm.methods import METHODS, method_of
from raffm.methods.method import Device
from raffm.models import table as tables
from raffm.models.label import layout_of
from raffm.models.labelled import Labelled
from raffm.models.load import tiny
from raffm.models.space import default_sizes
from raffm.models.verify import Verification, pattern_of, verify

ROOT = Path(__file__).parent.parent
MEANINGS = {
    "layers": "whole layers",
    "blocks": "whole blocks of a stage; the first stays",
    "heads": "attention heads",
    "kv": "key and value heads, each with its query heads",
    "rep": "query heads that share a key and a value",
    "qk": "dimensions of queries and keys inside a head",
    "vo": "dimensions of values inside a head",
    "rot": "rotary pairs, with their frequencies, the same in all layers",
    "cross": "how many heads every cross-attention has",
    "embedding": "the width of embeddings, where it is another",
    "ffn": "neurons of the feed-forward part",
    "residual": "the width that all layers share",
    "inner": "channels inside a block",
    "middle": "channels inside a block",
    "out": "channels of a stage",
    "stem": "channels of the first convolution",
}


@cache
def verified(family: str) -> Verification:
    """What `verify` finds on a family's tiny model."""
    return verify(tiny(family))


def families_table() -> str:
    """What can be cut in every family, as `verify` finds it on a tiny model."""
    lines = ["| family | cut exactly | approximately |", "|---|---|---|"]
    for family in tables.families():
        groups = [_kinds(family, verdict) for verdict in ("exact", "approximate")]
        lines.append(f"| {' | '.join([tables.shipped(family).title, *groups])} |")
    return "\n".join(lines)


def methods_table() -> str:
    """Which methods serve which family."""
    lines = [f"| family | {' | '.join(METHODS)} |", "|---|" + "---|" * len(METHODS)]
    for family in tables.families():
        served = [_served(tiny(family), method) for method in METHODS]
        lines.append(f"| {' | '.join([tables.shipped(family).title, *served])} |")
    return "\n".join(lines)


def _kinds(family: str, verdict: str) -> str:
    """The kinds of groups, by the last part of their names."""
    named = (row.group.rpartition(".")[2] for row in verified(family).rows if row.verdict == verdict)
    return ", ".join(f"`{name}`" for name in dict.fromkeys(named))


def _served(model: nn.Module, method: str) -> str:
    """Whether a method gives devices of two sizes something to train and to serve, also without a label mask."""
    if _is_served(model, method):
        return "yes"
    has_mask = any(switch.name == "masked_loss" for switch in fields(METHODS[method]))
    return "no mask" if has_mask and _is_served(model, method, masked_loss=False) else ""


def _is_served(model: nn.Module, method: str, **switches: object) -> bool:
    chosen = method_of(method, **switches)
    fleet = (1.0, 0.8)  # tiny models have no balanced shapes that are much smaller
    devices = [Device(place, size, place, fleet=fleet) for place, size in enumerate(fleet)]
    try:
        server = chosen.adapt(Labelled.of(model), 0, fleet)
        chosen.refuse(server, devices)
        return len(chosen.choose(server, 0, devices, 0)) == 2 and bool(chosen.serve(server, 1, devices)[0])
    except RaffmError:
        return False


def families_page() -> str:
    """A section for every family: its groups, what cutting them does, and the default space."""
    return "\n".join(line for family in tables.families() for line in _section(family)).strip()


def _section(family: str) -> list[str]:
    model, table = tiny(family), tables.shipped(family)
    layout = layout_of(model)
    cut = {pattern_of(group) for group in default_sizes(layout, table)}
    versions = f"transformers {table.transformers}" if table.transformers else "needs no transformers"
    lines = [f"## {table.title}", "", f"`{family}:tiny`, `{table.tiny['class']}` and its relatives; {versions}.", ""]
    lines += [
        "| group | what is cut | against the full model with the rest zeroed | in the default space |",
        "|---|---|---|---|",
    ]
    for row in verified(family).rows:
        meaning = MEANINGS[row.group.rpartition(".")[2]]
        tied = "follows by a count tie" if _is_follower(layout, row.group) else ""
        verdict = f"approximate: {row.note}" if row.note else row.verdict
        lines.append(f"| `{row.group}` | {meaning} | {verdict} | {'yes' if row.group in cut else tied} |")
    return [*lines, ""]


def _is_follower(layout: Layout, pattern: str) -> bool:
    return any(pattern_of(name) == pattern for name in layout.followers)


def devices_table() -> str:
    """All figures of all devices with their sources, and who has which in the published fleets."""
    lines = ["| device | figure | value | source |", "|---|---|---|---|"]
    for name, profile in PROFILES.items():
        for figure, entry in profile.figures().items():
            lines.append(f"| {profile.title} (`{name}`) | {figure} | {entry.value:.3g}{UNITS[figure]} | {entry.source} |")
    lines += ["", f"| fleet | {' | '.join(profile.title for profile in PROFILES.values())} |", "|---|" + "---|" * len(PROFILES)]
    for fleet, shares in FLEETS.items():
        lines.append(f"| `{fleet}` | {' | '.join(f'{shares[name]:g}' if name in shares else '' for name in PROFILES)} |")
    return "\n".join(lines)


UNITS = {"size": " of the model", "memory": " bytes", "peak": " FLOP/s", "bandwidth": " bytes/s", "power": " W"}


def benchmarks_table() -> str:
    """The ratios of the last `make bench`."""
    results = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"))
    lines = ["| ratio | measured | limit |", "|---|---|---|"]
    for row in results["ratios"]:
        lines.append(
            f"| {row['what']} | {row['measured']:.2f} | {'' if row['limit'] is None else format(row['limit'], '.2f')} |"
        )
    return "\n".join([*lines, "", f"{results['threads']} threads, torch {results['torch']}."])


def others_table() -> str:
    """The last `make bench-others`."""
    results = json.loads((ROOT / "benchmarks" / "others" / "results.json").read_text(encoding="utf-8"))
    lines = []
    for name, workload in results["workloads"].items():
        lines += [f"**{name}**", "", "| | seconds a round | CPU seconds |", "|---|---|---|"]
        for contender, found in workload["contenders"].items():
            lines.append(f"| {contender} | {found['median_seconds']:.3f} | {found['median_cpu_seconds']:.3f} |")
        lines += ["", "| ratio | measured | limit |", "|---|---|---|"]
        for row in workload["ratios"]:
            lines.append(f"| {row['what']} | {row['measured']:.2f} | {row['limit']} |")
        lines.append("")
    passes = f"{results['passes']} passes of {results['rounds']} rounds"
    return "\n".join([*lines, f"{passes} each, {results['cores']} cores, torch {results['torch']}."])


def gpu_table() -> str:
    """The last `make bench-gpu`."""
    results = json.loads((ROOT / "benchmarks" / "gpu.json").read_text(encoding="utf-8"))
    counted = {len(found["all"]) for found in results["rounds"].values()}
    titles = [
        "method",
        f"seconds a round (mean of {min(counted)})",
        "seconds to evaluate all sizes",
        "the same steps, started one by one",
    ]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for method, found in sorted(results["rounds"].items()):
        eager = f"{results['eager'][method]:.2f}" if method in results["eager"] else ""
        lines.append(f"| `{method}` | {found['mean']:.2f} | {found['evaluation']:.2f} | {eager} |")
    vit = results["vit"]
    taken = f"{vit['captured']['median']:.2f} s a round, {vit['eager']:.2f} s for the same steps started one by one."
    lines += ["", f"ViT-base at 224 pixels, four clients, 20 steps of batch 16: {taken}"]
    first = [row for row in results["equal"] if row["steps"] == 1]
    gaps = {name: max(row["gap"] for row in first if row["optimizer"] == name) for name in ("sgd", "adamw")}
    apart = f"{gaps['sgd']:.0e} (SGD) and {gaps['adamw']:.0e} (AdamW, which makes whole steps of rounding errors)"
    lines += ["", f"In float32 a round of one step differs from the serial backend's, over all methods, by at most {apart}."]
    for name, titles in GPU_TABLES.items():
        if name in results:
            lines += ["", *table_of(results[name], titles)]
    if "long" in results:
        found = results["long"]
        scores = ", ".join(f"{found[size]:.1%} at {size}" for size in ("1", "1/4", "1/16", "1/64"))
        taken = f"{found['rounds']} rounds, all sizes evaluated and a checkpoint written every 20: {found['seconds']:.0f} s"
        lines += ["", f"FIARSE on CIFAR-10, {taken}; test accuracy after the last round {scores}."]
    return "\n".join([*lines, "", f"{results['gpu']}, torch {results['torch']}, {results['date']}."])


GPU_TABLES = {
    "growth": {
        "registered": "registered clients",
        "asked": "clients a round",
        "median": "seconds a round (HeteroFL, ResNet-18, 40 steps)",
    },
    "scale": {"model": "model", "parameters": "parameters", "median": "seconds a round (HeteroFL, 10 clients, 40 steps)"},
    "accuracy": {
        "backend": "backend",
        "seed": "seed",
        "device": "device",
        "seconds": "seconds in all",
        **{size: f"accuracy at {size}" for size in ("1", "1/4", "1/16", "1/64")},
    },
}
"""Columns of the tables about one GPU, with what they are called."""


def table_of(rows: list[dict[str, Any]], titles: dict[str, str]) -> list[str]:
    """Rows as a table."""

    def shown(entry: Any) -> str:
        return f"{entry:.2f}" if isinstance(entry, float) else f"{entry:,}" if isinstance(entry, int) else entry

    lines = [f"| {' | '.join(titles.values())} |", "|---" * len(titles) + "|"]
    return [*lines, *(f"| {' | '.join(shown(row[name]) for name in titles)} |" for row in rows)]


def edge_table() -> str:
    """The last `make bench-edge`."""
    results = json.loads((ROOT / "benchmarks" / "edge.json").read_text(encoding="utf-8"))
    titles = ["nodes", "MB each way", "plain Flower FedAvg, s a round", "raffm, s a round", "ratio"]
    titles += ["plain: s to a node's first step", "raffm: s to a node's first step"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for case in results["cases"].values():
        plain, ours = case["plain"], case["raffm"]
        cells = [plain["seconds"], ours["seconds"], case["ratio"], plain["to_a_first_step"], ours["to_a_first_step"]]
        lines.append(f"| {case['nodes']} | {case['megabytes']} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    return "\n".join([*lines, "", f"2 cores for all processes, torch {results['torch']}, {results['date']}."])


def deploy_table() -> str:
    """The last `make bench-deploy`."""
    results = json.loads((ROOT / "benchmarks" / "deploy.json").read_text(encoding="utf-8"))
    found = results["vit-base"]
    taken, made = found["milliseconds"], found["seconds"]
    lines = [
        "| ViT-base at 224 pixels | the full one | half of it | ratio |",
        "|---|---|---|---|",
        f"| parameters | {found['params']['full']:,} | {found['params']['half']:,} | |",
        f"| ms for one image, ONNX Runtime | {taken['full']:.0f} | {taken['half']:.0f} | {found['faster']:.2f}x faster |",
        f"| largest difference from torch | {found['gap']['full']:.0e} | {found['gap']['half']:.0e} | |",
        "",
        f"The half in 8 bits takes {found['bytes']['int8'] / 1e6:.0f} MB instead of {found['bytes']['float32'] / 1e6:.0f} "
        f"({found['smaller']:.2f}x smaller); it was cut out in {made['extracted']:.2f} s, cut out and saved in "
        f"{made['extracted and saved']:.2f} s.",
        "",
        f"{results['cores']} cores, torch {results['torch']}, onnxruntime {results['onnxruntime']}, {results['date']}.",
    ]
    return "\n".join(lines)


def salience_table() -> str:
    """The table that the last run of the experiment wrote."""
    return (ROOT / "experiments" / "salience" / "table.md").read_text(encoding="utf-8").strip()


def comparison_table() -> str:
    """The table that the last `raffm compare` of all methods wrote."""
    return (ROOT / "experiments" / "methods" / "comparison.md").read_text(encoding="utf-8").strip()


def renewed(text: str, name: str, content: str) -> str:
    """The text with the part between two markers replaced."""
    begin, end = f"<!-- {name}: generated by `make docs` -->", f"<!-- {name}: end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"the marker {begin!r} is missing.")
    return pattern.sub(lambda _: f"{begin}\n{content}\n{end}", text)


def versions() -> dict[str, str]:
    """The version as three files give it."""
    changelog = re.search(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return {"CHANGELOG.md": changelog[1] if changelog else "none", "pyproject.toml": project, "raffm": raffm.__version__}


GENERATED = {
    "families": ("README.md", families_table),
    "groups": ("docs/families.md", families_page),
    "methods": ("docs/families.md", methods_table),
    "devices": ("docs/devices.md", devices_table),
    "gpu": ("docs/performance.md", gpu_table),
    "edge": ("docs/performance.md", edge_table),
    "deploy": ("docs/performance.md", deploy_table),
    "benchmarks": ("docs/performance.md", benchmarks_table),
    "others": ("docs/performance.md", others_table),
    "salience": ("docs/salience.md", salience_table),
    "comparison": ("docs/methods/README.md", comparison_table),
    "results": ("docs/results.md", page.page),
    "glance": ("README.md", page.glance),
}


def settle(path: Path, after: str) -> None:
    """Write a file with `--write`, else see that it is as it should be."""
    if "--write" in sys.argv:
        path.parent.mkdir(exist_ok=True)
        path.write_text(after, encoding="utf-8")
    elif not path.is_file() or path.read_text(encoding="utf-8") != after:
        raise SystemExit(f"{path.relative_to(ROOT)} is stale: run `make docs`.")


def main() -> None:
    """Check, or write with `--write`."""
    transformers.logging.set_verbosity_error()
    for name, (path, content) in GENERATED.items():
        settle(ROOT / path, renewed((ROOT / path).read_text(encoding="utf-8"), name, content()))
    for place, text in page.tables():
        settle(place, text)
    if len(set(versions().values())) != 1:
        raise SystemExit(f"versions differ: {versions()}")
    print("generated documentation and versions are up to date")


if __name__ == "__main__":
    main()
