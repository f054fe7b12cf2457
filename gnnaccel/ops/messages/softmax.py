"""Sums of messages weighted by a softmax over the edges of each destination, in two walks over the edges."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gnnaccel.graph.csr import Graph
from gnnaccel.ops.messages.language import Expression, exp
from gnnaccel.ops.messages.reduce import message_reduce

_TOP = "greatest score"  # a name that no operand of the caller's has


def softmax_sum(
    graph: Graph,
    message: Expression,
    score: Expression,
    operands: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """out[v] = sum over edges of softmax(score) * message, the softmax over the edges of each destination.

    Parameters
    ----------
    graph : Graph
    message, score : Expression
        Of shapes that broadcast; each feature has a softmax of its own.
    operands, dtype
        As in `message_reduce`.

    Returns
    -------
    Tensor [num_rows, *F], 0 for destinations without edges.

    Raises
    ------
    TypeError, ValueError
        As `message_reduce`.

    Notes
    -----
    A walk for the greatest scores, and one for the sums of weights and of weighted messages. The gradient to sources is
    one walk, in which weights are made again.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> from gnnaccel.ops.messages import softmax_sum, u
    >>> g = gnnaccel.Graph.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]), num_rows=2, num_cols=2)
    >>> x = torch.tensor([[0.0], [2.0]])
    >>> softmax_sum(g, u("x"), 0.0 * u("x"), {"x": x})
    tensor([[1.],
            [0.]])
    """
    if dtype is None:
        named = {name for expression in (message, score) for _, name in expression.leaves}
        found = [operands[name].dtype for name in named if name in operands]
        dtype = found[0] if found else torch.float32
        for other in found[1:]:
            dtype = torch.promote_types(dtype, other)
    wide = torch.promote_types(dtype, torch.float32)  # what is divided is not rounded before
    with torch.no_grad():
        top = message_reduce(graph, score, operands, "max", dtype=wide)
    weight = exp(score - Expression("leaf", (), ("v", _TOP)))
    sums = [weight, weight * message]
    total, out = message_reduce(graph, sums, {**operands, _TOP: top}, "sum", dtype=wide)
    return (out / total.clamp_min(1e-38)).to(dtype)
