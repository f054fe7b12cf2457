"""SpMM and SDDMM on tensor cores, by the tiles of a translated graph: `spmm` and `sddmm` with method="tiled"."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators, tiles
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _arrays
from gnnaccel.ops._arrays import Arrays, arrays_of, needs_grad
from gnnaccel.ops._features import aligned_heads, result_features, unpadded
from gnnaccel.tiles.translate import KERNEL_SIZE, Tiles, description

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
        return description(self.arrays, longest, *KERNEL_SIZE, dot_team if dots else sum_team)


def spmm_tiled(graph: Graph, x: Tensor, weight: Tensor | None, mean: bool, *, tf32: bool) -> Tensor:
    """`spmm` of checked operands: x [num_cols, *F], one weight per edge or none, sum or mean.

    tf32 : bool
        Where torch allows it for products of matrices.

    Raises
    ------
    TypeError
        For a dtype without a kernel. ValueError: for weights that are not one per edge.
    """
    _check_dtype("spmm", "x", x)
    if weight is not None and math.prod(weight.shape[1:]) != 1:
        raise ValueError(f"spmm: weight: method 'tiled' takes one per edge, got shape {tuple(weight.shape)}")
    given = _structure(graph, math.prod(x.shape[1:]), needs_grad(x))
    return _spmm_op(*given, x, weight, mean, tf32 and _fast(x))


def sddmm_tiled(graph: Graph, lhs: Tensor, rhs: Tensor, flipped: bool, *, tf32: bool) -> Tensor:
    """`sddmm` of checked operands: inner products of sources [num_cols, *H, F] and targets [num_rows, *H, F].

    lhs, rhs : Tensor
        Sources and targets; `flipped`: targets and sources.
    tf32 : bool
        As of `spmm_tiled`.

    Raises
    ------
    TypeError
        For a dtype without a kernel. ValueError: for features that would have to be broadcast.
    """
    _check_dtype("sddmm", "lhs", lhs)
    if lhs.shape[1:] != rhs.shape[1:]:
        shapes = tuple(lhs.shape), tuple(rhs.shape)
        raise ValueError(f"sddmm: rhs: method 'tiled' takes equal features, got {shapes[0]} and {shapes[1]}")
    given = _structure(graph, lhs.shape[-1], needs_grad(rhs if flipped else lhs))
    return _sddmm_op(*given, lhs, rhs, flipped, tf32 and _fast(lhs))


def serves_sum(graph: Graph, x: Tensor, weight: Tensor | None) -> bool:
    """True if tiles are the faster way to sum up x, times one weight per edge, over a graph for which they pay."""
    if weight is not None and math.prod(weight.shape[1:]) != 1:
        return False
    return _serves(graph, x, math.prod(x.shape[1:]), "sum", needs_grad(x))


def serves_dot(graph: Graph, lhs: Tensor, rhs: Tensor) -> bool:
    """The same of inner products; with gradients of one head, as sums by tiles have one weight to an edge."""
    trains = needs_grad(lhs, rhs)
    if lhs.shape[1:] != rhs.shape[1:] or (trains and math.prod(lhs.shape[1:-1]) != 1):
        return False
    return _serves(graph, lhs, lhs.shape[-1], "dot", trains)


def _serves(graph: Graph, x: Tensor, features: int, of: str, backward: bool) -> bool:
    """`backward`: a gradient runs over the transposed graph, where tiles must pay too."""
    if not (x.is_cuda and x.dtype in _DTYPES["cuda"] and tiles.pay(graph, features, of, x.dtype)):
        return False
    turned = graph.transposed if backward else None
    if turned is not None and not tiles.pay(turned, features, dtype=x.dtype):
        return False
    serves = tiles.serve(graph, features, of, x.dtype)
    return serves and (turned is None or tiles.serve(turned, features, dtype=x.dtype))


def _check_dtype(op: str, name: str, x: Tensor) -> None:
    allowed = _DTYPES["cuda" if x.is_cuda else "cpu"]
    if x.dtype not in allowed:
        raise TypeError(
            f"{op}: {name}: method 'tiled' takes {', '.join(map(str, allowed))} on this device, got {x.dtype}"
        )


def _fast(x: Tensor) -> bool:
    """True if TF32 will do, as torch may use it for its own products of matrices."""
    if not x.is_cuda or x.dtype != torch.float32:
        return False
    # As of torch 2.9 the getter of old refuses to answer where the new attributes have been set.
    allowed = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if allowed is None:
        return torch.get_float32_matmul_precision() != "highest"
    return (getattr(torch.backends, "fp32_precision", allowed) if allowed == "none" else allowed) == "tf32"


def _structure(graph: Graph, features: int, backward: bool) -> tuple:
    """The arguments that say what the graph is."""

    def given(made: Tiles) -> tuple:
        teams = (made.team_for(features), made.team_for(features, dots=True))
        return *(getattr(made, name) for name in _ARRAYS), made.longest, *teams

    own = given(tiles.of(graph))
    turned = given(tiles.of(graph.transposed)) if backward else (*_Tiles().arrays, *_Tiles().sizes)
    return *arrays_of(graph, backward, listed=False), *own, *turned


def _split(args: tuple) -> tuple[Arrays, _Tiles, _Tiles, tuple]:
    """Arrays, tiles of both directions, and what follows."""
    arrays, rest = _arrays.split(args)
    own, turned = (_Tiles(rest[at : at + len(_ARRAYS)], rest[at + len(_ARRAYS) : at + _FIELDS]) for at in (0, _FIELDS))
    return arrays, own, turned, rest[2 * _FIELDS :]


def _save(ctx, arrays: Arrays, own: _Tiles, turned: _Tiles, *tensors: Tensor | None) -> None:
    """What the ops without tiles keep, and in the same order: a graph may earn its tiles between a forward and the same
    forward again under torch.utils.checkpoint, which wants the same saved tensors both times."""
    ctx.tiles = (*own.arrays, *own.sizes), (*turned.arrays, *turned.sizes)
    _arrays.save(ctx, arrays, *tensors)


def _saved(ctx) -> tuple[tuple, tuple, tuple]:
    """The structure of a call on the graph, that of one on the transposed graph, and what else `_save` kept."""
    arrays, tensors = _arrays.saved(ctx)
    own, turned = ctx.tiles
    return (*arrays, *own, *turned), (*arrays.turned(), *turned, *own), tensors


def _spmm_impl(*args):
    arrays, own, _, (x, weight, mean, fast) = _split(args)
    out = _spmm_fake(*args)
    if out.numel() == 0:
        return out
    width = x.shape[1:].numel()
    flat = aligned_heads(x.reshape(x.shape[0], width))
    weight = None if weight is None else weight.contiguous()
    result = out if flat.shape[1] == width else flat.new_empty(arrays.num_rows, flat.shape[1])
    given = (lib.pointer(t) for t in (flat, weight, result))
    codes = (flat.shape[1], mean, fast, lib.DTYPES[x.dtype])
    lib.launch("spmm_tiled", x.device, *arrays.matrix(), own.described(dots=False), *given, *codes)
    return out if result is out else unpadded(result, width).view(out.shape)


def _spmm_fake(*args):
    arrays, _, _, (x, weight, *_) = _split(args)
    return x.new_empty(arrays.num_rows, *result_features(x, weight))


def _spmm_setup(ctx, inputs, output):
    arrays, own, turned, (x, weight, ctx.mean, ctx.fast) = _split(inputs)
    ctx.set_materialize_grads(False)
    ctx.shapes = x.shape, None if weight is None else weight.shape
    needs_x, needs_weight, *_ = ctx.wanted
    weighted = weight is not None
    _save(ctx, arrays, own, turned, x if weighted and needs_weight else None, weight if needs_x else None)


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
            grad_x = _spmm_op(*turned, grad, weight, False, ctx.fast).reshape(ctx.shapes[0])
        if needs_weight and ctx.shapes[1] is not None:
            flat_x, flat = (t.reshape(t.shape[0], math.prod(t.shape[1:])) for t in (x, grad))
            grad_weight = _sddmm_op(*own, flat_x, flat, False, ctx.fast).reshape(ctx.shapes[1])
    return grad_x, grad_weight, None, None


def _sddmm_impl(*args):
    arrays, own, _, (lhs, rhs, flipped, fast) = _split(args)
    out = _sddmm_fake(*args)
    if lhs.shape[1:].numel() == 0:
        return out.zero_()
    lhs, rhs = (aligned_heads(t) for t in (lhs, rhs))
    given = (lib.pointer(t) for t in ((rhs, lhs, out) if flipped else (lhs, rhs, out)))
    codes = (lhs.shape[1:-1].numel(), lhs.shape[-1], fast, lib.DTYPES[out.dtype])
    lib.launch("sddmm_tiled", out.device, *arrays.matrix(), own.described(dots=True), *given, *codes)
    return out


def _sddmm_fake(*args):
    arrays, _, _, (lhs, *_) = _split(args)
    return lhs.new_empty(arrays.nnz, *lhs.shape[1:-1], 1)


def _sddmm_setup(ctx, inputs, output):
    arrays, own, turned, (lhs, rhs, ctx.flipped, ctx.fast) = _split(inputs)
    _save(ctx, arrays, own, turned, lhs, rhs)


def _sddmm_backward(ctx, grad):
    own, turned, (lhs, rhs) = _saved(ctx)
    heads = math.prod(grad.shape[1:])

    def summed(other: Tensor, shape: torch.Size, over_targets: bool) -> Tensor:
        """`other` of the far ends times grad, summed up at each source, or target: a gradient of `shape`."""
        # Weights are one per edge: a head is summed up after the other.
        split, weights = other.reshape(other.shape[0], heads, other.shape[-1]), grad.reshape(grad.shape[0], heads)
        structure = own if over_targets else turned
        sums = [_spmm_op(*structure, split[:, h], weights[:, h], False, ctx.fast) for h in range(heads)]
        return torch.stack(sums, 1).view(shape) if sums else other.new_zeros(shape)

    needs_lhs, needs_rhs, *_ = ctx.wanted
    grad_lhs = summed(rhs, lhs.shape, ctx.flipped) if needs_lhs else None
    grad_rhs = summed(lhs, rhs.shape, not ctx.flipped) if needs_rhs else None
    return grad_lhs, grad_rhs, None, None


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
    f"({_arrays.SCHEMA}, {_SCHEMA}, Tensor lhs, Tensor rhs, bool flipped, bool fast) -> Tensor",
    _sddmm_impl,
    _sddmm_fake,
    structure=_arrays.COUNT + 2 * _FIELDS,
    backward=_sddmm_backward,
    setup_context=_sddmm_setup,
)
