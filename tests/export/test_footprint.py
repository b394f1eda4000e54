from pathlib import Path

import pytest
import torch

from raffm.algebra.selection import Selection
from raffm.errors import ExportError
from raffm.export.footprint import footprint, footprint_of
from raffm.models.labelled import Labelled
from raffm.models.load import trainable
from raffm.models.surgery import submodel


@pytest.mark.slow
def test_a_larger_model_takes_more_memory() -> None:
    """A large margin: what libraries load on the way is measured, too."""
    inputs = {"pixel_values": torch.zeros(1, 3, 32, 32)}
    servers = [
        Labelled.of(trainable("resnet18", "image", 10, (3, 32, 32), changes=changes))
        for changes in ({"widths": (8, 16), "depths": (1, 1)}, {})
    ]
    small, large = (footprint_of(submodel(server.model, server.layout, Selection()), inputs) for server in servers)
    assert large.peak > small.peak + 30e6


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"nothing")
    with pytest.raises(ExportError, match=r"model\.onnx could not be run in a process of its own"):
        footprint("onnx", tmp_path / "model.onnx", {"x": torch.zeros(1)})
