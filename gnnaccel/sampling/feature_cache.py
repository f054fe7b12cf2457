"""Features in host memory of which a GPU keeps the rows that are read most, and reads the others over the bus.

Both are rows of one tensor as far as a gather can tell: its first row lies where the lower of the two memories begins,
its rows go on through the other, and a table says at which of them each feature lies now. The memory that the GPU keeps
begins a whole number of rows from the host's, and what is in between belongs to neither and is never read. So a gather
is two of torch's, and nobody waits to know which rows are where.
"""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from gnnaccel.lower import bounds
from gnnaccel.sampling import host_memory


class FeatureCache:
    """Rows of features in host memory, the most read of which are kept on a GPU.

    Parameters
    ----------
    features : Tensor [n, ...], or a NumPy array
        On the CPU, contiguous; also a mapping of a file (numpy.memmap, Tensor.from_file).
    scores : Tensor [n]
        How often a row is read: rows of the highest scores are kept. The number of edges that a node is a source of
        says it before a sampler has run (``graph.indices.bincount(minlength=n)``); counted reads say it better.
    num_rows, num_bytes : int
        How much is kept: one of the two. A table of 8 bytes for each row of `features` comes on top of that.
    device : torch.device, optional
        Where; default: the current GPU.
    pin : bool, optional
        Pin `features` where they lie, so that the GPU reads the other rows itself. Else the host gathers and copies
        these, and waits for the GPU to know which they are. Default: yes, but for a numpy.memmap, which would be read
        whole, and for devices that are no GPU.

    Notes
    -----
    Under the flag PyG's NodeLoaders that GNNACCEL_SAMPLER=cuda has sample on the GPU, and DGL's with ``use_uva=True``,
    read their features through a living cache of them: make it before the first batch. A write into `features` that
    torch counts has the kept rows read anew; after others call `refresh`.

    Raises
    ------
    ValueError
        For features that are not contiguous or not on the CPU, scores of another length or with NaN, both sizes or
        none. TypeError: for another type, or one of more than 8 bytes. RuntimeError: where CUDA refuses to pin.

    Examples
    --------
    >>> import torch
    >>> from gnnaccel import sampling
    >>> x = torch.arange(8.0).view(4, 2)
    >>> cache = sampling.FeatureCache(x, torch.tensor([5, 1, 9, 2]), num_rows=2, device="cpu")
    >>> cache.rows.tolist()
    [0, 2]
    >>> cache[torch.tensor([2, 3])]
    tensor([[4., 5.],
            [6., 7.]])
    """

    def __init__(
        self,
        features: Tensor | Any,
        scores: Tensor,
        *,
        num_rows: int | None = None,
        num_bytes: int | None = None,
        device: torch.device | str | None = None,
        pin: bool | None = None,
    ):
        is_file = "numpy" in sys.modules and isinstance(features, sys.modules["numpy"].memmap)
        if not isinstance(features, Tensor):
            features = _of_numpy(features)
        self.features = features.detach()
        self.device = _device(device)
        _check(self.features, scores)
        self._given = features
        self._row_bytes = math.prod(self.features.shape[1:]) * self.features.element_size()
        kept = _kept(num_rows, num_bytes, self._row_bytes, len(self.features))
        self.rows: Tensor = torch.topk(scores.flatten(), kept).indices.sort().values.cpu()
        """Numbers of the rows that are kept [num_rows], ascending."""
        reads = self.device.type == "cuda" and not is_file if pin is None else pin and self.device.type == "cuda"
        self._pinned: host_memory.Pinned | None = None
        is_aligned = self.features.data_ptr() % self.features.element_size() == 0
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            if reads and is_aligned and self.features.numel():
                self._pinned = host_memory.pin(self.features)
                self._lay_out_together()
            else:
                self._kept = self.features.new_empty((kept, *self.features.shape[1:]), device=self.device)
                self._places = torch.full((len(self.features),), -1)
                self._places[self.rows] = torch.arange(kept)
        self.refresh()
        if self._pinned is not None:
            host_memory.note_cache(self.features, self.device, self)

    def _lay_out_together(self) -> None:
        row, kept, host = self._row_bytes, len(self.rows), self.features.data_ptr()
        self._memory = torch.empty((kept + 1) * row, dtype=torch.uint8, device=self.device)
        self._stream = torch.cuda.current_stream(self.device)
        shift = (host - self._memory.data_ptr()) % row
        mine = self._memory.data_ptr() + shift
        low = min(host, mine)
        self._kept = self._memory[shift : shift + kept * row].view(self.features.dtype).view(
            kept, *self.features.shape[1:]
        )  # fmt: skip
        end = max(host + len(self.features) * row, mine + kept * row)
        self._all = host_memory.at_address(low, (end - low) // row, self.features, self.device)
        self._places = torch.arange(len(self.features), device=self.device) + (host - low) // row
        self._places[self.rows.to(self.device)] = torch.arange(kept, device=self.device) + (mine - low) // row

    def refresh(self) -> None:
        """Read the kept rows anew, after a write into the features that torch does not count (through NumPy, ``.data``,
        or the file)."""
        self._version = self._count()
        step = max(1, bounds.CACHE_CHUNK_BYTES // max(1, self._row_bytes))
        for start in range(0, len(self.rows), step):
            some = self.rows[start : start + step]
            self._kept[start : start + step] = self.features.index_select(0, some).to(self.device)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # another stream may be the one that reads

    def __getstate__(self) -> dict[str, Any]:
        if self._pinned is not None:  # what spans both memories, and all between them, must not be read as a whole
            raise TypeError(
                "FeatureCache: rows that a GPU reads in host memory cannot be copied or pickled: make another cache in "
                "the process that reads them, or this one with pin=False"
            )
        return self.__dict__

    def _count(self) -> int:
        return -1 if self._given.is_inference() else self._given._version

    def gather(self, index: Tensor) -> Tensor:
        """features[index] on the cache's device.

        Parameters
        ----------
        index : Tensor [m], int32 or int64
            On any device. Out of range it is torch's error, which on a GPU ends the process's use of CUDA.

        Returns
        -------
        Tensor [m, ...]
            As soon as the device's current stream has come so far.
        """
        if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64) or index.dim() != 1:
            got = f"{index.dtype}, shape {tuple(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(f"FeatureCache.gather: index: expected a Tensor [m] of int32 or int64, got {got}")
        if self._count() != self._version:
            self.refresh()
        return self._gathered_by_host(index) if self._pinned is None else self._read(index)

    __getitem__ = gather

    def __len__(self) -> int:
        return len(self.features)

    def _read(self, index: Tensor) -> Tensor:
        stream = torch.cuda.current_stream(self.device)
        if stream != self._stream:  # on which their memory may be somebody else's once this object is gone
            self._memory.record_stream(stream)
            self._places.record_stream(stream)
        places = self._places.index_select(0, index.to(self.device, non_blocking=True))
        return self._all.index_select(0, places).view(self.features.dtype).view(-1, *self.features.shape[1:])

    def _gathered_by_host(self, index: Tensor) -> Tensor:
        index = index.to("cpu", torch.int64)
        places = self._places.index_select(0, index)
        there = (places >= 0).nonzero().flatten()
        if len(there) == len(index):
            return self._kept.index_select(0, places.to(self.device))
        others = (places < 0).nonzero().flatten()
        read = self.features.index_select(0, index[others])
        if self.device.type == "cuda":
            read, others, there, places = (t.pin_memory() for t in (read, others, there, places[there]))
        else:
            places = places[there]
        out = self._kept.new_empty((len(index), *self.features.shape[1:]))
        out.index_copy_(0, others.to(self.device, non_blocking=True), read.to(self.device, non_blocking=True))
        if len(there):
            some = self._kept.index_select(0, places.to(self.device, non_blocking=True))
            out.index_copy_(0, there.to(self.device, non_blocking=True), some)
        return out


def _of_numpy(features: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # a mapping for reading: nobody writes here
        try:
            return torch.from_numpy(features)
        except TypeError as error:
            raise TypeError(f"FeatureCache: features: expected a Tensor or a NumPy array: {error}") from None


def _device(given: torch.device | str | None) -> torch.device:
    device = torch.device("cuda" if given is None else given)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("FeatureCache: device: torch finds no CUDA GPU here")
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def _check(features: Tensor, scores: Tensor) -> None:
    if features.device.type != "cpu" or not features.dim() or not features.is_contiguous():
        raise ValueError(
            "FeatureCache: features: expected a contiguous tensor [n, ...] on the CPU, got "
            f"{tuple(features.shape)}, strides {features.stride()} on {features.device}"
        )
    if features.element_size() > bounds.ELEMENT_BYTES:
        raise TypeError(
            f"FeatureCache: features: expected a dtype of up to {bounds.ELEMENT_BYTES} bytes, got {features.dtype}"
        )
    if not isinstance(scores, Tensor) or scores.shape != features.shape[:1]:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"FeatureCache: scores: expected a Tensor [{len(features)}], got {got}")
    if scores.is_floating_point() and bool(scores.isnan().any()):
        raise ValueError("FeatureCache: scores: expected numbers, got NaN")


def _kept(num_rows: int | None, num_bytes: int | None, row_bytes: int, most: int) -> int:
    if (num_rows is None) == (num_bytes is None):
        raise ValueError("FeatureCache: expected one of num_rows and num_bytes")
    size = num_rows if num_bytes is None else num_bytes // max(1, row_bytes)
    assert size is not None
    if size < 0:
        raise ValueError(f"FeatureCache: num_rows, num_bytes: expected a size of 0 or more, got {size}")
    return min(size, most)
