"""Is a search worth its evaluations? Its picks against the best of as many random submodels, at five budgets, three seeds.

python -m experiments.post_training.search RUN                   # minutes on a GPU; goes on where it stopped
python -m experiments.post_training.search RUN --smoke --out /tmp/search.json

Both sides judge as many candidates on the same few validation examples, and as many finalists on more of them; the best there
is tested on examples that neither has seen. A random candidate fits its budget and uses at least four fifths of it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from experiments.comparing import interval
from experiments.running import device
from experiments.submodels import drawn
from raffm.algebra.selection import Selection
from raffm.data.examples import Examples
from raffm.models.space import Space
from raffm.pick import space_of
from raffm.prepare import reopened
from raffm.rounds.plan import Plan
from raffm.rounds.predict import outputs_of
from raffm.search.find import Effort, find
from raffm.search.front import Candidate, best, fits, promising
from raffm.search.judge import Judge, judge_of
from raffm.search.price import Prices
from raffm.seeds import generator

HERE = Path(__file__).parent
SHARES = (0.35, 0.45, 0.55, 0.7, 0.85)
SEEDS = (0, 1, 2)
SIDES = ("search", "random")
USED = 0.8
BATCH = {"cuda": 5000, "cpu": 64}
WORKERS = 2
SEEN = 2500
"""Test examples that were looked at while the search was made; the comparison uses others."""


@dataclass(frozen=True)
class Scale:
    """How many candidates and finalists, and on how many examples they are judged and tested."""

    evaluations: int = 200
    examples: int = 512
    finalists: int = 16
    validation: int = 5000
    test: int = 7500


SMOKE = Scale(evaluations=12, examples=32, finalists=2, validation=64, test=64)


def main() -> None:
    """Measure what is missing, write it, and show a table of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a trained run")
    parser.add_argument("--smoke", action="store_true", help="few candidates, few examples")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="some of the seeds, to share the work")
    parser.add_argument("--out", type=Path, default=HERE / "search.json")
    options = parser.parse_args()
    scale = SMOKE if options.smoke else Scale()
    results = _begun(options.out, scale)
    judge, test = _judge(options.run, scale)
    space = space_of(judge.plan, None)
    jobs = [(seed, share, side) for seed in options.seeds for share in SHARES for side in SIDES]
    known = {(row["seed"], row["share"], row["side"]) for row in results["rows"]}
    for seed, share, side in track([job for job in jobs if job not in known], "search"):
        picked = _picked(replace(judge, seed=seed), space, share, side, scale)
        correct = _correct(judge, picked, test)
        results["rows"].append({"seed": seed, "share": share, "side": side, **picked.to_json(), "correct": _packed(correct)})
        options.out.write_text(json.dumps(results) + "\n", encoding="utf-8")
    print(table(summary(results["rows"])))


def _begun(path: Path, scale: Scale) -> dict[str, Any]:
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["scale"] == asdict(scale):
            return found
    machine = {"machine": device(), "torch": torch.__version__}
    return {"date": date.today().isoformat(), **machine, "scale": asdict(scale), "rows": []}


def _judge(run: Path, scale: Scale) -> tuple[Judge, Examples]:
    """A judge with so many validation examples, and the test examples; the same for all seeds and sides."""
    plan, _ = reopened(run)
    plan = replace(plan, evaluating=replace(plan.evaluating, batch=BATCH[_device(plan)]))
    judge = judge_of(plan, few=scale.examples)
    test = judge.plan.data.dataset.test
    few = [torch.randperm(len(part), generator=generator(0, "experiment")) for part in (judge.validation, test)]
    return replace(judge, validation=judge.validation.take(few[0][: scale.validation])), test.take(
        few[1][SEEN : SEEN + scale.test]
    )


def _device(plan: Plan) -> str:
    return next(plan.server.model.parameters()).device.type


# -- the two sides -------------------------------------------------------------------------------------------------


def _picked(judge: Judge, space: Space, share: float, side: str, scale: Scale) -> Candidate:
    """The best within a share of the parameters that one side finds."""
    prices = Prices(judge, space, ("params",))
    limits = {"params": share * judge.plan.server.layout.count(Selection())}
    effort = Effort(scale.evaluations, scale.finalists, workers=WORKERS)
    if side == "search":
        return find(judge, space, prices, limits, effort, is_timed=False).best
    judged = list(_random(judge, space, prices, limits, scale))
    finalists = [_scored(judge, each, scale.validation) for each in promising(judged, limits, "params", scale.finalists)]
    found = best(finalists, limits, "params")
    assert found is not None
    return found


def _random(judge: Judge, space: Space, prices: Prices, limits: Mapping[str, float], scale: Scale) -> Iterator[Candidate]:
    """Different submodels that fill a budget, scored: each has a mean size of its own, so that all budgets are met."""
    draw = generator(judge.seed, "random")
    seen: set[tuple[int, ...]] = set()
    while len(seen) < scale.evaluations:
        sizes = drawn(space, draw)
        costs = prices.of(sizes)
        if not fits(costs, limits) or costs["params"] < USED * limits["params"] or tuple(sizes.values()) in seen:
            continue
        seen.add(tuple(sizes.values()))
        yield _scored(judge, Candidate(sizes, costs), scale.examples)


def _scored(judge: Judge, candidate: Candidate, examples: int) -> Candidate:
    return replace(candidate, score=judge.score(candidate.sizes, examples), examples=examples)


# -- the comparison ------------------------------------------------------------------------------------------------


@torch.no_grad()
def _correct(judge: Judge, candidate: Candidate, test: Examples) -> Tensor:
    return outputs_of(judge.plan, judge.module(candidate.sizes), test).argmax(1) == test.labels.cpu()


def _packed(correct: Tensor) -> str:
    """A bit an example, in hexadecimal."""
    return f"{int(''.join('1' if each else '0' for each in correct.tolist()), 2):x}/{len(correct)}"


def _unpacked(text: str) -> Tensor:
    bits, _, count = text.partition("/")
    return torch.tensor([each == "1" for each in f"{int(bits, 16):0{int(count)}b}"])


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The accuracy of both sides by budget, and the mean difference with a paired bootstrap over test examples."""
    found = {(row["seed"], row["share"], row["side"]): _unpacked(row["correct"]).double() for row in rows}
    pairs = {
        key[:2]: found[key] - found[(*key[:2], "random")]
        for key in found
        if key[2] == "search" and (*key[:2], "random") in found
    }
    by_share = {}
    for share in sorted({share for _, share in pairs}):
        mine = [pairs[key] for key in pairs if key[1] == share]
        sides = {side: _mean([found[key] for key in found if key[1:] == (share, side)]) for side in SIDES}
        by_share[str(share)] = {**sides, "difference": _interval(mine)}
    return {"pairs": len(pairs), "by_share": by_share, "difference": _interval(list(pairs.values()))}


def table(found: Mapping[str, Any]) -> str:
    """The comparison as a table: accuracies in percent, differences in points."""
    lines = ["| parameters | search | random | difference | 95 % interval |", "|---|---|---|---|---|"]
    for share, row in found["by_share"].items():
        sides = " | ".join(f"{100 * row[side]:.2f}" for side in SIDES)
        lines.append(f"| {100 * float(share):.0f} % | {sides} | {_worded(row['difference'])} |")
    lines.append(f"| all {found['pairs']} pairs | | | {_worded(found['difference'])} |")
    return "\n".join(lines) + "\n"


def _worded(interval: Mapping[str, float]) -> str:
    mean, low, high = (100 * interval[key] for key in ("mean", "low", "high"))
    return f"{mean:+.2f} | {low:+.2f} to {high:+.2f}"


def _mean(tensors: list[Tensor]) -> float:
    return float(torch.stack(tensors).mean())


def _interval(differences: list[Tensor]) -> dict[str, float]:
    """The mean difference, and the middle 95 % of it when test examples are drawn again."""
    mean, low, high = interval(torch.stack(differences).mean(0).numpy())
    return {"mean": mean, "low": low, "high": high}


if __name__ == "__main__":
    main()
