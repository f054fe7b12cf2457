"""Our versions of the PyG helpers a layer calls: memoised self-loops and gcn_norm, softmax and spmm on our ops.

`bind` gives a method of a layer these versions (gnnaccel.bound). Nothing in torch_geometric is changed, layers that are
not accelerated never meet them, and a helper that the user replaced stays the user's.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex, is_compiling, utils
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor, torch_sparse

from gnnaccel import ops, plain, touch
from gnnaccel.bound import Replacements
from gnnaccel.graph import modes
from gnnaccel.graph.cache import derived, stamp
from gnnaccel.lazy.reduce import refusal, takes
from gnnaccel.lazy.reduce import softmax as softmax_of_edges
from gnnaccel.pyg_backend import norms
from gnnaccel.pyg_backend.call import current
from gnnaccel.pyg_backend.graph import Unsupported, from_sparse, note_origin, owners_of, values_of
from gnnaccel.pyg_backend.touch import nn as pyg_nn

_MODULES = ("torch_geometric", "torch_geometric.utils", "torch_sparse")  # where layers find helpers
_OWNER = object()  # in a remembered result: the very edges that were given
_EDGES = object()  # of a key: of the edges of a result alone, which had values


def memoised(original: Callable) -> Callable:
    """A structure helper (edges, edge values, ...) -> (edges, edge values), computed once per edges object.

    The returned edges are the same object for the same input, so that what is derived from them is found again.
    Edge values are remembered only if they carry no gradient; with one they are computed by PyG every time.
    """
    parameters = inspect.signature(original).parameters
    names, defaults = tuple(parameters), tuple(p.default for p in parameters.values())

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        # Signature.bind would take longer than the rest of this function.
        given = len(args)
        full = (*args, *map(kwargs.get, names[given:], defaults[given:]))
        edges, values, *rest = full
        if not (kwargs.keys() <= set(names[given:]) and _can_remember(edges, values, rest)):
            return original(*args, **kwargs)
        key, owners = (original.__name__, *rest), owners_of(edges)
        try:
            found = _remember(original, owners, edges, values, rest, key)
        except (IndexError, RuntimeError, TypeError, ValueError):
            found = None  # PyG has words of its own for all that it was given, if that is no better
        if found is None:
            return original(*args, **kwargs)
        if current.outcome is not None and not (values is not None and values.requires_grad):
            current.outcome[2] = True  # PyG's forward() alone would make all of it
        return found

    return wrapper


def wide(index):
    """Indices or offsets in int64, for code of PyG's: torch's scatters have wrong gradients for int32 on the CPU, and
    torch_scatter takes none."""
    return index.long() if isinstance(index, Tensor) and index.dtype == torch.int32 else index


def _can_remember(edges, values, rest) -> bool:
    if touch.transforming() or touch.tracing() or modes.proxied():
        return False  # a trace would hold what is remembered as a constant
    if isinstance(edges, EdgeIndex) and torch.is_inference_mode_enabled():
        return False  # PyG takes one that was made outside that mode apart for an error
    if not isinstance(edges, Tensor) or (edges.is_floating_point() and edges.requires_grad):
        return False
    if not (values is None or isinstance(values, Tensor)):
        return False
    return _are_constants(rest)


_CONSTANTS = (type(None), int, float, str, bool, torch.dtype, tuple)


def _are_constants(values) -> bool:
    return all(isinstance(value, _CONSTANTS) for value in values)


def _remember(original, owners, edges, values, rest, key):
    """What `original` makes: edges that are one object whatever the values, and new values."""
    first = _kept(owners, key)
    if first is None:
        of_edges = _kept(owners, (_EDGES, *key))
        if values is None:
            return _made(original, owners, (edges, None, *rest), key, of_edges)
        first = of_edges
    elif values is None:
        return first
    if not values.requires_grad:
        both = owners + owners_of(values)
        found = _kept(both, key) or _made(original, both, (edges, values, *rest), key, first, owners)
    else:
        if first is None and (wide(edges) is not edges or torch.is_inference_mode_enabled()):
            first = _made(original, owners, (edges, None, *rest), key)
        found = original(wide(edges), values, *rest)
        if first is not None:
            return first[0], found[1]
        if found[0] is not owners[0]:
            note_origin(found[0], owners)
    if first is None:
        _keep(owners, (_EDGES, *key), (found[0], None))
    return found


def _kept(owners, key):
    """What was kept under that key, if nobody has written into it: the layer's code may have."""
    entry = derived.get(owners, key)
    if entry is None:
        return None
    found, stamps = entry
    for item, old in zip(found, stamps, strict=True):
        if old is not None and stamp(item) != old:
            return None
    return tuple([owners[0] if item is _OWNER else item for item in found])


def _made(original, owners, args, key, first=None, of_edges=None):
    """What `original` makes now, with the edges of `first`. `of_edges`: the owners of edges, if not all."""
    with modes.outside_inference():  # and nothing here has a gradient
        edges, values = original(*args)
    if first is not None:
        norms.move(edges, first[0], values)
        edges = first[0]
    elif edges is not owners[0]:
        note_origin(edges, of_edges or owners)
    found = edges, values
    _keep(owners, key, found)
    return found


def _keep(owners, key, found) -> None:
    kept: list = []
    stamps: list[tuple | None] = []
    for item in found:
        # An owner inside its own entry would keep itself alive, and so would a view of one.
        if item is owners[0]:
            kept.append(_OWNER)
            stamps.append(None)
        elif item is None:
            kept.append(None)
            stamps.append(None)
        elif any(item is owner or touch.base_of(item) is owner for owner in owners):
            return
        else:
            kept.append(item)
            stamps.append(stamp(item))
    derived.put(owners, key, (kept, stamps))


def once_per_matrix(original: Callable, other: Callable | None = None) -> Callable:
    """A function (SparseTensor, constants ...) -> SparseTensor, computed once per matrix whose values need no gradient.

    Each call returns a new matrix, but of the same tensors, so that what is derived from them is found again.
    Other arguments go to `other`, by default the function itself.
    """
    other = original if other is None else other

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        adj, constants = (args or (None,))[0], (*args[1:], *kwargs.values())
        if not isinstance(adj, SparseTensor) or not _are_constants(constants):
            return other(*args, **kwargs)
        values = adj.storage.value()
        if values is not None and values.requires_grad:
            return other(*args, **kwargs)
        owners = owners_of(adj) if values is None else (*owners_of(adj), values)
        key = (original.__name__, adj.size(0), adj.size(1), *constants, tuple(kwargs))
        found = derived.get(owners, key)
        if found is None or tuple(map(stamp, found.parts)) != found.stamps:
            with modes.outside_inference(grad=False):
                found = _Matrix.of(original(*args, **kwargs), adj)
            if found.made is not None:
                note_origin(found.made, owners_of(adj))
            derived.put(owners, key, found)
        return found.matrix(adj)

    return wrapper


class _Matrix(NamedTuple):
    """A matrix made of another one, without what the two share: that would keep an owner of the entry alive.

    made : the matrix, or None where it has the structure of the one it was made of.
    parts, stamps : its own tensors, and what they were when it was made.
    """

    made: Any
    parts: tuple[Tensor, ...]
    stamps: tuple

    @classmethod
    def of(cls, made, adj) -> _Matrix:
        shared = made.storage.col() is adj.storage.col()
        parts = (made.storage.value(),) if shared else (*owners_of(made), made.storage.value())
        parts = tuple(part for part in parts if part is not None)
        return cls(None if shared else made, parts, tuple(map(stamp, parts)))

    def matrix(self, adj):
        """The matrix as a new object, given the one it was made of."""
        if self.made is None:
            return adj.set_value(self.parts[0] if self.parts else None, layout="coo")
        return self.made.set_value(self.made.storage.value(), layout="coo")


def softmax(src, index, ptr=None, num_nodes=None, dim=0):
    """torch_geometric.utils.softmax on our kernel where the edges are those of the current call."""
    call = current.call
    if call is not None and isinstance(index, Tensor) and takes(src) and dim in (0, -src.dim()):
        try:
            graph = call.graph(index, num_nodes)
        except Unsupported:
            graph = None
        if graph is not None and src.shape[0] == graph.nnz:
            return softmax_of_edges(graph, src)
    return utils.softmax(src, wide(index), wide(ptr), num_nodes, dim)


def scatter(src, index, dim=0, dim_size=None, reduce="sum"):
    """torch_geometric.utils.scatter as a reduction over the edges of each destination, where it is one."""
    call = current.call
    out = None if call is None or dim_size is None else call.reduce(src, index, dim_size, reduce, dim)
    return utils.scatter(src, wide(index), dim, dim_size, reduce) if out is None else out


def spmm(src, other, reduce: str = "sum"):
    """torch_geometric.utils.spmm on our kernel: `src` a torch.sparse or SparseTensor adjacency."""
    out = refused = None
    try:
        out = _spmm(src, other, reduce)
    except Unsupported as error:
        refused = str(error)
    if current.call is not None:
        current.call.used |= out is not None
        current.call.refused = refused
    return utils.spmm(src, other, reduce) if out is None else out


def _spmm(src, other, reduce):
    reduce = "sum" if reduce == "add" else reduce
    if not takes(other):
        raise Unsupported(refusal(other))
    matrix = isinstance(src, SparseTensor) or utils.is_torch_sparse_tensor(src)
    if isinstance(src, EdgeIndex) or not matrix or reduce not in ("sum", "mean", "max", "min"):
        raise Unsupported(f"spmm() of {type(src).__name__} with reduce={reduce!r}")
    values = values_of(src)
    if isinstance(src, SparseTensor):
        if src.nnz() == 0:
            raise Unsupported("no edges")  # PyG's zeros carry no gradient
        if other.dim() > 2:
            return _spmm_batched(src, other, reduce)
        if values is not None and not values.is_complex():
            values = values.to(other.dtype)  # as PyG and torch_sparse do
    if values is not None and (values.dim() != 1 or values.dtype != other.dtype):
        raise Unsupported("a matrix of several values per edge, or of another dtype than the features")
    if values is not None and values.requires_grad and not isinstance(src, SparseTensor):
        raise Unsupported("a gradient to a torch.sparse matrix")  # it is one too: PyG's
    if other.dim() != 2 or other.shape[0] != src.size(1):
        raise Unsupported(f"features of shape {tuple(other.shape)}")
    graph, values = from_sparse(src), _unless_ones(src, values)
    if values is not None and reduce == "sum":
        return norms.weighted_sum(graph, other, src, values)
    return ops.spmm(graph, other, values, reduce=reduce)


def _spmm_batched(adj, other: Tensor, reduce: str) -> Tensor:
    """The product with each [nodes, F] of `other`, as torch_sparse gives it: one of all of them side by side."""
    *batch, rows, width = other.shape
    count = math.prod(batch)
    side_by_side = other.reshape(count, rows, width).transpose(0, 1).reshape(rows, count * width)
    out = _spmm(adj, side_by_side, reduce).view(adj.size(0), count, width).transpose(0, 1)
    return out.reshape(*batch, adj.size(0), width).contiguous()


def _unless_ones(src, values: Tensor | None) -> Tensor | None:
    """The values, or None where all are one (torch.sparse cannot leave them out)."""
    if values is None or values.requires_grad:
        return values
    owner = (values if isinstance(src, SparseTensor) else src,)  # torch.sparse makes a new alias at each values()
    ones = derived.get(owner, "ones")
    if ones is None:
        ones = bool((values == 1).all())
        derived.put(owner, "ones", ones)
    return None if ones else values


CHEB_NORM = pyg_nn.ChebConv.__norm__
_LAPLACIAN = CHEB_NORM.__globals__.get("get_laplacian")


@functools.wraps(CHEB_NORM)
def cheb_norm(conv, edge_index, num_nodes, edge_weight, normalization, lambda_max=None, dtype=None, batch=None):
    """ChebConv.__norm__(), computed once per edges object where nothing in it has a gradient."""
    original = type(conv)._gnnaccel_plain.__norm__
    replaced = original is not CHEB_NORM or CHEB_NORM.__globals__["get_laplacian"] is not _LAPLACIAN
    if replaced or batch is not None or is_compiling():
        return original(conv, edge_index, num_nodes, edge_weight, normalization, lambda_max, dtype, batch)
    return _cheb_norm(edge_index, edge_weight, num_nodes, normalization, lambda_max, dtype)


@memoised
def _cheb_norm(edge_index, edge_weight, num_nodes, normalization, lambda_max, dtype):
    return CHEB_NORM(None, edge_index, num_nodes, edge_weight, normalization, lambda_max, dtype)


_noted_norm = norms.noted(gcn_norm)
_OURS: dict[Callable, Callable] = {
    gcn_norm: once_per_matrix(_noted_norm, memoised(_noted_norm)),
    utils.add_self_loops: memoised(utils.add_self_loops),
    utils.remove_self_loops: memoised(utils.remove_self_loops),
    utils.add_remaining_self_loops: memoised(utils.add_remaining_self_loops),
    utils.softmax: softmax,
    utils.scatter: scatter,
    utils.spmm: spmm,
}
if WITH_TORCH_SPARSE:
    _OURS |= {function: once_per_matrix(function) for function in (torch_sparse.set_diag, torch_sparse.fill_diag)}


_REPLACED = Replacements(_OURS, _MODULES)
bind, uses_helpers = _REPLACED.bind, _REPLACED.are_named


def ours(function: Callable) -> Callable:
    """Our version of a helper of PyG's; any other function as it is."""
    return _OURS.get(function, function)


def _softmax_of_rows(src, index=None, ptr=None, num_nodes=None, dim=0):
    """torch_geometric.utils.softmax in a module that gathers and scatters with torch (gnnaccel.plain)."""
    rows = plain.rows_now()
    if rows is not None and isinstance(src, Tensor) and ptr is None and dim in (0, -src.dim()):
        found = rows.softmax(src, index, num_nodes)
        if found is not NotImplemented:
            return found
    return utils.softmax(src, index, ptr, num_nodes, dim)


plain.REPLACED.functions[utils.softmax] = _softmax_of_rows
plain.REPLACED.modules += _MODULES[:2]
