"""Several linear maps of the same features as one node of autograd, against torch's own."""

import pytest
import torch
from oracle import rand
from torch.nn import functional as F

from gnnaccel.ops import joined_maps


def joined(apart):
    def ours(x, weight, bias, other):
        return joined_maps.joined_maps(x, [(weight, bias), (other, None)], apart)

    return ours, lambda x, weight, bias, other: (F.linear(x, weight, bias), F.linear(x, other))


def leaves(shapes, dtype=torch.float64):
    return [rand(*shape, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("apart", [0, 1, 2])
def test_joined_maps(apart):
    ours, exact = joined(apart)
    given = leaves([(9, 5), (4, 5), (4,), (3, 5)])
    got, want = ours(*given), exact(*given)
    torch.testing.assert_close(got, want)
    assert [t.is_contiguous() for t in got] == [place < apart for place in range(2)]
    torch.testing.assert_close(*(torch.autograd.grad(t[0].sum() + t[1].square().sum(), given) for t in (got, want)))
    assert torch.autograd.gradcheck(ours, given)
    assert torch.autograd.gradgradcheck(ours, given)
    for frozen in range(4):
        given = [t.detach().requires_grad_(k != frozen) for k, t in enumerate(given)]
        asked = [t for t in given if t.requires_grad]
        totals = [f(*given)[0].sum() + f(*given)[1].square().sum() for f in (ours, exact)]
        torch.testing.assert_close(*(torch.autograd.grad(total, asked) for total in totals))
    given = [t.detach().requires_grad_(k == 0) for k, t in enumerate(given)]
    assert ours(*given) is None  # the maps would let x be written into


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_joined_maps_under_autocast(dtype):
    torch.manual_seed(0)
    ours, composed = joined(1)
    given = [rand(*s, dtype=torch.float32 if k else dtype) for k, s in enumerate([(9, 5), (4, 5), (4,), (3, 5)])]
    given, found = [t.requires_grad_() for t in given], []
    for function in (ours, composed):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outs = function(*given)
        total = sum(out.float().square().sum() for out in outs)
        grads = torch.autograd.grad(total, given, create_graph=True)
        again = torch.autograd.grad(sum(g.float().square().sum() for g in grads), given)
        found.append([*outs, *grads, *again])
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0.02 * float(want.detach().abs().max()))
