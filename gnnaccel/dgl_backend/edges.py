"""The EdgeBatch that a user-defined message function gets: node features of both ends, lifted and not gathered.

DGL gathers one row per edge of each feature that the function reads. Here `edges.src["h"]` is a `Lazy`
(gnnaccel.lazy.tensor) as long as the call runs; all else is as DGL has it, and is made when it is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.dgl_backend import touch
from gnnaccel.dgl_backend.structure import ends
from gnnaccel.dgl_backend.touch import Column, LazyFeature, columns_of, edge_frames, index_of, node_frames
from gnnaccel.lazy.reduce import takes
from gnnaccel.lazy.tensor import Lazy, Trip, lift

_LATER: Any = object()  # in place of row numbers


class Lifting:
    """What the columns of one batch share.

    trip : of the lifted features; None once the call is over: then rows are gathered, as in DGL.
    used : a feature was lifted.
    left : why one that was read was not, or None.
    """

    def __init__(self, g, trip: Trip):
        self.trip: Trip | None = trip
        self.used = False
        self.left: str | None = None
        self._g = g
        self._lifted: dict[tuple[int, str], Lazy] = {}
        self._rows: tuple[Tensor, Tensor] | None = None

    def lift(self, column: LiftedColumn, side: str) -> Lazy | None:
        """The values of a column at one end of the edges, or None if DGL is to gather them."""
        value, trip = column.storage, self.trip
        if trip is None:
            return None
        if type(value) not in (Tensor, torch.nn.Parameter) or not takes(value) or value.device != trip.graph.device:
            self.left = f"features of dtype {value.dtype}, which are gathered"
            return None
        self.used = True
        found = self._lifted.get((id(value), side))  # the lifted feature keeps the value
        if found is None:
            found = self._lifted[id(value), side] = lift(trip, side, value)
        return found

    def rows(self, side: str) -> Tensor:
        """The node at one end of each edge."""
        if self._rows is None:
            self._rows = self._g.edges(form="uv")
        return self._rows["uv".index(side)]

    def close(self) -> None:
        """Gather what somebody keeps beyond the call, in which nodes may change; from now on all that is read."""
        trip, self.trip = self.trip, None
        self._lifted.clear()
        if trip is not None:
            trip.settle()


class LiftedColumn(Column):
    """A column of node features, one row per edge: DGL's, whose row numbers are found when somebody needs them.

    What `column` has yet to do (gather rows of its own, move, cast) it does when this one is read.
    """

    def __init__(self, column: Column, lifting: Lifting, side: str):
        self._lifting, self._side, self._column = lifting, side, column
        is_ready = column.index is None and column.device is None and column.deferred_dtype is None
        super().__init__(column.storage if is_ready else None, column.scheme, _LATER)

    @property
    def storage(self):
        return self._column.data if self._stored is None else self._stored

    @storage.setter
    def storage(self, value):
        self._stored = value

    @property
    def index(self):
        if self._row_numbers is _LATER:
            self._row_numbers = self._lifting.rows(self._side)
        return self._row_numbers

    @index.setter
    def index(self, value):
        self._row_numbers = value

    @property
    def data(self):
        lifted = self._lifting.lift(self, self._side) if self._row_numbers is _LATER else None
        return Column.data.fget(self) if lifted is None else lifted

    @data.setter
    def data(self, value):
        Column.data.fset(self, value)


class Edges(touch.EdgeBatch):
    """All edges of a graph of one edge type. Ids are made when somebody asks for them."""

    _ids: Tensor | None

    def __init__(self, g, etype, lifting: Lifting, ids: Tensor | None):
        self._of = g
        source, target = ends(index_of(g))
        src, dst = (_lifted(g, lifting, n, side) for n, side in ((source, "u"), (target, "v")))
        super().__init__(g, ids, etype, src, edge_frames(g)[0], dst)

    def _given(self) -> Tensor:
        if self._ids is None:
            self._ids = self._of.edges(form="eid")
        return self._ids

    def _give(self, value: Tensor | None) -> None:
        self._ids = value

    def batch_size(self) -> int:
        return self._of.num_edges() if self._ids is None else len(self._ids)


setattr(Edges, touch.EDGE_IDS, property(Edges._given, Edges._give))


def fetched(g) -> bool:
    """True if no feature of a graph is a placeholder that a loader is to replace."""
    frames = (*node_frames(g), *edge_frames(g))
    return not any(isinstance(column, LazyFeature) for frame in frames for column in columns_of(frame).values())


def _lifted(g, lifting: Lifting, ntype: int, side: str) -> Any:
    frame = node_frames(g)[ntype]
    found = touch.frame_like(frame, g.num_edges())
    columns_of(found).update({name: LiftedColumn(column, lifting, side) for name, column in columns_of(frame).items()})
    return found
