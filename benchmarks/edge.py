"""Rounds across machines against a plain Flower FedAvg of the same bytes: `python -m benchmarks.edge` writes edge.json.

Both train the same ViT for one step on every node, over TLS with node authentication, all processes on this machine, one
after the other; the SuperLink keeps its state in memory. Seconds from the end of a round to the end of the next, and from
there to a node's first step.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from deploy.network import Network

CONFIG = {"image_size": 32, "patch_size": 8, "num_channels": 3, "num_labels": 10, "num_attention_heads": 4}


@dataclass(frozen=True)
class Case:
    """So many nodes, and a ViT of about so many megabytes."""

    nodes: int
    megabytes: int
    config: dict[str, int]


CASES = {
    "small": Case(10, 1, {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 5}),
    "middle": Case(3, 50, {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}),
    "large": Case(3, 340, {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}),
}

COMMON = """
import json, os, time
from pathlib import Path

HERE = Path(os.environ["RAFFM_BENCH"])
CONFIG, ROUNDS = json.loads((HERE / "case.json").read_text())


def note(what):
    with (HERE / f"{{what}}.times").open("a") as file:
        file.write(f"{{time.time()}}\\n")
"""

OUR_CLIENT = """
from {package}.common import CONFIG, note
import torch
from raffm.data.examples import Examples
from raffm.edge import node_app
from raffm.rounds import local
from raffm.deploy import node

trained = node.train


def timed(*given):
    note("step")
    return trained(*given)


node.train = timed
app = node_app(lambda context: Examples({{"pixel_values": torch.zeros(4, 3, 32, 32, dtype=torch.uint8)}}, torch.arange(4)))
"""

OUR_SERVER = """
from {package}.common import CONFIG, ROUNDS, note
import torch
from transformers import ViTConfig, ViTForImageClassification
from raffm.data.examples import Dataset, Examples
from raffm.data.task import ImageClassification
from raffm.deploy.ledger import fleet_of, ledger
from raffm.edge import server_app
from raffm.methods import method_of
from raffm.models.labelled import Labelled
from raffm.rounds.local import Local
from raffm.rounds.loop import Nobody
from raffm.rounds.plan import Evaluating, Participation, Plan


class Clock(Nobody):
    def round(self, entry, evaluation, results):
        note("round")


def plan(context, known):
    few = Examples({{"pixel_values": torch.zeros(10, 3, 32, 32, dtype=torch.uint8)}}, torch.arange(10))
    made = Plan(
        server=Labelled.of(ViTForImageClassification(ViTConfig(**CONFIG))),
        method=method_of("fedavg"),
        task=ImageClassification((0.5,) * 3, (0.5,) * 3),
        data=ledger(known, Dataset("nothing", few, few, tuple("abcdefghij"))),
        fleet=fleet_of(known, lambda budget: 1.0),
        rounds=ROUNDS,
        local=Local("sgd", lr=0.01, batch=4, steps=1),
        participation=Participation(len(known)),
        evaluating=Evaluating(every=ROUNDS + 1, sizes=(1.0,)),
    )
    note("round")
    return made


app = server_app(plan, watcher=Clock())
"""

PLAIN_CLIENT = """
from {package}.common import CONFIG, note
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from transformers import ViTConfig, ViTForImageClassification

app = ClientApp()


@app.train()
def train(message, context):
    model = ViTForImageClassification(ViTConfig(**CONFIG))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    note("step")
    loss = torch.nn.functional.cross_entropy(model(torch.zeros(4, 3, 32, 32)).logits, torch.arange(4))
    loss.backward()
    optimizer.step()
    metrics = MetricRecord({{"num-examples": 4, "loss": float(loss.detach())}})
    return Message(RecordDict({{"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}}), reply_to=message)
"""

PLAIN_SERVER = """
from {package}.common import CONFIG, ROUNDS, note
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from transformers import ViTConfig, ViTForImageClassification

app = ServerApp()


@app.main()
def main(grid, context):
    nodes = int(context.run_config["nodes"])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    start = ArrayRecord(ViTForImageClassification(ViTConfig(**CONFIG)).state_dict())
    strategy.start(grid=grid, initial_arrays=start, num_rounds=ROUNDS, evaluate_fn=lambda round, arrays: note("round"))
"""

APPS = {"plain": (PLAIN_CLIENT, PLAIN_SERVER), "raffm": (OUR_CLIENT, OUR_SERVER)}


def run(place: Path, case: Case, which: str, rounds: int) -> dict[str, Any]:
    """A run of one of the two apps."""
    place.mkdir()
    network = Network.made(place, {"model": {"name": "vit:tiny"}}, sizes="1", nodes=case.nodes)
    package = network.folder / "raffm_edge_trial"
    texts = {"common": COMMON, "client_app": APPS[which][0], "server_app": APPS[which][1]}
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text.format(package=package.name))
    (place / "case.json").write_text(json.dumps([{**CONFIG, **case.config}, rounds]))
    network.variables["RAFFM_BENCH"] = str(place)
    try:
        network.begin("--database", ":flwr-in-memory:")  # ten nodes' small arrays lock the one on disk
        said = network.flwr("run", ".", "here", "--stream", "-c", "folder=''", timeout=3600)
    finally:
        network.close()
    return times(place, case.nodes, said)


def times(place: Path, nodes: int, said: str) -> dict[str, Any]:
    """Seconds of every round but the first, and to the steps within them."""
    found = {}
    for what, least in (("round", 3), ("step", nodes + 1)):
        path = place / f"{what}.times"
        if not path.is_file() or len(path.read_text().split()) < least:
            raise SystemExit(said + (place / "link.log").read_text())
        found[what] = [float(line) for line in (place / f"{what}.times").read_text().split()]
    ends, steps = found["round"], found["step"]
    taken = [after - before for before, after in pairwise(ends[1:])]
    first = [step - max(end for end in ends if end <= step) for step in steps[nodes:]]
    return {"seconds": median(taken), "all": taken, "to_a_first_step": median(first)}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "edge.json")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {"cases": {}}
    results |= {"date": date.today().isoformat(), "torch": torch.__version__, "python": platform.python_version()}
    for name in options.cases.split(","):
        results["cases"][name] = measured(CASES[name], options.rounds)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(name, results["cases"][name], flush=True)


def measured(case: Case, rounds: int, order: Sequence[str] = ("plain", "raffm")) -> dict[str, Any]:
    """Both apps, one after the other."""
    with TemporaryDirectory() as folder:
        found = {which: run(Path(folder) / which, case, which, rounds) for which in order}
    plain, ours = found["plain"]["seconds"], found["raffm"]["seconds"]
    return {"nodes": case.nodes, "megabytes": case.megabytes, **found, "ratio": ours / plain, "within": ours <= 1.1 * plain + 1}


if __name__ == "__main__":
    main()
