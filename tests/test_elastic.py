"""The short API, on tiny models."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from families.cases import Case, logits, named
from raffm.devices.balance import Widths
from raffm.devices.budget import Budget
from raffm.elastic import RaFFM
from raffm.errors import BudgetError, CheckpointError, SpaceError, UpdateError
from raffm.models.label import named_tensors
from raffm.models.labelled import Labelled
from raffm.models.load import tiny
from raffm.models.salience import l1_norm, l2_norm

VIT, BERT, RESNET = named("vit"), named("bert"), named("resnet-cifar")
each_case = pytest.mark.parametrize(
    "case", [VIT, BERT, named("resnet"), RESNET, *map(named, ("t5", "llama", "sam"))], ids=lambda case: case.name
)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def changed(model: nn.Module, by: float = 0.5) -> nn.Module:
    """The same model after a training in which every weight grew by a constant."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)
    return model


def state(elastic: RaFFM) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in named_tensors(elastic.model)[0].items()}


# -- submodels -----------------------------------------------------------------------------------------------------


@each_case
def test_total_params_are_those_of_the_model(case: Case) -> None:
    model = case.build()
    assert RaFFM(model).total_params == count(model)


@each_case
def test_a_config_makes_the_same_submodel_again(case: Case) -> None:
    elastic = RaFFM(case.build())
    small, params, config = elastic.random_resource_aware_model(seed=3)
    again, params_again = elastic.resource_aware_model(json.loads(json.dumps(config)))
    inputs = case.inputs(elastic.model)
    assert params == params_again == count(small)
    assert torch.equal(logits(small, inputs), logits(again, inputs))


def test_the_same_seed_draws_the_same_submodel_and_another_seed_another() -> None:
    elastic = RaFFM(VIT.build())
    configs = [elastic.random_resource_aware_model(seed=seed)[2] for seed in (1, 2, 1)]
    assert configs[0] == configs[2] != configs[1]


def test_submodels_drawn_without_a_seed_differ_and_the_series_repeats() -> None:
    first, second = RaFFM(VIT.build()), RaFFM(VIT.build())
    series = [first.random_resource_aware_model()[2] for _ in range(5)]
    assert series == [second.random_resource_aware_model()[2] for _ in range(5)]
    assert len({json.dumps(config) for config in series}) == 5


def test_the_same_seed_draws_the_same_submodel_in_another_process() -> None:
    script = (
        "import json\nfrom raffm.elastic import RaFFM\nfrom raffm.models.load import tiny\n"
        "elastic = RaFFM(tiny('vit'))\nelastic.salient_parameter_prioritization()\n"
        "small, _, config = elastic.random_resource_aware_model(seed=9)\n"
        "print(json.dumps([config, small.raffm.selection.digest]))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    elastic = RaFFM(tiny("vit"))
    elastic.salient_parameter_prioritization()
    small, _, config = elastic.random_resource_aware_model(seed=9)
    assert json.loads(ran.stdout) == [config, small.raffm.selection.digest]


def test_groups_that_a_config_does_not_name_are_whole() -> None:
    elastic = RaFFM(VIT.build())
    small, _ = elastic.resource_aware_model({"layers.1.ffn": 5})
    assert [layer.mlp.fc1.out_features for layer in small.vit.layers] == [24, 5, 24]
    assert small.vit.layers[1].attention.num_attention_heads == 4


def test_the_default_space_has_quarters_of_ffn_heads_and_head_dimensions() -> None:
    elastic = RaFFM(VIT.build(hidden_size=48, num_attention_heads=6, intermediate_size=30))
    assert elastic.space.sizes["layers.2.ffn"] == (30, 23, 15, 8)
    assert elastic.space.sizes["layers.0.heads"] == (6, 5, 3, 2)
    assert elastic.space.sizes["layers.0.qk"] == (8, 6, 4, 2)
    assert set(elastic.space.sizes) == {f"layers.{i}.{name}" for i in range(3) for name in ("ffn", "heads", "qk")}


def test_the_default_space_of_a_resnet_has_the_inner_channels_of_every_block() -> None:
    elastic = RaFFM(RESNET.build())
    assert set(elastic.space.sizes) == {f"stages.{s}.blocks.{b}.inner" for s, depth in ((0, 2), (1, 3)) for b in range(depth)}


@pytest.mark.parametrize("depth", [6, 12, 14, 24])
def test_smallest_and_largest_configs_cover_all_layers(depth: int) -> None:
    elastic = RaFFM(VIT.build(num_hidden_layers=depth))
    small, _, config = elastic.sample_smallest_model()
    assert [layer.mlp.fc1.out_features for layer in small.vit.layers] == [6] * depth
    assert [layer.attention.head_dim for layer in small.vit.layers] == [1] * depth
    assert len(config) == 3 * depth
    full, params = elastic.resource_aware_model(elastic.space.largest())
    assert params == elastic.total_params == count(full)


def test_sampling_is_uniform_over_the_space() -> None:
    elastic = RaFFM(VIT.build(), {"layers.0.ffn": [24, 18, 12, 6]})
    from raffm.seeds import generator

    draws = [elastic.space.draw(generator(0, "draw", place))["layers.0.ffn"] for place in range(10_000)]
    chi_square = sum((draws.count(size) - 2500) ** 2 / 2500 for size in (24, 18, 12, 6))
    assert chi_square < 16.3  # 99.9 % of a chi-square with three degrees of freedom
    assert min(draws) == 6


# -- spaces and configs --------------------------------------------------------------------------------------------

PUBLISHED = {"atten_out_space": [16, 12, 8], "inter_hidden_space": [24, 16], "residual_hidden_space": [16, 8]}


def test_a_published_space_cuts_within_every_head() -> None:
    elastic = RaFFM(VIT.build(), PUBLISHED)
    assert elastic.space.sizes["layers.1.qk"] == (4, 3, 2)
    small, _, config = elastic.sample_smallest_model()
    assert config["layer_1"] == {"atten_out": 8, "inter_hidden": 16, "residual_hidden": 8}
    attention = small.vit.layers[0].attention
    assert (attention.num_attention_heads, attention.head_dim, attention.q_proj.weight.shape) == (4, 2, (8, 8))
    again, params = elastic.resource_aware_model(config)
    assert params == count(small) == count(again)


def test_a_published_space_can_cut_whole_heads() -> None:
    elastic = RaFFM(VIT.build(), PUBLISHED, by="heads")
    small, _, config = elastic.sample_smallest_model()
    assert config["layer_3"]["atten_out"] == 8
    assert (small.vit.layers[2].attention.num_attention_heads, small.vit.layers[2].attention.head_dim) == (2, 4)


def test_an_elastic_config_in_the_models_config_is_the_space_and_an_argument_beats_it() -> None:
    model = VIT.build()
    model.config.elastic_config = PUBLISHED
    assert RaFFM(model).space.sizes["layers.0.ffn"] == (24, 16)
    assert RaFFM(model, {"layers.*.ffn": [24, 3]}).space.sizes["layers.0.ffn"] == (24, 3)


def test_a_space_may_be_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "space.json"
    path.write_text(json.dumps({"layers.*.ffn": [24, 12]}))
    assert RaFFM(VIT.build(), path).space.sizes["layers.2.ffn"] == (24, 12)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({"layers.*.ffn": [24, 0]}, ["layers.0.ffn", "0", "Drop"]),
        ({"layers.*.ffn": [25]}, ["25", "24"]),
        ({"layers.*.ffn": []}, ["list of sizes"]),
        ({"layers.*.ffn": [1.5]}, ["1.5", "integers"]),
        ({"layers.*.fnn": [12]}, ["layers.*.fnn", "layers.0.ffn"]),
        ({"classes": [2]}, ["classes", "pinned"]),
        ({"atten_out_space": [16, 0]}, ["atten_out_space", "0", "Drop"]),
        ({"atten_out_space": [10]}, ["10", "4", "divide"]),
        ({"atten_in_space": [16]}, ["atten_in_space", "atten_out_space"]),
        ({}, ["dict"]),
        ("nowhere.json", ["nowhere.json"]),
    ],
)
def test_a_senseless_space_is_refused(space: object, words: list[str]) -> None:
    with pytest.raises(SpaceError) as caught:
        RaFFM(VIT.build(), space)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"layers.7.ffn": 12}, ["layers.7.ffn"]),
        ({"layers.0.ffn": 0}, ["layers.0.ffn", "0"]),
        ({"layers.0.heads": 0}, ["layers.0.heads"]),
        ({"layers.0.ffn": 100}, ["100", "24"]),
        ({"layers.0.qk": 2, "layers.0.vo": 3}, ["layers.0.vo = layers.0.qk", "3 = 2"]),
        ({"layer_9": {"atten_out": 8}}, ["layer_9"]),
        ({"layer_1": {"attention": 8}}, ["attention", "atten_out"]),
        ({"layer_1": {"atten_out": 9}}, ["9", "divide"]),
        ({"layer_1": {"residual_hidden": 8}, "layer_2": {"residual_hidden": 16}}, ["residual", "8"]),
    ],
)
def test_a_senseless_config_is_refused(config: dict[str, object], words: list[str]) -> None:
    with pytest.raises(SpaceError) as caught:
        RaFFM(VIT.build()).resource_aware_model(config)
    assert all(word in str(caught.value) for word in words), caught.value


# -- salience ------------------------------------------------------------------------------------------------------


def test_salience_follows_the_published_rule_inside_every_head() -> None:
    elastic = RaFFM(BERT.build())
    elastic.salient_parameter_prioritization()
    attention = elastic.model.bert.encoder.layer[1].attention.self
    rows = [projection.weight.view(4, 4, 16).abs().sum(-1) for projection in (attention.query, attention.key)]
    score = (rows[0] + rows[1]) / 2
    assert torch.equal(elastic.ranking.order["layers.1.qk"], score.argsort(dim=-1, descending=True, stable=True))
    small, _ = elastic.resource_aware_model({"layers.1.qk": 2})
    best = score.topk(2).indices.sort().values + torch.arange(4)[:, None] * 4
    assert torch.equal(small.bert.encoder.layer[1].attention.self.query.weight, attention.query.weight[best.flatten()])


def test_ffn_neurons_are_ranked_by_incoming_times_outgoing_norm() -> None:
    elastic = RaFFM(VIT.build())
    elastic.salient_parameter_prioritization(l2_norm)
    mlp = elastic.model.vit.layers[2].mlp
    score = mlp.fc1.weight.norm(dim=1) * mlp.fc2.weight.norm(dim=0)
    assert torch.allclose(elastic.ranking.scores["layers.2.ffn"], score, rtol=1e-5)
    small, _ = elastic.resource_aware_model({"layers.2.ffn": 9})
    assert torch.equal(small.vit.layers[2].mlp.fc1.weight, mlp.fc1.weight[score.topk(9).indices.sort().values])


@each_case
def test_permuting_the_weights_leaves_outputs_alone_and_submodels_keep_their_function(case: Case) -> None:
    elastic = RaFFM(case.build())
    elastic.salient_parameter_prioritization()
    inputs = case.inputs(elastic.model)
    before, (small, _, config) = logits(elastic.model, inputs), elastic.sample_smallest_model()
    elastic.permute()
    assert float((logits(elastic.model, inputs) - before).abs().max() / before.abs().max()) < 1e-5
    assert not torch.equal(state(elastic)[elastic.layout.uses(next(iter(elastic.space.sizes)))[0][0]], torch.zeros(1))
    prefix, _ = elastic.resource_aware_model(config)
    expected = logits(small, inputs)
    assert float((logits(prefix, inputs) - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("metric", ["taylor", "fisher"])
def test_gradient_metrics_rank_by_the_gradients_of_batches(metric: str) -> None:
    elastic = RaFFM(VIT.build())
    generator = torch.Generator().manual_seed(0)
    batches = [
        {"pixel_values": torch.randn(4, 3, 8, 8, generator=generator), "labels": torch.tensor([0, 1, 2, 3])} for _ in range(2)
    ]
    elastic.salient_parameter_prioritization(metric, batches=batches)
    expected = torch.zeros(24)
    for batch in batches:
        loss = elastic.model(**batch).loss
        first, bias, second = elastic.model.vit.layers[0].mlp.fc1.weight, elastic.model.vit.layers[0].mlp.fc1.bias, None
        second = elastic.model.vit.layers[0].mlp.fc2.weight
        for weight, axes in ((first, 1), (bias, None), (second, 0)):
            (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
            effect = (weight * gradient).abs() if metric == "taylor" else (weight * gradient).square()
            expected += (effect if axes is None else effect.sum(axes)).detach()
    assert torch.allclose(elastic.ranking.scores["layers.0.ffn"], expected, rtol=1e-4)
    assert all(parameter.grad is None for parameter in elastic.model.parameters())


def test_a_gradient_metric_without_batches_is_refused() -> None:
    with pytest.raises(SpaceError, match="batches"):
        RaFFM(VIT.build()).salient_parameter_prioritization("fisher")


def test_a_metric_may_be_a_function_of_group_and_tensors() -> None:
    def smallest_last_index(group: object, uses: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
        tensor, axis = uses[0]
        return torch.arange(tensor.shape[axis]).float()

    elastic = RaFFM(VIT.build())
    elastic.salient_parameter_prioritization(smallest_last_index)
    assert elastic.ranking.order["layers.0.ffn"].tolist() == list(range(24))[::-1]
    assert elastic.ranking.order["layers.0.qk"].tolist() == [[3, 2, 1, 0]] * 4


@pytest.mark.parametrize(
    "wrong", ["l3_norm", lambda group, uses: torch.ones(3), lambda group, uses: torch.ones(group.size) / 0]
)
def test_a_senseless_metric_is_refused(wrong: object) -> None:
    elastic = RaFFM(VIT.build())
    with pytest.raises(SpaceError):
        elastic.salient_parameter_prioritization(wrong)  # type: ignore[arg-type]
    assert not elastic.ranking.order


def test_metrics_go_by_name_or_by_function() -> None:
    first, second = RaFFM(VIT.build()), RaFFM(VIT.build())
    first.salient_parameter_prioritization(l1_norm)
    second.salient_parameter_prioritization("l1_norm")
    assert all(torch.equal(first.ranking.order[name], second.ranking.order[name]) for name in first.ranking.order)


# -- fit -----------------------------------------------------------------------------------------------------------


@each_case
def test_a_fitted_submodel_keeps_its_budget_and_wastes_no_single_step(case: Case) -> None:
    elastic = RaFFM(case.build())
    elastic.salient_parameter_prioritization()
    budget = int(0.7 * elastic.total_params)
    small, params, config = elastic.fit(max_params=budget)
    assert count(small) == params <= budget
    for group, sizes in elastic.space.sizes.items():
        larger = [size for size in sizes if size > config[group]]
        if larger:
            _, more = elastic.resource_aware_model({**config, group: min(larger)})
            assert more > budget


def test_a_budget_that_holds_everything_gives_the_full_model() -> None:
    elastic = RaFFM(VIT.build())
    assert elastic.fit(max_params=elastic.total_params)[1] == elastic.total_params


def test_a_budget_below_the_smallest_submodel_is_refused() -> None:
    elastic = RaFFM(VIT.build())
    _, least, _ = elastic.sample_smallest_model()
    with pytest.raises(BudgetError, match=f"{least}|{least:,}"):
        elastic.fit(max_params=least - 1)
    assert elastic.fit(max_params=least)[1] == least


def test_all_given_limits_hold_together() -> None:
    elastic = RaFFM(BERT.build())
    bytes_of_full = 4 * elastic.total_params
    _, params, _ = elastic.fit(max_bytes=int(0.8 * bytes_of_full), max_params=int(0.9 * elastic.total_params))
    assert 4 * params <= 0.8 * bytes_of_full


# -- aggregation ---------------------------------------------------------------------------------------------------


@each_case
def test_unchanged_clients_of_mixed_sizes_change_nothing(case: Case) -> None:
    elastic = RaFFM(case.build())
    elastic.salient_parameter_prioritization()
    before = state(elastic)
    clients = [elastic.random_resource_aware_model()[0] for _ in range(4)] + [elastic.sample_smallest_model()[0]]
    elastic.aggregate(clients, weights=[1, 20, 3, 0.5, 7])
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(elastic).items())


def test_elements_that_nobody_held_keep_their_value_and_held_ones_take_the_counted_mean() -> None:
    elastic = RaFFM(VIT.build())
    before = elastic.model.vit.layers[0].mlp.fc1.weight.detach().clone()
    small, _ = elastic.resource_aware_model({"layers.0.ffn": 6})
    middle, _ = elastic.resource_aware_model({"layers.0.ffn": 12})
    elastic.aggregate([changed(small, 1.0), changed(middle, 3.0)], weights=[3, 1])
    after = elastic.model.vit.layers[0].mlp.fc1.weight
    assert torch.allclose(after[:6], before[:6] + 1.5, atol=1e-6)
    assert torch.allclose(after[6:12], before[6:12] + 3.0, atol=1e-6)
    assert torch.equal(after[12:], before[12:])


def test_a_deep_copy_of_the_model_counts_as_the_full_model() -> None:
    elastic = RaFFM(VIT.build())
    before = state(elastic)
    elastic.aggregate([changed(copy.deepcopy(elastic.model), 1.0), changed(copy.deepcopy(elastic.model), 2.0)])
    assert all(torch.allclose(tensor, before[name] + 1.5, atol=1e-6) for name, tensor in state(elastic).items())


def test_a_plain_smaller_module_needs_its_config() -> None:
    elastic = RaFFM(VIT.build())
    small, _, config = elastic.sample_smallest_model()
    del small.raffm
    before = state(elastic)
    with pytest.raises(UpdateError, match=r"local model 1.*configs"):
        elastic.aggregate([copy.deepcopy(elastic.model), small])
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(elastic).items())
    elastic.aggregate([changed(small, 1.0)], configs=[config])
    assert not torch.equal(state(elastic)["classifier.weight"], before["classifier.weight"])


def test_a_submodel_of_an_earlier_round_is_refused() -> None:
    elastic = RaFFM(VIT.build())
    late, _, _ = elastic.sample_smallest_model()
    elastic.aggregate([copy.deepcopy(elastic.model)])
    with pytest.raises(UpdateError, match=r"version 0.*version 1"):
        elastic.aggregate([late])


def test_a_submodel_of_another_model_is_refused() -> None:
    stranger, _, _ = RaFFM(VIT.build(intermediate_size=20)).sample_smallest_model()
    with pytest.raises(UpdateError, match="another model"):
        RaFFM(VIT.build()).aggregate([stranger])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_client_that_sends_no_numbers_is_refused_by_its_place_and_nothing_changes(wrong: float) -> None:
    elastic = RaFFM(VIT.build())
    before = state(elastic)
    good, bad = elastic.sample_smallest_model()[0], elastic.sample_smallest_model()[0]
    with torch.no_grad():
        bad.vit.layers[1].mlp.fc1.weight[0, 0] = wrong
    with pytest.raises(UpdateError, match=r"client 1.*fc1.weight"):
        elastic.aggregate([changed(good), bad])
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(elastic).items())
    assert elastic.version == 0


def test_a_narrow_model_keeps_small_changes_in_float32_on_the_server() -> None:
    elastic = RaFFM(VIT.build().to(torch.bfloat16))
    with torch.no_grad():
        for parameter in elastic.model.parameters():
            parameter.fill_(1.0)
    for _ in range(4):  # bfloat16 cannot hold 1 + 0.0019, but four such steps it can
        client = copy.deepcopy(elastic.model)
        with torch.no_grad():
            for parameter in client.parameters():
                parameter.add_(1 / 128)
        elastic.aggregate([client] + [copy.deepcopy(elastic.model)] * 3)
    assert elastic.model.dtype == torch.bfloat16
    assert elastic.model.classifier.bias[0].item() == 1.0078125


def test_batch_norm_statistics_and_counters_follow_their_rule() -> None:
    elastic = RaFFM(named("resnet").build())
    clients = [elastic.resource_aware_model({})[0] for _ in range(2)]
    norms = [client.resnet.embedder.embedder.normalization for client in clients]
    for norm, (mean, steps) in zip(norms, ((1.0, 5), (3.0, 9)), strict=True):
        norm.running_mean.fill_(mean)
        norm.num_batches_tracked.fill_(steps)
    elastic.aggregate(clients, weights=[1, 3])
    after = elastic.model.resnet.embedder.embedder.normalization
    assert torch.allclose(after.running_mean, torch.full_like(after.running_mean, 2.5))
    assert int(after.num_batches_tracked) == 9


def test_tied_weights_stay_tied_after_aggregation() -> None:
    elastic = RaFFM(named("bert-tied-head").build())
    elastic.aggregate([changed(elastic.random_resource_aware_model()[0])])
    assert elastic.model.cls.predictions.decoder.weight is elastic.model.bert.embeddings.word_embeddings.weight


def test_weights_and_models_must_pair_up() -> None:
    elastic = RaFFM(VIT.build())
    with pytest.raises(UpdateError, match="1 models came with 2 weights"):
        elastic.aggregate([copy.deepcopy(elastic.model)], weights=[1, 2])


# -- checkpoints ---------------------------------------------------------------------------------------------------


@each_case
def test_a_checkpoint_restores_weights_space_and_ranking(case: Case, tmp_path: Path) -> None:
    elastic = RaFFM(case.build(), {next(iter(RaFFM(case.build()).space.sizes)): [4, 2]})
    elastic.salient_parameter_prioritization()
    elastic.aggregate([changed(elastic.random_resource_aware_model()[0])])
    elastic.save_ckpt(tmp_path / "ckpt")
    other = RaFFM(case.build(seed=5))
    other.load_ckpt(tmp_path / "ckpt")
    assert all(torch.equal(tensor, state(elastic)[name]) for name, tensor in state(other).items())
    assert other.space.sizes == elastic.space.sizes
    assert other.version == elastic.version
    assert all(torch.equal(other.ranking.order[name], order) for name, order in elastic.ranking.order.items())


def test_a_checkpoint_is_an_ordinary_pretrained_folder(tmp_path: Path) -> None:
    from transformers import ViTForImageClassification

    elastic = RaFFM(VIT.build())
    elastic.save_ckpt(tmp_path)
    plain = ViTForImageClassification.from_pretrained(tmp_path)
    inputs = VIT.inputs(elastic.model)
    assert torch.equal(logits(plain, inputs), logits(elastic.model, inputs))
    assert RaFFM(plain).space.sizes == elastic.space.sizes


def test_an_old_checkpoint_without_safetensors_loads_as_bare_tensors(tmp_path: Path) -> None:
    elastic = RaFFM(VIT.build())
    elastic.save_ckpt(tmp_path)
    from safetensors.torch import load_file

    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    other = RaFFM(VIT.build(seed=4))
    other.load_ckpt(tmp_path)
    assert all(torch.equal(tensor, state(elastic)[name]) for name, tensor in state(other).items())


def _spoiled(folder: Path, how: str) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    if how == "missing":
        del weights["classifier.bias"]
    elif how == "extra":
        weights["classifier.spare"] = torch.zeros(2)
    elif how == "shape":
        weights["classifier.bias"] = torch.zeros(9)
    elif how == "dtype":
        weights["classifier.bias"] = weights["classifier.bias"].half()
    if how == "truncated":
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    elif how == "gone":
        (folder / "model.safetensors").unlink()
    elif how == "json":
        (folder / "server.json").write_text("{")
    else:
        save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", ["classifier.bias"]),
        ("extra", ["classifier.spare"]),
        ("shape", ["classifier.bias", "9"]),
        ("dtype", ["classifier.bias", "float16", "float32"]),
        ("truncated", ["model.safetensors", "cut short"]),
        ("gone", ["model.safetensors"]),
        ("json", ["server.json"]),
    ],
)
def test_a_spoiled_checkpoint_is_refused_and_changes_nothing(how: str, words: list[str], tmp_path: Path) -> None:
    RaFFM(VIT.build()).save_ckpt(tmp_path)
    _spoiled(tmp_path, how)
    other = RaFFM(VIT.build(seed=5))
    before = state(other)
    with pytest.raises(CheckpointError) as caught:
        other.load_ckpt(tmp_path)
    assert all(word in str(caught.value) for word in words), caught.value
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(other).items())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    RaFFM(VIT.build(intermediate_size=20)).save_ckpt(tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        RaFFM(VIT.build()).load_ckpt(tmp_path)


def test_saving_again_replaces_a_checkpoint_and_keeps_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    elastic = RaFFM(VIT.build())
    elastic.save_ckpt(folder)
    (folder / "notes.txt").write_text("mine")
    elastic.aggregate([changed(copy.deepcopy(elastic.model))])
    elastic.save_ckpt(folder)
    assert (folder / "notes.txt").read_text() == "mine"
    other = RaFFM(VIT.build(seed=5))
    other.load_ckpt(folder)
    assert other.version == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


def test_a_balanced_submodel_fits_and_spends_alike_on_every_width() -> None:
    elastic = RaFFM(tiny("vit"))
    limit = int(0.7 * elastic.total_params)
    submodel, params, config = elastic.fit(max_params=limit, objective="balanced")
    assert params == sum(parameter.numel() for parameter in submodel.parameters()) <= limit
    widths = Widths(Labelled.of(elastic.model))
    assert config == widths.sizes(widths.balanced(Budget(max_params=limit)))
    with pytest.raises(SpaceError, match='"score" or "balanced"'):
        elastic.fit(max_params=limit, objective="largest")  # type: ignore[arg-type]
