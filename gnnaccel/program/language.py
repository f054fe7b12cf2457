"""Expressions of messages: what is computed for each edge from features of its ends, its own, and of nobody.

An expression knows no tensors. Its leaves are `u("name")` (rows of sources), `v` (of destinations), `e` (of edges) and
`c` (one row for all edges), which are given where it is evaluated (`gnnaccel.ops.message_reduce`). Expressions are
values: equal ones are one program.
"""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Callable, Sequence
from typing import Union

KINDS = ("u", "v", "e", "c")
Operand = Union["Expression", float, int]


_made: weakref.WeakValueDictionary[tuple, Expression] = weakref.WeakValueDictionary()


class Expression:
    """function(*args) with options, edge by edge. Never changed; of equal ones there is one, so that they are compared
    by identity. `eq` compares values.

    Parameters
    ----------
    function : str
        "leaf", whose options are its kind and name, or a key of `gnnaccel.program.program.FUNCTIONS`.
    args : tuple of Expression and float
    options : tuple
        Numbers that the function takes (a slope, bounds, the shape of a reshape), words and None.
    """

    __slots__ = ("__weakref__", "args", "function", "leaves", "options")
    function: str
    args: tuple
    options: tuple
    leaves: tuple[tuple[str, str], ...]  # kind and name of each, in the order of first use

    def __new__(cls, function: str, args: tuple = (), options: tuple = ()) -> Expression:
        args = tuple(_argument(function, arg) for arg in args)
        _check_options(function, options)
        # Numbers by their digits: 0.0 is not -0.0. Parts by identity: who is made of them keeps them.
        key = (function, tuple(id(a) if isinstance(a, Expression) else repr(a) for a in args), repr(options))
        found = _made.get(key)
        if found is None:
            found = object.__new__(cls)
            found.function, found.args, found.options = function, args, options
            parts = (arg.leaves for arg in args if isinstance(arg, Expression))
            leaves = (options,) if function == "leaf" else (leaf for part in parts for leaf in part)
            found.leaves = tuple(dict.fromkeys(leaves))
            _made[key] = found
        return found

    def __bool__(self) -> bool:
        raise TypeError("messages: an expression is neither true nor false; use where, eq, maximum and minimum")

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


def _argument(function: str, arg) -> Expression | float:
    if isinstance(arg, Expression):
        return arg
    if isinstance(arg, numbers.Real) and not isinstance(arg, bool):
        return float(arg)
    hint = "; compare by eq() and ne()" if isinstance(arg, bool) else ""
    raise TypeError(f"messages: {function}: expected expressions and numbers, got {type(arg).__name__}{hint}")


def _check_options(function: str, options: tuple) -> None:
    for option in options:
        each = option if isinstance(option, tuple) else (option,)
        if not all(value is None or isinstance(value, (numbers.Real, str)) for value in each):
            raise TypeError(f"messages: {function}: expected numbers as options, got {type(option).__name__}")


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


def eq(x: Operand, y: Operand) -> Expression:
    """1 where they are equal, else 0."""
    return Expression("eq", (x, y))


def ne(x: Operand, y: Operand) -> Expression:
    """0 where they are equal, else 1."""
    return Expression("ne", (x, y))


def where(condition: Expression, x: Operand, y: Operand) -> Expression:
    """x where `condition`, a comparison or 0 and 1, holds; else y."""
    return Expression("where", (condition, x, y))


def sum(x: Expression, dims: int | Sequence[int] = -1, keepdim: bool = False) -> Expression:
    """Sum over feature dimensions, which are counted from the last (-1)."""
    return Expression("sum", (x,), ((dims,) if isinstance(dims, int) else tuple(dims), keepdim))


def dot(x: Expression, y: Expression, keepdim: bool = False) -> Expression:
    """Sum of the products over the last feature dimension."""
    return sum(x * y, -1, keepdim)


def softmax(x: Expression) -> Expression:
    """exp(x) over its sum on the edges of each destination."""
    return Expression("softmax", (x,))


def reshape(x: Expression, features: tuple[int, ...]) -> Expression:
    """Other feature dimensions, of as many numbers."""
    return Expression("reshape", (x,), (tuple(features),))
