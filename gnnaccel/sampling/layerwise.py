"""Sampling by layers, as the Heterogeneous Graph Transformer does (Hu et al., WWW 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gnnaccel._library import INDEX_TYPES, launch, pointer
from gnnaccel.sampling import _arrays, by_torch
from gnnaccel.sampling._arrays import CPU, Relation
from gnnaccel.sampling.neighbors import EdgeType, HeteroNeighborSample
from gnnaccel.sampling.subgraphs import Subgraph, induced_subgraph


def hgt_sample(
    graph: Mapping[EdgeType, tuple[Tensor, Tensor]],
    seeds: Mapping[str, Tensor],
    num_samples: Mapping[str, Sequence[int]],
    *,
    seed: int | None = None,
) -> HeteroNeighborSample:
    """A given number of nodes of each type in each hop, and all edges between the nodes of the batch.

    Parameters
    ----------
    graph : dict
        (source type, name, destination type) -> (indptr, indices) of the edges of that type, by destination; int32 or
        int64.
    seeds : dict
        Node type -> nodes to start from.
    num_samples : dict
        Node type -> how many nodes to add in each hop; of every type in `graph`, of one length.
    seed : int, optional
        Of the random numbers; default: drawn from torch's generator.

    Returns
    -------
    HeteroNeighborSample
        With no `batch`; `num_edges_per_hop` has one number, that of all edges.

    Raises
    ------
    TypeError, ValueError
        For tensors of wrong dtype or shape, nodes out of range, types without `num_samples`, tensors on different
        devices.

    Notes
    -----
    Each node of the batch gives 1 / n to its n sources of an edge type, or 1 / 50 to 50 of them if there are more. Of
    what may be added, a node's probability is the square of what it was given.

    Runs where the tensors are. On the GPU other nodes are drawn than on the CPU from the same seed, as likely; the host
    waits for it once for each type of the seeds, twice in each hop, twice for the edges, and where the nodes' rows have
    more than 2^22 of these, once more for each 2^22.
    """
    op = "hgt_sample"
    device = next((_arrays.device_of(indptr) for indptr, _ in graph.values()), CPU)
    relations = {kind: Relation(op, *arrays, of=f"[{kind}]", device=device) for kind, arrays in graph.items()}
    dtypes = {relation.indptr.dtype for relation in relations.values()}
    if len(dtypes) != 1:
        raise TypeError(f"{op}: graph: expected edge types with one dtype of indices, got {sorted(map(str, dtypes))}")
    dtype = dtypes.pop()
    sizes = dict.fromkeys([*num_samples, *seeds], -1) | {kind[0]: -1 for kind in graph}
    for kind, relation in relations.items():
        sizes[kind[-1]] = max(sizes.get(kind[-1], -1), relation.num_rows)
    if missing := [name for name in sizes if name not in num_samples]:
        raise ValueError(f"{op}: num_samples: expected numbers for every node type, got none for {missing}")
    counts = {name: _arrays.fanouts(op, num_samples[name], least=0, name="num_samples") for name in sizes}
    if len({len(of_type) for of_type in counts.values()}) > 1:
        raise ValueError(f"{op}: num_samples: expected as many hops for every node type, got {counts}")
    seeds = {name: _arrays.index_array(op, f"seeds[{name!r}]", nodes, dtype, device) for name, nodes in seeds.items()}
    none = torch.empty(0, dtype=dtype, device=device)
    starts = {name: seeds.get(name, none) for name in sizes}
    ways = _in_torch if by_torch.serves(none) else _on_cpu
    node, per_hop, edges = ways(op, relations, starts, counts, sizes, _arrays.random_seed(op, seed))
    return HeteroNeighborSample(
        node,
        {kind: found.row for kind, found in edges.items()},
        {kind: found.col for kind, found in edges.items()},
        {kind: found.edge for kind, found in edges.items()},
        None,
        per_hop,
        {kind: [found.edge.numel()] for kind, found in edges.items()},
    )


_Sampled = tuple[dict[str, Tensor], dict[str, list[int]], Mapping[EdgeType, by_torch.Edges | Subgraph]]


def _in_torch(op, relations, starts, counts, sizes, seed) -> _Sampled:
    names = list(sizes)
    ends = [(names.index(kind[0]), names.index(kind[-1])) for kind in relations]
    problem = by_torch.Problem(op, list(relations.values()), ends, list(sizes.values()))
    node, per_hop, edges = by_torch.hgt(problem, list(starts.values()), list(counts.values()), seed)
    of_type = dict(zip(names, node, strict=True)), dict(zip(names, per_hop, strict=True))
    return *of_type, dict(zip(relations, edges, strict=True))


def _on_cpu(op, relations, starts, counts, sizes, seed) -> _Sampled:
    names = list(sizes)
    dtype = starts[names[0]].dtype
    out = launch(
        "layer_sample",
        CPU,
        [(pointer(starts[name]), 0, starts[name].numel(), sizes[name], 0, -1) for name in names],
        [relation.tuple(names.index(kind[0]), names.index(kind[-1]), ()) for kind, relation in relations.items()],
        list(counts.values()),
        (0, 0, seed, 1, len(counts[names[0]]), INDEX_TYPES[dtype], *[False] * 4),
    )
    node = dict(zip(names, _arrays.tensors(out.nodes, dtype), strict=True))
    edges = {}
    for kind, relation in relations.items():
        size = sizes[kind[0]] if sizes[kind[0]] >= 0 else None
        edges[kind] = induced_subgraph(
            relation.indptr, relation.indices, node[kind[-1]], sources=node[kind[0]], num_sources=size
        )
    return node, dict(zip(names, out.nodes_per_hop, strict=True)), edges
