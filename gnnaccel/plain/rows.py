"""Rows that code of torch gathers by one end of edges, and scatters by the other.

The ends are rows of a tensor of edges [2, E] (or columns of one [E, 2]), whatever view of it the code has, or two
tensors [E]: those belong together once something was gathered by one of them and scattered by the other. What the code
scatters by is where messages go to. A gather gives a `Lazy`, a scatter reduces one; all other functions of torch run as
they do anyway. Before one of them writes into a tensor, the rows that are made of it are. The first call of a module is
torch's alone, and watched: where messages go, and what the code writes into.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gnnaccel import touch
from gnnaccel.graph import build, modes
from gnnaccel.graph.cache import USED, derived, graph_key
from gnnaccel.graph.csr import Graph
from gnnaccel.in_place import writes
from gnnaccel.lazy.expression import tensors_of
from gnnaccel.lazy.reduce import Unsupported, reduced, softmax, takes
from gnnaccel.lazy.rules import TENSORS
from gnnaccel.lazy.tensor import Lazy, Trip, lift, waits
from gnnaccel.lower import bounds, choose
from gnnaccel.recording import call, take, unseen

_INDICES = (torch.int64, torch.int32)
FEW = "few messages, which torch's own code makes the quicker"
NEW = "few messages of edges that were not seen before"
WRITES = "it writes into what its messages are made of, or into rows of edges"
_FLOWS = ("target_to_source", "source_to_target")  # by the row of destinations, as PyG has them
_OTHER = "other end"  # what is kept with a tensor [E]: (Owner of the tensor of the other end, its own row)
_NONE = "an index is out of range"


class End(NamedTuple):
    """One end of edges: row `row` of edges [2, E] (or column of [E, 2]), or of two tensors, sources first."""

    edges: tuple[Tensor, ...]
    row: int


@dataclass
class Code:
    """What is known of the code of one module.

    destinations : the row of edges [2, E] that holds them. few : with so many indices its messages were few.
    width : features of the widest rows that it gathers or scatters.
    watched : modes of calls that were. mode : that of the newest call, what it may branch on. writes : it writes into
        what it gathers from, into rows, or what they are computed with: a walk would not see it, or not find again for
        its gradient what it has read. idle : it reduces nothing by edges. trust : what is known of what it reads.
    """

    destinations: int = 1
    few: int = 0
    width: int = 1
    watched: set = field(default_factory=set)
    writes: bool = False
    mode: tuple = ()
    idle: bool = False
    trust: Any = None


class Rows(TorchFunctionMode):
    """One call of a module's forward().

    watching : nothing is done, but noted in `code`. outer : the call around it.
    given : what its caller may write into before the backward pass, which has to find what was read.
    used : something was reduced by us, or would be if this were not watching. reason : why something was not.
    """

    def __init__(self, code: Code, watching: bool, outer: Rows | None, given: Iterable[Any]):
        super().__init__()
        self._code, self.watching, self._outer = code, watching, outer
        self._given = {id(x) for x in touch.pytree.tree_flatten(list(given))[0]}
        self._copies: dict[tuple, Tensor] = {}  # of what was given
        self._minded: dict[int, list[weakref.ref[Tensor]]] = {}  # where watching: what is not to be written into
        self._gathers = False  # the function that runs
        self._made: dict[int, list[weakref.ref[Tensor]]] = {}  # and which of it is made of rows
        self._trips: dict[tuple, Trip | None] = {}
        self._held: list[tuple[Tensor, ...]] = []  # ids are of living things
        self._alone: list[Tensor] = []  # what was gathered by, and is an end of no edges that are known
        self.used = False
        self.reason: str | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            try:
                out = handler(self, *args, **kwargs)
            except (Unsupported, TypeError) as error:  # arguments that the handler does not know
                self.reason, out = str(error), NotImplemented
            if out is not NotImplemented:
                return out
        if writes(func, args, kwargs):
            self._before(args, kwargs)
        out = func(*args, **kwargs)
        if self.watching and func not in _REDUCING and not _makes_new(func):
            self._follow((args, kwargs), out)
        self._gathers = False
        return out

    def _follow(self, given: Any, out: Any) -> None:
        """Note, of what is computed with rows, that it is made of rows, and what else that takes."""
        given = [x for x in touch.pytree.tree_flatten(given)[0] if isinstance(x, Tensor)]
        if self._gathers or any(_is_in(self._made, x) for x in given):
            for x in given:
                _note(self._minded, x)
            for x in touch.pytree.tree_flatten(out)[0]:
                if isinstance(x, Tensor):
                    _note(self._made, x)
                    _note(self._minded, x)

    @property
    def gathered(self) -> str | None:
        """Why one row per edge was stored, or None."""
        return next((trip.gathered for trip in self._trips.values() if trip and trip.gathered), None)

    def ordinary(self, out: Any) -> Any:
        """A result with rows in the place of lazy ones."""
        return touch.pytree.tree_map_only(Lazy, lambda x: x.rows("a result with one row per edge"), out)

    def settle(self) -> None:
        """To be called when nothing of the call is left but what somebody keeps."""
        for trip in self._trips.values():
            if trip is not None:
                trip.settle()

    @unseen
    def _before(self, args: tuple, kwargs: dict) -> None:
        """To be called before a function writes into its first argument, or `out`: rows of what is lazy and made of the
        same memory are made."""
        into = (args[:1], [kwargs.get(name) for name in ("input", "self", "out")])
        given = [x for x in touch.pytree.tree_flatten(into)[0] if isinstance(x, Tensor)]
        written = {_memory(x) for x in given if not isinstance(x, Lazy)}
        if self.watching:
            self._code.writes |= any(_is_in(self._minded, x) for x in given)
        for trip in filter(None, self._trips.values()):
            for lazy in [ref() for ref in trip.made]:
                if lazy is None:
                    continue
                if any(x is lazy for x in given) or (lazy._value is not None and _memory(lazy._value) in written):
                    self._code.writes = True
                    raise RuntimeError(
                        "gnnaccel: rows of edges are written into, which no call had done that was watched; the next "
                        "call of this module is torch's own"
                    )
                if not written.isdisjoint(map(_memory, _read(lazy))):
                    lazy.rows("what it is made of is written into")
        if self._outer is not None:
            self._outer._before(args, kwargs)

    def _to(self, edges: tuple[Tensor, ...]) -> int:
        """The row of destinations."""
        return self._code.destinations if len(edges) == 1 else 1

    @unseen
    def trip(self, edges: tuple[Tensor, ...], nodes: int) -> Trip | None:
        """The trip over these edges between so many nodes; None where they are no such edges."""
        key = (*((id(x), x._version) for x in edges), nodes)
        if key not in self._trips:
            graph = _graph(edges, nodes, self._to(edges))
            self._held.append(edges)
            self._trips[key] = None if graph is None or graph.nnz == 0 else Trip(graph, waits(graph))
            if graph is not None:
                take(graph, edges)
        return self._trips[key]

    def gather(self, x: Tensor, index: Tensor) -> Any:
        """x[index], lazy."""
        if type(x) not in TENSORS or not takes(x) or x.dim() < 2:
            return NotImplemented
        end = end_of(index)
        self._gathers = True
        if end is None:
            self._alone.append(index)
            return NotImplemented
        if self._are_few(end.edges, x) or self.watching:
            return NotImplemented
        trip = self.trip(end.edges, x.shape[0])
        if trip is None or x.device != trip.graph.device:
            return NotImplemented
        if id(x) in self._given and x.requires_grad and torch.is_grad_enabled():
            x = self._copies.setdefault((id(x), x._version), x.clone())
        return lift(trip, "v" if end.row == self._to(end.edges) else "u", x)

    @unseen
    def _are_few(self, edges: tuple[Tensor, ...], x: Tensor) -> bool:
        """True if messages as wide as `x` are left to torch; then `reason` says why."""
        kind, count = x.device.type, edges[0].numel() // (3 - len(edges))
        self._code.width = max(self._code.width, math.prod(x.shape[1:]))  # narrow rows go the way of wide ones
        width = self._code.width * bounds.COUNTS_PLAIN.get(kind, 1)
        if choose.are_few(device=kind, edges=count, width=width, nodes=x.shape[0]):
            self.reason = FEW
            return True
        if derived.get(edges, USED) is not None or modes.recomputing() or choose.fixed == "lasting":
            return False
        derived.put(edges, USED, set())
        if choose.are_few(device=kind, edges=count, width=width, first=True):
            self.reason = NEW
            return True
        return False

    def scatter(self, like: Tensor, index: Tensor, messages: Tensor, reduce: str) -> Any:
        """`messages` [E, ...] reduced to rows of the shape of `like` by an end of edges; NotImplemented of others."""
        if not takes(messages) or messages.dim() < 2 or messages.dtype != like.dtype:
            return NotImplemented
        if like.shape[1:] != messages.shape[1:] or like.device != messages.device:
            return NotImplemented
        end = end_of(index, messages) or self._joined(index, messages)
        if end is None:
            return NotImplemented
        if not isinstance(messages, Lazy) and self._are_few(end.edges, messages):
            return NotImplemented
        if self.watching:
            if not self.used and len(end.edges) == 1:
                self._code.destinations = end.row
            self.used = True
            return NotImplemented
        if end.row != self._to(end.edges):
            self.reason = "messages are reduced at both ends of the edges"
            return NotImplemented
        trip = self.trip(end.edges, like.shape[0])
        if trip is None:
            return NotImplemented
        if isinstance(messages, Lazy) and messages.trip is not trip:
            messages = messages.rows("messages to another number of nodes")
        out = reduced(trip.graph, messages, reduce)
        self.used = True
        return out

    @unseen
    def _joined(self, index: Tensor, messages: Tensor) -> End | None:
        """The end that `index` is of, now that messages were gathered by another tensor and are scattered by this."""
        to = _whole(index, messages)
        of = next((x for x in self._alone if to is not None and x is not to and x.shape == to.shape), None)
        if to is None or of is None or of.dtype != to.dtype or of.device != to.device or modes.recomputing():
            return None
        derived.put((of,), _OTHER, (derived.owner(to), 0))
        derived.put((to,), _OTHER, (derived.owner(of), 1))
        return End((of, to), 1)

    def softmax(self, scores: Tensor, index: Tensor, nodes: int | None) -> Any:
        """The softmax of scores [E, ...] over the edges of each destination; NotImplemented where `index` is not one
        of an end of edges."""
        end = end_of(index)
        trip = scores.trip if isinstance(scores, Lazy) else None
        if end is None or trip is None or end.row != self._to(end.edges) or nodes not in (None, trip.graph.num_rows):
            return NotImplemented
        if self.trip(end.edges, trip.graph.num_rows) is not trip:
            return NotImplemented
        self.used = True
        return softmax(trip.graph, scores)


def _memory(tensor: Tensor) -> int:
    if isinstance(tensor, Lazy) or tensor.layout is not torch.strided or touch.is_lazy(tensor):  # which has none
        return id(tensor)
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _note(noted: dict[int, list[weakref.ref[Tensor]]], tensor: Tensor) -> None:
    noted.setdefault(_memory(tensor), []).append(weakref.ref(tensor))


def _is_in(noted: dict[int, list[weakref.ref[Tensor]]], tensor: Tensor) -> bool:
    """True if a tensor that lives is noted that has the memory of this one."""
    return any(ref() is not None for ref in noted.get(_memory(tensor), ()))


def _read(lazy: Lazy) -> list[Tensor]:
    return tensors_of(lazy.expression) if lazy._value is None else []


def _makes_new(func: Any) -> bool:
    """True for a function that takes no more than shape and type of what it is given."""
    name = getattr(func, "__name__", "")
    return name.startswith("new_") or name.endswith("_like")


def _whole(index: Any, like: Tensor | None) -> Tensor | None:
    """`index` [E], or the tensor [E] that was expanded to the shape of `like` [E, ...]; None for what is neither."""
    if type(index) is not Tensor or index.dtype not in _INDICES or index.dim() == 0 or index.is_inference():
        return None
    if index.dim() == 1:
        return index
    base = touch.base_of(index)
    if like is None or index.shape != like.shape or any(index.stride()[1:]) or type(base) is not Tensor:
        return None
    place = index.data_ptr(), len(index), index.stride(0)
    if base.dim() == 1 and (base.data_ptr(), len(base), base.stride(0)) == place:
        return base
    while index.dim() > 1 and index.numel():
        index = index.select(-1, 0)
    return index if index.dim() == 1 else None  # of edges [2, E]


@unseen
def end_of(index: Any, like: Tensor | None = None) -> End | None:
    """Which end of edges `index` [E], or expanded to the shape of `like` [E, ...], is; None of what is none."""
    whole = _whole(index, like)
    if whole is None:
        return None
    found = derived.get((whole,), _OTHER)
    if found is not None:
        other, row = found[0].ref(), found[1]
        return None if other is None else End((other, whole) if row else (whole, other), row)
    edges, count = touch.base_of(whole), len(whole)
    if type(edges) is not Tensor or edges.dim() != 2 or edges.layout is not torch.strided or edges.is_inference():
        return None
    across = next((d for d in (0, 1) if edges.shape[d] == 2 and edges.shape[1 - d] == count), None)
    if across is None or count <= 2 or whole.stride(0) != edges.stride(1 - across) or not edges.stride(across):
        return None
    row, rest = divmod(int(whole.storage_offset() - edges.storage_offset()), edges.stride(across))
    return End((edges,), row) if rest == 0 and row in (0, 1) else None


def _graph(edges: tuple[Tensor, ...], nodes: int, destinations: int) -> Graph | None:
    """The graph of edges, kept with them as that of an edge_index of PyG; None where an index is out of range."""
    key = graph_key(nodes, nodes, _FLOWS[destinations])
    graph = derived.get(edges, key) or derived.get(edges, ("none", *key))
    if graph is None:
        try:
            with modes.outside_inference():
                ends = torch.stack(edges) if len(edges) == 2 else edges[0] if len(edges[0]) == 2 else edges[0].t()
                graph = Graph(*build.edges_to_csr(ends, destinations, nodes, nodes, False))
        except ValueError:
            graph = _NONE
        derived.put(edges, key if graph is not _NONE else ("none", *key), graph)
        derived.put(edges, USED, True)
    return None if graph is _NONE else graph


def _getitem(rows: Rows, x: Tensor, key: Any) -> Any:
    key = key[0] if type(key) is tuple and len(key) == 1 else key
    return rows.gather(x, key) if isinstance(key, Tensor) and key.dim() == 1 else NotImplemented


def _is_first(dim: Any, x: Any) -> bool:
    return isinstance(x, Tensor) and dim in (0, -x.dim())


def _index_select(rows: Rows, input: Tensor, dim: int, index: Tensor) -> Any:
    return rows.gather(input, index) if _is_first(dim, input) else NotImplemented


def _index_add(rows: Rows, input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Any:
    if alpha != 1 or not _is_first(dim, input):
        return NotImplemented
    found = rows.scatter(input, index, source, "sum")
    return found if found is NotImplemented else input + found


def _index_add_in_place(rows: Rows, input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Any:
    if alpha != 1 or not _is_first(dim, input):
        return NotImplemented
    found = rows.scatter(input, index, source, "sum")
    if found is NotImplemented:
        return found
    rows._before((input,), {})
    return input.add_(found)


def _scatter_add(rows: Rows, input: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    return _index_add(rows, input, dim, index, src)


def _scatter_add_in_place(rows: Rows, input: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    return _index_add_in_place(rows, input, dim, index, src)


_REDUCES = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min"}


def _replaced(rows: Rows, input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str) -> Any:
    """Rows of `input` to which an edge goes replaced by what `src` is reduced to."""
    if reduce not in _REDUCES or not _is_first(dim, input):
        return NotImplemented
    found = rows.scatter(input, index, src, _REDUCES[reduce])
    end = end_of(index, src)
    if found is NotImplemented or end is None or (trip := rows.trip(end.edges, len(input))) is None:
        return NotImplemented
    return call(_where_reached, trip.graph, found, input)


def _where_reached(graph: Graph, found: Tensor, others: Tensor) -> Tensor:
    reached = (graph.indptr.diff() > 0).view(-1, *(1,) * (others.dim() - 1))
    return torch.where(reached, found, others)


def _scatter_reduce(
    rows: Rows, input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    if include_self:
        return _index_add(rows, input, dim, index, src) if reduce == "sum" else NotImplemented
    return _replaced(rows, input, dim, index, src, reduce)


def _scatter_reduce_in_place(
    rows: Rows, input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    if include_self:
        return _index_add_in_place(rows, input, dim, index, src) if reduce == "sum" else NotImplemented
    found = _replaced(rows, input, dim, index, src, reduce)
    if found is NotImplemented:
        return found
    rows._before((input,), {})
    return input.copy_(found)


def _expand_as(rows: Rows, input: Tensor, other: Tensor) -> Any:
    return input.expand(other.shape) if isinstance(other, Lazy) and not isinstance(input, Lazy) else NotImplemented


_HANDLERS: dict[Any, Callable] = {
    Tensor.__getitem__: _getitem,
    Tensor.index_select: _index_select,
    torch.index_select: _index_select,
    Tensor.index_add: _index_add,
    torch.index_add: _index_add,
    Tensor.index_add_: _index_add_in_place,
    Tensor.scatter_add: _scatter_add,
    torch.scatter_add: _scatter_add,
    Tensor.scatter_add_: _scatter_add_in_place,
    Tensor.scatter_reduce: _scatter_reduce,
    torch.scatter_reduce: _scatter_reduce,
    Tensor.scatter_reduce_: _scatter_reduce_in_place,
    Tensor.expand_as: _expand_as,
}
_REDUCING = {f for f, handler in _HANDLERS.items() if handler not in (_getitem, _index_select, _expand_as)}
