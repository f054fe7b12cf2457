"""Random graphs, shapes and options against the plain-torch definitions."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import assert_close, check, rand

from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference

QUICK = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
DTYPES = st.sampled_from([torch.float32, torch.float64])


@st.composite
def random_graphs(draw):
    """Graphs with up to 40 rows and columns and 150 edges, in either index type and edge order."""
    num_rows, num_cols = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    nnz = draw(st.integers(0, 150)) if num_rows and num_cols else 0
    index = draw(st.sampled_from([torch.int32, torch.int64]))
    torch.manual_seed(draw(st.integers(0, 2**20)))
    # Squares of uniforms crowd into the first rows: hubs, and empty rows at the end.
    rows = (torch.rand(nnz) ** draw(st.sampled_from([1, 4])) * num_rows).long()
    cols = (torch.rand(nnz) * num_cols).long()
    graph = Graph.from_coo(rows.to(index), cols.to(index), num_rows=num_rows, num_cols=num_cols)
    if draw(st.booleans()):
        graph = Graph.from_csr(graph.indptr.to(index), graph.indices.to(index), num_cols=num_cols)
    return graph


@st.composite
def broadcast_pairs(draw):
    """Two feature shapes with a common broadcast, each with some dimensions of one and maybe fewer dimensions."""
    full = draw(st.lists(st.integers(1, 9), max_size=3))
    shapes = [tuple(n if draw(st.booleans()) else 1 for n in full) for _ in range(2)]
    short = draw(st.sampled_from([0, 1]))
    shapes[short] = shapes[short][draw(st.integers(0, len(full))) :]
    return shapes


@QUICK
@given(random_graphs(), broadcast_pairs(), DTYPES, st.sampled_from(["mul", "add", "sub", "div"]), st.booleans())
def test_spmm(graph, shapes, dtype, message, mean):
    x_shape, w_shape = shapes
    w_shape = (1,) * (len(x_shape) - len(w_shape)) + w_shape
    x, weight = rand(graph.num_cols, *x_shape, dtype=dtype), rand(graph.nnz, *w_shape, dtype=dtype)
    reduce = "mean" if mean else "sum"
    check(
        lambda a, w: ops.spmm(graph, a, w, message, reduce),
        lambda a, w: reference.spmm(graph, a, w, message, reduce),
        x,
        weight,
    )


@QUICK
@given(random_graphs(), st.integers(0, 70), DTYPES, st.sampled_from(["max", "min"]))
def test_extremes(graph, width, dtype, reduce):
    x, weight = rand(graph.num_cols, width, dtype=dtype), rand(graph.nnz, width, dtype=dtype)
    out, arg_source, arg_edge = ops.spmm(graph, x, weight, "mul", reduce, return_arg=True)
    assert_close(out, reference.spmm(graph, x.double(), weight.double(), "mul", reduce), dtype)
    empty = (graph.indptr.diff() == 0)[:, None].expand(arg_edge.shape)
    assert torch.equal(arg_edge < 0, empty)
    assert torch.equal(arg_source < 0, empty)
    if graph.nnz:  # the argmax make the result: each pair of arguments names one edge of the row
        picked = x.gather(0, arg_source.long().clamp(min=0)) * weight.gather(0, arg_edge.long().clamp(min=0))
        assert torch.equal(picked.masked_fill(empty, 0), out)


@QUICK
@given(
    random_graphs(),
    broadcast_pairs(),
    DTYPES,
    st.sampled_from(["dot", "mul", "add", "sub", "div"]),
    st.sampled_from("uve"),
    st.sampled_from("uve"),
)
def test_sddmm(graph, shapes, dtype, op, lhs_target, rhs_target):
    rows = {"u": graph.num_cols, "v": graph.num_rows, "e": graph.nnz}
    if op == "dot":
        shapes = [(*shape, 6) for shape in shapes]
    lhs, rhs = (rand(rows[t], *s, dtype=dtype) for t, s in zip((lhs_target, rhs_target), shapes, strict=True))
    check(
        lambda a, b: ops.sddmm(graph, a, b, op, lhs_target, rhs_target),
        lambda a, b: reference.sddmm(graph, a, b, op, lhs_target, rhs_target),
        lhs,
        rhs,
    )


@QUICK
@given(random_graphs(), st.integers(0, 20), DTYPES, st.sampled_from(["dst", "src"]))
def test_edge_softmax(graph, heads, dtype, norm_by):
    target = graph if norm_by == "dst" else graph.transposed
    scores = 4 * rand(graph.nnz, heads, dtype=dtype)
    out = check(lambda s: ops.edge_softmax(graph, s, norm_by), lambda s: reference.edge_softmax(target, s), scores)
    sums = ops.spmm(target, None, out, "copy_rhs")
    assert_close(sums, (target.indptr.diff() > 0).double()[:, None].expand(sums.shape), dtype)


@QUICK
@given(random_graphs())
def test_transposed(graph):
    turned = graph.transposed
    assert (turned.num_rows, turned.num_cols, turned.nnz) == (graph.num_cols, graph.num_rows, graph.nnz)
    assert turned.transposed is graph
    edges = torch.empty(graph.nnz, 2, dtype=torch.int64)
    edges[reference.edges_of(graph)] = torch.stack([reference.rows_of(graph.indptr), graph.indices.long()], 1)
    back = torch.empty(graph.nnz, 2, dtype=torch.int64)
    back[reference.edges_of(turned)] = torch.stack([turned.indices.long(), reference.rows_of(turned.indptr)], 1)
    assert torch.equal(edges, back)
    for begin, end in zip(turned.indptr[:-1].tolist(), turned.indptr[1:].tolist(), strict=True):
        assert bool((turned.indices[begin:end].diff() >= 0).all())


@pytest.mark.parametrize("isa", ["avx2", "baseline"])
def test_every_instruction_set(isa):
    """The tests above on the kernels of machines that have less than this one."""
    if os.environ.get("GNNACCEL_ISA"):
        pytest.skip("already inside one")
    environment = {**os.environ, "GNNACCEL_ISA": isa}
    chosen = "from gnnaccel import _library; print(_library.isa())"
    found = subprocess.run([sys.executable, "-c", chosen], env=environment, capture_output=True, text=True, check=True)
    if found.stdout.strip() != isa:
        pytest.skip(f"this machine has no {isa}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
