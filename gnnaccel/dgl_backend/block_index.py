"""DGL's index of a block that a GPU has sampled, or of a subgraph: its structure is there alone, as our Graph.

A DGL that was built for the CPU would want it in host memory at once: three copies per block that nobody reads, for
message passing runs on the Graph. Here the index answers by itself what training asks, and is handed to DGL's C++ when
something else is asked: every call into C++ passes by `made` first (bridge.py).
"""

from __future__ import annotations

import functools
import weakref

import torch

from gnnaccel.dgl_backend import touch
from gnnaccel.dgl_backend.device import place
from gnnaccel.dgl_backend.structure import set_structure
from gnnaccel.graph import build
from gnnaccel.graph.csr import Graph

_SOURCES, _DESTINATIONS = 0, 1  # node types
_BITS = {torch.int32: "int32", torch.int64: "int64"}


_unmade: dict[int, weakref.ref[BlockIndex]] = {}  # by id: DGL's C++ makes the hash of an index


@functools.cache
def _metagraph(num_types: int):
    """Of one edge type from one node type to another, or to itself."""
    return touch.create_metagraph()(num_types, [_SOURCES], [num_types - 1], True)


class BlockIndex(touch.HeteroGraphIndex):
    """An index of one edge type, whose edge ids are the places of the edges in the Graph's rows.

    _num_types : of nodes: two in a block, one in a graph.
    """

    def __reduce__(self):
        return _new_index, (touch.HeteroGraphIndex,), self.__getstate__()

    _structure: Graph  # what DGL's caches have of it may be dropped
    _idtype: torch.dtype
    _made: bool
    _num_types: int

    # That of DGL's base class asks C++ for what is not there, of a structure that may not be there either.
    __getattribute__ = object.__getattribute__

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        self.make()
        return super().__getattr__(name)

    @property
    def handle(self):
        self.make()
        return super().handle

    def make(self) -> None:
        """Have it in C++, in host memory; once."""
        if self._made:
            return
        graph, types = self._structure, self._num_types
        ends, sizes = (graph.num_cols, graph.num_rows), [self.num_nodes(t) for t in range(types)]
        indptr, indices = (array.to("cpu", self._idtype) for array in (graph.indptr, graph.indices))
        formats = ["coo", "csr", "csc"]
        unit = touch.create_unit()(types, *ends, indptr, indices, indices[:0], formats, True)
        counts = touch.to_array()(torch.tensor(sizes))
        self.__init_handle_by_constructor__(touch.create_index(), _metagraph(types), [unit], counts)
        self._made = True
        _unmade.pop(id(self), None)

    metagraph = property(lambda self: _metagraph(self._num_types))
    dtype = property(lambda self: _BITS[self._idtype])

    def is_metagraph_unibipartite(self):
        return self._num_types == 2

    def number_of_ntypes(self):
        return self._num_types

    def number_of_etypes(self):
        return 1

    def get_relation_graph(self, etype):
        return self if int(etype) == 0 else super().get_relation_graph(etype)

    def num_nodes(self, ntype):
        graph = self._structure
        if int(ntype) == _SOURCES:
            return graph.num_cols
        return graph.num_rows if int(ntype) < self._num_types else super().num_nodes(ntype)

    def num_edges(self, etype):
        return self._structure.nnz if int(etype) == 0 else super().num_edges(etype)

    number_of_nodes, number_of_edges = num_nodes, num_edges

    def asbits(self, bits):
        if self._made or bits not in (32, 64):
            return super().asbits(bits)
        return _index(self._structure, torch.int32 if bits == 32 else torch.int64, self._num_types)

    def edges(self, etype, order=None):
        if int(etype) != 0 or order not in (None, "eid"):
            return super().edges(etype, order)
        graph = self._structure
        ids = torch.arange(graph.nnz, dtype=self._idtype, device=graph.device)
        return graph.indices.to(self._idtype, copy=True), build.rows_of(graph.indptr).to(self._idtype), ids


def _new_index(cls):
    return cls.__new__(cls)


def block_index(graph: Graph, idtype: torch.dtype) -> BlockIndex:
    """The index of a block whose edges are those of `graph`, on a GPU, without edge ids; DGL's ids are `idtype`."""
    return _index(graph, idtype, 2)


def square_index(graph: Graph, idtype: torch.dtype) -> BlockIndex:
    """The same of a graph of one type of nodes."""
    return _index(graph, idtype, 1)


def _index(graph: Graph, idtype: torch.dtype, num_types: int) -> BlockIndex:
    index = BlockIndex.__new__(BlockIndex)
    index._structure, index._idtype, index._made, index._num_types = graph, idtype, False, num_types
    _unmade[id(index)] = weakref.ref(index, functools.partial(_forget, id(index)))
    set_structure(index, graph, (_SOURCES, num_types - 1))
    place(index, graph.device)
    return index


def _forget(number: int, _reference) -> None:
    _unmade.pop(number, None)


def make_all() -> None:
    """Before DGL's C++ is called without `made`."""
    for reference in list(_unmade.values()):
        if (index := reference()) is not None:
            index.make()


def made(args) -> None:
    """What goes into C++ is there: of a call's arguments, and lists of them."""
    for arg in args:
        if type(arg) is BlockIndex:
            arg.make()
        elif type(arg) in (list, tuple):
            made(arg)
