"""The gradient of edge weights of a sum: a dot product of both ends of each edge."""

from __future__ import annotations

import math

from gnnaccel import _operators
from gnnaccel.ops._arrays import Structure
from gnnaccel.ops._features import reduce_to


def kept(shape, full):
    """`shape` padded to the dimensions of `full`, and how many of them are left without the last ones of size 1."""
    padded = (1,) * (len(full) - len(shape)) + tuple(shape)
    split = len(full)
    while split and padded[split - 1] == 1:
        split -= 1
    return padded, split


def weight_gradient(arrays: Structure, lhs, grad, rhs_features, message):
    """Gradient of the edge operand: an SDDMM of the source features and the rows' gradient."""
    sddmm = _operators.named("sddmm")  # by name: its derivatives are sums again
    full = tuple(grad.shape[1:])
    # Features the weight does not have are summed inside the kernel where they are the last ones.
    _, split = kept(rhs_features, full)
    tail = math.prod(full[split:])
    grad = grad.reshape(grad.shape[0], *full[:split], tail)
    if message == "mul":
        lhs_full = (1,) * (len(full) - lhs.dim() + 1) + tuple(lhs.shape[1:])
        lhs = lhs.reshape(lhs.shape[0], *lhs_full)
        if math.prod(lhs_full[split:]) != tail:
            lhs = lhs.expand(lhs.shape[0], *lhs_full[:split], *full[split:])
        lhs = lhs.reshape(lhs.shape[0], *lhs_full[:split], tail)
        out = sddmm(arrays, lhs, grad, "dot" if tail != 1 else "mul", "u", "v")
    else:
        summed = grad if tail == 1 else grad.sum(-1, keepdim=True)
        out = sddmm(arrays, None, summed, "copy_rhs", "u", "v")
    out = out.reshape(out.shape[0], *full[:split], *(1,) * (len(full) - split))
    return reduce_to(out, rhs_features)
