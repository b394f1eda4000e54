"""`examples/segment_anything`, as its first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest
import torch

from raffm import load_submodel

SCRIPT = Path(__file__).parents[2] / "examples" / "segment_anything" / "sam.py"


@pytest.mark.slow
def test_a_tiny_sam_is_verified_cut_prompted_and_its_encoder_exported(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, SCRIPT, "--out", tmp_path], capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "permuted and cut: right" in ran.stdout
    module = load_submodel(tmp_path / "submodel")
    assert sum(parameter.numel() for parameter in module.parameters()) <= 0.6 * 10_690
    session = onnxruntime.InferenceSession(str(tmp_path / "encoder.onnx"), providers=["CPUExecutionProvider"])
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    said = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: pixels.numpy()})[0])
    with torch.no_grad():
        expected = module.vision_encoder(pixels).last_hidden_state  # type: ignore[operator]
    assert float(expected.abs().max()) > 0.1
    torch.testing.assert_close(said, expected, atol=1e-4, rtol=1e-4)
