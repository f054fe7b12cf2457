"""Neighbour sampling (GraphSAGE: Hamilton, Ying and Leskovec, NeurIPS 2017), with one type of edges or many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel._library import INDEX_TYPES, launch, pointer
from gnnaccel.lower import bounds
from gnnaccel.sampling import _arrays, on_cuda
from gnnaccel.sampling._arrays import CPU, Relation

EdgeType = tuple[str, str, str]  # type of the sources, name, type of the destinations


class NeighborSample(NamedTuple):
    """A batch: its nodes, and its edges by places among them.

    Attributes
    ----------
    node : Tensor [num_nodes]
        The seeds, as they were given, then other nodes in order of appearance.
    row, col : Tensor [num_edges]
        Source and destination of each edge, as places in `node`; `col` ascends.
    edge : Tensor [num_edges]
        Place of each edge in `indices`.
    batch : Tensor [num_nodes], or None
        Of a disjoint sample: which seed's tree each node belongs to.
    num_nodes_per_hop, num_edges_per_hop : list of int
        How many nodes each hop added, the seeds first; how many edges each hop added.
    """

    node: Tensor
    row: Tensor
    col: Tensor
    edge: Tensor
    batch: Tensor | None
    num_nodes_per_hop: list[int]
    num_edges_per_hop: list[int]


class HeteroNeighborSample(NamedTuple):
    """A batch of several types of nodes and edges: as `NeighborSample`, by node type or by edge type."""

    node: dict[str, Tensor]
    row: dict[EdgeType, Tensor]
    col: dict[EdgeType, Tensor]
    edge: dict[EdgeType, Tensor]
    batch: dict[str, Tensor] | None
    num_nodes_per_hop: dict[str, list[int]]
    num_edges_per_hop: dict[EdgeType, list[int]]


def neighbor_sample(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    num_neighbors: Sequence[int],
    *,
    edge_weight: Tensor | None = None,
    node_time: Tensor | None = None,
    edge_time: Tensor | None = None,
    seed_time: Tensor | None = None,
    replace: bool = False,
    resample: bool = False,
    disjoint: bool = False,
    temporal_strategy: str = "uniform",
    seed: int | None = None,
) -> NeighborSample:
    """Sources of the seeds, sources of those, and so on, up to `num_neighbors` of each node.

    Parameters
    ----------
    indptr : Tensor [num_nodes + 1], int32 or int64
        Node v's in-edges are indptr[v]:indptr[v + 1].
    indices : Tensor [nnz], same dtype
        Source of each edge.
    seeds : Tensor [num_seeds], same dtype
        Nodes to start from. One that is there twice is two nodes of the batch; edges from it go to the first.
    num_neighbors : list of int
        One per hop; -1 takes all neighbours.
    edge_weight : Tensor [nnz], float32 or float64, optional
        Neighbours are drawn with probabilities in proportion to it. Edges of weight 0 are not drawn, but where a node
        has no more edges than are asked for, all are taken.
    node_time, edge_time : Tensor [num_nodes] or [nnz], int64, optional
        Only edges whose source (or which themselves) are not later than the seed count. In each row of `indices` they
        must ascend. Such a sample is disjoint.
    seed_time : Tensor [num_seeds], int64, optional
        Default: the seeds' `node_time`.
    replace : bool
        Draw each neighbour from all, so that one may come several times.
    resample : bool
        Each hop draws neighbours of all nodes so far, the seeds too, and not only of those that the hop before has
        added: what the layers of a model want that are given a block each, as DGL's are. Blocks share nodes: the
        destinations of hop k's edges are the nodes there were before it, the sources those after it.
    disjoint : bool
        A tree for each seed, no node of it shared with others.
    temporal_strategy : {"uniform", "last"}
        "last" takes, of the edges that are early enough, the latest.
    seed : int, optional
        Of the random numbers; default: drawn from torch's generator (`torch.manual_seed`).

    Returns
    -------
    NeighborSample

    Raises
    ------
    TypeError
        For tensors of the wrong dtype, fan-outs that are not ints.
    ValueError
        For wrong shapes, nodes out of range, fan-outs below -1, weights that are negative, infinite or NaN, times that
        do not ascend, and tensors on different devices. Indices and weights are checked as they are read.
    RuntimeError
        For tensors on the GPU, if this gnnaccel has no CUDA half.

    Notes
    -----
    Runs where the tensors are. On the GPU it samples what the CPU does with the same seed, or with weights other edges,
    as likely, on the current stream, for which the host waits once per batch, and once more for each hop that may have
    more than 2^22 edges, as one of all neighbours may. It takes some 40 bytes for each edge that there may be, and 4
    for each node of the graph.

    Without replacement, every set of neighbours is equally likely. With weights they are drawn one after the other,
    each by its weight among those left, as `torch.multinomial` does. The result does not depend on the number of
    threads. Each thread that samples keeps 8 bytes per node of the largest graph it has sampled from.

    Examples
    --------
    >>> import torch
    >>> from gnnaccel.sampling import neighbor_sample
    >>> indptr, indices = torch.tensor([0, 2, 3, 3]), torch.tensor([1, 2, 2])
    >>> neighbor_sample(indptr, indices, torch.tensor([0]), [-1, -1]).node
    tensor([0, 1, 2])
    """
    op, kind = "neighbor_sample", ("node", "to", "node")
    given = Relation(op, indptr, indices, edge_weight, edge_time, device=_arrays.device_of(indptr))
    _, out = _sample(
        op,
        {kind: given},
        {kind: _arrays.fanouts(op, num_neighbors)},
        {"node": seeds},
        None if node_time is None else {"node": node_time},
        None if seed_time is None else {"node": seed_time},
        {},
        (replace, resample, disjoint, temporal_strategy, seed),
    )
    return of_one(out)


def hetero_neighbor_sample(
    graph: Mapping[EdgeType, tuple[Tensor, Tensor]],
    seeds: Mapping[str, Tensor],
    num_neighbors: Sequence[int] | Mapping[EdgeType, Sequence[int]],
    *,
    node_types: Sequence[str] = (),
    num_nodes: Mapping[str, int] | None = None,
    edge_weight: Mapping[EdgeType, Tensor] | None = None,
    node_time: Mapping[str, Tensor] | None = None,
    edge_time: Mapping[EdgeType, Tensor] | None = None,
    seed_time: Mapping[str, Tensor] | None = None,
    replace: bool = False,
    resample: bool = False,
    disjoint: bool = False,
    temporal_strategy: str = "uniform",
    seed: int | None = None,
) -> HeteroNeighborSample:
    """`neighbor_sample` of a graph with several types of nodes and edges.

    Parameters
    ----------
    graph : dict
        (source type, name, destination type) -> (indptr, indices) of the edges of that type, by destination. In a hop
        they are taken in this order.
    seeds : dict
        Node type -> nodes. Trees of a disjoint sample are numbered in this order.
    num_neighbors : list of int, or dict
        Fan-outs, one per hop, for all edge types or for each.
    node_types : list of str, optional
        Types that the result shall have, beyond those of `graph` and `seeds`.
    num_nodes : dict, optional
        Number of nodes of types that are not the destination of any edge type, to check their nodes against.
    edge_weight, edge_time, node_time, seed_time : dict, optional
        As in `neighbor_sample`, for some or all types: the edges of the others are drawn uniformly, at any time.
    replace, resample, disjoint, temporal_strategy, seed
        As in `neighbor_sample`.

    Returns
    -------
    HeteroNeighborSample
        With every edge type of `graph`, and every node type.

    Raises
    ------
    TypeError, ValueError
        As `neighbor_sample`; also for types that are not in `graph`, and lists of fan-outs of different lengths.
    """
    op = "hetero_neighbor_sample"
    for name, value in (("edge_weight", edge_weight), ("edge_time", edge_time)):
        for kind in value or ():
            if kind not in graph:
                raise ValueError(f"{op}: {name}: {kind} is not an edge type of the graph: {list(graph)}")
    device = next((_arrays.device_of(indptr) for indptr, _ in graph.values()), CPU)
    relations = {
        kind: Relation(op, *arrays, (edge_weight or {}).get(kind), (edge_time or {}).get(kind), f"[{kind}]", device)
        for kind, arrays in graph.items()
    }
    if isinstance(num_neighbors, Mapping):
        missing = [kind for kind in graph if kind not in num_neighbors]
        if missing:
            raise ValueError(f"{op}: num_neighbors: expected fan-outs for every edge type, got none for {missing}")
        fanouts = {kind: _arrays.fanouts(op, num_neighbors[kind]) for kind in graph}
    else:
        fanouts = dict.fromkeys(graph, _arrays.fanouts(op, num_neighbors))
    if len({len(of_kind) for of_kind in fanouts.values()}) > 1:
        raise ValueError(f"{op}: num_neighbors: expected as many hops for every edge type, got {fanouts}")
    names, out = _sample(
        op,
        relations,
        fanouts,
        seeds,
        node_time,
        seed_time,
        dict.fromkeys(node_types, -1) | dict(num_nodes or {}),
        (replace, resample, disjoint, temporal_strategy, seed),
    )

    def by_node(values):
        return dict(zip(names, values, strict=True))

    def by_edge(values):
        return dict(zip(relations, values, strict=True))

    return HeteroNeighborSample(
        by_node(out.nodes),
        by_edge(out.rows),
        by_edge(out.cols),
        by_edge(out.edges),
        None if out.trees is None else by_node(out.trees),
        by_node(out.nodes_per_hop),
        by_edge(out.edges_per_hop),
    )


def of_one(out: on_cuda.Sample) -> NeighborSample:
    """A sample of one type of nodes and one of edges."""
    trees = None if out.trees is None else out.trees[0]
    edges = out.rows[0], out.cols[0], out.edges[0]
    return NeighborSample(out.nodes[0], *edges, trees, out.nodes_per_hop[0], out.edges_per_hop[0])


def _is_on_gpu(relations: Mapping[EdgeType, Relation]) -> bool:
    return any(relation.indptr.is_cuda for relation in relations.values())


def _sample(op, relations, fanouts, seeds, node_time, seed_time, num_nodes, how) -> tuple[list[str], on_cuda.Sample]:
    """The types of nodes, and a sample of these and of the relations, in order."""
    replace, resample, disjoint, strategy, seed = how
    if strategy not in ("uniform", "last"):
        raise ValueError(f"{op}: temporal_strategy: expected 'uniform' or 'last', got {strategy!r}")
    dtypes = {relation.indptr.dtype for relation in relations.values()}
    if len(dtypes) > 1:
        raise TypeError(f"{op}: graph: expected one dtype of indices, got {sorted(map(str, dtypes))}")
    dtype = dtypes.pop() if dtypes else None
    device = next((relation.indptr.device for relation in relations.values()), CPU)
    one = len(relations) == 1 and op == "neighbor_sample"
    seeds = {
        name: _arrays.index_array(op, "seeds" if one else f"seeds[{name!r}]", s, dtype, device)
        for name, s in seeds.items()
    }
    if dtype is None:
        dtype = next((s.dtype for s in seeds.values()), torch.int64)
    sizes = _sizes(relations, seeds, num_nodes)
    times = _times(op, sizes, relations, seeds, node_time, seed_time, device)
    how = (bool(replace), bool(resample), bool(disjoint or times is not None), strategy == "last")
    seed = _arrays.random_seed(op, seed)
    if _is_on_gpu(relations):
        node_times, seed_times = ({}, None) if times is None else times
        problem = on_cuda.Problem(sizes, relations, fanouts, node_times, *how)
        return problem.names, on_cuda.begin(problem, seeds, seed_times, seed).result()
    return list(sizes), _on_cpu(sizes, relations, fanouts, seeds, times, dtype, how, seed)


def _on_cpu(sizes, relations, fanouts, seeds, times, dtype, how, seed) -> on_cuda.Sample:
    replace, resample, disjoint, last = how
    names, hops = list(sizes), max(map(len, fanouts.values()), default=0)
    types, address, stamp = _node_types(sizes, seeds, {} if times is None else times[0], disjoint)
    seed_times = pointer(None if times is None else times[1])
    out = launch(
        "neighbor_sample",
        CPU,
        types,
        [
            relation.tuple(names.index(kind[0]), names.index(kind[-1]), fanouts[kind])
            for kind, relation in relations.items()
        ],
        (address, seed_times, seed, stamp, hops, INDEX_TYPES[dtype], replace, disjoint, last, resample),
    )
    nodes, trees, rows, cols, edges = (
        _arrays.tensors(given, dtype) for given in (out.nodes, out.trees, out.rows, out.cols, out.edges)
    )
    per_hop = out.nodes_per_hop, out.edges_per_hop
    return on_cuda.Sample(nodes, trees if disjoint else None, rows, cols, edges, *per_hop)


def _sizes(relations, seeds, num_nodes) -> dict[str, int]:
    """Number of nodes of each type; -1 where nobody says it."""
    sizes = dict(num_nodes)
    for kind, relation in relations.items():
        sizes.setdefault(kind[0], -1)
        sizes[kind[-1]] = max(sizes.get(kind[-1], -1), relation.num_rows)
    for name in seeds:
        sizes.setdefault(name, -1)
    return sizes


def _node_types(sizes, seeds, node_times, disjoint: bool) -> tuple[list[tuple], int, int]:
    """The binary's list of node types (kernels.h: NodeType), and the table for those that are not hashed."""
    places, total, first = dict.fromkeys(sizes, -1), 0, dict.fromkeys(sizes, 0)
    for name, size in sizes.items():
        if not disjoint and 0 <= size <= bounds.TABLE_NODES - total:
            places[name], total = total, total + size
    count = 0
    for name, nodes in seeds.items():
        first[name], count = count, count + nodes.numel()
    types = []
    for name, size in sizes.items():
        nodes = seeds.get(name)
        of_seeds = (pointer(nodes), pointer(node_times.get(name)), 0 if nodes is None else nodes.numel())
        types.append((*of_seeds, size, first[name], places[name]))
    return types, *(_arrays.table(total) if total else (0, 1))


def _times(op, sizes, relations, seeds, node_time, seed_time, device) -> tuple[dict[str, Tensor], Tensor] | None:
    """Times of nodes by type, and of all seeds one after the other; None where time does not matter."""
    by_edge = any(relation.time is not None for relation in relations.values())
    if node_time is None and not by_edge:
        return None
    if node_time is not None and by_edge:
        raise ValueError(f"{op}: edge_time: expected times of nodes or of edges, got both")
    checked = {}
    for name, time in (node_time or {}).items():
        checked[name] = _arrays.index_array(op, f"node_time of {name!r}", time, torch.int64, device)
        if sizes.get(name, -1) >= 0:
            _arrays.length(op, f"node_time of {name!r}", checked[name], sizes[name], "nodes")
        sizes[name] = checked[name].numel()
    of_seeds = []
    for name, nodes in seeds.items():
        label = f"seed_time of {name!r}"
        if seed_time is not None and name in seed_time:
            time = _arrays.index_array(op, label, seed_time[name], torch.int64, device)
            _arrays.length(op, label, time, nodes.numel(), "seeds")
        elif name in checked and (sizes[name] or not nodes.numel()):
            # A seed that there is not is told of when it is sampled from: a GPU does not wait here.
            time = checked[name].index_select(0, nodes.clamp(0, max(sizes[name] - 1, 0)))
        elif name in checked:
            raise ValueError(f"{op}: seeds: expected nodes in [0, 0), got {int(nodes[0])}")
        elif nodes.numel():
            raise ValueError(f"{op}: {label}: expected the times of these seeds, whose nodes have none")
        else:
            continue
        of_seeds.append(time)
    return checked, torch.cat(of_seeds) if of_seeds else torch.empty(0, dtype=torch.int64, device=device)
