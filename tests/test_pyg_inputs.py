"""What layers take and give: every form of edges, weights, pairs and sizes, attention weights, and wrong arguments."""

import contextlib

import pytest
import torch

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from pyg_cases import SeenOps, prepare_pyg
from pyg_compare import LAYERS, D, E, N, edges, grads, rand, same, train
from torch_geometric import EdgeIndex, nn, utils

from gnnaccel import pyg_backend

prepare_pyg()

M, WIDE = 17, 18  # destinations of bipartite graphs; more features than are stored per edge


def sorted_edges(order, cached):
    def make():
        index = EdgeIndex(edges(), sparse_size=(N, N))
        index = index.sort_by(order).values if order else index
        return index.fill_cache_() if cached else index

    return make


FORMS = {
    "EdgeIndex": sorted_edges(None, False),
    "EdgeIndex row": sorted_edges("row", False),
    "EdgeIndex col": sorted_edges("col", False),
    "EdgeIndex row, cached": sorted_edges("row", True),
    "EdgeIndex col, cached": sorted_edges("col", True),
    "undirected": lambda: EdgeIndex(utils.to_undirected(edges()), sparse_size=(N, N), is_undirected=True),
    "transposed": lambda: edges().t().contiguous().t(),
    "expanded": lambda: edges()[:, :1].expand(2, 9),
    "strided": lambda: torch.cat([edges(), edges()], 1)[:, ::2],
    "rows reversed": lambda: edges().flip(0),
    "coo": lambda: adjacency(torch.sparse_coo),
    "csr": lambda: adjacency(torch.sparse_csr),
    "csc": lambda: adjacency(torch.sparse_csc),
}


TENSORS = ("transposed", "expanded", "strided", "rows reversed")


def adjacency(layout):
    index = utils.coalesce(edges().flip(0))
    adj = torch.sparse_coo_tensor(index, rand(index.shape[1], seed=3).abs() + 0.1, (N, N)).coalesce()
    return adj if layout == torch.sparse_coo else adj.to_sparse(layout=layout)


FORM_LAYERS = {
    **{name: LAYERS[name] for name in ("SAGE", "GraphConv", "GAT", "Transformer", "EdgeConv")},
    **{name: LAYERS[name] for name in ("GCN", "SAGE max", "GIN", "GATv2")},
    "GCN not normalised": lambda i, **k: nn.GCNConv(i, 5, normalize=False, **k),
    "AGNN": lambda i, **k: nn.AGNNConv(**k),
}
TURNED = ("SAGE", "GraphConv", "GAT", "Transformer", "EdgeConv")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "name,flow",
    [(name, "source_to_target") for name in FORM_LAYERS] + [(name, "target_to_source") for name in TURNED],
)
@pytest.mark.filterwarnings("ignore:.*(CSR|sparse).*")
def test_edge_form(name, flow, form):
    """Results or, where PyG has none, its error. EdgeIndex multiplies in float32 alone."""

    def program(wrap):
        layer = wrap(FORM_LAYERS[name](WIDE, flow=flow))
        index = FORMS[form]()
        return train(layer, rand(N, WIDE, grad=True), index), layer(rand(N, WIDE), index)

    with contextlib.suppress(AssertionError):
        same(program, dtype=torch.float32, accelerated=None, raises=True)
        return
    kinds = None
    if flow == "source_to_target":
        layer = type(FORM_LAYERS[name](WIDE)).__name__
        kinds = {f"pyg.{layer}"}
        # GATv2Conv takes edges of another type than a plain tensor's by two methods.
        kinds |= {f"pyg.{layer} edge_update"} if layer.startswith("GAT") and form not in TENSORS else set()
    same(program, dtype=torch.float32, accelerated=None, kinds=kinds)


@pytest.mark.parametrize("order", [None, "row", "col"])
@pytest.mark.parametrize("name", ["GCN", "SAGE", "GraphConv", "GAT"])
def test_edge_index_object_makes_no_messages(name, order):
    layer = pyg_backend.accelerate(LAYERS[name](WIDE))
    index = sorted_edges(order, False)()
    with SeenOps(E) as seen, torch.no_grad():
        layer(rand(N, WIDE), index)
    assert "wide" not in seen.names


WEIGHTED = {
    "GCN": lambda: nn.GCNConv(WIDE, 5),
    "GCN no loops": lambda: nn.GCNConv(WIDE, 5, add_self_loops=False),
    "GCN not normalised": lambda: nn.GCNConv(WIDE, 5, normalize=False),
    "GCN cached": lambda: nn.GCNConv(WIDE, 5, cached=True),
    "Graph": lambda: nn.GraphConv(WIDE, 5),
    "SG": lambda: nn.SGConv(WIDE, 5, K=2),
}


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("grad", [True, False])
def test_edge_weight(name, grad):
    """With a gradient to the weight and without, where its normalisation is remembered."""

    def program(wrap):
        layer, index, weight = wrap(WEIGHTED[name]()), edges(), rand(E).abs().requires_grad_(grad)
        steps = 1 if "cached" in name and grad else 2  # PyG keeps the graph of the first step with the weights
        return [train(layer, rand(N, WIDE, grad=True), index, weight) for _ in range(steps)]

    same(program, kinds={f"pyg.{type(WEIGHTED[name]()).__name__}"})


@pytest.mark.parametrize("name", ["GAT", "GATv2", "Transformer"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("fill", ["mean", 0.5])
def test_edge_attr(name, grad, fill):
    more = {} if name == "Transformer" else {"fill_value": fill}

    def program(wrap):
        layer = wrap(LAYERS[name](WIDE, edge_dim=4, dropout=0.3, **more))
        return train(layer, rand(N, WIDE, grad=True), edges(), edge_attr=rand(E, 4, grad=grad))

    same(program, kinds={f"pyg.{name}Conv"} | ({f"pyg.{name}Conv edge_update"} if more else set()))


@pytest.mark.parametrize(
    "name,options",
    [(name, options) for name in ("GAT", "GATv2", "Transformer") for options in ({}, {"concat": False})]
    + [("GAT", {"dropout": 0.4}), ("GATv2", {"share_weights": True}), ("GAT", {"flow": "target_to_source"})],
)
def test_attention_weights(name, options):
    def program(wrap):
        layer = wrap(LAYERS[name](WIDE, **options))
        return train(layer, rand(N, WIDE, grad=True), edges(), return_attention_weights=True)

    same(program, kinds={f"pyg.{name}Conv"} | ({f"pyg.{name}Conv edge_update"} if name != "Transformer" else set()))


def test_shown_weights_match_hidden_ones():
    """Shown, the weights are in PyG's edge order; hidden, they are not, or are not made. The output is the same."""
    for make, before in ((nn.GATConv, (None, None)), (nn.TransformerConv, (None,))):
        for dropout in (0.5, 0.0):
            layer = pyg_backend.accelerate(make(D, 5, heads=2, dropout=dropout))
            x, index = rand(N, D), edges()
            torch.manual_seed(1)
            hidden = layer(x, index)
            torch.manual_seed(1)
            shown, (_, alpha) = layer(x, index, *before, True)
            torch.testing.assert_close(hidden, shown)
            assert alpha.shape[1] == 2


def test_returned_edges_are_the_users_own():
    layer = pyg_backend.accelerate(nn.GATConv(D, 5))
    x, index = rand(N, D), edges()
    _, (first, _) = layer(x, index, return_attention_weights=True)
    _, (second, _) = layer(x, index, return_attention_weights=True)
    expected = second.clone()
    first.zero_()
    assert torch.equal(second, expected)


BIPARTITE = {
    "SAGE": lambda: nn.SAGEConv((WIDE, 6), 5),
    "SAGE max": lambda: nn.SAGEConv((WIDE, 6), 5, aggr="max"),
    "Graph": lambda: nn.GraphConv((WIDE, 6), 5),
    "GAT": lambda: nn.GATConv((WIDE, 6), 5, heads=2, add_self_loops=False),
    "GAT loops": lambda: nn.GATConv((WIDE, 6), 5, heads=2),
    "GATv2": lambda: nn.GATv2Conv((WIDE, 6), 5, heads=2, add_self_loops=False),
    "Transformer": lambda: nn.TransformerConv((WIDE, 6), 5, heads=2),
}


@pytest.mark.parametrize("name", BIPARTITE)
def test_bipartite(name):
    def program(wrap):
        x = rand(N, WIDE, grad=True), rand(M, 6, seed=2, grad=True)
        return train(wrap(BIPARTITE[name]()), x, edges(num_dst=M))

    layer = type(BIPARTITE[name]()).__name__
    same(program, kinds={f"pyg.{layer}"} | ({f"pyg.{layer} edge_update"} if name == "GAT loops" else set()))


class Copy(nn.MessagePassing):
    def forward(self, x, edge_index, size=None):
        return self.propagate(edge_index, x=x, size=size)


def test_size():
    def turned(wrap):
        layer = wrap(Copy(flow="target_to_source"))
        return train(layer, rand(N, WIDE, grad=True), edges(num_dst=M).flip(0), size=(M, N))

    def sized(wrap):
        x = rand(N, WIDE, grad=True)
        layers = Copy(), nn.SAGEConv((WIDE, WIDE), 5, root_weight=False), nn.GATConv((WIDE, WIDE), 5)
        given = x, (x, None), (x, None)
        return [train(wrap(layer), g, edges(num_dst=M), size=(N, M)) for layer, g in zip(layers, given, strict=True)]

    same(turned, kinds={"pyg.Copy"})
    same(sized, kinds={"pyg.Copy", "pyg.SAGEConv", "pyg.GATConv", "pyg.GATConv edge_update"})


@pytest.mark.parametrize("name", [*LAYERS, "AGNN", "GAT no loops"])
def test_no_edges_and_one_node(name):
    more = {"AGNN": lambda i: nn.AGNNConv(), "GAT no loops": lambda i: nn.GATConv(i, 5, add_self_loops=False)}

    def program(wrap):
        layer = wrap((more | LAYERS)[name](WIDE)).eval()  # one node has no variance to normalise by
        none, loop = torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long)
        return train(layer, rand(4, WIDE, grad=True), none), train(layer, rand(1, WIDE, grad=True), loop)

    same(program, accelerated=None)


X = lambda *shape: rand(*(shape or (N, D)))  # noqa: E731
WRONG = {
    "index too large": lambda c: c(X(), edges() + N),
    "index negative": lambda c: c(X(), edges() - 1),
    "too few rows": lambda c: c(X(N - 5, D), edges()),
    "wrong width": lambda c: c(X(N, D + 1), edges()),
    "float edges": lambda c: c(X(), edges().float()),
    "bool edges": lambda c: c(X(), edges() > 3),
    "one row": lambda c: c(X(), edges()[:1]),
    "three rows": lambda c: c(X(), torch.cat([edges(), edges()[:1]])),
    "flat edges": lambda c: c(X(), edges().flatten()),
    "edges as list": lambda c: c(X(), edges().tolist()),
    "edges as None": lambda c: c(X(), None),
    "edges as string": lambda c: c(X(), "edges"),
    "features as None": lambda c: c(None, edges()),
    "features int": lambda c: c(torch.ones(N, D, dtype=torch.long), edges()),
    "features of other dtype": lambda c: c(X().float(), edges()),
    "features 1-D": lambda c: c(X(N), edges()),
    "features 3-D": lambda c: c(X(2, N, D), edges()),
    "features complex": lambda c: c(X().to(torch.complex128), edges()),
    "features as array": lambda c: c(X().numpy(), edges()),
    "unknown argument": lambda c: c(X(), edges(), nothing=1),
    "too many arguments": lambda c: c(X(), edges(), None, None, None, None, None),
    "missing edges": lambda c: c(X()),
    "wrong size": lambda c: c(X(), edges(), size=(N, N + 2)),
    "size of one": lambda c: c(X(), edges(), size=(N,)),
    "pair of three": lambda c: c((X(), X(), X()), edges()),
    "pair without target": lambda c: c((X(), None), edges()),
    "pair of other size": lambda c: c((X(), X(N - 9, D)), edges()),
    "edge_weight too short": lambda c: c(X(), edges(), rand(E - 1)),
    "edge_weight too wide": lambda c: c(X(), edges(), rand(E, 3)),
    "edge_weight int": lambda c: c(X(), edges(), torch.ones(E, dtype=torch.long)),
    "edge_weight float": lambda c: c(X(), edges(), rand(E).float()),
    "edge_attr too short": lambda c: c(X(), edges(), edge_attr=rand(E - 1, 3)),
    "edge_attr too wide": lambda c: c(X(), edges(), edge_attr=rand(E, 4)),
    "edge_attr 1-D": lambda c: c(X(), edges(), edge_attr=rand(E)),
    "meta features": lambda c: c(X().to("meta"), edges()),
    "uint8 edges": lambda c: c(X(), edges().to(torch.uint8)),
    "int16 edges": lambda c: c(X(), edges().to(torch.int16)),
    "scalar edges": lambda c: c(X(), torch.tensor(3)),
    "empty edges": lambda c: c(X(), torch.empty(2, 0, dtype=torch.long)),
    "no nodes": lambda c: c(X(0, D), torch.empty(2, 0, dtype=torch.long)),
    "no nodes, edges": lambda c: c(X(0, D), edges()),
    "quantised": lambda c: c(torch.quantize_per_tensor(X().float(), 0.1, 0, torch.qint8), edges()),
    "sparse features": lambda c: c(X().to_sparse(), edges()),
    # Forward only: to which of several NaN the gradient of a maximum goes is nobody's promise.
    "nan": lambda c: c(torch.full((N, D), float("nan")), edges()).detach(),
    "infinite": lambda c: c(X() / 0, edges()).detach(),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input(case):
    """The same error as PyG's, or the same result where it takes the input after all; the layer works afterwards."""
    for name, make in LAYERS.items():
        options = {"edge_dim": 3} if "edge_attr" in case and name in ("GAT", "GATv2", "Transformer") else {}

        def program(wrap, make=make, options=options):
            layer = wrap(make(**options))
            try:
                out = WRONG[case](layer)
                out = train_if_possible(layer, out)
            except Exception as error:
                out = type(error).__name__, str(error)
            good = {"edge_attr": rand(E, 3)} if options else {}
            return out, layer(rand(N, D), edges(), **good)

        try:
            same(program, accelerated=None)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def train_if_possible(layer, out):
    layer.zero_grad()
    if out.requires_grad:
        out.sum().backward()
    return out, grads(layer)
