"""GIN's sum over neighbours and a node itself, as one node of autograd."""

from __future__ import annotations

import pytest
import torch

import gnnaccel
from gnnaccel import Graph, _library
from gnnaccel.ops.own_sum import own_sum, own_sum_mapped

N, E = 30, 120


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not (torch.cuda.is_available() and _library.has_cuda_kernels()):
        pytest.skip("no CUDA GPU here, or no kernels for it in this build")
    return request.param


def given(device, dtype, graded):
    torch.manual_seed(0)
    rows, cols = torch.randint(N, (2, E)).to(device)
    x = torch.randn(N, 8, dtype=torch.float64).to(device, dtype).requires_grad_()
    eps = torch.tensor([0.3]).to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    return Graph.from_coo(rows, cols, num_rows=N, num_cols=N), x, eps.requires_grad_(graded)


def expected(graph, x, eps):
    rows = torch.repeat_interleave(torch.arange(N, device=x.device), graph.indptr.diff().long())
    return torch.zeros_like(x).index_add(0, rows, x[graph.indices.long()]) + (1 + eps) * x


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_and_gradients_of_own_sum(device, dtype, graded):
    graph, x, eps = given(device, dtype, graded)
    leaves = (x, eps) if graded else (x,)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    exact = [t.detach().double().requires_grad_() for t in (x, eps)]
    want = expected(graph, *exact)
    upstream = torch.randn_like(want).to(dtype)
    wants = [want, *torch.autograd.grad(want, exact[: len(leaves)], upstream.double())]
    for autocast in (False, True):  # where one has cast x before, it stays as it is
        for _ in range(5):  # a graph's calls become ready
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                out = own_sum(graph, x, eps)
            got = [out, *torch.autograd.grad(out, leaves, upstream)]
            for ours, exactly, like in zip(got, wants, (x, *leaves), strict=True):
                assert ours.dtype == like.dtype and ours.shape == exactly.shape
                size = float(exactly.detach().abs().max())
                assert float((ours.detach().double() - exactly.detach()).abs().max()) <= tolerance * size


@pytest.mark.parametrize("width", [3, 8, 41, 64])
@pytest.mark.parametrize("ordered", [False, True])
def test_rows_in_pieces(device, width, ordered):
    """A hub, rows without edges, and rows in another order than they are given in."""
    torch.manual_seed(0)
    cols = torch.cat([torch.randint(N, (20_000,)), torch.randint(N, (E,))]).to(device)
    rows = torch.cat([torch.full((20_000,), 4), torch.randint(N - 3, (E,))]).to(device)
    graph = Graph.from_coo(rows, cols, num_rows=N, num_cols=N)
    if ordered:
        gnnaccel.prepare(graph, reorder=True)
    x, eps = torch.randn(N, width, device=device, requires_grad=True), torch.tensor([0.3], device=device)
    want = expected(graph, *(t.detach().double() for t in (x, eps)))
    for _ in range(5):  # a graph's calls become ready
        torch.testing.assert_close(own_sum(graph, x, eps).double(), want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("own", ["none", "constant", "trained"])
def test_with_a_map_behind(device, own):
    """Values, and derivatives of both orders: of float64 as by definition, and near that of bfloat16."""
    graph, x, eps = given(device, torch.float64, own == "trained")
    maps = [torch.randn(*shape, dtype=torch.float64).to(device).requires_grad_() for shape in ((4, 8), (4,))]
    leaves = [x, *maps, *([eps] if own == "trained" else [])]

    def ours(x, weight, bias, eps=eps, narrow=torch.float64):
        return own_sum_mapped(graph, x, None if own == "none" else eps, weight, bias, narrow)

    def definition(x, weight, bias, eps=eps):
        sums = expected(graph, x, eps if own != "none" else eps.detach() * 0 - 1)
        return torch.nn.functional.linear(sums, weight, bias)

    def results(function, leaves, **how):
        out = function(*leaves, **how)
        upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
        grads = torch.autograd.grad(out, leaves, upstream, create_graph=True)
        again = torch.autograd.grad(sum(g.double().square().sum() for g in grads), leaves, materialize_grads=True)
        return [out, *grads, *again]

    for _ in range(5):  # a graph's calls become ready
        torch.testing.assert_close(results(ours, leaves), results(definition, leaves))
    assert torch.autograd.gradgradcheck(ours, leaves)
    wants = results(definition, leaves)
    for dtype in (torch.float32, torch.bfloat16):
        narrow = [t.detach().to(torch.float32 if k else dtype).requires_grad_() for k, t in enumerate(leaves)]
        got = results(ours, narrow, narrow=torch.bfloat16)
        assert [t.dtype for t in got] == [torch.bfloat16, *[t.dtype for t in narrow] * 2]
        for one, want in zip(got, wants, strict=True):
            error = (one.detach().double() - want.detach()).abs().max()
            assert float(error) <= 4e-2 * float(want.detach().abs().max())


def test_parameters_written_into_before_a_second_derivative(device):
    graph, x, eps = given(device, torch.float32, True)
    weight = torch.randn(4, 8, device=device, requires_grad=True)
    out = own_sum_mapped(graph, x, eps, weight, None, torch.bfloat16).float().sum()
    with torch.no_grad():
        weight.mul_(2)
    first = torch.autograd.grad(out, x, retain_graph=True)[0]
    assert torch.isfinite(first).all()
    with pytest.raises(RuntimeError, match="written into"):
        torch.autograd.grad(out, x, create_graph=True)


def test_what_frozen_features_and_maps_leave(device):
    """Of frozen features nothing to differentiate again, of a frozen map no sums."""
    graph, x, eps = given(device, torch.float32, False)
    x = x.detach()
    weight = torch.randn(4, 8, device=device, requires_grad=True)
    out = own_sum_mapped(graph, x, eps, weight, None, torch.bfloat16)
    assert not torch.autograd.grad(out.sum(), weight, create_graph=True)[0].requires_grad
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        own_sum_mapped(graph, x.requires_grad_(), eps, weight.detach(), None, torch.bfloat16)
    assert x.shape not in kept


@pytest.mark.parametrize("mapped", [False, True])
def test_the_gradient_of_eps_beside_narrow_features(device, mapped):
    """Of products that nearly cancel out."""
    graph, x, eps = given(device, torch.bfloat16, True)
    weight = torch.eye(8, dtype=torch.bfloat16, device=device)
    out = own_sum_mapped(graph, x, eps, weight, None, torch.bfloat16) if mapped else own_sum(graph, x, eps)
    upstream = torch.randn(out.shape, device=device).to(out.dtype)
    want = (upstream.double() * x.detach().double()).sum().float().view(eps.shape)
    torch.testing.assert_close(torch.autograd.grad(out, eps, upstream)[0], want, rtol=1e-5, atol=0)


def test_second_derivatives_of_an_own_sum(device):
    graph, x, eps = given(device, torch.float64, True)
    assert torch.autograd.gradgradcheck(lambda x, eps: own_sum(graph, x, eps), (x, eps))


def test_x_may_be_written_into_where_eps_is_constant(device):
    graph, x, eps = given(device, torch.float32, False)
    out = own_sum(graph, x * 1, eps)
    out.relu_().sum().backward()  # as PyG's sum may be
    assert x.grad is not None


@pytest.mark.parametrize("autocast", [False, True])
def test_eps_may_be_written_into_before_a_first_derivative(device, autocast):
    graph, x, eps = given(device, torch.float32, True)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        out = own_sum(graph, x.bfloat16() if autocast else x, eps)
    before = torch.autograd.grad(out.sum(), (x, eps), retain_graph=True)
    with torch.no_grad():
        eps.add_(1)  # as an optimizer's step: torch's own sum keeps 1 + eps
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), (x, eps), retain_graph=True), before))
    with pytest.raises(RuntimeError, match="written into"):
        torch.autograd.grad(out.sum(), (x, eps), create_graph=True)


def test_what_is_not_taken(device):
    graph, x, eps = given(device, torch.float32, False)
    for wrong in (x[:-1], x[:, 0], x.int(), x.as_subclass(type("Mine", (torch.Tensor,), {}))):
        assert own_sum(graph, wrong, eps) is None
    assert own_sum(graph, x, torch.zeros(2, device=device)) is None
    assert own_sum(graph, x, eps.double()) is None
    assert own_sum(graph, x, eps) is not None
