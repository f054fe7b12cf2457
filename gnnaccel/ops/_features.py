"""Feature shapes: how a broadcast becomes the (len, div) of the kernels' operands, and back in gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel.lower import bounds
from gnnaccel.program.shapes import broadcast, index_rule


def operand(x: Tensor | None, full: tuple[int, ...]) -> tuple[Tensor | None, tuple[int, int, int]]:
    """The contiguous tensor to keep alive, and its (address, len, div) (types.h: Operand), for features broadcast to
    `full`."""
    if x is None:
        return None, (0, 1, 1)
    rule = index_rule(tuple(x.shape[1:]), full)
    if rule is None:
        padded = x.reshape(x.shape[0], *(1,) * (len(full) - x.dim() + 1), *x.shape[1:])
        x = padded.expand(x.shape[0], *full)
        rule = math.prod(full), 1
    x = x.contiguous()
    return x, (lib.pointer(x), *rule)


def result_features(lhs: Tensor | None, rhs: Tensor | None) -> tuple[int, ...]:
    """Feature shape of what an op makes of its operands, of which one may be None."""
    if lhs is not None and rhs is not None:
        return broadcast(lhs.shape[1:], rhs.shape[1:])
    given = rhs if lhs is None else lhs
    assert given is not None
    return tuple(given.shape[1:])


def reduce_to(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum `grad` [n, *full] over the features that were broadcast from `shape` (without the row dimension)."""
    shape = tuple(shape)
    if tuple(grad.shape[1:]) == shape:
        return grad
    padded = (1,) * (grad.dim() - 1 - len(shape)) + shape
    dims = [i + 1 for i, n in enumerate(padded) if n == 1 and grad.shape[i + 1] != 1]
    if dims:
        grad = grad.sum(dims, keepdim=True)
    return grad.reshape(grad.shape[0], *shape)


def aligned_heads(x: Tensor) -> Tensor:
    """x [.., H, F] contiguous, with F padded by zeros to what the vectors of kernels for whole heads need, and on CUDA
    16-byte aligned."""
    missing = -x.shape[-1] % (16 // x.element_size() if x.is_cuda else 4)
    if missing:
        return torch.nn.functional.pad(x, (0, missing))
    x = x.contiguous()
    return x.clone() if x.is_cuda and x.data_ptr() % 16 else x


def padding_is_profitable(nnz: int, lhs: Tensor, rhs: Tensor) -> bool:
    """True if features that no 16-byte vectors fit should be copied into some that they fit before a dot product.
    H200, reddit-like: 2.4 ms with 41 features, 2.2 with 40; cuSPARSE 12.3 and 6.9."""
    row_bytes = math.prod(lhs.shape[1:]) * lhs.element_size()
    fits = lhs.shape[-1] * lhs.element_size() % 16 == 0
    if fits or lhs.shape[1:] != rhs.shape[1:] or math.prod(lhs.shape[1:]) <= bounds.NARROW_DOTS:
        return False
    often = nnz >= bounds.PADDED_READS * (lhs.shape[0] + rhs.shape[0])
    return often and nnz * row_bytes >= bounds.PADDED_BYTES


def unpadded(x: Tensor, feats: int) -> Tensor:
    """x [.., H, padded F] without what `aligned_heads` has padded."""
    return x if x.shape[-1] == feats else x[..., :feats].contiguous()


def widened(x: Tensor) -> Tensor:
    """x [n, D] beside ones, in rows of a multiple of four numbers: `with_bias` has the maps for it. A bias then takes
    no call of its own, and its gradient no sum over all rows."""
    return torch.nn.functional.pad(x, (0, 4 - x.shape[1] % 4), value=1.0)


def beside_ones(rows: int, width: int, like: Tensor) -> Tensor:
    """Rows as of `widened` whose first `width` numbers are to be written."""
    out = like.new_empty(rows, width + 4 - width % 4)
    out[:, width:].fill_(1.0)
    return out


def with_bias(weight: Tensor, bias: Tensor) -> Tensor:
    """A map [E, D] with its bias [E] as column D, and zeros for the further ones."""
    inputs = weight.shape[1]
    out = torch.nn.functional.pad(weight, (0, 4 - inputs % 4))
    out.select(1, inputs).copy_(bias)
    return out
