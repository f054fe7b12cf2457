"""Full-graph training on several GPUs or processes: the graph cut into parts, one per rank of torch.distributed.

Partition once, then run the training script under torchrun with four lines changed (docs/distributed.md):

    data = gnnaccel.distributed.load("parts")              # in place of the whole graph's Data
    model = gnnaccel.distributed.wrap(model, data)
    loss = data.mean(F.cross_entropy(out[mask], y[mask], reduction="none"))
    accuracy = data.mean((out.argmax(1) == y)[mask].float())
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gnnaccel import api
from gnnaccel.graph import modes
from gnnaccel.nn import parts as nn_parts
from gnnaccel.parts import Part, cut, follow, join, load, rates
from gnnaccel.parts import estimate as estimates
from gnnaccel.parts.assign import METHODS
from gnnaccel.parts.estimate import Estimate
from gnnaccel.parts.files import Statistics
from gnnaccel.parts.part import RESERVED

__all__ = ["Estimate", "Part", "Statistics", "estimate", "join", "load", "partition", "wrap"]

_wrapped: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def partition(
    graph_or_data: Any,
    parts: int,
    out: str | os.PathLike,
    method: str = "communities",
    *,
    nodes: Mapping[str, Any] | None = None,
    edges: Mapping[str, Any] | None = None,
    num_nodes: int | None = None,
) -> Statistics:
    """Cut a graph and its data into parts of nearly as many edges and nodes, with few edges between them, on disk.

    Parameters
    ----------
    graph_or_data : PyG Data, DGLGraph, Graph, edge_index [2, E], or scipy.sparse matrix
        Homogeneous. Tensors with a row per node or edge go along, of a Data (edge_index, not adj_t) and a DGLGraph.
    parts : int
        Ranks that will train.
    out : path
        A new or empty folder: a manifest with checksums, and a folder for each part.
    method : {"communities", "metis", "range"}
        "communities": by gnnaccel's own. "metis": by pymetis, where that is installed. "range": nodes as they are
        numbered, for graphs that come in a good order.
    nodes, edges : mapping of str to Tensor or array, optional
        More data, a row per node or edge; memory-mapped arrays (numpy.load(mmap_mode="r")) are read part by part.
    num_nodes : int, optional
        As `gnnaccel.as_graph` has it.

    Returns
    -------
    Statistics
        Cut edges, halo rows, balance; prints as one line.

    Raises
    ------
    TypeError, ValueError
        As `gnnaccel.as_graph`; TypeError for data in bfloat16, ValueError for a folder that is not empty, data of
        another length, or another method.
    ImportError
        For "metis" without pymetis. OSError: where the folder cannot be written.

    Notes
    -----
    Deterministic. Each part is written before the next is cut.

    Examples
    --------
    >>> import torch, gnnaccel, tempfile
    >>> edges = torch.tensor([[0, 1, 2, 3, 4, 5, 2, 3], [1, 2, 0, 4, 5, 3, 3, 2]])
    >>> gnnaccel.distributed.partition(edges, 2, tempfile.mkdtemp()).cut
    2
    """
    with modes.outside_inference(grad=False):
        graph = api.as_graph(graph_or_data, num_nodes)
        of_nodes, of_edges = _data_of(graph_or_data)
        of_nodes |= dict(nodes or {})
        of_edges |= dict(edges or {})
        for what, table, count in (("nodes", of_nodes, graph.num_rows), ("edges", of_edges, graph.nnz)):
            for name, value in table.items():
                if name in RESERVED:
                    raise ValueError(f"partition: {what}: {name!r} is what a part itself is asked for: rename it")
                if getattr(value, "dtype", None) == torch.bfloat16:
                    raise TypeError(f"partition: {what}: {name}: NumPy, whose files parts are, has no bfloat16")
                if value.ndim == 0 or value.shape[0] != count:
                    raise ValueError(
                        f"partition: {what}: {name}: expected a row for each of {count}, got {tuple(value.shape)}"
                    )
        with torch.device("cpu"):  # whatever a user's default is
            return cut.cut(graph, of_nodes, of_edges, parts, method, out)


def estimate(
    graph_or_data: Any,
    gpus: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    *,
    model: str = "gcn",
    feats: int = 128,
    hidden: int = 256,
    layers: int = 3,
    classes: int = 40,
    heads: int = 4,
    memory_gib: float = 80.0,
    link_gbs: float = 50.0,
    latency_us: float = 30.0,
    speed: str = "h100",
    stands_for: tuple[int, int] | None = None,
    method: str = "communities",
    num_nodes: int | None = None,
) -> list[Estimate]:
    """What training on so many GPUs would take: an epoch's time, bytes on the wire, memory of each. Nothing is written.

    The graph is cut into as many parts each time. The work, the rows that an exchange sends and what a GPU keeps are
    counted from the sizes of parts; times are these over measured rates of kernels. docs/distributed.md says how far
    off that is.

    Parameters
    ----------
    graph_or_data, method, num_nodes
        As of `partition`.
    gpus : sequence of int
        The speedup is over the first.
    model : {"gcn", "sage", "gin", "gat"}
        Of PyG's layers; with `feats`, `hidden`, `layers`, `classes`, and `heads` of gat.
    memory_gib, link_gbs, latency_us : float
        Of each GPU: memory; GB/s that it sends, and at the same time receives, in an exchange; what an exchange takes
        beyond its bytes. Measured on two H100 with NVLink: 186 GB/s.
    speed : {"h100", "here"}
        Rates of committed results, or measured now on this machine, where the graph is.
    stands_for : (int, int), optional
        Nodes and edges of a larger graph that this one is like: parts have as many halo rows per node.

    Returns
    -------
    list of Estimate

    Raises
    ------
    TypeError, ValueError
        As `gnnaccel.as_graph`; ValueError for arguments that make no sense, and more GPUs than nodes.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> edges = torch.randint(0, 100, (2, 1000))
    >>> [done.gpus for done in gnnaccel.distributed.estimate(edges, (1, 2), num_nodes=100)]
    [1, 2]
    """
    sizes = {"feats": feats, "hidden": hidden, "layers": layers, "classes": classes, "heads": heads}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"estimate: {name}: expected an int of at least 1, got {size!r}")
    for name, value in {"memory_gib": memory_gib, "link_gbs": link_gbs}.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"estimate: {name}: expected a number above 0, got {value!r}")
    if not 0 <= latency_us < float("inf"):
        raise ValueError(f"estimate: latency_us: expected a number of at least 0, got {latency_us!r}")
    for name, choice, known in (
        ("model", model, estimates.MODELS),
        ("method", method, METHODS),
        ("speed", speed, ("h100", "here")),
    ):
        if choice not in known:
            raise ValueError(f"estimate: {name}: expected one of {', '.join(known)}, got {choice!r}")
    if model == "gat" and hidden % heads:
        raise ValueError(f"estimate: hidden: expected a multiple of {heads} heads, got {hidden}")
    with modes.outside_inference(grad=False):
        graph = api.as_graph(graph_or_data, num_nodes)
        counts = [count if type(count) is int else 0 for count in gpus]
        if not gpus or not all(1 <= count <= graph.num_rows for count in counts):
            raise ValueError(f"estimate: gpus: expected numbers from 1 to {graph.num_rows} nodes, got {list(gpus)}")
        cuts = [estimates.cut_of(graph, count, method) for count in gpus]
    if stands_for is not None:
        if min(stands_for) < 1 or graph.nnz == 0:
            raise ValueError(f"estimate: stands_for: expected nodes and edges of at least 1, got {stands_for}")
        times = stands_for[0] / graph.num_rows, stands_for[1] / graph.nnz
        cuts = [found.scaled(*times) for found in cuts]
    if speed == "here" and graph.nnz == 0:
        raise ValueError("estimate: speed: expected a graph with edges to measure 'here', got one without")
    found = rates.H100 if speed == "h100" else rates.measured(graph)
    described = estimates.Model(model, feats, hidden, layers, classes, heads)
    return estimates.estimate(cuts, described, found, memory_gib=memory_gib, link_gbs=link_gbs, latency_us=latency_us)


def _data_of(obj: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors of nodes and of edges that a framework's object holds."""
    if "torch_geometric" in sys.modules and hasattr(obj, "node_attrs") and hasattr(obj, "edge_attrs"):
        if obj.get("edge_index") is None:
            raise ValueError("partition: graph_or_data: expected a Data with edge_index, got one without")
        found = [{name: obj[name] for name in names} for names in (obj.node_attrs(), obj.edge_attrs())]
        found[1].pop("edge_index", None)
    elif hasattr(obj, "ndata") and hasattr(obj, "edata"):
        if len(obj.ntypes) != 1 or len(obj.etypes) != 1:
            raise ValueError(
                f"partition: graph_or_data: expected a homogeneous DGLGraph, got node types {obj.ntypes} and edge "
                f"types {obj.etypes}"
            )
        found = [dict(obj.ndata), dict(obj.edata)]
    else:
        return {}, {}
    nodes, edges = ({k: v for k, v in table.items() if isinstance(v, torch.Tensor)} for table in found)
    return nodes, edges


def wrap(model: torch.nn.Module, part: Part, *, pairs: Sequence[type] = ()) -> torch.nn.Module:
    """Make a model of PyG's or gnnaccel.nn's layers run on this rank's part as on the whole graph; the same, changed.

    Layers fetch rows of other parts' nodes before they pass messages, and run on gnnaccel's kernels. Rank 0's
    parameters go to all; after each backward pass gradients are their sums over ranks; batch norms see all nodes.
    Names in ``state_dict()`` stay, so that a checkpoint loads on any number of parts, or without gnnaccel.

    Parameters
    ----------
    model : torch.nn.Module
        On the part's device. Not in DistributedDataParallel, whose work this does.
    part : Part
    pairs : sequence of type, optional
        Your own MessagePassing layers that take (x of sources, x of destinations) as PyG's bipartite layers do, and use
        edge_index in propagate() alone.

    Returns
    -------
    torch.nn.Module
        `model`.

    Raises
    ------
    TypeError
        For layers that are not known on parts (docs/distributed.md), before anything is changed.
    ValueError
        For a model that was wrapped before, or has no layers that pass messages, or is on another device.
    RuntimeError
        If the ranks' models differ.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"wrap: model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(part, Part):
        raise TypeError(f"wrap: part: expected what gnnaccel.distributed.load gives, got {type(part).__name__}")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise TypeError("wrap: model: in DistributedDataParallel, whose work wrap() does: give the model itself")
    if model in _wrapped:
        raise ValueError("wrap: model: it was wrapped before; make a new one, and load its state_dict")
    norms, ours, of_pyg = follow.batch_norms(model), nn_parts.check_layers(model), []
    _refuse_dgl(model)
    if "torch_geometric" in sys.modules:
        from gnnaccel.pyg_backend import parts as pyg_parts

        of_pyg = pyg_parts.check_layers(model, pairs)
    if not ours and not of_pyg:
        raise ValueError("wrap: model: expected a model with layers of PyG or gnnaccel.nn over a graph, found none")
    follow.follow(model, part.device)
    follow.over_ranks(norms)
    nn_parts.wrap_layers(ours, part)
    if of_pyg:
        pyg_parts.wrap_layers(of_pyg, part)
    _wrapped.add(model)
    return model


def _refuse_dgl(model: torch.nn.Module) -> None:
    for path, module in model.named_modules():
        if any(cls.__module__.partition(".")[0] == "dgl" for cls in type(module).__mro__):
            raise TypeError(
                f"wrap: model: {path or 'the model'} is a {type(module).__name__} of DGL's, which takes a DGLGraph, "
                "and a part is none. A DGLGraph can be partitioned; train on its parts by layers of PyG or "
                "gnnaccel.nn, or sample (dgl.dataloading.DataLoader(use_ddp=True)) and keep DGL's layers"
            )
