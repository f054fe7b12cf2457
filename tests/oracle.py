"""Comparing an op with its plain-torch definition in float64, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

# Allowed error relative to |want| + max |want|: sums of terms of both signs lose digits to cancellation, and a
# bf16 gradient passes through up to three roundings of 2^-9.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


def rand(*shape: int, dtype: torch.dtype = torch.float64, device="cpu") -> Tensor:
    """Random values of both signs, none near 0, so that they can be divided by."""
    value = torch.rand(shape, dtype=torch.float64) + 0.5
    return (value * torch.where(torch.rand(shape) < 0.5, -1.0, 1.0)).to(device, dtype)


def assert_close(
    got: Tensor, want: Tensor, dtype: torch.dtype, what: str = "result", slack: float = 1.0, size: float = 0.0
) -> None:
    """Assert that `got` is of `dtype` and equals the float64 `want` within slack * TOLERANCE[dtype].

    size : what `want` is a sum of, where its terms may cancel all through; by default its largest element.
    """
    assert got.dtype == dtype, f"{what}: dtype {got.dtype}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if got.numel() == 0:
        return
    error = (got.double() - want).abs()
    bound = slack * TOLERANCE[dtype] * (want.abs() + want.abs().max().clamp(min=size))
    worst = int((error - bound).argmax())
    pair = f"{got.flatten()[worst].item()} for {want.flatten()[worst].item()}"
    assert bool((error <= bound).all()), f"{what}: {pair} at {worst} of {tuple(got.shape)}"


def check(op, reference, *inputs: Tensor) -> Tensor:
    """Compare op(*inputs) and its gradients with reference(*inputs in float64); returns op's result."""
    dtype = inputs[0].dtype
    leaves = [t.detach().requires_grad_() for t in inputs]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    got, want = op(*leaves), reference(*exact)
    assert_close(got, want, dtype)
    upstream = rand(*want.shape, dtype=dtype, device=got.device)
    got_grads = torch.autograd.grad(got, leaves, upstream)
    want_grads = torch.autograd.grad(want, exact, upstream.double())
    for i, pair in enumerate(zip(got_grads, want_grads, strict=True)):
        assert_close(*pair, dtype, f"gradient of input {i}")
    return got.detach()
