"""RaFFM: the short API. A thin face over the algebra, the families and the budgets.

elastic = RaFFM(model)
elastic.salient_parameter_prioritization()
submodel, params, config = elastic.fit(max_params=45_000_000)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from raffm.algebra.layout import TRAVELLING
from raffm.algebra.move import extract, moves, permute
from raffm.algebra.ranking import Ranking
from raffm.algebra.selection import Selection
from raffm.algebra.tally import Tally
from raffm.devices.balance import Widths
from raffm.devices.budget import Budget
from raffm.devices.cost import CostModel
from raffm.devices.fit import fit, kept_shares
from raffm.errors import CheckpointError, SelectionError, SpaceError, UpdateError
from raffm.models.adapters import rank_groups
from raffm.models.checkpoint import load_weights, save_model
from raffm.models.files import found, read_json, read_tensors, write_json, write_tensors, written_whole
from raffm.models.label import layout_of, named_tensors, table_of
from raffm.models.labelled import Labelled
from raffm.models.lora import recipe_of, unwrapped, with_lora
from raffm.models.salience import Metric, l1_norm, rank
from raffm.models.space import By, Config, read_space
from raffm.models.surgery import Record, submodel
from raffm.models.table import Table
from raffm.seeds import generator

Submodel = tuple[nn.Module, int, Config]
"""A module, its exact number of parameters, and the config that makes it again."""


class RaFFM:
    """An elastic model: real submodels of every size, and the counted mean of what clients made of them.

    `space` says which sizes are drawn (a dict, the path of a JSON file, or None: the model's own
    `config.elastic_config`, else quarters of FFN, heads and head dimensions). `by` says how the published
    `atten_out` is cut: within every head ("dims") or by whole "heads". `table` labels a model of another family.
    """

    def __init__(
        self,
        model: nn.Module,
        space: Mapping[str, Any] | str | Path | None = None,
        *,
        by: By = "dims",
        table: Table | str | Path | None = None,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.table = table_of(model, table)
        self.layout = layout_of(model, self.table)
        own = getattr(getattr(model, "config", None), "elastic_config", None)
        self.space = read_space(self.layout, self.table, own if space is None else space, by)
        self.ranking = Ranking()
        self.version = 0
        self._seed = seed
        self._drawn = 0
        self._master: dict[str, Tensor] = {}

    @property
    def total_params(self) -> int:
        """The number of parameters of the full model, tied ones counted once."""
        return self.layout.count(Selection())

    # -- submodels -----------------------------------------------------------------------------------------------

    def random_resource_aware_model(self, seed: int | None = None) -> Submodel:
        """A random submodel of the space; the same seed gives the same one, no seed the next of a fixed series."""
        if seed is None:
            source = generator(self._seed, "submodel", self._drawn)
            self._drawn += 1
        else:
            source = generator(seed, "submodel")
        return self._made(self.space.draw(source))

    def sample_smallest_model(self) -> Submodel:
        """The smallest submodel of the space."""
        return self._made(self.space.smallest())

    def resource_aware_model(self, config: Mapping[str, Any]) -> tuple[nn.Module, int]:
        """The submodel of a config; groups that it does not name are whole."""
        module, params, _ = self._made(self.space.to_sizes(config))
        return module, params

    def fit(
        self,
        *,
        max_params: int | None = None,
        max_bytes: int | None = None,
        max_flops: int | None = None,
        max_memory: int | None = None,
        batch: int = 16,
        optimizer: str = "adamw",
        objective: Literal["score", "balanced"] = "score",
    ) -> Submodel:
        """The submodel of the space that keeps the most ranking score within all given limits.

        `max_flops` counts the forward pass of one example; `max_memory` the peak bytes of a training step. With the
        `objective` "balanced", any sizes of the family's widths whose product is greatest: about as many parameters for each.
        """
        budget = Budget(max_params=max_params, max_bytes=max_bytes, max_flops=max_flops, max_memory=max_memory)
        if objective not in ("score", "balanced"):
            raise SpaceError(f'the objective is "score" or "balanced", not {objective!r}.')
        if objective == "balanced":
            widths = Widths(Labelled.of(self.model, self.table), batch, optimizer)
            sizes = widths.sizes(widths.balanced(budget))
            return *self.resource_aware_model(sizes), sizes
        cost = CostModel(self.model, self.layout, self.table, batch=batch, optimizer=optimizer, free=tuple(self.space.sizes))
        ranking = self.ranking if self.ranking.scores else self._unranked_scores()
        shares = kept_shares(self.layout, ranking, self.space.sizes)
        return self._made(fit(self.layout, cost, budget, self.space.sizes, shares, self.ranking))

    def _unranked_scores(self) -> Ranking:
        return Ranking({}, rank(self.model, self.layout, l1_norm).scores)

    def select(self, config: Mapping[str, Any]) -> Selection:
        """The indices that a config keeps: the current ranking cut to its sizes."""
        try:
            return self.ranking.cut(self.layout, self.space.to_sizes(config))
        except SelectionError as error:
            raise SpaceError(str(error)) from None

    def _made(self, sizes: Mapping[str, int]) -> Submodel:
        selection = self.select(sizes)
        module = submodel(self.model, self.layout, selection, self.version)
        return module, self.layout.count(selection), self.space.to_config(sizes)

    # -- salience ------------------------------------------------------------------------------------------------

    def salient_parameter_prioritization(
        self, metric: str | Metric = l1_norm, *, batches: Iterable[Any] = (), loss: Any = None
    ) -> None:
        """Rank every group, so that submodels keep what matters most; the weights do not move.

        `metric`: `l1_norm`, `l2_norm`, "taylor", "fisher" (these two need `batches`), or a function of a group and
        its `(tensor, axis)` pairs that gives one score per index.
        """
        self.ranking = rank(self.model, self.layout, metric, batches, loss)

    def permute(self) -> None:
        """Put the weights themselves into the order of the ranking; outputs do not change.

        Blocks keep their places, and so does what a saved model makes anew: rotary pairs, with their frequencies.
        """
        tensors, _ = named_tensors(self.model)
        still = {name: order for name, order in self.ranking.order.items() if self.layout.is_still(name)}
        ranking = Ranking({name: order for name, order in self.ranking.order.items() if name not in still})
        moved = permute(tensors, self.layout, ranking)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(moved[name])
        if self._master:
            self._master = permute(self._master, self.layout, ranking)
        self.ranking = Ranking(still)
        self.version += 1

    # -- aggregation ---------------------------------------------------------------------------------------------

    def aggregate(
        self,
        local_models: Sequence[nn.Module],
        weights: Sequence[float] | None = None,
        configs: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> None:
        """Move the server's model by the counted mean of its clients' changes; elements nobody held keep their value.

        Submodels know their Selection; a plain module is taken as the full model, or as the submodel that its entry
        of `configs` describes. If one model is refused, nothing changes.
        """
        weights = [1.0] * len(local_models) if weights is None else weights
        configs = [None] * len(local_models) if configs is None else configs
        if not len(local_models) == len(weights) == len(configs):
            raise UpdateError(
                f"{len(local_models)} models came with {len(weights)} weights and {len(configs)} configs: give one of each."
            )
        tensors, _ = named_tensors(self.model)
        server = self._server(tensors)
        tally = Tally(self.layout, server)
        for place, (module, weight, config) in enumerate(zip(local_models, weights, configs, strict=True)):
            held = self._held(module, config, place)
            update = self._update(module, held)
            sent = extract(tensors, self.layout, held) if self._master else None
            tally.add(update, held, weight, sent, client=place)
        tally.step()
        with torch.no_grad():
            for name, master in self._master.items():
                tensors[name].copy_(master)
        self.version += 1

    def _server(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The server's tensors: the model's own, or float32 masters where the model is narrower."""
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.dtype.itemsize < 4 and name not in self._master:
                self._master[name] = tensor.detach().float()
        return {**tensors, **self._master}

    def _update(self, module: nn.Module, held: Selection) -> dict[str, Tensor]:
        tensors, _ = named_tensors(module)
        stay = {move.name for name, move in moves(self.layout, held).items() if self.layout.kind(name) not in TRAVELLING}
        return {name: tensor.detach() for name, tensor in tensors.items() if name not in stay}

    def _held(self, module: nn.Module, config: Mapping[str, Any] | None, place: int) -> Selection:
        record = getattr(module, "raffm", None)
        if isinstance(record, Record):
            if record.fingerprint != self.layout.fingerprint:
                raise UpdateError(f"local model {place} is a submodel of another model (layout {record.fingerprint}).")
            if record.version != self.version:
                raise UpdateError(
                    f"local model {place} was cut from version {record.version} of the server's model, which is now at "
                    f"version {self.version}. Aggregate each round's models before the next round begins."
                )
            return record.selection
        if config is not None:
            return self.select(self.space.to_sizes(config))
        shapes = {name: tensor.shape for name, tensor in named_tensors(module)[0].items()}
        full = {name: tensor.shape for name, tensor in named_tensors(self.model)[0].items()}
        if shapes != full:
            odd = next((name for name in full if shapes.get(name) != full[name]), "its tensors")
            raise UpdateError(
                f"local model {place} is neither a submodel of ours nor of the full shape (`{odd}` differs), so what it holds "
                f"is unknown. Give its config: `configs=[...]`, entry {place}."
            )
        return Selection()

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save_ckpt(self, folder: str | Path) -> None:
        """Write the model as `save_pretrained` does, with the space in its config and the ranking beside it."""
        with written_whole(folder) as fresh:
            save_model(self.model, fresh)
            config = {**read_json(fresh / "config.json"), "elastic_config": self.space.to_json()}
            write_json(fresh / "config.json", config)
            write_tensors(fresh / "ranking.safetensors", _flat_ranking(self.ranking))
            write_tensors(fresh / "master.safetensors", self._master)
            write_tensors(fresh / "transient.safetensors", self._transient())
            write_json(fresh / "server.json", {"layout": self.layout.fingerprint, "version": self.version, "by": self.space.by})

    def load_ckpt(self, folder: str | Path) -> None:
        """Take weights, space and ranking from a folder that `save_ckpt` wrote; if it does not fit, nothing changes."""
        folder = found(folder)
        about = read_json(folder / "server.json")
        if about["layout"] != self.layout.fingerprint:
            raise CheckpointError(
                f"{str(folder)!r} holds another model (layout {about['layout']}, here {self.layout.fingerprint}). Build RaFFM "
                "from a model of the same config first."
            )
        weights = load_weights(self.model, folder)
        ranking = _full_ranking(read_tensors(folder / "ranking.safetensors"))
        space = read_space(self.layout, self.table, read_json(folder / "config.json").get("elastic_config"), about["by"])
        master = read_tensors(folder / "master.safetensors")
        transient = read_tensors(folder / "transient.safetensors")
        tensors, _ = named_tensors(self.model)
        with torch.no_grad():
            for name, tensor in {**weights, **transient}.items():
                tensors[name].copy_(tensor)
        self._master = master
        self.ranking, self.space, self.version = ranking, space, about["version"]

    def _transient(self) -> dict[str, Tensor]:
        """The buffers that no state dict holds, such as rotary frequencies."""
        tensors, _ = named_tensors(self.model)
        return {name: tensors[name] for name in self.layout.tensors("transient")}


class RaPEFT(RaFFM):
    """An elastic model with adapters: clients hold a part of the frozen weights, of the ranks, or of both.

    `model` is any model, which gets LoRA of this `rank` (see `with_lora`), or one that PEFT made. `ranks` are those that
    submodels may have, by default the full one alone. Only adapters and the head are trained, sent and averaged.
    """

    def __init__(
        self,
        model: nn.Module,
        space: Mapping[str, Any] | str | Path | None = None,
        *,
        rank: int = 8,
        alpha: float | None = None,
        targets: Sequence[str] | None = None,
        ranks: Sequence[int] | None = None,
        **rest: Any,
    ) -> None:
        inside = unwrapped(model)
        super().__init__(inside if recipe_of(inside) else with_lora(inside, rank, alpha, targets), space, **rest)
        if ranks is not None:
            groups = {name: list(ranks) for name in rank_groups(self.layout)}
            ranked = read_space(self.layout, self.table, groups)  # ranks that no adapter has are refused
            self.space = replace(self.space, sizes={**self.space.sizes, **ranked.sizes})

    @property
    def trained_params(self) -> int:
        """The number of parameters that are trained: those of adapters and of the head."""
        return self.layout.count(Selection(), "parameter")

    def random_peft_model(self, seed: int | None = None) -> Submodel:
        """A random submodel with its adapters."""
        return self.random_resource_aware_model(seed)

    def smallest_peft_model(self) -> Submodel:
        """The smallest submodel with its adapters."""
        return self.sample_smallest_model()

    def resource_aware_peft_model(self, config: Mapping[str, Any]) -> tuple[nn.Module, int]:
        """The submodel of a config, with its adapters."""
        return self.resource_aware_model(config)


def _flat_ranking(ranking: Ranking) -> dict[str, Tensor]:
    order = {f"order/{name}": indices for name, indices in ranking.order.items()}
    return {**order, **{f"scores/{name}": score for name, score in ranking.scores.items()}}


def _full_ranking(flat: Mapping[str, Tensor]) -> Ranking:
    parts: dict[str, dict[str, Tensor]] = {"order": {}, "scores": {}}
    for key, tensor in flat.items():
        kind, _, name = key.partition("/")
        parts[kind][name] = tensor
    return Ranking(parts["order"], parts["scores"])
