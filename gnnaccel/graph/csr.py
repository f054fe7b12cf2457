"""The frozen graph: a CSR matrix whose rows are destinations and whose columns are sources.

That convention is said here once. ``edge_ids[k]`` is the caller's edge id of nonzero k (None: k itself);
edge features and SDDMM results are always in edge-id order.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from gnnaccel import touch
from gnnaccel.graph import build, load, modes
from gnnaccel.lower import bounds

_T = TypeVar("_T")


def _scipy_arrays(matrix, rows: int) -> tuple:
    """indptr and indices of a compressed scipy matrix, which may have more indices than its indptr describes."""
    if matrix.indptr.size != rows + 1:
        raise ValueError(
            f"Graph.from_scipy: matrix: expected an indptr of {rows + 1} entries, got {matrix.indptr.size}"
        )
    return matrix.indptr, matrix.indices[: matrix.indptr[-1]]


class Slots:
    """What others keep with a graph, each under a name of its own (`Graph.slot`). Attributes, as torch.compile watches
    each of them by itself, and a dictionary as a whole."""


class Graph:
    """A sparse graph structure, frozen after construction.

    Build one with `from_csr`, `from_coo` or `from_scipy`, or with `gnnaccel.as_graph` from a DGL or PyG object.

    Attributes
    ----------
    indptr : Tensor [num_rows + 1], int32 or int64
        Row r's nonzeros are indptr[r]:indptr[r + 1].
    indices : Tensor [nnz], same dtype
        Source (column) of each nonzero.
    edge_ids : Tensor [nnz], same dtype, or None
        Edge id of each nonzero, a permutation of 0..nnz-1; None means nonzero k has id k.
    num_rows, num_cols : int
        Destinations and sources. They differ for bipartite graphs and mini-batch blocks.

    The transposed structure is built on first use and kept. The tensors are the graph's own: constructors that take
    arrays of a user's copy them, so that a later write into those changes nothing. Do not write into the graph's: it
    would not notice.
    """

    def __init__(self, indptr: Tensor, indices: Tensor, edge_ids: Tensor | None, num_cols: int):
        """Trusts its arguments; user data goes through the ``from_*`` constructors, which check it."""
        # A graph outlives the mode it was made in, and autograd refuses to save inference tensors.
        self.indptr, self.indices, self.edge_ids = modes.lasting(indptr, indices, edge_ids)
        self.num_rows = indptr.numel() - 1
        self.num_cols = num_cols
        self.slots = Slots()
        self._transposed: Graph | None = None
        self._incidence: Graph | None = None
        # Of the graph that this one is the transposed of. Weak, or the two would keep each other alive until Python's
        # garbage collector finds them; the arrays serve where the transposed one alone is kept.
        self._origin: weakref.ref[Graph] | None = None
        self._origin_arrays: tuple[Tensor, Tensor, Tensor | None] | None = None

    @classmethod
    def load(cls, path) -> Graph:
        """Graph from a file, told by the end of its name.

        Parameters
        ----------
        path : str or PathLike
            .npz with edge_index [2, E] (sources, destinations), with src_li and dst_li (TC-GNN's), each of num_nodes,
            or else the rows of x, or else the largest number and one; or a CSR matrix of scipy.sparse.save_npz, rows
            being destinations; .mtx, a Matrix Market file; .txt, .tsv, .csv, .edges, .el, a source and a destination
            to a line, further columns left out, # or % before comments. All but .npz also as .gz.

        Raises
        ------
        FileNotFoundError
            For no such file. ValueError: for a file that is not what its name says, with the reason.
        """
        return cls(*load.load(path))

    @classmethod
    def from_csr(
        cls, indptr, indices, edge_ids=None, *, num_cols: int | None = None, check: bool = True, copy: bool = True
    ) -> Graph:
        """Graph from CSR arrays by destination.

        Parameters
        ----------
        indptr : Tensor or array [num_rows + 1], int32 or int64
        indices : Tensor or array [nnz], int32 or int64
        edge_ids : Tensor or array [nnz], optional
            A permutation of 0..nnz-1.
        num_cols : int, optional
            Number of sources; default: the larger of num_rows and the largest index + 1.
        check : bool
            Check the arrays (one pass, and one synchronisation on CUDA). Kernels trust a graph, so pass False
            only for arrays a library made.
        copy : bool
            Copy the arrays, before they are checked. Pass False only for arrays that nobody writes into from then on:
            the graph is then made of them, and what is written into them goes past the check.

        Raises
        ------
        TypeError
            For dtypes other than int32 and int64.
        ValueError
            For an indptr that does not start at 0, descends or does not end at nnz; for indices or edge ids
            outside their range.
        """
        return cls(*build.given_csr(indptr, indices, edge_ids, num_cols, check=check, copy=copy))

    @classmethod
    def from_coo(cls, rows, cols, *, num_rows: int | None = None, num_cols: int | None = None) -> Graph:
        """Graph from edge lists: edge e goes from cols[e] (source) to rows[e] (destination).

        Parameters
        ----------
        rows, cols : Tensor or array [nnz], int32 or int64
        num_rows, num_cols : int, optional
            Default: a square graph just large enough.

        Notes
        -----
        A stable sort by row; edge ids are positions in the input. Indices are kept as int32 where they fit.

        Raises
        ------
        TypeError, ValueError
            As `from_csr`; an index out of range is named with its position.
        """
        return cls(*build.coo_to_csr(rows, cols, num_rows, num_cols))

    @classmethod
    def from_scipy(cls, matrix) -> Graph:
        """Graph from a scipy.sparse matrix or array [num_rows, num_cols]; its values are not read.

        Edge ids are positions in ``matrix.data`` for the CSR, CSC and COO formats (whose duplicates stay apart),
        and in ``matrix.tocsr().data`` for the others.

        Raises
        ------
        TypeError, ValueError
            For anything else than a 2-D sparse matrix, or one whose arrays are not valid (see `from_csr`).
        """
        if not hasattr(matrix, "tocsr"):
            raise TypeError(f"Graph.from_scipy: matrix: expected a scipy.sparse matrix, got {type(matrix).__name__}")
        if len(matrix.shape) != 2:
            raise ValueError(f"Graph.from_scipy: matrix: expected 2 dimensions, got shape {matrix.shape}")
        num_rows, num_cols = matrix.shape
        if matrix.format == "coo":
            return cls.from_coo(matrix.row, matrix.col, num_rows=num_rows, num_cols=num_cols)
        if matrix.format == "bsr":  # scipy's conversion reads and writes wherever the arrays point
            height, width = matrix.blocksize
            blocks = cls.from_csr(*_scipy_arrays(matrix, num_rows // height), num_cols=num_cols // width)
            if len(matrix.data) < blocks.nnz:
                raise ValueError(f"Graph.from_scipy: matrix: {blocks.nnz} blocks, but data of {len(matrix.data)}")
        csr = matrix if matrix.format == "csc" else matrix.tocsr()
        if csr.format == "csc":
            return cls.from_csr(*_scipy_arrays(csr, num_cols), num_cols=num_rows).transposed
        return cls.from_csr(*_scipy_arrays(csr, num_rows), num_cols=num_cols)

    @property
    def nnz(self) -> int:
        """Number of nonzeros (edges)."""
        return self.indices.numel()

    @functools.cached_property
    def no_empty_rows(self) -> bool:
        """True if every row has a nonzero. Found on first use, which synchronises, and kept."""
        return bool((self.indptr.diff() > 0).all())

    @functools.cached_property
    def longest_row(self) -> int:
        """The most nonzeros of a row. As `no_empty_rows`."""
        return int(self.indptr.diff().max()) if self.num_rows else 0

    @property
    def longest_known(self) -> int:
        """`longest_row` where it has been found, else 0."""
        return self.__dict__.get("longest_row", 0)

    @functools.cached_property
    def busiest_source(self) -> int:
        """The most nonzeros of a column. As `no_empty_rows`."""
        return int(torch.bincount(self.indices, minlength=1).max())

    def has_hub_source(self) -> bool:
        """True if a source has so many edges that float32 loses digits where atomics add one after the other.

        Found on first use, which synchronises, and kept: never while a CUDA graph is captured, nor of sampled graphs.
        """
        if self.nnz <= bounds.BUSY_SOURCE or self.transient():
            return False
        if "busiest_source" not in self.__dict__ and self.indptr.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        return self.busiest_source > bounds.BUSY_SOURCE

    @property
    def device(self) -> torch.device:
        """Device of the structure."""
        return self.indptr.device

    @property
    def transposed(self) -> Graph:
        """The graph with every edge reversed; built once. Edge ids are the same."""
        if self._transposed is not None:
            return self._transposed
        origin = None if self._origin is None else self._origin()
        if origin is not None:
            return origin
        if self._origin_arrays is not None:
            indptr, indices, edge_ids = self._origin_arrays
            return self._keep_transposed(Graph(indptr, indices, edge_ids, self.num_rows))
        indptr, indices, edge_ids = build.transpose(self.indptr, self.indices, self.edge_ids, self.num_cols)
        other = Graph(indptr, indices, edge_ids, self.num_rows)
        return other if self._hollow() else self._keep_transposed(other)

    def _keep_transposed(self, other: Graph) -> Graph:
        """Keep `other`, which holds the same edges reversed, as the transposed graph; returns it."""
        self._transposed = other
        other._origin_arrays = (self.indptr, self.indices, self.edge_ids)
        if not torch.compiler.is_compiling():  # torch.compile cannot make a weak reference
            other._origin = weakref.ref(self)
        return other

    @property
    def incidence(self) -> Graph:
        """Destinations by edges: its "sources" are the edges themselves, so that an SpMM sums features of edges."""
        if self._incidence is None:
            with torch.inference_mode(False):
                edge_ids = self.edge_ids
                if edge_ids is None:
                    edge_ids = torch.arange(self.nnz, dtype=self.indptr.dtype, device=self.device)
                found = Graph(self.indptr, edge_ids, edge_ids, self.nnz)
            if self._hollow():
                return found
            self._incidence = found
        return self._incidence

    def slot(self, name: str, make: Callable[[], _T]) -> _T:
        """What `make` makes for this graph, once: where those who derive things from a graph keep them with it.

        It dies with the graph, and is neither pickled nor copied. What must not be kept: see `transient`.
        """
        found = getattr(self.slots, name, None)
        return vars(self.slots).setdefault(name, make()) if found is None else found

    def transient(self) -> bool:
        """True where what is made now must not be kept: while torch.compile or a transform traces, as it would be the
        tracer's, and where it holds nothing."""
        if torch.compiler.is_compiling() or touch.in_forward_mode():
            return True
        return touch.transforming() or self._hollow()

    def _hollow(self) -> bool:
        """True where tensors that are made now hold nothing: fake ones, and those of a CUDA graph that is captured,
        before that is replayed. torch.compile makes them itself when its code runs."""
        if modes.faking():
            return True
        return self.indptr.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()

    def with_self_loops(self) -> Graph:
        """This graph with an edge from each node to itself, once: loops that it has are kept and not doubled.

        Raises
        ------
        ValueError
            For a graph with other destinations than sources.

        Notes
        -----
        Edges keep their ids; a loop that is added has one behind them. Indices are int32 where they fit.
        """
        if self.num_rows != self.num_cols:
            raise ValueError(f"Graph.with_self_loops: expected as many rows as columns, got {self}")
        pairs = build.with_loops(self.indptr, self.indices, self.edge_ids)
        return Graph.from_coo(*pairs, num_rows=self.num_rows, num_cols=self.num_cols)

    def arrays(self) -> list[Tensor]:
        """The tensors this graph and its transposed one are made of, as far as they are there."""
        transposed = self._transposed
        held = [self.indptr, self.indices, self.edge_ids, *(self._origin_arrays or ())]
        held += [] if transposed is None else [transposed.indptr, transposed.indices, transposed.edge_ids]
        return [tensor for tensor in held if tensor is not None]

    def __getstate__(self) -> dict:
        # Weak references cannot be pickled. What is in slots is made again, for the kernels and the GPU of that day.
        return vars(self) | {"_origin": None, "slots": Slots()}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        if self._transposed is not None and self._transposed._origin is None:  # not that of a shallow copy
            self._transposed._origin = weakref.ref(self)

    def to(self, device) -> Graph:
        """This graph on `device`; itself if it is there already."""
        device = torch.device(device)
        if device == self.device or (device.type == self.device.type and device.index is None):
            return self
        edge_ids = None if self.edge_ids is None else self.edge_ids.to(device)
        return Graph(self.indptr.to(device), self.indices.to(device), edge_ids, self.num_cols)

    def __repr__(self) -> str:
        return f"Graph(num_rows={self.num_rows}, num_cols={self.num_cols}, nnz={self.nnz}, device={self.device})"
