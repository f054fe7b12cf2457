"""A graph that is described by a tensor of the user's, and made when an op runs: what torch.compile may hold on to.

A compiled program that took a graph's own arrays would keep those of the edges that it was compiled with. So every op
on a graph has a twin that takes the user's edge_index instead, and whose implementation looks up, at each call, what is
kept with that tensor: one that was written into, or another one, is another graph, without a recompilation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnaccel.lower import bounds

SCHEMA = "Tensor edges, SymInt[] sizes"  # what the dispatcher is given in place of a Described
LOOPS = ("none", "one", "more")
_LOOPS_CODE, _FLIPPED, _TURNED = 4, 4, 8


class Described:
    """What a `Structure` is, of edges that are known when the op runs.

    Parameters
    ----------
    edges : Tensor [2, E], int64 or int32
    num_src, num_dst : int
    loops : {"none", "one", "more"}
        "one": loops among the edges are left out, and each node has one behind them; "more": each has one more. The
        loop of node v is edge E + v, whatever was left out: features of edges have E + N rows, of which some may be
        read by nobody.
    flipped : bool
        Edges run from edges[1] to edges[0].
    transposed : bool
        The edges reversed.
    """

    graph_of: Callable[[Tensor, int, int, str, bool], Any]
    """(edges, num_src, num_dst, loops, flipped) -> Graph, kept with `edges`: set by the backend that has one."""

    def __init__(
        self,
        edges: Tensor,
        num_src: int,
        num_dst: int,
        loops: str = "none",
        flipped: bool = False,
        transposed: bool = False,
    ):
        self.edges, self.num_src, self.num_dst = edges, num_src, num_dst
        self.loops, self.flipped, self._is_transposed = loops, flipped, transposed

    @property
    def device(self) -> torch.device:
        return self.edges.device

    @property
    def num_rows(self) -> int:
        return self.num_src if self._is_transposed else self.num_dst

    @property
    def num_cols(self) -> int:
        return self.num_dst if self._is_transposed else self.num_src

    @property
    def nnz(self) -> int:
        return self.edges.shape[1] if self.loops == "none" else self.edges.shape[1] + self.num_src

    @property
    def is_transposed(self) -> bool:
        return self._is_transposed

    @property
    def is_plain(self) -> bool:
        return type(self.edges) is Tensor

    def transposed(self) -> Described:
        """The same edges reversed."""
        return Described(self.edges, self.num_src, self.num_dst, self.loops, self.flipped, not self._is_transposed)

    def of_edges(self, edges: Tensor) -> Described:
        """The same of another tensor that holds the same edges."""
        return Described(edges, self.num_src, self.num_dst, self.loops, self.flipped, self._is_transposed)

    def new_index(self, shape: Sequence[int]) -> Tensor:
        """An empty tensor of the dtype of the graph's indices."""
        wide = max(self.num_src, self.num_dst, self.nnz) > bounds.INT32_MAX  # as gnnaccel.graph.build decides
        return self.edges.new_empty(shape, dtype=torch.int64 if wide else torch.int32)

    def graph(self) -> Any:
        """The Graph of the edges as they are now, not reversed."""
        return Described.graph_of(self.edges, self.num_src, self.num_dst, self.loops, self.flipped)

    def flat(self) -> tuple[Tensor, list[int]]:
        """What the dispatcher is given (SCHEMA)."""
        code = LOOPS.index(self.loops) + _FLIPPED * self.flipped + _TURNED * self._is_transposed
        return self.edges, [self.num_src, self.num_dst, code]

    @classmethod
    def of(cls, edges: Tensor, sizes: Sequence[int]) -> Described:
        """The inverse of `flat`."""
        num_src, num_dst, code = sizes
        code = int(code)
        return cls(edges, num_src, num_dst, LOOPS[code % _LOOPS_CODE], bool(code & _FLIPPED), bool(code & _TURNED))
