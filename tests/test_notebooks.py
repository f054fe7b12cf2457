"""The notebooks run from top to bottom, draw their pictures, and are committed without outputs."""

import base64
import os
from importlib import util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = {"pyg": "torch_geometric", "dgl": "dgl"}
PICTURES = 4  # times, where they go, the order of the nodes, accuracy with MaxK


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_have_no_outputs(name):
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "examples" / "notebooks" / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_run(name, monkeypatch, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if util.find_spec(NOTEBOOKS[name]) is None:
        pytest.skip(f"{NOTEBOOKS[name]} is not installed")
    for variable in [variable for variable in os.environ if "GNNACCEL" in variable or variable == "MPLBACKEND"]:
        monkeypatch.delenv(variable)
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):  # else folders in the home directory
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    notebook = nbformat.read(ROOT / "examples" / "notebooks" / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    shown = [output["data"] for output in outputs if "data" in output]
    pictures = [base64.b64decode(data["image/png"]) for data in shown if "image/png" in data]
    assert len(pictures) == PICTURES
    if where := os.environ.get("NOTEBOOK_PICTURES"):  # a folder, to look at them
        for nth, picture in enumerate(pictures):
            (Path(where) / f"{name}{nth}.png").write_bytes(picture)
    assert "100.0% of" in "".join(output.get("text", "") for output in outputs)
