"""A federated run in a few lines: `load_data`, `train`, and what it gives back.

data = load_data("digits", clients=30, split="dirichlet-balanced", alpha=0.3)
result = train(model, data, method="raffm", fleet="1, 1/2, 1/4", rounds=20)
print(result)
small = result.submodel(1 / 4)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from raffm import methods
from raffm.data.answers import answering
from raffm.data.cache import split_cached
from raffm.data.examples import Federation
from raffm.data.sources import FOUND, Columns, load
from raffm.data.splits import hold_out
from raffm.data.task import ImageClassification, LanguageModelling, Task, TextClassification, kind_of
from raffm.data.text import agree_on_padding
from raffm.deploy.posted import Posted
from raffm.devices.fleet import Fleet, fleet_of
from raffm.errors import RunError
from raffm.methods import method_of
from raffm.methods.method import Device, Method, Served
from raffm.models.checkpoint import save_submodel
from raffm.models.labelled import Labelled
from raffm.models.rounding import Precision, warn_of_slow_rounding
from raffm.models.rows import plain_submodel, rows_of
from raffm.notices import notice
from raffm.report.folder import write_results
from raffm.report.tables import as_markdown
from raffm.rounds.backend import Backend, Serial
from raffm.rounds.evaluate import entries_of
from raffm.rounds.local import Local
from raffm.rounds.loop import Keeping, Watcher
from raffm.rounds.loop import train as run
from raffm.rounds.plan import Evaluating, Merging, Participation, Plan
from raffm.rounds.predict import Job, Statistics, of_clients, served
from raffm.rounds.results import Results
from raffm.rounds.workshop import Workshop
from raffm.simulate.sheet import Style

Make = Callable[[Plan], Backend]


@dataclass(frozen=True, eq=False)
class Trained:
    """What a run gives: its results, and the trained model, from which submodels can be taken."""

    results: Results
    plan: Plan
    statistics: Statistics = of_clients

    def __str__(self) -> str:
        return as_markdown(self.results)

    @property
    def model(self) -> nn.Module:
        """The trained model, with the norms of the largest size where sizes have their own."""
        server, given = self.plan.server, self.plan.given
        return server.model if given is None or not rows_of(server.layout) else given.model

    def submodel(self, size: float, view: str = "") -> nn.Module:
        """The submodel that the method serves to a device of a size: a module of its own, ready to run or to save.

        `view` picks one of several ways of serving it ("prefix" for FedRolex); by default the first.
        """
        return submodel_of(self.plan, size, view, self.statistics)

    def save(self, folder: str | Path) -> dict[str, Path]:
        """Write every served submodel into a folder of its own; `load_submodel` reads them. Gives the folders by size."""
        saved = {}
        for entry in entries_of(self.plan, self.plan.rounds):
            if len(entry.served.shares) == 1:
                saved[entry.name] = Path(folder) / entry.name.replace("/", "_").replace(" ", "-")
                save_submodel(_made(self.plan, entry.served, self.statistics), saved[entry.name])
        return saved


def submodel_of(plan: Plan, size: float, view: str = "", statistics: Statistics = of_clients) -> nn.Module:
    """What a trained plan's method serves to a device of a size; see `Trained.submodel`."""
    if not 0 < size <= 1:
        raise RunError(f"a size is a part of the full model, above 0 and at most 1, but was given {size!r}.")
    known = [device for device in plan.served.values() if device.size == size]
    if not known:
        known = [Device(-1, size, fleet=plan.dealt)]
        plan.method.refuse(plan.server, known)
    (ways,) = plan.method.serve(plan.server, plan.rounds, known[:1])
    chosen = [way for way in ways if not view or way.view == view]
    if not chosen:
        raise RunError(f"{plan.method.name} serves nothing of size {size!r}" + (f" as {view!r}." if view else "."))
    return _made(plan, chosen[0], statistics)


def _made(plan: Plan, way: Served, statistics: Statistics) -> nn.Module:
    module = served(plan, Workshop(plan), Job(way.shares[0], plan.rounds), statistics=statistics)
    return plain_submodel(plan.server, module)


def load_data(
    source: str,
    *,
    clients: int | None = None,
    split: str = "iid",
    seed: int = 0,
    validation: float = 0.1,
    columns: Columns = FOUND,
    image_size: int | None = None,
    tokenizer: Any = None,
    max_length: int = 128,
    is_written: bool = False,
    **parameters: Any,
) -> Federation:
    """A data set divided among clients.

    `source`: "digits", a set in `$RAFFM_DATA`, a file, a folder, or a Hugging Face name. `split`: "iid",
    "dirichlet-balanced" or "dirichlet" (with `alpha`), "shards" (`classes_per_client`), "k-shot" (`k`) or "column".
    A share `validation` of the training examples is held out first. Texts need a `tokenizer`;
    `is_written`: questions are answered in the model's own words.
    """
    texts = {"tokenizer": tokenizer, "max_length": max_length, "is_written": is_written}
    dataset = load(source, columns=columns, image_size=image_size, **texts)
    dataset = hold_out(dataset, validation, seed)
    return Federation(dataset, split_cached(dataset, clients, split, seed, **parameters))


def train(
    model: nn.Module | Labelled,
    data: Federation,
    *,
    method: str | Method = "raffm",
    fleet: str | Fleet = "quarters",
    rounds: int = 10,
    task: Task | None = None,
    local: Local | None = None,
    participation: Participation | None = None,
    merging: Merging | None = None,
    evaluating: Evaluating | None = None,
    seed: int = 0,
    backend: str | Make = "serial",
    workers: int | None = None,
    folder: str | Path | None = None,
    save_every: int = 1,
    resume: bool = False,
    settings: Mapping[str, Any] | None = None,
    watcher: Watcher | None = None,
) -> Trained:
    """Train a model across clients of different sizes. The model is trained in place.

    `backend` is "serial" (the reference), "pooled" (worker processes on the CPU), "captured" (graphs on a GPU, where model
    and data must be), or a function that makes one. With a `folder` the run is saved
    there every `save_every` rounds, resumed with `resume`, and leaves its results, plots, report and submodels there.
    """
    plan = Plan(
        server=model if isinstance(model, Labelled) else Labelled.of(model),
        method=method_of(method) if isinstance(method, str) else method,
        task=task or task_for(data),
        data=data,
        fleet=fleet_of(fleet) if isinstance(fleet, str) else fleet,
        rounds=rounds,
        seed=seed,
        local=local or Local(),
        participation=participation or Participation(),
        merging=merging or Merging(),
        evaluating=evaluating or Evaluating(),
    )
    return run_plan(plan, backend, workers, folder, save_every, resume, settings, watcher)


def run_plan(
    plan: Plan,
    backend: str | Make = "serial",
    workers: int | None = None,
    folder: str | Path | None = None,
    save_every: int = 1,
    resume: bool = False,
    settings: Mapping[str, Any] | None = None,
    watcher: Watcher | None = None,
) -> Trained:
    """Run a plan on a backend, and leave what came out in the folder. `settings` are what its results say of the run."""
    agree_on_padding(plan.server.model, plan.data.dataset.train.inputs)
    keeping = Keeping(None if folder is None else Path(folder) / "checkpoint", save_every, resume)
    made = backend_of(backend, plan, workers) if isinstance(backend, str) else backend(plan)
    try:
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)  # if that cannot be, it is known before the first round
        results = run(plan, made, keeping, dict(settings or described(plan)), watcher)
    finally:
        made.close()
    trained = Trained(results, plan, made.statistics if isinstance(made, Posted) else of_clients)
    if folder is not None:
        trained.save(Path(folder) / "submodels")
        write_results(results, Path(folder))
    return trained


def described(plan: Plan) -> dict[str, Any]:
    """A plan's settings in plain values, for results and reports."""
    tiers = [{"size": tier.size, "share": tier.share} for tier in plan.fleet.tiers]
    return {
        "method": methods.described(plan.method),
        "rounds": plan.rounds,
        "seed": plan.seed,
        "fleet": {"tiers": tiers, "redraw": plan.fleet.redraw},
        "local": asdict(plan.local),
        "participation": asdict(plan.participation),
        "merging": asdict(plan.merging),
        "evaluate": asdict(plan.evaluating),
    }


def backend_of(name: str, plan: Plan, workers: int | None = None, precision: Precision = "float32") -> Backend:
    """A backend by its name. What is computed in tf32 on graphs is computed in float32 elsewhere."""
    if precision == "bfloat16":
        warn_of_slow_rounding(plan.server.device.type)
    if name == "serial":
        return Serial(plan, precision)
    if name == "pooled":
        from raffm.simulate.pooled import Pooled

        return Pooled(plan, workers, precision)
    if name == "captured":
        return captured_or_serial(plan, style=Style(precision, channels_last=True))
    raise RunError(f"there is no backend {name!r}. The backends are: serial, pooled, captured.")


def captured_or_serial(plan: Plan, lanes: int = 0, style: Style | None = None) -> Backend:
    """The captured backend where the model is on a GPU, else the serial one, as precise, and a notice."""
    devices = {tensor.device.type for tensor in plan.server.tensors.values()}
    if devices != {"cuda"}:
        notice("there is no GPU to capture on; clients train one after another.")
        return backend_of("serial", plan, precision=(style or Style()).precision)
    from raffm.simulate.captured import Captured

    return Captured(plan, lanes, style)


def task_for(data: Federation) -> Task:
    """The task that fits a data set: images or texts with one label each, questions, or texts to learn a language from."""
    if data.dataset.questions is not None:
        return answering(data.dataset.questions)
    if kind_of(data.dataset) == "language":
        return LanguageModelling()
    if kind_of(data.dataset) == "text":
        return TextClassification()
    channels = data.dataset.train.inputs["pixel_values"].shape[1]
    return ImageClassification((0.5,) * channels, (0.5,) * channels)
