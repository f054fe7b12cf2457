"""MaxK: the k largest entries of each row, as a CBSR tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.lower import bounds
from gnnaccel.ops.cbsr import CBSR, compressed
from gnnaccel.ops.expand import collect, description, expand, places_dtype


def maxk(x: Tensor, k: int) -> CBSR:
    """The k largest entries of each row of x, the others 0: what MaxK-GNN takes in place of a ReLU.

    Parameters
    ----------
    x : Tensor [N, D]
        float32, float64, bfloat16, float16. Any strides. D up to 65536.
    k : int, 1 to D

    Returns
    -------
    CBSR [N, D]
        Behaves as the dense tensor (see `CBSR`), but keeps k entries a row: values() [N, k], and indices() [N, k],
        which ascend in a row, as uint8 for D up to 256, else uint16. `spmm` and `graph_conv`, and so the layers of DGL
        and PyG under gnnaccel, sum it up over a graph by its entries.

    Raises
    ------
    TypeError
        For a wrong type or dtype. ValueError: for a shape that is not [N, D], or a k outside 1..D.

    Notes
    -----
    Exactly k, whatever the values: of equal ones those with the lowest index are kept, -0 equals 0, NaN counts as
    larger than all numbers (as in torch.topk). Kept entries, negative ones too, are what they are in x. The gradient
    goes to the kept entries. Deterministic. Source: MaxK-GNN (Peng et al., ASPLOS 2024), whose selection halves values
    and may keep more than k.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> h = gnnaccel.ops.maxk(torch.tensor([[3.0, 1.0, 2.0, 3.0]]), 2)
    >>> h.indices(), h.to_dense()
    (tensor([[0, 3]], dtype=torch.uint8), tensor([[3., 0., 0., 3.]]))
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"maxk: x: expected a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in lib.DTYPES:
        raise TypeError(f"maxk: x: expected a floating-point dtype, got {x.dtype}; convert it with .float()")
    if x.layout != torch.strided:
        raise TypeError(f"maxk: x: expected a dense tensor, got layout {x.layout}; use .to_dense()")
    if x.dim() != 2 or not 1 <= x.shape[1] <= bounds.WIDEST_PLACES:
        raise ValueError(
            f"maxk: x: expected shape [N, D] with D from 1 to {bounds.WIDEST_PLACES}, got {tuple(x.shape)}"
        )
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"maxk: k: expected an int, got {type(k).__name__}")
    if not 1 <= k <= x.shape[1]:
        raise ValueError(f"maxk: k: expected 1 to {x.shape[1]}, the number of features, got {k}")
    if isinstance(x, CBSR):
        x = x.to_dense()
    values, places = _maxk_op(x, k)
    return compressed(values, places, x.shape[1])


def _maxk_impl(x, k):
    values, places = _maxk_fake(x, k)
    if values.numel():
        x = x.contiguous()
        if x.dtype == torch.float16 and not x.is_cuda:  # no kernel; in float32 they compare alike
            places = _maxk_impl(x.float(), k)[1]
            return collect(x, places), places
        kept = description(values, places, x.shape[1])
        lib.launch("maxk", x.device, x.data_ptr(), x.shape[0], kept, lib.DTYPES[x.dtype])
    return values, places


def _maxk_fake(x, k):
    places = x.new_empty(x.shape[0], k, dtype=places_dtype(x.shape[1]))
    return x.new_empty(x.shape[0], k), places


def _setup_context(ctx, inputs, output):
    ctx.num_feats = inputs[0].shape[1]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


def _backward(ctx, grad, _):
    return None if grad is None else expand(grad, ctx.saved_tensors[0], ctx.num_feats), None


_maxk_op = _operators.register(
    "maxk",
    "(Tensor x, SymInt k) -> (Tensor, Tensor)",
    _maxk_impl,
    _maxk_fake,
    backward=_backward,
    setup_context=_setup_context,
)
