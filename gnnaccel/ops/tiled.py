"""SpMM and SDDMM on tensor cores, by the tiles of a translated graph: `spmm` and `sddmm` with method="tiled"."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.graph.structure import Graph
from gnnaccel.graph.translate import Tiles, description
from gnnaccel.ops import _arrays
from gnnaccel.ops._arrays import Arrays, arrays_of, needs_grad
from gnnaccel.ops._features import aligned_heads, unpadded

HEIGHT, WIDTH = 16, 8  # of the CUDA kernels' tiles: TileConfig of cuda/tiles.cuh
_DTYPES = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32, torch.bfloat16, torch.float16)}


_ARRAYS = ("window_ptr", "columns", "bits", "block_ptr", "edges")
_SIZES = ("longest", "sum_team", "dot_team")
_FIELDS = len(_ARRAYS) + len(_SIZES)
_SCHEMA = ", ".join(
    text
    for prefix in ("", "t_")
    for text in (
        *(f"Tensor{'?' * bool(prefix)} {prefix}{n}" for n in _ARRAYS),
        *(f"SymInt {prefix}{n}" for n in _SIZES),
    )
)


class _Tiles(NamedTuple):
    """Tiles of a graph as an op takes them; those of no graph by default."""

    arrays: tuple[Tensor | None, ...] = (None,) * len(_ARRAYS)
    sizes: tuple[int, ...] = (0,) * len(_SIZES)

    def described(self, dots: bool) -> tuple:
        """For the binary."""
        longest, sum_team, dot_team = self.sizes
        return description(self.arrays, longest, HEIGHT, WIDTH, dot_team if dots else sum_team)


def spmm_tiled(graph: Graph, x: Tensor, weight: Tensor | None, mean: bool) -> Tensor:
    """`spmm` of checked operands: x [num_cols, *F], one weight per edge or none, sum or mean.

    Raises
    ------
    TypeError
        For a dtype without a kernel. ValueError: for weights that are not one per edge.
    """
    _check_dtype("spmm", "x", x)
    if weight is not None and math.prod(weight.shape[1:]) != 1:
        raise ValueError(f"spmm: weight: method 'tiled' takes one per edge, got shape {tuple(weight.shape)}")
    given = _structure(graph, math.prod(x.shape[1:]), needs_grad(x))
    if weight is not None:
        x = x.reshape(x.shape[0], *(1,) * (weight.dim() - x.dim()), *x.shape[1:])  # as it would broadcast
        weight = weight.reshape(-1)
    return _spmm_op(*given, x, weight, mean, _fast(x))


def sddmm_tiled(graph: Graph, sources: Tensor, targets: Tensor) -> Tensor:
    """`sddmm` of checked operands: inner products of sources [num_cols, *H, F] and targets [num_rows, *H, F].

    Raises
    ------
    TypeError
        For a dtype without a kernel. ValueError: for features that would have to be broadcast.
    """
    _check_dtype("sddmm", "lhs", sources)
    if sources.shape[1:] != targets.shape[1:]:
        shapes = tuple(sources.shape), tuple(targets.shape)
        raise ValueError(f"sddmm: rhs: method 'tiled' takes equal features, got {shapes[0]} and {shapes[1]}")
    given = _structure(graph, math.prod(sources.shape[1:]), needs_grad(sources))
    return _sddmm_op(*given, sources, targets, _fast(sources))


def serves_sum(graph: Graph, x: Tensor | None, weight: Tensor | None) -> bool:
    """True if tiles are the faster way to sum up x, times one weight per edge, over a graph for which they pay."""
    return x is not None and (weight is None or math.prod(weight.shape[1:]) == 1) and _serves(graph, x, "sum")


def serves_dot(graph: Graph, sources: Tensor, targets: Tensor) -> bool:
    """The same of inner products."""
    return sources.shape[1:] == targets.shape[1:] and _serves(graph, sources, "dot")


def _serves(graph: Graph, x: Tensor, of: str) -> bool:
    """Where a gradient runs over the transposed graph tiles must pay there too."""
    features = math.prod(x.shape[1:])
    if not (x.is_cuda and x.dtype in _DTYPES["cuda"] and graph.tiles_pay(features, of)):
        return False
    return not needs_grad(x) or graph.transposed.tiles_pay(features)


def _check_dtype(op: str, name: str, x: Tensor) -> None:
    allowed = _DTYPES["cuda" if x.is_cuda else "cpu"]
    if x.dtype not in allowed:
        raise TypeError(
            f"{op}: {name}: method 'tiled' takes {', '.join(map(str, allowed))} on this device, got {x.dtype}"
        )


def _fast(x: Tensor) -> bool:
    """What torch may do with its own products of matrices."""
    return x.is_cuda and torch.get_float32_matmul_precision() != "highest"


def _structure(graph: Graph, features: int, backward: bool) -> tuple:
    """The arguments that say what the graph is."""

    def given(tiles: Tiles) -> tuple:
        teams = (tiles.team_for(features), tiles.team_for(features, dots=True))
        return *(getattr(tiles, name) for name in _ARRAYS), tiles.longest, *teams

    own = given(graph.tiles(HEIGHT, WIDTH))
    turned = given(graph.transposed.tiles(HEIGHT, WIDTH)) if backward else (*_Tiles().arrays, *_Tiles().sizes)
    return *arrays_of(graph, backward, listed=False), *own, *turned


def _split(args: tuple) -> tuple[Arrays, _Tiles, _Tiles, tuple]:
    """Arrays, tiles of both directions, and what follows."""
    arrays, rest = _arrays.split(args)
    own, turned = (_Tiles(rest[at : at + len(_ARRAYS)], rest[at + len(_ARRAYS) : at + _FIELDS]) for at in (0, _FIELDS))
    return arrays, own, turned, rest[2 * _FIELDS :]


def _save(ctx, arrays: Arrays, own: _Tiles, turned: _Tiles, *tensors: Tensor | None) -> None:
    ctx.sizes = own.sizes, turned.sizes
    _arrays.save(ctx, arrays, *own.arrays, *turned.arrays, *tensors)


def _saved(ctx) -> tuple[tuple, tuple, tuple]:
    """The structure of a call on the graph, that of one on the transposed graph, and what else `_save` kept."""
    arrays, tensors = _arrays.saved(ctx)
    count = len(_ARRAYS)
    own, turned = (*tensors[:count], *ctx.sizes[0]), (*tensors[count : 2 * count], *ctx.sizes[1])
    return (*arrays, *own, *turned), (*arrays.turned(), *turned, *own), tensors[2 * count :]


def _spmm_impl(*args):
    arrays, own, _, (x, weight, mean, fast) = _split(args)
    features = x.shape[1:]
    flat = x.reshape(x.shape[0], features.numel())
    if arrays.num_rows * flat.shape[1] == 0:
        return x.new_empty(arrays.num_rows, *features)
    flat = aligned_heads(flat)
    weight = None if weight is None else weight.contiguous()
    out = flat.new_empty(arrays.num_rows, flat.shape[1])
    given = (lib.pointer(t) for t in (flat, weight, out))
    codes = (flat.shape[1], mean, fast, lib.DTYPES[x.dtype])
    lib.launch("spmm_tiled", x.device, *arrays.matrix(), own.described(dots=False), *given, *codes)
    return unpadded(out, features.numel()).view(arrays.num_rows, *features)


def _spmm_fake(*args):
    arrays, _, _, (x, *_) = _split(args)
    return x.new_empty(arrays.num_rows, *x.shape[1:])


def _spmm_setup(ctx, inputs, output):
    arrays, own, turned, (x, weight, ctx.mean, ctx.fast) = _split(inputs)
    ctx.set_materialize_grads(False)
    needs_x, needs_weight, *_ = ctx.wanted
    _save(ctx, arrays, own, turned, x if needs_weight else None, weight if needs_x else None)


def _spmm_backward(ctx, grad):
    grad_x = grad_weight = None
    if grad is not None:
        own, turned, (x, weight) = _saved(ctx)
        needs_x, needs_weight, *_ = ctx.wanted
        if ctx.mean:
            # In fp32 at least: a count past 65504 has no fp16.
            count = own[0].diff().clamp(min=1).to(torch.promote_types(grad.dtype, torch.float32))
            grad = (grad / count.view(-1, *[1] * (grad.dim() - 1))).to(grad.dtype)
        if needs_x:
            grad_x = _spmm_op(*turned, grad, weight, False, ctx.fast)
        if needs_weight:
            flat_x, flat = (t.reshape(t.shape[0], math.prod(t.shape[1:])) for t in (x, grad))
            grad_weight = _sddmm_op(*own, flat_x, flat, ctx.fast).reshape(-1)
    return grad_x, grad_weight, None, None


def _sddmm_impl(*args):
    arrays, own, _, (sources, targets, fast) = _split(args)
    out = _sddmm_fake(*args)
    if sources.shape[1:].numel() == 0:
        return out.zero_()
    sources, targets = (aligned_heads(t) for t in (sources, targets))
    given = (lib.pointer(t) for t in (sources, targets, out))
    codes = (sources.shape[1:-1].numel(), sources.shape[-1], fast, lib.DTYPES[out.dtype])
    lib.launch("sddmm_tiled", out.device, *arrays.matrix(), own.described(dots=True), *given, *codes)
    return out


def _sddmm_fake(*args):
    arrays, _, _, (sources, *_) = _split(args)
    return sources.new_empty(arrays.nnz, *sources.shape[1:-1], 1)


def _sddmm_setup(ctx, inputs, output):
    arrays, own, turned, (sources, targets, ctx.fast) = _split(inputs)
    ctx.set_materialize_grads(False)
    needs_sources, needs_targets, *_ = ctx.wanted
    _save(ctx, arrays, own, turned, sources if needs_targets else None, targets if needs_sources else None)


def _sddmm_backward(ctx, grad):
    grads = [None, None]
    if grad is not None:
        own, turned, others = _saved(ctx)
        heads = math.prod(grad.shape[1:])
        for i, (structure, other) in enumerate(((turned, others[1]), (own, others[0]))):
            if ctx.wanted[i]:
                # Weights are one per edge: a head is summed up after the other.
                split = other.reshape(other.shape[0], heads, other.shape[-1])
                weights = grad.reshape(grad.shape[0], heads)
                sums = [_spmm_op(*structure, split[:, h], weights[:, h], False, ctx.fast) for h in range(heads)]
                grads[i] = torch.stack(sums, 1).view(-1, *other.shape[1:]) if sums else torch.zeros_like(other)
    return *grads, None


_spmm_op = _operators.register(
    "spmm_tiled",
    f"({_arrays.SCHEMA}, {_SCHEMA}, Tensor x, Tensor? weight, bool mean, bool fast) -> Tensor",
    _spmm_impl,
    _spmm_fake,
    structure=_arrays.COUNT + 2 * _FIELDS,
    backward=_spmm_backward,
    setup_context=_spmm_setup,
)
_sddmm_op = _operators.register(
    "sddmm_tiled",
    f"({_arrays.SCHEMA}, {_SCHEMA}, Tensor sources, Tensor targets, bool fast) -> Tensor",
    _sddmm_impl,
    _sddmm_fake,
    structure=_arrays.COUNT + 2 * _FIELDS,
    backward=_sddmm_backward,
    setup_context=_sddmm_setup,
)
