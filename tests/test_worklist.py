"""Work lists: every nonzero in exactly one item, whatever the arrangement; the orders that they promise."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from gnnaccel import schedule
from gnnaccel.graph import reorder
from gnnaccel.graph.csr import Graph
from gnnaccel.planning import orders
from gnnaccel.schedule import rules, worklist
from gnnaccel.schedule.worklist import PIECE_RUN, Arrangement, Kernel, Plan

DEGREES = {
    "empty": [],
    "edgeless": [0, 0, 0],
    "ordinary": [3, 0, 1, 5, 2, 0, 4],
    "at the cap": [63, 64, 65, 128, 129, 0, 31, 32, 33],
    "hub": [1, 5000, 2, 0, 3],
}


def graph_of(degrees, index=torch.int32) -> Graph:
    indptr = torch.cat([torch.zeros(1, dtype=torch.long), torch.tensor(degrees, dtype=torch.long).cumsum(0)])
    return Graph(indptr.to(index), torch.zeros(int(indptr[-1]), dtype=index), None, 1)


def nonzeros_of(item, steps) -> list[int]:
    """The nonzeros of an item, as the kernels walk them."""
    _, k, end, part = item
    if not part:
        return list(range(k, end))
    step = int(steps[part - 1])
    return [j for first in range(k, end, step) for j in range(first, min(first + PIECE_RUN, end))]


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("arrangement", list(Arrangement))
@pytest.mark.parametrize("name", DEGREES)
def test_every_nonzero_is_in_one_item(name, arrangement, index):
    graph = graph_of(DEGREES[name], index)
    order = torch.arange(graph.num_rows).flip(0)
    list_ = worklist.build(graph, Plan(64, arrangement), order)
    assert {t.dtype for t in (list_.items, list_.steps, list_.splits)} == {index}
    indptr, seen, parts = graph.indptr.tolist(), [], {}
    for item in list_.items.tolist():
        mine = nonzeros_of(item, list_.steps)
        row, _, end, part = item
        assert all(indptr[row] <= k < indptr[row + 1] for k in mine) and end == indptr[row + 1]
        assert len(mine) <= 64 + PIECE_RUN
        parts.setdefault(row, []).append(part)
        seen += mine
    assert sorted(seen) == list(range(graph.nnz)) and sorted(parts) == list(range(graph.num_rows))
    for row, first, count, degree in list_.splits.tolist():
        assert sorted(parts.pop(row)) == list(range(first + 1, first + count + 1))
        assert degree == indptr[row + 1] - indptr[row] > 64
    assert all(found == [0] for found in parts.values())


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("arrangement", list(Arrangement))
@pytest.mark.parametrize("name", DEGREES)
def test_every_nonzero_is_in_one_group(name, arrangement, index):
    """Groups of a row follow each other, in one block if they fit; what a block has of a longer row is a part of it."""
    graph, workers = graph_of(DEGREES[name], index), 8
    plan = Plan(16, arrangement, Kernel.GROUPS, 4, 4 * workers)
    list_ = worklist.build(graph, plan, torch.arange(graph.num_rows).flip(0))
    assert {t.dtype for t in (list_.items, list_.steps, list_.splits)} == {index} and plan.workers == workers
    indptr, seen, blocks, before = graph.indptr.tolist(), [], {}, (-1, 0)
    for i, (row, begin, end, part) in enumerate(list_.items.tolist()):
        assert begin == (before[1] if before[0] == row else indptr[row])
        empty = begin == end == indptr[row + 1]
        assert 0 < end - begin <= 16 or (empty and (indptr[row] == end or (before[0] == row and i % workers)))
        seen += range(begin, end)
        assert nonzeros_of((row, begin, end, part), list_.steps) == list(range(begin, end))
        blocks.setdefault(row, {}).setdefault(i // workers, set()).add(part)
        before = row, end
    assert sorted(seen) == list(range(graph.nnz)) and sorted(blocks) == list(range(graph.num_rows))
    assert len(list_.items) % workers == 0
    for row, first, count, degree in list_.splits.tolist():
        assert list(blocks.pop(row).values()) == [{first + 1 + j} for j in range(count)] and count > 1
        assert degree == indptr[row + 1] - indptr[row] > 16 * workers
    assert all(list(parts.values()) == [{0}] for parts in blocks.values())
    assert list_.steps.numel() == sum(list_.splits[:, 2].tolist())


def test_blocks_are_full_where_they_can_be():
    """Rows of 5, 5, 3 groups in blocks of 8: the second begins the second block, where the third fits too."""
    plan = Plan(16, Arrangement.CLUSTERS, Kernel.GROUPS, 4, 32)
    items = worklist.build(graph_of([80, 80, 48]), plan, torch.arange(3)).items
    assert items[:, 0].tolist() == [0] * 8 + [1] * 5 + [2] * 3


@pytest.mark.parametrize(
    ("arrangement", "want"),
    [
        (Arrangement.LENGTH, [3, 5, 1, 2, 0, 4]),
        (Arrangement.CLUSTERS, [4, 0, 5, 2, 3, 1]),
        (Arrangement.HUBS, [3, 4, 0, 5, 2, 1]),  # 60 is more than four times the mean
        (Arrangement.BUCKETS, [3, 5, 2, 1, 4, 0]),  # lengths of 4 to 7 together, then 1
    ],
)
def test_orders(arrangement, want):
    graph = graph_of([1, 4, 4, 60, 1, 7])
    items = worklist.build(graph, Plan(1024, arrangement), torch.tensor([4, 0, 5, 2, 3, 1])).items
    assert items[:, 0].tolist() == want


def test_a_given_order_with_locality_is_kept():
    torch.manual_seed(0)
    groups, size, degree = 64, 64, 16  # rows read the sources of their own group
    rows = torch.arange(groups * size)
    cols = (rows // size * size).repeat_interleave(degree) + torch.randint(size, (rows.numel() * degree,))
    mixed = torch.randperm(rows.numel())
    anyhow = Graph.from_coo(mixed.repeat_interleave(degree), cols, num_rows=rows.numel(), num_cols=rows.numel())
    assert reorder.given_order(anyhow) is None
    # All rows are of one length, so only a cut at random would lose the order: give them lengths.
    keep = torch.rand(cols.numel()) < (rows % 7 + 1).repeat_interleave(degree) / 7
    uneven = Graph.from_coo(
        rows.repeat_interleave(degree)[keep], cols[keep], num_rows=rows.numel(), num_cols=rows.numel()
    )
    order = reorder.given_order(uneven)
    assert order is not None and sorted(order.tolist()) == rows.tolist()


def test_lanes():
    assert [worklist.lanes_of(row_bytes) for row_bytes in (1, 64, 65, 128, 129, 256, 257, 513, 4096)] == [
        *(4, 4, 8, 8, 16, 16, 32, 64, 64)
    ]


def test_plans():
    graph = graph_of([40] * 3000)
    for lanes in worklist.LANES:
        cap, arrangement, *_ = rules.plan_of(graph, lanes, True)
        assert cap % 32 == 0 and 32 <= cap <= 1024 and arrangement is not Arrangement.LENGTH
        assert rules.plan_of(graph, lanes, False).arrangement is Arrangement.LENGTH
    assert rules.plan_of(graph_of([]), 4, False).cap == 32


def test_copies_and_pickles_leave_the_lists_behind():
    graph = graph_of([3, 0, 70])
    schedule.of(graph).build(graph, 4)
    for other in (copy.copy(graph), copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert schedule.of(graph).lists and not schedule.of(other).lists and torch.equal(other.indptr, graph.indptr)


def test_groups_serve_sums_alone():
    graph = graph_of([3] * 400 + [100])
    work = schedule.of(graph)
    work.build_all(graph)
    sums, rows = (work.on_cuda(graph, 64, sums) for sums in (True, False))
    assert (sums.plan.kernel, rows.plan.kernel) == (Kernel.GROUPS, Kernel.ROWS)
    assert work.plan(graph, 64) == sums.plan and work.plan(graph, 64, sums=False) == rows.plan
    other = work.arranged(graph, rows.plan._replace(cap=64))
    work.adopt(64, other)
    assert work.on_cuda(graph, 64, True) is work.on_cuda(graph, 64, False) is other
    kept = {id(a) for a in work.arrays()}
    assert {id(a) for work in (sums, rows) for a in work[:3]} <= kept, "captured CUDA graphs read them by address"


def test_a_transposed_graph_with_rows_as_long_shares_the_lists():
    rows, cols = torch.arange(300).repeat_interleave(4), torch.randint(300, (1200,))
    for pairs, shared in (((torch.cat([rows, cols]), torch.cat([cols, rows])), True), ((rows, cols), False)):
        graph = Graph.from_coo(*pairs, num_rows=300, num_cols=300)
        schedule.of(graph).build_all(graph)
        schedule.of(graph.transposed).build_all(graph.transposed, graph)
        for lanes in worklist.LANES:
            own, other = schedule.of(graph).lists[lanes], schedule.of(graph.transposed).lists[lanes]
            assert (own.items is other.items) is shared
            alone = worklist.build(graph.transposed, other.plan)
            assert torch.equal(other.items, alone.items)


def test_a_graph_inherits_lists_for_its_own_rows():
    parent, heir = graph_of(DEGREES["ordinary"]), graph_of([d + 1 for d in DEGREES["ordinary"]])
    given, order = schedule.of(parent), torch.arange(parent.num_rows).flip(0)
    given.order = order
    given.adopt(256, worklist.build(parent, Plan(cap=64, arrangement=Arrangement.CLUSTERS), order))
    schedule.inherit(heir, parent)
    assert schedule.of(heir).lists.keys() == given.lists.keys() == {worklist.lanes_of(256)}
    made = schedule.of(heir).lists[worklist.lanes_of(256)]
    assert made.plan == given.lists[worklist.lanes_of(256)].plan
    want = worklist.build(heir, made.plan, order)
    assert torch.equal(made.items, want.items)
    walked = sorted(k for item in made.items.tolist() for k in nonzeros_of(item, made.steps))
    assert walked == list(range(heir.nnz))


def ordered_graph() -> Graph:
    """A graph whose rows `prepare` is taken to have found an order of, with lists of it by rule."""
    torch.manual_seed(0)
    graph = graph_of(torch.randint(1, 9, (600,)).tolist())
    work = schedule.of(graph)
    work.order, work.order_name, work._order_sought = torch.randperm(600), "communities", True
    work.build_all(graph)
    return graph


# What sums of two widths, and maxima and inner products, take in the order found, of the time as given -> by which list
# sums and all else go, and what is said.
FASTER = "this order is faster with 16 64 features"
NO_FASTER = "this order is no faster"
RATIOS = {
    "all faster": (([0.5, 0.9], [0.9, 0.9]), "found", "found", FASTER),
    "sums": (([0.9, 1.0], [0.99, 0.98]), "found", "given", FASTER),
    "sums of one width": (([0.9, 1.1], [0.99, 0.98]), "given", "given", NO_FASTER),
    "all but inner products": (([0.9, 0.9], [0.8, 1.02]), "found", "given", FASTER),
    "inner products": (([0.98, 0.98], [1.0, 0.9]), "given", "found", NO_FASTER),
    "none": (([1.1, 1.1], [1.2, 1.0]), "given", "given", NO_FASTER),
    "by noise": (([0.98, 0.98], [0.98, 0.98]), "given", "given", NO_FASTER),
}


@pytest.mark.parametrize("name", RATIOS)
def test_orders_on_cuda_serve_what_is_faster(name, monkeypatch):
    ratios, sums, rows, said = RATIOS[name]
    monkeypatch.setattr(orders, "_compared", lambda *_: (*ratios, 1.0))
    graph, given = ordered_graph(), graph_of([])
    work = schedule.of(graph)
    found = {lanes: (work.sums.get(lanes, list_), list_) for lanes, list_ in work.lists.items()}
    orders._serve_faster_lists(graph, None, (16, 64), 1e6)
    assert orders._said(graph, (16, 64)) == said
    given = Graph(graph.indptr, graph.indices, None, graph.num_cols)
    for lanes in worklist.LANES:
        row_bytes = 16 * lanes
        want_rows = schedule.of(given).build(given, lanes)
        want = (schedule.of(given).sums.get(lanes, want_rows), want_rows)
        for of_sums, served in ((True, sums), (False, rows)):
            now = work.on_cuda(graph, row_bytes, of_sums)
            if served == "found":
                assert now is found[lanes][not of_sums]
            else:
                expected = want[not of_sums]
                assert now.plan == expected.plan and all(map(torch.equal, now[:3], expected[:3]))
    monkeypatch.setattr(orders, "_compared", None)  # known by now
    orders._serve_faster_lists(graph, None, (16, 64), 1e6)
    like = ordered_graph()
    orders._serve_faster_lists(like, graph, (16, 64), 1e6)
    for lanes in worklist.LANES:
        for of_sums in (True, False):
            assert schedule.of(like).on_cuda(like, 16 * lanes, of_sums) is work.on_cuda(graph, 16 * lanes, of_sums)


@pytest.mark.parametrize("served", ["found", "given"])
def test_heirs_keep_the_order_of_each_list(served, monkeypatch):
    of_all = [0.5, 0.9] if served == "found" else [1.1, 1.1]
    monkeypatch.setattr(orders, "_compared", lambda *_: (of_all, of_all, 1.0))
    graph = ordered_graph()
    orders._serve_faster_lists(graph, None, (16, 64), 1e6)
    heir, grandchild = (graph_of((graph.indptr.diff() + more).tolist()) for more in (1, 2))
    schedule.inherit(heir, graph)
    schedule.inherit(grandchild, heir)
    work = schedule.of(graph)
    for one in (heir, grandchild):
        for lanes in worklist.LANES:
            mine = schedule.of(one).lists[lanes]
            want = worklist.build(one, mine.plan, work.order if served == "found" else work.given)
            assert mine.plan == work.lists[lanes].plan and torch.equal(mine.items, want.items)


def test_lists_that_lost_before_anybody_read_them_are_dropped(monkeypatch):
    monkeypatch.setattr(orders, "_compared", lambda *_: ([1.1], [1.1], 1.0))
    for read in (False, True):
        graph = ordered_graph()
        work = schedule.of(graph)
        items = {id(list_.items) for list_ in (*work.lists.values(), *work.sums.values())}
        for lanes in worklist.LANES if read else ():
            assert work.on_cuda(graph, 16 * lanes, True) and work.on_cuda(graph, 16 * lanes, False)
        kept = list(work.lists.values()), list(work.sums.values())  # or another list may get their ids
        orders._serve_faster_lists(graph, None, (16, 64), 1e6)
        assert (items <= {id(a) for a in work.arrays()}) is read and kept
        assert len({id(list_.items) for list_ in work._retired}) == len(work._retired)


def test_orders_without_time_keep_what_the_rule_says(monkeypatch):
    monkeypatch.setattr(orders, "_compared", lambda *_: ([1.0], [1.0], 1.0))
    graph = ordered_graph()
    lists = schedule.of(graph).on_cuda(graph, 256, True)
    orders._serve_faster_lists(graph, None, (16, 64), 0)
    assert orders._said(graph, (16, 64)) == "this order is no faster, not timed with 64"
    assert schedule.of(graph).on_cuda(graph, 256, True) is lists


def test_calls_by_two_lists_are_timed_in_turns(monkeypatch):
    order = []

    def call_times(run, calls):
        for _ in range(calls):
            run()
        return [1.0, 2.0] * (calls // 2) if len(order) > 2 else [5e3] * calls  # the first ones load kernels

    monkeypatch.setattr(orders, "call_times", call_times)
    graph = ordered_graph()
    plain = orders.arrays_of(graph, False, listed=False)
    lists = [schedule.of(graph).lists[lanes] for lanes in (4, 64)]
    assert orders._ratio(plain, lists, lambda arrays: order.append(arrays.plan)) == (0.5, 3.0 * (len(order) - 2) / 2)
    assert order[:4] == [lists[0].code, lists[1].code] * 2 and len(order) > 8


def test_widths_that_share_a_list_are_compared(monkeypatch):
    """The widest, and odd ones, of sums with and without weights; of others also two."""
    seen = []
    monkeypatch.setattr(orders, "_ratio", lambda plain, lists, run: seen.append(run) or (1.0, 2.0))
    graph = ordered_graph()
    plain = orders.arrays_of(graph, False, listed=False)
    for width, want in ((16, (16, 9, 8)), (41, (41, 33)), (256, (256, 129))):
        seen.clear()
        *ratios, spent_ms = orders._compared(graph, plain, width, (), ())
        narrow = (2,) if width == 16 else ()
        assert [len(each) for each in ratios] == [len(want), len(want) + len(narrow) + 1]
        assert spent_ms == 2.0 * len(seen)
        sums, others = seen[: 2 * len(want) : 2], [*seen[1 : 2 * len(want) : 2], *seen[2 * len(want) :]]
        shapes = [run(plain).shape for run in (*sums, *others)]
        rows = [(graph.num_rows, w) for w in want]
        assert shapes == [*rows, *rows, *((graph.num_rows, w) for w in narrow), (graph.nnz, 1)]
