"""Expressions over lifted node features: what a message is, edge by edge, without its rows.

What autocast casts is written into an expression when it is made (rules.py). It is evaluated without autocast, so
that it gives the same in a backward pass and outside the layer's own ``with torch.autocast(...)``.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gnnaccel import ops
from gnnaccel.graph.cache import derived
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.recording import call

SIDES = {"u": "num_cols", "v": "num_rows"}


@dataclass(frozen=True, eq=False)
class Leaf:
    """One row of `value` [N, ...] per edge: of its source (side "u") or of its destination ("v").

    clean : rows that no edge reads hold what another row holds, so that a function of them is as finite as of those.
    version : of the value, when it became one; None where torch counts none.
    """

    side: str
    value: Tensor
    clean: bool = False
    version: int | None = None

    def __post_init__(self):
        if self.version is None:
            object.__setattr__(self, "version", _version(self.value))

    @functools.cached_property
    def features(self) -> tuple[int, ...]:
        return tuple(self.value.shape[1:])

    @property
    def inputs(self) -> tuple:
        return ((self.value, self.version),)

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype


@dataclass(frozen=True, eq=False)
class Apply:
    """function(*args, **kwargs) edge by edge; args are Leaf, Apply, tensors [E, ...], broadcast tensors and numbers.

    versions : of the tensors among the args, as a Leaf's.
    late : it is narrow, or has a part that is, and that waits where such are stored at once otherwise.
    stored : its rows, once they had to be made for something that takes rows.
    """

    function: Callable
    args: tuple
    kwargs: dict
    features: tuple[int, ...]
    dtype: torch.dtype
    versions: tuple = ()
    stored: ClassVar[Tensor | None] = None

    @functools.cached_property
    def inputs(self) -> tuple:
        """Each (tensor, version) that it reads."""
        found = {}
        for arg, version in zip(self.args, self.versions, strict=True):
            if isinstance(arg, Tensor):
                found[id(arg), version] = arg, version
            elif isinstance(arg, (Leaf, Apply)):
                found.update({(id(each[0]), each[1]): each for each in arg.inputs})
        return tuple(found.values())

    @functools.cached_property
    def late(self) -> bool:
        if any(isinstance(arg, Apply) and arg.late for arg in self.args):
            return True
        narrow = math.prod(self.features) <= bounds.STORED_FEATURES and self.function not in _WAITING
        return narrow or self.function is softmaxed

    def store(self, rows: Tensor) -> Tensor:
        object.__setattr__(self, "stored", rows)
        return rows

    def __post_init__(self):
        if not self.versions:
            found = tuple(_version(a) if isinstance(a, Tensor) else None for a in self.args)
            object.__setattr__(self, "versions", found)


Expression = Leaf | Apply


def mapped(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows @ matrix, of edges' own features; may be stored where that spares making other messages in blocks."""
    return torch.matmul(rows, matrix)


# Functions of one row after the other and of constants: a weight may have as many rows as there are edges.
LINEAR = frozenset(
    (mapped, torch.nn.functional.linear, torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def written(expression: Expression) -> Tensor | None:
    """A tensor that was written into since the expression was made of it; None if its values are what they were."""
    return next((tensor for tensor, version in expression.inputs if version != _version(tensor)), None)


def reshaped(x: Tensor, features: tuple[int, ...]) -> Tensor:
    """`x` with other feature dimensions; the same function for a node, a block of edges and all edges."""
    return x.reshape(x.shape[0], *features)


def own(rows: Tensor) -> Apply:
    """Rows of edges that are there already, as an expression: what is made of them may wait for a walk."""
    features = tuple(rows.shape[1:])
    return Apply(reshaped, (rows, features), {}, features, rows.dtype)


def bare(expression):
    """The tensor that `own` was given; any other expression as it is."""
    if isinstance(expression, Apply) and expression.function is reshaped:
        inner = expression.args[0]
        if isinstance(inner, Tensor) and tuple(inner.shape[1:]) == expression.features:
            return inner
    return expression


def reads_nodes(expression) -> bool:
    """True if rows of nodes are a part of an expression."""
    if isinstance(expression, Apply):
        return any(map(reads_nodes, expression.args))
    return isinstance(expression, Leaf)


def joined(*parts: Tensor) -> Tensor:
    """Features side by side, in the last dimension."""
    return torch.cat(parts, dim=-1)


def softmaxed(rows: Tensor, graph: Graph) -> Tensor:
    """exp(rows) over its sum on the edges of each destination."""
    return call(ops.edge_softmax, graph, rows)


_WAITING = (
    torch.mul,
    reshaped,
    joined,
)  # a product an SpMM may take; a wide linear map may follow features side by side


def widest_rows(graph: Graph, expression) -> int:
    """Features of the widest rows of edges that an expression reads; 0: it reads none."""
    if isinstance(expression, Tensor):
        return expression[0].numel() if expression.dim() and expression.shape[0] == graph.nnz else 0
    args = expression.args if isinstance(expression, Apply) else ()
    return max((widest_rows(graph, arg) for arg in args), default=0)


def has_softmax(expression) -> bool:
    """True if a softmax over edges is a part of an expression."""
    if not isinstance(expression, Apply):
        return False
    return expression.function is softmaxed or any(map(has_softmax, expression.args))


def clean(graph: Graph, leaf: Leaf) -> Tensor:
    """The node feature with rows that no edge reads replaced, without a gradient, by one that an edge reads.

    A function of gathered rows never sees the others: 1 / x of an unread zero would be infinite, and its gradient NaN.
    """
    if leaf.clean or _read(graph, leaf.side) is None:
        return leaf.value
    return call(_cleaned, graph, leaf.side, leaf.value)


def _cleaned(graph: Graph, side: str, value: Tensor) -> Tensor:
    read = _read(graph, side)
    assert read is not None
    mask, first = read
    return torch.where(mask.view(-1, *(1,) * (value.dim() - 1)), value, value.detach()[first])


def _read(graph: Graph, side: str) -> tuple[Tensor, int] | None:
    """Which rows of a side some edge reads, and the first of them; None if all are read. Found once per graph."""
    found = derived.get((graph.indptr,), ("read", side))
    if found is None:
        with torch.inference_mode(False):
            if side == "v":
                mask = graph.indptr.diff() > 0
            else:
                mask = torch.zeros(graph.num_cols, dtype=torch.bool, device=graph.device)
                mask[graph.indices.long()] = True
        found = (None if bool(mask.all()) else (mask, int(mask.int().argmax())),)
        derived.put((graph.indptr,), ("read", side), found)
    return found[0]


def tensors_of(expression: Expression) -> list[Tensor]:
    """Every tensor an expression reads."""
    return [tensor for tensor, _ in expression.inputs]


def detached(expression):
    """The same expression without a gradient."""
    if isinstance(expression, Leaf):
        return Leaf(expression.side, expression.value.detach(), expression.clean, expression.version)
    if isinstance(expression, Tensor):
        return expression.detach()
    if not isinstance(expression, Apply):
        return expression
    return replace(expression, args=tuple(detached(arg) for arg in expression.args))


_SDDMM = {torch.add: "add", torch.sub: "sub", torch.mul: "mul", torch.div: "div"}


def gathered(graph: Graph, expression: Expression) -> Tensor:
    """The rows of an expression, [E, ...] in edge-id order, differentiable."""
    if isinstance(expression, Leaf):
        return call(ops.sddmm, graph, expression.value, None, "copy_lhs", expression.side)
    if isinstance(rows := bare(expression), Tensor):
        return rows
    op = _SDDMM.get(expression.function)
    if op is not None and not expression.kwargs:
        operands = [(a.value, a.side) if isinstance(a, Leaf) else (a, "e") for a in expression.args]
        if all(is_rows(value, graph, side, len(expression.features)) for value, side in operands):
            (lhs, left), (rhs, right) = operands
            if left != right and lhs.dtype == rhs.dtype:
                return call(ops.sddmm, graph, lhs, rhs, op, left, right)
    args = [gathered(graph, a) if isinstance(a, (Leaf, Apply)) else a for a in expression.args]
    with without_autocast(graph.device):
        return expression.function(*args, **expression.kwargs)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """A context without autocast for `device`."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else contextlib.nullcontext()


def is_rows(value, graph: Graph, side: str, dims: int) -> bool:
    """True for a tensor with a row per node of `side` (or per edge, "e") and `dims` feature dimensions."""
    count = getattr(graph, SIDES[side]) if side in SIDES else graph.nnz
    return isinstance(value, Tensor) and value.dim() == dims + 1 and value.shape[0] == count


def product(graph: Graph, expression: Expression):
    """(x, weight, features) if the expression is rows of sources x, times an edge weight, reshaped; else None.

    x : Tensor [num_cols, ...]; weight : Tensor [E, ...] of as many dimensions, or None for a copy.
    """
    features = expression.features
    while isinstance(expression, Apply) and expression.function is reshaped:
        expression = expression.args[0]
    if isinstance(expression, Tensor):
        return None
    factors: list[Any] = []
    if not _factors(expression, factors):
        return None
    dims = len(expression.features)
    leaves = [f for f in factors if isinstance(f, Leaf) and f.side == "u"]
    if not leaves:
        return None
    sources = [leaves[0].value] if len(leaves) == 1 else [clean(graph, leaf) for leaf in leaves]
    weights = [gathered(graph, f) for f in factors if isinstance(f, Leaf) and f.side == "v"]
    for factor in factors:
        if not isinstance(factor, Leaf):
            (weights if is_rows(factor, graph, "e", dims) else sources).append(factor)
    x = math.prod(sources[1:], start=sources[0])
    weight = math.prod(weights[1:], start=weights[0]) if weights else None
    if weight is not None and weight.dtype != x.dtype:  # type promotion, on the nodes
        dtype = torch.promote_types(weight.dtype, x.dtype)
        weight, x = weight.to(dtype), x.to(dtype)
    return x, weight, features


def _factors(expression, out: list) -> bool:
    """Collect the factors of a product of rows of sources and narrow tensors; False if it is no such product."""
    if isinstance(expression, Apply):
        if expression.function is not torch.mul:
            return False
        return all(_factors(arg, out) for arg in expression.args)
    if (
        isinstance(expression, Leaf)
        and expression.side == "v"
        and math.prod(expression.features) > bounds.STORED_FEATURES
    ):
        return False
    out.append(expression)
    return True
