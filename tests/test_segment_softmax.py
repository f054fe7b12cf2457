"""Sums of segments weighted by a softmax over each, against the same in float64."""

from __future__ import annotations

import pytest
import torch

from gnnaccel import _library
from gnnaccel.lower import bounds
from gnnaccel.ops.segment_softmax import Segments, segment_softmax

SIZES = {
    "molecules": [0, 3, 1, 17, 0, 9],
    "one": [40],
    "long": [1, 700, 0],
    "longest": [bounds.SOFTMAX_ROWS, 5],
}
DTYPES = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not (torch.cuda.is_available() and _library.has_cuda_kernels()):
        pytest.skip("no CUDA GPU here, or no kernels for it in this build")
    return request.param


def expected(x, sizes, t, constant):
    """By torch.softmax, segment by segment."""
    out, first = [], 0
    for size in sizes:
        rows, first = x[first : first + size], first + size
        weights = torch.softmax(rows * t, 0)
        out.append(((weights.detach() if constant else weights) * rows).sum(0))
    return torch.stack(out)


def given(device, name, width, dtype, t, index=torch.int64):
    torch.manual_seed(0)
    sizes = SIZES[name]
    x = (2 * torch.randn(sum(sizes), width)).to(device, dtype).requires_grad_()
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(device, index)
    if t == "each":
        t = (1 + torch.rand(width)).to(device, dtype).requires_grad_()
    elif t == "one":
        t = torch.tensor([1.5]).to(device, dtype).requires_grad_()
    return x, Segments(offsets, sum(sizes)), t


def compare(got, want, tolerance):
    for ours, exact in zip(got, want, strict=True):
        ours, exact = ours.detach(), exact.detach()
        size = max(float(exact.abs().max()), 1e-30)
        assert float((ours.double() - exact.double()).abs().max()) <= tolerance * size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 16, 33, 64])
@pytest.mark.parametrize("t", ["one", "each", 1.0, 0.3])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.only(where=lambda device, dtype: device == "cuda" or dtype != torch.float16)
def test_values_and_gradients_of_segment_softmax(device, name, width, dtype, t):
    x, segments, t = given(device, name, width, dtype, t)
    learned = isinstance(t, torch.Tensor)
    for constant in (False,) if learned else (False, True):
        out = segment_softmax(x, segments, t, constant)
        upstream = torch.rand(out.shape).to(out)  # of one sign: sums of gradients do not cancel out
        exact = [v.detach().double().requires_grad_() for v in ((x, t) if learned else (x,))]
        want = expected(exact[0], SIZES[name], exact[1] if learned else t, constant)
        grads = torch.autograd.grad(out, (x, t) if learned else x, upstream)
        compare([out, *grads], [want, *torch.autograd.grad(want, exact, upstream.double())], 2 * DTYPES[dtype])
        assert out.dtype == x.dtype and all(g.dtype == dtype for g in grads)


@pytest.mark.parametrize("t", ["one", "each"])
def test_constant_weights_give_no_gradient_to_t(device, t):
    x, segments, t = given(device, "molecules", 5, torch.float32, t)
    out = segment_softmax(x, segments, t, True)
    found = torch.autograd.grad(out.square().sum(), (x, t), allow_unused=True)
    want = expected(x, SIZES["molecules"], t.detach(), True)
    compare(found[:1], torch.autograd.grad(want.square().sum(), x), 1e-5)
    assert found[1] is None


def test_indices_of_32_bits(device):
    x, segments, t = given(device, "molecules", 8, torch.float32, "one", torch.int32)
    compare([segment_softmax(x, segments, t)], [expected(x.double(), SIZES["molecules"], t.double(), False)], 1e-5)


@pytest.mark.parametrize("t", ["one", "each", 0.7])
def test_second_derivatives_of_a_segment_softmax(device, t):
    x, segments, t = given(device, "molecules", 3, torch.float64, t)
    leaves = [v for v in (x, t) if isinstance(v, torch.Tensor)]

    def function(x, *given):
        return segment_softmax(x, segments, *(given or (t,)))

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves, nondet_tol=1e-10)  # torch adds by atomics on CUDA


def test_what_torch_s_softmax_makes_of_infinities(device):
    x, segments, _ = given(device, "molecules", 6, torch.float32, 1.0)
    x = x.detach()
    x[:3, 0], x[3, 1], x[5, 2], x[6, 3], x[8, 4] = -torch.inf, torch.inf, torch.nan, -torch.inf, 1e30
    out = segment_softmax(x, segments, 1.0)
    torch.testing.assert_close(out, expected(x, SIZES["molecules"], 1.0, False), equal_nan=True)


def test_hooks_may_give_back_other_strides(device):
    def across(t):
        return t.transpose(0, -1).contiguous().transpose(0, -1)

    x, segments, t = given(device, "molecules", 5, torch.float32, "each")
    want = torch.autograd.grad(segment_softmax(x, segments, t).square().sum(), (x, t))
    with torch.autograd.graph.saved_tensors_hooks(across, lambda t: t):
        out = segment_softmax(x, segments, t)
    compare(torch.autograd.grad(out.square().sum(), (x, t)), want, 1e-6)


def test_results_may_be_written_into(device):
    x, segments, t = given(device, "molecules", 4, torch.float32, "one")
    out = segment_softmax(x, segments, t)
    want = torch.autograd.grad(out.relu().sum(), x, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(out.relu_().sum(), x)[0], want)


def test_what_is_not_taken(device):
    x, segments, t = given(device, "molecules", 4, torch.float32, "one")
    for wrong in (x[:-1], x.unsqueeze(0), x.int(), x[:, :0], x.as_subclass(type("Mine", (torch.Tensor,), {}))):
        assert segment_softmax(wrong, segments, t) is None
    for wrong in (t.double(), torch.ones(3, device=device), torch.ones(1, 4, device=device)):
        assert segment_softmax(x, segments, wrong) is None
    assert segment_softmax(x, segments, t) is not None
