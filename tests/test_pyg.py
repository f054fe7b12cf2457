"""The PyG plug-in against plain PyG: outputs and all gradients, and everything a user may do with a layer."""

import copy
import gc
import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from torch_geometric import EdgeIndex, nn, utils
from torch_geometric.data import Batch, Data
from torch_geometric.nn.conv import MessagePassing

from gnnaccel import pyg_backend, report
from gnnaccel.graph.cache import derived

# PyG generates propagate() of a class for its first instance, and without the fused path if that one reduces by max.
nn.SAGEConv(1, 1)

N, M, E, D = 30, 21, 160, 18  # sources (and nodes), destinations of bipartite graphs, edges, features


class Copy(MessagePassing):
    """The smallest layer: message() is PyG's own copy of x_j."""

    def forward(self, x, edge_index, size=None):
        return self.propagate(edge_index, x=x, size=size)


class Weighted(MessagePassing):
    """A user's layer with a weight written in another way, and a branch on None."""

    def forward(self, x, edge_index, edge_weight=None):
        return self.propagate(edge_index, x=x, edge_weight=edge_weight)

    def message(self, x_j, edge_weight=None):
        if edge_weight is None:
            return x_j
        return torch.mul(x_j, torch.sigmoid(edge_weight).unsqueeze(-1))


class Tutorial(MessagePassing):
    """The GCN of PyG's tutorial: self-loops and normalisation in forward(), by helpers of torch_geometric.utils."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(D, 5)

    def forward(self, x, edge_index):
        edge_index, _ = utils.add_self_loops(edge_index, num_nodes=x.size(0))
        row, col = edge_index
        deg = utils.degree(col, x.size(0), dtype=x.dtype)
        norm = deg.pow(-0.5)[row] * deg.pow(-0.5)[col]
        return self.propagate(edge_index, x=self.lin(x), norm=norm)

    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j


class Attention(MessagePassing):
    """A user's attention: a softmax over scores that depend on both ends."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.lin = torch.nn.Linear(D, 6)
        self.att = torch.nn.Parameter(torch.randn(2, 3))

    def forward(self, x, edge_index):
        h = self.lin(x).view(-1, 2, 3)
        alpha = (h * self.att).sum(-1)
        return self.propagate(edge_index, x=h, alpha=alpha, score=alpha.detach() * 2).flatten(1)

    def message(self, x_j, alpha_i, alpha_j, score_j, index, ptr, size_i):
        alpha = F.leaky_relu(alpha_i + alpha_j, 0.2) + score_j
        alpha = utils.softmax(alpha, index, ptr, size_i)
        return x_j * alpha.unsqueeze(-1)


class Doubler(nn.SAGEConv):
    """A subclass that overrides message(): its parent's rule must not be used."""

    def message(self, x_j):
        return 2 * x_j * x_j


class EdgeNetwork(MessagePassing):
    """A message no rule covers: PyG computes it, we reduce it."""

    def __init__(self, aggr="sum"):
        super().__init__(aggr=aggr)
        self.lin = torch.nn.Linear(2 * D, 5)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return self.lin(torch.cat([x_i, x_j - x_i], -1)).relu()


class OwnUpdate(Copy):
    def update(self, inputs, x):
        return inputs + x


def edges(seed=0, num_src=N, num_dst=N, count=E):
    g = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randint(0, n, (count,), generator=g) for n in (num_src, num_dst)])
    if num_src == num_dst:
        index[:, :4] = torch.arange(4)  # self-loops
        index[:, 4:8] = index[:, 8:12]  # duplicates
        index[1][index[1] == num_dst - 1] = 0  # a node without in-edges
    return index


def rand(*shape, seed=1, dtype=torch.float64, grad=False):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_(grad)


def leaves(tree):
    """Every tensor in nested tuples and dicts."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return [leaf for item in items for leaf in leaves(item)]


def run(layer, args, kwargs):
    """Outputs and gradients of all floating-point inputs and parameters, from the same random numbers."""
    args, kwargs = copy.deepcopy((args, kwargs))
    torch.manual_seed(5)
    out = layer(*args, **kwargs)
    outputs = [o for o in leaves(out) if o.layout is torch.strided]
    wanted = [t for t in leaves((args, kwargs)) if t.requires_grad] + list(layer.parameters())
    loss = sum((o * rand(*o.shape, seed=9, dtype=o.dtype)).sum() for o in outputs if o.requires_grad)
    grads = torch.autograd.grad(loss, wanted, allow_unused=True) if outputs[0].requires_grad else []
    return outputs, grads


def assert_same(plain, *args, kinds=None, dtype=torch.float64, **kwargs):
    """The accelerated copy of `plain` gives its outputs and gradients; with `kinds`, by those call sites alone."""
    plain = plain.to(dtype)
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    expected, expected_grads = run(plain, args, kwargs)
    report.reset()
    got, grads = run(layer, args, kwargs)
    tolerance = {} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    for a, b in zip(grads, expected_grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **tolerance)
    if kinds is not None:
        sites = report.snapshot()
        assert {kind for kind, site in sites.items() if site.accelerated} == kinds, sites
        assert not any(site.left for site in sites.values()), sites


def linear():
    return torch.nn.Linear(D, 5)


# name -> (layer, call sites that must be accelerated, with nothing left to PyG, on a plain edge_index)
LAYERS = {
    "GCN": (lambda: nn.GCNConv(D, 5), {"pyg.GCNConv"}),
    "GCN improved": (lambda: nn.GCNConv(D, 5, improved=True), {"pyg.GCNConv"}),
    "GCN no loops": (lambda: nn.GCNConv(D, 5, add_self_loops=False), {"pyg.GCNConv"}),
    "GCN not normalised": (lambda: nn.GCNConv(D, 5, normalize=False), {"pyg.GCNConv"}),
    "GCN cached": (lambda: nn.GCNConv(D, 5, cached=True), {"pyg.GCNConv"}),
    "GCN reversed": (lambda: nn.GCNConv(D, 5, flow="target_to_source"), {"pyg.GCNConv"}),
    "SAGE mean": (lambda: nn.SAGEConv(D, 5, normalize=True), {"pyg.SAGEConv"}),
    "SAGE sum": (lambda: nn.SAGEConv(D, 5, aggr="sum"), {"pyg.SAGEConv"}),
    "SAGE max": (lambda: nn.SAGEConv(D, 5, aggr="max", project=True), {"pyg.SAGEConv"}),
    "SAGE reversed": (lambda: nn.SAGEConv(D, 5, flow="target_to_source"), {"pyg.SAGEConv"}),
    "GIN": (lambda: nn.GINConv(linear(), train_eps=True), {"pyg.GINConv"}),
    "Graph": (lambda: nn.GraphConv(D, 5), {"pyg.GraphConv"}),
    "Graph min": (lambda: nn.GraphConv(D, 5, aggr="min"), {"pyg.GraphConv"}),
    "GAT": (lambda: nn.GATConv(D, 5, heads=3, residual=True), {"pyg.GATConv", "pyg.GATConv edge_update"}),
    "GAT mean": (lambda: nn.GATConv(D, 5, heads=2, concat=False), {"pyg.GATConv", "pyg.GATConv edge_update"}),
    "GAT dropout": (lambda: nn.GATConv(D, 5, heads=2, dropout=0.4), {"pyg.GATConv", "pyg.GATConv edge_update"}),
    "GAT reversed": (
        lambda: nn.GATConv(D, 5, heads=2, flow="target_to_source"),
        {"pyg.GATConv", "pyg.GATConv edge_update"},
    ),
    "GATv2": (lambda: nn.GATv2Conv(D, 5, heads=3, dropout=0.4), {"pyg.GATv2Conv", "pyg.GATv2Conv edge_update"}),
    "GATv2 shared": (lambda: nn.GATv2Conv(D, 5, share_weights=True), {"pyg.GATv2Conv", "pyg.GATv2Conv edge_update"}),
    "Transformer": (lambda: nn.TransformerConv(D, 5, heads=2, dropout=0.4), {"pyg.TransformerConv"}),
    "Transformer beta": (
        lambda: nn.TransformerConv(D, 5, heads=2, beta=True, concat=False),
        {"pyg.TransformerConv"},
    ),
    "AGNN": (lambda: nn.AGNNConv(), {"pyg.AGNNConv"}),
    "AGNN fixed": (lambda: nn.AGNNConv(requires_grad=False, add_self_loops=False), {"pyg.AGNNConv"}),
    "Cheb": (lambda: nn.ChebConv(D, 5, K=3), {"pyg.ChebConv"}),
    "SG": (lambda: nn.SGConv(D, 5, K=2), {"pyg.SGConv"}),
    "TAG": (lambda: nn.TAGConv(D, 5), {"pyg.TAGConv"}),
    "LG": (lambda: nn.LGConv(), {"pyg.LGConv"}),
    "APPNP": (lambda: nn.APPNP(3, 0.1), {"pyg.APPNP"}),
    "Copy": (lambda: Copy(), {"pyg.Copy"}),
    "Copy min": (lambda: Copy(aggr="min"), {"pyg.Copy"}),
    "Weighted": (lambda: Weighted(), {"pyg.Weighted"}),
    "Tutorial": (lambda: Tutorial(), {"pyg.Tutorial"}),
    "Attention": (lambda: Attention(), {"pyg.Attention"}),
    "Subclass": (lambda: Doubler(D, 5), {"pyg.Doubler"}),
    "Edge network": (lambda: EdgeNetwork(), {"pyg.EdgeNetwork segment"}),
    "Edge network max": (lambda: EdgeNetwork("max"), {"pyg.EdgeNetwork segment"}),
    "ResGated": (lambda: nn.ResGatedGraphConv(D, 5), {"pyg.ResGatedGraphConv"}),
    "SuperGAT": (lambda: nn.SuperGATConv(D, 5, heads=2), {"pyg.SuperGATConv"}),
    "Own update": (lambda: OwnUpdate(), {"pyg.OwnUpdate"}),
    "Several": (lambda: nn.SAGEConv(D, 5, aggr=["mean", "max"]), None),
    "PNA": (lambda: nn.PNAConv(D, 6, ["mean", "std"], ["identity"], torch.tensor([1, 2, 3])), None),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_layer(name, dtype):
    make, kinds = LAYERS[name]
    assert_same(make(), rand(N, D, dtype=dtype, grad=True), edges(), kinds=kinds, dtype=dtype)


def sparse(layout):
    """The transposed adjacency of edges() without duplicates, with values that are not one."""
    index = utils.coalesce(edges().flip(0))
    adj = torch.sparse_coo_tensor(index, rand(index.shape[1], seed=3).abs() + 0.1, (N, N)).coalesce()
    return adj if layout == torch.sparse_coo else adj.to_sparse(layout=layout)


EDGE_FORMS = {
    "EdgeIndex": lambda: EdgeIndex(edges(), sparse_size=(N, N)),
    "EdgeIndex by column": lambda: EdgeIndex(edges(), sparse_size=(N, N)).sort_by("col")[0],
    "EdgeIndex by row": lambda: EdgeIndex(edges(), sparse_size=(N, N)).sort_by("row")[0],
    "csr": lambda: sparse(torch.sparse_csr),
    "coo": lambda: sparse(torch.sparse_coo),
    "csc": lambda: sparse(torch.sparse_csc),
    "not contiguous": lambda: edges().t().contiguous().t(),
}
# What PyG itself refuses: gcn_norm and unfused layers on CSC.
FORM_LAYERS = ["GCN not normalised", "SAGE mean", "SAGE max", "GIN", "Graph", "GCN", "GAT dropout", "GATv2", "AGNN"]
FORM_LAYERS += ["Transformer", "Weighted", "Copy"]


@pytest.mark.parametrize("form", EDGE_FORMS)
@pytest.mark.parametrize("name", FORM_LAYERS)
@pytest.mark.filterwarnings("ignore:.*(CSR|sparse).*")
def test_edge_forms(name, form):
    make, kinds = LAYERS[name]
    dtype = torch.float32 if form.startswith("EdgeIndex") else torch.float64  # all that its own matmul takes
    plain, given = make().to(dtype), EDGE_FORMS[form]()
    x = rand(N, D, dtype=dtype, grad=True)
    try:
        run(plain, (x, given), {})
    except (NotImplementedError, ValueError) as error:
        layer = pyg_backend.accelerate(copy.deepcopy(plain))
        with pytest.raises(type(error)):
            run(layer, (x, given), {})
        return
    assert_same(make(), x, given, kinds=kinds, dtype=dtype)


def edge_values(*shape, grad=True):
    return rand(E, *shape, seed=4, grad=grad)


@pytest.mark.parametrize("name", ["GCN", "GCN no loops", "GCN not normalised", "Graph", "Weighted", "SG", "GCN cached"])
@pytest.mark.parametrize("grad", [True, False])
def test_edge_weight(name, grad):
    make, kinds = LAYERS[name]
    weight = edge_values(grad=False).abs().requires_grad_(grad)
    assert_same(make(), rand(N, D, grad=True), edges(), weight, kinds=kinds)


ATTRIBUTED = {
    "GAT": lambda **k: nn.GATConv(D, 5, heads=3, edge_dim=4, dropout=0.3, **k),
    "GATv2": lambda **k: nn.GATv2Conv(D, 5, heads=3, edge_dim=4, dropout=0.3, **k),
    "Transformer": lambda **k: nn.TransformerConv(D, 5, heads=3, edge_dim=4, dropout=0.3, **k),
}


@pytest.mark.parametrize("name", ATTRIBUTED)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("fill", ["mean", 0.5])
def test_edge_attr(name, grad, fill):
    make = ATTRIBUTED[name]
    layer = make() if name == "Transformer" else make(fill_value=fill)
    kinds = {f"pyg.{name}Conv"} | (set() if name == "Transformer" else {f"pyg.{name}Conv edge_update"})
    assert_same(layer, rand(N, D, grad=True), edges(), edge_attr=edge_values(4, grad=grad), kinds=kinds)


@pytest.mark.parametrize("name", [n for n in LAYERS if n.split()[0] in ("GAT", "GATv2", "Transformer")])
def test_attention_weights(name):
    make, kinds = LAYERS[name]
    x = rand(N, D, grad=True)
    assert_same(make(), x, edges(), return_attention_weights=True, kinds=kinds)


def test_shown_weights_match_hidden_ones():
    """Shown, the weights are in PyG's edge order; hidden, they are not, or are not made. The output is the same."""
    for make, before in ((nn.GATConv, (None, None)), (nn.TransformerConv, (None,))):
        for dropout in (0.5, 0.0):
            layer = pyg_backend.accelerate(make(D, 5, heads=2, dropout=dropout)).double()
            x, index = rand(N, D), edges()
            torch.manual_seed(1)
            hidden = layer(x, index)
            torch.manual_seed(1)
            shown, (_, alpha) = layer(x, index, *before, True)
            torch.testing.assert_close(hidden, shown)
            assert alpha.shape[1] == 2


def test_returned_edges_are_the_users_own():
    layer = pyg_backend.accelerate(nn.GATConv(D, 5))
    x, index = rand(N, D, dtype=torch.float32), edges()
    _, (first, _) = layer(x, index, return_attention_weights=True)
    _, (second, _) = layer(x, index, return_attention_weights=True)
    expected = second.clone()
    first.zero_()
    assert torch.equal(second, expected)


BIPARTITE = {
    "SAGE": lambda: nn.SAGEConv((D, 6), 5),
    "SAGE max": lambda: nn.SAGEConv((D, 6), 5, aggr="max"),
    "Graph": lambda: nn.GraphConv((D, 6), 5),
    "GAT": lambda: nn.GATConv((D, 6), 5, heads=2, add_self_loops=False),
    "GAT loops": lambda: nn.GATConv((D, 6), 5, heads=2),
    "GATv2": lambda: nn.GATv2Conv((D, 6), 5, heads=2, add_self_loops=False),
    "Transformer": lambda: nn.TransformerConv((D, 6), 5, heads=2),
}


@pytest.mark.parametrize("name", BIPARTITE)
def test_bipartite(name):
    x = rand(N, D, grad=True), rand(M, 6, seed=2, grad=True)
    assert_same(BIPARTITE[name](), x, edges(num_dst=M), kinds=None)
    sites = report.snapshot()
    assert sites and not any(site.left for site in sites.values()), sites


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_size(flow):
    size = (N, M) if flow == "source_to_target" else (M, N)
    index = edges(num_dst=M) if flow == "source_to_target" else edges(num_dst=M).flip(0)
    assert_same(Copy(flow=flow), rand(N, D, grad=True), index, size=size, kinds={"pyg.Copy"})
    layer = nn.SAGEConv((D, D), 5, root_weight=False)
    assert_same(layer, (rand(N, D, grad=True), None), edges(num_dst=M), size=(N, M), kinds={"pyg.SAGEConv"})
    assert_same(nn.GATConv((D, D), 5), (rand(N, D, grad=True), None), edges(num_dst=M), size=(N, M))


def test_no_edges_and_one_node():
    for name in ("GCN", "SAGE max", "GAT", "GATv2", "Transformer", "AGNN", "Edge network"):
        make = LAYERS[name][0]
        assert_same(make(), rand(4, D, grad=True), torch.zeros(2, 0, dtype=torch.long))
        assert_same(make(), rand(1, D, grad=True), torch.zeros(2, 1, dtype=torch.long))
    loopless = nn.GATConv(D, 5, add_self_loops=False)
    assert_same(loopless, rand(4, D, grad=True), torch.zeros(2, 0, dtype=torch.long))


BAD = {
    "too large": (torch.tensor([[0, N], [1, 1]]), None),
    "negative": (torch.tensor([[0, -1], [1, 1]]), None),
    "float": (torch.tensor([[0.0, 1.0], [1.0, 1.0]]), None),
    "three rows": (torch.zeros(3, 4, dtype=torch.long), None),
    "flat": (torch.zeros(4, dtype=torch.long), None),
    "list": ([[0, 1], [1, 0]], None),
    "size": (torch.tensor([[0, 1], [1, 1]]), (N + 1, N)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_as_pyg(name):
    index, size = BAD[name]
    plain = nn.SAGEConv(D, 5)
    with pytest.raises(Exception) as expected:
        plain(rand(N, D, dtype=torch.float32), index, size=size)
    with pytest.raises(type(expected.value)) as got:
        pyg_backend.accelerate(copy.deepcopy(plain))(rand(N, D, dtype=torch.float32), index, size=size)
    assert str(got.value) == str(expected.value)


def test_wrong_weight_raises_as_pyg():
    plain = nn.GraphConv(D, 5)
    args = rand(N, D, dtype=torch.float32), edges(), torch.ones(E - 1)
    for layer in (plain, pyg_backend.accelerate(copy.deepcopy(plain))):
        with pytest.raises(RuntimeError, match="size of tensor"):
            layer(*args)


@pytest.mark.parametrize("name", ["GCN", "SAGE mean", "GAT"])
def test_edges_changed_in_place(name):
    plain = LAYERS[name][0]().double()
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    x, index = rand(N, D), edges()
    torch.testing.assert_close(layer(x, index), plain(x, index))
    index[0] = index[0].flip(0).clone()
    torch.testing.assert_close(layer(x, index), plain(x, index))
    index[1, 3:7] = 5
    torch.testing.assert_close(layer(x, index), plain(x, index))


def test_edge_weight_changed_in_place():
    plain = nn.GCNConv(D, 5).double()
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    x, index, weight = rand(N, D), edges(), edge_values(grad=False).abs()
    torch.testing.assert_close(layer(x, index, weight), plain(x, index, weight))
    weight.mul_(torch.arange(E))
    torch.testing.assert_close(layer(x, index, weight), plain(x, index, weight))


class Writing(Tutorial):
    """A layer that writes into the edges a helper gave it: they must be its own every time."""

    def forward(self, x, edge_index):
        edge_index, _ = utils.add_self_loops(edge_index, num_nodes=x.size(0))
        edge_index[0] = (edge_index[0] + 1) % x.size(0)
        return self.propagate(edge_index, x=x, norm=torch.ones(edge_index.size(1), dtype=x.dtype))


def test_layer_that_writes_into_derived_edges():
    plain = Writing()
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    x, index = rand(N, D), edges()
    for _ in range(3):
        torch.testing.assert_close(layer(x, index), plain(x, index))


@pytest.mark.parametrize("options", [dict(bias=False), dict(bias=False, residual=True), dict(concat=False, bias=False)])
def test_gat_results_may_be_written_into(options):
    layer = pyg_backend.accelerate(nn.GATConv(D, 4, heads=2, **options))
    out = layer(rand(N, D, dtype=torch.float32), edges()).relu_()
    out.sum().backward()
    assert layer.lin.weight.grad.isfinite().all()


def test_sparse_values_changed_in_place():
    plain = nn.SAGEConv(D, 5).double()
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    x, adj = rand(N, D), sparse(torch.sparse_csr)
    adj.values().fill_(1)
    torch.testing.assert_close(layer(x, adj), plain(x, adj))
    adj.values()[3:9] = 4
    torch.testing.assert_close(layer(x, adj), plain(x, adj))


def test_structure_is_derived_once_and_dies_with_the_edges():
    derived.invalidate()
    model = pyg_backend.accelerate(
        nn.Sequential("x, e", [(nn.GCNConv(D, D), "x, e -> x"), (nn.GATConv(D, 5), "x, e -> x")])
    )
    x, index = rand(N, D, dtype=torch.float32, grad=True), edges()
    model(x, index).sum().backward()
    count = len(derived)
    for _ in range(3):
        model(x, index).sum().backward()
    assert len(derived) == count
    del index
    gc.collect()
    assert len(derived) == 0


def test_sparse_structure_dies_with_the_matrix():
    derived.invalidate()
    layer = pyg_backend.accelerate(nn.GCNConv(D, 5)).double()
    for layout in (torch.sparse_csr, torch.sparse_coo):
        adj = sparse(layout)
        layer(rand(N, D), adj)
        assert len(derived)
        del adj
        gc.collect()
        assert len(derived) == 0


def test_mini_batches_leave_nothing_behind():
    derived.invalidate()
    plain = nn.models.GraphSAGE(D, 16, 2, 3)
    model = pyg_backend.accelerate(copy.deepcopy(plain))
    for seed in range(5):
        batch = Batch.from_data_list([Data(rand(N, D, dtype=torch.float32), edges(seed)) for seed in (seed, seed + 1)])
        torch.testing.assert_close(model(batch.x, batch.edge_index), plain(batch.x, batch.edge_index))
    del batch
    gc.collect()
    assert len(derived) == 0


@pytest.mark.skipif(not (pyg.typing.WITH_PYG_LIB or pyg.typing.WITH_TORCH_SPARSE), reason="no sampler installed")
def test_neighbor_loader():
    data = Data(rand(N, D, dtype=torch.float32), edges())
    plain = nn.models.GraphSAGE(D, 16, 2, 3)
    model = pyg_backend.accelerate(copy.deepcopy(plain))
    for batch in pyg.loader.NeighborLoader(data, [3, 3], batch_size=7):
        torch.testing.assert_close(model(batch.x, batch.edge_index), plain(batch.x, batch.edge_index))


def test_evaluation_in_inference_mode_then_training():
    for make in (lambda: nn.GCNConv(D, 5), lambda: nn.GATv2Conv(D, 5), lambda: ATTRIBUTED["Transformer"]()):
        layer = pyg_backend.accelerate(make())
        x, index = rand(N, D, dtype=torch.float32), edges()
        more = {"edge_attr": rand(E, 4, dtype=torch.float32)} if isinstance(layer, nn.TransformerConv) else {}
        layer.eval()
        with torch.inference_mode():
            expected = layer(x, index, **more).clone()
        out = layer(x, index, **more)
        out.sum().backward()
        torch.testing.assert_close(out, expected)


def test_autocast():
    for name in ("GCN", "SAGE mean", "GAT", "GATv2", "Transformer", "AGNN"):
        plain = LAYERS[name][0]().eval()
        layer = pyg_backend.accelerate(copy.deepcopy(plain))
        x, index = rand(N, D, dtype=torch.float32), edges()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, expected = layer(x, index), plain(x, index)
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=3e-2, atol=3e-2)


# What must go to PyG: how to bring the layer there, and the reason that is counted.
def _explain(layer):
    layer.explain = True
    layer._edge_mask = torch.ones(E)
    layer._loop_mask = torch.ones(E, dtype=torch.bool)


LEFT = {
    "explain": (_explain, "explain is on"),
    "decomposed": (lambda c: setattr(c, "decomposed_layers", 2), "decomposed_layers > 1"),
    "hooks": (
        lambda c: c.register_message_forward_hook(lambda m, i, o: o * 2),
        "message passing hooks are registered",
    ),
    "replaced": (
        lambda c: setattr(c, "message", (lambda self, x_j: x_j + 1).__get__(c)),
        "message() was replaced on the instance",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_to_pyg(name):
    change, reason = LEFT[name]
    plain = Copy()
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    change(plain)
    change(layer)
    x, index = rand(N, D), edges()
    report.reset()
    torch.testing.assert_close(layer(x, index), plain(x, index))
    assert report.snapshot()["pyg.Copy"].reasons == {reason: 1}


def test_explain_toggled():
    plain = nn.GATConv(D, 5).double()
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    x, index = rand(N, D), utils.remove_self_loops(edges())[0]
    for value in (True, False, True, None):
        for module in (plain, layer):
            module.explain = value
            module._edge_mask = torch.linspace(-1, 1, index.shape[1], dtype=torch.float64)
            module._loop_mask = torch.ones(index.shape[1], dtype=torch.bool)
        report.reset()
        torch.testing.assert_close(layer(x, index), plain(x, index))
        assert bool(report.snapshot()["pyg.GATConv"].accelerated) == (not value)
    pyg_backend.disable()
    assert type(layer) is nn.GATConv
    torch.testing.assert_close(layer(x, index), plain(x, index))


def test_hook_removed_again():
    layer = pyg_backend.accelerate(nn.SAGEConv(D, 5))
    x, index = rand(N, D, dtype=torch.float32), edges()
    seen = []
    handle = layer.register_propagate_forward_hook(lambda *a: seen.append(1))
    layer(x, index)
    handle.remove()
    report.reset()
    layer(x, index)
    assert seen == [1]
    assert report.snapshot()["pyg.SAGEConv"].accelerated == 1


def test_torch_func_and_forward_mode():
    layer = pyg_backend.accelerate(nn.SAGEConv(D, 5)).double()
    x, index = rand(N, D), edges()
    expected = torch.autograd.functional.jvp(lambda v: layer(v, index), x, torch.ones_like(x))[1]
    _, got = torch.func.jvp(lambda v: layer(v, index), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(got, expected)


def test_double_backward():
    for make in (lambda: nn.GCNConv(D, 5), lambda: nn.GATConv(D, 5, heads=2), lambda: nn.TransformerConv(D, 5)):
        plain = make().double()
        results = []
        for layer in (plain, pyg_backend.accelerate(copy.deepcopy(plain))):
            x = rand(N, D, grad=True)
            (first,) = torch.autograd.grad(layer(x, edges()).pow(2).sum(), x, create_graph=True)
            results.append(torch.autograd.grad(first.pow(2).sum(), x)[0])
        torch.testing.assert_close(*results)


def test_compile():
    plain = nn.models.GCN(D, 8, 2, 3)
    model = pyg_backend.accelerate(copy.deepcopy(plain))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x, index = rand(N, D, dtype=torch.float32), edges()
    report.reset()
    torch.testing.assert_close(compiled(x, index), plain(x, index))
    assert set(report.snapshot()["pyg.GCNConv"].reasons) == {"torch.compile"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_jit():
    plain = nn.SAGEConv(D, 5)
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    x, index = rand(N, D, dtype=torch.float32), edges()
    torch.testing.assert_close(torch.jit.script(layer)(x, index), plain(x, index))
    torch.testing.assert_close(torch.jit.trace(layer, (x, index))(x, index), plain(x, index))
    assert type(layer) is not nn.SAGEConv


def stack(*layers):
    return torch.nn.ModuleList([make() for make in layers])


def test_copies_stay_accelerated_and_equal():
    model = pyg_backend.accelerate(stack(lambda: nn.GCNConv(D, D), lambda: nn.GATConv(D, 5)))
    x, index = rand(N, D, dtype=torch.float32), edges()
    for twin in (copy.deepcopy(model), torch.nn.ModuleList([copy.copy(m) for m in model])):
        report.reset()
        torch.testing.assert_close(twin[1](twin[0](x, index), index), model[1](model[0](x, index), index))
        assert report.share() == 1
    twin = copy.deepcopy(model)
    assert twin[0].lin.weight.data_ptr() != model[0].lin.weight.data_ptr()
    assert repr(twin) == repr(stack(lambda: nn.GCNConv(D, D), lambda: nn.GATConv(D, 5)))


def test_state_dict_is_the_frameworks():
    plain = nn.models.GAT(D, 8, 2, 3)
    model = pyg_backend.accelerate(copy.deepcopy(plain))
    model(rand(N, D, dtype=torch.float32), edges())
    assert list(model.state_dict()) == list(plain.state_dict())
    fresh = nn.models.GAT(D, 8, 2, 3)
    fresh.load_state_dict(model.state_dict())
    x = rand(N, D, dtype=torch.float32)
    torch.testing.assert_close(fresh(x, edges()), model(x, edges()))


@pytest.mark.parametrize("explain", [False, True])
def test_pickle_loads_without_gnnaccel(tmp_path, explain):
    model = pyg_backend.accelerate(nn.models.GCN(D, 8, 2, 3))
    x, index = rand(N, D, dtype=torch.float32), edges()
    expected = model(x, index)
    if explain:  # leaves a bound method on the layers
        for conv in model.convs:
            conv.explain = True
            conv.explain = False
    torch.save({"model": model, "x": x, "index": index, "out": expected}, tmp_path / "m.pt")
    assert b"gnnaccel" not in (tmp_path / "m.pt").read_bytes()
    code = (
        "import sys, torch\n"
        f"d = torch.load({str(tmp_path / 'm.pt')!r}, weights_only=False)\n"
        "torch.testing.assert_close(d['model'](d['x'], d['index']), d['out'])\n"
        "assert 'gnnaccel' not in sys.modules\n"
        "assert type(d['model'].convs[0]).__name__ == 'GCNConv'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    again = pickle.loads(pickle.dumps(model))
    assert type(again.convs[0]) is nn.GCNConv
    torch.testing.assert_close(again(x, index), expected)


def test_enable_and_disable():
    before = nn.GCNConv(D, 5)
    init, setstate = MessagePassing.__init__, MessagePassing.__setstate__
    buffer = io.BytesIO()
    torch.save(before, buffer)
    try:
        pyg_backend.enable()
        pyg_backend.enable()
        after = nn.GCNConv(D, 5)
        loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
        assert type(before) is nn.GCNConv
        for layer in (after, loaded):
            assert type(layer) is not nn.GCNConv
            assert isinstance(layer, nn.GCNConv)
            assert type(layer).__qualname__ == "GCNConv"
            assert type(layer).__module__ == nn.GCNConv.__module__
        assert pyg_backend.accelerate(before) is before
        assert type(before) is type(after)
    finally:
        pyg_backend.disable()
    pyg_backend.disable()
    for layer in (before, after, loaded):
        assert type(layer) is nn.GCNConv
    assert (MessagePassing.__init__, MessagePassing.__setstate__) == (init, setstate)
    assert type(nn.GCNConv(D, 5)) is nn.GCNConv
    with pytest.raises(TypeError, match="accelerate: model"):
        pyg_backend.accelerate(lambda x: x)


def test_own_propagate_is_kept():
    class Own(MessagePassing):
        def propagate(self, edge_index, x):
            return x * 3

        def forward(self, x, edge_index):
            return self.propagate(edge_index, x)

    x = rand(N, D)
    assert torch.equal(pyg_backend.accelerate(Own())(x, edges()), x * 3)


def test_training_reaches_the_same_loss():
    torch.manual_seed(3)
    x, index, y = rand(N, D, dtype=torch.float32), edges(), torch.randint(0, 3, (N,))
    plain = nn.models.GAT(D, 8, 2, 3, heads=2, dropout=0.2)
    losses = []
    for model in (copy.deepcopy(plain), pyg_backend.accelerate(copy.deepcopy(plain))):
        torch.manual_seed(0)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(50):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x, index), y)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < 1e-4


def _dense(graph):
    out = torch.zeros(graph.num_rows, graph.num_cols)
    rows = torch.repeat_interleave(torch.arange(graph.num_rows), graph.indptr.diff().long())
    return out.index_put_((rows, graph.indices.long()), torch.ones(graph.nnz), accumulate=True)


def test_to_graph():
    index = edges()
    expected = torch.zeros(N, N).index_put_((index[1], index[0]), torch.ones(E), accumulate=True)
    data = Data(x=torch.zeros(N, 1), edge_index=index)
    forms = [data, EdgeIndex(index, sparse_size=(N, N))]
    graphs = [pyg_backend.to_graph(form) for form in forms] + [pyg_backend.to_graph(index, N)]
    for graph in graphs:
        assert torch.equal(_dense(graph), expected)
    assert pyg_backend.to_graph(data) is graphs[0]
    adj = sparse(torch.sparse_csr)
    dense = (adj.to_dense() != 0).float()
    for layout in (torch.sparse_csr, torch.sparse_coo, torch.sparse_csc):
        assert torch.equal(_dense(pyg_backend.to_graph(sparse(layout))), dense)
    with pytest.raises(TypeError, match="to_graph: obj"):
        pyg_backend.to_graph("graph")
    with pytest.raises(ValueError, match=r"shape \[2, E\]"):
        pyg_backend.to_graph(torch.zeros(3, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="num_rows"):
        pyg_backend.to_graph(index, N - 3)


def test_gatv2_blocks(monkeypatch):
    from gnnaccel.pyg_backend import blocks

    monkeypatch.setattr(blocks, "STORED_BYTES", {})
    monkeypatch.setattr(blocks, "BLOCK_BYTES", {"cpu": 7 * 3 * 5 * 8})  # seven edges at a time
    layer = ATTRIBUTED["GATv2"]()
    assert_same(layer, rand(N, D, grad=True), edges(), edge_attr=edge_values(4), kinds=None)
    assert report.share() == 1
