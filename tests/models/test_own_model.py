"""A user's own module with a table of its own: no config, no Hugging Face."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from raffm import RaFFM, inspect, load_submodel, save_submodel, verify
from raffm.errors import CheckpointError, LabelError, UnknownFamilyError
from raffm.models.table import read

TABLE = """
family = "mixer"

[groups]
classes = { pinned = true }
pixels = { pinned = true }

[tensors]
"first" = "pixels -> hidden"
"second" = "hidden -> classes"
"scale" = "hidden"

[inputs]
x = ["pixels = 6"]

[outputs]
output = "classes"
"""


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.scale)


def test_a_model_of_ones_own_is_labelled_proved_cut_and_merged(tmp_path: Path) -> None:
    path = tmp_path / "mixer.toml"
    path.write_text(TABLE)
    model = Mixer()
    assert verify(model, path).holds
    assert [(row.name, row.size, row.kind) for row in inspect(model, path).groups if row.kind == "free"] == [
        ("hidden", 8, "free")
    ]
    elastic = RaFFM(model, table=path)
    elastic.salient_parameter_prioritization()
    small, params, config = elastic.fit(max_params=50)
    assert config == {"hidden": 4}
    assert params == sum(parameter.numel() for parameter in small.parameters()) == 4 * 6 + 4 + 4 * 3 + 3 + 4
    elastic.aggregate([small])

    save_submodel(small, tmp_path / "small")
    x = torch.rand(2, 6)
    with pytest.raises(CheckpointError, match="model="):
        load_submodel(tmp_path / "small", path)
    assert torch.equal(load_submodel(tmp_path / "small", path, model=Mixer())(x), small(x))

    elastic.save_ckpt(tmp_path / "ckpt")
    other = RaFFM(Mixer(), table=path)
    other.load_ckpt(tmp_path / "ckpt")
    assert torch.equal(other.model(x), elastic.model(x))


def test_a_model_without_a_family_needs_a_table() -> None:
    with pytest.raises(UnknownFamilyError, match="table="):
        RaFFM(Mixer())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('"scale" = "hidden"\n', ""), ["scale", "(8,)", "no label"]),
        (("pixels -> hidden", "pixels -> hidden*2"), ["first.weight", "hidden*2"]),
        (("pixels -> hidden", "pixels -> (hidden"), ["bracket"]),
        (("[tensors]", "[tensor]"), ["tensor"]),
        (('family = "mixer"', ""), ["family"]),
        (("pinned = true", "pined = true"), ["pined"]),
    ],
)
def test_a_wrong_table_is_refused(change: tuple[str, str], words: list[str]) -> None:
    assert change[0] in TABLE
    with pytest.raises(LabelError) as caught:
        RaFFM(Mixer(), table=read(TABLE.replace(*change)))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_table_that_is_no_toml_is_refused() -> None:
    with pytest.raises(LabelError, match="TOML"):
        read("family = ")
