"""The maps of HGT's node types and edge types where keys and values are made for those sources alone that have edges of
a type: on a GPU a node of autograd of a few launches, whatever the number of types.

A row is a key, a value or a query: rows of a type stand together, keys of all edge types before all values before all
queries, and have a map each, so that one product makes all of them.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops import _arrays
from gnnaccel.ops._features import beside_ones
from gnnaccel.ops.hgt_ends import belong_beside
from gnnaccel.ops.hgt_maps import (
    QUERY,
    Plan,
    composed_maps,
    fold,
    joined_maps,
    of_factors,
    of_relations,
    parts_of,
    permuted,
    put_parameters,
)
from gnnaccel.ops.relation_products import added
from gnnaccel.ops.segment_matmul import matmul_op
from gnnaccel.ops.summed_rows import SummedRows

_matmul = matmul_op.impl  # type: ignore[attr-defined]


class Filled(NamedTuple):
    """Which rows there are.

    select : Tensor [keys]
        Which of the keys of all sources these are.
    keys, types : int
        How many keys, and edge types.
    asking : list of int
        For each target the place of its node type in the group of all.
    nodes : list of int
        Of each node type.
    gather, sources : Graph [all rows, nodes], [keys and values, nodes]
        Whose features a row is made of.
    ptr, sources_ptr : Tensor, on the CPU
        Where the rows of each type begin.
    """

    select: Tensor
    keys: int
    types: int
    asking: list[int]
    nodes: list[int]
    gather: Graph
    sources: Graph
    ptr: Tensor
    sources_ptr: Tensor

    @classmethod
    def of(
        cls, select: Tensor, read: Tensor, sizes: list[int], types: int, asking: list[int], nodes: list[int]
    ) -> Filled:
        """read : of each row the node. sizes : rows of each type."""
        count, total = select.shape[0], sum(nodes)
        narrow = max(read.shape[0], total) <= bounds.INT32_MAX
        dtype = torch.int32 if narrow else torch.int64
        indptr, read = torch.arange(read.shape[0] + 1, dtype=dtype, device=read.device), read.to(dtype)
        gather = Graph(indptr, read, None, total)
        sources = Graph(indptr[: 2 * count + 1].clone(), read[: 2 * count].clone(), None, total)
        ptr = torch.tensor([0, *itertools.accumulate(sizes)])
        return cls(select, count, types, asking, nodes, gather, sources, ptr, ptr[: 2 * types + 1].clone())


class _FilledMaps(_operators.Function):
    """Queries [num_rows, H * D], keys and values [num_cols, H * D]."""

    @staticmethod
    def forward(ctx, plan, *given):
        x, weights, biases, priors, keys, values = parts_of(plan, given)
        filled, (group,) = plan.filled, plan.groups
        plain, factors = permuted(plan, priors, keys, values)
        scaled, joined = plain * factors, joined_maps(group, weights, biases)
        blocks, folded = fold(group, joined, scaled)
        inputs = x[group.places[0]].shape[1]
        features = beside_ones(sum(filled.nodes), inputs, keys)
        torch.cat([x[place] for place in group.places], out=features[:, :inputs])
        maps = torch.cat([folded.view(-1, *joined.shape[2:]), *[joined[k, QUERY : QUERY + 1] for k in filled.asking]])
        rows = SummedRows(filled.gather, features, None, True).mapped(filled.ptr, maps.transpose(1, 2))
        sizes = [filled.keys, filled.keys, rows.shape[0] - 2 * filled.keys]
        key, value, query = torch.unsafe_split_with_sizes(rows, sizes)
        if any(ctx.needs_input_grad):
            ctx.plan = plan
            ctx.save_for_backward(*given, plain, factors, scaled, blocks, maps, features)
        return query, key, value

    @staticmethod
    def backward(ctx, *grads):
        plan, needs = ctx.plan, ctx.needs_input_grad[1:]
        saved = ctx.saved_tensors
        given, (plain, factors, scaled, blocks, maps, features) = saved[: len(needs)], saved[len(needs) :]
        if torch.is_grad_enabled() or not _operators.usual(*grads):
            return None, *_arrays.gradients(partial(composed_maps, plan), given, needs, tuple(grads))
        filled, (group,) = plan.filled, plan.groups
        of_query, of_key, of_value = [grad.contiguous() for grad in grads]
        beside = belong_beside(of_query, len(plan.rows))
        graph, ptr = (filled.gather, filled.ptr) if beside else (filled.sources, filled.sources_ptr)
        grad = torch.cat([of_key, of_value, of_query] if beside else [of_key, of_value])
        rows, inputs = SummedRows(graph, features, None, True), given[group.places[0]].shape[1]
        of_maps = SummedRows(None, grad, None, False).weights(ptr, rows, 0)
        of_joined = maps.new_zeros(len(group.places), 3, *maps.shape[1:])
        of_features = None
        if any(needs[: plan.types]):
            narrow = maps[: ptr.shape[0] - 1, :, :inputs].contiguous()
            of_features = added(graph.transposed, _matmul(grad, ptr, narrow))
        if beside:
            for k, part in zip(filled.asking, of_maps[2 * filled.types :].unbind(), strict=True):
                of_joined[k, QUERY] = part
        else:
            _apart(plan, of_query, features, maps, of_joined, of_features)
        of_scaled = torch.empty_like(scaled)
        of_factors(group, of_maps[: 2 * filled.types], scaled, blocks, of_scaled, of_joined)
        of_x, of_weights, of_biases = ([None] * plan.types for _ in range(3))  # type: Any
        put_parameters(group, of_joined, inputs, of_weights, of_biases)
        if of_features is not None:
            for place, part in zip(group.places, of_features.split_with_sizes(filled.nodes), strict=True):
                of_x[place] = part
        of_priors, of_keys, of_values = of_relations(plan, of_scaled, plain, factors, given[-1].shape)
        everything = (*of_x, *of_weights, *of_biases, *of_priors, of_keys, of_values)
        return None, *[grad if need else None for grad, need in zip(everything, needs, strict=True)]


def _apart(
    plan: Plan, of_query: Tensor, features: Tensor, maps: Tensor, of_joined: Tensor, of_features: Tensor | None
) -> None:
    """Write the gradients of the queries' maps, and add those of the features, type by type."""
    filled: Filled = plan.filled
    parts, own = features.split_with_sizes(filled.nodes), maps[2 * filled.types :].unbind()
    into = None if of_features is None else of_features.split_with_sizes(filled.nodes)
    for k, grad, map_ in zip(filled.asking, of_query.split_with_sizes(plan.rows), own, strict=True):
        torch.mm(grad.t(), parts[k], out=of_joined[k, QUERY])
        if into is not None:
            into[k].addmm_(grad, map_[:, : into[k].shape[1]])


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: who calls it has found none.
filled_maps_of = super(torch.autograd.Function, _FilledMaps).apply  # type: ignore[misc]
