"""Rows of nodes that other parts need, there and back: what makes message passing on parts that of the whole graph."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from gnnaccel import ops
from gnnaccel.graph import build
from gnnaccel.graph.csr import Graph
from gnnaccel.parts import ranks

_DOING = "exchange of halo rows"


class Exchange:
    """Between one part's own rows and its halo: what it sends and receives, known beforehand.

    Parameters
    ----------
    num_own, num_halo : int
    send : Tensor [S], int64
        Own rows that others need, by rank.
    send_counts, recv_counts : list of int, one per rank
    wire : torch.dtype, optional
        What 32-bit rows are rounded to on the way.
    """

    def __init__(
        self,
        num_own: int,
        num_halo: int,
        send: Tensor,
        send_counts: list[int],
        recv_counts: list[int],
        wire: torch.dtype | None = None,
    ):
        self.num_own, self.num_halo, self.wire = num_own, num_halo, wire
        self.send, self.send_counts, self.recv_counts = send, send_counts, recv_counts
        # Rows: own nodes; columns: rows that come back, in the order of ranks, which is that of each sum.
        arrived = torch.arange(send.numel(), device=send.device)
        self._back = Graph.from_coo(send, arrived, num_rows=num_own, num_cols=send.numel())
        self._agreed: set[tuple] = set()
        self.rows_sent = 0  # so far, gradients included

    def __call__(self, x: Tensor) -> Tensor:
        """Rows of own nodes [num_own, *F] -> [num_own + num_halo, *F]; sums what comes back in a fixed order.

        Raises
        ------
        ValueError
            For another number of rows or device. RuntimeError: where ranks give rows of different shapes, dtypes or
            need of gradients, and where the exchange fails.
        """
        needs = self.checked(x)
        if dist.get_world_size() == 1:
            return x
        return _BothWays.apply(x, self) if needs else self.forward(x)

    def checked(self, x: Tensor) -> bool:
        """Whether `x` needs a gradient; raises as a call does."""
        if x.dim() == 0 or x.shape[0] != self.num_own:
            raise ValueError(
                f"exchange: x: expected a row for each of this part's {self.num_own} nodes, got {tuple(x.shape)}"
            )
        if x.device != self.send.device:
            raise ValueError(f"exchange: x: expected it on {self.send.device}, where the part is, got {x.device}")
        needs = x.requires_grad and torch.is_grad_enabled()
        kind = (x.dtype, *x.shape[1:], needs)
        if kind not in self._agreed:
            code = sum(ord(c) << (8 * (i % 6)) for i, c in enumerate(str(x.dtype)))
            described = f"rows of {tuple(x.shape[1:])} {x.dtype}" + " with gradients" * needs
            ranks.same_everywhere([code, x.dim(), int(needs), *x.shape[1:]], x.device, _DOING, described)
            self._agreed.add(kind)
        return needs

    def forward(self, x: Tensor) -> Tensor:
        """Own rows and halo; no gradient."""
        out = x.new_empty(self.num_own + self.num_halo, *x.shape[1:])
        out[: self.num_own] = x
        out[self.num_own :] = self.fetch(x)()
        return out

    def backward(self, grad: Tensor) -> Tensor:
        """Gradients of own rows: of this part, then those that come back, in the order of ranks."""
        return grad[: self.num_own] + self.give_back(grad[self.num_own :])()

    def fetch(self, x: Tensor) -> Callable[[], Tensor]:
        """Start fetching the halo's rows; the result waits for them, on CUDA without the host."""
        return self._started(x.index_select(0, self.send), self.send_counts, self.recv_counts)

    def give_back(self, grad: Tensor) -> Callable[[], Tensor]:
        """Start sending gradients of halo rows to their owners; the result gives the sums for own rows."""
        arrived = self._started(grad.contiguous(), self.recv_counts, self.send_counts)

        def finish() -> Tensor:
            rows = arrived()
            flat = rows.view(rows.shape[0], math.prod(rows.shape[1:]))
            return ops.spmm(self._back, flat).view(self.num_own, *rows.shape[1:])

        return finish

    def _started(self, rows: Tensor, counts: list[int], others: list[int]) -> Callable[[], Tensor]:
        dtype = rows.dtype
        if self.wire is not None and dtype == torch.float32:
            rows = rows.to(self.wire)
        arrived = rows.new_empty(sum(others), *rows.shape[1:])
        with ranks.told(_DOING):
            work = dist.all_to_all_single(arrived, rows, others, counts, async_op=True)
        self.rows_sent += rows.shape[0]

        def finish() -> Tensor:
            with ranks.told(_DOING):
                work.wait()
            return arrived.to(dtype)

        return finish


class _BothWays(torch.autograd.Function):
    """What has a forward(x) and a backward(grad): an Exchange, or Sums."""

    @staticmethod
    def forward(ctx, x, way):
        ctx.way = way
        return way.forward(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return ctx.way.backward(grad), None


class Sums:
    """Sums over the in-edges of own nodes, those inside the part while the halo's rows are on their way.

    Parameters
    ----------
    graph : Graph
        Own nodes as rows; own nodes, then halo, as columns.
    exchange : Exchange
    """

    def __init__(self, graph: Graph, exchange: Exchange):
        self.exchange = exchange
        rows, cols = build.pairs_by_id(graph.indptr, graph.indices, graph.edge_ids)
        inside = cols < exchange.num_own
        own, halo = exchange.num_own, exchange.num_halo
        self._inner = Graph.from_coo(rows[inside], cols[inside], num_rows=own, num_cols=own)
        self._outer = Graph.from_coo(rows[~inside], cols[~inside] - own, num_rows=own, num_cols=halo)

    def __call__(self, x: Tensor) -> Tensor:
        """Rows of own nodes [num_own, F] -> for each own node the sum of its sources' rows; raises as an exchange."""
        if dist.get_world_size() == 1:
            return ops.spmm(self._inner, x)
        return _BothWays.apply(x, self) if self.exchange.checked(x) else self.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        """The sums; no gradient."""
        halo = self.exchange.fetch(x)
        out = ops.spmm(self._inner, x)
        return out.add_(ops.spmm(self._outer, halo()))

    def backward(self, grad: Tensor) -> Tensor:
        """Gradients of own rows: those of others leave first."""
        back = self.exchange.give_back(ops.spmm(self._outer.transposed, grad))
        out = ops.spmm(self._inner.transposed, grad)
        return out.add_(back())


class _Total(torch.autograd.Function):
    """A sum over ranks, for a result that is the same on each: the gradient of each rank's term is that of the sum."""

    @staticmethod
    def forward(_ctx, x):
        return ranks.summed(x.clone())

    @staticmethod
    def backward(_ctx, grad):
        return grad


class _Shared(torch.autograd.Function):
    """A sum over ranks that each uses in its own way: gradients are summed too."""

    @staticmethod
    def forward(_ctx, x):
        return ranks.summed(x.clone())

    @staticmethod
    def backward(_ctx, grad):
        return ranks.summed(grad.clone(memory_format=torch.contiguous_format))


def total(x: Tensor) -> Tensor:
    """The sum of `x` over ranks, as part of a loss that every rank computes alike."""
    return _Total.apply(x)


def shared(x: Tensor) -> Tensor:
    """The sum of `x` over ranks, as a statistic that each rank goes on with."""
    return _Shared.apply(x)
