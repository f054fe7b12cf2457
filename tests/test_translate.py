"""Sparse graph translation against a NumPy definition: CPU, and on a GPU the same arrays; boundaries, hubs, repeats."""

import numpy as np
import pytest
import torch
from test_attention import random_graph

from gnnaccel import _library, ops, tiles
from gnnaccel.graph.csr import Graph
from gnnaccel.tiles import gate
from gnnaccel.tiles.gate import column_reuse as estimated_reuse
from gnnaccel.tiles.translate import translate

CUDA = torch.cuda.is_available() and _library.has_cuda_kernels()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not CUDA, reason="no CUDA GPU here"))]


def repeated():
    """A multigraph: some edges two or three times, of one row and of several."""
    rows = torch.tensor([0, 0, 0, 1, 1, 5, 5, 5, 7, 8, 8, 20])
    cols = torch.tensor([3, 3, 1, 3, 9, 9, 9, 9, 3, 2, 2, 0])
    return Graph.from_coo(rows, cols, num_rows=21, num_cols=10)


GRAPHS = {
    "random": lambda: random_graph(50, 40, 400, 0),
    "dense": lambda: random_graph(33, 20, 3000, 1),  # repeats everywhere
    "hub": lambda: random_graph(40, 5000, 6000, 2, hub=5000),
    "window edges": lambda: Graph.from_coo(torch.tensor([7, 8, 15, 16, 31, 32]), torch.arange(6), num_rows=33),
    "empty windows": lambda: Graph.from_coo(torch.tensor([0, 99]), torch.tensor([5, 5]), num_rows=100, num_cols=6),
    "repeated": repeated,
    "no edges": lambda: random_graph(20, 20, 0, 3),
    "no rows": lambda: random_graph(0, 5, 0, 4),
    "large ids": lambda: Graph.from_csr(  # far beyond what 32 bits number
        torch.tensor([0, 2, 3, 3, 5]), torch.tensor([2**40, 7, 2**31, 2**31 + 1, 2**40]), num_cols=2**41
    ),
}


def definition(graph, height, width):
    """Every array from sorted sets, window by window."""
    indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
    windows = -(-graph.num_rows // height)
    edge_columns = np.zeros(graph.nnz, np.int64)
    window_ptr, columns, bits, order, block_ptr = [0], [], [], [], [0]
    for window in range(windows):
        rows = range(window * height, min(graph.num_rows, (window + 1) * height))
        found = []  # (row in window, column, how many of the same were before, nonzero)
        for row in rows:
            before = {}
            for k in range(indptr[row], indptr[row + 1]):
                column = int(indices[k])
                found.append((row - window * height, column, before.get(column, 0), k))
                before[column] = before.get(column, 0) + 1
        places = sorted({(column, again) for _, column, again, _ in found})
        blocks = -(-len(places) // width)
        words = [[0] * -(-height * width // 64) for _ in range(blocks)]
        inside = [[] for _ in range(blocks)]
        for row, column, again, k in found:
            place = places.index((column, again))
            edge_columns[k] = place
            block, bit = place // width, row * width + place % width
            words[block][bit // 64] |= 1 << bit % 64
            inside[block].append((bit, k))
        for block in range(blocks):
            own = [column for column, _ in places[block * width : (block + 1) * width]]
            columns.append(own + [-1] * (width - len(own)))
            bits.append([word - (word >> 63 << 64) for word in words[block]])
            order += [k for _, k in sorted(inside[block])]
            block_ptr.append(len(order))
        window_ptr.append(len(columns))
    words = -(-height * width // 64)
    return {
        "edge_columns": edge_columns,
        "window_ptr": window_ptr,
        "columns": np.array(columns, np.int64).reshape(-1, width),
        "bits": np.array(bits, np.int64).reshape(-1, words),
        "block_ptr": block_ptr,
        "edges": [k if graph.edge_ids is None else int(graph.edge_ids[k]) for k in order],
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("height,width", [(16, 8), (16, 16), (8, 8), (8, 16), (1, 8), (32, 4), (5, 3)])
@pytest.mark.parametrize("name", GRAPHS)
def test_matches_definition(name, height, width, device):
    graph = GRAPHS[name]()
    made = translate(graph.to(device), height, width)
    for field, want in definition(graph, height, width).items():
        got = getattr(made, field)
        assert got.device.type == device and got.dtype == (torch.int64 if field == "bits" else graph.indptr.dtype)
        np.testing.assert_array_equal(got.cpu().numpy(), want, err_msg=field)


@pytest.mark.parametrize("height,width", [(16, 8), (8, 16)])
def test_threads_make_no_difference(height, width):
    graph = random_graph(3000, 2000, 60_000, 5, hub=9000)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = translate(graph, height, width)
        torch.set_num_threads(3)
        other = translate(graph, height, width)
    finally:
        torch.set_num_threads(before)
    for field in ("edge_columns", "window_ptr", "columns", "bits", "block_ptr", "edges"):
        assert torch.equal(getattr(one, field), getattr(other, field))


def test_density_and_reuse():
    rows, cols = torch.meshgrid(torch.arange(16), torch.arange(8), indexing="ij")
    made = translate(Graph.from_coo(rows.flatten(), cols.flatten()))
    assert (made.num_blocks, made.density, made.column_reuse()) == (1, 1.0, 16.0)
    empty = translate(random_graph(4, 4, 0, 0))
    assert (empty.num_blocks, empty.density, empty.column_reuse()) == (0, 0.0, 0.0)


@pytest.mark.parametrize("device", DEVICES)
def test_estimated_reuse(device):
    for name in set(GRAPHS) - {"large ids"}:  # fewer windows than a sample has
        graph = GRAPHS[name]().to(device)
        assert estimated_reuse(graph) == pytest.approx(tiles.of(graph).column_reuse()), name
    graph = random_graph(20_000, 300, 200_000, 1).to(device)
    assert estimated_reuse(graph) == pytest.approx(tiles.of(graph).column_reuse(), rel=0.02)


@pytest.mark.parametrize(
    "change,error,words",
    [
        (dict(height=0), ValueError, "height: expected an int from 1 to 1024"),
        (dict(height=2**63 - 1), ValueError, "height: expected an int from 1 to 1024"),
        (dict(width=2.0), ValueError, "width: expected an int from 1 to 1024"),
    ],
)
def test_bad_arguments_of_tiles(change, error, words):
    with pytest.raises(error, match=words):
        translate(**(dict(graph=random_graph(4, 4, 9, 0)) | change))


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "large ids"])
def test_spmm_by_tiles(name, weighted, reduce):
    """On the CPU, where it is the GPU's twin: values and gradients of both orders' first."""
    graph = GRAPHS[name]()
    x = torch.randn(graph.num_cols, 2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(graph.nnz, dtype=torch.float64, requires_grad=True)
    given = (x, weight) if weighted else (x,)
    results = []
    for kernel in ("tiled", "auto"):
        out = ops.spmm(graph, *given, reduce=reduce, kernel=kernel)
        results.append((out, *torch.autograd.grad(out.square().sum(), given)))
    torch.testing.assert_close(*results)


def test_spmm_by_tiles_registration():
    graph = random_graph(20, 20, 90, 0)
    x, weight = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in (20, graph.nnz))
    call = lambda x, w: ops.spmm(graph, x.view(20, 1), w, kernel="tiled")  # noqa: E731
    torch.autograd.gradcheck(call, (x, weight))
    torch.autograd.gradgradcheck(call, (x, weight))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight), call(x, weight))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: call(x, weight), (x.detach(),), (x.detach(),))
    graph = random_graph(20, 20, 90, 1)
    with pytest.raises(RuntimeError, match="has no tiles of 16 x 8 yet"):
        torch.func.jvp(lambda x: call(x, weight), (x.detach(),), (x.detach(),))


@pytest.mark.parametrize("x_shape,w_shape", [((), (1,)), ((5,), (1, 1)), ((2, 3), (1,)), ((2, 3), ())])
def test_spmm_by_tiles_has_the_shape_of_the_broadcast(x_shape, w_shape):
    graph = random_graph(20, 20, 90, 0)
    x, weight = torch.randn(20, *x_shape), torch.randn(90, *w_shape)
    torch.testing.assert_close(ops.spmm(graph, x, weight, kernel="tiled"), ops.spmm(graph, x, weight))


@pytest.mark.parametrize(
    "change,words",
    [
        (dict(reduce="max"), "kernel: 'tiled' takes the sum or mean"),
        (dict(message="add"), "kernel: 'tiled' takes the sum or mean"),
        (dict(empty_value=1.0), "empty_value 0"),
        (dict(return_arg=True), "no argmax"),
        (dict(weight=torch.ones(9, 3)), "takes one per edge"),
        (dict(kernel="fastest"), "kernel: expected one of"),
    ],
)
def test_spmm_by_tiles_bad_arguments(change, words):
    given = dict(x=torch.ones(4, 3), weight=torch.ones(9), kernel="tiled")
    with pytest.raises(ValueError, match=words):
        ops.spmm(random_graph(4, 4, 9, 0), **(given | change))
    with pytest.raises(TypeError, match="kernel 'tiled' takes"):
        ops.spmm(random_graph(4, 4, 9, 0), torch.ones(4, 3, dtype=torch.bfloat16), kernel="tiled")


@pytest.mark.parametrize(
    "reuse,degree,features,of,is_profitable",
    [
        (3.9, 99, 512, "sum", False),
        (4.0, 15, 512, "sum", False),
        (4.0, 16, 63, "sum", False),
        (4.0, 16, 64, "sum", True),
        (4.0, 16, 64, "dot", False),
        (4.0, 16, 128, "dot", True),
        (8.0, 63, 16, "sum", False),
        (8.0, 64, 15, "sum", False),
        (8.0, 64, 16, "sum", True),
        (16.0, 99, 127, "dot", False),
    ],
)
def test_gate(reuse, degree, features, of, is_profitable):
    assert gate.is_profitable(reuse, degree, features, of) == is_profitable
