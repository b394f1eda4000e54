import pytest
import torch
from torch import Tensor

from raffm import RaFFM
from raffm.errors import SpaceError
from raffm.models.resnet import ResNet, ResNetConfig, StaticBatchNorm, recalibrate


def small(**changes: object) -> ResNet:
    torch.manual_seed(0)
    return ResNet(ResNetConfig(**{"widths": (8, 16), "depths": (1, 2), "image_size": 8, **changes}))


def batches(count: int = 3) -> list[Tensor]:
    return list(torch.randn(count, 10, 3, 8, 8, generator=torch.Generator().manual_seed(1)))


def test_static_batch_norm_uses_batch_statistics_in_training_and_leaves_its_own_alone() -> None:
    norm = StaticBatchNorm(4).train()
    given = torch.randn(6, 4, 3, 3) * 5 + 2
    made = norm(given)
    assert torch.allclose(made.mean(dim=(0, 2, 3)), torch.zeros(4), atol=1e-5)
    assert torch.equal(norm.running_mean, torch.zeros(4))
    assert int(norm.num_batches_tracked) == 0


def test_recalibration_fills_the_mean_of_all_batches_statistics() -> None:
    model = small().train()
    seen = batches()
    recalibrate(model, seen)
    stem = torch.stack([model.stem.conv(batch).mean(dim=(0, 2, 3)) for batch in seen]).mean(0)
    assert torch.allclose(model.stem.norm.running_mean, stem, atol=1e-6)
    assert model.training
    assert type(model.stem.norm) is StaticBatchNorm
    assert model.stem.norm.momentum == 0.1


def test_recalibration_changes_no_weight_and_makes_evaluation_independent_of_the_batch() -> None:
    model = small()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    recalibrate(model, batches())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    images = batches(1)[0]
    together = model.eval()(images).logits
    alone = torch.cat([model(image[None]).logits for image in images])
    assert torch.allclose(together, alone, atol=1e-5)


def test_a_submodel_has_statistics_of_its_own() -> None:
    elastic = RaFFM(small())
    part, _, _ = elastic.sample_smallest_model()
    recalibrate(part, batches())
    assert torch.equal(elastic.model.stem.norm.running_mean, torch.zeros(8))
    assert part.stages[0][0].norm1.num_features == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"norm": "group", "group_width": 3}, ["8", "3"]), ({"depths": (1,)}, ["depths"]), ({"widths": (8, 0)}, ["at least 1"])],
)
def test_a_shape_that_cannot_be_built_is_refused(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(SpaceError) as caught:
        small(**changes)
    assert all(word in str(caught.value) for word in words)
