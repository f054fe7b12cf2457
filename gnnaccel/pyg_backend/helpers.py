"""Our versions of the PyG helpers a layer calls: memoised self-loops and gcn_norm, softmax and spmm on our ops.

`bind` gives a method of a layer these versions by running its code with globals that look each name up in the
layer's own module first and swap PyG's helper for ours. Nothing in torch_geometric is changed, layers that are
not accelerated never meet them, and a helper that the user replaced stays the user's.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable

import torch
from torch import Tensor
from torch_geometric import EdgeIndex, utils
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import SparseTensor

from gnnaccel import ops
from gnnaccel.graph.cache import derived, stamp
from gnnaccel.graph.structure import Graph
from gnnaccel.pyg_backend.graph import Edges, Unsupported, from_sparse, owners_of, values_of

_OWNER = object()  # in a remembered result: the very edges that were given
FEATURE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class _Current(threading.local):
    """What the methods of a layer tell each other during one call on this thread.

    hidden : its forward() will not show the attention weights to anybody.
    """

    call: Call | None = None
    hidden: bool = False


current = _Current()


class Call:
    """A context in which our helpers may use the graph of one propagate(); notes whether one of them did.

    destinations : the index tensor handed to the layer's code, where it was made for this call.
    """

    __slots__ = ("_graph", "_outer", "destinations", "edges", "used")

    def __init__(self, edges: Edges):
        self.edges = edges
        self.used = False
        self.destinations: Tensor | None = None
        self._graph: Graph | None = None
        self._outer: Call | None = None

    def __enter__(self) -> Call:
        self._outer, current.call = current.call, self
        return self

    def __exit__(self, *exception) -> None:
        current.call = self._outer

    def graph(self, index: Tensor, num_dst: int | None) -> Graph | None:
        """The Graph whose edges end at `index`, or None if that is not this call's edges."""
        if index is not self.destinations:
            if self.edges.is_sparse:
                return None
            own = self.edges.edge_index[self.edges.sides[0]]
            if index.data_ptr() != own.data_ptr() or index.shape != own.shape or index.stride() != own.stride():
                return None
        if self._graph is None:
            side = self.edges.sides[0]
            if self.edges.size[side] is None:
                self.edges.size[side] = num_dst
            self._graph = self.edges.graph()
        return self._graph if num_dst in (None, self._graph.num_rows) else None


def takes(x) -> bool:
    """True for a tensor our ops take as a feature."""
    return (
        isinstance(x, Tensor)
        and x.dtype in FEATURE_DTYPES
        and x.layout is torch.strided
        and (x.dtype != torch.float16 or x.is_cuda)
    )


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
        rest_of = zip(names[given:], defaults[given:], strict=True)
        full = (*args, *(kwargs.get(name, default) for name, default in rest_of))
        edges, values, *rest = full
        if any(name not in names[given:] for name in kwargs) or not _can_remember(edges, values, rest):
            return original(*args, **kwargs)
        key = (original.__name__, *rest)
        found = _remember(original, (edges,), (edges, None, *rest), key)
        if values is None:
            return found
        if values.requires_grad:
            return found[0], original(edges, values, *rest)[1]
        return found[0], _remember(original, (edges, values), (edges, values, *rest), key)[1]

    return wrapper


def _can_remember(edges, values, rest) -> bool:
    if isinstance(edges, SparseTensor):
        return False  # torch_sparse is functional: each call makes a new matrix, whose parts we find again
    if not isinstance(edges, Tensor) or (edges.is_floating_point() and edges.requires_grad):
        return False
    if not (values is None or isinstance(values, Tensor)):
        return False
    return all(value is None or isinstance(value, (int, float, str, bool, torch.dtype, tuple)) for value in rest)


def _remember(original, owners, args, key):
    owners = sum((owners_of(owner) for owner in owners), ())
    entry = derived.get(owners, key)
    if entry is not None:
        found, stamps = entry
        # The layer's code may have written into what it was given.
        if all(item is None or item is _OWNER or stamp(item) == old for item, old in zip(found, stamps, strict=True)):
            return tuple(owners[0] if item is _OWNER else item for item in found)
    # Outside inference mode, or the result could not be used in a later training step.
    with torch.inference_mode(False), torch.no_grad():
        found = tuple(original(*args))
    # An owner inside its own entry would keep itself alive.
    kept = tuple(_OWNER if item is owners[0] else item for item in found)
    derived.put(owners, key, (kept, tuple(stamp(item) if isinstance(item, Tensor) else None for item in kept)))
    return found


def softmax(src, index, ptr=None, num_nodes=None, dim=0):
    """torch_geometric.utils.softmax on our kernel where the edges are those of the current call."""
    call = current.call
    if call is not None and isinstance(index, Tensor) and takes(src) and dim in (0, -src.dim()):
        try:
            graph = call.graph(index, num_nodes)
        except Unsupported:
            graph = None
        if graph is not None and src.shape[0] == graph.nnz:
            return ops.edge_softmax(graph, src)
    return utils.softmax(src, index, ptr, num_nodes, dim)


def spmm(src, other, reduce: str = "sum"):
    """torch_geometric.utils.spmm on our kernel: `src` a torch.sparse or SparseTensor adjacency."""
    try:
        out = _spmm(src, other, reduce)
    except Unsupported:
        return utils.spmm(src, other, reduce)
    if current.call is not None:
        current.call.used = True
    return out


def _spmm(src, other, reduce):
    reduce = "sum" if reduce == "add" else reduce
    if isinstance(src, EdgeIndex) or reduce not in ("sum", "mean", "max", "min") or not takes(other):
        raise Unsupported("operands")
    if not isinstance(src, SparseTensor) and not utils.is_torch_sparse_tensor(src):
        raise Unsupported("operands")
    values = values_of(src)
    if values is not None and (values.requires_grad or values.dim() != 1 or values.dtype != other.dtype):
        raise Unsupported("values")  # a gradient to a sparse matrix is a sparse matrix: PyG's
    if other.dim() != 2 or other.shape[0] != src.size(1):
        raise Unsupported("operands")
    return ops.spmm(from_sparse(src), other, _unless_ones(src, values), reduce=reduce)


def _unless_ones(src, values: Tensor | None) -> Tensor | None:
    """The values, or None where all are one (torch.sparse cannot leave them out)."""
    if values is None:
        return None
    owner = (values if isinstance(src, SparseTensor) else src,)  # torch.sparse makes a new alias at each values()
    ones = derived.get(owner, "ones")
    if ones is None:
        ones = bool((values == 1).all())
        derived.put(owner, "ones", ones)
    return None if ones else values


_OURS: dict[Callable, Callable] = {
    gcn_norm: memoised(gcn_norm),
    utils.add_self_loops: memoised(utils.add_self_loops),
    utils.remove_self_loops: memoised(utils.remove_self_loops),
    utils.add_remaining_self_loops: memoised(utils.add_remaining_self_loops),
    utils.softmax: softmax,
    utils.spmm: spmm,
}


class Globals(dict):
    """The globals of a function, with some functions replaced at each look-up (so later changes count).

    Modules of torch_geometric are seen through a view that replaces them too: ``utils.softmax``.
    """

    def __init__(self, namespace: dict, replacements: dict[Callable, Callable]):
        # The interpreter reads these two straight from the dict when the function is made.
        super().__init__({name: namespace[name] for name in ("__name__", "__builtins__") if name in namespace})
        self._namespace = namespace
        self._replacements = replacements

    def __getitem__(self, name):
        return _seen(self._namespace[name], self._replacements)


class _View:
    """A module of torch_geometric, seen through replacements."""

    def __init__(self, module: types.ModuleType, replacements: dict[Callable, Callable]):
        self.__dict__.update(_module=module, _replacements=replacements)

    def __getattr__(self, name):
        return _seen(getattr(self._module, name), self._replacements)


def _seen(value, replacements: dict[Callable, Callable]):
    if isinstance(value, types.FunctionType):
        return replacements.get(value, value)
    return _View(value, replacements) if _is_pyg(value) else value


def _is_pyg(value) -> bool:
    return isinstance(value, types.ModuleType) and value.__name__ in ("torch_geometric", "torch_geometric.utils")


def uses_helpers(function) -> bool:
    """True if the code of `function` names one of PyG's helpers."""
    if not isinstance(function, types.FunctionType):
        return False
    names = function.__code__.co_names
    values = [function.__globals__.get(name) for name in names]
    if any(isinstance(value, types.FunctionType) and value in _OURS for value in values):
        return True
    return any(map(_is_pyg, values)) and any(helper.__name__ in names for helper in _OURS)


def bind(function: types.FunctionType, replacements: dict[Callable, Callable] | None = None) -> types.FunctionType:
    """A copy of `function` that finds our helpers (or other `replacements`) where it names PyG's."""
    bound = types.FunctionType(
        function.__code__,
        Globals(function.__globals__, _OURS if replacements is None else replacements),
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound
