"""Features side by side, towers, and linear maps of lazy features: a linear map of both ends of an edge becomes two
maps of nodes.

A layer that joins its ends and maps them, as EdgeConv, CGConv, PNAConv and many of users' do, asks for W [x_i, x_j] of
every edge; W_1 x_i + W_2 x_j is the same with as many products as there are nodes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.graph.csr import Graph
from gnnaccel.lazy.expression import (
    LINEAR,
    Apply,
    Leaf,
    bare,
    clean,
    is_rows,
    joined,
    mapped,
    reads_nodes,
    without_autocast,
)
from gnnaccel.lazy.rules import TENSORS, feature_dim, features_of, hoist, is_operand, make, unsqueeze
from gnnaccel.lazy.tensor import RULES, Lazy, lift, waiting


def _cat(func, tensors, dim=0):
    first = next((t for t in tensors if isinstance(t, Lazy)), None)
    if first is None or not first.pending or feature_dim(first, dim) is None:
        return NotImplemented
    dims = first.expression_dims
    parts: list[Any] = []
    for t in tensors:
        if isinstance(t, Lazy):
            if not t.pending or t.trip is not first.trip or t.expression_dims != dims:
                return NotImplemented
            parts.append(bare(t.expression))
        elif is_rows(t, first.trip.graph, "e", dims - 1) and is_operand(t):
            parts.append(t)
        else:
            return NotImplemented
    sides = {part.side if isinstance(part, Leaf) else None for part in parts}
    if len(sides) == 1 and None not in sides:
        whole = func([leaf.value for leaf in parts], dim)
        return lift(first.trip, parts[0].side, whole, clean=all(leaf.clean for leaf in parts))
    features = [features_of(part, dims) for part in parts]
    alike = len({f[:-1] for f in features}) == 1 and len({part.dtype for part in parts}) == 1
    if feature_dim(first, dim) != dims - 1 or not alike:
        return NotImplemented
    return make(first.trip, joined, tuple(parts), (*features[0][:-1], sum(f[-1] for f in features)), parts[0].dtype)


def _linear(func, x, weight, *bias):
    """A linear map of a lifted feature is the lifted feature of a linear map: N rows instead of E."""
    if not isinstance(x, Lazy) or not x.pending or x.expression_dims < 2:
        return NotImplemented
    if any(type(w) not in TENSORS or w.dim() > 2 for w in (weight, *bias) if w is not None):
        return NotImplemented
    if isinstance(x.expression, Leaf):
        return lift(x.trip, x.expression.side, hoist(x, func, weight, *bias), clean=True)
    if not reads_nodes(x.expression):
        return waiting(x.trip, func(x.rows(), weight, *bias))
    if torch.is_autocast_enabled(x.trip.graph.device.type):  # both operands would be cast
        return _narrow(x, func, weight, *bias)
    width = weight.shape[0] if func is F.linear else weight.shape[-1]
    if x.expression.dtype == weight.dtype and (apart := _apart(x, func, weight, *bias)) is not None:
        return apart
    if weight.dim() != 2:
        return NotImplemented
    return make(x.trip, func, (x.expression, weight, *bias), (*x.expression.features[:-1], width), x.expression.dtype)


def _apart(x: Lazy, func, weight: Tensor, *bias) -> Lazy | None:
    """A linear map as maps of nodes, in the dtype of `weight`; None where it is none or they would be no fewer."""
    if weight.dim() != 2:
        return None
    matrix, graph = weight.t() if func is F.linear else weight, x.trip.graph
    if matrix.shape[0] != x.expression.features[-1] or max(graph.num_rows, graph.num_cols) > graph.nnz:
        return None
    if not all(b is None or (b.dim() == 1 and b.dtype == weight.dtype) for b in bias):
        return None
    apart = _mapped(graph, x.expression, matrix)
    if apart is None:
        return None
    for shift in bias:
        apart = apart if shift is None else _shifted(apart, shift)
    return make(x.trip, apart.function, apart.args, apart.features, apart.dtype)


def _narrow(x: Lazy, func, weight: Tensor, *bias):
    """A linear map under autocast on the CPU: maps of nodes in float32, whose sums are rounded as autocast's products
    of edges are. Sums of rounded maps would lose the digits that they have in common."""
    kind = x.trip.graph.device.type
    narrow = (torch.bfloat16, torch.float32)
    if kind != "cpu" or weight.dtype != torch.float32 or x.expression.dtype not in narrow:
        return NotImplemented
    with without_autocast(x.trip.graph.device):
        apart = _apart(x, func, weight, *bias)
    return NotImplemented if apart is None else apart.to(torch.get_autocast_dtype(kind))


def _shares(args: tuple, beside: tuple) -> bool:
    """True if one of `args` is one of `beside` too: rows of the same node feature at the same end."""
    ends = {(id(x.value), x.side) for x in beside if isinstance(x, Leaf)}
    return any(isinstance(x, Leaf) and (id(x.value), x.side) in ends for x in args)


def _shifted(expression, shift: Tensor):
    """expression + shift [F], added to a node feature where a sum begins with one: there are fewer of its rows."""
    if isinstance(expression, Leaf):
        return Leaf(expression.side, expression.value + shift, expression.clean)
    if isinstance(expression, Apply) and expression.function in (torch.add, torch.sub):
        first, second = expression.args
        return Apply(expression.function, (_shifted(first, shift), second), {}, expression.features, expression.dtype)
    if isinstance(expression, Tensor):
        return expression + shift
    return Apply(torch.add, (expression, shift), {}, expression.features, expression.dtype)


def _mapped(graph: Graph, expression, matrix: Tensor, beside: tuple = ()):
    """expression @ matrix [F, G], with the products taken of node features, once for each of their rows, and of other
    operands; None where the expression is no linear function of them.

    beside : what the expression lies beside in a `joined` one. W x_j - W x_i loses the digits that x_j and x_i have in
        common, so a difference is mapped apart only beside one of them, whose own map is as large.
    """
    if isinstance(expression, Leaf):
        rows = clean(graph, expression)
        rows = rows if rows.dtype == matrix.dtype else rows.to(matrix.dtype)
        return Leaf(expression.side, torch.matmul(rows, matrix), clean=True)
    if isinstance(expression, Tensor):
        if expression.dim() == 0 or expression.shape[-1] != matrix.shape[0]:
            return None
        if expression.dim() > 1 and is_rows(expression, graph, "e", expression.dim() - 1):  # perhaps not to be stored
            features = (*expression.shape[1:-1], matrix.shape[1])
            matrix = matrix if matrix.dtype == expression.dtype else matrix.to(expression.dtype)
            return Apply(mapped, (expression, matrix), {}, features, expression.dtype)
        return torch.matmul(expression.to(matrix.dtype), matrix)
    if not isinstance(expression, Apply) or expression.kwargs:
        return None
    function, args = expression.function, expression.args
    if function is joined and (whole := _merged(graph, expression, matrix)) is not None:
        return whole
    if function is joined:
        widths = [a.features[-1] if isinstance(a, (Leaf, Apply)) else a.shape[-1] for a in args]
        parts = [_mapped(graph, a, m, args) for a, m in zip(args, matrix.split(widths), strict=True)]
        function = torch.add
    elif function is torch.add or (function is torch.sub and _shares(args, beside)):
        parts = [_mapped(graph, arg, matrix, beside) for arg in args]
    elif function in (torch.mul, torch.div) and isinstance(args[1], (int, float)):
        parts = [_mapped(graph, args[0], matrix, beside), args[1]]
    else:
        return None
    if any(part is None for part in parts):
        return None
    features = (*expression.features[:-1], matrix.shape[1])
    out = parts[0]
    for part in parts[1:]:
        out = Apply(function, (out, part), {}, features, matrix.dtype)
    return out


def _terms(expression, matrix: Tensor, beside: tuple = ()) -> list[tuple[Leaf, Tensor]] | None:
    """Leaves and the matrices whose products with them add up to what `_mapped` gives; None where there are others."""
    if isinstance(expression, Leaf):
        return [(expression, matrix)]
    if not isinstance(expression, Apply) or expression.kwargs:
        return None
    function, args = expression.function, expression.args
    if function is joined:
        if not all(isinstance(a, (Leaf, Apply)) for a in args):
            return None
        matrices = matrix.split([a.features[-1] for a in args])
        found = [_terms(a, m, args) for a, m in zip(args, matrices, strict=True)]
    elif function is torch.add:
        found = [_terms(a, matrix, beside) for a in args]
    elif function is torch.sub and len(args) == 2 and _shares(args, beside):
        found = [_terms(args[0], matrix, beside), _terms(args[1], -matrix, beside)]
    else:
        return None
    return None if any(terms is None for terms in found) else [term for terms in found for term in terms or ()]


def _merged(graph: Graph, expression: Apply, matrix: Tensor) -> Apply | None:
    """`_mapped` where an end occurs more than once, as in [x_i, x_j - x_i]: by one product of it, with the sum of its
    matrices; None elsewhere."""
    terms = _terms(expression, matrix)
    if terms is None:
        return None
    ends: dict[tuple[int, str], tuple[Leaf, Tensor]] = {}
    for leaf, part in terms:
        before = ends.get((id(leaf.value), leaf.side))
        ends[id(leaf.value), leaf.side] = (leaf, part if before is None else before[1] + part)
    if not 1 < len(ends) < len(terms):
        return None
    features = (*expression.features[:-1], matrix.shape[1])
    first, *others = (_mapped(graph, leaf, part) for leaf, part in ends.values())
    for other in others:
        first = Apply(torch.add, (first, other), {}, features, matrix.dtype)
    return first


def _stack(func, tensors, dim=0):
    """Of what towers of one kind make, as their first feature dimension."""
    first = tensors[0]
    if not all(isinstance(t, Lazy) and t.pending and t.trip is first.trip for t in tensors):
        return NotImplemented
    if dim not in (1, -first.expression_dims) or len({t.expression.features for t in tensors}) > 1:
        return NotImplemented
    if len(tensors) == 1:
        return unsqueeze(func, first, dim)
    whole = _stacked(first.trip.graph, [t.expression for t in tensors], first.expression.features)
    if isinstance(whole, Leaf):
        return Lazy(first.trip, whole)
    return (
        NotImplemented if whole is None else make(first.trip, whole.function, whole.args, whole.features, whole.dtype)
    )


def _stacked(graph: Graph, parts: list, features: tuple[int, ...]):
    """One expression of several of `features` that differ in their operands alone; None where they differ otherwise."""
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        return None
    if isinstance(first, Leaf):
        if len({(leaf.side, leaf.features) for leaf in parts}) > 1:
            return None
        values = [leaf.value for leaf in parts]
        return Leaf(first.side, torch.stack(values, 1), all(leaf.clean for leaf in parts))
    if isinstance(first, Tensor):
        if any(part.shape != first.shape for part in parts):
            return None
        if is_rows(first, graph, "e", len(features)):
            return torch.stack(parts, 1)
        return torch.stack(parts) if tuple(first.shape) == features else None
    if not isinstance(first, Apply):
        return first if all(part == first for part in parts) else None
    if first.kwargs or any(part.function is not first.function or part.kwargs for part in parts):
        return None
    if first.function not in (torch.add, torch.sub, torch.mul, torch.div) or len({part.features for part in parts}) > 1:
        return None
    args = [_stacked(graph, list(each), features) for each in zip(*(part.args for part in parts), strict=True)]
    if any(arg is None for arg in args):
        return None
    return Apply(first.function, tuple(args), {}, (len(parts), *first.features), first.dtype)


RULES.update(dict.fromkeys((torch.cat, torch.concat), _cat))
RULES[torch.stack] = _stack
RULES.update(dict.fromkeys(LINEAR, _linear))
