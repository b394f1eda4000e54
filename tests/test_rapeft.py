"""The short API with adapters, and adapters on disk."""

from pathlib import Path

import pytest
import torch

from families.cases import logits, named
from raffm import RaPEFT, load_submodel, save_submodel
from raffm.errors import CheckpointError, LabelError, SpaceError
from raffm.models.label import named_tensors
from raffm.models.load import trainable
from raffm.models.lora import recipe_of

peft = pytest.importorskip("peft")


def elastic(name: str = "bert", **rest: object) -> RaPEFT:
    return RaPEFT(named(name).build(), rank=4, ranks=(4, 2, 1), **rest)  # type: ignore[arg-type]


def test_d_ra11_the_published_names_give_real_submodels_with_their_adapters() -> None:
    """Published: the path raises a NameError."""
    made = elastic()
    inputs = named("bert").inputs(made.model)
    for module, params, config in (made.random_peft_model(seed=1), made.smallest_peft_model()):
        assert params == sum(parameter.numel() for parameter in module.parameters()) < made.total_params
        assert {size for group, size in config.items() if group.endswith(".rank")} <= {1, 2, 4}
        again, same = made.resource_aware_peft_model(config)
        assert same == params
        assert torch.equal(logits(again.eval(), inputs), logits(module.eval(), inputs))
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        assert trained == {name for name, _ in module.named_parameters() if ".lora_" in name or name.startswith("classifier")}
    assert made.trained_params < made.total_params / 2


def test_clients_of_all_ranks_are_averaged_and_frozen_weights_stay() -> None:
    made = elastic()
    before = {name: tensor.detach().clone() for name, tensor in named_tensors(made.model)[0].items()}
    locals_ = [made.random_peft_model(seed=seed)[0] for seed in range(3)]
    with torch.no_grad():
        for place, module in enumerate(locals_):
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.add_(place + 1.0)
    made.aggregate(locals_)
    for name, tensor in named_tensors(made.model)[0].items():
        moved = (tensor - before[name]).abs()
        if made.layout.kind(name) == "frozen":
            assert not moved.any()
        elif name.startswith("classifier"):
            assert torch.allclose(moved, torch.full_like(moved, 2.0), atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "vit", "gpt2"])
def test_a_submodel_with_adapters_survives_a_file(name: str, tmp_path: Path) -> None:
    made = elastic(name)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    module, _, _ = made.random_peft_model(seed=2)
    save_submodel(module, tmp_path / "small")
    again = load_submodel(tmp_path / "small")
    inputs = named(name).inputs(made.model)
    assert torch.equal(logits(again, inputs), logits(module.eval(), inputs))
    assert [name for name, each in again.named_parameters() if each.requires_grad] == [
        name for name, each in module.named_parameters() if each.requires_grad
    ]
    assert recipe_of(again) == recipe_of(made.model)


def test_a_checkpoint_brings_adapters_back(tmp_path: Path) -> None:
    made, other = elastic(), elastic()
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    made.save_ckpt(tmp_path / "saved")
    other.load_ckpt(tmp_path / "saved")
    inputs = named("bert").inputs(made.model)
    assert torch.equal(logits(other.model.eval(), inputs), logits(made.model.eval(), inputs))
    with pytest.raises(CheckpointError, match="holds adapters beside its weights"):
        trainable(str(tmp_path / "saved"), "text", 5)


def test_a_model_that_peft_made_is_taken_as_it_is() -> None:
    wrapped = peft.get_peft_model(named("bert").build(), peft.LoraConfig(r=3, lora_alpha=6, target_modules=["query"]))
    made = RaPEFT(wrapped, ranks=(3, 1))
    assert made.model is wrapped.get_base_model()
    assert {made.layout.sizes[name] for name in made.layout.groups if name.endswith(".rank")} == {3}


def test_ranks_that_there_are_not_are_refused() -> None:
    for wrong in ((8,), (4, 0), ()):
        with pytest.raises(SpaceError):
            RaPEFT(named("bert").build(), rank=4, ranks=wrong)
    mixed = named("bert").build()
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], rank_pattern={"value": 3})
    peft.inject_adapter_in_model(config, mixed)
    with pytest.raises(LabelError, match="different ranks or scales"):
        recipe_of(mixed)
