"""The notebooks of the documentation run from the first cell to the last."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((HOME / "docs").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_runs(path, tmp_path):
    pytest.importorskip("onnxruntime", reason="pip install regard[onnx]")
    book = json.loads(path.read_text())
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 3 and all(cell["outputs"] == [] for cell in cells)
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells) + "\n")
    where = {**os.environ, "PYTHONPATH": str(HOME), "REGARD_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=where, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "attention.png").stat().st_size > 1000
    assert (tmp_path / "reviews-onnx" / "model.onnx").exists()


def test_there_is_one():
    assert [path.name for path in NOTEBOOKS] == ["frame_to_onnx.ipynb"]
