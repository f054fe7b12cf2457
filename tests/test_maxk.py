"""MaxK and CBSR tensors: what is kept, that it is the dense tensor to everybody else, and sums over graphs."""

import copy
import io
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import gnnaccel
from gnnaccel import nn as gnn
from gnnaccel import ops
from gnnaccel.graph.structure import Graph
from gnnaccel.ops import reference
from gnnaccel.ops.cbsr import CBSR, compressed
from gnnaccel.ops.expand import collect, expand, places_dtype

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
CASES = [(1, 1), (5, 2), (33, 33), (64, 8), (100, 7), (256, 32), (256, 96), (300, 32), (1030, 5)]


def hostile(rows, num_feats, dtype=torch.float32):
    """Rows of few values, of many ties, with infinities, NaN, both zeros."""
    x = torch.randn(rows, num_feats, dtype=torch.float64)
    x[1::7] = x[1::7].round()
    x[2::7] = x[2::7].clamp(min=0)
    x[3::7] = torch.where(torch.rand_like(x[3::7]) < 0.3, torch.nan, x[3::7])
    x[4::7] = torch.where(torch.rand_like(x[4::7]) < 0.3, torch.inf, x[4::7] * 1e30)
    x[5::7] = torch.where(torch.rand_like(x[5::7]) < 0.5, -0.0, 0.0)
    x[6::7] = -torch.inf
    return x.to(dtype)


def places_of(x, k):
    return x.double().sort(dim=1, descending=True, stable=True).indices[:, :k].sort(1).values


def graph_of(rows=30, cols=40, nnz=300, index=torch.int64):
    """With empty rows, repeated edges and a hub."""
    row, col = torch.randint(2, rows, (nnz,)), torch.randint(cols, (nnz,))
    row[: nnz // 3] = 3
    return Graph.from_coo(row.to(index), col.to(index), num_rows=rows, num_cols=cols)


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
    arrays = ops._arrays.arrays_of(graph, True, values)
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


OPERATIONS = {
    "add": lambda h, w: h + 1,
    "sub": lambda h, w: 2 - h,
    "mul": lambda h, w: h * h,
    "linear": lambda h, w: F.linear(h, w),
    "matmul": lambda h, w: w @ h.t(),
    "sum": lambda h, w: h.sum(0),
    "norm": lambda h, w: h.norm(dim=1),
    "cat": lambda h, w: torch.cat([h, h.exp()], 1),
    "stack": lambda h, w: torch.stack([h, h]),
    "index": lambda h, w: h[torch.tensor([3, 1, 1])],
    "slice": lambda h, w: h[2:5, ::2],
    "view": lambda h, w: h.view(-1, 4),
    "where": lambda h, w: torch.where(h > 0.5, h, -h),
    "softmax": lambda h, w: h.softmax(1),
    "batch_norm": lambda h, w: F.batch_norm(h, None, None, training=True),
    "scaled": lambda h, w: 3 * h / 2,
    "by row": lambda h, w: h * w[:, :1],
    "negated": lambda h, w: -h,
    "relu": lambda h, w: h.relu(),
    "half": lambda h, w: h.bfloat16().float(),
    "cloned": lambda h, w: h.clone().detach() + h,
    "unbind": lambda h, w: h.unbind(1)[2],
    "like": lambda h, w: torch.ones_like(h) * h + h.new_zeros(1),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_it_is_the_dense_tensor(name):
    operation = OPERATIONS[name]
    weight = torch.randn(16, 16)
    results = []
    for dense in (False, True):
        torch.manual_seed(1)
        x = torch.randn(16, 16, requires_grad=True)
        h = ops.maxk(x, 4)
        out = operation(h.to_dense() if dense else h, weight)
        out = out.to_dense() if isinstance(out, CBSR) else out
        out.square().sum().backward()
        results.append((out.detach(), x.grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_what_stays_compressed():
    h = ops.maxk(torch.randn(6, 8), 3)
    for kept in (
        *(h * 2, 2 * h, h / 3, -h, h.relu(), h.double(), h.bfloat16(), h.to("cpu"), h.clone(), h.detach()),
        *(h * torch.rand(6, 1), F.dropout(h, 0.5), F.dropout(h, 0.5, training=False), h.view(6, 8), h.contiguous()),
        *(ops.maxk(h, 2), torch.nn.Dropout(0.1)(h), copy.copy(h)),
    ):
        assert isinstance(kept, CBSR)
        assert kept.is_compressed
    assert torch.equal(F.dropout(h, 0.0).to_dense(), h.to_dense())
    for dense in (h + 1, h * torch.rand(6, 8), h[1:], h.t(), h.int(), h.exp(), h / 0, h * float("inf")):
        assert type(dense) is torch.Tensor


def test_writing_into_it():
    x = torch.randn(6, 8)
    graph = graph_of(5, 6, 20)
    assert ops.spgemm(graph, ops.maxk(x, 2)).shape == (5, 8)
    for write in (
        lambda h: h.add_(1),
        lambda h: h.__setitem__((slice(None), 0), 5),
        lambda h: h[:, :3].mul_(2),
        lambda h: h.detach().fill_(4),
        lambda h: torch._foreach_mul_([h], 10.0),
        lambda h: h.apply_(lambda value: value + 1),
        lambda h: h.t()[2].zero_(),
        lambda h: torch.nn.init.ones_(h),
        lambda h: torch.add(x, 1, out=h),
    ):
        h, dense = ops.maxk(x, 2), reference.maxk(x, 2)
        write(h)
        write(dense)
        assert not h.is_compressed
        assert torch.equal(h + 0, dense)
        torch.testing.assert_close(ops.spmm(graph, h), ops.spmm(graph, dense))
        with pytest.raises(RuntimeError, match="written into"):
            h.values()


def test_what_is_refused():
    h = ops.maxk(torch.randn(6, 8), 2)
    for write in (lambda: h.t_(), lambda: h.unsqueeze_(0), lambda: h.resize_(3, 8), lambda: h.squeeze_()):
        with pytest.raises(RuntimeError, match="shape"):
            write()
    with pytest.raises(RuntimeError, match="data"):
        h.data = torch.ones(6, 8)
    with pytest.raises(RuntimeError, match="requires grad"):
        h.detach().requires_grad_().numpy()


def test_entries_are_not_shared():
    h = ops.maxk(torch.randn(6, 8), 2)
    dense = h.to_dense()
    h.values().mul_(3)
    assert torch.equal(h.to_dense(), dense)


def test_reading_through_an_alias():
    h = ops.maxk(torch.randn(6, 8), 2)
    for read in (lambda: h.detach()[2:5].sum(), lambda: h.data[0], lambda: repr(h.detach()), lambda: h.tolist()):
        read()
        assert h.is_compressed
    h.detach()[2].zero_()
    assert not h.is_compressed
    assert not bool(h.to_dense()[2].any())


@pytest.mark.parametrize(
    "values,places,num_feats",
    [
        (torch.ones(9, 8), torch.full((9, 8), 255, dtype=torch.uint8), 4),
        (torch.ones(9, 2), torch.full((9, 2), 255, dtype=torch.uint8), 200),
        (torch.ones(9, 2), torch.tensor([[3, 1]] * 9, dtype=torch.uint8), 200),
        (torch.ones(9, 2), torch.zeros(9, 3, dtype=torch.uint8), 200),
        (torch.ones(9, 1), torch.full((9, 1), 65535, dtype=torch.uint16), 300),
        (torch.ones(9, 1).int(), torch.zeros(9, 1, dtype=torch.uint8), 30),
    ],
)
def test_a_file_with_anything(values, places, num_feats):
    file = io.BytesIO()
    torch.save(CBSR(values, places, num_feats), file)
    file.seek(0)
    with pytest.raises(ValueError, match="no CBSR"):
        torch.load(file, weights_only=True)


def test_writing_in_autograd():
    results = []
    for dense in (False, True):
        x = torch.linspace(-1, 2, 48).view(6, 8).sin().requires_grad_()
        h = ops.maxk(x, 3)
        h = h.to_dense() if dense else h
        h = h * 1.0
        h.mul_(3)
        view = h[:, 2:4]
        view.mul_(2)
        (h.square()).sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(*results)


def test_reading_a_view_keeps_it():
    h = ops.maxk(torch.randn(6, 8), 3)
    view = h[:, 2]
    assert h.is_compressed
    assert float(view.sum()) == float(h.to_dense()[:, 2].sum())
    assert repr(h)
    assert h.is_compressed


def test_gradient_of_several_uses():
    graph = graph_of(40, 40, 200)
    weight = torch.randn(16, 16)
    results = []
    for dense in (False, True):
        torch.manual_seed(2)
        x = torch.randn(40, 16, requires_grad=True)
        h = ops.maxk(x, 4)
        h = h.to_dense() if dense else h
        out = ops.spmm(graph, h) + ops.spmm(graph, h, reduce="mean") + F.linear(h, weight)
        out.square().sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(*results)


def test_hooks_and_leaves():
    graph = graph_of(40, 40, 200)
    seen = []
    x = torch.randn(40, 16, requires_grad=True)
    h = ops.maxk(x, 4)
    h.register_hook(lambda grad: seen.append(type(grad)))
    h.retain_grad()
    ops.spmm(graph, h).sum().backward()
    assert seen == [CBSR]
    torch.testing.assert_close(expand(h.grad.values(), h.grad.indices(), 16), x.grad)
    (grad,) = torch.autograd.grad(F.linear(h := ops.maxk(x, 4), torch.randn(3, 16)).sum(), h)
    assert isinstance(grad, CBSR)
    leaf = ops.maxk(x.detach(), 4).requires_grad_()
    for _ in range(2):
        ops.spmm(graph, leaf).sum().backward()
    torch.testing.assert_close(leaf.grad.to_dense(), 2 * x.grad)
    leaf.sum().backward()
    torch.testing.assert_close(leaf.grad + 0, 2 * x.grad + 1)
    (grad,) = torch.autograd.grad(ops.spmm(graph, leaf).sum(), leaf)
    torch.testing.assert_close(grad.to_dense(), x.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    graph = graph_of(40, 40, 200)
    x = torch.randn(40, 16, requires_grad=True)
    checkpoint(lambda h: ops.spmm(graph, h).relu(), ops.maxk(x, 4), use_reentrant=reentrant).sum().backward()
    (want,) = torch.autograd.grad(ops.spmm(graph, ops.maxk(x, 4)).relu().sum(), x)
    torch.testing.assert_close(x.grad, want)


@pytest.mark.parametrize("num_feats", [16, 300])
def test_saving_and_copying(num_feats):
    h = ops.maxk(torch.randn(6, num_feats), 3).requires_grad_()
    file = io.BytesIO()
    torch.save({"h": h}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["h"]
    for other in (loaded, copy.deepcopy(h), copy.deepcopy({"h": h})["h"]):
        assert isinstance(other, CBSR)
        assert other.is_compressed
        assert other.requires_grad
        assert torch.equal(other.to_dense(), h.to_dense())
    written = h.detach()
    written.add_(1)
    file = io.BytesIO()
    torch.save(written, file)
    file.seek(0)
    assert torch.equal(torch.load(file), written + 0)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(h * 2)


def test_autocast():
    graph = graph_of(40, 40, 200)
    x, layer = torch.randn(40, 16), torch.nn.Linear(16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        h = ops.maxk(layer(x), 4)
        assert h.dtype == torch.bfloat16
        out = ops.spmm(graph, h)
        assert out.dtype == torch.bfloat16
        assert layer(h).dtype == torch.bfloat16
        out.float().sum().backward()
    assert bool(layer.weight.grad.any())


def test_inference_mode():
    graph, x = graph_of(40, 40, 200), torch.randn(40, 16)
    with torch.inference_mode():
        h = ops.maxk(x, 4)
        want = ops.spmm(graph, h.to_dense())
        torch.testing.assert_close(ops.spmm(graph, h), want)
        assert isinstance(F.dropout(h, 0.5, training=False), CBSR)
        assert h[:3].shape == (3, 16)
        torch.testing.assert_close(ops.spmm(graph, h), want)


def test_memory_of_other_libraries():
    h = ops.maxk(torch.randn(6, 8), 3)
    dense = h.to_dense()
    assert torch.equal(torch.from_numpy(h.numpy()), dense)
    assert h.tolist() == dense.tolist()
    assert torch.equal(torch.from_dlpack(ops.maxk(dense, 8)), dense)
    assert float(h[0, 0]) == float(dense[0, 0])


COMPILED = {
    "layer": lambda graph, x, w: ops.spmm(graph, ops.maxk(x @ w, 4)).relu(),
    "twice": lambda graph, x, w: ops.spmm(graph, h := ops.maxk(x @ w, 4)) + F.linear(h, w),
    "around": lambda graph, x, w: ops.graph_conv(graph, ops.maxk(x, 4) * 0.5, bias=w[0]),
    "dropout": lambda graph, x, w: ops.spmm(graph, F.dropout(ops.maxk(x, 4), 0.0)),
    "dense": lambda graph, x, w: ops.maxk(x, 4) + 1,
}


@pytest.mark.parametrize("name", COMPILED)
def test_compile(name):
    graph, function = graph_of(40, 40, 200), COMPILED[name]
    x, w = torch.randn(40, 16, requires_grad=True), torch.randn(16, 16)
    torch._dynamo.reset()
    out = torch.compile(function, fullgraph=True, backend="aot_eager")(graph, x, w)
    want = function(graph, x, w)
    torch.testing.assert_close(out, want)
    grads = (torch.autograd.grad(t.square().sum(), x)[0] for t in (out, want))
    torch.testing.assert_close(*grads)


def test_compile_with_cbsr_in_and_out():
    graph, x = graph_of(40, 40, 200), torch.randn(40, 16)
    torch._dynamo.reset()
    h = torch.compile(lambda x: ops.maxk(x, 4), fullgraph=True, backend="aot_eager")(x)
    assert isinstance(h, CBSR)
    out = torch.compile(lambda h: ops.spmm(graph, h), fullgraph=True, backend="aot_eager")(h)
    torch.testing.assert_close(out, ops.spmm(graph, h.to_dense()))


def test_dense_where_nothing_is_won(monkeypatch):
    """Extremes, several heads of weights and the tiled method see the dense tensor; so do sums of many entries."""
    graph, x = graph_of(), torch.randn(40, 16)
    h, dense = ops.maxk(x, 4), reference.maxk(x, 4)
    for call in (
        lambda x: ops.spmm(graph, x, reduce="max"),
        lambda x: ops.spmm(graph, x, torch.ones(300, 16)),
        lambda x: ops.spmm(graph, x, torch.ones(300), "add"),
        lambda x: ops.spmm(graph, x, method="tiled"),
        lambda x: ops.spmm(graph, x, empty_value=3.0),
        lambda x: ops.sddmm(graph, x, torch.ones(30, 16)),
        lambda x: ops.segment_reduce(x, torch.tensor([0, 10, 40])),
    ):
        torch.testing.assert_close(call(h), call(dense))
    monkeypatch.setattr(sys.modules["gnnaccel.ops.spgemm"], "_spgemm_op", None)
    torch.testing.assert_close(ops.spmm(graph, ops.maxk(x, 14)), ops.spmm(graph, reference.maxk(x, 14)))


def test_parts():
    values, places = torch.tensor([[1.0, 2.0]]), torch.tensor([[0, 3]], dtype=torch.uint8)
    h = compressed(values, places, 4)
    assert h.k == 2
    assert h.tolist() == [[1.0, 0.0, 0.0, 2.0]]
    assert torch.equal(h.to_dense(torch.float64), torch.tensor([[1.0, 0, 0, 2]]).double())


@pytest.mark.parametrize("make", [gnn.GCN, gnn.GraphSAGE, gnn.GIN])
def test_models(make):
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
