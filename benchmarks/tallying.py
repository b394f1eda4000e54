"""(b) Tallying ten half-size ViT-base submodels: against torch.sum over the same tensors, and its peak memory.

The floor: a sum reads every update once. A tally of changes reads the update twice (once to refuse NaN and infinity before
anything is added), what was sent and the running sum, and writes the sum: five streams of memory instead of one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.timing import Times, interleaved, ratio
from benchmarks.vit_base import half, vit_base
from raffm.algebra.layout import Layout
from raffm.algebra.move import Tensors, extract
from raffm.algebra.selection import Selection
from raffm.algebra.tally import Tally
from raffm.models.label import layout_of, named_tensors

CLIENTS = 10


def measure(repeats: int) -> tuple[dict[str, Times], list[tuple[str, float, float]]]:
    """Times, and (claim, ratio, limit) rows."""
    model = vit_base()
    layout = layout_of(model)
    tensors, _ = named_tensors(model)
    selections = [half(layout, seed) for seed in range(CLIENTS)]
    alike = [_update(tensors, layout, selections[0]) for _ in range(CLIENTS)]
    apart = [_update(tensors, layout, selection) for selection in selections]
    sent = extract(tensors, layout, selections[0])
    together = {name: torch.stack([update[name] for update in alike]) for name in sent}
    room = {name: torch.empty_like(tensor) for name, tensor in together.items()}
    one, many = Tally(layout, tensors), Tally(layout, tensors)
    times = interleaved(
        {
            "torch.sum, tensors stacked beforehand": lambda: [tensor.sum(0) for tensor in together.values()],
            "torch.sum over torch.stack, reused memory": lambda: [
                torch.sum(torch.stack([update[name] for update in alike], out=room[name]), 0) for name in sent
            ],
            "torch.sum over torch.stack": lambda: [torch.stack([update[name] for update in alike]).sum(0) for name in sent],
            "tally, one Selection": lambda: _tallied(one, alike, [selections[0]] * CLIENTS, sent),
            "tally, ten Selections": lambda: _tallied(many, apart, selections, None),
        },
        repeats,
        "tally",
    )
    baseline = "torch.sum over torch.stack"
    return times, [
        ("tally, one Selection / torch.sum over torch.stack", ratio(times, "tally, one Selection", baseline), 3.0),
        ("tally, ten Selections / torch.sum over torch.stack", ratio(times, "tally, ten Selections", baseline), 8.0),
        (
            "tally, one Selection / the same with reused memory",
            ratio(times, "tally, one Selection", "torch.sum over torch.stack, reused memory"),
            3.0,
        ),
        (
            "tally, ten Selections / the same with reused memory",
            ratio(times, "tally, ten Selections", "torch.sum over torch.stack, reused memory"),
            8.0,
        ),
        (
            "tally, one Selection / torch.sum, stacked beforehand (no limit: below the floor of 5)",
            ratio(times, "tally, one Selection", "torch.sum, tensors stacked beforehand"),
            float("inf"),
        ),
    ]


def _update(tensors: Tensors, layout: Layout, selection: Selection) -> dict[str, Tensor]:
    return {name: tensor.add_(0.01) for name, tensor in extract(tensors, layout, selection).items()}


def _tallied(tally: Tally, updates: list[dict[str, Tensor]], selections: list[Selection], sent: Tensors | None) -> object:
    for update, selection in zip(updates, selections, strict=True):
        tally.add(update, selection, 1.0, sent)
    return tally.changes()


def memory() -> list[tuple[str, float, float]]:
    """Peak memory of a tally of 10 and of 100 clients that all differ, in models (beside the server's own)."""
    peaks = {clients: _peak(clients) for clients in (10, 100)}
    return [
        ("peak memory of 10 clients, in models (limit: two and the largest update)", peaks[10], 2.5),
        ("peak memory of 100 clients, in models", peaks[100], 2.5),
        ("peak memory of 100 clients / of 10", peaks[100] / peaks[10], 1.05),
    ]


def _peak(clients: int) -> float:
    script = f"from benchmarks.tallying import grow; grow({clients})"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return float(json.loads(ran.stdout)["models"])


def grow(clients: int) -> None:
    """Tally in this process and print how far its peak memory grew."""
    model = vit_base()
    layout = layout_of(model)
    tensors, _ = named_tensors(model)
    size = sum(tensor.nbytes for tensor in tensors.values())
    before = _status("VmRSS")
    tally = Tally(layout, tensors)
    for client in range(clients):
        selection = half(layout, client)
        tally.add(_update(tensors, layout, selection), selection)
    tally.step()
    print(json.dumps({"models": (_status("VmHWM") - before) / size}))


def _status(entry: str) -> int:
    """Bytes, as the kernel counts them for this process (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(entry))
