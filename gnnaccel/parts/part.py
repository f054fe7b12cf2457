"""One rank's part of a graph in memory, in the place of the graph: its nodes' data, its edges, sums over all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from gnnaccel.graph import build, scales
from gnnaccel.graph.csr import Graph
from gnnaccel.parts import exchange, files, ranks
from gnnaccel.parts.exchange import Exchange, Sums


def load(
    folder: str | os.PathLike,
    *,
    device: torch.device | str | None = None,
    timeout_s: float = ranks.TIMEOUT_S,
    wire: torch.dtype | None = None,
) -> Part:
    """This rank's part of a partitioned graph; joins the other ranks where the program has not.

    Parameters
    ----------
    folder : path
        What `gnnaccel partition` or `gnnaccel.distributed.partition` has written: on a disk that all ranks see, or with
        this rank's folder and the manifest on each machine.
    device, timeout_s
        As `join` has them, where this call is what starts torch.distributed.
    wire : torch.dtype, optional
        torch.bfloat16 halves what an exchange of float32 sends, rounding halo rows and their gradients to it.

    Returns
    -------
    Part

    Raises
    ------
    ValueError
        On this rank, if its folder is not one, its files are missing or damaged, or the number of ranks is not that of
        parts. RuntimeError: on all others then; outside torchrun; if ranks have different partitions.
    """
    if wire not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"distributed.load: wire: expected None, torch.bfloat16 or torch.float16, got {wire}")
    place = ranks.join(device, timeout_s=timeout_s)
    rank, size = dist.get_rank(), dist.get_world_size()
    part, problem, digest = None, None, ""
    try:
        about, statistics, digest = files.read_manifest(folder)
        if statistics.parts != size:
            raise ValueError(
                f"distributed.load: {os.fspath(folder)}: {statistics.parts} parts, and {size} ranks: run as many "
                f"(torchrun --nproc-per-node {statistics.parts}), or partition the graph into {size} parts"
            )
        part = Part(files.read_part(Path(folder), rank, about), about, statistics, rank, size, place, wire)
    except (ValueError, RuntimeError, MemoryError) as error:  # the latter two for want of memory
        problem = str(error) or repr(error)
    ranks.all_agree(problem, "loading the parts")
    assert part is not None
    halves = [int(digest[at : at + 15], 16) for at in (0, 15, 30)]
    ranks.same_everywhere(halves, place, "loading the parts", f"the partition in {os.fspath(folder)}")
    part._count_edges_out()
    return part


class Part:
    """What a training script takes in the place of the whole graph's data.

    Attributes
    ----------
    edge_index : Tensor [2, E], int64
        In-edges of this part's nodes: sources (own nodes first, then halo), destinations (own nodes). Layers of a model
        that `gnnaccel.distributed.wrap` has seen take it with features of own nodes alone.
    graph : Graph
        The same, destinations as rows: for `gnnaccel.nn` and `gnnaccel.ops`. A layer in a wrapped model takes it with
        features of own nodes; an op, and a layer that is not wrapped, with those that `exchange` gives.
    own, halo : Tensor, int64
        Global numbers of this part's nodes, and of those of others that its edges come from.
    num_nodes, num_features, num_classes : int
        Own nodes; width of x (or feat); classes of all nodes' labels in y (label, labels), None without integers there.
    rank, world_size, device, statistics
    exchange : Exchange
        Rows of own nodes [num_nodes, *F] -> with those of halo nodes behind [num_nodes + num_halo, *F].

    Data of nodes (x, y, train_mask, ...: own rows) and of edges (edge_weight, edge_attr, ...: in the order of
    edge_index) are attributes by their names.
    """

    def __init__(self, tables: dict, about: dict, statistics: files.Statistics, rank: int, size: int, device, wire):
        arrays = {name: torch.from_numpy(value).to(device) for name, value in tables[files.GRAPH].items()}
        for name in ("own", "halo", "edge_ids", "send"):
            arrays[name] = arrays[name].long()
        self.rank, self.world_size, self.device, self.statistics = rank, size, device, statistics
        self.own, self.halo, self.edge_ids = arrays["own"], arrays["halo"], arrays["edge_ids"]
        self.num_nodes, self.num_halo = self.own.numel(), self.halo.numel()
        num_all = self.num_nodes + self.num_halo
        self.graph = Graph.from_csr(arrays["indptr"], arrays["indices"], num_cols=num_all)
        self.edge_index = torch.stack(build.pairs_by_id(arrays["indptr"], arrays["indices"], None)[::-1]).long()
        counts = arrays["send_counts"].tolist(), arrays["recv_counts"].tolist()
        self.exchange = Exchange(self.num_nodes, self.num_halo, arrays["send"], *counts, wire)
        self.num_classes: int | None = about.get("num_classes")
        self._nodes = {name: torch.from_numpy(v).to(device) for name, v in tables.get(files.NODES, {}).items()}
        self._edges = {name: torch.from_numpy(v).to(device) for name, v in tables.get(files.EDGES, {}).items()}
        self._sums: dict[int, tuple[Graph, Sums]] = {}
        self._kept: dict[str, tuple[Tensor, int]] = {}  # features that never change, with their halo

    def __getattr__(self, name: str) -> Tensor:
        for table in ("_nodes", "_edges"):
            found = self.__dict__.get(table, {})
            if name in found:
                return found[name]
        if name in ("num_features", "num_node_features"):  # properties, which have found no x
            name = "x"
        there = ", ".join([*self.__dict__.get("_nodes", ()), *self.__dict__.get("_edges", ())]) or "none"
        raise AttributeError(
            f"this part has no {name!r}: its data are {there}, which is what the graph was partitioned with. Partition "
            f"it again with it: from a Data or DGLGraph that has {name!r}, by partition(..., nodes={{{name!r}: ...}}), "
            f"or gnnaccel partition of an .npz with an array {name!r}"
        )

    def __repr__(self) -> str:
        return (
            f"Part({self.rank} of {self.world_size}: {self.num_nodes:,} of {self.statistics.num_nodes:,} nodes, "
            f"{self.graph.nnz:,} edges, {self.num_halo:,} halo nodes, device={self.device})"
        )

    def _count_edges_out(self) -> None:
        """How many edges leave each node, those to other parts included: what norms of gnnaccel.nn.GCNConv read."""
        every = torch.bincount(self.graph.indices.long(), minlength=self.graph.num_cols).double().view(-1, 1)
        if self.world_size > 1:
            every = self.exchange.forward(self.exchange.backward(every))
        scales.set_source_degrees(self.graph, every.view(-1))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Part belongs to its process and is not saved: save model.state_dict(), which loads on any number of "
            "parts"
        )

    def __deepcopy__(self, _memo: dict) -> Part:
        return self  # copies of a model, such as averages of it, run on the same part

    @property
    def num_features(self) -> int:
        """Width of x, or of feat, as DGL calls it."""
        return (self.feat if "feat" in self._nodes and "x" not in self._nodes else self.x).shape[1]

    num_node_features = num_features

    @property
    def num_edges(self) -> int:
        """In-edges of own nodes."""
        return self.graph.nnz

    def with_halo(self, x: Tensor) -> Tensor:
        """`exchange`, once alone for the part's own data of nodes, which do not change: the halo's rows are kept."""
        name = self._kept_name(x)
        if name is None:
            return self.exchange(x)
        kept = self._kept.get(name)
        if kept is None or kept[1] != x._version:
            with torch.inference_mode(False), torch.no_grad():
                every = self.exchange(x)
                own = self._nodes[name] = every[: self.num_nodes]  # one memory for both
            kept = self._kept[name] = every, own._version
        return kept[0]

    def _kept_name(self, x: Tensor) -> str | None:
        if x.requires_grad or self.world_size == 1:
            return None
        return next((name for name, value in self._nodes.items() if value is x), None)

    def keeps(self, x: Tensor) -> bool:
        """Whether `x` is data of nodes of this part's own, whose halo is fetched once."""
        return self._kept_name(x) is not None

    def sums(self, graph: Graph) -> Sums:
        """Sums over the edges of `graph`, such as this part's own with self-loops, that overlap with the exchange."""
        found = self._sums.get(id(graph))
        if found is None:  # which keeps the graph, or its id would be another's
            found = self._sums[id(graph)] = graph, Sums(graph, self.exchange)
        return found[1]

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values`, of any shape, over all ranks: a scalar, the same on each, with gradients."""
        return exchange.total(values.sum(dtype=torch.float64)).to(_floating(values))

    def mean(self, values: Tensor) -> Tensor:
        """The mean of `values`, of any shape, over all ranks: what losses per node are averaged by.

        ``part.mean(F.cross_entropy(logits[mask], y[mask], reduction="none"))`` is the loss of the whole graph on every
        rank, and its backward gives the whole graph's gradients. NaN where no rank has a value.
        """
        local = torch.stack([values.sum(dtype=torch.float64), values.new_full((), values.numel(), dtype=torch.float64)])
        both = exchange.total(local)
        return (both[0] / both[1]).to(_floating(values))

    def gather(self, values: Tensor) -> Tensor | None:
        """Rows of own nodes [num_nodes, *F] of all ranks in the whole graph's order [N, *F], on rank 0's CPU.

        None on the others. For results; no gradient.
        """
        mine = values.detach().cpu(), self.own.cpu()
        every: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        with ranks.told("gathering results"):
            dist.gather_object(mine, every)
        if every is None:
            return None
        out = mine[0].new_empty(self.statistics.num_nodes, *values.shape[1:])
        for rows, own in every:
            out[own] = rows
        return out


# Names that data of nodes and edges cannot have: what a Part has beside them.
RESERVED = frozenset(
    (
        *(name for name in vars(Part) if not name.startswith("_")),
        *(
            "device",
            "edge_ids",
            "edge_index",
            "exchange",
            "graph",
            "halo",
            "num_classes",
            "num_halo",
            "num_nodes",
            "own",
        ),
        *("rank", "statistics", "world_size"),
    )
)


def _floating(values: Tensor) -> torch.dtype:
    return values.dtype if values.is_floating_point() else torch.get_default_dtype()
