"""The heterogeneous variants: DGL's ops over all edge types at once, as our ops over one edge type each."""

from __future__ import annotations

import torch

from gnnaccel import report
from gnnaccel.dgl_backend import ops
from gnnaccel.dgl_backend.graph import relation

# Of equal values the first edge type's wins, and gets the whole gradient, as in DGL; NaN beats all.
_JOIN = {
    "sum": torch.add,
    "max": lambda old, new: torch.where((new > old) | new.isnan(), new, old),
    "min": lambda old, new: torch.where((new < old) | new.isnan(), new, old),
}


def _left_to_dgl(kind: str, gidx, features) -> bool:
    given = [f for f in features if f is not None]
    if any(f.device.type != "cpu" or f.dtype not in ops._DTYPES or f.dim() == 0 for f in given):
        report.fallback(kind, "features that are not on the CPU, or of an unsupported dtype")
        return True
    if len({f.dtype for f in given}) > 1:
        report.fallback(kind, "features of different dtypes")
        return True
    if not given or any(gidx.num_edges(t) == 0 for t in range(gidx.number_of_etypes())):
        report.fallback(kind, "an edge type without edges or features")
        return True
    return False


def _rows_fit(pairs) -> bool:
    """True if each feature of (feature, count) has as many rows as there are nodes or edges; if not, DGL says so."""
    return all(f is None or f.shape[0] == count for f, count in pairs)


def edge_softmax(original, *args):
    """EdgeSoftmax_hetero.apply: normalises over all edge types at once, which no op of ours does."""
    report.fallback("dgl.edge_softmax_hetero", "a softmax over several edge types")
    return original(*args)


def _inner(*_args):
    raise RuntimeError("gnnaccel: one edge type of a heterogeneous op was refused after the op was accepted")


def spmm(original, gidx, op, reduce, lhs_len, *features):
    """GSpMM_hetero.apply: one result per node type (None where no edge type ends)."""
    lhs, rhs = features[:lhs_len], features[lhs_len:]
    ends = [gidx.metagraph.find_edge(t) for t in range(gidx.number_of_etypes())]
    used = [f for t, (s, _) in enumerate(ends) for f in _operands(op, lhs[s], rhs[t] if rhs else None)]
    rows = [(lhs[s] if op != "copy_rhs" else None, gidx.num_nodes(s)) for s, _ in ends]
    rows += [(rhs[t] if op != "copy_lhs" else None, gidx.num_edges(t)) for t in range(len(ends))]
    if (
        _left_to_dgl(f"dgl.gspmm_hetero {op}.{reduce}", gidx, used)
        or any(f is None for f in used)
        or not _rows_fit(rows)
    ):
        return original(gidx, op, reduce, lhs_len, *features)
    out: list[torch.Tensor | None] = [None] * gidx.number_of_ntypes()
    for etype, (source, target) in enumerate(ends):
        right = rhs[etype] if op != "copy_lhs" else None
        left = lhs[source] if op != "copy_rhs" else None
        part = ops.spmm(_inner, relation(gidx, etype), op, reduce, left, right)
        out[target] = part if out[target] is None else _JOIN[reduce](out[target], part)
    return tuple(out)


def _operands(op: str, lhs, rhs) -> list:
    return [f for f, name in ((lhs, "copy_rhs"), (rhs, "copy_lhs")) if op != name]


def sddmm(original, gidx, op, lhs_len, lhs_target, rhs_target, *features):
    """GSDDMM_hetero.apply: one result per edge type."""
    lhs, rhs = features[:lhs_len], features[lhs_len:]
    ends = [gidx.metagraph.find_edge(t) for t in range(gidx.number_of_etypes())]

    def pick(side, target, etype):
        source, destination = ends[etype]
        return side[{"u": source, "v": destination, "e": etype}[ops._TARGETS[target]]]

    pairs = []
    for etype in range(len(ends)):
        left = pick(lhs, lhs_target, etype) if op != "copy_rhs" else None
        right = pick(rhs, rhs_target, etype) if op != "copy_lhs" else None
        pairs.append((left, right))
    used = [f for left, right in pairs for f in _operands(op, left, right)]
    if _left_to_dgl(f"dgl.gsddmm_hetero {op}", gidx, used) or any(f is None for f in used):
        return original(gidx, op, lhs_len, lhs_target, rhs_target, *features)
    return tuple(
        ops.sddmm(_inner, relation(gidx, etype), op, left, right, lhs_target, rhs_target)
        for etype, (left, right) in enumerate(pairs)
    )
