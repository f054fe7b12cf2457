"""Tiles and SpMM by them on a GPU: the CPU's translation, float64 results, gradients, what is not finite, TF32."""

import sys

import pytest
import torch
import torch.utils.checkpoint
from cuda_cases import DEVICE, DTYPES, EMULATED, INDEX, build, check, mixed, rand

import gnnaccel
from gnnaccel import ops, schedule, tiles
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds, choose
from gnnaccel.ops import reference
from gnnaccel.tiles import gate
from gnnaccel.tiles.translate import Tiles, translate

GRAPHS = {
    "mixed": mixed,
    "long rows": lambda index: build([0, 4000, 1, 0, 33, 64, 65, 2500, 7, 0], 90, index, False),  # windows in pieces
    "one window": lambda index: build([3] * 16, 5, index),
    "17 rows": lambda index: build([40] * 17, 3000, index),
    "no edges": lambda index: build([0, 0, 0], 4, index),
}
TYPES = [dtype for dtype in DTYPES if dtype != torch.float64]
FIELDS = ("edge_columns", "window_ptr", "columns", "bits", "block_ptr", "edges")


@pytest.fixture(autouse=True)
def poisoned():
    """Outputs and workspaces are filled with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize("height,width", [(16, 8), (16, 16), (1, 8)])
def test_translation_is_that_of_the_cpu(height, width, index):
    for name, make in GRAPHS.items():
        graph = make(index)
        ours, theirs = translate(graph, height, width), translate(graph.to("cpu"), height, width)
        for field in FIELDS:
            assert torch.equal(getattr(ours, field).cpu(), getattr(theirs, field)), f"{name} {field}"


@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_spmm(weighted, dtype, reduce, index):
    for make in GRAPHS.values():
        graph = make(index)
        for features in ((2, 50),) if EMULATED else ((1,), (16,), (20,), (32,), (64,), (2, 50), (200,)):
            weight = [rand(graph.nnz, dtype=dtype)] if weighted else []
            check(*tiled_and_definition(graph, reduce), rand(graph.num_cols, *features, dtype=dtype), *weight)


def tiled_and_definition(graph, reduce="sum"):
    def tiled(x, w=None):
        return ops.spmm(graph, x, w, reduce=reduce, kernel="tiled")

    def definition(x, w=None):
        w = None if w is None else w.view(-1, *(1,) * (x.dim() - 1))
        return reference.spmm(graph, x, w, "copy_lhs" if w is None else "mul", reduce)

    return tiled, definition


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("team", [1, 2, 4, 8])
def test_teams(team, dtype, monkeypatch):
    """Any number of warps to a window: sums and inner products."""
    monkeypatch.setattr(Tiles, "team_for", lambda *args, **options: team)
    for graph in (mixed(), GRAPHS["long rows"](torch.int32)):
        for features in (16, 32) if EMULATED else (16, 32, 136):
            x, y, weight = (
                rand(n, dtype=dtype) for n in (graph.num_cols * features, graph.num_rows * features, graph.nnz)
            )
            x, y = x.view(-1, features), y.view(-1, features)
            for given in ((x,), (x, weight)):
                check(*tiled_and_definition(graph), *given)
            check(*dots_and_definition(graph), x, y)


def dots_and_definition(graph):
    def tiled(x, y):
        return ops.sddmm(graph, x, y, kernel="tiled")

    return tiled, lambda x, y: reference.sddmm(graph, x, y, "dot", "u", "v")


@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize("dtype", TYPES)
def test_sddmm(dtype, index):
    for make in GRAPHS.values():
        graph = make(index)
        for features in ((3, 20),) if EMULATED else ((1,), (16,), (20,), (3, 8), (64,), (2, 50), (300,)):
            check(
                *dots_and_definition(graph),
                rand(graph.num_cols, *features, dtype=dtype),
                rand(graph.num_rows, *features, dtype=dtype),
            )


def test_sddmm_keeps_what_is_not_finite():
    graph = mixed()
    x, y = rand(graph.num_cols, 40), rand(graph.num_rows, 40).abs()  # so that no order of the sums cancels an overflow
    x[7, 3], x[11, 0], y[5, 1], x[12] = float("nan"), float("-inf"), float("inf"), 3e38
    got = ops.sddmm(graph, x, y, kernel="tiled")
    want = ops.sddmm(graph, x, y)
    assert (
        torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf()) and not want.isfinite().all()
    )
    finite = want.isfinite()
    torch.testing.assert_close(got[finite], want[finite], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_what_is_not_finite_stays_in_its_rows(value):
    graph = mixed()
    x, weight = rand(graph.num_cols, 40), rand(graph.nnz).abs()  # so that no order of the sums cancels what overflows
    x[7, 3], x[11] = value, value
    for w in (None, weight):
        out = ops.spmm(graph, x, w, kernel="tiled")
        want = reference.spmm(graph, x, None if w is None else w.view(-1, 1), "copy_lhs" if w is None else "mul", "sum")
        assert torch.equal(out.isfinite(), want.isfinite()) and not want.isfinite().all()
        torch.testing.assert_close(out[want.isfinite()], want[want.isfinite()], rtol=1e-4, atol=1e-4)


def test_tf32_where_torch_may_use_it():
    graph = build([64] * 40, 3000)
    x = rand(graph.num_cols, 64)
    exact = reference.spmm(graph, x.double(), None, "copy_lhs", "sum")
    errors = {}
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            errors[precision] = float((ops.spmm(graph, x, kernel="tiled") - exact).abs().max() / exact.abs().max())
    finally:
        torch.set_float32_matmul_precision(before)
    assert errors["highest"] < 2e-6 and 1e-5 < errors["high"] < 2e-3


def test_auto_is_exact_where_torch_may_use_tf32(by_tiles):
    graph, x = dense_blocks(), rand(1024, 128)
    gnnaccel.prepare(graph)
    want = ops.spmm(graph, x), ops.sddmm(graph, x, x)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        got = ops.spmm(graph, x), ops.sddmm(graph, x, x)
    finally:
        torch.set_float32_matmul_precision(before)
    assert by_tiles == ["spmm", "sddmm"] * 2 and all(map(torch.equal, got, want))


def test_the_same_bits_on_every_run():
    graph = GRAPHS["long rows"](torch.int32)
    x, weight = rand(graph.num_cols, 64), rand(graph.nnz)
    first = ops.spmm(graph, x, weight, kernel="tiled")
    assert all(torch.equal(first, ops.spmm(graph, x, weight, kernel="tiled")) for _ in range(3))
    assert first.device.type == DEVICE.type


def dense_blocks(blocks=4, size=1024):
    """A square matrix with full blocks of 16 x 16."""
    picks = torch.stack([torch.randperm(size // 16)[:blocks].sort().values for _ in range(size // 16)])
    columns = (picks.unsqueeze(-1) * 16 + torch.arange(16)).view(size // 16, 1, -1).expand(-1, 16, -1)
    indptr = torch.arange(size + 1, dtype=torch.int32) * 16 * blocks
    return Graph.from_csr(indptr.to(DEVICE), columns.reshape(-1).int().to(DEVICE), num_cols=size)


@pytest.fixture
def by_tiles(monkeypatch):
    """Names of the ops that have gone by tiles; small graphs may."""
    monkeypatch.setattr(bounds, "TILES_EDGES", 1000)
    gone = []
    for op in ("spmm", "sddmm"):
        module = sys.modules[f"gnnaccel.ops.{op}"]
        tiled = getattr(module, f"{op}_tiled")
        monkeypatch.setattr(
            module, f"{op}_tiled", lambda *a, op=op, tiled=tiled, **o: gone.append(op) or tiled(*a, **o)
        )
    return gone


def test_auto_goes_by_tiles_where_they_pay(by_tiles):
    graph, other = dense_blocks(), build([64] * 1024, 1024)
    x, weight = rand(1024, 128).requires_grad_(), rand(graph.nnz)
    for g, is_profitable in ((graph, True), (other, False)):
        assert ("tiles" in gnnaccel.prepare(g).steps) == is_profitable == tiles.are_profitable(g)
        by_tiles.clear()
        results = [ops.spmm(g, x, weight), ops.spmm(g, x, reduce="mean"), ops.sddmm(g, x, x)]
        assert by_tiles == (["spmm", "spmm", "sddmm"] if is_profitable else [])
        # Of what tiles cannot do or are too slow for, nothing.
        ops.spmm(g, x, reduce="max"), ops.spmm(g, x, rand(g.nnz, 128)), ops.spmm(g, x[:, :8]), ops.sddmm(g, x, x, "mul")
        ops.spmm(g, x.double()), ops.spmm(g, x, kernel="csr"), ops.spmm(g, x, weight, empty_value=1.0)
        assert len(by_tiles) == 3 * is_profitable
        torch.testing.assert_close(results[0], ops.spmm(g, x, weight, kernel="csr"), rtol=1e-4, atol=1e-4)
        torch.autograd.grad(results[0].sum(), x)


def test_a_graph_that_lasts_earns_its_tiles(by_tiles):
    graph, x = dense_blocks(), rand(1024, 32)
    torch.use_deterministic_algorithms(False)
    served = []
    for _ in range(60):
        before = len(by_tiles)
        ops.spmm(graph, x)
        served.append(by_tiles[before:] == ["spmm"])
    assert tiles.are_profitable(graph) and served == sorted(served) and not served[45] and served[51]
    torch.use_deterministic_algorithms(True)
    fresh = dense_blocks()
    for _ in range(60):
        ops.spmm(fresh, x)
    assert not tiles.are_profitable(fresh)


@pytest.mark.parametrize("weighted", [True, False][: 1 if EMULATED else 2])
def test_checkpointing_while_tiles_are_earned(weighted, by_tiles):
    torch.use_deterministic_algorithms(False)
    graph, x = dense_blocks(), rand(1024, 256).requires_grad_()
    weight = rand(graph.nnz).requires_grad_() if weighted else None
    wanted = [x, *([weight] if weighted else [])]

    def layers(x, w):
        kept = torch.utils.checkpoint.checkpoint(lambda x, w: ops.spmm(graph, x, w) / 64, x, w, use_reentrant=False)
        scores = torch.utils.checkpoint.checkpoint(
            lambda x: ops.sddmm(graph, x[:, :128], x[:, 128:], lhs_target="v", rhs_target="u"),
            kept,
            use_reentrant=False,
        )
        return kept.square().sum() + scores.square().mean()

    out = layers(x, weight)
    before = torch.autograd.grad(out, wanted, retain_graph=True)
    gnnaccel.prepare(graph)
    between = torch.autograd.grad(out, wanted)
    after = torch.autograd.grad(layers(x, weight), wanted)
    assert "spmm" in by_tiles and "sddmm" in by_tiles
    for got in (between, after):
        torch.testing.assert_close(got, before, rtol=1e-3, atol=1e-4)


def test_no_memory_for_tiles_is_said_and_survived(by_tiles, monkeypatch, caplog):
    def out_of_memory(*args):
        raise torch.OutOfMemoryError("none")

    torch.use_deterministic_algorithms(False)
    for name, words in (("column_reuse", "no memory to look for tiles"), ("translate", "no memory for tiles")):
        graph, x = dense_blocks(), rand(1024, 64)
        with monkeypatch.context() as patched:
            patched.setattr(gate, name, out_of_memory)
            gnnaccel.prepare(graph)
            ops.spmm(graph, x)
        assert words in caplog.text and not by_tiles and schedule.of(graph).lists and not tiles.are_profitable(graph)


@pytest.mark.parametrize("mode", [torch.autograd.forward_ad.dual_level, None])
def test_nothing_is_made_under_a_transform(mode, by_tiles):
    """The call that would earn tiles and lists, while they would belong to the transform."""
    torch.use_deterministic_algorithms(False)
    graph, x = dense_blocks(), rand(1024, 64)
    choose.age_of(graph).uses = bounds.LASTING_USES

    def call(y):
        return (ops.spmm(graph, x) * y).sum()

    if mode is None:
        torch.func.grad(call)(torch.ones((), device=DEVICE))
    else:
        with mode():
            call(1.0)
    assert not schedule.of(graph).lists and not tiles.are_profitable(graph)
    ops.spmm(graph, x), ops.spmm(graph, x)
    assert schedule.of(graph).lists and by_tiles == ["spmm", "spmm"]


def test_heads_go_by_tiles_without_gradients_alone(by_tiles):
    graph = dense_blocks()
    gnnaccel.prepare(graph)
    x = rand(1024, 2, 128)
    ops.sddmm(graph, x, x)
    assert by_tiles == ["sddmm"]
    ops.sddmm(graph, x, x.clone().requires_grad_())
    assert by_tiles == ["sddmm"]


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")
def test_precision_by_the_new_attributes():
    before = torch.backends.cuda.matmul.fp32_precision
    graph, x = build([64] * 40, 3000), rand(3000, 64)
    exact = reference.spmm(graph, x.double(), None, "copy_lhs", "sum")
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert float((ops.spmm(graph, x, kernel="tiled") - exact).abs().max() / exact.abs().max()) > 1e-5
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.skipif(EMULATED is not None, reason="float16 runs on CUDA alone")
def test_gcn_layer_by_tiles_in_half_precision():
    """A sum past what fp16 holds, before the norms."""
    graph = build([70_000, 3], 2)
    layer = gnnaccel.nn.GCNConv(8, 8, kernel="tiled").to(DEVICE, torch.float16)
    x = torch.ones(2, 8, dtype=torch.float16, device=DEVICE)
    want = gnnaccel.nn.GCNConv(8, 8).to(DEVICE, torch.float32)
    want.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(graph, x).float(), want(graph, x.float()), rtol=1e-2, atol=1e-2)
