"""A graph as the ops take it: one argument, which holds what the kernels are told of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import schedule, touch
from gnnaccel.graph import build
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds, choose
from gnnaccel.ops import _described
from gnnaccel.ops._described import Described
from gnnaccel.schedule import worklist

SCHEMA = "Tensor?[] structure, SymInt[] sizes"  # what the dispatcher is given in place of a Structure
_HALF = 6  # tensors of a Matrix
_CSR, _NO_CSR = "csr", (None, 0)  # with the longest row that it was told
_NO_LIST = id(None)


class Matrix:
    """Edges by rows, and the order in which kernels take the rows, if there is one. Never changed.

    Parameters
    ----------
    indptr, indices, edge_ids, num_cols, nnz
        As of a Graph; no indices where no source is read.
    order : WorkList, Ordered or their three tensors, optional
        On CUDA items, steps and splits of a work list; on the CPU rows, indptr and edges of `worklist.Ordered`.
    plan : int
        `worklist.WorkList.code` of the order, or `worklist.code_of_longest`.
    """

    __slots__ = ("_csr", "_listed", "_walked", "edge_ids", "indices", "indptr", "nnz", "num_cols", "order", "plan")

    def __init__(
        self,
        indptr: Tensor,
        indices: Tensor | None = None,
        edge_ids: Tensor | None = None,
        num_cols: int = 0,
        nnz: int = 0,
        order: Sequence | None = None,
        plan: int = 0,
    ):
        self.indptr, self.indices, self.edge_ids = indptr, indices, edge_ids
        self.num_cols, self.nnz, self.order, self.plan = num_cols, nnz, order, plan
        # What the binary is told, once somebody asks.
        self._csr: Any = None
        self._listed: tuple | None = None
        self._walked: tuple | None = None

    @classmethod
    def of(cls, graph: Graph, order: worklist.WorkList | worklist.Ordered | None) -> Matrix:
        plan = 0 if order is None else order.code
        made = cls(graph.indptr, graph.indices, graph.edge_ids, graph.num_cols, graph.indices.shape[0], order, plan)
        if not torch.compiler.is_compiling():  # which would watch what it is asked for from then on
            found, told = getattr(graph.slots, _CSR, _NO_CSR)
            made._csr = found if told == graph.longest_known else None
            if order is None and graph.indptr.is_cuda:
                made.plan = worklist.code_of_longest(graph.longest_known)
        return made

    def tensors(self) -> list[Tensor | None]:
        return [self.indptr, self.indices, self.edge_ids, *((None,) * 3 if self.order is None else self.order[:3])]

    def csr(self):
        """The binary's object of the matrix (types.h: Csr)."""
        if self._csr is None:
            arrays = self.indptr, self.indices, self.edge_ids
            self._csr = lib.csr(*arrays, self.num_cols, self.nnz, worklist.decode(self.plan)[-1])
        return self._csr

    def listed(self) -> tuple:
        """What a kernel that can work through a list takes first: on CUDA the matrix and the list, or None."""
        if self._listed is None:
            work = () if not self.indptr.is_cuda else (self._work_list(),)
            self._listed = (self.csr(), *work)
        return self._listed

    def walked(self) -> tuple:
        """What spmm takes first, with its rows in order; on the CPU they lie in it (cpp/kernels.h: spmm)."""
        if self._walked is None:
            if self.indptr.is_cuda:
                self._walked = self.listed()
            elif self.order is None:
                self._walked = (self.csr(), 0)
            else:
                rows, indptr, edges = self.order[:3]
                sources, edge_ids = edges.unbind()
                self._walked = (lib.csr(indptr, sources, edge_ids, self.num_cols, self.nnz), rows.data_ptr())
        return self._walked

    def _work_list(self):
        return None if self.order is None else lib.work_list(*self.order[:3], *worklist.decode(self.plan))


_ALIGNED = 4  # numbers of an index: 16 bytes, as of a tensor of its own
_TURNED = 2


def packed_parts(num_rows: int, num_cols: int, nnz: int, both: bool) -> tuple[list[int], list[int]]:
    """Where arrays begin in a graph of one tensor, with the end of all, and their lengths: indptr, indices and edge ids
    of the matrix and, if `both`, of the transposed one. A zero at least is behind each, as no row ends at nonzero 0."""
    lengths = [length for count in (num_rows, num_cols)[: 1 + both] for length in (count + 1, nnz, nnz)]
    return [0, *accumulate((length // _ALIGNED + 1) * _ALIGNED for length in lengths)], lengths


class Numbering:
    """What a CUDA graph keeps for `_numbering`, as long as itself: captured CUDA graphs read it by its address.

    Attributes
    ----------
    places : Tensor [nnz] or None
        For each nonzero of the transposed matrix that of the matrix which is the same edge, of the graph's index dtype.
    age : Age
        That of the graph.
    refused : bool
        There is no memory for the places.
    """

    __slots__ = ("age", "places", "refused")

    def __init__(self, age: choose.Age) -> None:
        self.places: Tensor | None = None
        self.age, self.refused = age, False


class Structure:
    """A graph and, where a gradient runs over it, its transposed one, each with the order of its rows. Never changed.

    Holds no Graph: a graph keeps its structures (`arrays_of`), and is freed when nobody else holds it.
    """

    twin: Any  # below

    __slots__ = (
        *("_both_by_nonzero", "_by_nonzero", "_other", "_own", "_packed", "_plain", "_transposed"),
        *("calls", "edge_ids", "epochs", "indices", "indptr", "nnz", "num_cols", "num_rows", "numbering", "plan"),
    )

    def __init__(self, own: Matrix, other: Matrix | None = None, epochs: tuple[int, ...] = (), nnz: int | None = None):
        self._own, self._other, self.epochs = own, other, epochs
        self.indptr, self.indices, self.edge_ids = own.indptr, own.indices, own.edge_ids
        self.num_rows, self.num_cols = own.indptr.shape[0] - 1, own.num_cols
        self.nnz = own.nnz if nnz is None else nnz  # rows of features of edges: more where ids have gaps
        self.plan = own.plan
        self.calls: dict[Any, Any] = {}  # of kernels, ready but for addresses: whoever makes them puts them here
        self.numbering: Numbering | None = None  # of a CUDA graph both ways whose edges have ids
        self._by_nonzero: Structure | None = None
        self._both_by_nonzero: tuple[Tensor, Structure] | None = None
        self._transposed: Structure | None = None
        self._packed: tuple[Tensor, list[int]] | None = None  # what flat() gives in place of the arrays
        self._plain: bool | None = None

    @classmethod
    def packed(cls, values: Tensor, num_rows: int, num_cols: int, nnz: int, code: int) -> Structure:
        """That of a graph of one tensor (`packed_parts`), which stands for it where it is an argument: one tensor for
        autograd to keep and for a replay to look at. code: 1 if both directions are there, and _TURNED if the edges are
        reversed."""
        offsets, lengths = packed_parts(num_rows, num_cols, nnz, bool(code % _TURNED))
        arrays = [values.narrow(0, *each) for each in zip(offsets, lengths, strict=False)]
        halves = [Matrix(arrays[0], arrays[1], arrays[2], num_cols, nnz)]
        if len(arrays) > 3:
            halves.append(Matrix(arrays[3], arrays[4], arrays[5], num_rows, nnz))
        made = cls(*(reversed(halves) if code & _TURNED else halves))
        made._packed = values, [num_rows, num_cols, nnz, code]
        return made

    @property
    def device(self) -> torch.device:
        return self.indptr.device

    @property
    def order(self) -> Sequence | None:
        """That of the matrix."""
        return self._own.order

    def new_index(self, shape: Sequence[int]) -> Tensor:
        """An empty tensor of the dtype of the graph's indices."""
        return self.indptr.new_empty(shape)

    def transposed(self) -> Structure:
        """The same edges reversed."""
        if self._transposed is None:
            if self._other is None:
                raise RuntimeError("gnnaccel: a gradient needs the transposed graph, which this call was not given")
            self._transposed = Structure(self._other, self._own, nnz=self.nnz)
            if self._packed is not None:
                values, (*sizes, code) = self._packed
                self._transposed._packed = values, [*sizes, (code + _TURNED) % (2 * _TURNED)]
        return self._transposed

    def both_ways(self) -> Structure:
        """This structure of one way with the transposed matrix beside it, made now and not kept."""
        own = self._own
        assert own.indices is not None
        indptr, indices, edge_ids = build.transpose(own.indptr, own.indices, own.edge_ids, own.num_cols)
        return Structure(own, Matrix(indptr, indices, edge_ids, self.num_rows, own.nnz))

    def by_nonzero(self) -> Structure:
        """The matrix alone, for values of edges that lie in the order of the nonzeros."""
        if self._by_nonzero is None:
            own = self._own
            matrix = Matrix(own.indptr, own.indices, None, own.num_cols, own.nnz, own.order, own.plan)
            self._by_nonzero = Structure(matrix)
        return self._by_nonzero

    def by_nonzero_both_ways(self, places: Tensor) -> Structure:
        """On CUDA both matrices, for values of edges that lie in the order of the nonzeros of this one. `places`: as
        `Numbering` has them."""
        if self._both_by_nonzero is None or self._both_by_nonzero[0] is not places:
            other = self.transposed()._own
            turned = Matrix(other.indptr, other.indices, places, other.num_cols, other.nnz, other.order, other.plan)
            self._both_by_nonzero = places, Structure(self.by_nonzero()._own, turned)
        return self._both_by_nonzero[1]

    def numbered_up_to(self, nnz: int) -> Structure:
        """The same with edge ids below `nnz`, of which some are of no edge."""
        return Structure(self._own, self._other, self.epochs, nnz)

    def ordered(self, order: worklist.WorkList | worklist.Ordered | None) -> Structure:
        """The matrix alone with another order of its rows."""
        own, plan = self._own, 0 if order is None else order.code
        return Structure(Matrix(own.indptr, own.indices, own.edge_ids, own.num_cols, own.nnz, order, plan))

    def matrix(self):
        """What a kernel takes first that has no use for lists."""
        return self._own.csr()

    def listed(self) -> tuple:
        """`Matrix.listed`."""
        return self._own.listed()

    def walked(self, in_order: bool) -> tuple:
        """`Matrix.walked`, on the CPU with rows as given unless they are to be `in_order`."""
        return self._own.walked() if in_order or self.indptr.is_cuda else (self._own.csr(), 0)

    @property
    def is_plain(self) -> bool:
        """True if it is of nothing but plain tensors."""
        if self._plain is None:
            self._plain = all(t is None or type(t) in (Tensor, torch.nn.Parameter) for t in self.flat()[0])
        return self._plain

    def flat(self) -> tuple[list[Tensor | None], list[int]]:
        """What the dispatcher is given (SCHEMA): the tensors of the matrix and of the transposed one, and sizes; of a
        graph of one tensor that one."""
        if self._packed is not None:
            return [self._packed[0]], self._packed[1]
        own, other = self._own, self._other
        tensors = own.tensors() + ([None] * _HALF if other is None else other.tensors())
        return tensors, [own.num_cols, own.nnz, own.plan, 0 if other is None else other.plan]

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> Structure:
        """The inverse of `flat`."""
        if len(tensors) == 1:
            return cls.packed(tensors[0], *sizes)  # type: ignore[arg-type]

        def matrix(half: Sequence, num_cols: int, plan: int) -> Matrix:
            indptr, indices, edge_ids, *order = half
            return Matrix(indptr, indices, edge_ids, num_cols, nnz, None if order[0] is None else order, plan)

        num_cols, nnz, plan, t_plan = sizes
        own = matrix(tensors[:_HALF], num_cols, plan)
        if tensors[_HALF] is None:
            return cls(own)
        return cls(own, matrix(tensors[_HALF:], own.indptr.shape[0] - 1, t_plan))


def csr_of(graph: Graph):
    """The binary's object of a graph's matrix, kept with it: for callers that know that its tensors have memory."""
    longest = graph.longest_known
    found, told = getattr(graph.slots, _CSR, _NO_CSR)
    if found is None or told != longest:
        found = lib.csr(graph.indptr, graph.indices, graph.edge_ids, graph.num_cols, graph.indices.shape[0], longest)
        setattr(graph.slots, _CSR, (found, longest))
    return found


def arrays_of(
    graph: Graph, transposed: bool, *features: Tensor | None, listed: bool = True, sums: bool = False
) -> Structure:
    """The structure for a call on `graph` that gathers rows of the widest of `features`; kept on the graph.

    The transposed half is there only if `transposed`: where a gradient will need it. Work lists only if `listed`: where
    a kernel that reads them (for copied or scaled sources, or dot products) will run, forward or backward. `sums`: that
    of sums and means, which may be of groups of neighbours.
    """
    kept: dict[tuple, Structure] | None = None
    if not torch.compiler.is_compiling() and not graph.indptr.is_cuda:  # what it traces it would watch from then on
        kept = getattr(graph.slots, "structures", None)
    if kept is not None:
        # What is below, for a structure that is there and has no lists.
        found, now = kept.get((transposed, _NO_LIST, _NO_LIST)), schedule.unordered_epochs(graph)
        if found is not None and now is not None and found.epochs == (now if transposed else now[:1]):
            return found
    t = graph.transposed if transposed else None
    if graph.indptr.is_cuda and not torch.compiler.is_compiling():
        choose.age_of(graph).use()
        if t is not None:
            choose.age_of(t).use()
    work = t_work = None
    if listed and (graph.indptr.is_cuda or schedule.ordered(graph) or (t is not None and schedule.ordered(t))):
        row_bytes = 0
        for x in features:
            if x is not None:
                row_bytes = max(row_bytes, math.prod(x.shape[1:]) * x.element_size())
        work = schedule.work_list(graph, row_bytes, sums)
        t_work = None if t is None else schedule.work_list(t, row_bytes, sums)
    if torch.compiler.is_compiling():  # what it traces is not to be kept
        return Structure(Matrix.of(graph, work), None if t is None else Matrix.of(t, t_work))
    epoch = schedule.epoch(graph)
    epochs: tuple = (epoch,) if t is None else (epoch, schedule.epoch(t))
    key = (transposed, id(work), id(t_work))  # a kept structure holds its lists: their ids are theirs
    structures: dict[tuple, Structure] = graph.slot("structures", dict)
    found = structures.get(key)
    if found is None or found.epochs != epochs:
        found = Structure(Matrix.of(graph, work), None if t is None else Matrix.of(t, t_work), epochs)
        if t is not None and graph.edge_ids is not None and graph.indptr.is_cuda:
            found.numbering = graph.slot("numbering", lambda: Numbering(choose.age_of(graph)))
        if not graph.transient():
            for known in structures.values():
                if known.epochs[: len(epochs)] != epochs[: len(known.epochs)]:
                    structures.clear()  # they are of lists that the graph had before
                    break
            structures[key] = found
    return found


def made(described: Described, both: bool, features: Sequence, sums: bool = False) -> Structure:
    """The Structure that `described` stands for now; with both directions if a kernel reads `both`."""
    graph, both = described.graph(), both or described.is_transposed
    floats = (t for t in features if isinstance(t, Tensor) and t.is_floating_point() and t.dim() > 1)
    arrays = arrays_of(graph, both, *floats, sums=sums)
    if arrays.nnz != described.nnz:
        arrays = arrays.numbered_up_to(described.nnz)
    return arrays.transposed() if described.is_transposed else arrays


class _OfEdges:
    """What `_operators.register` makes of an op on a graph beside it: its twin on a `Described`."""

    schemas = (SCHEMA, _described.SCHEMA)
    kind, made = Described, staticmethod(made)


Structure.twin = _OfEdges


def save(ctx, arrays: Structure | Described, *tensors: Tensor | None) -> None:
    """Keep `arrays`, and ctx.save_for_backward of `tensors`; `saved` gives them back.

    The structure stays out of what is saved: nobody writes into it, it is no use to hooks that pack saved tensors
    (torch.autograd.graph.save_on_cpu), and torch.utils.checkpoint wants the same saved tensors of a forward and of the
    same forward again, between which a graph may earn a work list or a ready call.
    """
    ctx.arrays = arrays
    if type(arrays) is Described:  # the user's own tensor: writes into it are autograd's to notice
        ctx.save_for_backward(arrays.edges, *tensors)
    else:
        ctx.save_for_backward(*tensors)


def saved(ctx) -> tuple[Any, tuple]:
    """What `save` kept."""
    if type(ctx.arrays) is Described:
        edges, *tensors = ctx.saved_tensors
        return ctx.arrays.of_edges(edges), tuple(tensors)
    return ctx.arrays, ctx.saved_tensors


def needs_grad(*tensors: Tensor | None) -> bool:
    """True if autograd, or a level of torch.func, will ask for a gradient of any of `tensors`."""
    return torch.is_grad_enabled() and any(t is not None and (t.requires_grad or _recorded(t)) for t in tensors)


def _recorded(tensor: Tensor) -> bool:
    """True if a level of torch.func below the present one records what becomes of `tensor`."""
    if torch.compiler.is_compiling():
        return False
    return any(inner.requires_grad for inner in touch.levels(tensor))


def gradients(function: Callable, inputs: Sequence[Tensor | None], wanted: Sequence[bool], grad: Any) -> tuple:
    """Gradients of function(*inputs) that can be differentiated again; None for inputs that are not `wanted`.

    Of each input by itself, also where several are one tensor. grad: of the result, or a tuple for a tuple.
    """

    def of_wanted(*given: Tensor):
        rest = iter(given)
        return function(*(next(rest) if w else t for t, w in zip(inputs, wanted, strict=True)))

    # Not torch.autograd.grad, for which inputs would have to require gradients: no transform lets a tensor be made so.
    _, pull = torch.func.vjp(of_wanted, *(t for t, w in zip(inputs, wanted, strict=True) if w))  # type: ignore[misc]
    found = iter(pull(grad))
    return tuple(next(found) if w else None for w in wanted)


def epilogue_of(*, source_scale=None, source_indptr=None, row_scale=None, bias=None, relu=False) -> tuple:
    """The binary's description of what a sum does in the same pass (types.h: Fused), of contiguous tensors."""
    return (*(lib.pointer(t) for t in (source_scale, source_indptr, row_scale, bias)), 0, 0, relu, False)


def sources_matter(num_feats: int, edge_feats: int) -> bool:
    """True if rows are to be walked in an order that brings their sources together, and takes the edges out of
    theirs."""
    return bounds.SOURCES_MATTER * edge_feats <= num_feats


def scales_first(nnz: int, num_cols: int, x: Tensor) -> bool:
    """True if a scale per source should be multiplied into x [num_cols, *F] first, instead of being looked up at every
    nonzero. On the CPU, and for 16-bit features, which it would round, it is always looked up.
    """
    return x.is_cuda and x.element_size() > 2 and nnz > bounds.SCALE_FIRST_DEGREE * num_cols
