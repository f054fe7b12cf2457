"""What sampling takes and gives as tensors: checks, the binary's tuples, the table that numbers nodes."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from gnnaccel._library import DTYPES, INDEX_TYPES, pointer
from gnnaccel.lower import bounds

CPU = torch.device("cpu")


def index_array(op: str, name: str, value, dtype: torch.dtype | None = None, device: torch.device = CPU) -> Tensor:
    """`value`, contiguous: a 1-D tensor on `device`, int32 or int64 (or just `dtype`).

    Raises
    ------
    TypeError, ValueError
        For anything else.
    """
    wanted = "int32 or int64" if dtype is None else str(dtype)
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name}: expected a torch.Tensor of {wanted}, got {type(value).__name__}")
    if value.dtype not in INDEX_TYPES or dtype not in (None, value.dtype):
        raise TypeError(f"{op}: {name}: expected {wanted}, got {value.dtype}; convert it with .to(...)")
    return _plain(op, name, value, device)


def _plain(op: str, name: str, value: Tensor, device: torch.device) -> Tensor:
    if value.dim() != 1:
        raise ValueError(f"{op}: {name}: expected one dimension, got shape {tuple(value.shape)}")
    if value.device != device:
        wanted, move = ("the CPU", ".cpu()") if device == CPU else (f"{device}, as indptr is", f'.to("{device}")')
        raise ValueError(f"{op}: {name}: expected a tensor on {wanted}, got one on {value.device}; move it with {move}")
    if value.requires_grad:
        value = value.detach()
    return value if value.is_contiguous() else value.contiguous()


def device_of(indptr) -> torch.device:
    """Where to sample: that of the first tensor. Of what is no tensor, Relation says so."""
    return indptr.device if isinstance(indptr, Tensor) else CPU


def length(op: str, name: str, value: Tensor, expected: int, what: str) -> None:
    """ValueError unless `value` has as many elements."""
    if value.numel() != expected:
        raise ValueError(f"{op}: {name}: expected {expected} elements ({what}), got {value.numel()}")


class Relation:
    """The edges of one type, by destination, checked in shape and dtype, and the tensors that belong to them."""

    def __init__(
        self, op: str, indptr, indices, edge_weight=None, edge_time=None, of: str = "", device: torch.device = CPU
    ):
        self.indptr = index_array(op, f"indptr{of}", indptr, device=device)
        self.indices = index_array(op, f"indices{of}", indices, self.indptr.dtype, device)
        if self.indptr.numel() == 0:
            raise ValueError(f"{op}: indptr{of}: expected a first element, 0, got none")
        self.num_rows, self.nnz = self.indptr.numel() - 1, self.indices.numel()
        self.weight = self.time = None
        if edge_weight is not None:
            self.weight = self._weights(op, f"edge_weight{of}", edge_weight, device)
        if edge_time is not None:
            self.time = index_array(op, f"edge_time{of}", edge_time, torch.int64, device)
            length(op, f"edge_time{of}", self.time, self.nnz, "edges")

    def _weights(self, op: str, name: str, value, device: torch.device) -> Tensor:
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name}: expected a torch.Tensor, got {type(value).__name__}")
        if value.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{op}: {name}: expected float32 or float64, got {value.dtype}; convert it with .float()")
        value = _plain(op, name, value, device)
        length(op, name, value, self.nnz, "edges")
        return value

    def tuple(self, source: int, target: int, fanouts: Sequence[int]) -> tuple:
        """The binary's (kernels.h: Relation)."""
        weight_type = DTYPES[torch.float32 if self.weight is None else self.weight.dtype]
        arrays = map(pointer, (self.indptr, self.indices, self.weight, self.time))
        return (*arrays, self.num_rows, self.nnz, source, target, weight_type, list(fanouts))


class _Scratch(threading.local):
    """The table of one thread: an entry per node, valid for the call whose stamp it bears (sampling.h: Table)."""

    table: Tensor | None = None
    stamp = 0


_scratch = _Scratch()


def table(num_nodes: int) -> tuple[int, int]:
    """Address of a table for so many nodes, which this thread keeps for its next call, and the stamp of this call."""
    if _scratch.table is None or _scratch.table.numel() < num_nodes or _scratch.stamp == (1 << 32) - 1:
        with torch.inference_mode(False):
            _scratch.table, _scratch.stamp = torch.zeros(num_nodes, dtype=torch.int64, device=CPU), 0
    _scratch.stamp += 1
    return pointer(_scratch.table), _scratch.stamp


def tensors(arrays: list, dtype: torch.dtype) -> list[Tensor]:
    """The binary's arrays, not copied."""
    return [torch.frombuffer(a, dtype=dtype) if len(a) else torch.empty(0, dtype=dtype, device=CPU) for a in arrays]


def random_seed(op: str, seed: int | None) -> int:
    """`seed`, or one drawn from torch's generator, so that torch.manual_seed makes batches repeatable."""
    if seed is None:
        return int(torch.empty((), dtype=torch.int64, device=CPU).random_())
    if not isinstance(seed, int):
        raise TypeError(f"{op}: seed: expected an int, got {type(seed).__name__}")
    return seed & (1 << 64) - 1


def fanouts(op: str, value, least: int = -1, name: str = "num_neighbors") -> list[int]:
    """A list of numbers, one per hop, none below `least`. TypeError or ValueError for anything else."""
    if isinstance(value, (int, str)) or not isinstance(value, Sequence):
        raise TypeError(f"{op}: {name}: expected a list with one int per hop, got {value!r}")
    counts = []
    for count in value:
        try:
            counts.append(operator.index(count))
        except TypeError:
            raise TypeError(f"{op}: {name}: expected ints, got {count!r}") from None
        if not least <= counts[-1] <= bounds.INT32_MAX:
            what = "-1 (all neighbours) or a number of them" if least else "numbers of nodes"
            raise ValueError(f"{op}: {name}: expected {what}, got {count}")
    return counts
