"""MaxK: what is kept, and sums over graphs of that, with their gradients."""

import sys

import pytest
import torch
import torch.nn.functional as F
from maxk_cases import graph_of, hostile, places_of

import gnnaccel
from gnnaccel import nn as gnn
from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference
from gnnaccel.ops.expand import collect, expand, places_dtype

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
CASES = [(1, 1), (5, 2), (33, 33), (64, 8), (100, 7), (256, 32), (256, 96), (300, 32), (1030, 5)]


def close(got, want, dtype=torch.float32, what="result"):
    assert got.dtype == dtype and got.shape == want.shape, what
    size = want.abs().max() if want.numel() else 1
    assert bool(((got.double() - want.double()).abs() <= TOLERANCE[dtype] * (want.double().abs() + size)).all()), what


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_feats", [1, 5, 33, 100, 256, 257, 1000])
def test_what_is_kept(num_feats, dtype):
    for rows in (0, 1, 61):
        x = hostile(rows, num_feats, dtype)
        for k in {1, 3, 32, num_feats // 2, num_feats - 1, num_feats} & set(range(1, num_feats + 1)):
            h, want = ops.maxk(x, k), places_of(x, k)
            assert h.indices().dtype == places_dtype(num_feats)
            assert torch.equal(h.indices().long(), want), f"{rows} x {num_feats}, k {k}"
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
            assert torch.equal(h.values().view(bits), x.view(bits).gather(1, want))
            assert torch.equal(h.to_dense().nan_to_num(7), reference.maxk(x, k).nan_to_num(7))


def test_strided_input():
    x = torch.randn(40, 66)
    for part in (x[:, 1:], x[:, ::2], x.t(), x[::3]):
        assert torch.equal(ops.maxk(part, 5).indices().long(), places_of(part, 5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_feats,k", CASES)
def test_expand_and_collect(num_feats, k, dtype):
    x = torch.randn(17, num_feats).to(dtype)
    places = places_of(x, k).to(places_dtype(num_feats))
    values = collect(x, places)
    assert torch.equal(values, x.gather(1, places.long()))
    assert torch.equal(expand(values, places, num_feats), torch.zeros_like(x).scatter(1, places.long(), values))


@pytest.mark.parametrize(
    "x,k,error,words",
    [
        (torch.zeros(3), 1, ValueError, "expected shape"),
        (torch.zeros(3, 0), 1, ValueError, "expected shape"),
        (torch.zeros(1, 65537), 1, ValueError, "65536"),
        (torch.zeros(3, 4), 0, ValueError, "1 to 4"),
        (torch.zeros(3, 4), 5, ValueError, "1 to 4"),
        (torch.zeros(3, 4), 2.0, TypeError, "int"),
        (torch.zeros(3, 4, dtype=torch.int64), 2, TypeError, "floating"),
        (torch.eye(3).to_sparse(), 2, TypeError, "to_dense"),
        ([[1.0]], 1, TypeError, "Tensor"),
    ],
)
def test_errors(x, k, error, words):
    with pytest.raises(error, match=words):
        ops.maxk(x, k)


def test_spgemm_errors():
    graph, h = graph_of(), ops.maxk(torch.randn(40, 16), 4)
    for given, error, words in (
        ((graph, h.to_dense()), TypeError, "maxk"),
        ((graph, ops.maxk(torch.randn(41, 16), 4)), ValueError, "40 rows"),
        ((graph, h, torch.rand(7)), ValueError, "300 rows"),
        ((graph, h, [1.0]), TypeError, "Tensor"),
        ((graph, h, torch.rand(300, 2)), ValueError, "shape"),
        ((graph, h, None, "max"), ValueError, "reduce"),
        ((graph, h, torch.rand(300).double()), TypeError, "dtype"),
    ):
        with pytest.raises(error, match=words):
            ops.spgemm(*given)


def test_the_module():
    assert gnn.MaxK(100)(torch.randn(4, 6)).k == 6
    assert "k=3" in repr(gnn.MaxK(3))
    for k, error in ((0, ValueError), (True, TypeError), (2.0, TypeError)):
        with pytest.raises(error):
            gnn.MaxK(k)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_feats,k", CASES)
def test_sums_and_gradients(num_feats, k, dtype, index):
    graph = graph_of(index=index)
    x = torch.randn(40, num_feats).to(dtype)
    places = places_of(x, k)
    wide = torch.promote_types(dtype, torch.float32)
    row_scale, source_scale = torch.rand(30, dtype=wide), torch.rand(40, dtype=wide)
    bias = torch.randn(num_feats).to(dtype)
    weight = torch.rand(300).to(dtype)

    def definition(x, w=None, reduce="sum"):
        return reference.spmm(graph, x, w, "copy_lhs" if w is None else "mul", reduce)

    def around(x, w):
        return ops.graph_conv(graph, x, w, source_scale=source_scale, row_scale=row_scale, bias=bias)

    cases = {  # ours, and the definition
        "sum": (lambda x, w: ops.spgemm(graph, x), lambda x, w: definition(x)),
        "mean": (lambda x, w: ops.spgemm(graph, x, reduce="mean"), lambda x, w: definition(x, reduce="mean")),
        "weighted": (lambda x, w: ops.spgemm(graph, x, w), definition),
        "around": (
            around,
            lambda x, w: definition(x * source_scale.unsqueeze(1), w) * row_scale.unsqueeze(1) + bias,
        ),
    }
    if dtype == torch.float16:
        del cases["around"]  # the op takes no float16 on the CPU
    for name, (ours, exactly) in cases.items():
        leaf, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        exact, exact_w = (t.double().clone().requires_grad_() for t in (x, weight))
        got = ours(ops.maxk(leaf, k), w)
        want = exactly(torch.zeros_like(exact).scatter(1, places, exact.gather(1, places)), exact_w)
        close(got, want, dtype, name)
        upstream = torch.randn_like(want).to(dtype)
        got.backward(upstream)
        want.backward(upstream.double())
        close(leaf.grad, exact.grad, dtype, f"{name}: gradient")
        if exact_w.grad is not None:
            close(w.grad, exact_w.grad, dtype, f"{name}: gradient of the weight")


def test_hub_sums_are_accurate():
    row = torch.cat([torch.zeros(20000, dtype=torch.long), torch.arange(50)])
    graph = Graph.from_coo(row, torch.randint(0, 60, row.shape), num_rows=50, num_cols=60)
    x = torch.rand(60, 64, requires_grad=True)
    out = ops.spgemm(graph, ops.maxk(x, 8))
    dense = reference.maxk(x.detach(), 8).double()
    close(out.detach(), reference.spmm(graph, dense, None, "copy_lhs", "sum"))


def test_threads_do_not_change_bits():
    graph, x, grad = graph_of(2000, 3000, 60000), torch.randn(3000, 64), torch.randn(2000, 64)
    threads, found = torch.get_num_threads(), []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        leaf = x.clone().requires_grad_()
        out = ops.spgemm(graph, ops.maxk(leaf, 16))
        out.backward(grad)
        found.append((out.detach(), leaf.grad))
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for pair in found[1:] for a, b in zip(pair, found[0], strict=True))


def test_gradcheck():
    graph = graph_of(6, 7, 25)
    x = torch.randn(7, 9, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(25, dtype=torch.float64, requires_grad=True)
    scale, bias = torch.rand(6, dtype=torch.float64), torch.randn(9, dtype=torch.float64, requires_grad=True)

    def plain(x, weight):
        return ops.spgemm(graph, ops.maxk(x, 4), weight)

    def around(x, bias):
        return ops.graph_conv(graph, ops.maxk(x, 2), row_scale=scale, bias=bias, relu=True)

    assert torch.autograd.gradcheck(plain, (x, weight))
    assert torch.autograd.gradgradcheck(plain, (x, weight))
    assert torch.autograd.gradcheck(around, (x, bias))
    matrix = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    shift = torch.randn(5, dtype=torch.float64, requires_grad=True)
    for given in ((x, matrix, shift), (x, matrix)):
        assert torch.autograd.gradcheck(lambda x, *map: F.linear(ops.maxk(x, 4), *map), given)
        assert torch.autograd.gradgradcheck(lambda x, *map: F.linear(ops.maxk(x, 4), *map).square(), given)


def test_registered_ops():
    graph = graph_of()
    h = ops.maxk(torch.randn(40, 32), 8)
    values, places = h.values().detach(), h.indices()
    arrays = ops._arrays.arrays_of(graph, True, values).flat()
    grad = torch.randn(30, 32)
    weight = torch.rand(300)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for name, args in (
        ("maxk", (torch.randn(9, 32, requires_grad=True), 5)),
        ("expand", (values.requires_grad_(), places, 32)),
        ("collect", (torch.randn(40, 32, requires_grad=True), places)),
        ("spgemm", (*arrays, values, places, 32, weight, None, None, False, False)),
        ("sspmm", (*arrays, grad.requires_grad_(), places, weight, None, False)),
    ):
        torch.library.opcheck(getattr(torch.ops.gnnaccel, name).default, args, test_utils=checks)


def test_dense_where_nothing_is_won(monkeypatch):
    """Extremes, several heads of weights and the tiled method see the dense tensor; so do sums of many entries."""
    graph, x = graph_of(), torch.randn(40, 16)
    h, dense = ops.maxk(x, 4), reference.maxk(x, 4)
    for call in (
        lambda x: ops.spmm(graph, x, reduce="max"),
        lambda x: ops.spmm(graph, x, torch.ones(300, 16)),
        lambda x: ops.spmm(graph, x, torch.ones(300), "add"),
        lambda x: ops.spmm(graph, x, kernel="tiled"),
        lambda x: ops.spmm(graph, x, empty_value=3.0),
        lambda x: ops.sddmm(graph, x, torch.ones(30, 16)),
        lambda x: ops.segment_reduce(x, torch.tensor([0, 10, 40])),
    ):
        torch.testing.assert_close(call(h), call(dense))
    monkeypatch.setattr(sys.modules["gnnaccel.ops.spgemm"], "_spgemm_op", None)
    torch.testing.assert_close(ops.spmm(graph, ops.maxk(x, 14)), ops.spmm(graph, reference.maxk(x, 14)))


@pytest.mark.parametrize("make", [gnn.GCN, gnn.GraphSAGE, gnn.GIN])
def test_models_with_maxk(make):
    """Trains with MaxK, and is the same function of its parameters as with the dense tensor."""
    torch.manual_seed(0)
    graph = graph_of(40, 40, 300).with_self_loops()
    x, y = torch.randn(40, 12), torch.randint(0, 3, (40,))
    model = make(12, 32, 3, num_layers=3, maxk=8, norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(graph, x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    kept = model(graph, x)
    for act in model.acts:
        act.register_forward_hook(lambda module, args, out: out.to_dense())
    torch.testing.assert_close(model(graph, x), kept)
    assert isinstance(make(12, 32, 3).acts[0], torch.nn.ReLU)


def test_blocks():
    """The destinations of a block are the first of its sources."""
    graph = graph_of(20, 40, 200)
    h = ops.maxk(torch.randn(40, 16), 4)
    for conv in (gnn.SAGEConv(16, 16), gnn.SAGEConv(16, 3), gnn.GINConv(torch.nn.Linear(16, 4)), gnn.GCNConv(16, 9)):
        torch.testing.assert_close(conv(graph, h), conv(graph, h.to_dense()))
    assert gnnaccel.nn.SAGEConv(16, 4, root=False)(graph, h).shape == (20, 4)
