"""Products of 16-bit matrices as a wider dtype (gnnaccel/_precision.py)."""

import pytest
import torch

from gnnaccel import _precision

SHAPES = ((64, 1000, 16), (5, 3, 7), (1, 8, 1), (4, 0, 6), (0, 8, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_halves_as_float32(device, dtype, shape, transposed):
    rng = torch.Generator().manual_seed(0)
    rows, inner, columns = shape
    a = torch.randn(inner, rows, generator=rng).t() if transposed else torch.randn(rows, inner, generator=rng)
    a, b = a.to(device, dtype), torch.randn(inner, columns, generator=rng).to(device, dtype)
    with torch.no_grad():
        out = _precision.product(a, b, torch.float32)
    want = a.double().mm(b.double())
    assert out.dtype is torch.float32 and out.shape == want.shape
    once = (device.type == "cuda" and _precision._WRITES_WIDE) or dtype is torch.float32
    tolerance = 1e-5 if once else torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance * max(inner, 1))


def test_a_product_that_is_recorded(device):
    a, b = (torch.randn(4, 4, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    out = _precision.product(a, b, torch.float32)
    assert out.dtype is torch.float32
    for got, want in zip(
        torch.autograd.grad(out.sum(), (a, b)), torch.autograd.grad(a.mm(b).sum(), (a, b)), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_a_product_keeps_its_dtype(device):
    a, b = (torch.randn(4, 4, device=device, dtype=torch.bfloat16) for _ in range(2))
    assert torch.equal(_precision.product(a, b, torch.bfloat16), a.mm(b))
