"""SpMM on tensor cores, by the tiles of a translated graph: `spmm` with method="tiled"."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.graph.structure import Graph
from gnnaccel.graph.translate import Tiles, description
from gnnaccel.ops import _arrays
from gnnaccel.ops._arrays import Arrays, arrays_of, needs_grad
from gnnaccel.ops._features import aligned_heads, unpadded

HEIGHT, WIDTH = 16, 8  # of the CUDA kernel's tiles: Config of cuda/spmm_tiled.cu
_TILES = ("window_ptr", "columns", "bits", "block_ptr", "edges")
_SCHEMA = ", ".join(
    [f"Tensor{'?' * bool(prefix)} {prefix}{name}" for prefix in ("", "t_") for name in _TILES]
    + ["SymInt longest", "SymInt t_longest"]
)
_COUNT = 2 * len(_TILES) + 2  # arguments in it
_DTYPES = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32,)}


def spmm_tiled(graph: Graph, x: Tensor, weight: Tensor | None, mean: bool) -> Tensor:
    """`spmm` of checked operands: x [num_cols, *F], one weight per edge or none, sum or mean.

    Raises
    ------
    TypeError
        For a dtype without a kernel. ValueError: for weights that are not one per edge.
    """
    allowed = _DTYPES["cuda" if x.is_cuda else "cpu"]
    if x.dtype not in allowed:
        raise TypeError(
            f"spmm: x: method 'tiled' takes {' and '.join(map(str, allowed))} on this device, got {x.dtype}"
        )
    if weight is not None and math.prod(weight.shape[1:]) != 1:
        raise ValueError(f"spmm: weight: method 'tiled' takes one per edge, got shape {tuple(weight.shape)}")
    # What torch may do with its own products of matrices.
    fast = x.is_cuda and torch.get_float32_matmul_precision() != "highest"
    backward = needs_grad(x)
    tiles, turned = graph.tiles(HEIGHT, WIDTH), graph.transposed.tiles(HEIGHT, WIDTH) if backward else None
    both = (*_tensors(tiles), *_tensors(turned), tiles.longest, 0 if turned is None else turned.longest)
    arrays = arrays_of(graph, backward, listed=False)
    if weight is not None:
        x = x.reshape(x.shape[0], *(1,) * (weight.dim() - x.dim()), *x.shape[1:])  # as it would broadcast
        weight = weight.reshape(-1)
    return _op(*arrays, *both, x, weight, mean, fast)


def _tensors(tiles: Tiles | None) -> tuple[Tensor | None, ...]:
    return tuple(None if tiles is None else getattr(tiles, name) for name in _TILES)


def _split(args: tuple) -> tuple[Arrays, tuple, tuple]:
    """Arrays, tiles of both directions, and what follows."""
    arrays, rest = _arrays.split(args)
    return arrays, rest[:_COUNT], rest[_COUNT:]


def _turned(tiles: tuple) -> tuple:
    """Tiles of both directions, changed over."""
    count = len(_TILES)
    return *tiles[count : 2 * count], *tiles[:count], tiles[-1], tiles[-2]


def _impl(*args):
    arrays, tiles, (x, weight, mean, fast) = _split(args)
    features = x.shape[1:]
    flat = x.reshape(x.shape[0], features.numel())
    if arrays.num_rows * flat.shape[1] == 0:
        return x.new_empty(arrays.num_rows, *features)
    flat = aligned_heads(flat)
    own, longest = tiles[: len(_TILES)], tiles[-2]
    weight = None if weight is None else weight[own[-1]]  # by tiles, so that the kernel need not look up edges first
    out = flat.new_empty(arrays.num_rows, flat.shape[1])
    codes = (flat.shape[1], mean, fast, lib.DTYPES[x.dtype])
    given = (lib.pointer(t) for t in (flat, weight, out))
    tiled = description(*own, longest, HEIGHT, WIDTH)
    lib.launch("spmm_tiled", x.device, *arrays.matrix(), tiled, *given, *codes)
    return unpadded(out, features.numel()).view(arrays.num_rows, *features)


def _fake(*args):
    arrays, _, (x, *_) = _split(args)
    return x.new_empty(arrays.num_rows, *x.shape[1:])


def _setup_context(ctx, inputs, output):
    arrays, tiles, (x, weight, ctx.mean, ctx.fast) = _split(inputs)
    ctx.set_materialize_grads(False)
    ctx.longest = tiles[2 * len(_TILES) :]
    needs_x, needs_weight, *_ = ctx.wanted[_COUNT:]
    _arrays.save(ctx, arrays, *tiles[: 2 * len(_TILES)], x if needs_weight else None, weight if needs_x else None)


def _backward(ctx, grad):
    from gnnaccel.ops.spmm import weight_gradient  # here: spmm knows this file

    grad_x = grad_weight = None
    if grad is not None:
        arrays, (*tiles, x, weight) = _arrays.saved(ctx)
        needs_x, needs_weight, *_ = ctx.wanted[_COUNT:]
        if ctx.mean:
            degree = arrays.indptr.diff().clamp(min=1).to(grad.dtype)
            grad = grad / degree.view(-1, *[1] * (grad.dim() - 1))
        if needs_x:
            turned = _turned((*tiles, *ctx.longest))
            grad_x = _op(*arrays.turned(), *turned, grad, weight, False, ctx.fast)
        if needs_weight:
            flat_x, flat = (t.reshape(t.shape[0], math.prod(t.shape[1:])) for t in (x, grad))
            grad_weight = weight_gradient(arrays, flat_x, flat, (1,), "mul").reshape(-1)
    return *(None,) * _COUNT, grad_x, grad_weight, None, None


_op = _operators.register(
    "spmm_tiled",
    f"({_arrays.SCHEMA}, {_SCHEMA}, Tensor x, Tensor? weight, bool mean, bool fast) -> Tensor",
    _impl,
    _fake,
    structure=_arrays.COUNT,
    backward=_backward,
    setup_context=_setup_context,
)
