"""CBSR tensors are the dense tensor to everybody: operations, writing, autograd, saving, compiling."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from maxk_cases import graph_of
from torch.utils.checkpoint import checkpoint

from gnnaccel import ops
from gnnaccel.ops import reference
from gnnaccel.ops.cbsr import CBSR, compressed
from gnnaccel.ops.expand import expand

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


def test_autocast_of_compressed_rows():
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


def test_parts():
    values, places = torch.tensor([[1.0, 2.0]]), torch.tensor([[0, 3]], dtype=torch.uint8)
    h = compressed(values, places, 4)
    assert h.k == 2
    assert h.tolist() == [[1.0, 0.0, 0.0, 2.0]]
    assert torch.equal(h.to_dense(torch.float64), torch.tensor([[1.0, 0, 0, 2]]).double())
