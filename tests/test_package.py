"""What is installed, what importing costs, and the public functions that take any framework's graph."""

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import gnnaccel
from gnnaccel.graph import cache

ROOT = Path(__file__).resolve().parent.parent
EDGE_INDEX = [[0, 1, 1, 3], [1, 0, 2, 2]]


def edge_index():
    return torch.tensor(EDGE_INDEX)


def same(graph, other):
    return (
        graph.indptr.tolist() == other.indptr.tolist()
        and graph.indices.tolist() == other.indices.tolist()
        and (graph.num_rows, graph.num_cols) == (other.num_rows, other.num_cols)
    )


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_no_torch():
    code = "import sys, gnnaccel, gnnaccel.switch, gnnaccel.report; print('torch' in sys.modules)"
    assert run_python(code) == "False"


@pytest.mark.skipif(gnnaccel.ops.has_cuda_kernels(), reason="this build has its CUDA half")
@pytest.mark.parametrize("gpus,said", [(1, True), (0, False)])
def test_a_build_without_cuda_says_so_where_there_is_a_gpu(gpus, said):
    code = f"import torch; torch.version.cuda = '13.0'; torch.cuda.device_count = lambda: {gpus}; import gnnaccel.ops"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert ("built without its CUDA half, though torch sees a GPU" in done.stderr) == said


def test_public_names():
    assert set(gnnaccel.__all__) <= set(dir(gnnaccel))
    for name in gnnaccel.__all__:
        assert getattr(gnnaccel, name) is not None
        assert name == "__version__" or getattr(gnnaccel, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = gnnaccel.nothing


def test_as_graph_imports_no_framework():
    code = (
        "import sys, torch, gnnaccel; print(gnnaccel.as_graph(torch.tensor([[0, 1], [1, 2]])).nnz, "
        "'torch_geometric' in sys.modules, 'dgl' in sys.modules)"
    )
    assert run_python(code) == "2 False False"


def test_pth_file_is_one_short_line():
    text = (ROOT / "gnnaccel.pth").read_text(encoding="utf-8")
    assert text.startswith("import ") and text.count("\n") == 1 and text.endswith("\n")


def test_wheel_carries_the_pth_file(tmp_path):
    pytest.importorskip("pybind11")
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert (tmp_path / "gnnaccel.pth").read_text() == (ROOT / "gnnaccel.pth").read_text()
    assert (tmp_path / "gnnaccel" / "switch.py").exists()


def test_editable_wheel_carries_the_pth_file(monkeypatch):
    pytest.importorskip("pybind11")
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    setup = runpy.run_path(str(ROOT / "setup.py"))
    written = {}

    class Recorder:
        """A wheel file and setuptools' own strategy in one."""

        def writestr(self, name, content):
            written[name] = content

        def __call__(self, wheel, files, mapping):
            wheel.writestr("__editable__.gnnaccel.pth", "")

        def __enter__(self):
            return self

        def __exit__(self, *error):
            written["left"] = True

    monkeypatch.setattr(setup["editable_wheel"], "_select_strategy", lambda *arguments: Recorder())
    command = object.__new__(setup["EditableWheelWithPth"])
    with command._select_strategy("gnnaccel", "tag", "lib") as strategy:
        strategy(Recorder(), [], {})
    text = (ROOT / "gnnaccel.pth").read_text()
    assert written == {"__editable__.gnnaccel.pth": "", "gnnaccel.pth": text, "left": True}


def expected_graph():
    return gnnaccel.Graph.from_coo(edge_index()[1], edge_index()[0], num_rows=4, num_cols=4)


def test_as_graph_of_a_graph_and_an_edge_index():
    graph = gnnaccel.as_graph(edge_index())
    assert same(graph, expected_graph())
    assert gnnaccel.as_graph(graph) is graph
    assert gnnaccel.as_graph(edge_index(), num_nodes=6).num_rows == 6


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_as_graph_of_sparse_matrices_has_destinations_as_rows(layout):
    scipy_sparse = pytest.importorskip("scipy.sparse")
    sources, targets = edge_index()
    values = np.arange(1, 5, dtype=np.float32)
    matrix = scipy_sparse.coo_matrix((values, (targets.numpy(), sources.numpy())), shape=(3, 4))
    dense = torch.from_numpy(matrix.toarray())
    convert = {"coo": dense.to_sparse, "csr": dense.to_sparse_csr, "csc": dense.to_sparse_csc}[layout]
    for given, data in ((matrix.asformat(layout), None), (convert(), None)):
        graph = gnnaccel.as_graph(given)
        data = torch.as_tensor(given.data if hasattr(given, "tocsr") else given.values())
        weight = torch.empty_like(data)
        weight[...] = data
        assert torch.equal(gnnaccel.ops.spmm(graph, torch.eye(4), weight), dense)


def test_as_graph_of_pyg_objects():
    pytest.importorskip("torch_geometric")
    from torch_geometric import EdgeIndex
    from torch_geometric.data import Data

    index = edge_index()
    data = Data(edge_index=index, num_nodes=4)
    assert same(gnnaccel.as_graph(data), expected_graph())
    assert gnnaccel.as_graph(data) is gnnaccel.as_graph(data)
    assert same(gnnaccel.as_graph(EdgeIndex(index, sparse_size=(4, 4))), expected_graph())


@pytest.mark.parametrize(
    ("obj", "options", "error", "message"),
    [
        ("graph", {}, TypeError, "as_graph: obj: expected a Graph"),
        (None, {}, TypeError, "got NoneType"),
        (torch.zeros(3, 2, dtype=torch.long), {}, ValueError, r"edge_index of shape \[2, E\]"),
        (torch.zeros(2, 2), {}, TypeError, "float32"),
        (torch.tensor([[0, -1], [1, 0]]), {}, ValueError, "-1"),
        (torch.tensor([[0, 9], [1, 0]]), {"num_nodes": 4}, ValueError, "9"),
        (np.eye(2), {}, TypeError, "got ndarray"),
    ],
)
def test_as_graph_bad_input(obj, options, error, message):
    with pytest.raises(error, match=message):
        gnnaccel.as_graph(obj, **options)


def test_as_graph_refuses_num_nodes_where_it_does_not_apply():
    with pytest.raises(ValueError, match="num_nodes: applies to an edge_index only"):
        gnnaccel.as_graph(expected_graph(), num_nodes=5)


def test_prepare_says_what_it_did():
    graph = expected_graph()
    done = gnnaccel.prepare(graph)
    assert done.graph is graph and done.steps == ("structure", "transposed")
    assert graph._transposed is not None
    assert done.time_ms > 0 and done.workspace_bytes > 0
    assert "transposed ready in" in str(done)
    fresh = expected_graph()
    assert gnnaccel.prepare(fresh, transposed=False).steps == ("structure",)
    assert fresh._transposed is None


def test_invalidate_forgets_what_was_derived():
    index, other = edge_index(), edge_index()
    for tensor in (index, other):
        cache.derived.put((tensor,), "key", 1)
    gnnaccel.invalidate(index)
    assert cache.derived.get((index,), "key") is None
    assert cache.derived.get((other,), "key") == 1
    gnnaccel.invalidate()
    assert cache.derived.get((other,), "key") is None
    with pytest.raises(TypeError, match="invalidate: obj"):
        gnnaccel.invalidate(expected_graph())


def test_invalidate_takes_pyg_data():
    data_module = pytest.importorskip("torch_geometric.data")
    data = data_module.Data(edge_index=edge_index(), num_nodes=4)
    before = gnnaccel.as_graph(data)
    gnnaccel.invalidate(data)
    assert gnnaccel.as_graph(data) is not before


def test_accelerate_refuses_what_is_no_module():
    pytest.importorskip("torch_geometric")
    with pytest.raises(TypeError, match="accelerate: model"):
        gnnaccel.accelerate(3)
