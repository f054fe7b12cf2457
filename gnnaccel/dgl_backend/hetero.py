"""The heterogeneous variants: DGL's ops over all edge types at once, as our ops over one edge type each.

DGL alone fails here wherever an edge type has no edges (an error, zeros or memory never written, depending on which
one it is) and in the backward pass where a node type is the source of no edge; these ops give the result all the same.
"""

from __future__ import annotations

import functools

import torch
from dgl import DGLError

from gnnaccel import report
from gnnaccel.dgl_backend import ops
from gnnaccel.dgl_backend.structure import all_rows, structure
from gnnaccel.dgl_backend.touch import is_all
from gnnaccel.ops.sddmm import OPS
from gnnaccel.ops.spmm import MESSAGES

_SHAPES = "features whose shapes differ between types"
# Of equal values the first edge type's wins, and gets the whole gradient, as in DGL; NaN beats all.
_JOIN = {
    "sum": torch.add,
    "max": lambda old, new: torch.where((new > old) | new.isnan(), new, old),
    "min": lambda old, new: torch.where((new < old) | new.isnan(), new, old),
}


def _refuse(counted, known: bool) -> str | None:
    """Why DGL must run an op on (feature, its number of rows) pairs, or None.

    Raises DGLError for what DGL's own code does not look at here, and then reads or writes past the end of.
    """
    given = [f for f, _ in counted]
    tensors = [(f, count) for f, count in counted if isinstance(f, torch.Tensor)]
    if any(f.shape[:1] != (count,) for f, count in tensors):
        shapes = [(tuple(f.shape), count) for f, count in tensors]
        raise DGLError(f"Expected features with one row per node or edge, got (shape, rows expected): {shapes}")
    if len({f.dtype for f, _ in tensors}) > 1:
        raise DGLError(f"The features' data types don't match: {[f.dtype for f, _ in tensors]}")
    if not known:
        return "an operator that is not one of ours"
    if any(f is None for f in given):
        return "an edge type without features"
    return ops.unsupported(*given)


def _shapes_differ(counted) -> bool:
    return len({f.shape[1:] for f, _ in counted}) > 1


def _ends(gidx) -> list[tuple[int, int]]:
    """Source and destination type of each edge type."""
    return [gidx.metagraph.find_edge(t) for t in range(gidx.number_of_etypes())]


def edge_softmax(original, gidx, eids, norm_by, *scores):
    """EdgeSoftmax_hetero.apply: normalises over all edge types at a node, as one softmax on all edges of the graph."""
    kind = "dgl.edge_softmax_hetero"
    counts = [gidx.num_edges(t) for t in range(gidx.number_of_etypes())]
    why = "a softmax over some of the edges of several edge types" if not is_all(eids) else None
    pairs = list(zip(scores, counts, strict=True))
    why = why or _refuse(pairs, known=True) or (_SHAPES if _shapes_differ(pairs) else None)
    if why is not None:
        return ops.leave(original, kind, why, gidx, eids, norm_by, *scores)
    with report.accelerated(kind):
        graph = all_rows(gidx, norm_by)
        ops.on_one_device(graph, *scores)
        out = ops.kernels.edge_softmax(graph, torch.cat(scores))
        return tuple(part.clone() for part in out.split(counts))  # tensors of their own, that may be written into


def spmm(original, gidx, op, reduce, lhs_len, *features):
    """GSpMM_hetero.apply: one result per node type, an empty tensor where no edge type ends."""
    lhs, rhs, ends = features[:lhs_len], features[lhs_len:], _ends(gidx)
    kind = f"dgl.gspmm_hetero {op}.{reduce}"
    left = [(lhs[source], gidx.num_nodes(source)) for source, _ in ends] if op != "copy_rhs" else []
    right = [(rhs[t], gidx.num_edges(t)) for t in range(len(ends))] if op != "copy_lhs" else []
    why = _refuse(left + right, op in MESSAGES and reduce in _JOIN)
    if why is None and (_shapes_differ(left) or _shapes_differ(right)):
        why = _SHAPES
    if why is None and left and right and not ops.broadcasts(op, left[0][0], right[0][0]):
        why = ops.WRONG_SHAPES
    if why is not None:
        return ops.leave(original, kind, why, gidx, op, reduce, lhs_len, *features)
    out: list = [None] * gidx.number_of_ntypes()
    with report.accelerated(kind):
        fed = {target for etype, (_, target) in enumerate(ends) if gidx.num_edges(etype)}
        for etype, (_, target) in enumerate(ends):
            graph = structure(gidx.get_relation_graph(etype))
            pair = (side[etype][0] if side else None for side in (left, right))
            part = ops.run_spmm(graph, op, reduce, *pair, infinite=target in fed)
            out[target] = part if out[target] is None else _JOIN[reduce](out[target], part)
        device = next((part.device for part in out if part is not None), None)
        return tuple(torch.tensor([], device=device) if part is None else part for part in out)


def sddmm(original, gidx, op, lhs_len, lhs_target, rhs_target, *features):
    """GSDDMM_hetero.apply: one result per edge type."""
    kind, ends = f"dgl.gsddmm_hetero {op}", _ends(gidx)
    left = _picked(gidx, features[:lhs_len], lhs_target, ends) if op != "copy_rhs" else []
    right = _picked(gidx, features[lhs_len:], rhs_target, ends) if op != "copy_lhs" else []
    why = _refuse(left + right, op in OPS)
    if why is None and not all(ops.broadcasts(op, a, b) for (a, _), (b, _) in zip(left, right, strict=False)):
        why = ops.WRONG_SHAPES
    if why is not None:
        return ops.leave(original, kind, why, gidx, op, lhs_len, lhs_target, rhs_target, *features)
    with report.accelerated(kind):
        return tuple(
            ops.run_sddmm(
                structure(gidx.get_relation_graph(etype)),
                op,
                left[etype][0] if left else None,
                right[etype][0] if right else None,
                lhs_target,
                rhs_target,
            )
            for etype in range(len(ends))
        )


def _picked(gidx, side, target, ends) -> list:
    """The feature of an operand for each edge type, with the number of rows it must have."""
    target = ops.TARGETS[target]
    if target == "e":
        return [(side[t], gidx.num_edges(t)) for t in range(len(ends))]
    types = [end[0 if target == "u" else 1] for end in ends]
    return [(side[t], gidx.num_nodes(t)) for t in types]


GSpMM_hetero, GSDDMM_hetero, EdgeSoftmax_hetero = (
    functools.partial(ops.Replacement, function) for function in (spmm, sddmm, edge_softmax)
)
