"""Every check of an op's arguments. Messages name the op, the argument, what was expected and what came."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from gnnaccel import touch
from gnnaccel.graph.csr import Graph
from gnnaccel.program.shapes import broadcast

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def one_of(op: str, name: str, value, allowed) -> None:
    """ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{op}: {name}: expected one of {sorted(allowed)}, got {value!r}")


def renamed(old: str, new: str) -> None:
    """Say that a spelling goes away with the next release. To be called by the public function itself."""
    warnings.warn(f"{old} is {new} now, and will be refused in the next release", FutureWarning, stacklevel=3)


def graph(op: str, value) -> None:
    """TypeError unless `value` is a Graph."""
    if not isinstance(value, Graph):
        raise TypeError(
            f"{op}: graph: expected a gnnaccel.Graph, got {type(value).__name__}; "
            "use gnnaccel.as_graph for a DGL or PyG graph, or Graph.from_coo"
        )


def feature(op: str, name: str, value, rows: int, rows_name: str, device: torch.device) -> None:
    """Check one feature tensor: type, dtype, device, row count."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in _DTYPES:
        raise TypeError(f"{op}: {name}: expected a floating-point dtype, got {value.dtype}; convert it with .float()")
    if value.dtype == torch.float16 and value.device.type == "cpu":
        raise TypeError(f"{op}: {name}: float16 runs on CUDA only; use bfloat16 or float32 on the CPU")
    if value.device != device:
        raise ValueError(f"{op}: {name}: expected device {device} (the graph's), got {value.device}; move one of them")
    if value.layout != torch.strided:
        raise TypeError(f"{op}: {name}: expected a dense tensor, got layout {value.layout}; use .to_dense()")
    if value.dim() < 1 or value.shape[0] != rows:
        raise ValueError(f"{op}: {name}: expected {rows} rows ({rows_name}), got shape {tuple(value.shape)}")


def reads(op: str, *operands: tuple[str, str] | None, also: Callable | None = None, half: bool = False) -> Callable:
    """The check of an op that is called by its registered name, whose kernels read rows of these operands.

    Parameters
    ----------
    operands
        Name and rows, "rows", "cols" or "edges" of the graph, of each tensor behind the graph; None for those that are
        not looked at. All are of one dtype.
    also : callable
        Of the graph and the other arguments; for what else there is to refuse.
    half : bool
        It takes float16 on the CPU.
    """

    looked_at = [(i, f"num_{of}" if of != "edges" else "nnz") for i, (_, of) in _by_place(operands)]

    def check(graph, *args) -> None:
        dtype = value = None
        device = graph.device
        try:
            for i, rows in looked_at:
                value = args[i]
                if value is not None:
                    if dtype is None:
                        dtype = value.dtype
                    if value.size(0) != getattr(graph, rows) or value.dtype is not dtype or value.device != device:
                        break
            else:
                # One by one: to look for a dtype in a set takes longer.
                known = dtype is torch.float32 or dtype is torch.bfloat16 or dtype is torch.float64 or dtype is None
                if known or (dtype is torch.float16 and (half or device.type != "cpu")):
                    if also is not None:
                        also(graph, *args)
                    return
        except IndexError:  # no dimension
            pass
        _refuse(op, operands, graph, args, half)

    return check


def _refuse(op: str, operands, graph, args, half: bool) -> None:
    """Say what `reads` has found."""
    dtype = None
    for i, (name, of) in _by_place(operands):
        value = args[i]
        if value is None:
            continue
        dtype = value.dtype if dtype is None else dtype
        rows = graph.num_rows if of == "rows" else graph.num_cols if of == "cols" else graph.nnz
        feature(op, name, value.float() if half else value, rows, f"the graph's {of}", graph.device)
        if value.dtype is not dtype:
            raise TypeError(f"{op}: {name}: expected the dtype of the others ({dtype}), got {value.dtype}")


def _by_place(operands) -> list:
    """Those that are not None, by place."""
    return [(i, operand) for i, operand in enumerate(operands) if operand is not None]


def exactly(
    op: str, name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """TypeError or ValueError unless `value`, of an op that is called by its registered name, is of this shape, dtype
    and device."""
    if value.shape == shape and value.dtype is dtype and value.device == device:
        return
    if value.dtype.is_floating_point:
        feature(op, name, value, shape[0], "as the graph has them", device)
        features_of(op, name, value, shape[1:])
    if value.shape != shape:
        raise ValueError(f"{op}: {name}: expected shape {list(shape)}, got {tuple(value.shape)}")
    if value.device != device:
        raise ValueError(f"{op}: {name}: expected device {device} (the graph's), got {value.device}")
    raise TypeError(f"{op}: {name}: expected {dtype}, got {value.dtype}")


def heads_of(op: str, name: str, value: Tensor, rows: int, device: torch.device, dtypes) -> tuple[int, int]:
    """Heads and features of the tensor that the others of an op by its registered name are measured by."""
    if value.dim() != 3:
        raise ValueError(f"{op}: {name}: expected shape [{rows}, heads, features], got {tuple(value.shape)}")
    if value.dtype not in dtypes:
        feature(op, name, value, rows, "as the graph has them", device)
        raise TypeError(f"{op}: {name}: expected one of {list(map(str, dtypes))} on {device.type}, got {value.dtype}")
    exactly(op, name, value, (rows, *value.shape[1:]), value.dtype, device)
    return value.shape[1], value.shape[2]


def operands_of(op: str, name: str, lhs: Tensor | None, rhs: Tensor | None) -> None:
    """ValueError where a message or edge op lacks what it reads."""
    if lhs is None and name != "copy_rhs":
        raise ValueError(f"{op}: lhs: {name!r} reads it, got None")
    if rhs is None and name != "copy_lhs":
        raise ValueError(f"{op}: rhs: {name!r} reads it, got None")


def same_dtype(op: str, lhs: Tensor, rhs: Tensor, lhs_name: str, rhs_name: str) -> tuple[Tensor, Tensor]:
    """Both in one dtype: the wider one under autocast, as torch's own elementwise ops do; else TypeError."""
    if lhs.dtype == rhs.dtype:
        return lhs, rhs
    wide = common_dtype(op, lhs, rhs, lhs_name, rhs_name)
    return lhs.to(wide), rhs.to(wide)


def common_dtype(op: str, lhs: Tensor, rhs: Tensor, lhs_name: str, rhs_name: str) -> torch.dtype:
    """The dtype of `same_dtype`."""
    if lhs.dtype == rhs.dtype or torch.is_autocast_enabled(lhs.device.type):
        return torch.promote_types(lhs.dtype, rhs.dtype)
    raise TypeError(f"{op}: {rhs_name}: expected the dtype of {lhs_name} ({lhs.dtype}), got {rhs.dtype}")


def features_of(op: str, name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    """ValueError unless each row of `value` has this shape."""
    if tuple(value.shape[1:]) != tuple(shape):
        wanted = ", ".join(map(str, (value.shape[0], *shape)))
        raise ValueError(f"{op}: {name}: expected shape [{wanted}], got {tuple(value.shape)}")


def traced_offsets(op: str, offsets: Tensor, rows: int) -> None:
    """Put the check that `offsets` ascends from 0 to `rows` into a graph that torch.compile is tracing."""
    if offsets.shape[0] < 1:
        raise ValueError(f"{op}: offsets: expected one more entry than segments, got none")
    valid = (offsets[0] == 0) & (offsets[-1] == rows) & (offsets[1:] >= offsets[:-1]).all()
    touch.assert_later(valid, f"{op}: offsets: expected to ascend from 0 to the number of rows of x")


def broadcastable(op: str, lhs: Tensor, rhs: Tensor, lhs_name: str, rhs_name: str) -> None:
    """ValueError unless the feature shapes broadcast."""
    if lhs.shape[1:] == rhs.shape[1:]:
        return
    try:
        broadcast(lhs.shape[1:], rhs.shape[1:])
    except RuntimeError:
        raise ValueError(
            f"{op}: {rhs_name}: feature shape {tuple(rhs.shape[1:])} does not broadcast with "
            f"{lhs_name}'s {tuple(lhs.shape[1:])}"
        ) from None
