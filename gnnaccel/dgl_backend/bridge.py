"""CUDA graphs with a DGL that was built for the CPU: the wheel on PyPI.

DGL's C++ keeps a graph's structure in host memory. Here an index (or an array on its way into or out of C++) carries
the device it is said to be on (device.py). Every call into C++ passes through a `_Carrier`: what goes in is in host
memory, and what comes out carries the device of what went in, as in DGL all arguments and results of a call share a
device. Arrays change sides where DGL's torch backend converts tensors. Node and edge features are plain CUDA tensors;
message passing runs on our kernels, on a copy of the structure that lives on the index (structure.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dgl
import torch

from gnnaccel.dgl_backend import touch
from gnnaccel.dgl_backend.block_index import made
from gnnaccel.dgl_backend.device import device_of, place, to_device, twin
from gnnaccel.dgl_backend.structure import forget_copies, known_structure, structure
from gnnaccel.dgl_backend.touch import cache_of
from gnnaccel.sampling import host_memory

_EDGES = "gnnaccel.edges"
_PINNED = "_gnnaccel_pinned"  # of an index: its graph is
NO_KERNEL = (
    "this DGL was built without CUDA, and gnnaccel has no CUDA kernel for this call ({}); move its arguments to the CPU"
)


def needed() -> bool:
    """True if torch has a GPU and DGL was built without CUDA."""
    if torch.version.cuda is None or touch.has_cuda():
        return False
    # It asks the driver's library: is_available() could start CUDA, which forked workers cannot take over.
    return torch.cuda.device_count() > 0


def _placed(result, device: torch.device):
    """`result` of a call into C++, carrying `device`."""
    if isinstance(result, (touch.NDArray, touch.ObjectBase)):
        place(result, device)
    elif isinstance(result, touch.Function):  # several results, which it gives one by one
        return lambda *args: _placed(result(*args), device)
    return result


def _find(args) -> torch.device | None:
    """The device that the first of `args` carries."""
    for arg in args:
        found = _find(arg) if type(arg) in (list, tuple) else device_of(arg)
        if found is not None:
            return found
    return None


class _Carrier:
    """A function of DGL's C++ whose results carry the device of its arguments."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        made(args)
        device = _find(args)
        return self.function(*args) if device is None else _placed(self.function(*args), device)


def to_array(original):
    """Tensor to DGL's array; what C++ reads is in host memory."""

    def convert(data):
        if not data.is_cuda:
            return original(data)
        return _placed(original(data.cpu()), data.device)

    return convert


def to_capsule(original):
    """The same for lists of sizes, which DGL makes tensors of on torch's default device."""
    return lambda data: original(data.cpu())


def to_array_for_write(original):
    """A kernel of DGL would write into a copy that nobody reads."""

    def convert(data):
        if data.is_cuda:
            raise dgl.DGLError(
                "gnnaccel: " + NO_KERNEL.format(f"it writes into a tensor of shape {tuple(data.shape)}, {data.dtype}")
            )
        return original(data)

    return convert


def from_array(original):
    """DGL's array to tensor, on the device the array carries."""

    def convert(array):
        device = device_of(array)
        tensor = original(array)
        return tensor if device is None else to_device(tensor, device)

    return convert


def copy_to(_original):
    """HeteroGraphIndex.copy_to, which would ask C++ for CUDA memory."""

    def copy_to(self, ctx):
        target = dgl.backend.to_backend_ctx(ctx)
        if target == (device_of(self) or torch.device("cpu")):
            return self
        copy = twin(self)
        if target.type == "cuda":
            place(copy, target)
            for etype in range(copy.number_of_etypes()):  # now, as DGL does: a loader's thread copies ahead
                structure(copy.get_relation_graph(etype))
        return copy

    return copy_to


def record_stream(original):
    def record_stream(self, stream):
        if device_of(self) is None:
            return original(self, stream)
        for etype in range(self.number_of_etypes()):
            for tensor in structure(self.get_relation_graph(etype)).arrays():
                tensor.record_stream(stream)
        return self

    return record_stream


def pin(_original):
    """HeteroGraphIndex.pin_memory_: a GPU that samples keeps a copy of the structure (samplers.py)."""

    def pin_memory_(self):
        if device_of(self) is not None:
            raise dgl.DGLError("The graph structure must be on CPU to be pinned.")
        setattr(self, _PINNED, True)
        return self

    return pin_memory_


def pinned_copy(_original):
    return lambda self: pin(None)(twin(self))


def unpin(_original):
    def unpin_memory_(self):
        vars(self).pop(_PINNED, None)
        if (graph := known_structure(self)) is not None:
            forget_copies(graph)
        return self

    return unpin_memory_


def is_pinned(_original):
    return lambda self: _PINNED in vars(self)


class _PinnedFeatures:
    """What DGL keeps with a column that it has pinned."""

    def __init__(self, tensor):
        self._pinned = host_memory.pin(tensor)

    def unpin_memory_(self) -> None:
        self._pinned = None


def _pin_features(tensor):
    """dgl.utils.pin_memory_inplace."""
    try:
        return _PinnedFeatures(tensor)
    except (RuntimeError, ValueError) as error:
        raise dgl.DGLError(f"Failed to pin memory in-place due to: {error}") from error


class _Filter:
    """dgl.utils.Filter, which DGL has for the GPU alone: which of other ids are among these."""

    def __init__(self, ids):
        self._ids = ids

    def find_included_indices(self, test):
        return torch.isin(test, self._ids).nonzero().squeeze(1)

    def find_excluded_indices(self, test):
        return torch.isin(test, self._ids, invert=True).nonzero().squeeze(1)


def _no_cache(*_args, **_options):
    raise dgl.DGLError("gnnaccel: this DGL was built without CUDA, and so has no GPU cache; leave gpu_cache out")


def context(original):
    def ctx(self):
        device = device_of(self)
        return original.fget(self) if device is None else dgl.utils.to_dgl_context(device)

    return property(ctx, doc=original.__doc__)


def init_by_constructor(original):
    """ObjectBase.__init_handle_by_constructor__, which wants the function itself."""

    def init(self, constructor, *args):
        made(args)
        device = _find(args)
        original(self, getattr(constructor, "function", constructor), *args)
        if device is not None:
            place(self, device)

    return init


def edges(original):
    """HeteroGraphIndex.edges that copies to the device once; the caller may write into what it gets."""

    def edges(self, etype, order=None):
        if device_of(self) is None:
            return original(self, etype, order)
        key = (_EDGES, int(etype), order)
        cache = cache_of(self)
        found = cache.get(key)
        if found is None:
            found = cache[key] = original(self, etype, order)
        return tuple(t.clone() for t in found)

    return edges


def segment_mm(original):
    """segment_mm by torch's products, as DGL's are in its CUDA build; `seglen` is read on the host."""

    def segment_mm(a, b, seglen):
        if not a.is_cuda:
            return original(a, b, seglen)
        if b.dim() != 3 or len(seglen) != len(b):
            raise ValueError(f"segment_mm: b: expected {len(seglen)} matrices, one a segment, got {tuple(b.shape)}")
        parts = torch.split(a, seglen.tolist()) if len(b) else ()
        return torch.cat([a.new_empty(0, b.shape[2]), *(part @ b[i] for i, part in enumerate(parts))])

    return segment_mm


def gather_mm(original):
    def gather_mm(a, b, idx_a=None, idx_b=None):
        if not a.is_cuda:
            return original(a, b, idx_a, idx_b)
        a = a if idx_a is None else a[idx_a]
        b = b if idx_b is None else b[idx_b]
        return torch.bmm(a.unsqueeze(1), b).squeeze(1)

    return gather_mm


def farthest_points(original):
    """Point sampling, which writes into arrays that it is handed as if to be read."""

    def sample(data, batch_size, sample_points, dist, start_idx, result):
        if not data.is_cuda:
            return original(data, batch_size, sample_points, dist, start_idx, result)
        found = result.cpu()
        original(data.cpu(), batch_size, sample_points, dist.cpu(), start_idx.cpu(), found)
        return result.copy_(found)

    return sample


def carriers() -> Iterator[tuple[Any, str, Any]]:
    """For all functions of C++. The graph of types and what it says stay in host memory, whatever they describe."""
    for module, name, value in touch.globals_of_dgl():
        if isinstance(value, touch.Function) and name != touch.METAGRAPH and not module.__name__.startswith("dgl._ffi"):
            yield module, name, _Carrier(value)


def of_gpus() -> Iterator[tuple[Any, str, Any]]:
    """For what DGL has for GPUs alone, wherever it was imported."""
    ours = {
        "gather_pinned_tensor_rows": host_memory.rows,
        "pin_memory_inplace": _pin_features,
        "is_pinned": host_memory.is_pinned,
        "Filter": _Filter,
        "GPUCache": _no_cache,
    }
    for module, name, _ in touch.globals_of_dgl():
        if name in ours:
            yield module, name, ours[name]
