"""Two linear maps with a batch norm and a ReLU between them, as one node of autograd on CUDA.

The forward pass is two products: the first leaves the statistics of its columns, the second normalises the rows that it
reads. The backward pass does the same with the gradients. Between them lies one matrix, what the first map gave; torch
writes four and reads eleven.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.ops import _arrays, products
from gnnaccel.ops.joined_sums import WRITTEN, versions


def normed_layers(
    x: Tensor,
    first: tuple[Tensor, Tensor | None],
    norm: tuple[Tensor, Tensor],
    running: tuple[Tensor, Tensor] | None,
    last: tuple[Tensor, Tensor | None],
    eps: float,
    momentum: float,
) -> Tensor | None:
    """out = linear(relu(batch_norm(linear(x)))), the norm by the statistics of these rows.

    Parameters
    ----------
    x : Tensor [N, F]
        float32.
    first : (weight [W, F], bias [W] or None)
    norm : (weight [W], bias [W])
    running : (mean [W], variance [W]), optional
        Moved towards the statistics by `momentum`.
    last : (weight [D, W], bias [D] or None)
    eps, momentum : float

    Returns
    -------
    Tensor [N, D], or None where the layers are to be called one by one: nothing has been done then.
    """
    parameters = (*first, *norm, *last)
    given = [t for t in (x, *parameters, *(running or ())) if t is not None]
    if not _operators.usual(*given) or not products.serves(x, *given[1:]):
        return None
    if any(t.device != x.device for t in given) or not _fit(x.shape[1], *parameters, *(running or ())):
        return None
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    out = _normed(partial(_composed, eps), keep, running, eps, momentum, x, *parameters)
    if running is not None:
        for statistic in running:
            torch.autograd.graph.increment_version(statistic)
    return out


def _fit(num_feats: int, weight, bias, gamma, beta, last_weight, last_bias, *running) -> bool:
    if weight.dim() != 2 or last_weight.dim() != 2:
        return False
    width = len(weight)
    if weight.shape[1] != num_feats or last_weight.shape[1] != width:
        return False
    if last_bias is not None and last_bias.shape != last_weight.shape[:1]:
        return False
    return all(t is None or t.shape == (width,) for t in (bias, gamma, beta, *running))


def _composed(eps: float, x, weight, bias, gamma, beta, last_weight, last_bias) -> Tensor:
    """The same by ops that can be differentiated again."""
    hidden = F.batch_norm(F.linear(x, weight, bias), None, None, gamma, beta, True, 0.0, eps)
    return F.linear(hidden.relu(), last_weight, last_bias)


def _aligned(x: Tensor) -> Tensor:
    """x as kernels read it: contiguous, at an address of 16 bytes."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


class _Normed(_operators.Function):
    @staticmethod
    def forward(ctx, again, keep, running, eps, momentum, x, *parameters):
        weight, bias, gamma, beta, last_weight, last_bias = parameters
        (rows, inner), width, outer = x.shape, weight.shape[0], last_weight.shape[0]
        hidden, norm = x.new_empty((rows, width)), x.new_empty((4, width))
        out = x.new_empty((rows, outer))
        given = (x, weight, bias, gamma, beta, *(running or (None, None)), last_weight, last_bias, hidden, norm, out)
        sizes = (rows, inner, width, outer)
        lib.launch("normed_layers", x.device, *map(lib.pointer, given), *sizes, eps, momentum)
        if keep:
            ctx.again = again
            # Parameters that no first derivative reads may be written into.
            ctx.parameters, ctx.versions = parameters, versions(parameters)
            ctx.save_for_backward(x, weight if ctx.needs_input_grad[5] else None, last_weight, hidden, norm)
        return out

    @staticmethod
    def backward(ctx, grad):
        of_x, *of_parameters = ctx.needs_input_grad[5:]
        parameters = ctx.parameters
        x, weight, last_weight, hidden, norm = ctx.saved_tensors
        if torch.is_grad_enabled() or not _operators.usual(grad):
            if versions(parameters) != ctx.versions:
                raise RuntimeError(WRITTEN)
            found = _arrays.gradients(ctx.again, (x, *parameters), (of_x, *of_parameters), grad)
            return *(None,) * 5, *found
        # What hooks on saved tensors give back may lie otherwise.
        read = (x, weight, last_weight, hidden, norm, grad)
        x, weight, last_weight, hidden, norm, grad = (None if t is None else _aligned(t) for t in read)
        of_weight, of_bias, _, _, of_last, of_last_bias = of_parameters
        width, outer = norm.shape[1], grad.shape[1]
        grads = (
            torch.empty_like(x) if of_x else None,
            x.new_empty((width, x.shape[1])) if of_weight else None,
            x.new_empty(width),
            x.new_empty(width),
            x.new_empty((outer, width)) if of_last or of_last_bias else None,
            x.new_empty(outer) if of_last_bias else None,
        )
        given = (x, weight, last_weight, hidden, norm, grad, *grads)
        sizes = (x.shape[0], x.shape[1], width, outer)
        lib.launch("normed_layers_backward", x.device, *map(lib.pointer, given), *sizes)
        found = (*grads[:2], x.new_zeros(width) if of_bias else None, *grads[2:])  # a norm takes a bias away
        return *(None,) * 5, *(g if w else None for g, w in zip(found, (of_x, *of_parameters), strict=True))


# Without Function.apply()'s wrapper, as in layers.py.
_normed = super(torch.autograd.Function, _Normed).apply  # type: ignore[misc]
