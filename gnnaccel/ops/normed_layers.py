"""Two linear maps with a batch norm and a ReLU between them, or on the CPU a ReLU alone, as one node of autograd.

The forward pass is two products: the first leaves the statistics of its columns, the second normalises the rows that it
reads. The backward pass does the same with the gradients. Between them lies one matrix, what the first map gave; torch
writes four and reads eleven.

On the CPU, if it is AMD's, the products are our own as well, on vectors of all bits that it has: MKL takes 256 of 512.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel import _library as lib
from gnnaccel import _operators, touch
from gnnaccel.lower import bounds
from gnnaccel.ops import _arrays, products
from gnnaccel.ops.joined_sums import WRITTEN, versions

_PAYS = lib.isa() != "baseline" and lib.is_amd()


def normed_layers(
    x: Tensor,
    first: tuple[Tensor, Tensor | None],
    norm: tuple[Tensor, Tensor] | None,
    running: tuple[Tensor, Tensor] | None,
    last: tuple[Tensor, Tensor | None],
    eps: float,
    momentum: float,
    tracked: Tensor | None = None,
) -> Tensor | None:
    """out = linear(relu(batch_norm(linear(x)))), the norm by the statistics of these rows.

    Parameters
    ----------
    x : Tensor [N, F]
        float32.
    first : (weight [W, F], bias [W] or None)
    norm : (weight [W], bias [W]), optional
        None: out = linear(relu(linear(x))), on the CPU alone.
    running : (mean [W], variance [W]), optional
        Moved towards the statistics by `momentum`.
    last : (weight [D, W], bias [D] or None)
    eps, momentum : float
    tracked : Tensor, optional
        Counts the calls.

    Returns
    -------
    Tensor [N, D], or None where the layers are to be called one by one: nothing has been done then.
    """
    parameters = (*first, *(norm or (None, None)), *last)
    given = [t for t in (x, *parameters, *(running or ())) if t is not None]
    if norm is None and x.is_cuda:
        return None
    if not _operators.usual(*given) or not (products.serves if x.is_cuda else _serves)(x, *given[1:]):
        return None
    if any(t.device != x.device for t in given) or not _fit(x.shape[1], *parameters, *(running or ())):
        return None
    if not x.is_cuda and x.shape[0] * len(first[0]) < bounds.NORMED_NUMBERS[norm is not None]:
        return None
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    if keep and running is not None and (running[0].requires_grad or running[1].requires_grad):
        return None  # which torch refuses
    if tracked is not None:
        tracked.add_(1)  # before what a hook on saved tensors may end, as torch's norm does
    # The versions of running statistics stay, as with torch's batch norm, whose backward pass holds them.
    return _normed(partial(_composed, eps), keep, running, eps, momentum, x, *parameters)


def normed_by(
    x: Tensor,
    first: tuple[Tensor, Tensor | None],
    norm: torch.nn.BatchNorm1d | None,
    last: tuple[Tensor, Tensor | None],
) -> Tensor | None:
    """`normed_layers` with the parameters and statistics of a module that nobody watches, which are moved on as it
    does; None also where it is not in training, or not as torch makes it."""
    if torch.is_autocast_enabled(x.device.type):
        return None
    if norm is None:
        return normed_layers(x, first, None, None, last, 0.0, 0.0)
    if not norm.training or type(norm.momentum) is not float or type(norm.eps) is not float or not norm.eps > 0:
        return None
    parameters, buffers = touch.own_parameters(norm), touch.own_buffers(norm)
    gamma, beta, running, tracked = parameters.get("weight"), parameters.get("bias"), None, None
    if gamma is None or beta is None:
        return None
    if norm.track_running_stats:
        mean, variance, tracked = (buffers.get(name) for name in ("running_mean", "running_var", "num_batches_tracked"))
        if mean is None or variance is None or tracked is None:
            return None  # somebody has taken them away
        running = mean, variance
    return normed_layers(x, first, (gamma, beta), running, last, norm.eps, norm.momentum, tracked)


def _serves(x: Tensor, *others: Tensor) -> bool:
    """`products.serves` on the CPU."""
    if not _PAYS or x.shape[0] < 2:
        return False
    for t in (x, *others):
        if t.dtype is not torch.float32 or not t.is_contiguous():
            return False
        for width in t.shape[1:] if t is x else t.shape:
            if not 0 < width <= bounds.NORMED_WIDTH:
                return False
    return True


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
    hidden = F.linear(x, weight, bias)
    if gamma is not None:
        hidden = F.batch_norm(hidden, None, None, gamma, beta, True, 0.0, eps)
    return F.linear(hidden.relu(), last_weight, last_bias)


def _aligned(x: Tensor) -> Tensor:
    """x as kernels read it: contiguous, at an address of 16 bytes."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _as_saved(x, weight, last_weight, hidden, norm, grad) -> bool:
    """False where a parameter's `.data` or what a hook gives back has another dtype, place or shape."""
    for t in (x, weight, last_weight, hidden, norm):
        if t is not None and (t.dtype is not torch.float32 or t.device != grad.device):
            return False
    (rows, outer), width = grad.shape, hidden.shape[-1]
    if x.shape[:-1] != (rows,) or hidden.shape != (rows, width) or not (norm is None or norm.shape == (4, width)):
        return False
    shapes = ((weight, (width, x.shape[-1])), (last_weight, (outer, width)))
    return all(t is None or t.shape == shape for t, shape in shapes)


class _Normed(_operators.Function):
    @staticmethod
    def forward(ctx, again, keep, running, eps, momentum, x, *parameters):
        weight, bias, gamma, beta, last_weight, last_bias = parameters
        (rows, inner), width, outer = x.shape, weight.shape[0], last_weight.shape[0]
        hidden, norm = x.new_empty((rows, width)), None if gamma is None else x.new_empty((4, width))
        out = x.new_empty((rows, outer))
        given = (x, weight, bias, gamma, beta, *(running or (None, None)), last_weight, last_bias, hidden, norm, out)
        sizes = (rows, inner, width, outer)
        lib.launch("normed_layers", x.device, *map(lib.pointer, given), *sizes, eps, momentum)
        if keep:
            ctx.again = again
            # Parameters that no first derivative reads may be written into.
            ctx.parameters, ctx.versions = parameters, versions(parameters)
            maps = weight if ctx.needs_input_grad[5] else None, last_weight if any(ctx.needs_input_grad[5:10]) else None
            ctx.save_for_backward(x, *maps, hidden, norm)
        return out

    @staticmethod
    def backward(ctx, grad):
        of_x, *of_parameters = ctx.needs_input_grad[5:]
        parameters = ctx.parameters
        x, weight, last_weight, hidden, norm = saved = ctx.saved_tensors
        if torch.is_grad_enabled() or not _operators.usual(grad) or not _as_saved(*saved, grad):
            if versions(parameters) != ctx.versions:
                raise RuntimeError(WRITTEN)
            found = _arrays.gradients(ctx.again, (x, *parameters), (of_x, *of_parameters), grad)
            return *(None,) * 5, *found
        if last_weight is None:  # gradients that nobody needs are made of it
            last_weight = x.new_zeros(grad.shape[1], hidden.shape[1])
        # What hooks on saved tensors give back may lie otherwise.
        read = (x, weight, last_weight, hidden, norm, grad)
        x, weight, last_weight, hidden, norm, grad = (None if t is None else _aligned(t) for t in read)
        of_weight, of_bias, _, _, of_last, of_last_bias = of_parameters
        width, outer, normed = hidden.shape[1], grad.shape[1], norm is not None
        grads = (
            torch.empty_like(x) if of_x else None,
            x.new_empty((width, x.shape[1])) if of_weight else None,
            x.new_empty(width) if normed else None,
            x.new_empty(width) if normed or of_bias else None,
            x.new_empty((outer, width)) if of_last or of_last_bias else None,
            x.new_empty(outer) if of_last_bias else None,
        )
        given = (x, weight, last_weight, hidden, norm, grad, *grads)
        sizes = (x.shape[0], x.shape[1], width, outer)
        lib.launch("normed_layers_backward", x.device, *map(lib.pointer, given), *sizes)
        if normed:  # which takes a bias away, but for numbers that are none
            found = (*grads[:2], grads[2] * 0 if of_bias else None, *grads[2:])
        else:
            found = (*grads[:2], grads[3], None, None, *grads[4:])
        return *(None,) * 5, *(g if w else None for g, w in zip(found, (of_x, *of_parameters), strict=True))


# Without Function.apply()'s wrapper, as in layers.py.
_normed = super(torch.autograd.Function, _Normed).apply  # type: ignore[misc]
