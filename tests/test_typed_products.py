"""Linear maps with a matrix for each type of row: DGL's segment_mm, gather_mm and TypedLinear, PyG's HeteroLinear and
HeteroDictLinear, against the frameworks in float64 with gradients; and what they refuse."""

import contextlib
import copy
import functools

import pytest
import torch
from dgl_compare import dgl
from oracle import rand
from torch.autograd import gradcheck, gradgradcheck
from torch_geometric import nn as pyg_nn

import gnnaccel
from gnnaccel import dgl_backend, pyg_backend, report
from gnnaccel.ops import reference
from gnnaccel.ops.typed_matmul import typed_matmul

N, T, WIDE, TALL = 30, 5, 6, 4
TYPES = {
    "mixed": torch.arange(N) * 7 % T,
    "sorted": (torch.arange(N) * 7 % T).sort()[0],
    "absent": torch.arange(N) % 2 * 3,  # types 1, 2 and 4 have no rows
    "skewed": (torch.arange(N) == 17).long() * 4,  # one has nearly all
    "none": torch.zeros(0, dtype=torch.int64),
}


@pytest.fixture(autouse=True)
def _off():
    report.reset()
    yield
    dgl_backend.disable()
    pyg_backend.disable()


def ran(kind):
    site = report.snapshot().get(kind)
    return 0 if site is None else site.accelerated


def with_grads(call, *leaves):
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    out = call(*leaves)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def same(call, *leaves):
    """call with DGL alone and with the plug-in."""
    want = with_grads(call, *leaves)
    dgl_backend.enable()
    report.reset()
    got = with_grads(call, *leaves)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def _typed(types, stays, x, weight, bias):
    return typed_matmul("op", "types", x, types, weight, bias, stays)


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(T, WIDE, TALL), (T, 2, 3, 2)])
@pytest.mark.parametrize("name", TYPES)
def test_op(name, shape, index):
    types = TYPES[name].to(index)
    x, weight, bias = rand(len(types), WIDE), rand(*shape), rand(T, TALL)

    def definition(x, weight, bias):
        order = types.argsort(stable=True)
        ptr = torch.tensor([0, *torch.bincount(types, minlength=T).cumsum(0).tolist()])
        out = torch.zeros(len(types), TALL, dtype=x.dtype)
        return out.index_copy(0, order, reference.segment_matmul(x[order], ptr, weight)) + bias[types.long()]

    for stays in (True, False):
        op = functools.partial(_typed, types, stays)
        got = with_grads(op, x, weight, bias)
        for ours, theirs in zip(got, with_grads(definition, x, weight, bias), strict=True):
            torch.testing.assert_close(ours, theirs)
    if name == "mixed":
        leaves = [t[:7].requires_grad_() if t is x else t.requires_grad_() for t in (x, weight, bias)]
        op = functools.partial(_typed, types[:7], True)
        assert gradcheck(op, leaves) and gradgradcheck(op, leaves)


def test_types_that_are_written_into_are_sorted_again():
    types, x, weight = TYPES["mixed"].clone(), rand(N, WIDE), rand(T, WIDE, TALL)
    before = typed_matmul("op", "types", x, types, weight)
    types[3] = (types[3] + 1) % T
    after = typed_matmul("op", "types", x, types, weight)
    assert torch.equal(before[4:], after[4:]) and not torch.equal(before[3], after[3])


def test_under_torch_func():
    types, x, weight = TYPES["mixed"], rand(N, WIDE), rand(T, WIDE, TALL)
    got = torch.func.grad(lambda w: typed_matmul("op", "types", x, types, w).square().sum())(weight)
    want = torch.func.grad(lambda w: (x.unsqueeze(1) @ w[types]).square().sum())(weight)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("bad", [-1, T])
def test_types_out_of_range(bad):
    types = TYPES["mixed"].clone()
    types[7] = bad
    with pytest.raises(IndexError, match=rf"op: types: expected types in \[0, {T}\), got {bad} at row 7"):
        typed_matmul("op", "types", rand(N, WIDE), types, rand(T, WIDE, TALL))
    lin = gnnaccel.accelerate(pyg_nn.HeteroLinear(WIDE, TALL, T))
    with pytest.raises(IndexError, match=f"HeteroLinear: type_vec: .* got {bad} at row 7"):
        lin(torch.randn(N, WIDE), types)


@pytest.mark.parametrize("lengths", [[3, 0, 20, 1, 6], [0, 0, 30, 0, 0], [30, 0, 0, 0, 0]])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_segment_mm(lengths, index):
    same(lambda a, b: dgl.ops.segment_mm(a, b, torch.tensor(lengths, dtype=index)), rand(N, WIDE), rand(T, WIDE, TALL))
    assert ran("dgl.segment_mm") == 1


@pytest.mark.parametrize("width", [WIDE, 12])  # DGL sorts from 9 columns on
@pytest.mark.parametrize("name", [name for name in TYPES if name != "none"])
def test_gather_mm(name, width):
    same(lambda a, b: dgl.ops.gather_mm(a, b, idx_b=TYPES[name]), rand(N, width), rand(T, width, TALL))
    assert ran("dgl.gather_mm") == 1


def test_what_dgl_is_left():
    a, b = rand(N, WIDE), rand(T, WIDE, TALL)
    fewer = torch.tensor([3, 0, 4, 0, 0])
    want = dgl.ops.segment_mm(a, b, fewer)
    dgl_backend.enable()
    assert torch.equal(dgl.ops.segment_mm(a, b, fewer), want)
    with pytest.raises(RuntimeError):
        dgl.ops.segment_mm(a.float(), b, torch.tensor([N, 0, 0, 0, 0]))
    with pytest.raises(RuntimeError):
        dgl.ops.gather_mm(a[:, 1:], b, idx_b=TYPES["mixed"])
    assert not ran("dgl.segment_mm") and not ran("dgl.gather_mm")


@pytest.mark.parametrize("regularizer", [None, "basis", "bdd"])
@pytest.mark.parametrize("name", [name for name in TYPES if name != "none"])
def test_typed_linear(name, regularizer):
    torch.manual_seed(0)
    lin = dgl.nn.TypedLinear(WIDE, TALL, T, regularizer, 2 if regularizer else None).double()
    names = [name for name, _ in lin.named_parameters()]
    given = [p.detach() for p in lin.parameters()]

    def call(x, *parameters):
        named = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(lin, named, (x, TYPES[name], name == "sorted"))

    same(call, rand(N, WIDE), *given)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("flag", ["flag", "accelerate"])
@pytest.mark.parametrize("name", TYPES)
def test_hetero_linear(name, flag, bias):
    types = TYPES[name]
    lin = pyg_nn.HeteroLinear(WIDE, TALL, T, is_sorted=name == "sorted", bias=bias).double()
    with torch.no_grad():
        for parameter in lin.parameters():
            parameter.copy_(rand(*parameter.shape))
    x = rand(len(types), WIDE)
    want = results(lin, x, types)
    assert not report.snapshot()
    if flag == "flag":
        pyg_backend.enable()
    else:
        lin = gnnaccel.accelerate(lin)
    for _ in range(2):
        for ours, theirs in zip(results(lin, x, types), want, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert ran("pyg.HeteroLinear") == 2
    pyg_backend.disable()
    results(lin, x, types)
    assert ran("pyg.HeteroLinear") == 2


def results(lin, *args):
    x = args[0].detach().requires_grad_()
    out = lin(x, *args[1:])
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, [x, *lin.parameters()], upstream)]


def test_hetero_linear_that_finds_its_width_is_watched_or_cast():
    lin = gnnaccel.accelerate(pyg_nn.HeteroLinear(-1, TALL, T))
    x = torch.randn(N, WIDE)
    out = lin(x, TYPES["mixed"])
    assert out.shape == (N, TALL) and ran("pyg.HeteroLinear") == 1
    seen = []
    lin.register_forward_hook(lambda *args: seen.append(1))
    assert torch.equal(lin(x, TYPES["mixed"]), out) and seen
    with torch.autocast("cpu", torch.bfloat16), contextlib.suppress(RuntimeError):  # PyG's own way with it
        lin(x, TYPES["mixed"])
    assert ran("pyg.HeteroLinear") == 2
    twin = copy.deepcopy(lin)
    assert torch.equal(twin(x, TYPES["mixed"]), out)


def test_hetero_linear_under_torchscript():
    lin = gnnaccel.accelerate(pyg_nn.HeteroLinear(WIDE, TALL, T))
    x = torch.randn(N, WIDE)
    torch.testing.assert_close(torch.jit.script(lin)(x, TYPES["mixed"]), lin(x, TYPES["mixed"]))


def test_subclass_with_products_of_its_own():
    class Own(pyg_nn.HeteroLinear):
        def forward_naive(self, x, type_ptr):
            return 2 * super().forward_naive(x, type_ptr)

    lin = Own(WIDE, TALL, T, bias=False)
    want = lin(torch.ones(N, WIDE), TYPES["mixed"])
    lin = gnnaccel.accelerate(lin)
    torch.testing.assert_close(lin(torch.ones(N, WIDE), TYPES["mixed"]), want)
    assert not ran("pyg.HeteroLinear")
