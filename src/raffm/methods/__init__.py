"""Methods: one file each, four functions, picked by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any

from raffm.errors import RunError
from raffm.methods.fedavg import FedAvg
from raffm.methods.fedavg_capable import FedAvgCapable
from raffm.methods.federated_dropout import FederatedDropout
from raffm.methods.fedrolex import FedRolex
from raffm.methods.fiarse import Fiarse
from raffm.methods.fiarse_structured import FiarseStructured
from raffm.methods.flexlora import FlexLoRA
from raffm.methods.heterofl import HeteroFL
from raffm.methods.lora import LoRA
from raffm.methods.method import Method
from raffm.methods.nested import Nested
from raffm.methods.pruning_greedy import PruningGreedy
from raffm.methods.raffm import RaFFM
from raffm.methods.raflora import RaFLoRA
from raffm.methods.scalefl import ScaleFL
from raffm.methods.smallest_for_all import SmallestForAll

KINDS = (
    FedAvg,
    FedAvgCapable,
    FederatedDropout,
    FedRolex,
    Fiarse,
    FiarseStructured,
    HeteroFL,
    Nested,
    PruningGreedy,
    RaFFM,
    ScaleFL,
    SmallestForAll,
)
METHODS: Mapping[str, type[Any]] = {kind.name: kind for kind in KINDS}
"""Methods for every model."""

ADAPTING: Mapping[str, type[Any]] = {kind.name: kind for kind in (LoRA, FlexLoRA, RaFLoRA)}
"""Methods for models with adapters."""

EVERY = {**METHODS, **ADAPTING}


def described(method: Method) -> dict[str, Any]:
    """A method in plain values: its name and its switches."""
    switches: tuple[Field[Any], ...] = fields(method) if is_dataclass(method) else ()
    return {"name": method.name, **{entry.name: getattr(method, entry.name) for entry in switches}}


def method_of(name: str, **switches: Any) -> Method:
    """A method by its name, with its switches; names and switches that do not exist are refused."""
    if name not in EVERY:
        raise RunError(f"there is no method {name!r}. The methods are: {', '.join(EVERY)}.")
    known = [entry.name for entry in fields(EVERY[name])]
    for switch in switches:
        if switch not in known:
            has = f"has {', '.join(known)}" if known else "has none"
            raise RunError(f"{name} has no switch {switch!r}; it {has}.")
    method: Method = EVERY[name](**switches)
    return method
