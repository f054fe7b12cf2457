"""Heterogeneous models: transformed, wrapped and native ones, on HeteroData, with lazy channels and empty relations."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from pyg_compare import N, assert_equal, backward, edges, grads, rand, same
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn
from torch_geometric.data import HeteroData
from torch_geometric.transforms import ToUndirected

from gnnaccel import pyg_backend, report

COUNTS = {"paper": N, "author": 15, "venue": 4}
WIDTHS = {"paper": 6, "author": 3, "venue": 5}
RELATIONS = [
    ("paper", "cites", "paper"),
    ("author", "writes", "paper"),
    ("paper", "rev_writes", "author"),
    ("paper", "in", "venue"),
    ("venue", "rev_in", "paper"),
]


def data(widths=None, count=60, seed=0):
    """A small bibliographic graph; `widths` None: each type its own."""
    found = HeteroData()
    for k, (kind, nodes) in enumerate(COUNTS.items()):
        found[kind].x = rand(nodes, WIDTHS[kind] if widths is None else widths, seed=k, grad=True)
    for k, (src, name, dst) in enumerate(RELATIONS):
        found[src, name, dst].edge_index = edges(COUNTS[src], COUNTS[dst], count, seed=seed + k)
        found[src, name, dst].edge_attr = rand(count, 2, seed=k)
    return found


def train(model, graph, *more, **kwargs):
    out = model(graph.x_dict, graph.edge_index_dict, *more, **kwargs)
    backward(out)
    return out, grads(model, graph.x_dict)


class Net(torch.nn.Module):
    """Two layers with a residual: what to_hetero() reads."""

    def __init__(self, make):
        super().__init__()
        self.first, self.last = make(8), make(8)
        self.lin, self.norm = nn.Linear(-1, 8), nn.BatchNorm(8)

    def forward(self, x, edge_index):
        x = self.norm(self.first(x, edge_index).relu() + self.lin(x))
        return self.last(x, edge_index)


NETS = {
    "SAGE": lambda n: nn.SAGEConv((-1, -1), n),
    "SAGE max": lambda n: nn.SAGEConv((-1, -1), n, aggr="max"),
    "GAT": lambda n: nn.GATConv((-1, -1), n, add_self_loops=False),
    "GATv2": lambda n: nn.GATv2Conv((-1, -1), n, heads=2, concat=False, add_self_loops=False),
    "Graph": lambda n: nn.GraphConv((-1, -1), n),
    "Transformer": lambda n: nn.TransformerConv((-1, -1), n),
    "ResGated": lambda n: nn.ResGatedGraphConv((-1, -1), n),
}


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("name", NETS)
def test_to_hetero(name, aggr):
    """Lazy channels, filled by a first call without gradients, as in PyG's tutorial; the model comes accelerated or
    plain into to_hetero(), which copies its layers."""

    def program(wrap):
        if aggr != "sum" and name != "SAGE":
            return None
        graph = data()
        model = nn.to_hetero(wrap(Net(NETS[name])), graph.metadata(), aggr=aggr)
        with torch.no_grad():
            model(graph.x_dict, graph.edge_index_dict)
        twin = copy.deepcopy(model)
        return train(model, graph), twin(graph.x_dict, graph.edge_index_dict), list(model.state_dict())

    same(program, accelerated=None if aggr != "sum" and name != "SAGE" else True)


@pytest.mark.parametrize("conv", ["GCN", "Graph", "SAGE"])
@pytest.mark.parametrize("bases", [None, 2])
def test_to_hetero_with_bases(conv, bases):
    makes = {"GCN": nn.GCNConv, "Graph": nn.GraphConv, "SAGE": nn.SAGEConv}

    class Flat(torch.nn.Module):
        def __init__(self):
            super().__init__()
            more = {"add_self_loops": False} if conv == "GCN" else {}
            self.first, self.last = makes[conv](8, 8, **more), makes[conv](8, 8, **more)

        def forward(self, x, edge_index):
            return self.last(self.first(x, edge_index).relu(), edge_index)

    def program(wrap):
        graph = data(8)
        # Relations of one width, since their edges are joined into one graph.
        model = nn.to_hetero_with_bases(wrap(Flat()), graph.metadata(), bases or 3, in_channels={"x": 8})
        out = [train(model, graph)]
        return *out, model(graph.x_dict, graph.edge_index_dict)

    same(program, accelerated=None)


def test_to_fixed_size():
    def program(wrap):
        model = nn.to_fixed_size(wrap(Flat()), batch_size=1)
        x = rand(N, 6, grad=True)
        out = model(x, edges())
        backward(out)
        return out, grads(model, x)

    class Flat(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.SAGEConv(6, 4)

        def forward(self, x, edge_index):
            return nn.global_mean_pool(self.conv(x, edge_index), None)

    same(program)


def hetero_conv(aggr):
    def program(wrap):
        graph = data()
        convs = {
            RELATIONS[0]: nn.GCNConv(-1, 8),
            RELATIONS[1]: nn.SAGEConv((-1, -1), 8),
            RELATIONS[2]: nn.GATConv((-1, -1), 8, add_self_loops=False, edge_dim=2),
            RELATIONS[3]: nn.GraphConv((-1, -1), 8, aggr="mean"),
            RELATIONS[4]: nn.TransformerConv((-1, -1), 8),
        }
        model = wrap(nn.HeteroConv(convs, aggr=aggr))
        attr = {RELATIONS[2]: graph[RELATIONS[2]].edge_attr}
        model(graph.x_dict, graph.edge_index_dict, edge_attr_dict=attr)
        return train(model, graph, edge_attr_dict=attr), repr(model)

    return program


@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "cat", None])
def test_hetero_conv(aggr):
    same(hetero_conv(aggr))


def native(make, widths=None):
    def program(wrap):
        graph = data(widths)
        model = wrap(make(graph))
        model(graph.x_dict, graph.edge_index_dict)
        out = train(model, graph)
        twin = pickle.loads(pickle.dumps(model))
        return out, twin(graph.x_dict, graph.edge_index_dict)

    return program


class Projected(torch.nn.Module):
    """A layer behind PyG's linear map per node type. (PyG's Sequential puts the last one's forward() on its class.)"""

    def __init__(self, graph):
        super().__init__()
        self.lin = nn.HeteroDictLinear(-1, 8, list(COUNTS))
        self.conv = nn.HGTConv(8, 8, graph.metadata())

    def forward(self, x, e):
        return self.conv(self.lin(x), e)


NATIVE = {
    "HGT": native(lambda g: nn.HGTConv(-1, 8, g.metadata(), heads=2)),
    "HGT fixed": native(lambda g: nn.HGTConv(WIDTHS, 8, g.metadata())),
    "HAN": native(lambda g: nn.HANConv(-1, 8, g.metadata(), heads=2)),
    "HAN dropout": native(lambda g: nn.HANConv(WIDTHS, 8, g.metadata(), dropout=0.3)),
    "HeteroDictLinear": native(Projected),
}


@pytest.mark.parametrize("name", NATIVE)
def test_native_model(name):
    same(NATIVE[name], accelerated=None)


class OwnAttention(nn.HGTConv):
    def message(self, k_j, q_i, v_j, edge_attr, index, ptr, size_i):
        return 2 * super().message(k_j, q_i, v_j, edge_attr, index, ptr, size_i)


class OwnSources(nn.HGTConv):
    def _construct_src_node_feat(self, k_dict, v_dict, edge_index_dict):
        k, v, offset = super()._construct_src_node_feat(k_dict, v_dict, edge_index_dict)
        return k, 2 * v, offset


def _double(module, args, out):
    return {key: 2 * value for key, value in out.items()} if isinstance(out, dict) else 2 * out


def _frozen(model, graph):
    model.k_rel.weight.requires_grad_(False)
    model.kqv_lin.lins["paper"].weight.requires_grad_(False)


def _without(*relations, edges_only=()):
    def change(model, graph):
        for relation in relations:
            del graph[relation]
        for relation in edges_only:
            graph[relation].edge_index = torch.empty(2, 0, dtype=torch.long)

    return change


# What is changed of a HGTConv or its graph after its first call, and whether no call is taken together then.
HGT = {
    "nothing": (lambda model, graph: None, False),
    "without relations": (_without(RELATIONS[0], RELATIONS[3]), False),
    "without edges": (_without(edges_only=RELATIONS[1:2]), False),
    "without any edges": (_without(edges_only=RELATIONS), False),
    "a type alone": (_without(*RELATIONS[3:]), False),
    "frozen": (_frozen, False),
    "hooked": (lambda model, graph: model.kqv_lin.register_forward_hook(_double), True),
    "hooked inside": (lambda model, graph: model.out_lin.lins["paper"].register_forward_hook(_double), True),
    "hooked relations": (lambda model, graph: model.v_rel.register_forward_hook(_double), True),
    "message hook": (lambda model, graph: model.register_message_forward_hook(lambda *args: 2 * args[-1]), True),
}


CLASSES = {"HGTConv": nn.HGTConv, "own attention": OwnAttention, "own sources": OwnSources}
HGT_CASES = [("HGTConv", name) for name in HGT] + [(name, "nothing") for name in CLASSES if name != "HGTConv"]


@pytest.mark.parametrize("widths", [None, 8])
@pytest.mark.parametrize("kind, name", HGT_CASES)
def test_hgt(kind, name, widths):
    """On edges that it has had, on others, and on edges written into."""
    (change, left), cls = HGT[name], CLASSES[kind]

    def program(wrap):
        graph = data(widths)
        model = wrap(cls(-1, 8, graph.metadata(), heads=2))
        model(graph.x_dict, graph.edge_index_dict)
        change(model, graph)
        out = [train(model, graph) for _ in range(2)]
        if graph.edge_index_dict[graph.edge_types[0]].numel():
            graph[graph.edge_types[0]].edge_index[1, :30] = 0
        out.append(train(model, graph))
        with torch.no_grad():
            return out, model(graph.x_dict, graph.edge_index_dict), list(model.state_dict())

    same(program, accelerated=None)
    graph = data(widths)
    model = pyg_backend.accelerate(cls(-1, 8, graph.metadata(), heads=2))
    model(graph.x_dict, graph.edge_index_dict)
    change(model, graph)
    report.reset()
    train(model, graph)
    sites = report.snapshot()
    together = sites.keys() == {"pyg.HGTConv"} and not sites["pyg.HGTConv"].left
    assert together == (not left and cls is nn.HGTConv)


def test_hgt_second_derivatives_and_a_batch_of_some_edge_types():
    def program(wrap):
        graph = data(8)
        model = wrap(nn.HGTConv(8, 8, graph.metadata(), heads=2))
        out = model(graph.x_dict, graph.edge_index_dict)
        x = list(graph.x_dict.values())
        first = torch.autograd.grad(sum(each.sin().sum() for each in out.values()), x, create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), [*x, *model.parameters()])
        with torch.no_grad():
            return first, second, model(graph.x_dict, dict(list(graph.edge_index_dict.items())[1:3]))

    same(program)


def test_hgt_results_may_be_written_into_and_some_left_alone():
    def program(wrap):
        graph, found = data(8), []
        model = wrap(nn.HGTConv(8, 8, graph.metadata(), heads=2))
        for name in COUNTS:
            out = model(graph.x_dict, graph.edge_index_dict)
            out[name].mul_(2).add_(1)
            found.append(grads_of(out[name].square().sum(), model, graph))
        return found

    def grads_of(loss, model, graph):
        given = [*graph.x_dict.values(), *model.parameters()]
        return [grad is None for grad in torch.autograd.grad(loss, given, allow_unused=True)]

    same(program)


def test_hgt_keeps_no_graph_of_edges_that_are_gone():
    model = pyg_backend.accelerate(nn.HGTConv(8, 8, data(8).metadata()))
    for _ in range(3):
        graph = data(8)
        train(model, graph)
        kept = [weakref.ref(e) for e in graph.edge_index_dict.values()]
    del graph
    gc.collect()
    assert all(ref() is None for ref in kept)


def _bent(model, graph):
    model.negative_slope = -0.5


def _not_trained(model, graph):
    model.proj["paper"].weight.requires_grad_(False)


HAN = {
    "nothing": (lambda model, graph: None, False),
    "without relations": (_without(RELATIONS[0], RELATIONS[3]), False),
    "without edges": (_without(edges_only=RELATIONS[1:2]), False),
    "without any edges": (_without(edges_only=RELATIONS), True),
    "a type alone": (_without(*RELATIONS[3:]), False),
    "frozen": (_not_trained, True),
    "slope": (_bent, True),
    "hooked map": (lambda model, graph: model.proj["author"].register_forward_hook(_double), True),
    "hooked": (lambda model, graph: model.k_lin.register_forward_hook(_double), False),
}


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("name", HAN)
def test_han(name, dropout):
    """On edges that it has had, on others, and on edges written into."""
    change, left = HAN[name]

    def program(wrap):
        graph = data()
        model = wrap(nn.HANConv(-1, 8, graph.metadata(), heads=2, dropout=dropout))
        model(graph.x_dict, graph.edge_index_dict)
        change(model, graph)
        out = [train(model, graph) for _ in range(2)]
        if graph.edge_index_dict[graph.edge_types[0]].numel():
            graph[graph.edge_types[0]].edge_index[1, :30] = 0
        out.append(train(model, graph))
        model.eval()
        with torch.no_grad():
            return out, model(graph.x_dict, graph.edge_index_dict, True)

    same(program, accelerated=None)
    graph, sites = data(), []
    model = pyg_backend.accelerate(nn.HANConv(-1, 8, graph.metadata(), heads=2, dropout=dropout))
    model(graph.x_dict, graph.edge_index_dict)
    change(model, graph)
    for _ in range(2):
        report.reset()
        train(model, graph)
        sites.append(report.snapshot()["pyg.HANConv"])
    assert all((site.accelerated == 1) != left for site in sites)


def test_han_gradients_of_what_nothing_is_made_of():
    def program(wrap):
        graph, found = data(), []
        model = wrap(nn.HANConv(WIDTHS, 8, graph.metadata(), heads=2))
        given = [*graph.x_dict.values(), *model.parameters()]
        for name in COUNTS:
            out = model(graph.x_dict, graph.edge_index_dict)
            out[name].mul_(2).add_(1)
            found.append(torch.autograd.grad(out[name].square().sum(), given, allow_unused=True))
        return [[grad is None for grad in grads] for grads in found], found

    same(program)


@pytest.mark.parametrize("cls", [nn.HGTConv, nn.HANConv])
@pytest.mark.parametrize("reentrant", [False, True])
def test_hgt_and_han_in_checkpoints(cls, reentrant):
    def program(wrap):
        graph, found = data(8), []
        model = wrap(cls(8, 8, graph.metadata(), heads=2))

        def layer(*x):
            return tuple(model(dict(zip(graph.x_dict, x, strict=True)), graph.edge_index_dict).values())

        for _ in range(2):
            outs = checkpoint(layer, *graph.x_dict.values(), use_reentrant=reentrant)
            model.zero_grad()
            sum(out.square().sum() for out in outs).backward()
            found.append((outs, grads(model, graph.x_dict)))
        return found

    same(program)


@pytest.mark.parametrize("name", ["RGCN", "RGCN bases", "RGCN blocks", "FastRGCN", "RGAT", "FiLM"])
@pytest.mark.parametrize("features", ["dense", "numbers"])
def test_relational(name, features):
    """HeteroData as one homogeneous graph with edge types; features may be node numbers alone."""
    convs = {
        "RGCN": lambda: nn.RGCNConv(8 if features == "dense" else N + 19, 4, 5, aggr="mean"),
        "RGCN bases": lambda: nn.RGCNConv(8 if features == "dense" else N + 19, 4, 5, num_bases=2, aggr="sum"),
        "RGCN blocks": lambda: nn.RGCNConv(8, 4, 5, num_blocks=2),
        "FastRGCN": lambda: nn.FastRGCNConv(8 if features == "dense" else N + 19, 4, 5, num_bases=2),
        "RGAT": lambda: nn.RGATConv(8, 4, 5, heads=2),
        "FiLM": lambda: nn.FiLMConv(8, 4, num_relations=5),
    }

    def program(wrap):
        graph = data(8).to_homogeneous()
        layer = wrap(convs[name]())
        x = graph.x.detach().requires_grad_() if features == "dense" else None
        out = [layer(x, graph.edge_index, graph.edge_type) for _ in range(2)]
        backward(out[-1])
        return out, grads(layer, x)

    if features == "numbers" and name in ("RGCN blocks", "RGAT", "FiLM"):
        pytest.skip("PyG takes no node numbers here")
    same(program, accelerated=None)


def test_empty_and_missing_relations():
    """Relations without edges, types without neighbours, and relations that this batch does not have."""

    def program(wrap):
        out = []
        for seed, missing in ((0, ()), (1, RELATIONS[1:2]), (2, RELATIONS[3:])):
            graph = data(seed=seed)
            graph[RELATIONS[0]].edge_index = torch.empty(2, 0, dtype=torch.long)
            for relation in missing:
                del graph[relation]
            if not out:
                model = wrap(nn.HeteroConv({r: nn.SAGEConv((-1, -1), 8) for r in RELATIONS}))
                model(graph.x_dict, graph.edge_index_dict)
            model.zero_grad()
            out.append(train(model, graph))
        return out

    same(program)


def test_transformed_graph_and_batches():
    def program(wrap):
        graphs = []
        for seed in range(3):
            graph = HeteroData(paper={"x": rand(N, 6, seed=seed)}, author={"x": rand(15, 3, seed=seed)})
            graph["author", "writes", "paper"].edge_index = edges(15, N, 40, seed=seed)
            graphs.append(ToUndirected()(graph))
        model = nn.to_hetero(wrap(Net(NETS["SAGE"])), graphs[0].metadata())
        out = []
        for batch in pyg.loader.DataLoader(graphs, batch_size=2):
            out.append((model(batch.x_dict, batch.edge_index_dict), batch["paper"].batch))
        return out

    same(program)


def test_to_hetero_of_an_accelerated_model_equals_that_of_a_plain_one():
    """The plug-in may be applied before or after the transformation."""

    graph, results = data(8), []
    for when in ("never", "before", "after"):
        torch.manual_seed(1)
        model = Net(lambda n: nn.SAGEConv((8, 8), n))
        model.lin = nn.Linear(8, 8)
        model = pyg_backend.accelerate(model) if when == "before" else model
        model = nn.to_hetero(model, graph.metadata())
        model = pyg_backend.accelerate(model) if when == "after" else model
        torch.manual_seed(2)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        results.append(model.double()({k: x.double() for k, x in graph.x_dict.items()}, graph.edge_index_dict))
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


PLAIN = {
    "SAGE": lambda n: nn.SAGEConv((-1, -1), 8, aggr=("mean", "sum")[n % 2], bias=n % 2 == 0),
    "Graph": lambda n: nn.GraphConv((-1, -1), 8, aggr=("add", "mean")[n % 2]),
    "GCN": lambda n: nn.SAGEConv((-1, -1), 8) if n else nn.GCNConv(-1, 8, add_self_loops=True),
    "GCN without loops": lambda n: nn.SAGEConv((-1, -1), 8) if n else nn.GCNConv(-1, 8, add_self_loops=False),
    "no root": lambda n: nn.SAGEConv((-1, -1), 8, root_weight=n % 2 == 0),
    "some": lambda n: nn.GATConv((-1, -1), 8, add_self_loops=False) if n == 1 else nn.SAGEConv((-1, -1), 8),
    "GAT": lambda n: nn.GATConv((-1, -1), 4, heads=2, add_self_loops=n == 0, bias=n != 1),
    "GAT averaged": lambda n: nn.GATConv((-1, -1), 8, heads=2 + n % 2, concat=False, add_self_loops=False),
    "GAT and SAGE": lambda n: nn.GATConv((-1, -1), 8, add_self_loops=False) if n % 2 else nn.SAGEConv((-1, -1), 8),
    "GAT with res": lambda n: nn.GATConv((-1, -1), 8, residual=n == 0, add_self_loops=False),
    "GATv2": lambda n: nn.GATv2Conv(
        (-1, -1), 4, heads=2, add_self_loops=n == 0, bias=n != 1, share_weights=n == 0, residual=n == 3
    ),
    "GATv2 averaged": lambda n: nn.GATv2Conv((-1, -1), 8, heads=2 + n % 2, concat=False, add_self_loops=False),
    "GATv2 and GAT": lambda n: (nn.GATConv, nn.GATv2Conv)[n % 2]((-1, -1), 8, add_self_loops=False),
    "Transformer": lambda n: nn.TransformerConv((-1, -1), 4, heads=2, bias=n != 1, root_weight=n != 2),
    "Transformer averaged": lambda n: nn.TransformerConv((-1, -1), 8, heads=2, concat=False),
    "Transformer and GAT": lambda n: (
        nn.TransformerConv((-1, -1), 8, heads=1, beta=n == 0)
        if n % 4 in (0, 1)
        else nn.GATConv((-1, -1), 8, add_self_loops=False)
    ),
    "normalized": lambda n: nn.SAGEConv((-1, -1), 8, normalize=n == 4),
    "GIN": lambda n: nn.GINConv(nn.MLP([8, 6, 8], dropout=0.2 * (n == 3)), eps=0.5 * n, train_eps=n == 2),
}


def together(name, aggr="sum", widths=None, change=lambda model, graph: None):
    """Calls on one graph, the third of which finds what the earlier ones have kept, then on its edges changed."""

    def program(wrap):
        graph = data(widths)
        model = wrap(nn.HeteroConv({r: PLAIN[name](n) for n, r in enumerate(RELATIONS)}, aggr=aggr))
        model(graph.x_dict, graph.edge_index_dict)
        change(model, graph)
        out = [train(model, graph) for _ in range(3)]
        graph[RELATIONS[1]].edge_index[1, :30] = 0
        out.append(train(model, graph))
        graph[RELATIONS[4]].edge_index = torch.empty(2, 0, dtype=torch.long)
        return out, [train(model, graph) for _ in range(2)]

    return program


def _walks():
    return report.snapshot()["pyg.HeteroConv"]


@pytest.fixture
def always(monkeypatch):
    """It is worth it on tiny graphs as well, and on new ones."""
    from gnnaccel.ops import relation_layers
    from gnnaccel.pyg_backend import edge_type_layers, edge_types

    monkeypatch.setattr(edge_types, "_TINY", 0)
    monkeypatch.setattr(relation_layers, "_TINY", 0)
    monkeypatch.setattr(edge_type_layers, "_DEVICES", {})


@pytest.fixture(params=["seen before", "new"])
def lasting(request, monkeypatch, always):
    """`always`; and of edges that are new in each call, as those of sampled batches, all sorted at once, as on CUDA."""
    from gnnaccel.pyg_backend import edge_types

    if request.param == "new":
        monkeypatch.setattr(edge_types, "_TINY", 1 << 18)
        monkeypatch.setattr(edge_types, "ONCE", 1000)
        monkeypatch.setattr(edge_types, "_SORTED_ON", ("cpu", "cuda"))
    return request.param


@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("name", ["SAGE", "Graph", "no root", "some", "normalized"])
@pytest.mark.parametrize("widths", [None, 8])
def test_layers_on_new_edges_together(name, aggr, widths, lasting):
    report.reset()
    same(together(name, aggr, widths), accelerated=None if name == "some" else True)
    site = _walks()
    assert site.accelerated - sum(site.reasons.values()) >= 3


def test_two_layers_on_new_edges_sort_them_once(monkeypatch, lasting):
    """And give second derivatives."""
    from gnnaccel.graph.csr import Graph

    if lasting != "new":
        pytest.skip("of new edges")
    graph, made, own = data(8), [], Graph.from_coo
    monkeypatch.setattr(Graph, "from_coo", lambda *args, **named: made.append(1) or own(*args, **named))
    torch.manual_seed(0)
    layers = [nn.HeteroConv({r: nn.SAGEConv((8, 8), 8) for r in RELATIONS}) for _ in range(2)]
    plain = torch.nn.ModuleList(layers).double()
    found = []
    for model in (plain, pyg_backend.accelerate(copy.deepcopy(plain))):
        x = {kind: value.detach().double().requires_grad_() for kind, value in graph.x_dict.items()}
        out = model[1](model[0](x, graph.edge_index_dict), graph.edge_index_dict)
        loss = sum(each.sin().sum() for each in out.values())
        assert len(made) == (model is not plain)
        given = [*x.values(), *model.parameters()]
        first = torch.autograd.grad(loss, given, create_graph=True)
        second = torch.autograd.grad(sum(each.sin().sum() for each in first), given, allow_unused=True)
        found.append([*out.values(), *first, *[each for each in second if each is not None]])
    assert_equal(found[1], found[0])


def test_new_edges_out_of_range_are_refused_as_by_pyg(lasting):
    graph = data(8)
    for bad in (N + 7, -N - 7):
        graph["author", "writes", "paper"].edge_index[1, 3] = bad
        model = nn.HeteroConv({r: nn.SAGEConv((8, 8), 8) for r in RELATIONS})
        errors = []
        for each in (model, pyg_backend.accelerate(copy.deepcopy(model))):
            with pytest.raises((IndexError, RuntimeError, ValueError)) as error:
                each(graph.x_dict, graph.edge_index_dict)
            errors.append(error.value)
        assert repr(errors[1]) == repr(errors[0])


def test_tiny_graphs_are_joined_once_they_last():
    def program(wrap):
        graph = data(8)
        model = wrap(nn.HeteroConv({r: PLAIN["Graph"](0) for r in RELATIONS}))
        report.reset()
        return [train(model, graph) for _ in range(7)]

    same(program)
    # The first call makes the graphs, three are of graphs that may soon be gone; bfloat16 goes layer by layer.
    assert _walks().accelerated - sum(_walks().reasons.values()) == 3


@pytest.mark.parametrize("widths", [None, 8])
@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("name", PLAIN)
def test_layers_of_all_relations_together(name, aggr, widths, always):
    if name == "GIN" and widths is None:
        pytest.skip("its features are to have one width")
    report.reset()
    same(together(name, aggr, widths), accelerated=None if name == "some" else True)
    site = _walks()  # of the first call, of layers that are yet to find their width, none
    assert site.accelerated - sum(site.reasons.values()) >= 3


@pytest.mark.parametrize("change", [
    lambda model, graph: model.convs[RELATIONS[1]].register_forward_hook(lambda *a: a[2] * 2),
    lambda model, graph: setattr(model.convs[RELATIONS[1]], "lin_l", nn.Linear(3, 8, bias=False)),
    lambda model, graph: model.convs[RELATIONS[1]].lin_l.register_forward_hook(lambda *a: a[2] * 2),
])  # fmt: skip
def test_watched_and_changed_layers_are_called(change, always):
    report.reset()
    same(together("SAGE", change=change), accelerated=True)
    assert _walks().accelerated


@pytest.mark.parametrize("aggr, reason", [("max", "an aggr"), ("cat", "an aggr"), (None, "an aggr")])
def test_why_layers_are_called_one_by_one(aggr, reason):
    report.reset()
    same(together("SAGE", aggr), accelerated=True)
    (why,) = _walks().reasons
    assert why.startswith(reason)


@pytest.mark.parametrize("aggr", ["add", "mean"])
@pytest.mark.parametrize("width", [None, 8, 3])
@pytest.mark.parametrize("which", [RELATIONS[:1], RELATIONS[1:4], RELATIONS])
@pytest.mark.parametrize("trained", [False, True])
def test_edge_weights_of_some_relations(trained, which, width, aggr, always):
    """Weights that are new at each call, and some that are trained, through sums before the maps and after them."""

    def program(wrap):
        graph = data(width)
        model = wrap(nn.HeteroConv({r: nn.GraphConv((-1, -1), 5, aggr=aggr) for r in RELATIONS}))
        model(graph.x_dict, graph.edge_index_dict)
        out = []
        for seed in range(3):
            weights = {r: rand(60, seed=5 + seed, grad=trained) for r in which}
            out.append((train(model, graph, edge_weight_dict=weights), [w.grad for w in weights.values()]))
        return out

    report.reset()
    same(program)
    site = _walks()
    assert site.accelerated - sum(site.reasons.values()) >= 3


@pytest.mark.parametrize("conv", ["GCN", "wide"])
def test_edge_weights_that_layers_see_to(conv, always):
    make = {"GCN": lambda: nn.GCNConv(-1, 5, add_self_loops=False), "wide": lambda: nn.GATConv(-1, 5, edge_dim=2)}[conv]
    kinds = [("paper", f"r{i}", "paper") for i in range(3)]

    def program(wrap):
        graph = data()
        model = wrap(nn.HeteroConv({r: make() for r in kinds}))
        index = {r: edges(N, N, 60, seed=i) for i, r in enumerate(kinds)}
        name = "edge_weight_dict" if conv == "GCN" else "edge_attr_dict"
        more = {name: {r: rand(60, *(() if conv == "GCN" else (2,)), seed=i).abs() for i, r in enumerate(kinds)}}
        x = {"paper": graph["paper"].x}
        out = []
        for _ in range(3):
            result = model(x, index, **more)
            backward(result)
            out.append((result, grads(model, x)))
        return out

    same(program)


def test_relations_that_leave_and_plain_models(always):
    """A model that was not accelerated runs as PyG runs it, also beside one that was."""

    graph = data(8)
    plain = nn.HeteroConv({r: nn.SAGEConv(8, 8) for r in RELATIONS}).double()
    x = {k: v.double() for k, v in graph.x_dict.items()}
    want = plain(x, graph.edge_index_dict)
    model = pyg_backend.accelerate(copy.deepcopy(plain))
    report.reset()
    assert_equal(plain(x, graph.edge_index_dict), want)
    assert not report.snapshot()
    for _ in range(2):
        assert_equal(model(x, graph.edge_index_dict), want)
    assert _walks().accelerated == 1
    pyg_backend.disable()
    report.reset()
    assert_equal(model(x, graph.edge_index_dict), want)
    assert not report.snapshot()


def test_checkpointing_what_a_second_call_does_another_way(lasting):
    def program(wrap):
        graph = data(8)
        model = wrap(nn.HeteroConv({r: PLAIN["SAGE"](n) for n, r in enumerate(RELATIONS)}))
        names = list(graph.x_dict)
        model(graph.x_dict, {r: e.clone() for r, e in graph.edge_index_dict.items()})
        found = []
        for _ in range(2):
            xs = [x.clone().requires_grad_() for x in graph.x_dict.values()]

            def call(*given):
                return tuple(model(dict(zip(names, given, strict=True)), graph.edge_index_dict).values())

            outs = torch.utils.checkpoint.checkpoint(call, *xs, use_reentrant=False)
            found.append((outs, torch.autograd.grad([out.square().sum() for out in outs], xs)))
        return found

    same(program)


def test_of_outputs_that_nobody_uses_there_are_no_gradients(lasting):
    """As where each layer has a node of its own: an optimizer leaves parameters without gradients alone."""

    def program(wrap):
        found = []
        for make in (PLAIN["Graph"], lambda n: nn.GATConv((-1, -1), 8, add_self_loops=False), PLAIN["Transformer"]):
            graph = data(8)
            model = wrap(nn.HeteroConv({r: make(n) for n, r in enumerate(RELATIONS)}))
            for _ in range(3):
                model.zero_grad()
                out = model(graph.x_dict, graph.edge_index_dict)
                backward(out["author"])
            found.append((out, grads(model, graph.x_dict)))
        return found

    same(program)


@pytest.mark.parametrize("name", ["SAGE", "GAT", "Transformer"])
def test_what_a_step_was_given_goes_after_its_backward(name, lasting):
    """Also where its loss is kept."""
    graph, kept, given = data(8), [], []
    model = pyg_backend.accelerate(nn.HeteroConv({r: PLAIN[name](n) for n, r in enumerate(RELATIONS)}))
    for _ in range(4):
        xs = {kind: x.clone() for kind, x in graph.x_dict.items()}
        kept.append(sum(out.square().sum() for out in model(xs, graph.edge_index_dict).values()))
        kept[-1].backward()
        given = [weakref.ref(x) for x in xs.values()]
        del xs
    gc.collect()
    assert [ref() for ref in given] == [None] * len(given)


def test_layers_that_draw_numbers_do_so_in_the_order_of_edge_types(always):
    def program(wrap):
        graph, out = data(8), []
        convs = {}
        for n, relation in enumerate(RELATIONS):
            drop = nn.GATConv((-1, -1), 8, add_self_loops=False, dropout=0.5)
            convs[relation] = PLAIN["SAGE"](n) if n % 2 else drop
        model = wrap(nn.HeteroConv(convs))
        for _ in range(7):
            out.append(model(graph.x_dict, graph.edge_index_dict))
        return out

    same(program)


@pytest.mark.parametrize("name", ["SAGE", "GAT", "Transformer"])
def test_layers_that_share_parameters_and_batches_without_some_types(name, lasting):
    def program(wrap):
        shared, out = PLAIN[name](1), []
        model = wrap(
            nn.HeteroConv({r: shared if r in (RELATIONS[1], RELATIONS[2]) else PLAIN[name](3) for r in RELATIONS})
        )
        for seed, missing in ((0, ()), (1, RELATIONS[:1]), (2, RELATIONS[3:])):
            graph = data(8, seed=seed)
            for relation in missing:
                del graph[relation]
            for _ in range(3):
                model.zero_grad()
                out.append(train(model, graph))
        return out

    same(program)


@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv, nn.GCNConv])
def test_loops_between_two_kinds_of_nodes_are_refused(make):
    channels = 8 if make is nn.GCNConv else (-1, -1)

    def program(wrap):
        return wrap(nn.HeteroConv({r: make(channels, 8) for r in RELATIONS}))

    same(program, raises=True, accelerated=None)
