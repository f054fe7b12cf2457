"""The frozen graph: a CSR matrix whose rows are destinations and whose columns are sources.

That convention is said here once. ``edge_ids[k]`` is the caller's edge id of nonzero k (None: k itself);
edge features and SDDMM results are always in edge-id order.
"""

from __future__ import annotations

import functools
import pathlib
import weakref

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gnnaccel.graph import build, gate, load, modes, translate, worklist
from gnnaccel.graph.work import Work

_HUB = 1 << 16  # edges of a source


def _scipy_arrays(matrix, rows: int) -> tuple:
    """indptr and indices of a compressed scipy matrix, which may have more indices than its indptr describes."""
    if matrix.indptr.size != rows + 1:
        raise ValueError(
            f"Graph.from_scipy: matrix: expected an indptr of {rows + 1} entries, got {matrix.indptr.size}"
        )
    return matrix.indptr, matrix.indices[: matrix.indptr[-1]]


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

    tiling: gate.Tiling
    work: Work
    _scales: dict[tuple[torch.dtype, float], Tensor]  # by the power of the degrees
    ready: dict  # of gnnaccel.ops.ready
    structures: dict  # of gnnaccel.ops._arrays: what calls on it are given

    def __init__(self, indptr: Tensor, indices: Tensor, edge_ids: Tensor | None, num_cols: int):
        """Trusts its arguments; user data goes through the ``from_*`` constructors, which check it."""
        # A graph outlives the mode it was made in, and autograd refuses to save inference tensors.
        self.indptr = modes.lasting(indptr)
        self.indices = modes.lasting(indices)
        self.edge_ids = None if edge_ids is None else modes.lasting(edge_ids)
        self.num_rows = indptr.numel() - 1
        self.num_cols = num_cols
        self._forget_work()
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
            .npz with edge_index [2, E] (sources, destinations), with src_li and dst_li (TC-GNN's), each with num_nodes
            or without, or a CSR matrix of scipy.sparse.save_npz, rows being destinations; .mtx, a Matrix Market file;
            .txt, .tsv, .csv, .edges, .el, a source and a destination to a line, further columns left
            out, # or % before comments. All but .npz also as .gz.

        Raises
        ------
        FileNotFoundError
            For no such file. ValueError: for a file that is not what its name says, with the reason.
        """
        return load.load(path)

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
        indptr, indices = build.as_index("indptr", indptr), build.as_index("indices", indices)
        edge_ids = None if edge_ids is None else build.as_index("edge_ids", edge_ids)
        if copy:
            indptr, indices = indptr.clone(), indices.clone()
            edge_ids = None if edge_ids is None else edge_ids.clone()
        indptr, indices, edge_ids = build.common_index_dtype(indptr, indices, edge_ids)
        if num_cols is None:
            top = int(indices.max()) + 1 if indices.numel() else 0
            num_cols = max(indptr.numel() - 1, top, 0)
        num_cols = build.as_size("num_cols", num_cols)
        if check:
            build.check_csr(indptr, indices, edge_ids, num_cols)
        return cls(indptr, indices, edge_ids, num_cols)

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

    @functools.cached_property
    def busiest_source(self) -> int:
        """The most nonzeros of a column. As `no_empty_rows`."""
        return int(torch.bincount(self.indices, minlength=1).max())

    def has_hub_source(self) -> bool:
        """True if a source has so many edges that float32 loses digits where atomics add one after the other.

        Found on first use, which synchronises, and kept: never while a CUDA graph is captured, nor of sampled graphs.
        """
        if self.nnz <= _HUB or self.transient():
            return False
        if "busiest_source" not in self.__dict__ and self.indptr.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        return self.busiest_source > _HUB

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

    def tiles(self, height: int = 16, width: int = 8) -> translate.Tiles:
        """Blocks of `height` rows and `width` columns for tensor cores, translated at the first call and kept.

        Parameters
        ----------
        height, width : int, 1 to 1024
            16 x 8 is what `ops.spmm` with method="tiled" takes.

        Raises
        ------
        ValueError
            For other sizes. RuntimeError: where torch.compile or a transform is tracing, or a CUDA graph is captured,
            and the graph has no such tiles yet.

        Notes
        -----
        On the graph's device; synchronises once. What the arrays are: `gnnaccel.graph.translate.Tiles`.
        """
        return self.tiling.tiles(self, height, width)

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

    def gcn_scale(self, dtype: torch.dtype) -> Tensor:
        """One over the square root of each row's degree, at least 1, as a GCN layer takes it: [num_rows], kept.

        `dtype`: of the features; the result has that of their sums.
        """
        return self._degree_scale(dtype, -0.5)

    def mean_scale(self, dtype: torch.dtype) -> Tensor:
        """One over each row's degree, at least 1, what a mean multiplies a sum with; as `gcn_scale`."""
        return self._degree_scale(dtype, -1.0)

    def _degree_scale(self, dtype: torch.dtype, power: float) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        scale = self._scales.get((wide, power))
        if scale is None:
            with torch.inference_mode(False), torch.no_grad():
                scale = self.indptr.diff().clamp(min=1).to(wide).pow(power)
            if not self.transient():
                self._scales[wide, power] = scale
        return scale

    def transient(self) -> bool:
        """True where what is made now must not be kept: while torch.compile or a transform traces, as it would be the
        tracer's, and where it holds nothing."""
        if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
            return True
        return modes.transforming() or self._hollow()

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
        turned = self._transposed
        held = [self.indptr, self.indices, self.edge_ids, *(self._origin_arrays or ())]
        held += [] if turned is None else [turned.indptr, turned.indices, turned.edge_ids]
        return [tensor for tensor in held if tensor is not None]

    def work_list(self, row_bytes: int, sums: bool = False) -> worklist.WorkList | worklist.Ordered | None:
        """The order in which kernels take the rows for features of `row_bytes`; None before it is worth its cost.

        On the CPU: that of `prepare(reorder=)`, for sums, means and extremes. On CUDA:

        Built on the device when the graph has proved to last, then kept. Not in deterministic mode, where all calls are
        to give the same bits (lists of `prepare` do), nor while a CUDA graph is captured: building synchronises; nor
        under a transform of torch.func. torch.compile traces the calls without a list. `sums`: for sums and means.
        """
        if torch.compiler.is_compiling():
            return None
        return self.work.on_cuda(self, row_bytes, sums) if self.indptr.is_cuda else self.work.on_cpu(row_bytes)

    def prepare_work(
        self, *, reorder_rows: str | None, like: Graph | None = None, folder: pathlib.Path | None = None
    ) -> None:
        """Build now what `work_list` may be asked for; first, if asked to, find an order of the rows with locality.

        `reorder_rows`: one of `reorder.ORDERS`. `like`: the transposed graph, prepared before. Where both hold the same
        edges its order serves here too. `folder`: where orders are kept on disk.
        """
        self.work.prepare(self, reorder_rows, like, folder)

    def inherit(self, other: Graph) -> None:
        """Have this new graph prepared as `other` is: one of the same nodes and nearly the same edges.

        Where lists, orders and plans of `other` were found for its edges, they serve these as well.
        """
        self.work.inherit(self, other.work)
        self.tiling.inherit(other.tiling)
        if other._transposed is not None:
            self.transposed.work.inherit(self.transposed, other._transposed.work)
            self.transposed.tiling.inherit(other._transposed.tiling)

    @property
    def reordered(self) -> bool:
        """True if `prepare` found an order of the rows that pays."""
        return self.work.order_name is not None

    def tiles_pay(self, features: int | None = None, of: str = "sum", dtype: torch.dtype = torch.float32) -> bool:
        """True if CUDA kernels seem to be faster by tiles (docs/tensor-cores.md): estimated with the work lists.

        For the "sum" or the "dot" of rows of `features` numbers; None: for any.
        """
        return self.tiling.pays(self, features, of, dtype)

    def tiles_serve(self, features: int | None = None, of: str = "sum", dtype: torch.dtype = torch.float32) -> bool:
        """The same for sure: translates a graph for which tiles seem to pay, where it has not been."""
        return self.tiling.serves(self, features, of, dtype)

    def decide_tiles(self, features: int, faster: bool) -> None:
        """Whether sums of rows of `features` numbers go by tiles from now on, as measured, of a translated graph."""
        self.tiling.decide(features, faster)
        self.work.epoch += 1

    def _forget_work(self) -> None:
        self.work, self.tiling, self._scales, self.ready, self.structures = Work(), gate.Tiling(), {}, {}, {}

    def __getstate__(self) -> dict:
        # Weak references cannot be pickled. Work lists are made again, for the kernels and the GPU of that day.
        dropped = {"_origin", "work", "tiling", "_scales", "ready", "structures"}
        return {key: value for key, value in vars(self).items() if key not in dropped} | {"_origin": None}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._forget_work()
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
