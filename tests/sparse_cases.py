"""Every layer of torch_geometric.nn.conv that takes an adjacency matrix, as a table; the matrices to call it with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn as tnn
from torch_geometric import nn
from torch_sparse import SparseTensor

N, M, D = 24, 15, 6  # sources (and nodes), destinations of bipartite graphs, features
TYPES = 3  # relations


@dataclass(frozen=True)
class Case:
    """How to build a layer and call it.

    make : the layer.
    values : what it takes from the matrix: "weight" [E] (also what it ignores), "attr" [E, 2] or "type" [E].
    call : (layer, x, adj) -> outputs, for layers that need more than these two.
    kinds : call sites that must be accelerated with nothing left to PyG; None where PyG computes the messages.
    refuses : when PyG itself raises for a SparseTensor: "always", with "values", in "float64", or never ("").
    """

    make: Callable[[], tnn.Module]
    kinds: tuple[str, ...] | None = None
    values: str = "weight"
    call: Callable = lambda layer, x, adj: layer(x, adj)
    refuses: str = ""


def linear(rows=D, cols=5):
    return tnn.Linear(rows, cols)


def mlp(rows, cols):
    return tnn.Sequential(tnn.Linear(rows, 4), tnn.ReLU(), tnn.Linear(4, cols))


def histogram():
    return torch.tensor([1, 4, 6, 3, 2])


def own(kind, *more):
    """The call sites of one accelerated layer class."""
    return (f"pyg.{kind}", *(f"pyg.{kind} {m}" for m in more))


def with_start(layer, x, adj):
    return layer(x, x.detach() * 0.5, adj)


def with_position(layer, x, adj):
    return layer(x, x[:, :3], adj)


def with_both(layer, x, adj):
    return layer(x, adj, adj.t())


def with_dict(layer, x, adj):
    return layer({"v": x}, {("v", "to", "v"): adj})


def with_history(layer, x, adj):
    return layer(torch.stack([x, x * 2], 1), adj)


META = ["v"], [("v", "to", "v")]

CASES = {
    "AGNN": Case(lambda: nn.AGNNConv(), own("AGNNConv")),
    "APPNP": Case(lambda: nn.APPNP(3, 0.1), own("APPNP")),
    "APPNP dropout": Case(lambda: nn.APPNP(2, 0.1, dropout=0.5)),
    "ARMA": Case(lambda: nn.ARMAConv(D, 5, num_stacks=2, num_layers=2), own("ARMAConv")),
    "AntiSymmetric": Case(lambda: nn.AntiSymmetricConv(D, num_iters=2)),
    "CG": Case(lambda: nn.CGConv(D)),
    "CG attr": Case(lambda: nn.CGConv(D, dim=2), values="attr"),
    "Cheb": Case(lambda: nn.ChebConv(D, 5, K=3), refuses="always"),
    "ClusterGCN": Case(lambda: nn.ClusterGCNConv(D, 5, 0.1), own("ClusterGCNConv")),
    "DNA": Case(lambda: nn.DNAConv(D, heads=2), call=with_history),
    "DirGNN": Case(lambda: nn.DirGNNConv(nn.SAGEConv(D, 5)), refuses="always"),
    "EG": Case(lambda: nn.EGConv(D, 4, ["sum", "mean", "max", "symnorm"], num_heads=2)),
    "Edge": Case(lambda: nn.EdgeConv(mlp(2 * D, 5))),
    "FA": Case(lambda: nn.FAConv(D), call=with_start, refuses="values"),
    "FA shown": Case(
        lambda: nn.FAConv(D),
        call=lambda c, x, a: c(x, x.detach(), a, return_attention_weights=True),
        refuses="values",
    ),
    "FastRGCN": Case(lambda: nn.FastRGCNConv(D, 5, TYPES), values="type"),
    "FeaSt": Case(lambda: nn.FeaStConv(D, 5, heads=2)),
    "FiLM": Case(lambda: nn.FiLMConv(D, 5, TYPES), values="type"),
    "FiLM one": Case(lambda: nn.FiLMConv(D, 5)),
    "GAT": Case(lambda: nn.GATConv(D, 5, heads=3, residual=True), own("GATConv", "edge_update")),
    "GAT mean": Case(lambda: nn.GATConv(D, 5, heads=2, concat=False), own("GATConv", "edge_update")),
    "GAT dropout": Case(lambda: nn.GATConv(D, 5, heads=2, dropout=0.4), own("GATConv", "edge_update")),
    "GAT attr": Case(
        lambda: nn.GATConv(D, 5, heads=2, edge_dim=2, add_self_loops=False), own("GATConv", "edge_update"), "attr"
    ),
    "GAT attr loops": Case(lambda: nn.GATConv(D, 5, edge_dim=2), values="attr", refuses="always"),
    "GAT shown": Case(
        lambda: nn.GATConv(D, 5, heads=2),
        own("GATConv", "edge_update"),
        call=lambda c, x, a: c(x, a, return_attention_weights=True),
    ),
    "GATv2": Case(lambda: nn.GATv2Conv(D, 5, heads=3, dropout=0.4), own("GATv2Conv", "edge_update")),
    "GATv2 attr": Case(
        lambda: nn.GATv2Conv(D, 5, heads=2, edge_dim=2, add_self_loops=False), own("GATv2Conv", "edge_update"), "attr"
    ),
    "GATv2 shown": Case(
        lambda: nn.GATv2Conv(D, 5, heads=2),
        own("GATv2Conv", "edge_update"),
        call=lambda c, x, a: c(x, a, return_attention_weights=True),
    ),
    "GCN": Case(lambda: nn.GCNConv(D, 5), own("GCNConv")),
    "GCN improved": Case(lambda: nn.GCNConv(D, 5, improved=True), own("GCNConv")),
    "GCN cached": Case(lambda: nn.GCNConv(D, 5, cached=True), own("GCNConv")),
    "GCN no loops": Case(lambda: nn.GCNConv(D, 5, add_self_loops=False), own("GCNConv")),
    "GCN not normalised": Case(lambda: nn.GCNConv(D, 5, normalize=False), own("GCNConv")),
    "GCN2": Case(lambda: nn.GCN2Conv(D, 0.2, 0.5, 1), own("GCN2Conv"), call=with_start),
    "GEN": Case(lambda: nn.GENConv(D, 5)),
    "GEN attr": Case(lambda: nn.GENConv(D, 5, aggr="powermean", edge_dim=2), values="attr"),
    "GIN": Case(lambda: nn.GINConv(linear(), train_eps=True), own("GINConv")),
    "GINE": Case(lambda: nn.GINEConv(linear(), edge_dim=2), values="attr"),
    "GMM": Case(lambda: nn.GMMConv(D, 5, 2, 3), values="attr"),
    "GPS": Case(lambda: nn.GPSConv(D, nn.SAGEConv(D, D), heads=2), own("SAGEConv")),
    "GatedGraph": Case(lambda: nn.GatedGraphConv(D, 2), own("GatedGraphConv")),
    "General": Case(lambda: nn.GeneralConv(D, 6, 2, heads=2, attention=True), values="attr"),
    "Graph": Case(lambda: nn.GraphConv(D, 5), own("GraphConv")),
    "Graph mean": Case(lambda: nn.GraphConv(D, 5, aggr="mean"), own("GraphConv")),
    "Graph max": Case(lambda: nn.GraphConv(D, 5, aggr="max"), own("GraphConv")),
    "Graph std": Case(lambda: nn.GraphConv(D, 5, aggr="std")),
    "HAN": Case(lambda: nn.HANConv(D, 6, META, heads=2), call=with_dict),
    "HEAT": Case(
        lambda: nn.HEATConv(D, 5, 2, TYPES, 3, 2, 3),
        call=lambda c, x, a: c(x, a, torch.arange(N) % 2, torch.arange(a.nnz()) % TYPES, torch.ones(a.nnz(), 2).to(x)),
    ),
    "HGT": Case(lambda: nn.HGTConv(D, 6, META, heads=2), call=with_dict),
    "Hetero": Case(
        lambda: nn.HeteroConv({META[1][0]: nn.GATConv(D, 5)}), own("GATConv", "edge_update"), call=with_dict
    ),
    "Hypergraph": Case(lambda: nn.HypergraphConv(D, 5), refuses="always"),
    "LE": Case(lambda: nn.LEConv(D, 5)),
    "LG": Case(lambda: nn.LGConv(), own("LGConv")),
    "MF": Case(lambda: nn.MFConv(D, 5, max_degree=4), own("MFConv")),
    "MixHop": Case(lambda: nn.MixHopConv(D, 5, [0, 1, 2]), own("MixHopConv")),
    "NN": Case(lambda: nn.NNConv(D, 5, mlp(2, 5 * D)), values="attr"),
    "PAN": Case(lambda: nn.PANConv(D, 5, 2), refuses="float64"),
    "PDN": Case(lambda: nn.PDNConv(D, 5, 2, 4), values="attr"),
    "PNA": Case(lambda: nn.PNAConv(D, 6, ["mean", "std", "max"], ["identity", "amplification"], histogram())),
    "PNA attr": Case(lambda: nn.PNAConv(D, 6, ["sum"], ["identity"], histogram(), edge_dim=2), values="attr"),
    "PPF": Case(lambda: nn.PPFConv(mlp(D + 4, 5)), call=lambda c, x, a: c(x, x[:, :3], torch.ones(N, 3).to(x), a)),
    "PointGNN": Case(lambda: nn.PointGNNConv(mlp(D, 3), mlp(D + 3, 5), mlp(5, D)), call=with_position),
    "PointNet": Case(lambda: nn.PointNetConv(mlp(D + 3, 5)), call=with_position),
    "PointTransformer": Case(lambda: nn.PointTransformerConv(D, 5), call=with_position),
    "RGAT": Case(
        lambda: nn.RGATConv(D, 5, TYPES, heads=2), values="type", call=lambda c, x, a: c(x, a, a.storage.value())
    ),
    "RGCN": Case(lambda: nn.RGCNConv(D, 5, TYPES, num_bases=2), values="type"),
    "ResGated": Case(lambda: nn.ResGatedGraphConv(D, 5)),
    "ResGated attr": Case(lambda: nn.ResGatedGraphConv(D, 5, edge_dim=2), values="attr"),
    "SAGE": Case(lambda: nn.SAGEConv(D, 5, normalize=True), own("SAGEConv")),
    "SAGE sum": Case(lambda: nn.SAGEConv(D, 5, aggr="sum"), own("SAGEConv")),
    "SAGE max": Case(lambda: nn.SAGEConv(D, 5, aggr="max", project=True), own("SAGEConv")),
    "SAGE reversed": Case(lambda: nn.SAGEConv(D, 5, flow="target_to_source"), refuses="always"),
    "SAGE softmax": Case(lambda: nn.SAGEConv(D, 5, aggr="softmax")),
    "SG": Case(lambda: nn.SGConv(D, 5, K=2), own("SGConv")),
    "SSG": Case(lambda: nn.SSGConv(D, 5, 0.3, K=2), own("SSGConv")),
    "Signed": Case(lambda: nn.SignedConv(D, 5, first_aggr=True), own("SignedConv"), call=with_both),
    "Simple": Case(lambda: nn.SimpleConv(combine_root="sum"), own("SimpleConv")),
    "SuperGAT": Case(lambda: nn.SuperGATConv(D, 5, heads=2)),
    "TAG": Case(lambda: nn.TAGConv(D, 5), own("TAGConv")),
    "TAG not normalised": Case(lambda: nn.TAGConv(D, 5, K=2, normalize=False), own("TAGConv")),
    "Transformer": Case(lambda: nn.TransformerConv(D, 5, heads=2, dropout=0.4), own("TransformerConv")),
    "Transformer beta": Case(
        lambda: nn.TransformerConv(D, 5, heads=2, beta=True, concat=False), own("TransformerConv")
    ),
    "Transformer attr": Case(lambda: nn.TransformerConv(D, 5, edge_dim=2), own("TransformerConv"), "attr"),
    "Transformer shown": Case(
        lambda: nn.TransformerConv(D, 5, heads=2),
        own("TransformerConv"),
        call=lambda c, x, a: c(x, a, return_attention_weights=True),
    ),
    "WL continuous": Case(lambda: nn.WLConvContinuous(), own("WLConvContinuous")),
}
# Without an adjacency matrix: CuGraph*, DynamicEdgeConv, FusedGATConv (CSR arrays), GravNetConv, MeshCNNConv, XConv.
# Without gradients: WLConv. SplineConv needs pyg_lib. ECConv, PointConv are other names of NNConv, PointNetConv.

BIPARTITE = {
    "SAGE": Case(lambda: nn.SAGEConv((D, 4), 5), own("SAGEConv")),
    "SAGE max": Case(lambda: nn.SAGEConv((D, 4), 5, aggr="max"), own("SAGEConv")),
    "SAGE no root": Case(
        lambda: nn.SAGEConv((D, 4), 5, root_weight=False), own("SAGEConv"), call=lambda c, x, a: c((x[0], None), a)
    ),
    "GIN": Case(lambda: nn.GINConv(linear()), own("GINConv"), call=lambda c, x, a: c((x[0], x[0][:M]), a)),
    "Graph": Case(lambda: nn.GraphConv((D, 4), 5), own("GraphConv")),
    "GAT": Case(lambda: nn.GATConv((D, 4), 5, heads=2, add_self_loops=False), own("GATConv", "edge_update")),
    "GAT loops": Case(lambda: nn.GATConv((D, 4), 5, heads=2), own("GATConv", "edge_update")),
    "GAT no target": Case(
        lambda: nn.GATConv((D, 4), 5, add_self_loops=False),
        own("GATConv", "edge_update"),
        call=lambda c, x, a: c((x[0], None), a),
    ),
    "GATv2": Case(lambda: nn.GATv2Conv((D, 4), 5, heads=2, add_self_loops=False), own("GATv2Conv", "edge_update")),
    "Transformer": Case(lambda: nn.TransformerConv((D, 4), 5, heads=2), own("TransformerConv")),
    "NN": Case(lambda: nn.NNConv((D, 4), 5, mlp(2, 5 * D)), values="attr"),
    "CG": Case(lambda: nn.CGConv((D, 4))),
    "MF": Case(lambda: nn.MFConv((D, 4), 5, max_degree=4), own("MFConv")),
    "RGCN": Case(lambda: nn.RGCNConv((D, 4), 5, TYPES), values="type"),
    "ResGated": Case(lambda: nn.ResGatedGraphConv((D, 4), 5)),
    "Simple": Case(lambda: nn.SimpleConv(), own("SimpleConv")),
    "WL continuous": Case(
        lambda: nn.WLConvContinuous(), own("WLConvContinuous"), call=lambda c, x, a: c((x[0], x[0][:M]), a)
    ),
    "GCN": Case(lambda: nn.GCNConv(D, 5), call=lambda c, x, a: c(x[0], a), refuses="always"),
}


def indices(rows=N, cols=N, seed=0, count=110):
    """Row and column of each nonzero, unsorted: a few self-loops and duplicates, some empty rows and columns."""
    g = torch.Generator().manual_seed(seed)
    row, col = (torch.randint(0, n, (count,), generator=g) for n in (rows, cols))
    row[:3], col[:3] = torch.arange(3), torch.arange(3)
    row[3:7], col[3:7] = row[7:11].clone(), col[7:11].clone()
    row[row == rows - 1], row[row == 4], col[col == 2] = 0, 5, 3
    return row, col


def values(kind, count, dtype, grad=False, seed=3):
    """What the nonzeros carry, for a layer that takes `kind` from a matrix."""
    g = torch.Generator().manual_seed(seed)
    if kind == "type":
        return torch.randint(0, TYPES, (count,), generator=g)
    shape = (count, 2) if kind == "attr" else (count,)
    return (torch.rand(*shape, generator=g, dtype=torch.float64) + 0.1).to(dtype).requires_grad_(grad)


def features(*shape, dtype=torch.float64, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()


def matrix(value=None, rows=N, cols=N, seed=0):
    """A matrix made the way a user makes it: from unsorted pairs."""
    row, col = indices(rows, cols, seed)
    return SparseTensor(row=row, col=col, value=value, sparse_sizes=(rows, cols))


def by_rowptr(value=None, rows=N, cols=N, seed=0):
    """The same matrix from CSR arrays: PyG has to make its row indices."""
    rowptr, col, _ = matrix(None, rows, cols, seed).csr()
    return SparseTensor(rowptr=rowptr.clone(), col=col.clone(), value=value, sparse_sizes=(rows, cols), is_sorted=True)


def without_duplicates(value=None, rows=N, cols=N, seed=0):
    adj = matrix(None, rows, cols, seed).coalesce()
    return adj if value is None else adj.set_value(value[: adj.nnz()], layout="coo")


def empty(value=None, rows=N, cols=N, seed=0):
    none = torch.zeros(0, dtype=torch.long)
    return SparseTensor(row=none, col=none, value=None if value is None else value[:0], sparse_sizes=(rows, cols))


MATRICES = {"unsorted": matrix, "by rowptr": by_rowptr, "simple": without_duplicates, "empty": empty}
