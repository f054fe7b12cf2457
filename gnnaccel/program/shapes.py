"""How feature shapes broadcast, and where a broadcast feature is read."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch


@functools.lru_cache(maxsize=4096)
def index_rule(shape: tuple[int, ...], full: tuple[int, ...]) -> tuple[int, int] | None:
    """(len, div) such that feature d of `full` reads element (d // div) % len of a row of `shape`.

    None where no such rule exists (a broadcast dimension between two kept ones); the caller expands then.
    """
    shape = (1,) * (len(full) - len(shape)) + tuple(shape)
    kept = [i for i, n in enumerate(shape) if n != 1]
    if not kept:
        return 1, 1
    first, last = kept[0], kept[-1]
    if shape[first : last + 1] != full[first : last + 1]:
        return None
    return math.prod(shape), math.prod(full[last + 1 :])


def broadcast(lhs: Sequence[int], rhs: Sequence[int]) -> tuple[int, ...]:
    """NumPy broadcasting of two feature shapes. Raises RuntimeError where there is none."""
    if lhs == rhs:
        return tuple(lhs)
    if all(type(n) is int for n in (*lhs, *rhs)):  # not so where torch.compile traces with symbols
        return _broadcast(tuple(lhs), tuple(rhs))
    return tuple(torch.broadcast_shapes(tuple(lhs), tuple(rhs)))


@functools.lru_cache(maxsize=4096)
def _broadcast(lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(lhs, rhs))  # takes torch more than 10 us
