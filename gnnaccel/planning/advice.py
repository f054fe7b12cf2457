"""What the kernels would do with a graph, and why, in words: communities, what an order gains, plans."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gnnaccel.graph import build, community, modes, reorder
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.schedule import rules, worklist
from gnnaccel.schedule.worklist import Arrangement, Kernel, Plan
from gnnaccel.tiles.gate import column_reuse
from gnnaccel.tiles.gate import is_profitable as tiles_pay

WIDTHS = (16, 64, 256)
_READS = {
    Arrangement.LENGTH: "rows by falling length: no order in which neighbours share sources is known",
    Arrangement.CLUSTERS: "rows in their order: there is enough work for length not to matter",
    Arrangement.HUBS: "hubs first, then rows in their order: short rows gain more from shared sources than from length",
    Arrangement.BUCKETS: "rows by powers of two of their length, in their order within: hubs would hold others up",
}


@dataclass(frozen=True)
class Communities:
    """Groups of nodes with most of their edges inside (`community.communities`).

    Attributes
    ----------
    modularity : float
        Share of edges inside, less what it would be at random with these degrees.
    """

    count: int
    mean_size: float
    size_deviation: float
    largest: int
    modularity: float


@dataclass(frozen=True)
class Advised:
    """How sums of rows of so many float32 features are computed on CUDA, and why."""

    num_feats: int
    kernel: str
    reason: str


@dataclass(frozen=True)
class Advice:
    """See `advise`.

    Attributes
    ----------
    order : Tensor [num_rows], int64
        Rows in communities: position -> row.
    hit_rate, hit_rate_in_communities : float
        Share of the nonzeros of a window of 8192 whose source was read before in it: with rows as given, and with rows
        in communities.
    in_order : bool
        True if rows as given share sources enough to be taken so.
    reorder : bool
        True if `gnnaccel.prepare(graph, reorder=True)` would use communities.
    advised : tuple of Advised
        With the order that is known without that.
    """

    communities: Communities
    order: Tensor
    hit_rate: float
    hit_rate_in_communities: float
    in_order: bool
    reorder: bool
    advised: tuple[Advised, ...]

    def __str__(self) -> str:
        c = self.communities
        lines = [
            f"{c.count:,} communities of {c.mean_size:.1f} nodes (deviation {c.size_deviation:.1f}, at most "
            f"{c.largest:,}), modularity {c.modularity:.2f}",
            f"order: {self.hit_rate:.0%} of a window's reads are of sources it has read before, in communities "
            f"{self.hit_rate_in_communities:.0%}: "
            + (
                "gnnaccel.prepare(graph, reorder=True) takes rows so"
                if self.reorder
                else "not worth an order of its own"
            ),
        ]
        lines += [f"CUDA, {a.num_feats} float32 features: {a.kernel}; {a.reason}" for a in self.advised]
        lines.append(
            "CPU: rows as they lie, in parts of equal work"
            + ("; with reorder=True prepare times sums in communities too, and keeps what is faster" * self.reorder)
        )
        return "\n".join(lines)


def advise(graph: Graph, widths: tuple[int, ...] = WIDTHS) -> Advice:
    """What `gnnaccel.prepare` would choose for `graph`, on CUDA (an H200, if the graph is on the CPU) and on the CPU.

    Parameters
    ----------
    graph : Graph
    widths : tuple of int
        Numbers of float32 features of a row.

    Returns
    -------
    Advice
        Prints as sentences.

    Notes
    -----
    Takes two searches for communities: a second for a few million edges on two cores.
    """
    modes.refuse("advise")
    order = reorder.row_order(graph, least_gain=None)
    assert order is not None  # without a least gain
    reused, in_communities = reorder.hit_rate(graph), reorder.hit_rate(graph, order)
    given = reorder.given_order(graph) is not None
    tiles = column_reuse(graph) if graph.nnz >= bounds.TILES_EDGES else 0.0
    return Advice(
        communities=_communities(graph, community.communities(graph)),
        order=order,
        hit_rate=reused,
        hit_rate_in_communities=in_communities,
        in_order=given,
        reorder=graph.nnz >= bounds.ORDER_EDGES and 1 - in_communities <= (1 - bounds.ORDER_GAIN) * (1 - reused),
        advised=tuple(_advised(graph, width, given, tiles) for width in widths),
    )


def _communities(graph: Graph, label: Tensor) -> Communities:
    sizes = label.bincount().double()
    if sizes.numel() == 0:
        return Communities(0, 0.0, 0.0, 0, 0.0)
    rows, cols = label[build.rows_of(graph.indptr)], graph.indices.long()
    cols = label[cols if graph.num_rows == graph.num_cols else cols + graph.num_rows]
    degrees = rows.bincount(minlength=sizes.numel()) + cols.bincount(minlength=sizes.numel())
    edges = max(1, graph.nnz)
    inside = float((rows == cols).double().sum()) / edges
    by_chance = float((degrees.double() / (2 * edges)).square().sum())
    return Communities(
        count=sizes.numel(),
        mean_size=float(sizes.mean()),
        size_deviation=float(sizes.std(correction=0)),
        largest=int(sizes.max()),
        modularity=inside - by_chance if graph.nnz else 0.0,
    )


def _advised(graph: Graph, width: int, clustered: bool, tiles: float) -> Advised:
    degree = graph.nnz / max(graph.num_rows, 1)
    if tiles_pay(tiles, degree, width, "sum"):
        return Advised(
            width, "tiles on tensor cores", f"a column of 16 rows serves {tiles:.1f} edges, {bounds.TILES_REUSE:g} pay"
        )
    lanes = worklist.lanes_of(4 * width)
    plan = rules.plan_of(graph, lanes, clustered)
    if rules.groups_pay(graph, lanes, plan):
        groups = rules.groups_of(graph, lanes, plan.arrangement)
        whole = graph.longest_row <= groups.cap * groups.workers
        kernel = (
            f"groups of {groups.cap} neighbours, {groups.workers} to a block, {groups.slice_lanes} lanes of 16 bytes"
        )
        why = "in one launch" if whole else "so that all workers on the chip have some"
        return Advised(width, kernel, f"the longest row, {graph.longest_row} nonzeros, is shared by workers, {why}")
    if plan.kernel is Kernel.BALANCED:
        kernel = f"equal nonzeros for each worker, {plan.slice_lanes} lanes of 16 bytes"
        return Advised(width, kernel, _why_balanced(plan))
    kernel = f"rows whole, {plan.slice_lanes} lanes of 16 bytes, cut at {plan.cap} nonzeros"
    return Advised(width, kernel, _READS[plan.arrangement])


def _why_balanced(plan: Plan) -> str:
    if plan.slice_lanes > bounds.ROW_LANES:
        return "rows are so short that a worker would wait for each"
    return "L2 holds slices of half the usual width of all sources, and not whole ones"
