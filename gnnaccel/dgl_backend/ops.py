"""Replacements for the autograd functions of dgl.backend.pytorch.sparse.

DGL's gspmm, gsddmm, edge_softmax and segment_reduce look these classes up at each call and use only their
`apply`. Each replacement honours DGL's conventions (1-D features, infinities in empty rows, DGLError) and calls
the registered op, whose autograd replaces DGL's. What it does not support goes to DGL's own class, counted.
"""

from __future__ import annotations

import functools
import time
from types import ModuleType

import torch
from dgl import DGLError

from gnnaccel import report, touch
from gnnaccel.dgl_backend import bridge, our_kernels
from gnnaccel.dgl_backend.structure import known_structure, structure
from gnnaccel.dgl_backend.touch import index_of, is_all, reshape_lhs_rhs
from gnnaccel.ops import CBSR, has_cuda_kernels
from gnnaccel.ops.sddmm import OPS
from gnnaccel.ops.spmm import MESSAGES, REDUCES

kernels: ModuleType = our_kernels  # or torch_kernels: set by enable()

_ANYWHERE = (torch.float32, torch.float64, torch.bfloat16)
_DTYPES = {"cpu": {*_ANYWHERE}, "cuda": {*_ANYWHERE, torch.float16}}
TARGETS = {"u": "u", "v": "v", "e": "e", "src": "u", "dst": "v", "edge": "e"}
_NAN = "a maximum or minimum of values with NaN"
_EMPTY = {"max": float("-inf"), "min": float("inf")}
_NOT_DENSE = "features that are not dense tensors"
WRONG_ROWS = "features whose number of rows is not that of the nodes or edges"
WRONG_SHAPES = "features whose shapes do not broadcast"
OUT_OF_RANGE = "types out of range, of which DGL takes the negative ones to count from the end"


def transformed() -> str | None:
    """Why a call inside a transformation of torch is DGL's: its autograd classes refuse all of them, with an error.

    Our ops would not: they have no rule for a forward derivative, so that it would come out as zero.
    """
    if touch.sees_transforms() or touch.in_forward_mode():
        return "torch.func, or automatic differentiation in forward mode"
    return None


def unsupported(*features) -> str | None:
    """Why features are DGL's to work on (it also words the errors for wrong ones), or None."""
    # Loops, not any() and all(): layers ask at every call.
    if (why := transformed()) is not None:
        return why
    given = [f for f in features if f is not None]
    if not given:
        return _NOT_DENSE
    for f in given:
        if not isinstance(f, torch.Tensor) or f.layout is not torch.strided:
            return _NOT_DENSE
    device, dtype = given[0].device, given[0].dtype
    allowed = _DTYPES.get(device.type, set())
    for f in given:
        if not allowed or f.device != device:
            return f"features on {' and '.join(sorted({str(f.device) for f in given}))}"
    if device.type == "cuda" and not has_cuda_kernels():
        return "a gnnaccel without its CUDA half"
    for f in given:
        if f.dtype not in allowed:
            return f"features of dtype {dtype}"
    for f in given:
        if f.dtype != dtype:
            return "features of different dtypes"
    for f in given:
        if f.dim() == 0:
            return "features without a node or edge dimension"
    return None


def leave(original, kind: str, why: str, *args):
    """Let DGL run a call, counted; where it has no kernel for CUDA, say so."""
    report.fallback(kind, why)
    args = tuple(a.to_dense() if isinstance(a, CBSR) else a for a in args)  # DGL reads addresses
    if any(isinstance(a, torch.Tensor) and a.is_cuda for a in args) and bridge.needed():
        raise DGLError(f"{kind}: {bridge.NO_KERNEL.format(why)}")
    return original(*args)


def on_one_device(graph, *features) -> None:
    for feature in features:
        if feature is not None and feature.device != graph.device:
            raise DGLError(f"Expect features on the graph's device, {graph.device}, got {feature.device}")


def _refuse(gidx, known: bool, *features) -> str | None:
    """Why DGL must run an op on one edge type itself, or None; `known`: its message and reduction are of ours."""
    if not known:
        return "an operator that is not one of ours"
    if gidx.number_of_etypes() != 1:
        return "a graph with several edge types where DGL expects one"
    return unsupported(*features)


def broadcasts(op: str, lhs, rhs) -> bool:
    """True if the feature shapes broadcast; if not, DGL says so."""
    if lhs is None or rhs is None or lhs.shape[1:] == rhs.shape[1:]:
        return True
    left, right = (f.shape[1:] or (1,) for f in (lhs, rhs))
    if op == "dot" and left[-1] != right[-1]:
        return False
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(left), reversed(right), strict=False))


def _fits(features, counts) -> bool:
    return all(f is None or f.shape[0] == n for f, n in zip(features, counts, strict=True))


def _columns(lhs, rhs):
    """Features with at least one feature dimension, and whether DGL would drop the last one of the result."""
    squeeze = all(f is None or f.dim() == 1 for f in (lhs, rhs))
    return *(f.unsqueeze(-1) if f is not None and f.dim() == 1 else f for f in (lhs, rhs)), squeeze


def spmm(original, gidx, op, reduce, lhs, rhs):
    """GSpMM.apply with reduce "sum", "max", "min", or our own "mean"."""
    lhs = None if op == "copy_rhs" else lhs
    rhs = None if op == "copy_lhs" else rhs
    kind = f"dgl.gspmm {op}.{reduce}"
    start, known = time.perf_counter(), known_structure(gidx)
    if known is not None and (out := kernels.ready_sum(known, lhs, op, reduce, rhs)) is not None:
        report.record(kind, start)
        return out
    why = _refuse(gidx, op in MESSAGES and reduce in REDUCES, lhs, rhs)
    if why is None:
        graph = structure(gidx)
        if not _fits((lhs, rhs), (graph.num_cols, graph.nnz)):
            why = WRONG_ROWS
        elif not broadcasts(op, lhs, rhs):
            why = WRONG_SHAPES
    if why is not None:
        return leave(original, kind, why, gidx, op, reduce, lhs, rhs)
    out = run_spmm(graph, op, reduce, lhs, rhs, infinite=graph.nnz > 0)
    if reduce in _EMPTY and _has_nan(out):
        return leave(original, kind, _NAN, gidx, op, reduce, lhs, rhs)
    report.record(kind, start)
    return out


def _has_nan(out: torch.Tensor) -> bool:
    """True for an extremum of values with NaN, which DGL's kernels skip and ours, as torch's, return.

    Not asked on CUDA, where the answer would have to be waited for: there the result is NaN.
    """
    if out.is_cuda:
        return False
    out = out.detach()
    return bool(out.sum().isnan()) and bool(out.isnan().any())  # the sum alone may be inf - inf


def run_spmm(graph, op, reduce, lhs, rhs, infinite: bool):
    """The SpMM of checked operands; `infinite`: rows without edges hold what a maximum or minimum starts from."""
    on_one_device(graph, lhs, rhs)
    lhs, rhs, squeeze = _columns(lhs, rhs)
    empty_value = _EMPTY.get(reduce, 0.0) if infinite else 0.0
    out = kernels.spmm(graph, lhs, rhs, op, reduce, empty_value)
    return out.squeeze(-1) if squeeze else out


def known_spmm(graph, op, reduce, lhs, rhs) -> torch.Tensor | None:
    """`spmm` on an index whose Graph is `graph`, of a sum or mean and features of as many dimensions (rhs may be None)
    for which nothing is ready; None for what is DGL's to see to."""
    start = time.perf_counter()
    if rhs is not None and (out := kernels.ready_sum(graph, lhs, op, reduce, rhs)) is not None:
        report.record(f"dgl.gspmm {op}.{reduce}", start)
        return out
    if unsupported(lhs, rhs) is not None or lhs.device != graph.device or (rhs is not None and lhs.dim() != rhs.dim()):
        return None
    if not _fits((lhs, rhs), (graph.num_cols, graph.nnz)) or not broadcasts(op, lhs, rhs):
        return None
    with report.accelerated(f"dgl.gspmm {op}.{reduce}"):
        return run_spmm(graph, op, reduce, lhs, rhs, infinite=False)


def known_sddmm(graph, op, lhs, rhs, lhs_target, rhs_target) -> torch.Tensor | None:
    """`sddmm` likewise."""
    if unsupported(lhs, rhs) is not None or lhs.device != graph.device or lhs.dim() != rhs.dim():
        return None
    count = {"u": graph.num_cols, "v": graph.num_rows, "e": graph.nnz}
    if not _fits((lhs, rhs), (count[lhs_target], count[rhs_target])) or not broadcasts(op, lhs, rhs):
        return None
    with report.accelerated(f"dgl.gsddmm {op}"):
        return run_sddmm(graph, op, lhs, rhs, lhs_target, rhs_target)


def sddmm(original, gidx, op, lhs, rhs, lhs_target="u", rhs_target="v"):
    """GSDDMM.apply."""
    lhs = None if op == "copy_rhs" else lhs
    rhs = None if op == "copy_lhs" else rhs
    kind = f"dgl.gsddmm {op}"
    why = _refuse(gidx, op in OPS and {lhs_target, rhs_target} <= TARGETS.keys(), lhs, rhs)
    if why is None:
        graph = structure(gidx)
        count = {"u": graph.num_cols, "v": graph.num_rows, "e": graph.nnz}
        if not _fits((lhs, rhs), (count[TARGETS[lhs_target]], count[TARGETS[rhs_target]])):
            why = WRONG_ROWS
        elif not broadcasts(op, lhs, rhs):
            why = WRONG_SHAPES
    if why is not None:
        return leave(original, kind, why, gidx, op, lhs, rhs, lhs_target, rhs_target)
    with report.accelerated(kind):
        return run_sddmm(graph, op, lhs, rhs, lhs_target, rhs_target)


def run_sddmm(graph, op, lhs, rhs, lhs_target, rhs_target):
    """The SDDMM of checked operands."""
    on_one_device(graph, lhs, rhs)
    lhs, rhs, squeeze = _columns(lhs, rhs)
    out = kernels.sddmm(graph, lhs, rhs, op, TARGETS[lhs_target], TARGETS[rhs_target])
    return out.squeeze(-1) if squeeze else out


def edge_softmax(original, gidx, score, eids, norm_by):
    """EdgeSoftmax.apply. DGL's own does not look at the number of scores, and writes past its arrays."""
    kind = "dgl.edge_softmax"
    if isinstance(score, torch.Tensor) and score.dim() == 0:
        raise DGLError("edge_softmax: expected one score per edge, got a scalar")
    why = _refuse(gidx, True, score)
    if why is None:
        part = gidx if is_all(eids) else gidx.edge_subgraph([eids], True).graph
        graph = structure(part)
        if score.shape[0] != graph.nnz:
            raise DGLError(f"edge_softmax: expected one score per edge, {graph.nnz}, got {score.shape[0]}")
        on_one_device(graph, score)
    if why is not None:
        return leave(original, kind, why, gidx, score, eids, norm_by)
    with report.accelerated(kind):
        return kernels.edge_softmax(graph.transposed if norm_by == "src" else graph, score)


def segments(original, op, x, offsets):
    """SegmentReduce.apply. Offsets come from the caller's segment lengths, so they are checked."""
    kind = f"dgl.segment_reduce {op}"
    why = unsupported(x)
    if offsets.dtype not in (torch.int32, torch.int64):
        why = f"offsets of dtype {offsets.dtype}"
    if why is not None:
        return leave(original, kind, why, op, x, offsets)
    start, values = time.perf_counter(), x
    if offsets.numel() and 0 <= int(offsets[-1]) < x.shape[0]:  # DGL ignores what the lengths do not cover
        values = x[: int(offsets[-1])]
    out = kernels.segment_reduce(values, offsets, op, empty_value=_EMPTY.get(op, 0.0))
    if op in _EMPTY and _has_nan(out):
        return leave(original, kind, _NAN, op, x, offsets)
    report.record(kind, start)
    return out


class Replacement:
    """Has the `apply` of an autograd class and passes the class's own along as the fallback."""

    def __init__(self, function, replaced):
        self._function = function
        self.replaced = replaced

    def apply(self, *args):
        return self._function(self.replaced.apply, *args)


GSpMM, GSDDMM = functools.partial(Replacement, spmm), functools.partial(Replacement, sddmm)
EdgeSoftmax, SegmentReduce = functools.partial(Replacement, edge_softmax), functools.partial(Replacement, segments)


def mean_gspmm(gspmm):
    """dgl.ops.gspmm that reduces "mean" in one pass instead of a sum and a division."""

    def replacement(g, op, reduce_op, lhs_data, rhs_data):
        features = (lhs_data, rhs_data)
        plain = index_of(g).number_of_etypes() == 1 and op not in ("sub", "div")
        if reduce_op != "mean" or not plain or torch.is_autocast_enabled():
            return gspmm(g, op, reduce_op, lhs_data, rhs_data)
        if unsupported(*features) is not None:
            return gspmm(g, op, reduce_op, lhs_data, rhs_data)
        if op not in ("copy_lhs", "copy_rhs"):
            lhs_data, rhs_data = reshape_lhs_rhs(lhs_data, rhs_data)

        def original(gidx, op, reduce, lhs, rhs):  # reached only for features that do not fit: DGL words the error
            return gspmm(g, op, "mean", lhs, rhs)

        return spmm(original, index_of(g), op, "mean", lhs_data, rhs_data)

    return replacement


def of_dense(original):
    """`original` of a tensor, which gets the dense one of a CBSR: it hands on addresses."""
    return lambda data: original(data.to_dense() if isinstance(data, CBSR) else data)
