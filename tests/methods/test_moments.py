"""Statistics of batch norms from clients' moments are those of their data together."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from methods.runs import drawn
from raffm.models.load import tiny
from raffm.models.moments import Moments, batch_norms, calibrate, moments, pooled


class OneNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.norm(self.conv(pixel_values))


def runs(model: nn.Module, batches: list[Tensor]) -> object:
    for batch in batches:
        model(batch)
        yield


@settings(max_examples=15)
@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=5), batch=st.integers(1, 4), shift=st.floats(-5, 5))
def test_pooled_moments_are_the_statistics_of_the_concatenated_data(counts: list[int], batch: int, shift: float) -> None:
    """Invariant 17: clients of different sizes and means, in batches of any size; only sums reach `pooled`."""
    torch.manual_seed(0)
    model = OneNorm().eval()
    clients = [torch.randn(count, 3, 6, 6, generator=drawn(place)) + shift * place for place, count in enumerate(counts)]
    parts = [moments(model, runs(model, list(own.split(batch)))) for own in clients]
    together = pooled(parts)["norm"]
    values = model.conv(torch.cat(clients)).detach().transpose(0, 1).flatten(1).double()
    assert together.count == values.shape[1]
    assert torch.allclose(together.mean, values.mean(1), atol=1e-5, rtol=1e-5)
    assert torch.allclose(together.variance, values.var(1, correction=0), atol=1e-5, rtol=1e-5)
    calibrate(model, pooled(parts))
    assert torch.allclose(model.norm.running_mean, values.mean(1).float(), atol=1e-5, rtol=1e-5)
    assert torch.allclose(model.norm.running_var, values.var(1, correction=0).float(), atol=1e-5, rtol=1e-5)


def test_every_norm_of_a_deep_model_gets_the_statistics_of_all_it_saw() -> None:
    """Deeper norms see what earlier ones made of each batch by its own statistics: that is what is pooled."""
    model = tiny("raffm_resnet")
    clients = [torch.randn(count, 3, 16, 16, generator=drawn(count)) for count in (4, 7, 2)]
    seen: dict[str, list[Tensor]] = {}
    hooks = [
        norm.register_forward_pre_hook(lambda _, inputs, name=name: seen.setdefault(name, []).append(inputs[0]))
        for name, norm in batch_norms(model).items()
    ]
    together = pooled([moments(model, runs(model, [own])) for own in clients])
    for hook in hooks:
        hook.remove()
    assert set(together) == set(batch_norms(model))
    for name, parts in seen.items():
        values = torch.cat(parts).transpose(0, 1).flatten(1).double()
        assert torch.allclose(together[name].mean, values.mean(1), atol=1e-5)
        assert torch.allclose(together[name].variance, values.var(1, correction=0), atol=1e-5)


def test_one_clients_whole_batch_gives_evaluation_the_output_of_training() -> None:
    model = tiny("raffm_resnet")
    batch = torch.randn(6, 3, 16, 16, generator=drawn(0))
    calibrate(model, pooled([moments(model, runs(model, [batch]))]))
    with torch.no_grad():
        expected = model.train()(batch).logits
        assert torch.allclose(model.eval()(batch).logits, expected, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_looking_changes_nothing_in_the_module(training: bool) -> None:
    for model in (OneNorm(), tiny("raffm_resnet")):
        model.train(training)
        before = copy.deepcopy(model)
        moments(model, runs(model, [torch.randn(3, 3, 16, 16)]))
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before.state_dict()[name]), name
        for one, other in zip(model.modules(), before.modules(), strict=True):
            assert one.training == other.training
            assert getattr(one, "momentum", None) == getattr(other, "momentum", None)
            assert len(one._forward_pre_hooks) == 0


def test_pooling_is_given_sums_and_never_examples() -> None:
    """What a client sends is a count and two sums a channel, whatever its number of examples."""
    model = OneNorm()
    for count in (2, 50):
        (found,) = moments(model, runs(model, [torch.randn(count, 3, 6, 6)])).values()
        assert isinstance(found, Moments)
        assert (found.total.shape, found.squares.shape) == ((6,), (6,))


def test_a_channel_that_never_varies_has_variance_zero_and_not_less() -> None:
    values = torch.full((3,), 1e4 + 0.1, dtype=torch.float64)
    found = Moments(3.0, values.sum()[None], values.square().sum()[None])
    assert 0 <= float(found.variance) < 1e-5
