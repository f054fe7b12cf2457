"""Subgraphs: the edges between given nodes, and the surroundings of each of some nodes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel._library import INDEX_TYPES, launch, pointer
from gnnaccel.lower import bounds
from gnnaccel.sampling import _arrays, by_torch
from gnnaccel.sampling._arrays import CPU, Relation
from gnnaccel.sampling.neighbors import neighbor_sample


class Subgraph(NamedTuple):
    """Edges between given nodes, by places among these.

    Attributes
    ----------
    indptr : Tensor [num_targets + 1]
        The edges of target i are indptr[i]:indptr[i + 1].
    row, col : Tensor [num_edges]
        Source and destination of each edge, as places among the sources and the targets; `col` ascends.
    edge : Tensor [num_edges]
        Place of each edge in the `indices` of the graph.
    """

    indptr: Tensor
    row: Tensor
    col: Tensor
    edge: Tensor


def induced_subgraph(
    indptr: Tensor,
    indices: Tensor,
    nodes: Tensor,
    *,
    sources: Tensor | None = None,
    num_sources: int | None = None,
    batch: Tensor | None = None,
) -> Subgraph:
    """All edges between the given nodes.

    Parameters
    ----------
    indptr : Tensor [num_nodes + 1], int32 or int64
        Node v's in-edges are indptr[v]:indptr[v + 1].
    indices : Tensor [nnz], same dtype
        Source of each edge.
    nodes : Tensor [num_targets], same dtype
        Where edges may end. Of a node that is there twice each has all edges; edges come from the first.
    sources : Tensor, same dtype, optional
        Where they may start, of a graph between two types of nodes; default: `nodes`.
    num_sources : int, optional
        Number of nodes of the type that `sources` are of, if it is another.
    batch : Tensor [num_targets], same dtype, optional
        A subgraph for each number: edges between nodes of different ones do not count. Not with `sources`.

    Returns
    -------
    Subgraph

    Raises
    ------
    TypeError, ValueError
        For tensors of wrong dtype or shape, nodes out of range, tensors on different devices.

    Notes
    -----
    Runs where the tensors are. A GPU's result is the CPU's; the host waits three times, for whether the nodes are there
    and for sizes, and where the nodes' rows have more than 2^22 edges, once more for each 2^22.

    Examples
    --------
    >>> import torch
    >>> from gnnaccel.sampling import induced_subgraph
    >>> indptr, indices = torch.tensor([0, 2, 3, 3]), torch.tensor([1, 2, 2])
    >>> induced_subgraph(indptr, indices, torch.tensor([2, 0])).edge
    tensor([1])
    """
    op = "induced_subgraph"
    device = _arrays.device_of(indptr)
    relation = Relation(op, indptr, indices, device=device)
    dtype = relation.indptr.dtype
    nodes = _arrays.index_array(op, "nodes", nodes, dtype, device)
    if sources is None:
        sources, num_sources = nodes, relation.num_rows
    else:
        sources = _arrays.index_array(op, "sources", sources, dtype, device)
        if batch is not None:
            raise ValueError(f"{op}: batch: expected none with sources of another type")
    if batch is not None:
        batch = _arrays.index_array(op, "batch", batch, dtype, device)
        _arrays.length(op, "batch", batch, nodes.numel(), "nodes")
    num_nodes = -1 if num_sources is None else num_sources
    if by_torch.serves(relation.indptr):
        problem = by_torch.Problem(op, [relation], [(0, 0)], [num_nodes])
        problem.check("nodes", sources, 0)
        (edges,) = by_torch.induced(problem, [nodes], [sources], batch)
        starts = torch.arange(nodes.numel() + 1, dtype=dtype, device=device)
        return Subgraph(torch.searchsorted(edges.col, starts).to(dtype), *edges)
    address, stamp = 0, 1
    if batch is None and 0 < num_nodes <= bounds.TABLE_NODES:
        address, stamp = _arrays.table(num_nodes)
    out = launch(
        op,
        CPU,
        relation.tuple(0, 0, ()),
        *(pointer(nodes), pointer(batch), nodes.numel()),
        *(pointer(sources), pointer(batch), sources.numel()),
        num_nodes,
        (address, 0, 0, stamp, 0, INDEX_TYPES[dtype], False, batch is not None, False, False),
    )
    new = torch.zeros(nodes.numel() + 1, dtype=dtype, device=CPU)
    torch.cumsum(torch.tensor(out.edges_per_hop[0], dtype=dtype, device=CPU), 0, out=new[1:])
    row, col, edge = (_arrays.tensors(arrays, dtype)[0] for arrays in (out.rows, out.cols, out.edges))
    return Subgraph(new, row, col, edge)


def ego_subgraphs(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    num_neighbors: list[int],
    *,
    replace: bool = False,
    seed: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Subgraph]:
    """For each seed the edges between the nodes that a sample around it reaches (ShaDow: Zeng et al., NeurIPS 2021).

    Parameters
    ----------
    indptr, indices, seeds, num_neighbors, replace, seed
        As in `neighbor_sample`.

    Returns
    -------
    node : Tensor [num_nodes]
        The nodes of all subgraphs, one after the other, ascending in each.
    ptr : Tensor [num_seeds + 1], int64
        The nodes of seed i are ptr[i]:ptr[i + 1].
    root : Tensor [num_seeds]
        Place of each seed in `node`.
    edges : Subgraph
        Edges by places in `node`.

    Raises
    ------
    TypeError, ValueError
        As `neighbor_sample`.
    """
    out = neighbor_sample(indptr, indices, seeds, num_neighbors, replace=replace, disjoint=True, seed=seed)
    assert out.batch is not None
    by_node = out.node.argsort(stable=True)
    order = by_node[out.batch[by_node].argsort(stable=True)]
    node, batch = out.node[order], out.batch[order]
    ptr = torch.zeros(seeds.numel() + 1, dtype=torch.int64, device=node.device)
    torch.cumsum(torch.bincount(batch, minlength=seeds.numel()), 0, out=ptr[1:])
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=node.device)
    edges = induced_subgraph(indptr, indices, node, batch=batch)
    return node, ptr, place[: seeds.numel()], edges
