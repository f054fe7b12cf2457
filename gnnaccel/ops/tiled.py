"""SpMM and SDDMM on tensor cores, by the tiles of a translated graph: `spmm` and `sddmm` with kernel="tiled"."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators, _precision, tiles
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _arrays, _check
from gnnaccel.ops._arrays import Structure, arrays_of, needs_grad
from gnnaccel.ops._features import aligned_heads, result_features, unpadded
from gnnaccel.tiles.translate import KERNEL_SIZE, Tiles, description

_DTYPES = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32, torch.bfloat16, torch.float16)}


_ARRAYS = ("window_ptr", "columns", "bits", "block_ptr", "edges")
_SIZES = ("longest", "sum_team", "dot_team")
_NONE: tuple = (None,) * len(_ARRAYS), (0,) * len(_SIZES)


class Tiled:
    """A graph and its tiles, and where a gradient runs over it those of its transposed one, as a Structure is.

    own, other : the arrays and sizes of each direction's tiles.
    """

    __slots__ = ("graph", "other", "own")

    def __init__(self, graph: Structure, own: tuple, other: tuple = _NONE):
        self.graph, self.own, self.other = graph, own, other

    @property
    def device(self) -> torch.device:
        return self.graph.device

    @property
    def is_plain(self) -> bool:
        """True if it is of nothing but plain tensors."""
        return self.graph.is_plain and all(t is None or type(t) is Tensor for t in (*self.own[0], *self.other[0]))

    @property
    def num_rows(self) -> int:
        return self.graph.num_rows

    @property
    def num_cols(self) -> int:
        return self.graph.num_cols

    @property
    def nnz(self) -> int:
        return self.graph.nnz

    def transposed(self) -> Tiled:
        """The same edges reversed."""
        return Tiled(self.graph.transposed(), self.other, self.own)

    def described(self, dots: bool) -> tuple:
        """The tiles for the binary."""
        arrays, (longest, sum_team, dot_team) = self.own
        return description(arrays, longest, *KERNEL_SIZE, dot_team if dots else sum_team)

    def flat(self) -> tuple[list[Tensor | None], list[int]]:
        """As of a Structure."""
        tensors, sizes = self.graph.flat()
        return [*self.own[0], *self.other[0], *tensors], [*self.own[1], *self.other[1], *sizes]

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> Tiled:
        """The inverse of `flat`."""
        n, m = len(_ARRAYS), len(_SIZES)
        own, other = ((tuple(tensors[k * n : (k + 1) * n]), tuple(sizes[k * m : (k + 1) * m])) for k in (0, 1))
        return cls(Structure.of(tensors[2 * n :], sizes[2 * m :]), own, other)


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
        raise ValueError(f"spmm: weight: kernel 'tiled' takes one per edge, got shape {tuple(weight.shape)}")
    given = _structure(graph, math.prod(x.shape[1:]), needs_grad(x))
    return _spmm_op(given, x, weight, mean, tf32 and _fast(x))


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
        raise ValueError(f"sddmm: rhs: kernel 'tiled' takes equal features, got {shapes[0]} and {shapes[1]}")
    given = _structure(graph, lhs.shape[-1], needs_grad(rhs if flipped else lhs))
    return _sddmm_op(given, lhs, rhs, flipped, tf32 and _fast(lhs))


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
    if not (x.is_cuda and x.dtype in _DTYPES["cuda"] and tiles.are_profitable(graph, features, of, x.dtype)):
        return False
    transposed = graph.transposed if backward else None
    if transposed is not None and not tiles.are_profitable(transposed, features, dtype=x.dtype):
        return False
    serves = tiles.ensure(graph, features, of, x.dtype)
    return serves and (transposed is None or tiles.ensure(transposed, features, dtype=x.dtype))


def _check_dtype(op: str, name: str, x: Tensor) -> None:
    allowed = _DTYPES["cuda" if x.is_cuda else "cpu"]
    if x.dtype not in allowed:
        raise TypeError(
            f"{op}: {name}: kernel 'tiled' takes {', '.join(map(str, allowed))} on this device, got {x.dtype}"
        )


def _fast(x: Tensor) -> bool:
    """True if TF32 will do, as torch may use it for its own products of matrices."""
    return x.is_cuda and x.dtype == torch.float32 and _precision.allows_tf32()


def _structure(graph: Graph, features: int, backward: bool) -> Tiled:
    """The argument that says what the graph is."""

    def given(made: Tiles) -> tuple:
        teams = (made.team_for(features), made.team_for(features, dots=True))
        return tuple(getattr(made, name) for name in _ARRAYS), (made.longest, *teams)

    own = given(tiles.of(graph))
    other = given(tiles.of(graph.transposed)) if backward else _NONE
    return Tiled(arrays_of(graph, backward, listed=False), own, other)


def _spmm_impl(tiled, x, weight, mean, fast):
    out = _spmm_fake(tiled, x, weight)
    if out.numel() == 0:
        return out
    width = x.shape[1:].numel()
    flat = aligned_heads(x.reshape(x.shape[0], width))
    weight = None if weight is None else weight.contiguous()
    result = out if flat.shape[1] == width else flat.new_empty(out.shape[0], flat.shape[1])
    given = (lib.pointer(t) for t in (flat, weight, result))
    codes = (flat.shape[1], mean, fast, lib.DTYPES[x.dtype])
    lib.launch("spmm_tiled", x.device, tiled.graph.matrix(), tiled.described(dots=False), *given, *codes)
    return out if result is out else unpadded(result, width).view(out.shape)


def _spmm_fake(tiled, x, weight, *_):
    return x.new_empty(tiled.graph.num_rows, *result_features(x, weight))


def _spmm_setup(ctx, inputs, output):
    tiled, x, weight, ctx.mean, ctx.fast = inputs
    ctx.set_materialize_grads(False)
    ctx.shapes = x.shape, None if weight is None else weight.shape
    needs_x, needs_weight, *_ = ctx.wanted
    weighted = weight is not None
    _arrays.save(ctx, tiled, x if weighted and needs_weight else None, weight if needs_x else None)


def _spmm_backward(ctx, grad):
    grad_x = grad_weight = None
    if grad is not None:
        tiled, (x, weight) = _arrays.saved(ctx)
        needs_x, needs_weight, *_ = ctx.wanted
        if ctx.mean:
            # In fp32 at least: a count past 65504 has no fp16.
            count = tiled.graph.indptr.diff().clamp(min=1).to(torch.promote_types(grad.dtype, torch.float32))
            grad = (grad / count.view(-1, *[1] * (grad.dim() - 1))).to(grad.dtype)
        if needs_x:
            grad_x = _spmm_op(tiled.transposed(), grad, weight, False, ctx.fast).reshape(ctx.shapes[0])
        if needs_weight and ctx.shapes[1] is not None:
            flat_x, flat = (t.reshape(t.shape[0], math.prod(t.shape[1:])) for t in (x, grad))
            grad_weight = _sddmm_op(tiled, flat_x, flat, False, ctx.fast).reshape(ctx.shapes[1])
    return grad_x, grad_weight, None, None


def _sddmm_impl(tiled, lhs, rhs, flipped, fast):
    out = _sddmm_fake(tiled, lhs)
    if lhs.shape[1:].numel() == 0:
        return out.zero_()
    lhs, rhs = (aligned_heads(t) for t in (lhs, rhs))
    given = (lib.pointer(t) for t in ((rhs, lhs, out) if flipped else (lhs, rhs, out)))
    codes = (lhs.shape[1:-1].numel(), lhs.shape[-1], fast, lib.DTYPES[out.dtype])
    lib.launch("sddmm_tiled", out.device, tiled.graph.matrix(), tiled.described(dots=True), *given, *codes)
    return out


def _sddmm_fake(tiled, lhs, *_):
    return lhs.new_empty(tiled.graph.nnz, *lhs.shape[1:-1], 1)


def _sddmm_setup(ctx, inputs, output):
    tiled, lhs, rhs, ctx.flipped, ctx.fast = inputs
    _arrays.save(ctx, tiled, lhs, rhs)


def _sddmm_backward(ctx, grad):
    tiled, (lhs, rhs) = _arrays.saved(ctx)
    heads = math.prod(grad.shape[1:])

    def summed(other: Tensor, shape: torch.Size, over_targets: bool) -> Tensor:
        """`other` of the far ends times grad, summed up at each source, or target: a gradient of `shape`."""
        # Weights are one per edge: a head is summed up after the other.
        split, weights = other.reshape(other.shape[0], heads, other.shape[-1]), grad.reshape(grad.shape[0], heads)
        structure = tiled if over_targets else tiled.transposed()
        sums = [_spmm_op(structure, split[:, h], weights[:, h], False, ctx.fast) for h in range(heads)]
        return torch.stack(sums, 1).view(shape) if sums else other.new_zeros(shape)

    needs_lhs, needs_rhs, *_ = ctx.wanted
    grad_lhs = summed(rhs, lhs.shape, ctx.flipped) if needs_lhs else None
    grad_rhs = summed(lhs, rhs.shape, not ctx.flipped) if needs_rhs else None
    return grad_lhs, grad_rhs, None, None


def _check_weight(_graph, _x, weight, *_):
    if weight is not None and weight.shape[1:].numel() != 1:
        raise ValueError(f"spmm_tiled: weight: expected one number per edge, got shape {tuple(weight.shape)}")


def _check_ends(tiled, lhs, rhs, flipped, _):
    targets = ("rows", "cols") if flipped else ("cols", "rows")
    _check.reads("sddmm_tiled", ("lhs", targets[0]), ("rhs", targets[1]))(tiled, lhs, rhs)
    _check.features_of("sddmm_tiled", "rhs", rhs, lhs.shape[1:])


_spmm_op = _operators.register(
    "spmm_tiled",
    f"({_arrays.SCHEMA}, Tensor x, Tensor? weight, bool mean, bool fast) -> Tensor",
    _spmm_impl,
    _spmm_fake,
    check=_check.reads("spmm_tiled", ("x", "cols"), ("weight", "edges"), also=_check_weight),
    structure=Tiled,
    backward=_spmm_backward,
    setup_context=_spmm_setup,
)
_sddmm_op = _operators.register(
    "sddmm_tiled",
    f"({_arrays.SCHEMA}, Tensor lhs, Tensor rhs, bool flipped, bool fast) -> Tensor",
    _sddmm_impl,
    _sddmm_fake,
    check=_check_ends,
    structure=Tiled,
    backward=_sddmm_backward,
    setup_context=_sddmm_setup,
)
