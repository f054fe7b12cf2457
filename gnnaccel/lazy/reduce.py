"""Messages, lazy or not, reduced over the edges of each destination."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.lazy import blocks, programs
from gnnaccel.lazy.expression import (
    LINEAR,
    Apply,
    Expression,
    Leaf,
    bare,
    gathered,
    has_softmax,
    joined,
    product,
    reshaped,
    softmaxed,
    widest_rows,
    without_autocast,
)
from gnnaccel.lazy.tensor import Lazy, lift
from gnnaccel.lower import bounds
from gnnaccel.recording import call


class Unsupported(Exception):
    """This call is the framework's: the argument says why. Raised before anything with a side effect was done."""


FEATURE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_REDUCES = {"sum": "sum", "add": "sum", "mean": "mean", "max": "max", "amax": "max", "min": "min", "amin": "min"}


def unserved(device: torch.device) -> str | None:
    """Why no kernel of ours runs on `device`; None if they do."""
    if device.type == "cuda":
        return None if ops.has_cuda_kernels() else "CUDA tensors, but this gnnaccel was built without its CUDA half"
    return None if device.type == "cpu" else f"tensors on {device.type}"


def takes(x) -> bool:
    """True for a tensor our ops take as a feature."""
    return (
        isinstance(x, Tensor)
        and x.dtype in FEATURE_DTYPES
        and x.layout is torch.strided
        and (x.dtype != torch.float16 or x.is_cuda)
        and (x.is_cpu or unserved(x.device) is None)
    )


def refusal(x) -> str:
    """Why our ops do not take `x` as a feature, of which `takes` is False."""
    if not isinstance(x, Tensor):
        return f"features of type {type(x).__name__}"
    if x.layout is not torch.strided:
        return f"features of layout {x.layout}"
    return unserved(x.device) or f"features of {x.dtype} on {x.device.type}"


def exponent(x: Tensor) -> Tensor:
    """`x` in the dtype that exp() has: a wider one under autocast on CUDA, and so in PyG's softmax."""
    return x.to(exponent_dtype(x))


def exponent_dtype(x: Tensor) -> torch.dtype:
    """The dtype that exp() of `x` has."""
    return _exponent_dtype(x.device.type, x.dtype) if torch.is_autocast_enabled(x.device.type) else x.dtype


@functools.cache
def _exponent_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype:
    """The same under autocast, whose dtype does not matter."""
    with torch.autocast(device_type):
        return torch.exp(torch.empty(0, dtype=dtype, device=device_type)).dtype


def reduced(graph, messages: Tensor, reduce: str, dim: int = 0) -> Tensor:
    """out[i] = reduce of the messages of the edges that end in i; 0 where none does.

    Parameters
    ----------
    messages : Tensor or Lazy [E, ...]
        Edges in dimension `dim`.

    Raises
    ------
    Unsupported
        If these are not the messages of `graph`, of a dtype that our ops take.
    """
    if reduce not in _REDUCES or not -messages.dim() <= dim < messages.dim():
        raise Unsupported(f"reduction {reduce!r} of dimension {dim}")
    reduce = _REDUCES[reduce]
    dim %= messages.dim()
    if not takes(messages):
        raise Unsupported(refusal(messages))
    if messages.shape[dim] != graph.nnz or messages.device != graph.device:
        raise Unsupported("messages that are not one to each edge")
    if isinstance(messages, Lazy) and messages.waiting and dim == messages.axis:
        out = _of_several(graph, messages, reduce) if reduce in messages.together else None
        if out is None:
            out = _with_softmax(graph, messages, reduce)
        if out is None:
            messages = messages.without_late() if messages.late else messages
            if isinstance(messages, Lazy) and messages.waiting:
                out = _of_expression(graph, messages.expression, reduce)
        if out is not None:
            return _back(out, dim)
        messages = messages.rows() if isinstance(messages, Lazy) else messages
    if isinstance(messages, Lazy):
        messages = messages.rows(f"{reduce} of messages that are no product")
    return _back(_of_rows(graph, messages.movedim(dim, 0), reduce), dim)


def _with_softmax(graph, messages: Lazy, reduce: str) -> Tensor | None:
    """`reduced` of messages that a softmax over edges is a part of, in its walk; None for others."""
    if reduce not in ("sum", "mean") or not messages.late or not has_softmax(messages.expression):
        return None
    found = programs.reduced(graph, messages.expression, reduce)
    return None if found is None else found[0]


def _of_several(graph, messages: Lazy, reduce: str) -> Tensor | None:
    """`reduced` by one walk for all that will be asked for; None where each goes its own way."""
    if messages.reduced is None:
        apart = len(messages.together) < 2 or product(graph, messages.expression) is not None
        found = None if apart else programs.reduced(graph, messages.expression, *messages.together)
        messages.reduced = {} if found is None else dict(zip(messages.together, found, strict=True))
    return messages.reduced.get(reduce)


def _of_expression(graph, expression: Expression, reduce: str) -> Tensor | None:
    """`reduced` of an expression; None where its rows are few enough to be stored."""
    if isinstance(expression, Apply) and expression.function is joined:  # sums side by side, of what lies side by side
        parts = expression.args
        if not blocks.are_large(graph, expression):
            parts = blocks.with_maps_stored(graph, *parts)
        return torch.cat([_of_part(graph, part, reduce) for part in parts], -1)
    walked = widest_rows(graph, expression) > bounds.MULTIPLIED_FEATURES[graph.device.type]
    form = None if walked else product(graph, expression)
    if form is not None:
        x, weight, features = form
        return reshaped(call(ops.spmm, graph, x, weight, reduce=reduce), features)
    summed = reduce in ("sum", "mean") and graph.num_rows <= graph.nnz  # else a map of each edge is less work
    if summed and isinstance(expression, Apply) and _maps_rows(expression):
        return _mapped_sum(graph, expression, _of_part(graph, expression.args[0], reduce), reduce)
    if not blocks.are_large(graph, expression):
        (expression,) = blocks.with_maps_stored(graph, expression)
        if isinstance(rows := bare(expression), Tensor):
            return _of_rows(graph, rows, reduce)
    found = programs.reduced(graph, expression, reduce)
    out = None if found is None else found[0]
    if out is None and blocks.are_large(graph, expression):
        out = blocks.edge_reduce(graph, expression, reduce)
    return out


def _of_part(graph: Graph, part, reduce: str) -> Tensor:
    """Rows of any kind, reduced."""
    part = bare(part)
    if isinstance(part, Tensor):
        return _of_rows(graph, part, reduce)
    out = _of_expression(graph, part, reduce)
    return _of_rows(graph, gathered(graph, part), reduce) if out is None else out


def _of_rows(graph: Graph, rows: Tensor, reduce: str) -> Tensor:
    return call(ops.spmm, graph, None, rows, "copy_rhs", reduce)


def _maps_rows(expression: Apply) -> bool:
    """True for a linear map of what is an expression itself."""
    return expression.function in LINEAR and isinstance(expression.args[0], (Leaf, Apply))


def _mapped_sum(graph, expression: Apply, out: Tensor, reduce: str) -> Tensor:
    """The sum or mean of linear maps is the linear map of the sum or mean: of nodes instead of edges."""
    _, weight, *bias = expression.args
    with without_autocast(graph.device):
        out = expression.function(out, weight)
        for shift in bias:
            if shift is not None:  # once for each edge, or for whoever has one
                count = graph.indptr.diff()
                count = count if reduce == "sum" else count.clamp(max=1)
                out = out + count.to(out.dtype).view(-1, *(1,) * (out.dim() - 1)) * shift
    return out


def softmax(graph: Graph, scores: Tensor) -> Tensor:
    """exp(scores) over its sum on the edges of each destination: of [E, ...] scores, lazy or not, of the same shape.

    Lazy where scores are, and wait or are wide and more than to be stored.
    """
    scores = exponent(scores)
    if (
        isinstance(scores, Lazy)
        and (scores.pending and graph is scores.trip.graph)
        and scores.trip.holds(scores.expression)
    ):
        expression = scores.expression
        return Lazy(scores.trip, Apply(softmaxed, (expression, graph), {}, expression.features, expression.dtype))
    is_wide = isinstance(scores, Lazy) and scores.pending and math.prod(scores.shape[1:]) > bounds.STORED_FEATURES
    if is_wide and blocks.not_stored(graph, scores.expression, costly=True):  # type: ignore[attr-defined]
        top = blocks.edge_reduce(graph, scores.expression, "logsumexp")  # type: ignore[attr-defined]
        return (scores - lift(scores.trip, "v", top)).exp()  # type: ignore[attr-defined]
    return call(ops.edge_softmax, graph, scores.rows() if isinstance(scores, Lazy) else scores)


def softmax_sum(graph: Graph, scores: Tensor, values: Tensor) -> Tensor | None:
    """The sum of values [E, ...] times `softmax` of scores, of the same shape, where no edge's need be stored for it;
    None where `softmax` and `reduced` are the way."""
    if not isinstance(scores, Lazy) or not isinstance(values, Lazy) or not (scores.pending and values.pending):
        return None
    if scores.shape != values.shape or scores.dtype != values.dtype or exponent(scores) is not scores:
        return None
    if math.prod(scores.shape[1:]) <= bounds.STORED_FEATURES or not blocks.not_stored(
        graph, scores.expression, costly=True
    ):
        return None
    return programs.softmax_sum(graph, scores.expression, values.expression)


def _back(out: Tensor, dim: int) -> Tensor:
    """`out` with its rows in dimension `dim`, contiguous as PyG's results are."""
    return out.movedim(0, dim).contiguous() if dim else out
