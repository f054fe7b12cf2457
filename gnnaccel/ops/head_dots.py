"""Inner products of the heads of node features with a few vectors: the node scores of additive attention."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.lower import bounds


def head_dots(x: Tensor, vectors: Tensor) -> Tensor:
    """out[v, n, h] = sum over f of x[n, h, f] * vectors[v, h, f].

    Parameters
    ----------
    x : Tensor [N, H, F]
        float32, float64, bfloat16; float16 on CUDA.
    vectors : Tensor [V, H, F], same device
        Of the same dtype, or of float32 beside a 16-bit x.

    Returns
    -------
    Tensor [V, N, H]
        Of the dtype of the vectors.

    Raises
    ------
    TypeError
        For other dtypes. ValueError: for other shapes or devices.

    Notes
    -----
    One pass over x serves all vectors, in the backward too; 16-bit types accumulate in fp32. For 16-bit types on the
    CPU, more than two vectors on CUDA, and where a second derivative is asked for, it is composed of torch's ops.
    Deterministic.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> gnnaccel.ops.head_dots(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 4.0]]]))
    tensor([[[11.]]])
    """
    if x.dim() != 3 or vectors.dim() != 3 or x.shape[1:] != vectors.shape[1:]:
        raise ValueError(
            "head_dots: vectors: expected x [N, H, F] and vectors [V, H, F], got "
            f"{tuple(x.shape)} and {tuple(vectors.shape)}"
        )
    if x.layout != torch.strided or vectors.layout != torch.strided:
        raise TypeError(f"head_dots: expected dense tensors, got layouts {x.layout} and {vectors.layout}")
    if vectors.dtype not in (x.dtype, lib.accumulator(x)):
        raise TypeError(f"head_dots: vectors: expected {x.dtype}, x's, or {lib.accumulator(x)}, got {vectors.dtype}")
    if x.device != vectors.device:
        raise ValueError(f"head_dots: vectors: expected x's device {x.device}, got {vectors.device}")
    if x.is_cuda:
        served = lib.has_cuda_kernels() and x.dtype in lib.DTYPES and len(vectors) <= bounds.HEAD_DOTS_VECTORS
    else:
        served = x.is_cpu and x.dtype in (torch.float32, torch.float64)
    return head_dots_op(x, vectors).to(vectors.dtype) if served else _composed(x, vectors)


def _composed(x: Tensor, vectors: Tensor) -> Tensor:
    return (x * vectors.unsqueeze(1)).sum(-1)


def _sizes(x: Tensor, vectors: Tensor) -> tuple[int, ...]:
    return x.shape[0], vectors.shape[0], x.shape[1], x.shape[1] * x.shape[2], lib.DTYPES[x.dtype]


def _head_dots_impl(x, vectors):
    out = _head_dots_fake(x, vectors)
    if out.numel() == 0 or x.shape[2] == 0:
        return out.zero_()
    x, vectors = x.contiguous(), vectors.to(out.dtype).contiguous()
    lib.launch("head_dots", x.device, *(lib.pointer(t) for t in (x, vectors, out)), *_sizes(x, vectors))
    return out


def _head_dots_backward_impl(x, vectors, grad, into=None):
    """`into`: what the gradient of x is added to, contiguous; else that is a new tensor."""
    if grad.numel() == 0 or x.shape[2] == 0:
        grad_x, grad_vectors = (t.zero_() for t in _head_dots_backward_fake(x, vectors, grad))
        return grad_x if into is None else into, grad_vectors
    x, wide, grad = x.contiguous(), vectors.to(lib.accumulator(x)).contiguous(), grad.contiguous()
    grad_x, grad_vectors = torch.empty_like(x) if into is None else into, torch.empty_like(wide)
    pointers = (lib.pointer(t) for t in (x, wide, grad, grad_x, grad_vectors))
    lib.launch("head_dots_backward", x.device, *pointers, into is not None, *_sizes(x, vectors))
    return grad_x, grad_vectors.to(vectors.dtype)


def _head_dots_fake(x, vectors):
    return x.new_empty(vectors.shape[0], *x.shape[:2], dtype=lib.accumulator(x))


def _head_dots_backward_fake(x, vectors, grad):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, vectors))


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    x, vectors = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return head_dots_backward_op(x, vectors, grad)
    # A second derivative is wanted: the same in ops that have one.
    wide = grad.unsqueeze(-1)
    return (wide * vectors.unsqueeze(1)).sum(0).to(x.dtype), (wide * x).sum(1).to(vectors.dtype)


head_dots_backward_op = _operators.register(
    "head_dots_backward",
    "(Tensor x, Tensor vectors, Tensor grad) -> (Tensor, Tensor)",
    _head_dots_backward_impl,
    _head_dots_backward_fake,
)
# out in float32 for 16-bit features
head_dots_op = _operators.register(
    "head_dots",
    "(Tensor x, Tensor vectors) -> Tensor",
    _head_dots_impl,
    _head_dots_fake,
    backward=_backward,
    setup_context=_setup_context,
)
