"""A made-up run whose numbers look like a real one's, and the odd runs that a report must survive."""

from __future__ import annotations

from dataclasses import replace
from math import exp, sin

from raffm.rounds.results import Evaluation, Results, Round, Scores, Size

FULL = 85_800_000
HOSTILE = "<script>alert('x')</script>"

PLAIN = (("1", 1.0, ""), ("1/4", 0.25, ""), ("1/16", 0.0625, ""))
VIEWED = (
    ("1", 1.0, "prefix"),
    ("1/4", 0.25, "prefix"),
    ("1/4 windows", 0.25, "windows"),
    ("1/16", 0.0625, "prefix"),
    ("1/16 windows", 0.0625, "windows"),
)
Kinds = tuple[tuple[str, float, str], ...]


def results(kinds: Kinds = PLAIN, evaluations: int = 12, metric: str = "accuracy", clients: int = 40) -> Results:
    """A run with an evaluation every fifth round."""
    sizes = tuple(_size(*kind) for kind in kinds)
    return Results(
        run={
            "method": "raffm",
            "seed": 7,
            "rounds": 5 * evaluations,
            "fleet": {"1": 0.2, "1/4": 0.3, "1/16": 0.5},
            "data": {"name": "cifar100", "alpha": 0.1},
            "lr": 0.05,
            "files": ["a.toml", "b.toml"],
        },
        method="raffm",
        model={"class": "ViTForImageClassification", "family": "vit", "params": FULL, "layout": "vit.toml"},
        data={"name": "cifar100", "classes": 100, "clients": clients, "train": 45_000, "test": 10_000, "validation": 5_000},
        metric=metric,
        sizes=sizes,
        rounds=tuple(_round(number, clients) for number in range(1, 5 * evaluations + 1)),
        evaluations=tuple(
            Evaluation(5 * step, {size.name: _scores(size, step, metric) for size in sizes})
            for step in range(1, evaluations + 1)
        ),
        client_scores={size.name: [_client(size, client) for client in range(clients)] for size in sizes}
        if evaluations
        else {},
    )


def hostile() -> Results:
    """A run whose every string tries to become markup."""
    plain = results()
    return replace(
        plain,
        run={HOSTILE: HOSTILE, "seed": HOSTILE, "fleet": {HOSTILE: [HOSTILE]}, "url": "https://example.org/x.css"},
        method=HOSTILE,
        model={**plain.model, "class": HOSTILE},
        data={**plain.data, "name": HOSTILE},
        sizes=tuple(replace(size, name=f"{HOSTILE}{size.name}$x|y$") for size in plain.sizes),
        rounds=(*plain.rounds[:-1], replace(plain.rounds[-1], refused={HOSTILE: HOSTILE})),
        evaluations=tuple(
            Evaluation(entry.round, {f"{HOSTILE}{name}$x|y$": scores for name, scores in entry.sizes.items()})
            for entry in plain.evaluations
        ),
        client_scores={f"{HOSTILE}{name}$x|y$": values for name, values in plain.client_scores.items()},
    )


def _size(name: str, size: float, view: str) -> Size:
    params = int(FULL * (0.97 * size + 0.03))
    return Size(name, size, view, params, params / FULL, 4 * params, 4 * params, 200 * params)


def _round(number: int, clients: int) -> Round:
    chosen = tuple((7 * number + step) % clients for step in range(8))
    return Round(
        number,
        loss=0.6 + 3.9 * exp(-number / 18) + 0.08 * sin(5 * number),
        clients=chosen[:6],
        dropped=chosen[6:7] if number % 3 == 0 else (),
        late=chosen[7:8] if number % 4 == 0 else (),
        refused={str(chosen[7]): "the update holds nan in `vit.encoder`"} if number == 9 else {},
        bytes_up=6 * 90_000_000,
        bytes_down=8 * 90_000_000,
        flops=6 * 10**14,
        seconds=140 + 20 * sin(number),
    )


def _scores(size: Size, step: int, metric: str) -> Scores:
    top = 0.62 + 0.2 * size.size**0.3 - (0.03 if size.view == "windows" else 0)
    value = top * (1 - exp(-step / 3)) + 0.008 * sin(3 * step)
    test = {metric: value, "f1_macro": value - 0.02, "f1_weighted": value - 0.01, "loss": 4.6 * (1 - value)}
    return Scores(test, {metric: value + 0.004 * sin(step)}, {metric: value - 0.03}, {metric: value - 0.21})


def _client(size: Size, client: int) -> float | None:
    if client % 9 == 8:
        return None
    return min(1.0, 0.6 + 0.2 * size.size**0.3 + 0.17 * sin(1.7 * client) - 0.04 * (client % 4))
