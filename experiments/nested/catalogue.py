"""Every run of the experiment, by name: what it asks, and its settings."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.preparing import TINY_BERT, arranged, few, is_missing, minilm, salient_first
from experiments.running import Content, changed
from experiments.setting import COMPARED, METHODS, PUBLISHED_RATE, RATES, REFERENCES, base_of, finals, with_method
from raffm.devices.balance import Widths
from raffm.devices.budget import Budget
from raffm.devices.fleet import fleet_of, size_name
from raffm.methods.widths import ratio_of, width_sizes
from raffm.models.labelled import Labelled
from raffm.models.load import Kind, trainable
from raffm.settings import read_file

HERE = Path(__file__).parent

LINES = (*COMPARED, *REFERENCES)
"""The methods of the tables: what the question is about, and what to compare with."""

ABLATION: Mapping[str, Content] = {
    "uniform": {"shapes": "uniform"},
    "alone": {"steps": "none"},
    "shared-norms": {"own_norms": False},
    "labels": {"distil": 0.0},
    "teacher": {"distil": 1.0},
    "one": {"steps": "one"},
    "spp": {"ranking": "l1_norm"},
}

LONGER = 1.32
"""Nested on uniform shapes takes so many times the multiply-adds of HeteroFL, over clients of the four sizes."""

FINER: Content = {"1/4": [16, 32, 36, 44], "1/16": [12, 18, 14, 20]}
"""Balanced shapes of a CPU's small ResNet by 2 channels. By 8, which leave its first stage two sizes, the smallest is
(8, 24, 8, 24): the greatest product, but a stage of 8 channels after one of 24."""


@dataclass(frozen=True)
class Scale:
    """How large all runs are.

    The real ones ("full"), some of them with a small ResNet ("cpu"), or all of them so small that they only show that they
    run ("smoke").
    """

    name: str
    folder: Path
    """Where what runs begin with is kept."""

    @property
    def is_smoke(self) -> bool:
        """Whether nothing is to be learnt from the runs."""
        return self.name == "smoke"

    @property
    def base(self) -> dict[str, Any]:
        """CIFAR-10, ResNet-18, the published setting."""
        return base_of(self.name)

    # -- CIFAR-10 ------------------------------------------------------------------------------------------------

    def beside(self, method: str, rate: float) -> dict[str, Content]:
        """One seed at the published rate, where another was found."""
        if rate == PUBLISHED_RATE or method not in COMPARED:
            return {}
        return _tagged(f"at{PUBLISHED_RATE}", dict([*finals(self.name, method, PUBLISHED_RATE).items()][:1]))

    def ablation(self, rate: float) -> dict[str, Content]:
        """Nested without one of its ideas, or with another in its place."""
        named = {name: {**METHODS["nested"], **switches} for name, switches in ABLATION.items()}
        return {f"ablation-{name}": changed(self.base, with_method(method, rate)) for name, method in named.items()}

    def finer(self, rate: float) -> dict[str, Content]:
        """On a CPU: nested on shapes by fewer channels."""
        found = finals(self.name, "nested", rate)
        return _tagged("finer", {name: changed(content, {"method": {"shapes": FINER}}) for name, content in found.items()})

    def slower(self, method: str) -> dict[str, Content]:
        """On a CPU, where no rate is chosen: masks and nested at the lowest of them, which is chosen for ResNet-18."""
        return _tagged(f"at{min(RATES)}", finals(self.name, method, min(RATES)) if method in COMPARED[:2] else {})

    def longer(self, rate: float) -> dict[str, Content]:
        """HeteroFL with as many multiply-adds as nested on its shapes."""
        steps = round(LONGER * self.base["local"]["steps"])
        return {"heterofl-longer": changed(self.base, with_method(METHODS["heterofl"], rate), {"local": {"steps": steps}})}

    def bound(self, rate: float) -> dict[str, Content]:
        """Nested where no size may take more work than its uniform shape does."""
        method = {**METHODS["nested"], "shapes": self.bound_shapes()}
        return {"nested-bound": changed(self.base, with_method(method, rate))}

    def bound_shapes(self) -> dict[str, list[int]]:
        """Balanced shapes of the fleet's sizes within the parameters of each and the FLOPs of its uniform shape."""
        model, sizes = self.base["model"], fleet_of(self.base["fleet"]["tiers"]).sizes
        image = (1, 8, 8) if self.is_smoke else (3, 32, 32)
        changes = {key: entry for key, entry in model.items() if key != "name"}
        server = Labelled.of(trainable(model["name"], "image", 10, image, changes=changes))
        widths = Widths(server)
        budgets: list[Budget | None] = [None]
        for size in sizes[1:]:
            uniform = server.layout.sizes | width_sizes(server.layout, ratio_of(size))
            flops = widths.cost.flops(uniform)
            budgets.append(Budget(max_params=widths.budget(size).max_params, max_flops=flops))
        return {size_name(size): list(shape) for size, shape in zip(sizes, widths.chain(budgets), strict=True)}

    # -- other models and data -----------------------------------------------------------------------------------

    def cifar100(self, rates: Mapping[str, float]) -> dict[str, Content]:
        """ResNet-18 on CIFAR-100, at CIFAR-10's rates."""
        change = {} if self.is_smoke else {"rounds": 50, "data": {"source": "cifar100"}}
        return {
            f"cifar100-{method}": changed(self.base, change, with_method(METHODS[method], rate))
            for method, rate in rates.items()
            if method in COMPARED
        }

    def vit(self, methods: Container[str]) -> dict[str, Content]:
        """The small pretrained ViT on CIFAR-10, its indices in the order of their salience."""
        small = {"rounds": 2, "model": {"name": "vit-small"}, "data": {"source": "digits", "clients": 12}, **_SMALL}
        base = changed(read_file(HERE / "vit.toml"), small if self.is_smoke else {})
        if not self.is_smoke:
            base["model"] = {"name": self._in_order(base["model"]["name"], "image", (3, 32, 32))}
        return {f"vit-{name}": changed(base, {"method": PRETRAINED[name]}) for name in PRETRAINED if name in methods}

    def texts(self, methods: Container[str]) -> dict[str, Content]:
        """MiniLM on the AG News subset, its indices in the order of their salience."""
        if is_missing("ag_news"):
            return {}
        base, model = read_file(HERE / "texts.toml"), minilm()
        if self.is_smoke:
            data = {"source": few("ag_news", self.folder, train=300, test=100), "clients": 12, "tokenizer": model}
            base = changed(base, {"rounds": 1, "model": TINY_BERT, "data": data, **_SMALL})
        else:
            base["model"] = {"name": self._in_order(model, "text")}
        runs = {name: changed(base, {"method": PRETRAINED[name]}) for name in PRETRAINED if name in methods}
        if "raffm" in runs and not self.is_smoke:
            runs["raffm"] = changed(runs["raffm"], {"fleet": {"tiers": _outside_embeddings(model)}})
        return {f"texts-{name}": content for name, content in runs.items()}

    def _in_order(self, name: str, kind: Kind, shape: tuple[int, ...] = ()) -> str:
        """A folder with a pretrained model whose most salient indices come first, so that prefixes keep them."""
        return arranged(self.folder / f"{Path(name).name}-in-order", name, kind, 2, shape, salient_first)


PRETRAINED: Mapping[str, Content] = {
    "nested": METHODS["nested"],
    "fiarse": {"name": "fiarse", "embeddings": False},
    "smallest-balanced": METHODS["smallest-balanced"],
    "heterofl": METHODS["heterofl"],
    "raffm": {"name": "raffm"},
}

_SMALL: Content = {
    "local": {"steps": 2, "epochs": 1},
    "participation": {"clients": 4},
    "evaluate": {"every": 1, "last": 1},
    "backend": {"name": "serial", "precision": "float32"},
}


def _tagged(tag: str, found: Mapping[str, Content]) -> dict[str, Content]:
    """Final runs, by names that say what is different about them."""
    return {name.replace("-seed", f"-{tag}-seed"): content for name, content in found.items()}


def _outside_embeddings(model: str) -> list[dict[str, Any]]:
    """RaFFM's fleet: limits that are parts of what is not in embedding tables, as the others count."""
    widths = Widths(Labelled.of(trainable(model, "text", 4)))
    parts = [{"size": size, "max_params": widths.budget(size).max_params} for size in (1 / 2, 1 / 4)]
    return [{"size": 1.0}, *parts]
