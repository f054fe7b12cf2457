"""global_max_pool on the CPU, and the maxima and minima of other readouts, as reductions of segments.

A batch keeps the nodes of a graph together, so its `batch` vector ascends, and a graph's nodes are a segment. torch's
scatter_reduce takes ten times as long for their maxima and the gradients of these (molecules, 2,810 nodes of 64
features: 1.77 ms, and 0.18 by segments). Sums and means are left alone: there scatter_add is the quicker one.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch_geometric.nn.pool import glob as _module
from torch_geometric.utils import scatter as _plain

from gnnaccel import _operators, ops, report
from gnnaccel.graph.cache import derived

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
    if _operators.watched() or type(index) is not Tensor:
        return None
    if not _operators.dense(src) or not src.is_cpu or src.dtype not in _DTYPES or src.dim() < 1:
        return None
    fits = index.dim() == 1 and index.dtype == torch.int64 and index.is_cpu and 0 < len(index) == src.shape[0]
    if not fits or dim not in (0, -src.dim()):
        return None
    if (found := derived.get((index,), (_KIND, dim_size))) is None:
        found = _found(index, dim_size)
        derived.put((index,), (_KIND, dim_size), found)
    return found[0]


def _found(index: Tensor, dim_size: int | None) -> tuple[Tensor | None]:
    if int(index[0]) < 0 or not bool((index[1:] >= index[:-1]).all()):
        return (None,)
    count = int(index[-1]) + 1 if dim_size is None else dim_size
    if int(index[-1]) >= count:
        return (None,)
    offsets = index.new_zeros(count + 1)
    torch.cumsum(torch.bincount(index, minlength=count), 0, out=offsets[1:])
    return (offsets,)


def enable() -> None:
    """Let PyG's functions that read out batches go by this module."""
    _module.scatter = _scatter


def disable() -> None:
    """Give them PyG's own back."""
    _module.scatter = _plain
