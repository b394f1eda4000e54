"""Every run of the table, by name. Those that `experiments.nested` has are taken from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.running import Content, changed
from experiments.setting import COMPARED, METHODS, PUBLISHED_RATE, base_of, finals, with_method

HABITS: Mapping[str, Content] = {
    "split": {"data": {"tests": "unrelated"}},
    "transform": {"evaluate": {"augmented": True}},
    "order": {"local": {"shuffle": False}},
    "norms": {"evaluate": {"norms": "test-batches"}},
}
"""What the published code does, one by one: `raffm train --as-published` does all of it."""

LONG = 800
"""Published rounds."""

FURTHER = (*COMPARED, "fedrolex", "scalefl")
"""Methods that are run on CIFAR-100, too, and tested at sizes that nobody trained."""

AS_PUBLISHED = ("fiarse", "heterofl")

UNSEEN = (1.0, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256)
"""Sizes that finished models are tested at, trained ones among them."""


@dataclass(frozen=True)
class Catalogue:
    """The runs at a scale, for the methods whose rates are known."""

    scale: str
    rates: Mapping[str, float]

    def final(self) -> dict[str, Content]:
        """CIFAR-10, 200 rounds."""
        return {
            name: content for method, rate in self.rates.items() for name, content in finals(self.scale, method, rate).items()
        }

    def long(self) -> dict[str, Content]:
        """The published number of rounds, one seed."""
        change = {"rounds": 3} if self.scale == "smoke" else {"rounds": LONG, "evaluate": {"every": 20}}
        return {f"long-{method}": self._of(method, change) for method in self._known(COMPARED)}

    def cifar100(self) -> dict[str, Content]:
        """CIFAR-100, at CIFAR-10's rates."""
        change = {} if self.scale == "smoke" else {"data": {"source": "cifar100"}}
        return {f"cifar100-{method}": self._of(method, change) for method in self._known(FURTHER)}

    def habits(self) -> dict[str, Content]:
        """FIARSE at the published rate: honestly, and with each habit of the published code alone."""
        if "fiarse" not in self.rates:
            return {}
        honest = changed(base_of(self.scale), with_method(METHODS["fiarse"], PUBLISHED_RATE))
        single = {f"habit-{name}": changed(honest, change) for name, change in HABITS.items()}
        return {"habit-none": honest, **single}

    def published(self) -> dict[str, Content]:
        """The published number of rounds and rate, with all habits."""
        change = {"rounds": 3} if self.scale == "smoke" else {"rounds": LONG, "evaluate": {"every": 20}}
        base = changed(base_of(self.scale), change, *HABITS.values())
        named = {method: METHODS[method] for method in self._known(AS_PUBLISHED)}
        return {f"published-{name}": changed(base, with_method(method, PUBLISHED_RATE)) for name, method in named.items()}

    def _of(self, method: str, change: Content) -> Content:
        return changed(base_of(self.scale), change, with_method(METHODS[method], self.rates[method]))

    def _known(self, methods: tuple[str, ...]) -> list[str]:
        return [method for method in methods if method in self.rates]
