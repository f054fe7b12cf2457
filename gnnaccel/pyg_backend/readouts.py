"""Readouts of batches of graphs, as reductions of segments: global_max_pool on the CPU, and the maxima and minima of
other readouts, SoftmaxAggregation, and the softmax inside of Set2Set and of AttentionalAggregation.

A batch keeps the nodes of a graph together, so its `batch` vector ascends, and a graph's nodes are a segment. torch's
scatter_reduce takes ten times as long for their maxima and the gradients of these (molecules, 2,810 nodes of 64
features: 1.77 ms, and 0.18 by segments). Sums and means are left alone: there scatter_add is the quicker one. A softmax
is a dozen kernels of PyG's on CUDA, and as many in its backward pass; here it is one in each direction.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.aggr import attention as _attention
from torch_geometric.nn.aggr import set2set as _set2set
from torch_geometric.nn.pool import glob as _module
from torch_geometric.utils import scatter as _plain
from torch_geometric.utils import softmax as _plain_softmax

from gnnaccel import _operators, ops, report, touch
from gnnaccel.graph.cache import derived
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.modules import is_watched
from gnnaccel.ops.segment_softmax import Segments, segment_softmax
from gnnaccel.pyg_backend.graph import unserved
from gnnaccel.pyg_backend.touch import nn as pyg_nn

_KIND = "pyg.readout"
_REDUCES = {"max": "max", "amax": "max", "min": "min", "amin": "min"}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def _scatter(src: Tensor, index: Tensor, dim: int = 0, dim_size: int | None = None, reduce: str = "sum") -> Tensor:
    """torch_geometric.utils.scatter, of which the maximum or minimum of segments is ours."""
    if torch.jit.is_scripting():
        return _plain(src, index, dim, dim_size, reduce)
    else:  # which TorchScript does not compile
        return _by_segments(src, index, dim, dim_size, reduce)


def _by_segments(src: Tensor, index: Tensor, dim: int, dim_size: int | None, reduce: str) -> Tensor:
    if torch.compiler.is_compiling() or reduce not in _REDUCES:  # first: a clock cannot be traced
        return _plain(src, index, dim, dim_size, reduce)
    start = time.perf_counter()
    offsets = _offsets(src, index, dim, dim_size)
    if offsets is None:
        return _plain(src, index, dim, dim_size, reduce)
    out = ops.segment_reduce(src, offsets, _REDUCES[reduce], check=False)
    report.record(_KIND, start)
    return out


_scatter.__annotations__ = dict(_plain.__annotations__)  # for TorchScript, which reads types, not their names


def _offsets(src: Tensor, index: Tensor, dim: int, dim_size: int | None) -> Tensor | None:
    """Where segments begin and end; None for what is PyG's."""
    if touch.watched() or type(index) is not Tensor:
        return None
    if not _operators.dense(src) or not src.is_cpu or src.dtype not in _DTYPES:
        return None
    found = _segments(src, index, dim, dim_size)
    return None if found is None else found.segments.offsets


class _Found:
    """The segments of a `batch` vector, and how long the longest is."""

    __slots__ = ("_graph", "longest", "segments")

    def __init__(self, segments: Segments, longest: int):
        self.segments, self.longest = segments, longest
        self._graph: Graph | None = None

    def graph(self) -> Graph:
        """One whose rows they are, for ops that read no sources."""
        if self._graph is None:
            offsets, rows = self.segments.offsets, self.segments.rows
            with torch.inference_mode(False):
                self._graph = Graph(offsets, torch.arange(rows, device=offsets.device, dtype=offsets.dtype), None, rows)
        return self._graph


def _segments(src: Tensor, index: Tensor, dim: int, dim_size: int | None) -> _Found | None:
    """What is known of `index`, whose rows are those of `src`; None where they do not ascend. It is looked at once."""
    fits = index.dim() == 1 and index.dtype == torch.int64 and src.dim() > 0 and 0 < len(index) == src.shape[0]
    if not fits or index.device != src.device or dim not in (0, -src.dim()):
        return None
    if (found := derived.get((index,), (_KIND, dim_size))) is None:
        if index.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        found = (_found(index, dim_size),)
        derived.put((index,), (_KIND, dim_size), found)
    return found[0]


def _found(index: Tensor, dim_size: int | None) -> _Found | None:
    with torch.inference_mode(False), torch.no_grad():
        count = int(index[-1]) + 1 if dim_size is None else dim_size
        if count < 0:
            return None
        offsets = torch.searchsorted(index, torch.arange(count + 1, device=index.device))
        ascends = (index[1:] >= index[:-1]).all()
        # On CUDA the host waits for the list of numbers.
        numbers = [index[0], index[-1], ascends.long(), offsets.diff().amax() if count else ascends.long()]
        first, last, ascending, longest = torch.stack(numbers).tolist()
        if first < 0 or not ascending or last >= count:
            return None
        return _Found(Segments(offsets, len(index)), longest)


def _softmax_of_readout(
    src: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    num_nodes: int | None = None,
    dim: int = 0,
) -> Tensor:
    """torch_geometric.utils.softmax, of which that over segments is ours."""
    if torch.jit.is_scripting():
        return _plain_softmax(src, index, ptr, num_nodes, dim)
    else:  # which TorchScript does not compile
        return _softmax_by_segments(src, index, ptr, num_nodes, dim)


def _softmax_by_segments(src: Any, index: Any, ptr: Any, num_nodes: int | None, dim: int) -> Tensor:
    if torch.compiler.is_compiling() or ptr is not None or not _may_be_segments(src, index):
        return _plain_softmax(src, index, ptr, num_nodes, dim)
    start = time.perf_counter()
    found = _segments(src, index, dim, num_nodes)
    if found is None or (src.is_cuda and found.longest > bounds.SOFTMAX_ROWS):
        return _plain_softmax(src, index, ptr, num_nodes, dim)
    out = ops.edge_softmax(found.graph(), src)
    report.record(_KIND, start)
    return out


_softmax_of_readout.__annotations__ = dict(_plain_softmax.__annotations__)


def _may_be_segments(src: Any, index: Any) -> bool:
    """True for plain tensors that are worth a look: ends of edges, which are views, do not ascend, and are new tensors
    for each call. Under autocast exp() is of another dtype than 16-bit features."""
    if type(index) is not Tensor or touch.base_of(index) is not None or not _operators.usual(src):
        return False
    if unserved(src.device) is not None:
        return False
    return src.dtype in (torch.float32, torch.float64) and not index.is_inference()


def _call(self, x, index=None, ptr=None, dim_size=None, dim=-2, **others):
    """SoftmaxAggregation.__call__, which does the work of forward() on segments."""
    out = None
    if not torch.compiler.is_compiling() and ptr is None and not others and type(self) is pyg_nn.SoftmaxAggregation:
        out = _softmax_sum(self, x, index, dim_size, dim)
    return pyg_nn.Aggregation.__call__(self, x, index, ptr, dim_size, dim, **others) if out is None else out


def _softmax_sum(
    aggregation: pyg_nn.SoftmaxAggregation, x: Any, index: Any, dim_size: int | None, dim: int
) -> Tensor | None:
    if not _may_be_segments(x, index) or x.dim() != 2 or is_watched(aggregation) or "reduce" in vars(aggregation):
        return None
    start = time.perf_counter()
    found = _segments(x, index, dim, dim_size)
    if found is None or (x.is_cuda and found.longest > bounds.SOFTMAX_ROWS):
        return None
    constant = not aggregation.learn and aggregation.semi_grad
    out = segment_softmax(x, found.segments, aggregation.t, constant)
    if out is not None:
        report.record(_KIND, start)
    return out


def enable() -> None:
    """Let PyG's functions and modules that read out batches go by this module."""
    _module.scatter = _scatter
    _set2set.softmax = _attention.softmax = _softmax_of_readout
    pyg_nn.SoftmaxAggregation.__call__ = _call


def disable() -> None:
    """Give them PyG's own back."""
    _module.scatter = _plain
    _set2set.softmax = _attention.softmax = _plain_softmax
    if "__call__" in vars(pyg_nn.SoftmaxAggregation):
        del pyg_nn.SoftmaxAggregation.__call__
