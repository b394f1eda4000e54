"""Which candidates are worth having: none other is better and costs no more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Candidate:
    """A submodel: the sizes of its groups, what it costs, and its score on some of the validation examples or all.

    `examples` is how many it was scored on. `latency` holds seconds that were measured, not estimated: the median and the
    tenth and ninetieth percentile.
    """

    sizes: Sizes
    costs: Mapping[str, float]
    score: float = 0.0
    examples: int = 0
    latency: tuple[float, float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "sizes": dict(self.sizes),
            "costs": dict(self.costs),
            "score": self.score,
            "examples": self.examples,
            "latency": None if self.latency is None else list(self.latency),
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Candidate:
        """What `to_json` gave."""
        latency = content["latency"]
        measured = None if latency is None else (latency[0], latency[1], latency[2])
        return Candidate(content["sizes"], content["costs"], content["score"], content["examples"], measured)


def front(candidates: Iterable[Candidate], cost: str) -> list[Candidate]:
    """Those that no other beats at a cost that is no higher, cheapest first; of equal ones the first."""
    found: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda each: (each.costs[cost], -each.score)):
        if not found or candidate.score > found[-1].score:
            found.append(candidate)
    return found


def best(candidates: Iterable[Candidate], limits: Mapping[str, float], cost: str) -> Candidate | None:
    """The one with the highest score within all limits; of equal scores the cheapest."""
    fitting = [candidate for candidate in candidates if fits(candidate.costs, limits)]
    return min(fitting, key=lambda each: (-each.score, each.costs[cost]), default=None)


def fits(costs: Mapping[str, float], limits: Mapping[str, float]) -> bool:
    """Whether no cost is above its limit."""
    return all(costs[kind] <= limit for kind, limit in limits.items())


def promising(candidates: Sequence[Candidate], limits: Mapping[str, float], cost: str, count: int) -> list[Candidate]:
    """Those worth a closer look: the best within limits; where there are none, front after front, of each the best first."""
    if limits:
        within = (each for each in candidates if fits(each.costs, limits))
        return sorted(within, key=lambda each: (-each.score, each.costs[cost]))[:count]
    found: list[Candidate] = []
    left = list(candidates)
    while left and len(found) < count:
        layer = front(left, cost)
        found += reversed(layer)
        chosen = {id(candidate) for candidate in layer}
        left = [candidate for candidate in left if id(candidate) not in chosen]
    return found[:count]
