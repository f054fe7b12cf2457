"""What a graph keeps for the kernels: an order of its rows; for CUDA work lists by the size of a row of features."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from gnnaccel.graph import network, reorder, store
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import choose
from gnnaccel.schedule import rules, worklist
from gnnaccel.schedule.worklist import Kernel, Ordered, Plan, WorkList
from gnnaccel.tiles import gate


class Work:
    """The lists of one graph, which is given to each method that builds.

    Attributes
    ----------
    lists : dict of WorkList
        By lanes (`worklist.lanes_of`): the rows' lists, which every kernel can read.
    sums : dict of WorkList
        By lanes: lists that sums and means take instead where one is there: of groups, or of rows in another order.
    ordered : Ordered or None
        On the CPU: the graph in the order that `prepare` found, if anything is served by it.
    faster : dict of bool
        By lanes: whether sums are faster in that order than as given; not there where that has not been measured.
    order : Tensor [num_rows] or None
        Rows in an order in which neighbours share sources, as given or found; None where none is known.
    given : Tensor [num_rows] or None
        That of the rows as given, of a graph for which another was found and lists in both were timed.
    order_name : str or None
        By which method `prepare` found that order; None where rows are as given.
    order_note : str
        How it came by it, if not by looking for it.
    """

    def __init__(self) -> None:
        self.lists: dict[int, WorkList] = {}
        self.sums: dict[int, WorkList] = {}
        self.ordered: Ordered | None = None
        self.faster: dict[int, bool] = {}
        self.order: Tensor | None = None
        self.given: Tensor | None = None
        self.order_name: str | None = None
        self.order_note = ""
        self._order_sought = False
        self._method: str | None = None  # by which an order was sought last, whether or not one that pays was found
        self.epoch = 0  # counts changes of what the kernels are given
        self._refused = False  # there is no memory for lists
        # A captured CUDA graph reads lists by address alone, so those that anybody was given live as long as the graph.
        self._retired: list[WorkList] = []
        self._handed_out: set[int] = set()  # ids of their items

    @property
    def reordered(self) -> bool:
        """True if `prepare` found an order of the rows that pays."""
        return self.order_name is not None

    def on_cpu(self, row_bytes: int) -> Ordered | None:
        """`work_list` on the CPU."""
        return self.ordered if self.faster.get(worklist.lanes_of(row_bytes)) else None

    def on_cuda(self, graph: Graph, row_bytes: int, sums: bool) -> WorkList | None:
        """The same on CUDA."""
        found = self._list_of(graph, worklist.lanes_of(row_bytes), sums)
        if found is not None:
            self._handed_out.add(id(found.items))
        return found

    def _list_of(self, graph: Graph, lanes: int, sums: bool) -> WorkList | None:
        found = (self.sums.get(lanes) if sums else None) or self.lists.get(lanes)
        if found is not None or self._refused:
            return found
        if not choose.lasts(choose.age_of(graph)) or graph.nnz == 0 or torch.are_deterministic_algorithms_enabled():
            return None
        if graph.transient():
            return None
        gate.look(graph)
        try:
            self.seek_order(graph)
            rows = self.build(graph, lanes)
        except torch.OutOfMemoryError:
            self._refused = True
            logger = logging.getLogger("gnnaccel")
            logger.warning("%s: no memory for a work list; its kernels do without, slower", graph)
            return None
        return self.sums.get(lanes, rows) if sums else rows

    def prepare(self, graph: Graph, method: str | None, like: Graph | None, folder: Path | None) -> None:
        """See `prepare`."""
        self.epoch += 1
        self.order_note = ""
        if method and self._method == method and folder is not None:
            if not store.order_path(graph, method, folder).exists():
                store.save_order(graph, method, self.order if self.order_name else None, folder)
        elif method and self._method != method:
            before = self.order_name is not None
            same = like is not None and graph.num_rows == graph.num_cols and network.is_symmetric(graph)
            with torch.inference_mode(False), torch.no_grad():
                order = of(like).order if like is not None and same and of(like).reordered else None
                order = self._sought(graph, method, folder) if order is None else order
            self._method, self.order_name = method, None if order is None else method
            if order is not None or before:
                self.order, self._order_sought = order, order is not None
                for old in (*self.lists.values(), *self.sums.values()):
                    self._retire(old)
                self.lists, self.sums, self.ordered, self.faster = {}, {}, None, {}
                gate.forget_measured(graph)
        if graph.indptr.is_cuda:
            self.build_all(graph, like)

    def inherit(self, graph: Graph, other: Work) -> None:
        """Be as `other` was prepared, or has earned it by use: that of a graph of the same nodes and nearly its
        edges."""
        epoch = self.epoch
        self.order, self.order_name, self.faster = other.order, other.order_name, dict(other.faster)
        self.given = other.given
        self._method, self._order_sought = other._method, other._order_sought
        try:
            if any(self.faster.values()) and not graph.indptr.is_cuda:
                self.ordered = self.in_order(graph)
            for mine, given in ((self.lists, other.lists), (self.sums, other.sums)):
                for lanes, work in given.items():
                    mine[lanes] = self.arranged(graph, work.plan, as_given=work.as_given)
        except torch.OutOfMemoryError:
            vars(self).update(vars(Work()))  # lists are earned by use, where there is memory then
        self.epoch = epoch + 1

    def in_order(self, graph: Graph) -> Ordered:
        """On the CPU: `graph` in the order that was found; the copy that is there, or a new one, which is not kept."""
        assert self.order is not None
        with torch.inference_mode(False), torch.no_grad():
            return self.ordered or worklist.ordered(graph, self.order)

    def adopt_order(self, graph: Graph, faster: dict[int, bool]) -> None:
        """On the CPU: serve rows by the order that was found where that is faster, by lanes."""
        self.epoch += 1
        self.faster = faster
        self.ordered = self.in_order(graph) if any(faster.values()) else None

    def build_all(self, graph: Graph, like: Graph | None = None) -> None:
        """Lists of every size, by rule. `like`: the transposed graph, whose lists may serve too."""
        self.seek_order(graph)
        gate.look(graph)
        twin = of(like) if like is not None and self._has_rows_of(graph, like) else None
        for lanes in worklist.LANES:
            self.build(graph, lanes, twin)

    def _sought(self, graph: Graph, method: str, folder: Path | None) -> Tensor | None:
        """What `reorder.order_by` finds, or has found before and is in the folder."""
        if folder is not None:
            try:
                found, self.order_note = store.load_order(graph, method, folder), "from disk"
                return found
            except FileNotFoundError:
                pass
            except store.Stale as reason:
                self.order_note = f"that on disk is of no use: {reason}"
        order = reorder.order_by(graph, method)
        if folder is not None:
            store.save_order(graph, method, order, folder)
        return order

    def _has_rows_of(self, graph: Graph, like: Graph) -> bool:
        """True if lists of `like` serve `graph`: rows as long, in the same order."""
        if graph.num_rows != like.num_rows or not torch.equal(graph.indptr, like.indptr):
            return False
        own, other = self.order, of(like).order
        return own is other or (own is not None and other is not None and torch.equal(own, other))

    def seek_order(self, graph: Graph) -> None:
        """Find out whether the rows as given are in an order with locality, unless that is known."""
        if not self._order_sought:
            with torch.inference_mode(False), torch.no_grad():
                self.order, self._order_sought = reorder.given_order(graph), True

    def build(self, graph: Graph, lanes: int, twin: Work | None = None) -> WorkList:
        """The rows' list, and that of groups where these pay: by rule, if there are none yet.

        `twin`: of a graph whose lists may serve too.
        """
        if lanes not in self.lists:
            plan = rules.plan_of(graph, lanes, self.order is not None, reordered=self.reordered)
            made = self.arranged(graph, plan, twin)
            if rules.groups_pay(graph, lanes, plan):
                groups = rules.groups_of(graph, lanes, plan.arrangement)
                self.sums[lanes] = self.arranged(graph, groups, twin)
            self.lists[lanes] = made
            self.epoch += 1
        return self.lists[lanes]

    def plan(self, graph: Graph, row_bytes: int, sums: bool = True) -> Plan:
        """By which rows of `row_bytes` go, or their sums and means."""
        lanes = worklist.lanes_of(row_bytes)
        rows = self.build(graph, lanes)
        return (self.sums.get(lanes, rows) if sums else rows).plan

    def arranged(self, graph: Graph, plan: Plan, twin: Work | None = None, *, as_given: bool = False) -> WorkList:
        """A list of this plan: one that is there, or a new one, which is not kept. `as_given`: not in `order`, but in
        that of `given`."""
        for work in (self, twin) if twin else (self,):
            for other in (*work.lists.values(), *work.sums.values()):
                if other.plan.list_key == plan.list_key and other.as_given is as_given:
                    return other._replace(plan=plan)
        with torch.inference_mode(False), torch.no_grad():
            made = worklist.build(graph, plan, self.given if as_given else self.order)
        return made._replace(as_given=as_given)

    def adopt(self, row_bytes: int, work: WorkList) -> None:
        """Serve features of `row_bytes` by this list and its plan from now on; by groups only their sums and means."""
        lanes = worklist.lanes_of(row_bytes)
        self.serve(lanes, self.lists.get(lanes) if work.plan.kernel is Kernel.GROUPS else work, work)

    def serve(self, lanes: int, rows: WorkList | None, sums: WorkList) -> None:
        """Serve features of so many lanes by the list `rows` from now on, but their sums and means by `sums`."""
        self.epoch += 1
        for lists, new in ((self.lists, rows), (self.sums, None if sums is rows else sums)):
            old = lists.pop(lanes, None)
            if new is not None:
                lists[lanes] = new
            if old is not None and old is not new:
                self._retire(old)

    def _retire(self, old: WorkList) -> None:
        """Keep a list that serves no longer for captures that read it; one that nobody was given need not be."""
        if id(old.items) in self._handed_out and all(old.items is not other.items for other in self._retired):
            self._retired.append(old)

    def arrays(self) -> list[Tensor]:
        """The tensors of all lists, and of the order."""
        lists = [*self.lists.values(), *self.sums.values(), *self._retired]
        held = [a for work in lists for a in (work.items, work.steps, work.splits)]
        held += [] if self.ordered is None else [self.ordered.rows, self.ordered.indptr, self.ordered.edges]
        return held + ([] if self.order is None else [self.order])


_SLOT = "schedule"


def of(graph: Graph) -> Work:
    """What `graph` keeps for the kernels."""
    known: Work | None = getattr(graph.slots, _SLOT, None)
    return graph.slot(_SLOT, Work) if known is None else known


def epoch(graph: Graph) -> int:
    """Counts the changes of what kernels are given for `graph`."""
    known: Work | None = getattr(graph.slots, _SLOT, None)
    return 0 if known is None else known.epoch


def epochs(graph: Graph) -> tuple[int, int | None]:
    """That of the graph, and of its transposed one; None where there is none."""
    own, transposed = getattr(graph.slots, _SLOT, None), graph._transposed
    other = None if transposed is None else getattr(transposed.slots, _SLOT, None)
    mine = 0 if own is None else own.epoch
    return mine, None if transposed is None else 0 if other is None else other.epoch


def unordered_epochs(graph: Graph) -> tuple[int, int | None] | None:
    """`epochs`; None if there is an order of the rows of either, on the CPU."""
    own, transposed = getattr(graph.slots, _SLOT, None), graph._transposed
    other = None if transposed is None else getattr(transposed.slots, _SLOT, None)
    if own is None and other is None:
        return 0, None if transposed is None else 0
    if (own is not None and own.ordered is not None) or (other is not None and other.ordered is not None):
        return None
    return epochs(graph)


def ordered(graph: Graph) -> Ordered | None:
    """On the CPU: `graph` in the order that `prepare` found, if that serves anything."""
    known: Work | None = getattr(graph.slots, _SLOT, None)
    return None if known is None else known.ordered


def is_new(graph: Graph) -> bool:
    """True for a CUDA graph that has no lists, and has not been used more often than a sampled one is."""
    known: Work | None = getattr(graph.slots, _SLOT, None)
    listed = known is not None and (known._refused or bool(known.lists or known.sums))
    return not listed and choose.is_new(choose.age_of(graph))


def note_use(graph: Graph, since: int) -> bool:
    """Count a use of a CUDA graph by a call that last asked for a list at use `since`; True if it should again."""
    age = choose.age_of(graph)
    age.use()
    return choose.earns(age, since) and not of(graph)._refused


def work_list(graph: Graph, row_bytes: int, sums: bool = False) -> WorkList | Ordered | None:
    """The order in which kernels take the rows for features of `row_bytes`; None before it is worth its cost.

    On the CPU: that of `prepare(reorder=)`, for sums, means and extremes. On CUDA:

    Built on the device when the graph has proved to last, then kept. Not in deterministic mode, where all calls are
    to give the same bits (lists of `prepare` do), nor while a CUDA graph is captured: building synchronises; nor
    under a transform of torch.func. torch.compile traces the calls without a list. `sums`: for sums and means.
    """
    if torch.compiler.is_compiling():
        return None
    work = of(graph)
    return work.on_cuda(graph, row_bytes, sums) if graph.indptr.is_cuda else work.on_cpu(row_bytes)


def prepare(graph: Graph, method: str | None, *, like: Graph | None = None, folder: Path | None = None) -> None:
    """Build now what `work_list` may be asked for; first, if asked to, find an order of the rows with locality.

    `method`: one of `reorder.ORDERS`. `like`: the transposed graph, prepared before. Where both hold the same edges its
    order serves here too. `folder`: where orders are kept on disk.
    """
    of(graph).prepare(graph, method, like, folder)


def inherit(graph: Graph, other: Graph) -> None:
    """Have a new graph prepared as `other` is: one of the same nodes and nearly the same edges.

    Where lists, orders, plans and tiles of `other` were found for its edges, they serve these as well.
    """
    pairs = [(graph, other)]
    if other._transposed is not None:
        pairs.append((graph.transposed, other._transposed))
    for heir, prepared in pairs:
        of(heir).inherit(heir, of(prepared))
        gate.inherit(heir, prepared)


def decide_tiles(graph: Graph, features: int, faster: bool) -> None:
    """Whether sums of rows of `features` numbers go by tiles from now on, as measured, of a translated graph."""
    gate.decide(graph, features, faster)
    of(graph).epoch += 1
