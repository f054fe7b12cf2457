"""What each op of several layers in one node of autograd keeps to, against its definition in plain torch and float64.

`ours` and `define` are called without arguments and give the results, a sequence of tensors, made of `leaves`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from test_relation_sums import values


class Op(NamedTuple):
    ours: Callable
    define: Callable
    leaves: list
    has_zeros: bool = False  # gives none or zeros, either way, for edges and nodes that are not there


def _agree(op, found, expected):
    """Gradients of the leaves: the same that there are none of, and the same numbers."""
    if not op.has_zeros:
        assert [a is None for a in found] == [b is None for b in expected]
    for a, b, leaf in zip(found, expected, op.leaves, strict=True):
        torch.testing.assert_close(*(torch.zeros_like(leaf) if grad is None else grad for grad in (a, b)))


def results_and_gradients(op, calls=2):
    """The later calls with what the first has kept."""
    want = op.define()
    grads = [values(*out.shape, seed=80 + i).detach() for i, out in enumerate(want)]
    expected = torch.autograd.grad(want, op.leaves, grads, allow_unused=op.has_zeros)
    for _ in range(calls):
        got = op.ours()
        torch.testing.assert_close(list(got), list(want))
        _agree(op, torch.autograd.grad(got, op.leaves, grads, allow_unused=op.has_zeros), expected)
    with torch.no_grad():
        torch.testing.assert_close(list(op.ours()), list(want))
    return got


def gradients_where_some_results_are_used(op, used, second):
    """Of what nothing is made there are none, with a graph of their own or without."""
    found = []
    for outs in (op.ours(), op.define()):
        loss = sum(outs[i].square().sum() for i in used)
        found.append(torch.autograd.grad(loss, op.leaves, allow_unused=True, create_graph=second))
    _agree(op, *found)
    return found


def second_derivatives(op):
    found = []
    for function in (op.ours, op.define):
        loss = sum(out.square().sum() + out.sin().sum() for out in function())
        first = torch.autograd.grad(loss, op.leaves, create_graph=True, allow_unused=True)
        loss = sum(grad.sin().sum() for grad in first if grad is not None and grad.requires_grad)
        found.append((first, torch.autograd.grad(loss, op.leaves, allow_unused=True)))
    for ours, defined in zip(*found, strict=True):
        _agree(op._replace(has_zeros=True), ours, defined)


def gradients_of_several_vectors_at_once(op):
    found = []
    for outs in (op.ours(), op.define()):
        many = [torch.stack([torch.full_like(out, 1.0 + k) for k in range(3)]) for out in outs]
        grads = torch.autograd.grad(outs, op.leaves, many, is_grads_batched=True, allow_unused=True)
        zeros = [leaf.new_zeros(3, *leaf.shape) for leaf in op.leaves]
        found.append([zero if grad is None else grad for grad, zero in zip(grads, zeros, strict=True)])
    torch.testing.assert_close(*found)
