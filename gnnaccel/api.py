"""The public functions that take anybody's graph: told apart without importing a framework nobody has imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnaccel import capture, maxk_models, plain
from gnnaccel.graph import cache
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.renumber import Renumbering, edge_index_of
from gnnaccel.graph.renumber import renumber as _renumber
from gnnaccel.ops import _check
from gnnaccel.planning import prepare as _prepare


def _from_package(obj: Any, package: str) -> bool:
    """True if `package` is imported and the class of `obj`, or one it derives from, is defined in it."""
    return package in sys.modules and any(c.__module__.partition(".")[0] == package for c in type(obj).__mro__)


def _is_dgl(obj: Any) -> bool:
    return _from_package(obj, "dgl") and hasattr(obj, "_graph")


def _is_pyg(obj: Any) -> bool:
    if _from_package(obj, "torch_geometric") or _from_package(obj, "torch_sparse"):
        return True
    return isinstance(obj, Tensor) and "torch_geometric" in sys.modules


def as_graph(obj: Any, num_nodes: int | None = None) -> Graph:
    """The `Graph` of a framework's graph object.

    Parameters
    ----------
    obj : Graph, DGLGraph, PyG Data or EdgeIndex, SparseTensor, Tensor, or scipy.sparse matrix
        A dense tensor is PyG's edge_index: [2, E], int32 or int64, sources first. A sparse matrix (scipy,
        torch.sparse, SparseTensor) has destinations as rows and sources as columns.
    num_nodes : int, optional
        Number of nodes of an edge_index; default: just large enough. Refused where `obj` says it itself.

    Returns
    -------
    Graph
        Kept with a DGL graph or a PyG tensor as long as that lives, so asking again costs nothing.

    Raises
    ------
    TypeError
        For any other object, or indices that are not int32 or int64.
    ValueError
        For wrong shapes, indices out of range, or a `num_nodes` that does not apply.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> gnnaccel.as_graph(torch.tensor([[0, 1, 1], [1, 0, 2]]))
    Graph(num_rows=3, num_cols=3, nnz=3, device=cpu)
    """
    if _is_pyg(obj):
        from gnnaccel import pyg_backend

        return pyg_backend.to_graph(obj, num_nodes=num_nodes)
    if isinstance(obj, Tensor) and obj.layout is torch.strided:
        return _from_edge_index(obj, num_nodes)
    if num_nodes is not None:
        raise ValueError(f"as_graph: num_nodes: applies to an edge_index only, got it with a {type(obj).__name__}")
    if isinstance(obj, Graph):
        return obj
    if _is_dgl(obj):
        from gnnaccel import dgl_backend

        return dgl_backend.to_graph(obj)
    if isinstance(obj, Tensor):
        return _from_torch_sparse(obj)
    if hasattr(obj, "tocsr"):
        return Graph.from_scipy(obj)
    raise TypeError(
        "as_graph: obj: expected a Graph, DGLGraph, PyG Data, edge_index, SparseTensor, torch.sparse tensor or "
        f"scipy.sparse matrix, got {type(obj).__name__}"
    )


def _from_edge_index(edge_index: Tensor, num_nodes: int | None) -> Graph:
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ValueError(
            f"as_graph: obj: expected an edge_index of shape [2, E] or a sparse tensor, got {tuple(edge_index.shape)}"
        )
    return Graph.from_coo(edge_index[1], edge_index[0], num_rows=num_nodes, num_cols=num_nodes)


def _from_torch_sparse(matrix: Tensor) -> Graph:
    if matrix.dim() - matrix.dense_dim() != 2:
        raise ValueError(f"as_graph: obj: expected a 2-D sparse tensor, got shape {tuple(matrix.shape)}")
    rows, cols = matrix.shape[:2]
    if matrix.layout is torch.sparse_csr:
        return Graph.from_csr(matrix.crow_indices().detach(), matrix.col_indices().detach(), num_cols=cols)
    if matrix.layout is torch.sparse_csc:
        return Graph.from_csr(matrix.ccol_indices().detach(), matrix.row_indices().detach(), num_cols=rows).transposed
    if matrix.layout is torch.sparse_coo:
        index = matrix._indices()  # as it is: duplicates stay apart, edge ids are positions in its values
        return Graph.from_coo(index[0], index[1], num_rows=rows, num_cols=cols)
    raise TypeError(f"as_graph: obj: expected a CSR, CSC or COO sparse tensor, got layout {matrix.layout}")


def prepare(
    graph_or_data: Any,
    *,
    transposed: bool = True,
    reorder: bool | str = False,
    kernel: str = "auto",
    tune: str = "heuristic",
    num_feats: Sequence[int] = _prepare.WIDTHS,
    keep: bool | str | os.PathLike = False,
    num_nodes: int | None = None,
    method: str | None = None,
) -> _prepare.Prepared:
    """Do ahead of time what the first steps of training would do: build the structure, its transpose, its work lists.

    Parameters
    ----------
    graph_or_data : anything `as_graph` takes
    transposed : bool
        Also build the reversed structure, which the backward pass reads. Pass False for inference.
    reorder : bool or {"communities", "rcm", "degree"}
        Also look for an order of the rows in which neighbours share sources, and let the kernels take them so, if they
        read a tenth less (docs/advisor.md). "communities": on a GPU a third of a second for 100 million edges, on two
        cores a second for two million. True: the same, from 500,000 edges on, below which an order is not repaid
        within a thousand epochs. "rcm": reverse Cuthill-McKee, by SciPy on the host. "degree": rows by falling degree,
        in any case. Features and results keep their order. On the CPU sums, means and extremes read a copy of the edges
        in it, for numbers of features with which that proves faster (others are served as given): calls are timed at
        once, for about a second, or as long as those of one width take.
    kernel : {"auto", "csr", "tiled"}
        "tiled": also translate graph and reversed graph for tensor cores, which `ops.spmm` and `ops.sddmm` with
        kernel="tiled" take. "auto": on CUDA only, and where tiles pay (docs/tensor-cores.md). "csr": not now.
    tune : {"heuristic", "measure", "off"}
        How the kernels of sums on CUDA, and their parameters, are chosen. "heuristic": by rules. "measure": also time
        plans on this graph, up to a second in all, and keep the best (docs/advisor.md); in deterministic mode by rules
        all the same. "off": no work lists either, the graph earns them by use.
    num_feats : sequence of int
        What is timed, by "measure" and for an order on the CPU: features of a row in float32. Rows of up to 64, 128,
        256, 512 bytes, and longer ones, share a plan, whatever their dtype: of two numbers in one class the last
        one's stays.
    keep : bool or path
        Keep the order that `reorder` found, and the plans of "measure", on disk, in this folder or (True) the user's
        cache (gnnaccel/plans in it: on Linux ~/.cache/gnnaccel/plans), and take them from there if they are of this
        graph and version of gnnaccel, plans also of this order and GPU; else they are made again, and the step says
        why.
    num_nodes : int, optional
        As `as_graph` has it: for an edge_index whose last nodes have no edges.
    method : str, optional
        The old name of kernel.

    Returns
    -------
    Prepared
        What was done: `graph`, `steps`, `time_ms`, `workspace_bytes`, and `tiles` of a translated graph, with the warps
        that its kernels will give a window (`Tiles.team_for`); prints as one line.

    Raises
    ------
    TypeError, ValueError
        As `as_graph`; ValueError for "measure" on the CPU, for keep with nothing to keep, and for
        another kernel or tune.
    RuntimeError
        Inside a transform of torch.func, under FakeTensorMode and torch.export.
    OSError
        If orders or plans cannot be written.

    Notes
    -----
    On CUDA a graph that is used often gets its work lists without this, at the 51st call, which then synchronises, and
    whose sums may differ from those before it in the last bits. Not in deterministic mode, under torch.compile or
    while a CUDA graph is captured: there (but for torch.compile) the lists that are there are used. Kept with a DGL
    graph, a `Graph` and, once PyG is imported, its tensors, for as long as they live. The Graph made
    of other objects lives in the result alone. PyG's layers that add self-loops (GCNConv, GATConv) make a graph of
    their own at their first call; it has what was prepared before that of the one it is made of.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> done = gnnaccel.prepare(torch.tensor([[0, 1, 1], [1, 0, 2]]))
    >>> done.steps
    ('structure', 'transposed')
    """
    if method is not None:
        _check.renamed("prepare: method=", "kernel=")
        kernel = method
    if tune == "model":
        _check.renamed('prepare: tune="model"', '"heuristic"')
        tune = "heuristic"
    return _prepare.prepare(
        lambda: as_graph(graph_or_data, num_nodes),
        transposed=transposed,
        reorder=reorder,
        kernel=kernel,
        mode=tune,
        num_feats=num_feats,
        keep=keep,
    )


def renumber(
    graph_or_data: Any, ordering: str = "communities", *, num_nodes: int | None = None, method: str | None = None
) -> tuple[Any, Renumbering]:
    """Number nodes anew, so that those which share neighbours lie side by side in memory; what `prepare` never does.

    Parameters
    ----------
    graph_or_data : Graph, DGLGraph, PyG Data, or edge_index [2, E]
        Homogeneous. What PyG takes for data of nodes (features, labels, masks) goes along, and integers to which it
        adds the number of nodes in a batch ("index" in the name, face, what `__inc__` says). Edges are brought into the
        order of the new destinations, and their data with them. Single numbers and integers of each node (labels) keep
        their values.
    ordering : {"communities", "rcm", "degree"}
        As `prepare` has them. The first two only if they gain a tenth of the reads; else the numbers stay.
    num_nodes : int, optional
        As `as_graph` has it.
    method : str, optional
        The old name of ordering.

    Returns
    -------
    tuple of the same kind of object, new, and Renumbering
        `features` and `results` of the latter take rows of nodes there and back, `edges` rows of edges, `nodes` node
        numbers. Where no order gains, all is as it was.

    Raises
    ------
    TypeError
        For other objects, such as HeteroData, a Batch, or adjacency as a sparse tensor.
    ValueError
        For a bipartite graph, an ordering that there is not, or what a Data holds of which it cannot be told whether it
        of nodes.
    RuntimeError
        As `prepare`.

    Notes
    -----
    On the device of the graph, the CPU too. Worth it for graphs that are trained on for long and whose features do not
    fit the caches (docs/advisor.md); `gnnaccel.prepare(graph, reorder=True)` has the larger part of the gain without
    moving anything.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> edges = torch.tensor([[0, 1, 2, 3], [2, 3, 0, 3]])
    >>> new, numbers = gnnaccel.renumber(edges, "degree")
    >>> new
    tensor([[0, 3, 2, 1],
            [0, 0, 1, 2]])
    >>> torch.equal(numbers.edges(numbers.nodes(edges).T).T, new)
    True
    """
    if method is not None:
        _check.renamed("renumber: method=", "ordering=")
        ordering = method
    is_edges = isinstance(graph_or_data, Tensor) and graph_or_data.layout is torch.strided
    if num_nodes is not None and not is_edges:
        raise ValueError("renumber: num_nodes: applies to an edge_index only")
    if _from_package(graph_or_data, "torch_geometric") and num_nodes is None:
        from gnnaccel.pyg_backend import renumber as of_pyg

        return of_pyg.renumber(graph_or_data, ordering)
    if _is_dgl(graph_or_data):
        from gnnaccel.dgl_backend import renumber as of_dgl

        return of_dgl.renumber(graph_or_data, ordering)
    if isinstance(graph_or_data, Graph):
        return _renumber(graph_or_data, ordering)
    if is_edges:
        graph, new = _renumber(as_graph(graph_or_data, num_nodes), ordering)
        return edge_index_of(graph, graph_or_data.dtype), new
    raise TypeError(
        "renumber: graph_or_data: expected a Graph, DGLGraph, PyG Data or edge_index, got "
        f"{type(graph_or_data).__name__}"
    )


def invalidate(obj: Any = None) -> None:
    """Forget what was prepared for `obj`, or for everything if it is None.

    Needed only after a write that cannot be noticed: one through ``edge_index.numpy()`` or ``.data``, or into the
    tensors that a matrix of torch.sparse was made of.

    Parameters
    ----------
    obj : DGLGraph, PyG Data, Tensor or SparseTensor, optional
        Without it, everything derived from PyG's tensors is forgotten. What is kept on DGL graphs dies with them
        and, as DGL's structure cannot change under it, needs no call.

    Raises
    ------
    TypeError
        For any other object, such as a `Graph`, which is frozen.
    """
    if obj is None:
        cache.invalidate()
    elif _is_dgl(obj):
        from gnnaccel import dgl_backend

        dgl_backend.forget(obj)
    elif isinstance(obj, Tensor):
        cache.invalidate(obj)
    elif _from_package(obj, "torch_geometric") and hasattr(obj, "stores"):
        for store in obj.stores:
            for value in store.values():
                _invalidate_value(value)
    elif _from_package(obj, "torch_sparse"):
        _invalidate_value(obj)
    else:
        raise TypeError(
            "invalidate: obj: expected None, a DGLGraph, a PyG Data or HeteroData, a SparseTensor or a Tensor, got "
            f"{type(obj).__name__}"
        )


def _invalidate_value(value: Any) -> None:
    if isinstance(value, Tensor):
        cache.invalidate(value)
    elif _from_package(value, "torch_sparse"):
        storage = value.storage
        parts = (storage._row, storage._rowptr, storage._col, storage._value)
        cache.invalidate(*(part for part in parts if part is not None))


def accelerate(
    model: torch.nn.Module,
    *,
    maxk: int | None = None,
    reorder_linear: bool = False,
    cuda_graphs: bool | None = None,
    copy_outputs: bool = True,
    update_order: bool | None = None,
) -> torch.nn.Module:
    """Run the message passing of every PyG layer in `model`, and of modules that gather and scatter with torch alone,
    on gnnaccel, whenever they were built.

    Parameters
    ----------
    model : torch.nn.Module
        Changed in place; parameters, state_dict and class names stay as they are.
    maxk : int, optional
        Makes ANOTHER MODEL of it: torch.nn.ReLU modules in front of sums over a graph (of layers of PyG, DGL or
        gnnaccel.nn) become `nn.MaxK` with this k, which keeps the k largest entries of each row, and the sums read
        those alone. To be trained like that, from the start; a checkpoint of a model with ReLU gives other results.
        Which ones: see `gnnaccel.maxk_models.use_maxk`.
    reorder_linear : bool
        Let PyG's GCNConv, SAGEConv and GraphConv sum before or after their linear map, whichever reads less for each
        edge, forward and backward: the two commute where the sum, or mean, is of plain or weighted rows. Results differ
        by rounding. Off where a hook watches, under autocast and torch.compile, and for sparse adjacency tensors.
    cuda_graphs : bool, optional
        True: calls of `model` (of PyG, DGL or neither), and their backward, are captured in CUDA graphs once three of
        them were alike, and replayed for as long as all that they read is as it was (docs/capture.md). What cannot be
        captured runs as it is and is counted with its reason (GNNACCEL_PROFILE). `gnnaccel.capture.captures_of(model)`
        tells of it. Adam and AdamW that train it become torch's fused ones, unless foreach or fused was chosen.
        False: not any more, and the memory is freed. Default: as it is.
    copy_outputs : bool
        False: what the captured model returns is the graph's own memory, which its next call writes into.
    update_order : bool, optional
        The old name of reorder_linear.

    Returns
    -------
    torch.nn.Module
        `model`. Layers of DGL need no call: `install` switches on all of them.

    Raises
    ------
    TypeError
        If `model` is not a torch.nn.Module, or maxk no int.
    ValueError
        If maxk is below 1, or given for a model without such a ReLU; for copy_outputs without cuda_graphs, and
        cuda_graphs for a model that was compiled in place.
    """
    if update_order is not None:
        _check.renamed("accelerate: update_order=", "reorder_linear=")
        reorder_linear = update_order
    if not copy_outputs and not cuda_graphs:
        raise ValueError("accelerate: copy_outputs: is of cuda_graphs=True alone")
    if maxk is not None:
        maxk_models.use_maxk(model, maxk)
    # Where PyG was not imported none of its layers can be in there.
    if "torch_geometric" in sys.modules:
        from gnnaccel import pyg_backend

        pyg_backend.accelerate(model, update_order=reorder_linear)
    plain.accelerate(model)
    if cuda_graphs:
        capture.attach(model, copy_outputs=copy_outputs)
    elif cuda_graphs is not None:
        capture.detach(model)
    return model
