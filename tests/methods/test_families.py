"""Every method trains, merges and serves every family that can classify."""

import pytest
import torch
from torch import Tensor

from methods.runs import ALL, CLASSES, NAMES, drawn, federation, plan_of, run, same_bits, snapshot
from raffm.data.examples import Dataset, Examples, Federation
from raffm.data.task import ImageClassification, TextClassification
from raffm.errors import CheckpointError, RunError
from raffm.methods import method_of
from raffm.methods.method import Device
from raffm.models.labelled import Labelled
from raffm.models.load import tiny, trainable

TEXT = ("roberta", "distilbert", "t5", "gpt2", "llama", "qwen2", "mistral")
END = 1


def texts(labels: Tensor, seed: int) -> Examples:
    """Random ids, an end-of-text token after each, padding behind it."""
    lengths = torch.randint(3, 9, (len(labels),), generator=drawn(seed + 1))
    ids = torch.randint(2, 50, (len(labels), 8), generator=drawn(seed))
    places = torch.arange(8)
    ids = torch.where(places < lengths[:, None] - 1, ids, 0).scatter(1, lengths[:, None] - 1, END)
    return Examples({"input_ids": ids, "lengths": lengths}, labels)


def data_of(family: str) -> Federation:
    if family == "deit":
        return federation("vit", [ALL, ALL * 2, ALL, ALL])
    made = federation("bert", [ALL, ALL * 2, ALL, ALL])
    train, test = texts(made.dataset.train.labels, 1), texts(made.dataset.test.labels, 3)
    return Federation(Dataset("random", train, test, made.dataset.classes, None, owners=None), made.split)


PAIRS = [
    (family, method)
    for family in ("deit", *TEXT)
    for method in NAMES
    if method != "scalefl" or family in ("deit", "roberta")  # the others have no early exits
]


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_a_round_of_every_method_on_every_family(family: str, method: str) -> None:
    kind = "image" if family == "deit" else "text"
    model = trainable(f"{family}:tiny", kind, CLASSES, (3, 8, 8) if kind == "image" else ())
    plan = plan_of(
        family,
        method,
        "1, 1/3",
        data=data_of(family),
        server=Labelled.of(model),
        task=ImageClassification() if kind == "image" else TextClassification(),
    )
    before = snapshot(plan.server)
    results = run(plan)
    assert not results.rounds[0].refused
    assert any(not same_bits(before[name], tensor) for name, tensor in snapshot(plan.server).items())
    sizes = {size.name: size for size in results.sizes}
    assert (sizes["1"].fraction == 1) is (method != "smallest-for-all")
    assert sizes["1"].flops > 0
    assert all(size.fraction < 1 for name, size in sizes.items() if name != "1")
    assert set(results.evaluations[-1].sizes) == set(sizes)


@pytest.mark.parametrize("size", [0.03, 0.11, 0.3, 0.62])
@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
@pytest.mark.parametrize("family", ["llama", "t5", "gpt2", "sam"])
def test_widths_keep_their_ties_at_any_size(family: str, method: str, size: float) -> None:
    server = Labelled.of(tiny(family))
    chosen = method_of(method, masked_loss=False)
    (share,) = chosen.choose(server, 5, [Device(0, size)], 0)
    sizes = server.layout.sizes_of(share.selection)
    assert all(sizes[group] == server.layout.groups[group].size for group in server.layout.heads)
    assert sizes["residual"] < 16


def test_the_label_mask_needs_classes() -> None:
    with pytest.raises(RunError, match="masked_loss = false"):
        method_of("heterofl").refuse(Labelled.of(tiny("llama")), [Device(0, 0.5)])


def test_a_family_that_does_not_classify_says_so() -> None:
    with pytest.raises(CheckpointError, match="'sam' has no model that classifies images"):
        trainable("sam:tiny", "image", 5, (3, 32, 32))
