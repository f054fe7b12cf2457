"""Expressions of messages: what is computed for each edge from features of its ends, its own, and of nobody.

An expression knows no tensors. Its leaves are `u("name")` (rows of sources), `v` (of destinations), `e` (of edges) and
`c` (one row for all edges), which are given where it is evaluated (`gnnaccel.ops.message_reduce`). Expressions are
values: equal ones are one program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Union

KINDS = ("u", "v", "e", "c")
Operand = Union["Expression", float, int]


class Expression:
    """function(*args) with options, edge by edge. Never changed; equal ones are equal.

    Parameters
    ----------
    function : str
        "leaf", whose options are its kind and name, or a key of `gnnaccel.ops.messages.program.FUNCTIONS`.
    args : tuple of Expression and float
    options : tuple
        Numbers that the function takes (a slope, bounds, the shape of a reshape).
    """

    __slots__ = ("_hash", "_leaves", "args", "function", "options")

    def __init__(self, function: str, args: tuple = (), options: tuple = ()):
        self.function, self.args, self.options = function, args, options
        for arg in args:
            if not isinstance(arg, (Expression, float, int)):
                raise TypeError(f"messages: {function}: expected expressions and numbers, got {type(arg).__name__}")
        self._leaves: tuple[tuple[str, str], ...] | None = None
        self._hash = hash((function, args, options))  # kept: parts are shared, and asked for theirs each time

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Expression) or self._hash != other._hash:
            return False
        return (self.function, self.options, self.args) == (other.function, other.options, other.args)

    def __add__(self, other: Operand) -> Expression:
        return Expression("add", (self, other))

    def __radd__(self, other: Operand) -> Expression:
        return Expression("add", (other, self))

    def __sub__(self, other: Operand) -> Expression:
        return Expression("sub", (self, other))

    def __rsub__(self, other: Operand) -> Expression:
        return Expression("sub", (other, self))

    def __mul__(self, other: Operand) -> Expression:
        return Expression("mul", (self, other))

    def __rmul__(self, other: Operand) -> Expression:
        return Expression("mul", (other, self))

    def __truediv__(self, other: Operand) -> Expression:
        return Expression("div", (self, other))

    def __rtruediv__(self, other: Operand) -> Expression:
        return Expression("div", (other, self))

    def __neg__(self) -> Expression:
        return Expression("neg", (self,))

    def __pow__(self, exponent: float) -> Expression:
        return Expression("pow", (self,), (exponent,))

    def __gt__(self, other: Operand) -> Expression:
        return Expression("gt", (self, other))

    def __ge__(self, other: Operand) -> Expression:
        return Expression("ge", (self, other))

    def __lt__(self, other: Operand) -> Expression:
        return Expression("lt", (self, other))

    def __le__(self, other: Operand) -> Expression:
        return Expression("le", (self, other))

    def __str__(self) -> str:
        if self.function == "leaf":
            return f"{self.options[0]}.{self.options[1]}"
        signs = {"add": "+", "sub": "-", "mul": "*", "div": "/", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        if self.function in signs:
            left, right = self.args
            return f"({left} {signs[self.function]} {right})"
        return f"{self.function}({', '.join(map(str, (*self.args, *self.options)))})"

    def leaves(self) -> tuple[tuple[str, str], ...]:
        """Kind and name of each leaf, in the order of first use."""
        if self._leaves is None:
            parts = (arg.leaves() for arg in self.args if isinstance(arg, Expression))
            found = (self.options,) if self.function == "leaf" else (leaf for part in parts for leaf in part)
            self._leaves = tuple(dict.fromkeys(found))
        return self._leaves


def u(name: str) -> Expression:
    """The row of operand `name` [num_cols, *F] of the edge's source."""
    return Expression("leaf", (), ("u", name))


def v(name: str) -> Expression:
    """The row of operand `name` [num_rows, *F] of the edge's destination."""
    return Expression("leaf", (), ("v", name))


def e(name: str) -> Expression:
    """The edge's own row of operand `name` [nnz, *F], in edge-id order."""
    return Expression("leaf", (), ("e", name))


def c(name: str) -> Expression:
    """Operand `name` [*F], the same for all edges."""
    return Expression("leaf", (), ("c", name))


def _of_one(name: str) -> Callable[[Expression], Expression]:
    def function(x: Expression) -> Expression:
        return Expression(name, (x,))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"torch.{name} of each number."
    return function


abs, exp, expm1, log, log1p, sqrt, rsqrt, sigmoid, tanh, relu, silu, erf, sin, cos, sign, square, reciprocal = map(
    _of_one,
    (
        *("abs", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "sigmoid", "tanh", "relu", "silu", "erf", "sin"),
        *("cos", "sign", "square", "reciprocal"),
    ),
)


def leaky_relu(x: Expression, slope: float = 0.01) -> Expression:
    """torch.nn.functional.leaky_relu."""
    return Expression("leaky_relu", (x,), (slope,))


def elu(x: Expression, alpha: float = 1.0) -> Expression:
    """torch.nn.functional.elu."""
    return Expression("elu", (x,), (alpha,))


def gelu(x: Expression, approximate: str = "none") -> Expression:
    """torch.nn.functional.gelu."""
    return Expression("gelu", (x,), (approximate,))


def softplus(x: Expression, beta: float = 1.0, threshold: float = 20.0) -> Expression:
    """torch.nn.functional.softplus."""
    return Expression("softplus", (x,), (beta, threshold))


def clamp(x: Expression, low: float | None = None, high: float | None = None) -> Expression:
    """torch.clamp with numbers."""
    return Expression("clamp", (x,), (low, high))


def maximum(x: Operand, y: Operand) -> Expression:
    """torch.maximum."""
    return Expression("maximum", (x, y))


def minimum(x: Operand, y: Operand) -> Expression:
    """torch.minimum."""
    return Expression("minimum", (x, y))


def where(condition: Expression, x: Operand, y: Operand) -> Expression:
    """x where `condition`, a comparison or 0 and 1, holds; else y."""
    return Expression("where", (condition, x, y))


def sum(x: Expression, dims: int | tuple[int, ...] = -1, keepdim: bool = False) -> Expression:
    """Sum over feature dimensions, which are counted from the last (-1)."""
    return Expression("sum", (x,), (dims if isinstance(dims, tuple) else (dims,), keepdim))


def dot(x: Expression, y: Expression, keepdim: bool = False) -> Expression:
    """Sum of the products over the last feature dimension."""
    return sum(x * y, -1, keepdim)


def reshape(x: Expression, features: tuple[int, ...]) -> Expression:
    """Other feature dimensions, of as many numbers."""
    return Expression("reshape", (x,), (tuple(features),))
