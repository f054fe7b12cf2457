"""What the weights of edges are multiplied with in the attention ops: a given factor, and what a dropout makes of 1."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _check
from gnnaccel.ops._arrays import needs_grad

# Of features, that the kernels of attention take.
FUSED_DTYPES = {"cpu": (torch.float32, torch.float64), "cuda": tuple(lib.DTYPES)}
SCHEMA = "Tensor? edge_scale, Tensor? seed, float dropout"


class EdgeFactor(NamedTuple):
    """The factor's part of an op's arguments (SCHEMA): what a dropout drops depends on the seed and on the number of
    the edge and head alone, so that a backward finds it again, and nothing of it is stored."""

    scale: Tensor | None
    seed: Tensor | None
    dropout: float

    @property
    def is_one(self) -> bool:
        return self.scale is None and self.seed is None

    def pointers(self) -> tuple[int, int, float]:
        """As the binary takes it (types.h: EdgeFactor)."""
        return lib.pointer(self.scale), lib.pointer(self.seed), self.dropout

    def contiguous(self) -> EdgeFactor:
        return self if self.scale is None else self._replace(scale=self.scale.contiguous())

    def to(self, dtype: torch.dtype) -> EdgeFactor:
        return self if self.scale is None else self._replace(scale=self.scale.to(dtype))

    def multiplied(self, weights: Tensor) -> Tensor:
        """weights [nnz, H] times the factor, which becomes a tensor for it if it has a dropout."""
        if self.seed is not None:
            return weights * _edge_factor_op(weights.detach(), *self)
        return weights if self.scale is None else weights * self.scale


def edge_factor(
    op: str, graph: Graph, heads: int, edge_scale: Tensor | None, dropout: float, seed: Tensor | None
) -> EdgeFactor:
    """The factor that a call asks for, checked; the seed drawn from torch's generator if none is given."""
    if edge_scale is not None:
        _check.feature(op, "edge_scale", edge_scale, graph.nnz, "graph.nnz, one per edge", graph.device)
        _check.features_of(op, "edge_scale", edge_scale, (heads,))
        if needs_grad(edge_scale):
            raise ValueError(
                f"{op}: edge_scale: expected a constant, got a tensor that requires a gradient; detach it, or compose "
                "edge_softmax and spmm"
            )
    if not isinstance(dropout, (int, float)):
        raise TypeError(f"{op}: dropout: expected a float, got {type(dropout).__name__}")
    if not 0 <= dropout < 1:
        raise ValueError(f"{op}: dropout: expected a part in [0, 1), got {dropout}")
    if seed is not None and not (isinstance(seed, Tensor) and seed.dtype == torch.int64 and seed.numel() == 1):
        raise TypeError(f"{op}: seed: expected an int64 tensor of one element, got {seed!r}")
    if seed is not None and seed.device != graph.device:
        raise ValueError(f"{op}: seed: expected device {graph.device} (the graph's), got {seed.device}")
    if dropout == 0:
        return EdgeFactor(edge_scale, None, 0.0)
    if seed is None:  # on the device: nothing waits, and the replay of a CUDA graph draws another one
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=graph.device)
    return EdgeFactor(edge_scale, seed, float(dropout))


def check_factor(op: str, graph, x: Tensor, scale: Tensor | None, seed: Tensor | None) -> None:
    """Of an op that is called by its registered name, with features x [rows, H, F]."""
    if scale is not None:
        _check.exactly(op, "edge_scale", scale, (graph.nnz, x.shape[1]), x.dtype, graph.device)
    _check_seed(op, seed, graph.device)


def _check_seed(op: str, seed: Tensor | None, device: torch.device) -> None:
    if seed is not None and (seed.numel() != 1 or seed.dtype is not torch.int64 or seed.device != device):
        raise ValueError(f"{op}: seed: expected one int64 on {device}, got {seed.dtype} {tuple(seed.shape)}")


def _check_like(like, scale, seed, _dropout):
    if scale is not None:
        _check.exactly("edge_factor", "edge_scale", scale, like.shape, scale.dtype, like.device)
    _check_seed("edge_factor", seed, like.device)


def _impl(like, *factor):
    dtype = like.dtype if like.is_cuda or like.dtype == torch.float64 else torch.float32
    out = torch.empty(like.shape, dtype=dtype, device=like.device)
    given = EdgeFactor._make(factor).to(dtype).contiguous()
    lib.launch("edge_factor", like.device, given.pointers(), lib.pointer(out), out.numel(), lib.DTYPES[dtype])
    return out.to(like.dtype)


def _fake(like, *_):
    return torch.empty_like(like, memory_format=torch.contiguous_format)


# The factor of each weight of `like` [nnz, H].
_edge_factor_op = _operators.register(
    "edge_factor", f"(Tensor like, {SCHEMA}) -> Tensor", _impl, _fake, check=_check_like
)
