import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import random_selection
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

from devices.live import LiveBytes
from raffm.algebra.selection import Selection
from raffm.devices.cost import HELD_BACK, CostModel
from raffm.models.label import layout_of, table_of
from raffm.models.resnet import ResNet, ResNetConfig
from raffm.models.sample import sample_inputs
from raffm.models.surgery import submodel

OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
_TRANSFORMER = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384, "num_labels": 9}
MODELS = {
    "vit": lambda: ViTForImageClassification(ViTConfig(**_TRANSFORMER, image_size=64, patch_size=8)),
    "bert": lambda: BertForSequenceClassification(BertConfig(**_TRANSFORMER, vocab_size=2000, max_position_embeddings=64)),
    "resnet": lambda: ResNet(ResNetConfig(widths=(16, 32, 64), depths=(2, 2, 2))),
}


def live_peak(module, table, batch, optimizer):
    """The most bytes alive in two training steps."""
    optimizer = OPTIMIZERS[optimizer](module.train().parameters())
    meter = LiveBytes()
    meter.follow([*module.parameters(), *module.buffers()])
    with meter:
        inputs = sample_inputs(module, table, batch=batch, tokens=128)
        for _ in range(2):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(module(**inputs).logits, torch.zeros(batch, dtype=torch.int64))
            loss.backward()
            optimizer.step()
    return meter.peak


@pytest.mark.parametrize(
    ("name", "optimizer"), [("vit", "adamw"), ("bert", "sgd-momentum"), ("resnet", "adamw"), ("resnet", "sgd")]
)
def test_predicted_memory_is_near_the_bytes_that_a_real_step_has_alive(name, optimizer):
    model = MODELS[name]()
    cost = CostModel(model, layout_of(model), table_of(model), batch=8, optimizer=optimizer)
    for selection in [Selection(), *(random_selection(cost.layout, seed) for seed in range(3))]:
        module = submodel(model, cost.layout, selection)
        predicted = cost.memory(cost.layout.sizes_of(selection)) / HELD_BACK
        assert predicted == pytest.approx(live_peak(module, cost.table, 8, optimizer), rel=0.1)


def test_memory_counts_gradients_and_state_of_trained_parameters_alone():
    model = MODELS["vit"]()
    whole = CostModel(model, layout_of(model), table_of(model), batch=1, free=())
    before = whole.memory(whole.layout.sizes)
    for parameter in model.vit.parameters():
        parameter.requires_grad_(False)
    frozen = CostModel(model, whole.layout, whole.table, batch=1, free=())
    trunk = sum(parameter.nbytes for parameter in model.vit.parameters())
    assert frozen.memory(whole.layout.sizes) < before - 2 * trunk


def test_memory_grows_with_the_batch_by_the_activations_alone():
    model = MODELS["resnet"]()
    layout, table = layout_of(model), table_of(model)
    one, two, four = (CostModel(model, layout, table, batch=batch, free=()).memory(layout.sizes) for batch in (8, 16, 32))
    assert four - two == pytest.approx(2 * (two - one), rel=0.02)


def test_checkpointed_blocks_hold_less():
    model = MODELS["bert"]()
    layout, table = layout_of(model), table_of(model)
    plain = CostModel(model, layout, table, free=()).memory(layout.sizes)
    model.gradient_checkpointing_enable()
    model.train()
    assert CostModel(model, layout, table, free=()).memory(layout.sizes) < 0.7 * plain


REAL = {
    "vit": """
from transformers import ViTConfig, ViTForImageClassification
def build(width):
    shape = dict(hidden_size=width, num_hidden_layers=6, num_attention_heads=6, intermediate_size=4 * width)
    return ViTForImageClassification(ViTConfig(**shape, num_labels=10))
""",
    "bert": """
from transformers import BertConfig, BertForSequenceClassification
def build(width):
    shape = dict(hidden_size=width, num_hidden_layers=6, num_attention_heads=6, intermediate_size=4 * width)
    return BertForSequenceClassification(BertConfig(**shape, num_labels=10))
""",
    "resnet": """
from raffm.models.resnet import ResNet, ResNetConfig
def build(width):
    return ResNet(ResNetConfig(widths=tuple(width * times // 6 for times in (1, 2, 4, 8))))
""",
}
STEPS = """
import re, torch
from pathlib import Path
from raffm.devices.cost import CostModel
from raffm.models.label import layout_of, table_of
from raffm.models.sample import sample_inputs
from raffm.models.surgery import submodel
torch.set_num_threads(1)

def held(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def train(module, batch):
    optimizer = torch.optim.AdamW(module.train().parameters())
    inputs = sample_inputs(module, table_of(module), batch=batch, tokens=128)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(**inputs).logits, torch.zeros(batch, dtype=torch.int64)).backward()
        optimizer.step()

full = build(384)
layout = layout_of(full)
half = {group: -(-layout.sizes[group] // 2) for group in layout.free if group.endswith(("ffn", "qk", "vo", "inner"))}
selection = layout.select(half if IS_CUT else {})
predicted = CostModel(full, layout, table_of(full)).memory(layout.sizes_of(selection))
del full
train(build(48), 2)  # libraries take what they take once
before = held("VmRSS")
train(submodel(build(384), layout, selection), 16)
print(predicted, held("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of a process as Linux tells it")
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut in half"])
@pytest.mark.parametrize("name", REAL)
def test_predicted_memory_is_within_a_fifth_of_what_a_process_takes(name, is_cut):
    code = f"IS_CUT = {is_cut}\n{REAL[name]}\n{STEPS}"
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    predicted, measured = map(int, re.findall(r"^(\d+) (\d+)$", ran.stdout, re.MULTILINE)[-1])
    assert predicted == pytest.approx(measured, rel=0.2)
