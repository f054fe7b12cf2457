"""When what a layer does may be one node of autograd, and what it is given then."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.ops._edge_factor import FUSED_DTYPES


def mixed(x: Tensor, vectors: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Under autocast, of features beside wider vectors: the dtype of the kernels, which gather 16-bit features as they
    are on CUDA, and of the result."""
    wide = torch.promote_types(x.dtype, vectors.dtype)
    return x.dtype if x.is_cuda and x.element_size() == 2 else wide, wide


def asks(inputs: tuple[Tensor, ...]) -> bool:
    """`needs_grad` of tensors that are `is_usual`."""
    if not torch.is_grad_enabled():
        return False
    for t in inputs:  # noqa: SIM110 - any() takes longer
        if t.requires_grad:
            return True
    return False


# Of what is made of sums, softmax and inner products.
BY_PARTS = {"cpu": (*FUSED_DTYPES["cpu"], torch.bfloat16), "cuda": FUSED_DTYPES["cuda"]}


def is_usual(
    graph: Graph,
    inputs: tuple[Tensor, ...],
    edge_scale: Tensor | None,
    wider: bool = False,
    dtypes: dict[str, tuple[torch.dtype, ...]] = FUSED_DTYPES,
) -> bool:
    """True where the kernels of one node take plain tensors of one dtype that they serve, and nobody listens. `wider`:
    inputs behind the first may be of float32 beside a narrower one."""
    x, *others = inputs if edge_scale is None else (*inputs, edge_scale)
    if not _operators.usual(x, *others) or x.device != graph.device or not graph.nnz:
        return False
    if x.dtype not in dtypes["cuda" if x.is_cuda else "cpu"]:
        return False
    if edge_scale is not None and (edge_scale.requires_grad or edge_scale.shape != (graph.nnz, x.shape[1])):
        return False
    for t in others:
        if t.device != x.device or not (t.dtype is x.dtype or (wider and t.dtype is torch.float32)):
            return False
    return True


def inner_bias(bias: Tensor | None, x: Tensor, keep: bool) -> Tensor | None:
    """The bias behind features like x [N, H, F], which `is_usual` takes, where one node of autograd is to add it: one
    that there will be (`keep`)."""
    if not keep or bias is None or not _operators.usual(bias) or bias.shape != (x.shape[1] * x.shape[2],):
        return None
    return bias if bias.device == x.device and torch.promote_types(x.dtype, bias.dtype) is bias.dtype else None
