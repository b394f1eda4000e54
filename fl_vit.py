"""Federated training of vision transformers with the flags of the published RaFFM script.

python fl_vit.py --method raffm --spp --model vit --save_dir log/vit --dataset cifar10 --num_clients 100 --lr 3e-5

Without `--fleet`, submodels are drawn as published: the first client of a round trains the full model, the second the
smallest, all others a random one. With `--fleet` they are fitted to the clients' devices.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raffm.cli.show import errors_in_one_line, quiet
from raffm.cli.train import run_settings
from raffm.settings import Settings, read_settings

MODELS = {
    "vit": "google/vit-base-patch16-224-in21k",
    "vit-large": "google/vit-large-patch16-224-in21k",
    "resnet": "microsoft/resnet-50",
}


def arguments(about: str, **defaults: str) -> argparse.Namespace:
    """The published flags, and a few of our own at the end."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="raffm", help="raffm, vanilla (FedAvg), or another method of ours")
    parser.add_argument("--spp", action="store_true", help="rank parameters by salience in every round")
    parser.add_argument("--model", default="vit", help="a short name, a folder, or a Hugging Face name")
    parser.add_argument("--save_dir", default="log_vit", help="where checkpoints, logs and results go")
    parser.add_argument("--resume_ckpt", help="go on with the run in this folder")
    parser.add_argument("--dataset", default="cifar100", help="cifar10, sst2, ..., a folder, or a Hugging Face name")
    parser.add_argument("--k-shot", type=int, help="give every client so many examples of each class")
    parser.add_argument(
        "--num_clients", type=int, default=100, help="how many clients there are; a tenth takes part in a round"
    )
    parser.add_argument("--lr", type=float, default=5e-5, help="learning rate at the beginning")
    parser.add_argument("--step_size", type=int, default=5, help="rounds after which the rate falls by 2 %%")
    parser.add_argument("--num_local_epochs", type=int, default=5, help="epochs of a client in a round")
    parser.add_argument("--num_rounds", type=int, default=100, help="how many rounds")
    parser.add_argument("--batch_size", type=int, default=64, help="examples in a step")
    parser.add_argument("--peft", action="store_true", help="train adapters alone: LoRA of rank 16 on queries, keys and values")
    parser.add_argument("--fleet", help="devices by size and share, as in '1:20, 1/2:40, 1/4:40'; fits submodels to them")
    parser.add_argument(
        "--image_size", type=int, default=0, help="resize images to this side; needed where they differ in size"
    )
    parser.add_argument("--seed", type=int, default=123, help="the seed of every random choice")
    parser.add_argument("--backend", default="serial", help="serial or pooled")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.set_defaults(**defaults)
    return parser.parse_args()


PEFT = {"rank": 16, "alpha": 16.0, "dropout": 0.1}
"""The adapters of the published script."""


def settings_of(given: argparse.Namespace, models: Mapping[str, str] = MODELS) -> Settings:
    """The same run in our own words."""
    method: dict[str, Any] = {"name": "fedavg" if given.method == "vanilla" else given.method}
    if given.method == "raffm":
        method["sizes"] = "fitted" if given.fleet else "sandwich"
        method["metric"] = "l1_norm" if given.spp else "none"
    split: dict[str, Any] = {"split": "iid"} if given.k_shot is None else {"split": "k-shot", "k": given.k_shot}
    return read_settings(
        {
            "method": method,
            "rounds": given.num_rounds,
            "seed": given.seed,
            "model": {"name": models.get(given.model, given.model)},
            "lora": PEFT if given.peft else {},
            "data": {
                "source": given.dataset,
                "clients": given.num_clients,
                "validation": 0.2,
                "image_size": given.image_size,
                **split,
            },
            "fleet": {"tiers": given.fleet or "full"},
            "local": {
                "optimizer": "adamw",
                "lr": given.lr,
                "batch": given.batch_size,
                "epochs": given.num_local_epochs,
                "schedule": "linear",
                "decay": 0.98,
                "decay_every": given.step_size,
            },
            "evaluate": {"sizes": [] if given.fleet else [1, 0.75, 0.5]},
            "backend": {"name": given.backend, "device": given.device},
        }
    )


def run(given: argparse.Namespace, models: Mapping[str, str] = MODELS) -> None:
    """Train as the flags say."""
    quiet()
    with errors_in_one_line():
        folder = given.resume_ckpt or given.save_dir
        run_settings(settings_of(given, models), Path(folder), resume=given.resume_ckpt is not None, tensorboard=True)


if __name__ == "__main__":
    run(arguments(str(__doc__)))
