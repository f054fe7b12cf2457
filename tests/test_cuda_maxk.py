"""The kernels of compressed rows on a GPU: what they keep, float64 results, gradients, what is not finite."""

import pytest
import torch
from cuda_cases import DEVICE, DTYPES, EMULATED, INDEX, assert_close, build, check, mixed, rand
from maxk_cases import hostile, places_of

from gnnaccel import ops, schedule
from gnnaccel.ops import reference
from gnnaccel.ops._arrays import arrays_of
from gnnaccel.ops.cbsr import CBSR, compressed
from gnnaccel.ops.expand import collect, expand, places_dtype
from gnnaccel.ops.spgemm import _spgemm_op, _sspmm_op

SHAPES = [
    *((1, 1), (5, 2), (33, 33), (64, 8), (100, 7), (100, 12), (256, 16), (256, 32), (256, 64), (256, 96), (256, 128)),
    *((300, 32), (1030, 5)),
]
if EMULATED:
    SHAPES = [(1, 1), (33, 5), (64, 8), (256, 16), (256, 32), (256, 64), (256, 96), (300, 32)]


@pytest.fixture(autouse=True)
def poisoned():
    """Outputs and workspaces are filled with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_feats", [1, 5, 32, 33, 64, 100, 200, 256, 300, 513, 1024, 1025, 3000])
def test_what_is_kept(num_feats, dtype):
    if EMULATED and num_feats > 513:
        pytest.skip("takes minutes in emulation")
    for rows in (0, 1, 61, 300):
        x = hostile(rows, num_feats, dtype, DEVICE)
        for k in {1, 3, 8, 32, num_feats // 2, num_feats - 1, num_feats}:
            if not 1 <= k <= num_feats:
                continue
            h = ops.maxk(x, k)
            want = places_of(x, k)
            assert h.indices().dtype == places_dtype(num_feats)
            assert torch.equal(h.indices().cpu().long(), want), f"{rows} x {num_feats}, k {k}"
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]  # NaN too
            same = torch.equal(h.values().cpu().view(bits), x.cpu().view(bits).gather(1, want))
            assert same, f"{rows} x {num_feats}, k {k}: values"


@pytest.mark.parametrize("num_feats", [64, 128, 256, 512])
def test_nan_behind_the_list(num_feats):
    """Of a row whose last lane alone has NaN a wrong count must not lead past the warp's list."""
    for k in (num_feats, num_feats - 1):
        x = torch.rand(64, num_feats, device=DEVICE)
        x[:, -num_feats // 32 :] += 5
        x[:, k - 1 :] = torch.nan
        x[1::2] = torch.rand_like(x[1::2])  # lists beside those
        assert torch.equal(ops.maxk(x, k).indices().cpu().long(), places_of(x, k))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_aligned(dtype):
    x = torch.randn(40, 66, device=DEVICE).to(dtype)
    for part in (x[:, 1:], x[:, ::2], x.flatten()[1 : 1 + 39 * 64].view(39, 64)):
        assert torch.equal(ops.maxk(part, 5).indices().cpu().long(), places_of(part, 5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_feats,k", [*SHAPES, (2000, 700)])
def test_expand_and_collect(num_feats, k, dtype):
    x = torch.randn(37, num_feats, device=DEVICE).to(dtype)
    places = places_of(x, k).to(DEVICE, places_dtype(num_feats))
    values = collect(x, places)
    assert torch.equal(values, x.gather(1, places.long()))
    dense = expand(values, places, num_feats)
    assert torch.equal(dense, torch.zeros_like(x).scatter(1, places.long(), values))


def kept(rows, num_feats, k, dtype):
    """Random entries, and their places."""
    places = torch.rand(rows, num_feats, device=DEVICE).argsort(1)[:, :k].sort(1).values
    return rand(rows, k, dtype=dtype), places.to(places_dtype(num_feats))


def definition(graph, places, num_feats, scale=None, bias=None, relu=False):
    def run(values, weight=None):
        x = values.new_zeros(values.shape[0], num_feats).scatter(1, places.long(), values)
        out = reference.spmm(graph, x, weight, "copy_lhs" if weight is None else "mul", "sum")
        out = out if scale is None else out * scale.unsqueeze(1)
        out = out if bias is None else out + bias
        return out.relu() if relu else out

    return run


@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_feats,k", SHAPES)
def test_sums_and_gradients(num_feats, k, dtype, index):
    """Both ways of the gradient, with and without weights and what is fused."""
    graph = mixed(index)
    values, places = kept(graph.num_cols, num_feats, k, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    scale, bias = rand(graph.num_rows, dtype=wide).abs(), rand(num_feats, dtype=dtype)
    for by_source in (False, True):
        arrays = arrays_of(graph, by_source, values)

        def plain(values, weight=None, arrays=arrays, by=by_source):
            return _spgemm_op(arrays, values, places, num_feats, weight, None, None, False, by)

        def around(values, weight=None, arrays=arrays, by=by_source):
            return _spgemm_op(arrays, values, places, num_feats, weight, scale, bias, False, by)

        for weight in ((), (rand(graph.nnz, dtype=dtype),)):
            check(plain, definition(graph, places, num_feats), values, *weight)
        check(around, definition(graph, places, num_feats, scale.double(), bias.double()), values, *weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_public_ops(dtype):
    graph = mixed()
    x = rand(graph.num_cols, 64, dtype=dtype)
    h = ops.maxk(x, 8)
    dense = h.to_dense().double()
    for reduce in ("sum", "mean"):
        want = reference.spmm(graph, dense, None, "copy_lhs", reduce)
        assert_close(ops.spgemm(graph, h, reduce=reduce), want, dtype)
        assert_close(ops.spmm(graph, h, reduce=reduce), want, dtype)
    relu = ops.graph_conv(graph, h, relu=True)
    assert_close(relu, reference.spmm(graph, dense, None, "copy_lhs", "sum").relu(), dtype)


@pytest.mark.parametrize("num_feats,k", [(256, 32), (40, 5)])
def test_what_is_not_finite(num_feats, k):
    graph = build([3, 0, 40, 5], 6)
    values, places = kept(6, num_feats, k, torch.float32)
    values[0, 0], values[1, 1], values[2, 2] = torch.inf, -torch.inf, torch.nan
    got = ops.spgemm(graph, compressed(values, places, num_feats))
    want = definition(graph, places, num_feats)(values.double())
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())


def test_long_rows_and_many_sources():
    """Rows in pieces, with and without a work list; a hub of the transposed graph."""
    graph = build([9000, 1, 0, 40, 5000] if not EMULATED else [900, 1, 0, 40, 500], 90)
    values, places = kept(90, 256, 32, torch.float32)
    want = definition(graph, places, 256)(values.double())
    for prepared in (False, True):
        if prepared:
            schedule.prepare(graph, None)
            schedule.prepare(graph.transposed, None)
        assert_close(ops.spgemm(graph, compressed(values, places, 256)), want, torch.float32)
        grad = rand(graph.num_rows, 256)
        exact = definition(graph.transposed, torch.arange(256, device=DEVICE).expand(graph.num_rows, 256), 256)
        exact = exact(grad.double()).gather(1, places.long())
        for by_source in (False, True):
            got = _sspmm_op(arrays_of(graph, by_source, values), grad, places, None, None, by_source)
            assert_close(got, exact, torch.float32)


def test_empty():
    for graph in (build([], 3), build([0, 0], 4)):
        h = ops.maxk(torch.randn(graph.num_cols, 20, device=DEVICE, requires_grad=True), 4)
        out = ops.spgemm(graph, h)
        assert out.shape == (graph.num_rows, 20)
        assert not bool(out.any())
        out.sum().backward()
    assert isinstance(ops.maxk(torch.empty(0, 7, device=DEVICE), 3), CBSR)
