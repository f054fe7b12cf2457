"""What happens to a lazy feature: one rule per function of torch that message() may call on it.

A rule gets the function and its arguments. It returns a lazy feature or a narrow ordinary tensor, or NotImplemented,
after which the function runs on gathered rows. It has no side effects, and what it does not know it does not accept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel import touch
from gnnaccel.lazy import blocks
from gnnaccel.lazy.deferred import METADATA
from gnnaccel.lazy.expression import (
    Apply,
    Expression,
    Leaf,
    bare,
    clean,
    detached,
    is_rows,
    joined,
    own,
    reshaped,
    tensors_of,
)
from gnnaccel.lazy.tensor import ELEMENTWISE, LATE, RULES, Lazy, Trip, lift, waiting
from gnnaccel.lower import bounds
from gnnaccel.program.shapes import broadcast

TENSORS = (Tensor, torch.nn.Parameter)


def hoist(x: Lazy, function, *args, **kwargs) -> Any:
    """function(node feature, ...) instead of function(rows, ...)."""
    assert isinstance(x.expression, Leaf)
    return function(clean(x.trip.graph, x.expression), *args, **kwargs)


def make(trip: Trip, function, args: tuple, features, dtype, kwargs=None, axis: int = 0):
    """An Apply as a Lazy; if it is narrow and does not wait, as an ordinary tensor."""
    expression = Apply(function, args, kwargs or {}, tuple(features), dtype)
    if expression.late and not (axis == 0 and trip.holds(expression)):
        return blocks.edge_values(trip.graph, expression).movedim(0, axis)
    return Lazy(trip, expression, axis)


def is_operand(value) -> bool:
    return type(value) in TENSORS and value.is_floating_point()


def _is_plain(value, lazy: Lazy) -> bool:
    """True for a number or tensor that broadcasts to all rows alike."""
    if isinstance(value, (int, float, bool)):
        return True
    if not is_operand(value):
        return False
    if value.device != lazy.trip.graph.device and value.dim():
        return False
    return value.dim() < lazy.expression_dims or (value.dim() == lazy.expression_dims and value.shape[0] == 1)


def _binary(function):
    def _elementwise(_func, a, b, *args, **kwargs):
        if args or kwargs:
            return NotImplemented
        lazy = a if isinstance(a, Lazy) else b
        operands = []
        for x in (a, b):
            if isinstance(x, Lazy):
                alike = x.trip is lazy.trip and x.axis == lazy.axis and x.expression_dims == lazy.expression_dims
                if not x.waiting or not alike:
                    return NotImplemented
                operands.append(bare(x.expression))
                continue
            if lazy.axis and isinstance(x, Tensor) and x.dim() <= lazy.expression_dims:  # the edges first, as inside
                x = x.reshape(*(1,) * (lazy.expression_dims - x.dim()), *x.shape).movedim(lazy.axis, 0)
            per_edge = is_rows(x, lazy.trip.graph, "e", lazy.expression_dims - 1) and is_operand(x)
            if not _is_plain(x, lazy) and not per_edge:
                return NotImplemented
            operands.append(x)
        return _combine(lazy, function, operands)

    return _elementwise


def _combine(lazy: Lazy, function, operands: list):
    dims = lazy.expression_dims
    per_edge = [x for x in operands if isinstance(x, Tensor) and x.dim() == dims and x.shape[0] != 1]
    leaves = [x for x in operands if isinstance(x, Leaf)]
    if not per_edge and len({x.side for x in leaves}) == 1 and not any(isinstance(x, Apply) for x in operands):
        found = {id(x): clean(lazy.trip.graph, x) for x in leaves}  # x * x reads one
        values = [found.get(id(x), x) for x in operands]
        return lift(lazy.trip, leaves[0].side, function(*values), lazy.axis, clean=True)
    try:
        features = broadcast(*(features_of(x, dims) for x in operands))
    except RuntimeError:
        return NotImplemented  # torch words it
    return make(lazy.trip, function, tuple(operands), features, _promoted(*operands), axis=lazy.axis)


def _promoted(a, b) -> torch.dtype:
    """The dtype of an operation on two operands. A tensor with dimensions outranks one without, and numbers."""
    if isinstance(a, (Leaf, Apply)) and isinstance(b, (Leaf, Apply)) and a.dtype == b.dtype:
        return a.dtype
    kinds = [torch.empty(0, dtype=x.dtype) if isinstance(x, (Leaf, Apply)) else x for x in (a, b)]
    return torch.result_type(*kinds)


def features_of(x, dims: int) -> tuple[int, ...]:
    if isinstance(x, (Leaf, Apply)):
        return x.features
    return tuple(x.shape[1:] if x.dim() == dims else x.shape) if isinstance(x, Tensor) else ()


def _unary(func, x, *args, **kwargs):
    """An elementwise function of one tensor and options without tensors."""
    if not isinstance(x, Lazy) or not x.waiting or kwargs.get("inplace") or kwargs.get("out") is not None:
        return NotImplemented
    options = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    leaf = isinstance(x.expression, Leaf) and x.axis == 0
    if any(not _is_plain(a, x) or (a.dim() and not leaf) for a in options):
        return NotImplemented
    if isinstance(x.expression, Leaf):
        out = hoist(x, func, *args, **kwargs)
        # An operator of torch leaves operands that it does not know to theirs.
        if not isinstance(out, Tensor) or out.shape != x.expression.value.shape or not out.is_floating_point():
            return NotImplemented
        return lift(x.trip, x.expression.side, out, x.axis, clean=True)
    if any(isinstance(a, Tensor) for a in kwargs.values()):  # no operand of an expression: its gradient would be lost
        return NotImplemented
    probed = _probed(x, func, *args, **kwargs)
    if not isinstance(probed, Tensor):
        return NotImplemented
    expression = _as_autocast(x, probed.dtype)
    return make(x.trip, func, (expression, *args), expression.features, probed.dtype, kwargs, x.axis)


def _probed(x: Lazy, function, *args, **kwargs) -> Any:
    """What the device itself makes of a row without elements: its autocast decides. No tensor where an operator leaves
    its arguments to theirs."""
    return function(torch.empty(0, 1, dtype=x.expression.dtype, device=x.trip.graph.device), *args, **kwargs)


def _as_autocast(x: Lazy, dtype: torch.dtype) -> Expression:
    """The expression, cast where autocast casts the argument of a function that gives `dtype`."""
    expression = x.expression
    if dtype != expression.dtype and torch.is_autocast_enabled(x.trip.graph.device.type):
        return Apply(Tensor.to, (expression, dtype), {}, expression.features, dtype)
    return expression


def _cast(func, x, *args, **kwargs):
    """float(), to(dtype) and the like: of a tensor of that dtype, the tensor itself."""
    if not isinstance(x, Lazy) or not x.waiting or kwargs or not all(isinstance(a, torch.dtype) for a in args):
        return NotImplemented
    dtype = func(torch.empty(0, dtype=x.expression.dtype), *args).dtype
    return x if dtype == x.expression.dtype else _unary(func, x, *args)


def _subtracted(func, x, other):
    """other - x, of a number or tensor that is no lazy feature."""
    return _binary(torch.sub)(func, other, x)


def _divided_by(func, x, number):
    """number / x, of which torch makes two functions; autocast casts one of them."""
    inverse = _unary(torch.reciprocal, x)
    return inverse if inverse is NotImplemented else inverse * number


def _dropout(func, x, p=0.5, training=True, inplace=False):
    """Draws nothing in evaluation; in training it needs one number per edge and feature, as torch draws them."""
    if not isinstance(x, Lazy) or not x.waiting or inplace:
        return NotImplemented
    if not training or p == 0:
        return x
    if not x.late or math.prod(x.expression.features) > bounds.STORED_FEATURES:
        return NotImplemented
    kept = func(torch.ones(x.shape, dtype=x.dtype, device=x.device), p, True)
    return make(x.trip, torch.mul, (x.expression, kept), x.expression.features, x.dtype)


def _detach(func, x):
    return Lazy(x.trip, detached(x.expression), x.axis) if x.waiting else NotImplemented


def _same(func, x, *args, **kwargs):
    """contiguous() and the like: a gathered tensor would be returned as it is."""
    return x if isinstance(x, Lazy) and x.waiting and not args and not kwargs else NotImplemented


def _reshape(func, x, *shape):
    if not isinstance(x, Lazy) or not x.pending or not shape:
        return NotImplemented
    sizes = list(shape[0]) if isinstance(shape[0], (tuple, list, torch.Size)) else list(shape)
    if not all(isinstance(n, int) for n in sizes):
        return NotImplemented
    rows, width = x.trip.graph.nnz, math.prod(x.expression.features)
    known = math.prod(n for n in sizes[1:] if n != -1)
    if sizes.count(-1) > 1 or known == 0:
        return NotImplemented
    if sizes[0] != -1:
        if sizes[0] != rows:
            return NotImplemented
        sizes[1:] = [width // known if n == -1 else n for n in sizes[1:]]
    if math.prod(sizes[1:]) != width:
        return NotImplemented
    return _with_features(x, tuple(sizes[1:]))


def _with_features(x: Lazy, features: tuple[int, ...]):
    if isinstance(x.expression, Leaf):
        leaf = x.expression
        return lift(x.trip, leaf.side, reshaped(leaf.value, features), clean=leaf.clean)
    if isinstance(rows := bare(x.expression), Tensor):
        return Lazy(x.trip, own(reshaped(rows, features)))
    return make(x.trip, reshaped, (x.expression, features), features, x.expression.dtype)


def feature_dim(x: Lazy, dim) -> int | None:
    """A feature dimension counted from 1, or None where `dim` is none."""
    dims = x.expression_dims
    if not isinstance(dim, int) or not -dims <= dim < dims or dim % dims == 0:
        return None
    return dim % dims


def unsqueeze(func, x, dim):
    if not isinstance(x, Lazy) or not x.pending or not isinstance(dim, int):
        return NotImplemented
    dims = x.expression_dims + 1
    if not -dims <= dim < dims or dim % dims == 0:
        return NotImplemented
    features = list(x.expression.features)
    features.insert(dim % dims - 1, 1)
    return _with_features(x, tuple(features))


def _squeeze(func, x, dim=None):
    if not isinstance(x, Lazy) or not x.pending or feature_dim(x, dim) is None:
        return NotImplemented
    at, features = feature_dim(x, dim) - 1, list(x.expression.features)
    if features[at] == 1:
        del features[at]
    return _with_features(x, tuple(features))


def _flatten(func, x, start_dim=0, end_dim=-1):
    if not isinstance(x, Lazy) or not x.pending:
        return NotImplemented
    start, end = feature_dim(x, start_dim), feature_dim(x, end_dim)
    if start is None or end is None or end < start:
        return NotImplemented
    if start == end:
        return x
    f = x.expression.features
    return _with_features(x, (*f[: start - 1], math.prod(f[start - 1 : end]), *f[end:]))


def _over_features(func, x, dim=None, *args, **kwargs):
    """sum, mean, softmax, norm, cumsum ... along feature dimensions."""
    if not isinstance(x, Lazy) or not x.pending or kwargs.get("out") is not None:
        return NotImplemented
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    where = [feature_dim(x, d) for d in dims]
    if not where or None in where:
        return NotImplemented
    if isinstance(x.expression, Leaf):
        out = hoist(x, func, dim, *args, **kwargs)
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return NotImplemented
        return lift(x.trip, x.expression.side, out, clean=True)
    if func not in (torch.sum, Tensor.sum) or args[1:] or kwargs.keys() - {"keepdim"}:
        return NotImplemented
    keep = args[0] if args else kwargs.get("keepdim", False)
    return _sum(x, tuple(where), keep)


def _sum(x: Lazy, where: tuple[int, ...], keep: bool):
    f, expression, graph = x.expression.features, x.expression, x.trip.graph
    kept = tuple(1 if d in where else n for d, n in enumerate(f, 1) if keep or d not in where)
    dtype = _probed(x, torch.sum, dim=-1).dtype
    dims = tuple(d - len(f) - 1 for d in where)
    options = {"dim": dims, "keepdim": bool(keep)}
    if (
        not x.trip.holds(expression)
        and (dot := blocks.dot(graph, Apply(torch.sum, (expression,), options, kept, dtype))) is not None
    ):
        return dot
    return make(x.trip, torch.sum, (_as_autocast(x, dtype),), kept, dtype, options)


def _norm(func, x, p="fro", dim=None, keepdim=False, **kwargs):
    """Tensor.norm and torch.norm, which have the order before the dimension."""
    if not isinstance(x, Lazy) or not x.pending or feature_dim(x, dim) is None:
        return NotImplemented
    if isinstance(x.expression, Leaf):
        return lift(x.trip, x.expression.side, hoist(x, func, p, dim, keepdim, **kwargs), clean=True)
    if p not in ("fro", None, 2) or not isinstance(keepdim, bool) or any(v is not None for v in kwargs.values()):
        return NotImplemented
    squares = (x * x).sum(dim, keepdim)  # whose root has no derivative at 0, where torch's norm has 0
    return squares.clamp_min(torch.finfo(x.dtype).tiny).sqrt() * squares.sign()


def _linalg_norm(func, x, ord=None, dim=None, keepdim=False, **kwargs):
    return _norm(func, x, 2 if ord is None else ord, dim, keepdim, **kwargs)


def _normalize(func, x, p=2.0, dim=1, eps=1e-12, out=None):
    if not isinstance(x, Lazy) or not x.pending or feature_dim(x, dim) is None or out is not None:
        return NotImplemented
    if isinstance(x.expression, Leaf):
        return lift(x.trip, x.expression.side, hoist(x, func, p, dim, eps), clean=True)
    return x / x.norm(p, dim, True).clamp_min(eps)


def _layer_norm(func, x, normalized_shape, weight=None, bias=None, eps=1e-5):
    if not isinstance(x, Lazy) or not x.pending:
        return NotImplemented
    if isinstance(x.expression, Leaf) and 0 < len(normalized_shape) < x.dim():
        out = hoist(x, func, normalized_shape, weight, bias, eps)
        return lift(x.trip, x.expression.side, out, clean=True)
    if (*normalized_shape,) != x.expression.features or torch.is_autocast_enabled(x.trip.graph.device.type):
        return NotImplemented
    if any(w is not None and (not is_operand(w) or w.dtype != x.dtype) for w in (weight, bias)):
        return NotImplemented
    args = (x.expression, tuple(normalized_shape), weight, bias, eps)
    return make(x.trip, func, args, x.expression.features, x.dtype)


def _getitem(func, x, key):
    """x_j[:, ...]: a part of the features of all edges."""
    whole = isinstance(key, tuple) and key and isinstance(key[0], slice) and key[0] == slice(None)
    simple = (int, slice, type(None), type(Ellipsis))
    if not isinstance(x, Lazy) or not x.pending or not whole:
        return NotImplemented
    if any(isinstance(k, bool) or not isinstance(k, simple) for k in key):
        return NotImplemented
    if isinstance(x.expression, Leaf):
        return lift(x.trip, x.expression.side, x.expression.value[key], clean=x.expression.clean)
    if isinstance(rows := bare(x.expression), Tensor):
        return waiting(x.trip, rows[key])
    plain = all(isinstance(k, (int, slice)) for k in key) and len(key) < x.expression_dims
    if not plain or not isinstance(x.expression, Apply) or x.expression.function is not joined:
        return NotImplemented
    parts = []  # what lies side by side in the last dimension is picked from in the others
    for part in x.expression.args:
        if isinstance(part, Apply):
            return NotImplemented
        picked = (part.value if isinstance(part, Leaf) else part)[key]
        parts.append(Leaf(part.side, picked, part.clean) if isinstance(part, Leaf) else picked)
    dims = 1 + len(x.expression.features) - sum(isinstance(k, int) for k in key)
    sizes = [features_of(part, dims) for part in parts]
    features = (*sizes[0][:-1], sum(f[-1] for f in sizes))
    return make(x.trip, joined, tuple(parts), features, x.expression.dtype)


def _parts(func, x, size, dim=0):
    """split, chunk, tensor_split along a feature dimension."""
    if not isinstance(x, Lazy) or not x.pending or feature_dim(x, dim) is None:
        return NotImplemented
    leaf, at = x.expression, feature_dim(x, dim)
    if isinstance(leaf, Leaf):
        return tuple(lift(x.trip, leaf.side, part, clean=leaf.clean) for part in func(leaf.value, size, dim))
    total, name = x.shape[at], func.__name__
    if name not in ("split", "chunk") or (name == "chunk" and not isinstance(size, int)):
        return NotImplemented
    if isinstance(size, int):
        step = size if name == "split" else -(-total // size)
        size = [min(step, total - start) for start in range(0, total, step)]
    parts = _split(leaf, at - 1 - len(leaf.features), size)
    if sum(size) != total or 0 in size or parts is None:
        return NotImplemented
    return tuple(make(x.trip, p.function, p.args, p.features, p.dtype, p.kwargs) for p in parts)


def _split(expression, dim: int, sizes: list[int]) -> list | None:
    """The features of dimension `dim`, counted from the last, in parts; None of what is not number by number."""
    rows = bare(expression)
    if isinstance(rows, Tensor):
        if rows.dim() < -dim or rows.shape[dim] == 1:
            return [expression] * len(sizes)
        parts = list(rows.split(sizes, dim))
        return parts if rows is expression else list(map(own, parts))
    if len(expression.features) < -dim or expression.features[dim] == 1:
        return [expression] * len(sizes)
    if isinstance(expression, Leaf):
        values = expression.value.split(sizes, dim)
        return [Leaf(expression.side, value, expression.clean) for value in values]
    if expression.function not in ELEMENTWISE:
        return None
    args = [_split(a, dim, sizes) if _has_features(a) else [a] * len(sizes) for a in expression.args]
    if any(part is None for part in args):
        return None
    found = []
    for part, size in zip(zip(*args, strict=True), sizes, strict=True):
        features = list(expression.features)
        features[dim] = size
        found.append(replace(expression, args=part, features=tuple(features), versions=()))
    return found


def _has_features(arg) -> bool:
    return isinstance(arg, (Leaf, Apply, Tensor))


def _new(func, x, *args, **kwargs):
    """new_zeros and the like take nothing but the type and place."""
    if not isinstance(x, Lazy) or any(isinstance(a, Lazy) for a in args):
        return NotImplemented
    dtype = x.expression.dtype
    like = next((t for t in tensors_of(x.expression) if t.dtype == dtype), None)
    return func(torch.empty(0, dtype=dtype, device=x.trip.graph.device) if like is None else like, *args, **kwargs)


def _rules() -> dict:
    rules: dict[Any, Callable] = {}

    def put(rule, *names, holders=(torch, Tensor)):
        for name in names:
            for holder in holders:
                if hasattr(holder, name):
                    rules[getattr(holder, name)] = rule

    for function, names in (
        (torch.add, ("add", "__add__", "__radd__")),
        (torch.sub, ("sub", "subtract", "__sub__")),
        (torch.mul, ("mul", "multiply", "__mul__", "__rmul__")),
        (torch.div, ("div", "divide", "true_divide", "__div__", "__truediv__")),
        (torch.maximum, ("maximum",)),
        (torch.minimum, ("minimum",)),
    ):
        put(_binary(function), *names)
        rules[function] = _binary(function)
    put(_subtracted, "__rsub__")
    put(_divided_by, "__rdiv__", "__rtruediv__")
    elementwise = (
        "relu leaky_relu sigmoid tanh exp log log1p sqrt rsqrt abs neg clamp clamp_min clamp_max square sin cos"
    )
    elementwise += " pow __pow__ __neg__ softplus elu selu gelu silu mish reciprocal celu hardtanh hardswish"
    elementwise += " logsigmoid softsign erf expm1 nan_to_num sign"
    put(_unary, *elementwise.split(), holders=(torch, Tensor, F, touch.nn_functions))
    put(_cast, "to", "float", "double", "half", "bfloat16", holders=(Tensor,))
    put(_dropout, "dropout", holders=(F, torch))
    put(_detach, "detach", holders=(Tensor,))
    put(_same, "contiguous", holders=(Tensor,))
    put(_reshape, "view", "reshape")
    put(unsqueeze, "unsqueeze")
    put(_squeeze, "squeeze")
    put(_flatten, "flatten")
    put(_over_features, "sum", "mean", "softmax", "logsumexp", "amax", "amin")
    put(_norm, "norm")
    put(_linalg_norm, "norm", "vector_norm", holders=(torch.linalg,))
    put(_normalize, "normalize", holders=(F,))
    put(_layer_norm, "layer_norm", holders=(F,))
    put(_over_features, "softmax", "log_softmax", holders=(F,))
    put(_getitem, "__getitem__", holders=(Tensor,))
    put(_parts, "split", "chunk", "tensor_split")
    put(_new, "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", holders=(Tensor,))
    return rules


def _metadata() -> set:
    names = (
        "dim size numel nelement is_floating_point is_complex get_device element_size __len__ ndimension is_contiguous"
    )
    getters = (
        "shape dtype device ndim layout is_cuda is_cpu is_sparse requires_grad is_mps is_meta is_quantized is_nested"
    )
    found = {getattr(Tensor, name) for name in names.split()}
    found |= {torch.is_floating_point, torch.is_complex, torch.numel}
    return found | {getattr(Tensor, name).__get__ for name in getters.split()}


RULES.update(_rules())
_OF_WAITING = frozenset(
    [
        *(_unary, _cast, _subtracted, _divided_by, _dropout, _detach, _same, _reshape, unsqueeze, _squeeze, _flatten),
        *(_over_features, _norm, _linalg_norm, _normalize, _layer_norm, _parts),
    ]
)
LATE.update(f for f, rule in RULES.items() if rule in _OF_WAITING or rule.__name__ == "_elementwise")
ELEMENTWISE.update(
    f
    for f, rule in RULES.items()
    if rule in (_unary, _cast, _subtracted, _divided_by) or rule.__name__ == "_elementwise"
)
METADATA.update(_metadata())
