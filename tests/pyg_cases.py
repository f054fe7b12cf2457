"""Every message passing layer of torch_geometric.nn.conv, with options: one table for the tests and docs/coverage.md.

``CASES[name]`` is a Case: ``make()`` builds the layer, ``arguments(g)`` its call from the inputs of an `Inputs`, and
`runs` says how it runs here:

"spmm"       sums, means and extrema over edges, no message in memory
"attention"  scores, softmax and weighted sum; at most one number per edge and head in memory
"message"    messages that are no product, computed and reduced in one kernel on the CPU; on CUDA made and reduced in
             blocks of edges where they are too large to be stored; `why` where edge features are wide
"blocks"     messages with a linear map of edges, made and reduced in blocks of edges where they are too large to be
             stored (which SeenOps makes them)
"segment"    PyG's own message() with our reduction: one message per edge in memory
"pyg"        PyG's own code; `why` says why
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch_geometric
from torch import Tensor
from torch.nn import Linear, ReLU, Sequential
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric import nn

from gnnaccel.lazy import blocks
from gnnaccel.lower import bounds

D, OUT, TYPES, EDGE = 40, 24, 3, 5  # features in and out (more than what is stored per edge), relations, edge features


@dataclass
class Inputs:
    """What layers take: a graph with self-loops, duplicates and nodes without edges, and features from one seed.

    dtype : of the features; grad : whether features require a gradient.
    """

    num_nodes: int = 30
    num_edges: int = 160
    dtype: torch.dtype = torch.float64
    grad: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        self.index = self.edges(self.num_nodes, self.num_nodes)
        self.type = torch.arange(self.num_edges) * 7 % TYPES

    def edges(self, num_src: int, num_dst: int, seed: int = 0) -> Tensor:
        """edge_index [2, E]."""
        g = torch.Generator().manual_seed(self.seed + seed)
        index = torch.stack([torch.randint(0, n, (self.num_edges,), generator=g) for n in (num_src, num_dst)])
        if num_src == num_dst and self.num_edges > 12:
            index[:, :4] = torch.arange(4)
            index[:, 4:8] = index[:, 8:12]
            index[1][index[1] == num_dst - 1] = 0
        return index

    def randn(self, *shape: int, seed: int = 1, grad: bool | None = None) -> Tensor:
        """Normal numbers of `dtype` that depend on `seed` alone."""
        g = torch.Generator().manual_seed(self.seed + seed)
        x = torch.randn(*shape, generator=g, dtype=torch.float64).to(self.dtype)
        return x.requires_grad_(self.grad if grad is None else grad)

    def x(self, seed: int = 1, width: int = D) -> Tensor:
        """Node features [N, width]."""
        return self.randn(self.num_nodes, width, seed=seed)

    def weight(self) -> Tensor:
        """Positive edge weights [E]."""
        return self.randn(self.num_edges, seed=3, grad=False).abs().requires_grad_(self.grad)

    def attr(self, width: int = EDGE) -> Tensor:
        """Edge features [E, width]."""
        return self.randn(self.num_edges, width, seed=4)

    def pos(self) -> Tensor:
        """Coordinates [N, 3]."""
        return self.x(5, 3)

    def sparse(self) -> Tensor:
        """The transposed adjacency as torch.sparse CSR with values one."""
        index = torch.unique(self.index.flip(0), dim=1)
        size = self.num_nodes, self.num_nodes
        values = torch.ones(index.shape[1], dtype=self.dtype)
        return torch.sparse_coo_tensor(index, values, size).coalesce().to_sparse_csr()


def _call(g: Inputs) -> tuple:
    return g.x(), g.index


def _weighted(g: Inputs) -> tuple:
    return g.x(), g.index, g.weight()


def _attributed(g: Inputs) -> tuple:
    return g.x(), g.index, g.attr()


def _typed(g: Inputs) -> tuple:
    return g.x(), g.index, g.type


def _by_index(g: Inputs) -> tuple:
    return None, g.index, g.type


@dataclass(frozen=True)
class Case:
    """One layer with one set of options; see the head of this file."""

    make: Callable[[], torch.nn.Module]
    runs: str
    arguments: Callable[[Inputs], tuple] = _call
    why: str = ""
    needs: str = ""  # a module without which PyG itself cannot run the case
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)  # that PyG takes


NODES, RELATIONS = ["a", "b"], [("a", "x", "b"), ("b", "y", "a"), ("a", "z", "a")]


def _hetero(g: Inputs) -> tuple:
    x = {name: g.randn(20 + i, D, seed=i) for i, name in enumerate(NODES)}
    return x, {r: g.edges(x[r[0]].shape[0], x[r[2]].shape[0], i) for i, r in enumerate(RELATIONS)}


def _mlp(inputs: int, outputs: int = OUT) -> torch.nn.Module:
    return Sequential(Linear(inputs, D), ReLU(), Linear(D, outputs))


def _signed(g: Inputs) -> tuple:
    return g.x(), g.index, g.edges(g.num_nodes, g.num_nodes, 1)


def _signed_wide(g: Inputs) -> tuple:
    return g.x(width=2 * D), g.index, g.edges(g.num_nodes, g.num_nodes, 1)


def _hypergraph(g: Inputs) -> tuple:
    return g.x(), g.edges(g.num_nodes, 12), g.randn(12, seed=3, grad=False).abs()


def _hypergraph_attention(g: Inputs) -> tuple:
    index = g.edges(g.num_nodes, 12)
    index[1, 0] = 11
    return g.x(), index, None, g.randn(12, D, seed=4)


def _mesh(g: Inputs) -> tuple:
    edges = torch.arange(g.num_nodes).repeat_interleave(4)
    return g.x(), torch.stack([(edges * 5 + torch.arange(4 * g.num_nodes)) % g.num_nodes, edges])


def _rgat_scaled() -> torch.nn.Module:
    """Of whose l2 PyG makes no values."""
    layer = nn.RGATConv(D, OUT, TYPES, mod="scaled", heads=2, bias=False)
    torch.nn.init.normal_(layer.l2)
    return layer


def _heat(g: Inputs) -> tuple:
    return g.x(), g.index, torch.arange(g.num_nodes) % 2, g.type, g.attr()


def _fused_gat(g: Inputs) -> tuple:
    csr, csc, perm = nn.FusedGATConv.to_graph_format(g.index, size=(g.num_nodes, g.num_nodes))
    return g.x(), csr, csc, perm


_DEGREES = torch.tensor([1, 4, 8, 9, 5, 3])
WIDE = "the layer itself makes edge features of full width"

CASES: dict[str, Case] = {
    # Sums of copies
    "SAGEConv": Case(lambda: nn.SAGEConv(D, OUT), "spmm"),
    "SAGEConv sum": Case(lambda: nn.SAGEConv(D, OUT, aggr="sum", normalize=True), "spmm"),
    "SAGEConv max": Case(lambda: nn.SAGEConv(D, OUT, aggr="max", project=True), "spmm"),
    "SAGEConv mean+max+std": Case(lambda: nn.SAGEConv(D, OUT, aggr=["mean", "max", "std"]), "spmm"),
    "SAGEConv powermean": Case(lambda: nn.SAGEConv(D, OUT, aggr=nn.PowerMeanAggregation(2.0, learn=True)), "spmm"),
    "SAGEConv reversed": Case(lambda: nn.SAGEConv(D, OUT, flow="target_to_source"), "spmm"),
    "SAGEConv median": Case(
        lambda: nn.SAGEConv(D, OUT, aggr="median"), "pyg", why="MedianAggregation needs every message"
    ),
    "SAGEConv softmax": Case(lambda: nn.SAGEConv(D, OUT, aggr=nn.SoftmaxAggregation(learn=True)), "message"),
    "GINConv": Case(lambda: nn.GINConv(_mlp(D), train_eps=True), "spmm"),
    "MFConv": Case(lambda: nn.MFConv(D, OUT, max_degree=4), "spmm"),
    "SignedConv": Case(lambda: nn.SignedConv(D, OUT, first_aggr=True), "spmm", _signed),
    "SignedConv second": Case(lambda: nn.SignedConv(D, OUT, first_aggr=False), "spmm", _signed_wide),
    "EGConv": Case(lambda: nn.EGConv(D, OUT, num_heads=4, aggregators=["symnorm"]), "spmm"),
    "EGConv several": Case(lambda: nn.EGConv(D, OUT, num_heads=4, aggregators=["sum", "var", "std", "max"]), "spmm"),
    # Weighted sums
    "SimpleConv": Case(lambda: nn.SimpleConv(aggr="mean", combine_root="self_loop"), "spmm"),
    "SimpleConv weighted": Case(lambda: nn.SimpleConv(), "spmm", _weighted),
    "GCNConv": Case(lambda: nn.GCNConv(D, OUT), "spmm"),
    "GCNConv weighted": Case(lambda: nn.GCNConv(D, OUT, improved=True), "spmm", _weighted),
    "GCNConv no loops": Case(lambda: nn.GCNConv(D, OUT, add_self_loops=False), "spmm"),
    "GCNConv not normalised": Case(lambda: nn.GCNConv(D, OUT, normalize=False), "spmm"),
    "GCNConv reversed": Case(lambda: nn.GCNConv(D, OUT, flow="target_to_source"), "spmm"),
    "GCNConv cached": Case(lambda: nn.GCNConv(D, OUT, cached=True), "spmm"),
    "ChebConv": Case(lambda: nn.ChebConv(D, OUT, K=3), "spmm", _weighted),
    "GraphConv": Case(lambda: nn.GraphConv(D, OUT), "spmm", _weighted),
    "GraphConv min": Case(lambda: nn.GraphConv(D, OUT, aggr="min"), "spmm"),
    "GravNetConv": Case(lambda: nn.GravNetConv(D, OUT, 3, OUT, k=6), "spmm", lambda g: (g.x(),)),
    "GatedGraphConv": Case(lambda: nn.GatedGraphConv(D, num_layers=2), "spmm", _weighted),
    "TAGConv": Case(lambda: nn.TAGConv(D, OUT), "spmm"),
    "ARMAConv": Case(lambda: nn.ARMAConv(D, OUT, num_stacks=2, num_layers=2), "spmm"),
    "SGConv": Case(lambda: nn.SGConv(D, OUT, K=2), "spmm"),
    "SSGConv": Case(lambda: nn.SSGConv(D, OUT, alpha=0.1, K=2), "spmm"),
    "APPNP": Case(lambda: nn.APPNP(3, 0.1, dropout=0.3), "spmm"),
    "ClusterGCNConv": Case(lambda: nn.ClusterGCNConv(D, OUT, diag_lambda=0.1), "spmm"),
    "GCN2Conv": Case(lambda: nn.GCN2Conv(D, 0.1, 0.5, 1), "spmm", lambda g: (g.x(), g.x(2), g.index)),
    "PANConv": Case(lambda: nn.PANConv(D, OUT, 2), "spmm", needs="torch_sparse", dtypes=(torch.float32,)),
    "WLConvContinuous": Case(lambda: nn.WLConvContinuous(), "spmm", _weighted),
    "PDNConv": Case(lambda: nn.PDNConv(D, OUT, EDGE, 8), "spmm", _attributed),
    "LGConv": Case(lambda: nn.LGConv(), "spmm", _weighted),
    "MixHopConv": Case(lambda: nn.MixHopConv(D, OUT, powers=[0, 1, 2]), "spmm"),
    "HypergraphConv": Case(lambda: nn.HypergraphConv(D, OUT), "spmm", _hypergraph),
    "HypergraphConv attention": Case(
        lambda: nn.HypergraphConv(D, OUT, use_attention=True, heads=2), "attention", _hypergraph_attention
    ),
    "HypergraphConv attention of edges": Case(
        lambda: nn.HypergraphConv(D, OUT, use_attention=True, attention_mode="edge", heads=3, concat=False),
        "attention",
        lambda g: (*_hypergraph(g), g.randn(12, D, seed=4), 12),
    ),
    "RGCNConv": Case(lambda: nn.RGCNConv(D, OUT, TYPES), "spmm", _typed),
    "RGCNConv bases": Case(lambda: nn.RGCNConv(D, OUT, TYPES, num_bases=2, aggr="sum"), "spmm", _typed),
    "RGCNConv blocks": Case(lambda: nn.RGCNConv(D, OUT, TYPES, num_blocks=4), "spmm", _typed),
    "RGCNConv max": Case(lambda: nn.RGCNConv(D, OUT, TYPES, aggr="max", root_weight=False, bias=False), "spmm", _typed),
    "RGCNConv by index": Case(lambda: nn.RGCNConv(30, OUT, TYPES), "spmm", _by_index),
    "RGCNConv by index bases": Case(lambda: nn.RGCNConv(30, OUT, TYPES, num_bases=2, aggr="sum"), "spmm", _by_index),
    "FastRGCNConv": Case(lambda: nn.FastRGCNConv(D, OUT, TYPES), "spmm", _typed),
    "FastRGCNConv bases": Case(lambda: nn.FastRGCNConv(D, OUT, TYPES, num_bases=2, aggr="sum"), "spmm", _typed),
    "FastRGCNConv blocks": Case(lambda: nn.FastRGCNConv(D, OUT, TYPES, num_blocks=4), "spmm", _typed),
    "FastRGCNConv by index": Case(lambda: nn.FastRGCNConv(30, OUT, TYPES), "spmm", _by_index),
    # Attention
    "GATConv": Case(lambda: nn.GATConv(D, OUT, heads=3, residual=True), "attention"),
    "GATConv mean": Case(lambda: nn.GATConv(D, OUT, heads=2, concat=False), "attention"),
    "GATConv dropout": Case(lambda: nn.GATConv(D, OUT, heads=2, dropout=0.4), "attention"),
    "GATConv reversed": Case(lambda: nn.GATConv(D, OUT, heads=2, flow="target_to_source"), "attention"),
    "GATConv edges": Case(lambda: nn.GATConv(D, OUT, heads=3, edge_dim=EDGE, dropout=0.4), "attention", _attributed),
    "GATv2Conv": Case(lambda: nn.GATv2Conv(D, OUT, heads=3, dropout=0.4), "attention"),
    "GATv2Conv shared": Case(lambda: nn.GATv2Conv(D, OUT, share_weights=True), "attention"),
    "GATv2Conv edges": Case(lambda: nn.GATv2Conv(D, OUT, heads=2, edge_dim=EDGE), "attention", _attributed),
    "FusedGATConv": Case(
        lambda: nn.FusedGATConv(D, OUT, heads=2, add_self_loops=False),
        "pyg",
        _fused_gat,
        "runs dgNN's own kernel",
        "dgNN",
    ),
    "TransformerConv": Case(lambda: nn.TransformerConv(D, OUT, heads=2, dropout=0.4), "attention"),
    "TransformerConv mean": Case(lambda: nn.TransformerConv(D, OUT, heads=2, beta=True, concat=False), "attention"),
    "TransformerConv edges": Case(
        lambda: nn.TransformerConv(D, OUT, heads=2, edge_dim=EDGE, beta=True), "attention", _attributed
    ),
    "AGNNConv": Case(lambda: nn.AGNNConv(), "attention"),
    "AGNNConv fixed": Case(lambda: nn.AGNNConv(requires_grad=False, add_self_loops=False), "attention"),
    "RGATConv": Case(lambda: nn.RGATConv(D, OUT, TYPES, heads=2), "attention", _typed),
    **{
        f"RGATConv {name}": Case(functools.partial(nn.RGATConv, D, OUT, TYPES, **options), "attention", arguments)
        for name, options, arguments in (
            ("within relations", dict(attention_mechanism="within-relation", dropout=0.3, num_bases=2), _typed),
            ("multiplied", dict(attention_mode="multiplicative-self-attention", dim=2, heads=2, num_blocks=4), _typed),
            ("additive", dict(mod="additive", heads=2, concat=False), _typed),
            ("f-additive", dict(mod="f-additive", flow="target_to_source"), _typed),
            ("f-scaled", dict(mod="f-scaled", attention_mode="multiplicative-self-attention", concat=False), _typed),
            ("edges", dict(edge_dim=EDGE, heads=3), lambda g: (*_typed(g), g.attr())),
            (
                "edges multiplied",
                dict(edge_dim=EDGE, dim=3, attention_mode="multiplicative-self-attention"),
                lambda g: (*_typed(g), g.attr()),
            ),
        )
    },
    "RGATConv scaled": Case(lambda: _rgat_scaled(), "attention", _typed),
    "HEATConv": Case(lambda: nn.HEATConv(D, OUT, 2, TYPES, 5, EDGE, 6, heads=2), "attention", _heat),
    "HEATConv mean": Case(
        lambda: nn.HEATConv(D, OUT, 2, TYPES, 5, EDGE, 6, heads=2, concat=False, root_weight=False, dropout=0.4),
        "attention",
        _heat,
    ),
    "HANConv": Case(lambda: nn.HANConv(D, OUT, (NODES, RELATIONS), heads=2, dropout=0.3), "attention", _hetero),
    "HGTConv": Case(lambda: nn.HGTConv(D, OUT, (NODES, RELATIONS), heads=2), "attention", _hetero),
    "SuperGATConv MX": Case(lambda: nn.SuperGATConv(D, OUT, heads=2, dropout=0.3), "attention", why=WIDE),
    "SuperGATConv SD": Case(lambda: nn.SuperGATConv(D, OUT, heads=2, attention_type="SD"), "attention", why=WIDE),
    "FAConv": Case(lambda: nn.FAConv(D, dropout=0.3), "attention", lambda g: (g.x(), g.x(2), g.index)),
    "GeneralConv attention": Case(lambda: nn.GeneralConv(D, OUT, attention=True, heads=2), "attention"),
    "GeneralConv dot": Case(
        lambda: nn.GeneralConv(D, OUT, attention=True, heads=2, attention_type="dot_product"), "attention"
    ),
    # Messages that are no product
    "ResGatedGraphConv": Case(lambda: nn.ResGatedGraphConv(D, OUT), "message"),
    "GINEConv": Case(lambda: nn.GINEConv(_mlp(D)), "message", lambda g: (g.x(), g.index, g.attr(D))),
    "GINEConv edges": Case(
        lambda: nn.GINEConv(_mlp(D), edge_dim=EDGE, train_eps=True), "message", _attributed, why=WIDE
    ),
    "GENConv": Case(lambda: nn.GENConv(D, OUT, learn_t=True), "message"),
    "GENConv edges": Case(lambda: nn.GENConv(D, OUT, edge_dim=EDGE, msg_norm=True), "message", _attributed, why=WIDE),
    "GENConv powermean": Case(
        lambda: nn.GENConv(D, OUT, aggr="powermean", edge_dim=EDGE), "message", _attributed, why=WIDE
    ),
    "FiLMConv": Case(lambda: nn.FiLMConv(D, OUT), "message"),
    "FiLMConv relations": Case(lambda: nn.FiLMConv(D, OUT, num_relations=TYPES), "message", _typed),
    "LEConv": Case(lambda: nn.LEConv(D, OUT), "message", _weighted),
    "FeaStConv": Case(lambda: nn.FeaStConv(D, OUT, heads=3), "blocks"),
    "GeneralConv": Case(lambda: nn.GeneralConv(D, OUT), "spmm"),
    "GeneralConv edges": Case(
        lambda: nn.GeneralConv(D, OUT, in_edge_channels=EDGE, directed_msg=False), "message", _attributed, why=WIDE
    ),
    # PyG's own message() and our reduction, where it is "segment"
    "ResGatedGraphConv edges": Case(
        lambda: nn.ResGatedGraphConv(D, OUT, edge_dim=EDGE), "message", _attributed, why=WIDE
    ),
    "NNConv": Case(lambda: nn.NNConv(D, OUT, _mlp(EDGE, D * OUT)), "segment", _attributed, "a matrix per edge"),
    "GMMConv": Case(lambda: nn.GMMConv(D, OUT, dim=EDGE, kernel_size=4), "message", _attributed, why=WIDE),
    "CGConv": Case(lambda: nn.CGConv(D), "message"),
    "CGConv edges": Case(lambda: nn.CGConv(D, dim=EDGE), "message", _attributed, why=WIDE),
    "EdgeConv": Case(lambda: nn.EdgeConv(_mlp(2 * D)), "blocks"),
    "DynamicEdgeConv": Case(lambda: nn.DynamicEdgeConv(_mlp(2 * D), k=4), "blocks", lambda g: (g.x(),)),
    "PointNetConv": Case(lambda: nn.PointNetConv(_mlp(D + 3)), "blocks", lambda g: (g.x(), g.pos(), g.index)),
    "PPFConv": Case(
        lambda: nn.PPFConv(_mlp(D + 4)),
        "blocks",
        lambda g: (g.x(), g.pos(), normalize(g.x(6, 3).detach(), dim=-1), g.index),
    ),
    "PointTransformerConv": Case(
        lambda: nn.PointTransformerConv(D, OUT), "message", lambda g: (g.x(), g.pos(), g.index), why=WIDE
    ),
    "PointGNNConv": Case(
        lambda: nn.PointGNNConv(_mlp(D, 3), _mlp(D + 3), _mlp(OUT, D)),
        "blocks",
        lambda g: (g.x(), g.pos(), g.index),
    ),
    "PNAConv": Case(
        lambda: nn.PNAConv(D, OUT, ["mean", "max", "std"], ["identity", "amplification"], _DEGREES, towers=2),
        "message",
    ),
    "PNAConv deeper": Case(
        lambda: nn.PNAConv(D, OUT, ["max", "sum"], ["identity"], _DEGREES, edge_dim=EDGE, pre_layers=2),
        "blocks",
        _attributed,
        WIDE,
    ),
    "DNAConv": Case(
        lambda: nn.DNAConv(D, heads=2),
        "segment",
        lambda g: (g.randn(g.num_nodes, 3, D), g.index),
        "attention over the layers, on each edge",
    ),
    "MeshCNNConv": Case(lambda: nn.MeshCNNConv(D, OUT), "segment", _mesh, "it reads the edges in groups of four"),
    "SplineConv": Case(
        lambda: nn.SplineConv(D, OUT, dim=2, kernel_size=3),
        "segment",
        lambda g: (g.x(), g.index, g.attr(2).detach().sigmoid()),
        "a spline kernel per edge",
        "torch_spline_conv",
    ),
}


def _knn(x, y, _ptr_x, _ptr_y, k: int, _cosine: bool, _workers: int) -> Tensor:
    """k nearest neighbours [2, N * k] as pyg_lib gives them, for tests where it is not installed."""
    nearest = torch.cdist(y.detach(), x.detach()).topk(k, largest=False).indices
    return torch.stack([torch.arange(y.shape[0], device=y.device).repeat_interleave(k), nearest.flatten()])


@functools.cache
def prepare_pyg() -> None:
    """Make the layers that search neighbours run without pyg_lib."""
    if IS_NEW and not torch_geometric.typing.WITH_KNN:
        schema = "(Tensor x, Tensor y, Tensor? ptr_x, Tensor? ptr_y, int k, bool cosine, int workers) -> Tensor"
        torch.library.define("pyg::knn", schema)
        torch.library.impl("pyg::knn", "CompositeExplicitAutograd", _knn)
        torch_geometric.typing.WITH_KNN = True
    # PyG generates propagate() of a class for its first instance: one of max leaves out what others need.
    nn.SAGEConv(1, 1), nn.GraphConv(1, 1)


IS_NEW = hasattr(torch_geometric.typing, "WITH_KNN")  # 2.8, which runs all cases; older versions some


def missing(case: Case) -> str:
    """What PyG lacks to run the case here: a module, or in older versions a layer or an option; "" for nothing."""
    if case.needs and importlib.util.find_spec(case.needs) is None:
        return case.needs
    if IS_NEW:
        return ""
    try:
        case.make()
    except (AttributeError, ImportError, TypeError) as error:
        return str(error)
    return ""


class SeenOps(TorchDispatchMode):
    """Notes which of our ops run: "attention", "edge_softmax", "sddmm add", "spmm copy_rhs" ...

    "wide" stands for any op that makes a row of more than NARROW features per edge: of `num_edges` rows or more, which
    no weight has, and, with blocks as small as they are made here, no block.
    """

    def __init__(self, num_edges: int) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._rows = num_edges

    def __enter__(self):
        self._sizes = bounds.STORED_BYTES, bounds.STORED_COSTLY_BYTES, bounds.BLOCK_BYTES, bounds.FEW_MESSAGES
        bounds.STORED_BYTES, bounds.STORED_COSTLY_BYTES, bounds.FEW_MESSAGES = {}, {}, {}
        bounds.BLOCK_BYTES = {"cpu": 16 * D * 8, "cuda": 16 * D * 8}
        self._compiled, blocks.compiled = blocks.compiled, self._noted
        return super().__enter__()

    def _noted(self, graph, expression):
        self.names.add("blocks" if graph.device.type == "cpu" else "message_walk")
        return self._compiled(graph, expression)

    def __exit__(self, *exception):
        (
            bounds.STORED_BYTES,
            bounds.STORED_COSTLY_BYTES,
            bounds.BLOCK_BYTES,
            bounds.FEW_MESSAGES,
        ) = self._sizes
        blocks.compiled = self._compiled
        return super().__exit__(*exception)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        plain = [x for x in args if type(x) in (Tensor, torch.nn.Parameter) and x.layout is torch.strided]
        known = {x.untyped_storage().data_ptr() for x in plain}
        if function.namespace == "gnnaccel":
            message = next((a for a in args if isinstance(a, str)), "")
            self.names.add(f"{function._schema.name.split('::')[1]} {message}".strip())
        for x in out if isinstance(out, (tuple, list)) else (out,):
            is_wide = (
                isinstance(x, Tensor)
                and x.dim() > 1
                and x.shape[0] >= self._rows
                and x[0].numel() > bounds.STORED_FEATURES
            )
            if is_wide and x.is_floating_point() and x.untyped_storage().data_ptr() not in known:
                self.names.add("wide")
        return out


def observed(counted: dict, seen: set[str]) -> tuple[str, str]:
    """How a layer ran, in the words of the head of this file, and the reason: from what was counted and seen."""
    reasons = sorted({reason for site in counted.values() for reason in site.reasons})
    if any(site.left for site in counted.values()):
        return "pyg", "; ".join(reasons)
    if any(kind.endswith(" segment") for kind in counted):
        return "segment", "; ".join(reasons)
    scores, wide = {"attention", "dot_attention", "edge_softmax"}, WIDE if "wide" in seen else ""
    if not seen & scores:
        if "blocks" in seen:
            return "blocks", wide
        if any(name.startswith("message_walk") for name in seen):
            return "message", wide
    scores |= {"sddmm add", "sddmm dot"}
    return ("attention" if seen & scores else "spmm"), wide
