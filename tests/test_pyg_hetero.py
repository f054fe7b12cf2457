"""Heterogeneous models: transformed and wrapped ones, and layers of relations, on HeteroData, with lazy channels and
empty relations."""

import copy
import gc
import weakref

import pytest
import torch

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from hetero_cases import NETS, RELATIONS, Net, data, train
from pyg_compare import N, assert_equal, backward, edges, grads, rand, same
from torch_geometric import nn
from torch_geometric.data import HeteroData
from torch_geometric.transforms import ToUndirected

from gnnaccel import pyg_backend, report
from gnnaccel.lower import bounds


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


@pytest.mark.parametrize("heads, concat, bias", [(1, True, True), (2, True, False), (2, False, True)])
@pytest.mark.parametrize("residual", [False, True])
def test_attention_without_edges_or_nodes(heads, concat, bias, residual):
    """The types of a sampled batch that nothing led to: zero gradients, and results of their own."""
    none, some = torch.empty(2, 0, dtype=torch.long), edges(7, N, 30)

    def program(wrap):
        conv = nn.GATConv((6, 5), 4, heads, concat, bias=bias, residual=residual, add_self_loops=False)
        layer, out = wrap(conv.double()), []
        for source, target, index in ((7, N, some), (7, N, none), (0, N, none), (7, 0, none), (0, 0, none)):
            x, y = (rand(*size).double().requires_grad_() for size in ((source, 6), (target, 5)))
            result = layer((x, y), index)
            given = [x, y, *layer.parameters()]
            loss = result.sin().sum()
            found = torch.autograd.grad(loss, given, create_graph=True)
            total = result.sum() + sum(each.sin().sum() for each in found)
            again = torch.autograd.grad(total, given, allow_unused=True)
            out += [t.detach().clone() for t in (result, *found)]
            out += [each for each in again if each is not None and each.any()]
            result.detach().zero_()
        return out

    report.reset()
    same(program)
    assert report.snapshot()["pyg.GATConv"].accelerated == 5
    assert "pyg.GATConv edge_update" not in report.snapshot()


def test_attention_without_edges_has_second_derivatives():
    """All zero: a penalty on the gradients of such a type's features is no error."""

    def program(wrap):
        layer = wrap(nn.GATConv((6, 5), 4, 2, add_self_loops=False).double())
        x, y = rand(7, 6).double().requires_grad_(), rand(N, 5).double().requires_grad_()
        out = layer((x, y), torch.empty(2, 0, dtype=torch.long))
        found = torch.autograd.grad(out.sum(), (x, y), create_graph=True)
        sum(t.square().sum() for t in found).backward()
        return [t.requires_grad for t in found], [x.grad, y.grad, *grads(layer)]

    same(program)


def test_attention_on_new_edges_is_not_joined(monkeypatch, always):
    """On the CPU; its edges may be gone after one step."""

    graph = data(8)
    model = pyg_backend.accelerate(nn.HeteroConv({r: PLAIN["GAT averaged"](n) for n, r in enumerate(RELATIONS)}))
    report.reset()
    for once, walks in ((3, 0), (-1, 1)):
        monkeypatch.setattr(bounds, "NEW_GRAPH_USES", once)
        for _ in range(2):
            model(graph.x_dict, graph.edge_index_dict)
        site = report.snapshot().get("pyg.HeteroConv")
        assert (site.accelerated - sum(site.reasons.values()) if site else 0) == 2 * walks


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
    from gnnaccel.pyg_backend import edge_type_layers

    for name, value in (("TRAINED_WEIGHTS_TINY", 0), ("NEW_GRAPH_USES", -1), ("RELATION_LAYERS_TINY", 0)):
        monkeypatch.setattr(bounds, name, value)
    monkeypatch.setattr(edge_type_layers, "_DEVICES", {})


@pytest.fixture(params=["seen before", "new", "each"])
def lasting(request, monkeypatch, always):
    """`always`; and of edges that are new in each call, as those of sampled batches: all sorted at once, as on CUDA, or
    layer by layer."""
    from gnnaccel.pyg_backend import edge_types

    if request.param != "seen before":
        monkeypatch.setattr(bounds, "NEW_GRAPH_USES", 1000)
    if request.param == "new":
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
    # The first call finds the widths, three are of graphs that may soon be gone; bfloat16 goes layer by layer.
    assert _walks().accelerated - sum(_walks().reasons.values()) == 6


@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("name", ["Graph", "SAGE", "no root", "GIN"])
@pytest.mark.parametrize("frozen", ["", "weight", "features"])
def test_layers_of_sampled_batches_are_one_node(name, aggr, frozen):
    """New edges in each call, of some types none, into a type without nodes, and a loss of one type alone: values and
    derivatives as PyG's, and gradients where PyG has them."""
    relations = [("a", "r", "a"), ("b", "s", "a"), ("a", "t", "b"), ("b", "u", "b"), ("c", "v", "a"), ("a", "w", "c")]
    sizes, eps = {"a": 9, "b": 5, "c": 0}, 0.25
    torch.manual_seed(0)
    makes = {
        "Graph": lambda: nn.GraphConv((4, 4), 3),
        "SAGE": lambda: nn.SAGEConv((4, 4), 3),
        "no root": lambda: nn.SAGEConv((4, 4), 3, root_weight=False),
        "GIN": lambda: nn.GINConv(torch.nn.Linear(4, 3), eps=eps),
    }
    plain = nn.HeteroConv({relation: makes[name]() for relation in relations}, aggr=aggr).double()
    if frozen == "weight":
        for convs in list(plain.convs.values())[:2]:
            next(convs.parameters()).requires_grad_(False)
    ours = pyg_backend.accelerate(copy.deepcopy(plain))
    report.reset()
    for count in (7, 0, 3):
        found = []
        for model in (plain, ours):
            x = {kind: rand(size, 4, seed=size).double() for kind, size in sizes.items()}
            for each in x.values():
                each.requires_grad_(frozen != "features")
            index = {}
            for number, (source, _, target) in enumerate(relations):
                some = count if sizes[source] and sizes[target] and number != 3 else 0
                index[relations[number]] = edges(max(sizes[source], 1), max(sizes[target], 1), some, seed=number)
            out = model(x, index)
            given = [t for t in (*x.values(), *model.parameters()) if t.requires_grad]
            first = torch.autograd.grad(out["a"].square().sum(), given, create_graph=True, allow_unused=True)
            some = sum(t.square().sum() for t in first if t is not None)
            second = torch.autograd.grad(some, given, allow_unused=True)
            model.zero_grad()
            out = model(x, {kind: each.clone() for kind, each in index.items()})
            sum(t.square().sum() for t in out.values()).backward()
            found.append([*out.values(), *first, *[t.grad for t in given], *[t for t in second if t is not None]])
        assert [t is None for t in found[1]] == [t is None for t in found[0]]
        assert_equal(*[[t.detach() for t in some if t is not None] for some in reversed(found)])
    site = report.snapshot()["pyg.HeteroConv"]
    assert site.accelerated == 6 and not site.reasons


@pytest.mark.parametrize("widths", [None, 8])
@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.only(where=lambda name, widths: name != "GIN" or widths is not None)  # its features are to have one width
def test_layers_of_all_relations_together(name, aggr, widths, always):
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
    assert _walks().accelerated == 2
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


def test_hooks_are_not_called_without_a_gradient(lasting):
    def program(wrap):
        found = []
        for make in (PLAIN["Graph"], lambda n: nn.GATConv((-1, -1), 8, add_self_loops=False), PLAIN["Transformer"]):
            graph = data(8)
            model = wrap(nn.HeteroConv({r: make(n) for n, r in enumerate(RELATIONS)}))
            for _ in range(3):
                model(graph.x_dict, graph.edge_index_dict)
            for parameter in model.parameters():
                if not torch.nn.parameter.is_lazy(parameter):
                    parameter.register_hook(lambda grad: grad * 2)
            for name in graph.x_dict:
                model.zero_grad()
                out = model(graph.x_dict, graph.edge_index_dict)
                out[name].square().sum().backward()
                used = {n: p.grad for n, p in model.named_parameters() if not torch.nn.parameter.is_lazy(p)}
                found.append((out, used))
        return found

    same(program, accelerated=None)
    assert report.snapshot()["pyg.HeteroConv"].accelerated
