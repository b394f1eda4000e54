"""A trained run as one folder to give away: every submodel in it, with a card, for a hub or a device.

share("runs/vit", "my-elastic-vit")
model = from_pretrained("my-elastic-vit").submodel(max_params=2_000_000)
push_to_hub("my-elastic-vit", "me/my-elastic-vit")
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from raffm.algebra.mask import Mask
from raffm.elastic import RaFFM
from raffm.errors import CheckpointError, ExportError
from raffm.export.bundle import preprocessing
from raffm.libraries import library
from raffm.methods.method import Device, Share
from raffm.methods.nested import Nested as NestedMethod
from raffm.methods.raffm import RaFFM as RaFFMMethod
from raffm.models.files import read_json
from raffm.models.labelled import Labelled
from raffm.models.nested import Nested, Piece, load_nested, norms_of, save_nested
from raffm.models.rows import SIZES, rows_of, with_plain_norms
from raffm.pick import space_of
from raffm.prepare import reopened
from raffm.report.tables import count
from raffm.rounds.costs import Costs
from raffm.rounds.plan import Plan
from raffm.search.front import Candidate, front
from raffm.search.judge import Judge, judge_of, own_metric

TOLERANCE = 1e-4

HUB = CheckpointError("hubs are reached through huggingface_hub: pip install 'raffm[transformers]'.")

CARD = """---
library_name: raffm
tags: [raffm, elastic, federated-learning]
---
# {name}

One {model} trained by {method} across devices of different sizes (raffm), with every submodel in it: its weights lie in the
order of their salience, so that a smaller submodel is a prefix of a larger one. A device reads the part that it can hold.

| size | parameters | FLOPs | {metrics} |
|---|---|---|{lines}|
{rows}

On the test set of {data} ({test:,} examples), which chose nothing: `max_params` goes by validation examples. Trained for
{rounds} rounds with {clients} clients; their devices held {fleet} of the model.

```python
from raffm.share import from_pretrained

nested = from_pretrained("{name}")
model = nested.submodel("{smallest}")                  # or nested.submodel(max_params=1_000_000)
```

The full model also loads without raffm, by its family's own `from_pretrained`. `nested.json` has labels, preprocessing and
the settings of the run.
"""


def share(run: str | Path, folder: str | Path, metric: str | None = None, is_last: bool = False) -> Nested:
    """Write a run's model with all its sizes into a new folder: its fleet's, and those of its search, where there was one.

    `metric` ranks the weights; by default as the run did. Every size is loaded again and compared. `is_last`: the last model,
    where the run kept an average.
    """
    plan, saved = reopened(Path(run), is_last=is_last)
    metric = metric or own_metric(plan)
    judge = judge_of(plan, metric)
    chosen = _sizes_of(plan, judge, Path(run), metric)
    nest = _permuted(judge)
    prices = Costs(plan)
    pieces = {}
    for name, sizes in chosen.items():
        module = nest.module(sizes)
        cost, scores = prices.of(Share(judge.selection(sizes))), judge.scores(module, plan.data.dataset.test)
        score = nest.score(sizes, len(nest.validation))
        norms = norms_of(module, bool(rows_of(plan.server.layout)))
        pieces[name] = Piece(name, sizes, cost.params, cost.flops, scores, score), norms
    about = {
        "labels": list(plan.data.dataset.classes),
        "preprocessing": preprocessing(plan.task, plan.data.dataset),
        "method": plan.method.name,
        "ranking": metric,
        "data": plan.data.dataset.name,
        "rounds": saved.round,
        "run": saved.results.run,
    }
    save_nested(with_plain_norms(nest.plan.server), nest.ranking, pieces, folder, about, _card(Path(folder).name, plan, pieces))
    nested = load_nested(folder)
    _compare(nested, judge, chosen)
    return nested


SHIPPED = Path(__file__).with_name("shipped")
"""Models that come with raffm."""


def from_pretrained(name: str | Path, revision: str | None = None) -> Nested:
    """A shared folder: here, among those that come with raffm ("digits-vit"), or on a hub."""
    for place in (Path(name), SHIPPED / str(name)):
        if place.is_dir():
            return load_nested(place)
    hub = library("huggingface_hub", HUB)
    try:
        return load_nested(hub.snapshot_download(str(name), revision=revision))
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"there is no folder {str(name)!r}, and the hub did not give it: {reason}") from None


def push_to_hub(folder: str | Path, repository: str, private: bool = True) -> str:
    """Put a shared folder on a hub; gives its address. Log in first: `hf auth login`."""
    load_nested(folder)
    hub = library("huggingface_hub", HUB)
    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        return str(hub.upload_folder(repo_id=repository, folder_path=str(folder), commit_message="A model by raffm"))
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        raise CheckpointError(f"the hub did not take {repository!r}: {str(error).splitlines()[0]}") from None


def _sizes_of(plan: Plan, judge: Judge, run: Path, metric: str) -> dict[str, dict[str, int]]:
    """The full model, the sizes of the run's fleet and the front of its search, by name, the largest first."""
    whole = space_of(plan, None).largest()
    found = {"1": whole}
    for name, device in plan.served.items():
        if device.size < 1 or isinstance(plan.method, NestedMethod):
            found[name] = {**whole, **_shape_for(plan, device, judge, metric)}
    searched = run / "search" / "search.json"
    if searched.is_file() and read_json(searched)["ranking"] == metric:
        content = read_json(searched)
        for each in front(map(Candidate.from_json, content["finalists"]), content["cost"]):
            if dict(each.sizes) not in found.values():
                found[_free(count(each.costs["params"]).replace(" ", ""), found)] = dict(each.sizes)
    params = {name: plan.server.layout.count(judge.selection(sizes)) for name, sizes in found.items()}
    return dict(sorted(found.items(), key=lambda entry: -params[entry[0]]))


def _shape_for(plan: Plan, device: Device, judge: Judge, metric: str) -> dict[str, int]:
    """The sizes of what a device gets, which must be the first indices in the order of the ranking."""
    if isinstance(plan.method, RaFFMMethod):
        return plan.method.shape_for(plan.server, device)
    (served,) = plan.method.serve(plan.server, plan.rounds, [device])
    share = served[0].shares[0]
    sizes = {group: indices.shape[-1] for group, indices in share.selection.kept.items() if group != SIZES}
    is_masked = isinstance(plan.method.held(plan.server, share), Mask)
    if is_masked or (metric == own_metric(plan) and judge.selection(sizes) != share.selection):
        raise ExportError(f"what {plan.method.name} serves is no prefix of the model, and one file holds prefixes alone.")
    return sizes


def _free(name: str, taken: Collection[str]) -> str:
    """The name, or with a number where it is taken."""
    names = (name if number == 1 else f"{name}-{number}" for number in range(1, len(taken) + 2))
    return next(each for each in names if each not in taken)


def _permuted(judge: Judge) -> Judge:
    """A judge of a copy of the model, with its weights in the order of the ranking."""
    server = judge.plan.server
    elastic = RaFFM(copy.deepcopy(server.model), table=server.table)
    elastic.ranking = judge.ranking
    elastic.permute()
    method = judge.plan.method if rows_of(server.layout) else RaFFMMethod(metric="none")
    moved = replace(judge.plan, server=Labelled.of(elastic.model, server.table), method=method)
    return replace(judge, plan=moved, ranking=elastic.ranking)


def _compare(nested: Nested, judge: Judge, chosen: Mapping[str, Mapping[str, int]]) -> None:
    """Refuse a folder whose submodels are not those of the run."""
    plan = judge.plan
    batch = plan.task.batch(judge.validation, torch.arange(min(8, len(judge.validation))))
    for name, sizes in chosen.items():
        with torch.no_grad():
            expected, given = (plan.task.forward(each, batch) for each in (judge.module(sizes), nested.submodel(name)))
        gap = float((given - expected).abs().max() / expected.abs().max().clamp_min(1.0))
        if not gap <= TOLERANCE:
            raise ExportError(f"size {name} of {str(nested.folder)!r} differs from that of the run by {gap:.1e}.")


def _card(name: str, plan: Plan, pieces: Mapping[str, tuple[Piece, Any]]) -> str:
    listed: list[Piece] = [piece for piece, _ in pieces.values()]
    metrics = list(listed[0].metrics)
    rows = []
    for piece in listed:
        scores = [f"{piece.metrics[each]:.4f}" for each in metrics]
        rows.append(_row([piece.name, f"{piece.params:,}", f"{piece.flops:,}", *scores]))
    return CARD.format(
        name=name,
        model=type(plan.server.model).__name__,
        method=plan.method.name,
        metrics=" | ".join(metrics),
        lines="|".join("---" for _ in metrics),
        rows="\n".join(rows),
        data=plan.data.dataset.name,
        test=len(plan.data.dataset.test),
        rounds=plan.rounds,
        clients=plan.data.clients,
        fleet=", ".join(tier.label for tier in plan.fleet.tiers),
        smallest=min(listed, key=lambda piece: piece.params).name,
    )


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
