"""Every CUDA kernel at small sizes, for compute-sanitizer (scripts/gpu_run.sh sanitize); pytest does not collect it."""

from __future__ import annotations

import contextlib
import itertools

import torch

import gnnaccel
from gnnaccel import _library as lib
from gnnaccel import ops, sampling, schedule
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops import _bias, _edge_order, messages, products, ready_call
from gnnaccel.ops._arrays import arrays_of
from gnnaccel.ops.joined_sums import FILM, GATED_SKIP, GINE, LE, joined_sum
from gnnaccel.ops.normed_layers import normed_layers
from gnnaccel.ops.segment_softmax import Segments, segment_softmax
from gnnaccel.schedule.worklist import LANES, Arrangement, Kernel, Plan
from gnnaccel.tiles.translate import Tiles


def build(degrees, num_cols: int, index: torch.dtype) -> Graph:
    """A graph with these row degrees and permuted edge ids."""
    indptr = torch.tensor([0, *itertools.accumulate(degrees)])
    nnz = int(indptr[-1])
    arrays = (indptr, torch.randint(num_cols, (nnz,)), torch.randperm(nnz))
    return Graph.from_csr(*(a.to("cuda", index) for a in arrays), num_cols=num_cols)


def run(graph: Graph, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Forward and backward of each op."""
    x = torch.randn(graph.num_cols, *shape).to("cuda", dtype).requires_grad_()
    v = torch.randn(graph.num_rows, *shape).to("cuda", dtype).requires_grad_()
    scalar = torch.randn(graph.nnz, *shape[:-1]).to("cuda", dtype).requires_grad_()
    full = torch.randn(graph.nnz, *shape).to("cuda", dtype).requires_grad_()
    results = [
        ops.edge_softmax(graph, scalar),
        ops.sddmm(graph, x, v, "dot"),
        ops.sddmm(graph, full, v, "sub", "e", "v"),
    ]
    u, r = torch.rand(graph.num_cols, device="cuda"), torch.rand(graph.num_rows, device="cuda")
    bias, weight = x.detach()[0].clone(), scalar.detach().flatten()[: graph.nnz]
    results += [
        ops.graph_conv(graph, x, weight, source_scale=u, row_scale=r, bias=bias, relu=True),
        ops.graph_conv(graph, x, source_scale=u.double(), bias=bias),
        ops.graph_conv(graph, x, weight, row_scale=r),
    ]
    heads = x if x.dim() == 3 else x.unsqueeze(1)
    scores = [
        torch.randn(n, heads.shape[1]).to("cuda", dtype).requires_grad_() for n in (graph.num_cols, graph.num_rows)
    ]
    mask = torch.rand(graph.nnz, heads.shape[1]).to("cuda", dtype)
    results += [ops.attention(graph, heads, *scores), ops.attention(graph, heads, *scores, edge_scale=mask)]
    others = v if v.dim() == 3 else v.unsqueeze(1)
    results += [ops.dot_attention(graph, others, heads, heads), ops.head_dots(heads, heads[:2])]
    results.append(ops.dot_attention(graph, others.detach(), heads, heads.detach(), edge_scale=mask))
    given = torch.randn(graph.nnz, heads.shape[1]).to("cuda", dtype).requires_grad_()
    results.append(ops.dot_attention(graph, others, heads, heads, edge_bias=given, dropout=0.5))
    results += [ops.edge_attention(graph, given, heads), ops.attention(graph, heads, *scores, dropout=0.5)]
    results.append(ops.gatv2_scores(graph, heads, others, heads.detach()[0].clone().requires_grad_()))
    results.append(ops.attention(graph, heads.detach(), *(s.detach() for s in scores)))
    if dtype != torch.float16:  # programs, which become kernels of their own
        a, b, e, each = messages.u("x"), messages.v("v"), messages.e("e"), messages.e("w")
        given = {"x": x, "v": v, "e": full, "w": scalar.unsqueeze(-1)}
        gate = messages.sigmoid(a + b) * a
        dots = messages.dot(a, b, keepdim=True)
        results += ops.message_reduce(graph, [gate, gate + e, gate], given, ["sum", "max", "mean"])
        results += ops.message_reduce(graph, [dots * a * each, dots], given, ["sum", "none"])
    if dtype != torch.float64:
        for warps in (1, 8):
            Tiles.team_for = lambda *args, warps=warps, **options: warps
            results += [ops.spmm(graph, x, w, reduce="mean", kernel="tiled") for w in (None, weight)]
            results.append(ops.sddmm(graph, x, v, kernel="tiled"))
    for reduce in ("sum", "mean", "max", "min"):
        results += [ops.spmm(graph, x, reduce=reduce), ops.spmm(graph, x, scalar, reduce=reduce)]
        results.append(ops.spmm(graph, x, scalar.detach(), reduce=reduce))
        results += [ops.spmm(graph, x, full, "add", reduce), ops.spmm(graph, None, full, "copy_rhs", reduce)]
    sum(r.float().square().sum() for r in results).backward()
    for values in (scalar.detach(), full.detach()):
        ordered, back = _edge_order.try_empty_like(values, 2)
        _edge_order.scatter_edge_values(
            _edge_order.gather_edge_values(values, graph.edge_ids, ordered), graph.edge_ids, back
        )


def run_programs(graph: Graph, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Programs with softmaxes over edges, sums of features and several outputs, and their derivatives."""
    sizes = {"q": graph.num_rows, "k": graph.num_cols, "v": graph.num_cols, "e": graph.nnz}
    given = {name: torch.randn(rows, *shape).to("cuda", dtype).requires_grad_() for name, rows in sizes.items()}
    given["w"] = torch.randn(shape).to("cuda", dtype).requires_grad_()
    q, k, v, e = messages.v("q"), messages.u("k"), messages.u("v"), messages.e("e")

    def normed(x):
        x = x - messages.sum(x, -1, True) * (1 / shape[-1])
        return x * messages.rsqrt(messages.sum(x * x, -1, True) + 1e-5) * messages.c("w")

    attention = messages.softmax(messages.dot(q, k + e, keepdim=True)) * (v + e)
    each = messages.softmax(messages.tanh(q + k + e)) * v
    results = [ops.message_reduce(graph, m, given, r) for m, r in ((attention, "sum"), (each, "mean"))]
    row = messages.relu(normed(q + k + e))
    results += ops.message_reduce(graph, [normed(e), row, row * v], given, ["sum", "none", "max"])
    sum(r.float().square().mean() for r in results).backward()


def run_kept(graph: Graph) -> None:
    """MaxK, and sums of what it keeps, with both ways of their gradient."""
    for dtype in (torch.float32, torch.float16, torch.float64):
        weight = torch.randn(graph.nnz).to("cuda", dtype)
        for num_feats, k in ((256, 16), (256, 32), (256, 64), (256, 96), (300, 32), (40, 5), (128, 8), (1100, 20)):
            x = torch.randn(graph.num_cols, num_feats).to("cuda", dtype)
            x[1] = x[1].round()  # ties
            leaf = x.requires_grad_()
            h = ops.maxk(leaf, k)
            results = [ops.spgemm(graph, h), ops.spgemm(graph, h, weight, "mean"), h.to_dense()[: graph.num_rows]]
            results.append(ops.graph_conv(graph, h, relu=True))
            sum(r.float().square().sum() for r in results).backward()
            torch.use_deterministic_algorithms(True)
            ops.spgemm(graph, ops.maxk(leaf, k), weight).float().sum().backward()
            torch.use_deterministic_algorithms(False)


def run_sampling() -> None:
    """Every width of a group, rows of a warp and whole ones; a table of cells, and one of slots."""
    for index, num_nodes in itertools.product((torch.int32, torch.int64), (60, 300_000)):
        graph = build([0, 1, 5, 9, 20, 33, 40, 70, 300, *[12] * 40] + [0] * (num_nodes - 49), 49, index)
        seeds = torch.tensor([8, 8, 0, *range(49)], device="cuda", dtype=index)
        for replace in (False, True):
            for fanouts in ([3, 7], [12, 30], [60, 2], [-1, 0, 6], [2, -1]):
                sampling.neighbor_sample(graph.indptr, graph.indices, seeds, fanouts, replace=replace)
            run_sampling_by(graph, seeds, replace)


def run_sampling_by(graph: Graph, seeds: torch.Tensor, replace: bool) -> None:
    """Weights in rows of a warp and of a block, trees whose tables grow, times, and several types."""
    given, num_nodes = (graph.indptr, graph.indices), graph.num_rows
    time = torch.arange(num_nodes, device="cuda")
    for dtype, fanouts in itertools.product((torch.float32, torch.float64), ([3, 7], [60, 2])):
        weight = (torch.rand(graph.nnz, device="cuda", dtype=dtype) - 0.2).clamp(min=0)
        sampling.neighbor_sample(*given, seeds, fanouts, edge_weight=weight, replace=replace)
    long = torch.tensor([0, 5_000], device="cuda", dtype=seeds.dtype)
    weight = (torch.rand(5_000, device="cuda") - 0.2).clamp(min=0)
    for fanout in (5, 70):
        sources, targets = torch.zeros(5_000, device="cuda", dtype=seeds.dtype), torch.zeros_like(seeds)
        sampling.neighbor_sample(long, sources, targets, [fanout], edge_weight=weight, replace=replace)
    for fanouts in ([3, 7], [-1, 3], [40, 2]):
        sampling.neighbor_sample(*given, seeds, fanouts, disjoint=True, replace=replace)
        with contextlib.suppress(ValueError):  # not all rows ascend by time
            sampling.neighbor_sample(*given, seeds, fanouts, node_time=time, replace=replace, temporal_strategy="last")
    types = {("a", "to", "a"): given, ("b", "to", "a"): given, ("a", "by", "b"): given}
    for disjoint in (False, True):
        for fanouts in ([3, 2], {kind: [-1, number] for number, kind in enumerate(types)}):
            sampling.hetero_neighbor_sample(types, {"a": seeds}, fanouts, replace=replace, disjoint=disjoint)


def run_joined(graph: Graph, width: int) -> None:
    """Layers in two walks, with gradients in place of maps and beside them."""
    x = torch.randn(graph.num_rows, width, device="cuda", requires_grad=True)
    edge, eps = torch.randn(graph.nnz, width, device="cuda", requires_grad=True), torch.ones(1, device="cuda")
    results = [joined_sum(graph, x, (), width, GINE, edge, eps)]
    for form in (GATED_SKIP, FILM, LE):
        count = len(form.names) * width
        weight, bias = torch.randn(count, width, device="cuda"), torch.randn(count, device="cuda")
        results.append(joined_sum(graph, x, [(weight.requires_grad_(), bias.requires_grad_())], width, form))
    total = sum(r.square().sum() for r in results)
    total.backward(retain_graph=True)
    total.backward()


def run_products() -> None:
    """On tensor cores, of rows and widths that fill no tile; and with a batch norm and a ReLU between two of them."""
    bounds.PRODUCT_ROWS = bounds.PRODUCT_ROWS_BACK = 2
    for rows, inner, width, outer in ((300, 64, 132, 12), (129, 8, 20, 64)):
        sizes = ((rows, inner), (width, inner), (width,), (width,), (width,), (outer, width), (outer,))
        given = [torch.randn(size, device="cuda", requires_grad=True) for size in sizes]
        x, weight, bias, gamma, beta, last, last_bias = given
        running = (torch.zeros(width, device="cuda"), torch.ones(width, device="cuda"))
        out = normed_layers(x, (weight, bias), (gamma, beta), running, (last, last_bias), 1e-5, 0.1)
        assert out is not None
        out.square().sum().backward()
        with torch.no_grad():
            hidden = products.linear(x, weight, bias)
            products.back(hidden, weight)
            assert products.of_weight(x, hidden, True) is not None


def run_segment_softmax() -> None:
    sizes = [0, 3, 1, 700, 0, 4096, 9]
    offsets = torch.tensor([0, *sizes], device="cuda").cumsum(0)
    for width, dtype in ((1, torch.float64), (33, torch.float32), (64, torch.bfloat16)):
        x = torch.randn(sum(sizes), width, device="cuda", dtype=dtype, requires_grad=True)
        t = torch.rand(width, device="cuda", dtype=dtype, requires_grad=True)
        out = segment_softmax(x, Segments(offsets, sum(sizes)), t)
        assert out is not None
        out.square().sum().backward()


def run_finished(graph: Graph) -> None:
    """What is added to sums in their kernels, for calls that are ready; biases, and their gradients."""
    codes = lib.MESSAGES["copy_lhs"], lib.REDUCES["sum"]
    for width, dtype in itertools.product((3, 8, 40, 64, 256), (torch.float32, torch.bfloat16)):
        x = torch.randn(graph.num_cols, width, device="cuda").to(dtype)
        kernel = ready_call.Kernel(arrays_of(graph, False, x, sums=True), x, *codes, ())
        kernel(x, factor=torch.ones(1, device="cuda"))
        bias = torch.randn(width, device="cuda")
        if ready_call.takes_wide(x, bias):
            kernel(x, bias, wide=True)
    bounds.BIAS_BYTES = 0
    with torch.no_grad():
        for rows, width in ((1, 3), (700, 64), (4_000, 100), (60, 3_000)):
            x, bias = torch.randn(rows, width, device="cuda"), torch.randn(width, device="cuda")
            _bias.column_sums(x)
            rounded, _ = _bias.rounded_and_sums(x, torch.bfloat16)
            _bias.biased(rounded, bias)
            _bias.column_sums(rounded)


def main() -> None:
    if not lib.has_cuda_kernels():
        raise SystemExit("this build has no CUDA half")
    torch.manual_seed(0)
    bounds.LASTING_USES = 10**9  # lists are there by prepare alone
    for lists in ((), ("rows",), ("rows", "groups")):
        cut = build([0, 3, 300, 0, 1, 9_000, 129, 0], 40, torch.int32)
        small = build([2, 0, 5, 128, 40], 9, torch.int64)
        short = build([3] * 700 + [0, 900, 0], 40, torch.int32)
        for graph in (cut, small, short) if lists else ():
            gnnaccel.prepare(graph)
            for one, lanes in itertools.product((graph, graph.transposed), LANES) if "groups" in lists else ():
                plan = Plan(9, Arrangement.LENGTH, Kernel.GROUPS, min(lanes, 32), 128)
                schedule.of(one).adopt(16 * lanes, schedule.of(one).arranged(one, plan))
        for graph in (build([3, 300, 0, 40], 12, torch.int32), small):
            run_kept(graph)
        for graph, shape, dtype in ((small, (4, 16), torch.float32), (cut, (20,), torch.float16)):
            run_programs(graph, shape, dtype)
        square = build([0, 3, 700, 0, 1, 2_000, 129, *[2] * 33], 40, torch.int32)
        if lists:
            gnnaccel.prepare(square)
        for width in (64, 5):
            run_joined(square, width)
        run_finished(square)
        # Rows of few features meet the borders of blocks: hubs over many, runs of empty rows longer than a block.
        borders = build([*[0] * 3000, 20_000, 7, *[1, 2, 0] * 500, 300, 700], 400, torch.int32)
        for feats in (1, 2, 3, 4, 8):
            run(borders, (feats,), torch.float32)
        run(build([9_000, 4096, 600, 40, 0, 100], 40, torch.int32), (2,), torch.float32)  # a block's rows, and pieces
        big = build([*[0] * 3000, 60_000, *[3, 0, 7, 2] * 80_000, 900, 300, *[0] * 2500], 400, torch.int32)
        for feats in (1, 2, 3, 4) if lists else ():
            x = torch.randn(big.num_cols, feats, device="cuda")
            ops.spmm(big, x)
            ops.spmm(big, x, torch.rand(big.nnz, device="cuda"), reduce="mean")
            ops.graph_conv(big, x, bias=x[0].clone(), relu=True)
        # A softmax's rows by teams, its queue with pieces and without, and a block for each row.
        dense = build([*[40] * 300, 5_000, 1], 40, torch.int32)
        for graph, heads in ((big, 3), (square, 64), (build([*[2] * 6000, 200], 40, torch.int32), 64), (dense, 64)):
            if lists:
                assert graph.longest_row
            ops.edge_softmax(graph, torch.randn(graph.nnz, heads, device="cuda", requires_grad=True)).sum().backward()
        run(short, (128,), torch.float32)
        run(cut, (33,), torch.float32)
        run(cut, (131,), torch.float32)  # padded along a list
        run(cut, (64,), torch.float32)
        run(cut, (2, 16), torch.bfloat16)
        run(small, (2, 16), torch.float32)
        run(small, (16,), torch.float32)
        run(small, (130,), torch.float64)
        run(small, (3,), torch.float16)
        run(cut, (8,), torch.float16)
    pairs = (torch.randint(50, (700,), device="cuda"), torch.randint(40, (700,), device="cuda"))
    for index in (torch.int64, torch.int32):
        made = Graph.from_coo(*(t.to(index) for t in pairs), num_rows=50, num_cols=40).transposed
        assert made.nnz == 700
    run_sampling()
    run_products()
    run_segment_softmax()
    torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()
