"""Expressions over lifted node features as programs of messages (gnnaccel.ops.messages), which one kernel runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel import touch
from gnnaccel.graph.csr import Graph
from gnnaccel.lazy.expression import Apply, Expression, Leaf, is_rows, mapped, reshaped, softmaxed, without_autocast
from gnnaccel.ops import messages
from gnnaccel.ops.messages import message_reduce

_LIKE = messages.Expression


def _options(*names: str) -> Callable:
    """Options by position or name, those left out being the function's defaults."""

    def of(args: tuple, kwargs: dict) -> tuple:
        given = dict(zip(names, args, strict=False))
        if len(args) > len(names) or kwargs.keys() - set(names) - {"inplace"}:
            raise messages.Unfit("options that the language has not")
        given.update({name: kwargs[name] for name in names if name in kwargs})
        if any(isinstance(value, Tensor) for value in given.values()):
            raise messages.Unfit("a tensor as an option")
        options: list = []
        for name in names:
            if name not in given:
                break
            options.append(given.pop(name))
        if given:
            raise messages.Unfit("an option without those before it")
        return tuple(options)

    return of


def _clamp(args: tuple, kwargs: dict) -> tuple:
    given = {**dict(zip(("min", "max"), args, strict=False)), **kwargs}
    if any(isinstance(bound, Tensor) for bound in given.values()):
        raise messages.Unfit("a tensor as a bound")
    return given.get("min"), given.get("max")


def _sum(args: tuple, kwargs: dict) -> tuple:
    dims = kwargs["dim"]
    return (tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)), kwargs.get("keepdim", False)


def _table() -> dict[Any, tuple[str, Callable]]:
    """Function of torch -> function of the language, and how its options are read."""
    found: dict[Any, tuple[str, Callable]] = {}
    none = _options()

    def put(names: str, options: Callable = none, name: str | None = None) -> None:
        for spelling in names.split():
            for holder in (torch, Tensor, F, touch.nn_functions):
                if hasattr(holder, spelling):
                    found[getattr(holder, spelling)] = (name or spelling.strip("_"), options)

    put("relu sigmoid tanh exp expm1 log log1p sqrt rsqrt abs neg __neg__ square sin cos erf reciprocal sign")
    put("silu selu mish softsign logsigmoid hardswish")
    put("leaky_relu", _options("negative_slope"))
    put("elu celu", _options("alpha"))
    put("gelu", _options("approximate"))
    put("softplus", _options("beta", "threshold"))
    put("pow __pow__", _options("exponent"), "pow")
    put("hardtanh", _options("min_val", "max_val"))
    put("clamp", _clamp)
    put("clamp_min", lambda args, kwargs: (*_options("min")(args, kwargs), None), "clamp")
    put("clamp_max", lambda args, kwargs: (None, *_options("max")(args, kwargs)), "clamp")
    found[torch.sum] = ("sum", _sum)
    return found


_FUNCTIONS = _table()
_OF_TWO = {torch.add: "add", torch.sub: "sub", torch.mul: "mul", torch.div: "div",
           torch.maximum: "maximum", torch.minimum: "minimum"}  # fmt: skip
_CASTS = frozenset((Tensor.to, Tensor.float, Tensor.double, Tensor.bfloat16, Tensor.half))


class Translation:
    """An expression in the language of messages, and its operands.

    Raises messages.Unfit for a function or operand that is not in the language.
    """

    def __init__(self, graph: Graph, expression: Expression):
        self.graph = graph
        self.operands: dict[str, Tensor] = {}
        self._names: dict[tuple[int, str], messages.Expression] = {}
        self._done: dict[int, Any] = {}
        self.widest = torch.float32
        self.message = self.read(expression)

    def read(self, expression: Expression) -> messages.Expression:
        """Another expression of the same operands."""
        return self._read(expression, len(expression.features))

    def leaf(self, kind: str, value: Tensor) -> messages.Expression:
        """A leaf for a tensor; the same one for the same."""
        found = self._names.get((id(value), kind))
        if found is None:
            name = str(len(self.operands))
            self.operands[name] = value
            found = self._names[id(value), kind] = _LIKE("leaf", (), (kind, name))
        return found

    def _read(self, node, dims: int):
        """`node`, an operand of something with `dims` feature dimensions."""
        if isinstance(node, (int, float)):
            return node
        if isinstance(node, Leaf):
            return self.leaf(node.side, node.value)
        if isinstance(node, Tensor):
            return self._tensor(node, dims)
        if not isinstance(node, Apply):
            raise messages.Unfit(f"an operand of type {type(node).__name__}")
        found = self._done.get(id(node))
        if found is None:
            found = self._done[id(node)] = self._apply(node)
        return found

    def _tensor(self, node: Tensor, dims: int):
        if not node.is_floating_point() or node.device != self.graph.device:
            raise messages.Unfit("a tensor of another dtype or device")
        if is_rows(node, self.graph, "e", dims) and node.shape[0] != 1:
            return self.leaf("e", node)
        return self.leaf("c", node[0] if node.dim() == dims + 1 else node)

    def _apply(self, node: Apply):
        function, dims = node.function, len(node.features)
        if function is reshaped:
            inner = node.args[0]
            dims = inner.dim() - 1 if isinstance(inner, Tensor) else len(inner.features)
            return messages.reshape(self._read(inner, dims), node.args[1])
        if function in _OF_TWO:
            if node.kwargs:
                raise messages.Unfit("options that the language has not")
            return _LIKE(_OF_TWO[function], tuple(self._read(arg, dims) for arg in node.args))
        inner = node.args[0]
        if function is mapped:
            with without_autocast(self.graph.device):
                return self.leaf("e", mapped(*node.args))
        dims = len(inner.features) if isinstance(inner, (Leaf, Apply)) else dims
        if function is softmaxed:
            return messages.softmax(self._read(inner, dims))
        if function in _CASTS:
            return self._cast(node, self._read(inner, dims))
        if function is F.layer_norm:
            return self._layer_norm(self._read(inner, dims), *node.args[1:])
        if function not in _FUNCTIONS:
            raise messages.Unfit(f"{getattr(function, '__name__', function)}()")
        name, options = _FUNCTIONS[function]
        return _LIKE(name, (self._read(inner, dims),), options(node.args[1:], node.kwargs))

    def _layer_norm(self, x, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float):
        dims, share = tuple(range(-len(shape), 0)), 1 / math.prod(shape)
        x = x - messages.sum(x, dims, True) * share
        x = x * messages.rsqrt(messages.sum(x * x, dims, True) * share + eps)
        x = x if weight is None else x * self.leaf("c", weight)
        return x if bias is None else x + self.leaf("c", bias)

    def _cast(self, node: Apply, value):
        """`value`, rounded to a narrower dtype or left as it is, as wide numbers are in what computes them."""
        if not messages.computes(node.dtype, self.graph.device):
            raise messages.Unfit(f"numbers of {node.dtype}")
        if node.dtype == torch.float64:
            self.widest = torch.float64
            return value
        return _LIKE("round", (value,), (str(node.dtype).removeprefix("torch."),))

    def is_exact(self, dtype: torch.dtype) -> bool:
        """True if the kernel computes as wide as the expression asks for, and gives results of `dtype`."""
        wide = torch.float64 in (dtype, *(x.dtype for x in self.operands.values()))
        return messages.computes(dtype, self.graph.device) and (wide or self.widest != torch.float64)


def translated(graph: Graph, expression: Expression) -> Translation | None:
    """The translation of an expression; None where it has none, and where no program can run."""
    if not messages.is_fused(graph):
        return None
    try:
        found = Translation(graph, expression)
    except messages.Unfit:
        return None
    return found if found.is_exact(expression.dtype) else None


def reduced(graph: Graph, expression: Expression, *reduces: str) -> tuple[Tensor, ...] | None:
    """The rows of an expression, reduced over the edges of each destination in one walk, or None (`translated`).

    reduces : "sum", "mean", "max", "min", "none" (the rows themselves, in edge-id order).
    """
    found = translated(graph, expression)
    if found is None:
        return None
    try:
        return message_reduce(graph, [found.message] * len(reduces), found.operands, reduces, dtype=expression.dtype)
    except messages.Unfit:
        return None


def logsumexp(graph: Graph, expression: Expression) -> Tensor | None:
    """The logarithm of the sum of exp(rows) over the edges of each destination that has some, or None."""
    found = translated(graph, expression)
    if found is None:
        return None
    dtype = expression.dtype
    try:
        with torch.no_grad():
            top = message_reduce(graph, found.message, found.operands, "max", dtype=dtype)
        shifted = found.message - found.leaf("v", top)
        total = message_reduce(graph, messages.exp(shifted), found.operands, "sum", dtype=dtype)
    except messages.Unfit:
        return None
    return top + total.clamp_min(1e-38).log()


def softmax_sum(graph: Graph, scores: Expression, values: Expression) -> Tensor | None:
    """The sum of values, weighted by the softmax of scores over the edges of each destination, or None."""
    found = translated(graph, values)
    if found is None:
        return None
    try:
        score = found.read(scores)
        if not found.is_exact(scores.dtype):
            return None
        return messages.softmax_sum(graph, found.message, score, found.operands, dtype=values.dtype)
    except messages.Unfit:
        return None
