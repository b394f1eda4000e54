"""The notebooks, run from their first cell to their last."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "notebooks are kept without what they print"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert said
    assert not any(output.output_type == "error" for output in said)


def test_there_are_three() -> None:
    assert [path.stem[2:] for path in NOTEBOOKS] == [
        "scale_a_pretrained_model",
        "salient_parameters",
        "deploy_after_training",
    ]
