"""What only a GPU has: streams, graph capture, atomics, synchronisation, conversions, more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch
from cuda_cases import DEVICE, DTYPES, EMULATED, INDEX, assert_close, build, rand

import gnnaccel
from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(params=[False, True], ids=["looked_up", "in_order"])
def edge_values(request, monkeypatch):
    """Values of edges as small graphs have them, and brought in order by a pass of their own, as large ones do."""
    if request.param:
        for least in ("EDGE_ORDER_EDGES", "EDGE_ORDER_MANY", "EDGE_ORDER_DEGREE"):
            monkeypatch.setattr(bounds, least, 1)


def run_everything(graph, x, weight, scores):
    """Every kernel once, with gradients: a list of results."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, scores)]
    alpha = ops.edge_softmax(graph, leaves[2])
    kept = ops.maxk(leaves[0], 5)
    outs = [
        ops.spmm(graph, kept, leaves[1]),
        ops.spgemm(graph, kept, reduce="mean"),
        torch.nn.functional.linear(kept, leaves[0][:8]),
        ops.spmm(graph, leaves[0], leaves[1]),
        ops.spmm(graph, leaves[0], reduce="mean"),
        ops.spmm(graph, leaves[0].view(-1, 4, 8), alpha),
        ops.spmm(graph, leaves[0], leaves[1], reduce="max"),
        ops.graph_conv(graph, leaves[0], leaves[1], source_scale=x[:, 0], bias=x[0], relu=True),
        ops.gatv2_scores(graph, leaves[0].view(-1, 4, 8), leaves[0][: graph.num_rows].view(-1, 4, 8), x[:4, :8]),
        ops.attention(graph, leaves[0].view(-1, 4, 8), leaves[0][:, :4], leaves[0][: graph.num_rows, 4:8]),
        ops.dot_attention(graph, *(t.view(-1, 4, 8) for t in (leaves[0][: graph.num_rows], leaves[0], leaves[0]))),
        ops.edge_attention(graph, leaves[2], leaves[0].view(-1, 4, 8)),
        ops.head_dots(leaves[0].view(-1, 4, 8), x[:2].view(2, 4, 8)),
        ops.sddmm(graph, leaves[0], leaves[0][: graph.num_rows]),
    ]
    if x.dtype != torch.float64:
        outs += [ops.spmm(graph, leaves[0], w, kernel="tiled") for w in (None, leaves[1])]
        outs.append(ops.sddmm(graph, leaves[0], leaves[0][: graph.num_rows], kernel="tiled"))
    total = sum(o.square().sum() for o in outs)
    return [o.detach() for o in outs] + list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("index", INDEX, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("degrees", [[2, 0, 3, 300, *[1] * 100], [70] * 60], ids=["low", "high"])
def test_the_first_calls_on_a_graph(degrees, dtype, index):
    """Which make no transposed graph, and give the bits of those that come later, forward and backward."""
    graph = build(degrees, 200, index)
    weight, source, row = rand(graph.nnz, dtype=dtype), rand(200, dtype=dtype), rand(graph.num_rows, dtype=dtype)
    if dtype.itemsize < 4:
        source, row = source.float(), row.float()
    forms = {
        "sum": lambda graph, x: ops.spmm(graph, x),
        "mean": lambda graph, x: ops.spmm(graph, x, reduce="mean"),
        "weighted": lambda graph, x: ops.spmm(graph, x, weight),
        "scaled": lambda graph, x: ops.graph_conv(graph, x, source_scale=source, row_scale=row),
    }
    for name, op in forms.items():
        graph, found = Graph(graph.indptr, graph.indices, graph.edge_ids, graph.num_cols), []
        x, upstream = rand(200, 16, dtype=dtype).requires_grad_(), rand(graph.num_rows, 16, dtype=dtype)
        for made in [False] * bounds.NEW_GRAPH_USES + [True] * 2:
            out = op(graph, x)
            found.append((out.detach(), *torch.autograd.grad(out, x, upstream)))
            assert (graph._transposed is not None) == made, name
        for later in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], later, strict=True)), name


@pytest.mark.parametrize("index", INDEX, ids=str)
@pytest.mark.parametrize(
    "keys,count",
    [(2, 3), (2, 5_000), (40, 90_000), (3_000, 4_000), (500_000, 300_000), (1 << 20, 1 << 20), (9, (1 << 20) + 1)],
)
def test_sorts_of_pairs(keys, count, index):
    """One launch for few, by radix for more: groups of every size, hubs among them; stable."""
    rows = torch.randint(keys, (count,), dtype=index, device=DEVICE)
    rows[torch.rand(count, device=DEVICE) < 0.2] = keys // 2  # a hub
    rows[0], rows[-1] = keys - 1, 0  # out of order, or there is nothing to sort
    cols = torch.randint(keys, (count,), dtype=index, device=DEVICE)
    order = torch.argsort(rows, stable=True)
    starts = torch.cat([rows.new_zeros(1), torch.bincount(rows, minlength=keys).cumsum(0)])
    graph = Graph.from_coo(rows, cols, num_rows=keys, num_cols=keys)
    for got, want in ((graph.indptr, starts), (graph.indices, cols[order]), (graph.edge_ids, order)):
        assert torch.equal(got.long(), want.long())
    flipped = Graph.from_csr(graph.indptr.to(index), graph.indices.to(index), graph.edge_ids.to(index), num_cols=keys)
    order = torch.argsort(graph.indices, stable=True)
    starts = torch.cat([rows.new_zeros(1), torch.bincount(cols, minlength=keys).cumsum(0)])
    sources = rows[graph.edge_ids.long()]
    wanted = (starts, sources[order], graph.edge_ids[order])
    flipped = flipped.transposed
    for got, want in zip((flipped.indptr, flipped.indices, flipped.edge_ids), wanted, strict=True):
        assert torch.equal(got.long(), want.long())


@pytest.mark.parametrize("index", INDEX, ids=str)
def test_pairs_by_ascending_rows(index):
    """Which are not sorted; what is out of range is named."""
    rows = torch.tensor([0, 0, 2, 2, 2, 5], dtype=index, device=DEVICE)
    cols = torch.tensor([3, 1, 0, 0, 3, 2], dtype=index, device=DEVICE)
    graph = Graph.from_coo(rows, cols, num_rows=7, num_cols=4)
    assert graph.edge_ids is None and graph.indptr.tolist() == [0, 2, 2, 5, 5, 5, 6, 6]
    assert graph.indices.tolist() == cols.tolist()
    mixed = Graph.from_coo(rows.flip(0), cols, num_rows=7, num_cols=4)
    assert mixed.edge_ids.tolist() == [4, 5, 1, 2, 3, 0]
    for name, sizes, bad in (("rows", (5, 4), 5), ("cols", (7, 3), 3)):
        with pytest.raises(ValueError, match=rf"Graph: {name}: expected values in .* got {bad}"):
            Graph.from_coo(rows, cols, num_rows=sizes[0], num_cols=sizes[1])


def everything_inputs():
    graph = build([9_000, 0, 3, 300, *[7] * 100], 200)
    return graph, rand(200, 32) / 16, rand(graph.nnz), rand(graph.nnz, 4)  # small: gradients stay in the range of fp16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_on_every_run(dtype, edge_values):
    graph, *inputs = everything_inputs()
    inputs = [t.to(dtype) for t in inputs]
    first = run_everything(graph, *inputs)
    for _ in range(1 if EMULATED else 3):
        assert all(torch.equal(a, b) for a, b in zip(first, run_everything(graph, *inputs), strict=True))


def test_atomic_path_is_close():
    """Without deterministic algorithms the gradient of a max goes by atomics."""
    torch.use_deterministic_algorithms(False)
    graph, *inputs = everything_inputs()
    got = run_everything(graph, *inputs)
    torch.use_deterministic_algorithms(True, warn_only=True)
    for a, b in zip(got, run_everything(graph, *inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def test_side_stream(edge_values):
    """Work goes to the current stream: inputs still being made there, results read there."""
    torch.use_deterministic_algorithms(False)  # the fill of fresh memory would hide a wrong stream
    graph, *inputs = everything_inputs()
    want = run_everything(graph, *inputs)
    stream = torch.cuda.Stream()
    a = torch.randn(4096, 4096, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(20):
            a = (a @ a).clamp(-1, 1)  # tens of milliseconds that the inputs wait for
        late = [t + (0 * a.sum()).to(t.dtype) for t in inputs]
        got = run_everything(graph, *late)
    stream.synchronize()
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4 * float(y.abs().max()))


def test_cuda_graph_capture(edge_values):
    """Everything, gradients included, is captured once and replayed on new values."""
    torch.use_deterministic_algorithms(False)
    graph, *inputs = everything_inputs()
    static = [t.clone() for t in inputs]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run_everything(graph, *static)  # builds the transposed graph; capture must find it ready
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = run_everything(graph, *static)
    for _ in range(2):
        fresh = [torch.randn_like(t) for t in inputs]
        for t, f in zip(static, fresh, strict=True):
            t.copy_(f)
        for r in results:
            r.fill_(float("nan"))
        captured.replay()
        for got, want in zip(results, run_everything(graph, *fresh), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_nothing_synchronises(edge_values):
    graph, *inputs = everything_inputs()
    torch.use_deterministic_algorithms(False)
    gnnaccel.prepare(graph)
    run_everything(graph, *inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_everything(graph, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("nnz", [0, 1, 400, 5000])
@pytest.mark.parametrize("in_order", [True, False])
def test_conversions_match_the_cpu(nnz, in_order, dtype):
    rows, cols = torch.randint(3, 50, (nnz,), dtype=dtype), torch.randint(70, (nnz,), dtype=dtype)
    rows = rows.sort().values if in_order else rows
    here = Graph.from_coo(rows, cols, num_rows=53, num_cols=70)
    there = Graph.from_coo(rows.to(DEVICE), cols.to(DEVICE), num_rows=53, num_cols=70)
    if in_order or nnz < 2:  # nothing to sort: nonzero k is edge k
        assert here.edge_ids is there.edge_ids is None
    for a, b in ((here, there), (here.transposed, there.transposed)):
        for name in ("indptr", "indices", "edge_ids"):
            one, other = getattr(a, name), getattr(b, name)
            assert one is other is None or torch.equal(one, other.cpu()), name


@pytest.mark.parametrize("row, col", [(-1, 0), (50, 0), (7, -3), (7, 70)])
@pytest.mark.parametrize("in_order", [True, False])
def test_pairs_out_of_range(in_order, row, col):
    rows, cols = torch.randint(50, (400,)), torch.randint(70, (400,))
    rows = rows.sort().values if in_order else rows
    rows[-1 if row > 7 else 0], cols[0] = row, col if row == 7 else cols[0]
    with pytest.raises(ValueError, match=f"expected values in .*got {row if row != 7 else col} at"):
        Graph.from_coo(rows.to(DEVICE), cols.to(DEVICE), num_rows=50, num_cols=70)


@pytest.mark.parametrize("listed", [False, True])
def test_products_beyond_32_bits(listed):
    """More than 2^31 node features, and more than 2^32 times one of a nonzero, with 32-bit indices."""
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    torch.use_deterministic_algorithms(False)
    nodes, nnz, width = 8_400_000, 20_000_000, 256
    rows = torch.randint(nodes, (nnz,), device=DEVICE)
    rows[:3000] = nodes - 1  # a row that is cut
    cols = torch.randint(nodes, (nnz,), device=DEVICE)
    graph = Graph.from_coo(rows, cols, num_rows=nodes, num_cols=nodes)
    if listed:
        gnnaccel.prepare(graph, transposed=False)
    x = torch.randn(nodes, width, dtype=torch.bfloat16, device=DEVICE)  # `rand` would take 50 GiB on the way
    weight = rand(nnz, dtype=torch.bfloat16)
    assert x.numel() > 2**31 and nnz * width > 2**32
    out, dots = ops.spmm(graph, x, weight), ops.sddmm(graph, x, x)
    for row in (0, nodes // 2, nodes - 1):
        edges = (rows == row).nonzero().flatten()
        want = (x[cols[edges]].double() * weight[edges].double()[:, None]).sum(0)
        assert_close(out[row], want, torch.bfloat16)
        assert_close(dots[edges, 0], (x[cols[edges]].double() * x[row].double()).sum(1), torch.bfloat16)


def test_offsets_beyond_32_bits():
    """Edge features of more than 2^31 elements, with 32-bit indices."""
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    torch.use_deterministic_algorithms(False)  # no need to fill 10 GB twice
    nnz, width, num_cols = 36_000_000, 64, 1000
    indptr = torch.tensor([0, 10, nnz - 10_000, nnz], dtype=torch.int32, device=DEVICE)
    indices = torch.randint(num_cols, (nnz,), dtype=torch.int32, device=DEVICE)
    graph = Graph(indptr, indices, None, num_cols)
    x, v = rand(num_cols, width, dtype=torch.float16), rand(3, width, dtype=torch.float16)
    edges = ops.sddmm(graph, x, v, "add")
    assert edges.numel() > 2**31
    tail = indices[-10_000:].long()
    assert torch.equal(edges[-10_000:], (x[tail].float() + v[2].float()).half())
    out = ops.spmm(graph, None, edges, "copy_rhs", "mean")
    assert_close(out[2], edges[-10_000:].double().mean(0), torch.float16)
    top, _, arg = ops.spmm(graph, None, edges, "copy_rhs", "max", return_arg=True)
    assert torch.equal(edges[arg.long()[2], torch.arange(width, device=DEVICE)], top[2])
    assert torch.equal(top[2], edges[-10_000:].amax(0))
