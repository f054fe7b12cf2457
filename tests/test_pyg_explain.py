"""Explainers, hooks and decomposed layers: what watches or changes the inside of a layer sees what PyG shows it."""

import copy
import importlib.util

import pytest
import torch

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from pyg_compare import D, E, N, backward, edges, grads, rand, same, train
from torch_geometric import explain, nn, utils
from torch_geometric.data import HeteroData
from torch_geometric.explain.metric import fidelity, unfaithfulness

from gnnaccel import pyg_backend, report


class Net(torch.nn.Module):
    """Two layers, then classes of nodes."""

    def __init__(self, make):
        super().__init__()
        self.first, self.last = make(D, 8), make(8, 3)

    def forward(self, x, edge_index, edge_weight=None):
        more = () if edge_weight is None else (edge_weight,)
        x = self.first(x, edge_index, *more).relu()
        return self.last(x, edge_index, *more).log_softmax(-1)


NETS = {
    "GCN": lambda: Net(nn.GCNConv),
    "GraphConv": lambda: Net(nn.GraphConv),
    "SAGE": lambda: Net(nn.SAGEConv),
    "GAT": lambda: Net(lambda i, o: nn.GATConv(i, o, heads=2, concat=False)),
    "GATv2": lambda: Net(lambda i, o: nn.GATv2Conv(i, o, heads=2, concat=False)),
    "Transformer": lambda: Net(lambda i, o: nn.TransformerConv(i, o, heads=2, concat=False)),
}
MODE = dict(mode="multiclass_classification", task_level="node", return_type="log_probs")
MASKS = dict(node_mask_type="attributes", edge_mask_type="object")


def explained(algorithm, net, weighted=False, **options):
    """Explanation of one node, with training steps of the model before and after."""

    def program(wrap):
        model = wrap(NETS[net]())
        x, index = rand(N, D), edges()
        more = {"edge_weight": rand(E).abs()} if weighted else {}
        before = train(model, x, index, **more)
        model.eval()
        make = explain.Explainer(model, algorithm(), explanation_type="model", model_config=MODE, **options)
        found = make(x, index, index=torch.tensor([3, 0]), **more)
        model.train().zero_grad()
        after = train(model, x, index, **more)
        masks = [found.get(name) for name in ("node_mask", "edge_mask")]
        return before, masks, fidelity(make, found), unfaithfulness(make, found), after

    return program


def quick():
    return explain.GNNExplainer(epochs=4, lr=0.05)


EXPLAINERS = {
    **{f"GNNExplainer {net}": explained(quick, net, **MASKS) for net in NETS},
    "GNNExplainer edge_weight": explained(quick, "GCN", weighted=True, **MASKS),
    "GNNExplainer objects": explained(quick, "GAT", node_mask_type="object", edge_mask_type="object"),
    "DummyExplainer": explained(explain.DummyExplainer, "GCN", **MASKS),
    "AttentionExplainer GAT": explained(explain.AttentionExplainer, "GAT", edge_mask_type="object"),
    "AttentionExplainer GATv2": explained(explain.AttentionExplainer, "GATv2", edge_mask_type="object"),
    "AttentionExplainer Transformer": explained(explain.AttentionExplainer, "Transformer", edge_mask_type="object"),
}


@pytest.mark.parametrize("name", EXPLAINERS)
def test_explainer(name):
    same(EXPLAINERS[name])


@pytest.mark.skipif(importlib.util.find_spec("captum") is None, reason="captum is not installed")
@pytest.mark.parametrize("method", ["IntegratedGradients", "Saliency", "InputXGradient", "Deconvolution"])
def test_captum_explainer(method):
    same(explained(lambda: explain.CaptumExplainer(method), "GCN", **MASKS))


def test_pg_explainer():
    def program(wrap):
        model = wrap(Net(nn.GCNConv)).eval()
        x, index = rand(N, D), edges()
        algorithm = explain.PGExplainer(epochs=2)
        make = explain.Explainer(
            model, algorithm, explanation_type="phenomenon", edge_mask_type="object", model_config=MODE
        )
        target = model(x, index).argmax(-1)
        loss = [algorithm.train(epoch, model, x, index, target=target, index=3) for epoch in range(2)]
        return loss, make(x, index, target=target, index=3).edge_mask, model(x, index)

    same(program)


def test_graph_mask_explainer():
    def program(wrap):
        model = wrap(Net(nn.GCNConv)).eval()
        algorithm = explain.GraphMaskExplainer(2, epochs=1, log=False)
        make = explain.Explainer(model, algorithm, explanation_type="model", model_config=MODE, **MASKS)
        index = utils.remove_self_loops(edges())[0]
        found = make(rand(N, D), index, index=3)
        return found.node_mask, found.edge_mask, model(rand(N, D), index)

    same(program)


def test_hetero_explainer():
    class Hetero(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = (
                nn.HeteroConv(
                    {
                        ("a", "to", "b"): nn.SAGEConv((D, D), D),
                        ("b", "to", "a"): nn.GATConv((D, D), D, add_self_loops=False),
                    }
                )
                for _ in range(2)
            )

        def forward(self, x_dict, edge_index_dict):
            x_dict = {name: x.relu() for name, x in self.first(x_dict, edge_index_dict).items()}
            return self.last(x_dict, edge_index_dict)["b"].log_softmax(-1)

    def program(wrap):
        data = HeteroData(a={"x": rand(N, D)}, b={"x": rand(N, D, seed=2)})
        data["a", "to", "b"].edge_index, data["b", "to", "a"].edge_index = edges(), edges(seed=2)
        model = wrap(Hetero())
        before = model(data.x_dict, data.edge_index_dict)
        make = explain.Explainer(model, quick(), explanation_type="model", model_config=MODE, **MASKS)
        found = make(data.x_dict, data.edge_index_dict, index=2)
        return before, found.node_mask_dict, found.edge_mask_dict, model(data.x_dict, data.edge_index_dict)

    same(program)


LAYERS = {
    "GCN": lambda: nn.GCNConv(D, 5),
    "GraphConv max": lambda: nn.GraphConv(D, 5, aggr="max"),
    "GAT": lambda: nn.GATConv(D, 5, heads=2),
    "GATv2": lambda: nn.GATv2Conv(D, 5, heads=2),
    "Transformer": lambda: nn.TransformerConv(D, 5, heads=2),
    "AGNN": lambda: nn.AGNNConv(),
}


@pytest.mark.parametrize("name", LAYERS)
def test_explain_switched_by_hand(name):
    """True masks the messages, False shuts an explainer out, None is the start; each may follow each."""

    def program(wrap):
        layer, out = wrap(LAYERS[name]()), []
        index = utils.remove_self_loops(edges())[0]
        for value in (None, True, False, True, None):
            layer.explain = value
            layer._edge_mask = rand(index.shape[1], grad=True)
            layer._loop_mask = index[0] != index[1]
            layer.zero_grad()
            out.append([train(layer, rand(N, D, grad=True), index), layer._edge_mask.grad, layer.explain])
        return out

    same(program)


# method of MessagePassing -> a hook for it, which sees and changes; inputs end with keyword arguments.
def _scaled(kwargs):
    return {k: v * 2 if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in kwargs.items()}


HOOKS = {
    "propagate_forward_pre": lambda log: lambda m, i: (*i[:2], _scaled(i[2])),
    "propagate_forward": lambda log: lambda m, i, o: log.append(sorted(i[-1])) or o * 3,
    "message_forward_pre": lambda log: lambda m, i: (_scaled(i[0]),),
    "message_forward": lambda log: lambda m, i, o: log.append((sorted(i[0]), o.shape)) or o * 3,
    "aggregate_forward_pre": lambda log: lambda m, i: log.append(sorted(i[0])),
    "aggregate_forward": lambda log: lambda m, i, o: log.append(o.shape) or o * 3,
    "message_and_aggregate_forward_pre": lambda log: lambda m, i: log.append(sorted(i[-1])),
    "message_and_aggregate_forward": lambda log: lambda m, i, o: log.append(o.shape) or o * 3,
    "edge_update_forward_pre": lambda log: lambda m, i: log.append(sorted(i[-1])),
    "edge_update_forward": lambda log: lambda m, i, o: log.append(o.shape) or o * 0.5,
}


def adjacency(layout=torch.sparse_csr):
    index = utils.coalesce(edges().flip(0))
    adj = torch.sparse_coo_tensor(index, torch.ones(index.shape[1]), (N, N)).coalesce()
    return adj.to_sparse(layout=layout)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", ["GCN", "GAT", "Transformer", "SAGE csr"])
def test_message_passing_hook(name, hook):
    def program(wrap):
        log, out = [], []
        layer = wrap(nn.SAGEConv(D, 5) if name == "SAGE csr" else LAYERS[name]())
        index = adjacency() if name == "SAGE csr" else edges()
        register = getattr(layer, f"register_{hook}_hook")
        out.append(layer(rand(N, D), index))
        handles = [register(HOOKS[hook](log)), register(lambda *a: None)]
        out.append(train(layer, rand(N, D, grad=True), index))
        for handle in handles:
            handle.remove()
        return *out, log, layer(rand(N, D), index)

    same(program)


def _module_hooks(layer, log):
    """Hooks of torch on the layer, its linear part and its aggregation."""

    def note(name, result=None):
        def hook(module, *values):
            shapes = [
                v.shape for value in values for v in (value if isinstance(value, tuple) else (value,)) if v is not None
            ]
            log.append((name, [tuple(s) for s in shapes[:1]]))
            return result(values) if result else None

        return hook

    handles = []
    for name, module in (("conv", layer), ("lin", layer.lin)):
        handles.append(module.register_forward_pre_hook(note(f"{name} pre")))
        handles.append(module.register_forward_hook(note(f"{name} after", lambda v: v[1] * 1.5)))
        handles.append(module.register_full_backward_pre_hook(note(f"{name} backward pre")))
        handles.append(module.register_full_backward_hook(note(f"{name} backward")))
    return handles


@pytest.mark.parametrize("name", ["GCN", "GAT"])
def test_module_hooks(name):
    def program(wrap):
        layer, log = wrap(LAYERS[name]()), []
        out = [layer(rand(N, D), edges())]
        handles = _module_hooks(layer, log)
        out.append(train(layer, rand(N, D, grad=True), edges()))
        for handle in handles:
            handle.remove()
        layer.register_forward_pre_hook(lambda m, a, k: ((a[0] * 2, *a[1:]), k), with_kwargs=True)
        return *out, log, layer(rand(N, D), edges())

    same(program)


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward", "full_backward_pre"])
def test_hooks_on_the_aggregation(kind):
    """They must run, and change the result as they do in PyG, for sums by our kernels too."""

    def program(wrap):
        layer, log = wrap(nn.GraphConv(D, 5, aggr="mean")), []
        hooks = {
            "forward_pre": lambda m, a: log.append(len(a)) or (a[0] * 2, *a[1:]),
            "forward": lambda m, a, o: log.append(o.shape) or o + 1,
            "full_backward_pre": lambda m, g: log.append(len(g)) or (g[0] * 2,),
            "full_backward": lambda m, g, o: log.append((len(g), o[0].shape)),
        }
        first = layer(rand(N, D), edges())
        handle = getattr(layer.aggr_module, f"register_{kind}_hook")(hooks[kind])
        out = train(layer, rand(N, D, grad=True), edges())
        handle.remove()
        return first, out, log, layer(rand(N, D), edges())

    same(program)


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward"])
@pytest.mark.parametrize("name", ["GAT", "GATv2", "Transformer"])
def test_hooks_on_lin_edge(name, kind):
    def program(wrap):
        layer, log = wrap(getattr(nn, f"{name}Conv")(D, 5, heads=2, edge_dim=3)), []
        hooks = {
            "forward_pre": lambda m, a: log.append(a[0].shape) or (a[0] * 2,),
            "forward": lambda m, a, o: log.append(o.shape) or o + 1,
            "full_backward": lambda m, g, o: log.append((g[0] is None, o[0].shape)),
        }
        getattr(layer.lin_edge, f"register_{kind}_hook")(hooks[kind])
        return train(layer, rand(N, D, grad=True), edges(), edge_attr=rand(E, 3, grad=True)), log

    same(program, accelerated=None)


def test_global_module_hooks():
    def program(wrap):
        layer, log = wrap(nn.SAGEConv(D, 5)), []
        module = torch.nn.modules.module
        handles = [
            module.register_module_forward_pre_hook(lambda m, a: log.append(type(m).__name__)),
            module.register_module_forward_hook(lambda m, a, o: log.append(type(m).__name__)),
            module.register_module_full_backward_hook(lambda m, g, o: log.append(type(m).__name__)),
        ]
        try:
            out = train(layer, rand(N, D, grad=True), edges())
        finally:
            for handle in handles:
                handle.remove()
        return out, log

    same(program, accelerated=None)


def test_tensor_hooks_and_retained_gradients():
    def program(wrap):
        layer, log = wrap(nn.GATConv(D, 5)), []
        x = rand(N, D, grad=True)
        x.register_hook(lambda g: log.append(g.shape) or g * 2)
        layer.lin.weight.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.shape))
        out = layer(x, edges())
        out.retain_grad()
        backward(out)
        return out.grad, log, grads(layer, x)

    same(program)


DECOMPOSED = {
    "GCN": lambda **k: nn.GCNConv(D, 6, **k),
    "LG": lambda **k: nn.LGConv(**k),
    "TAG": lambda **k: nn.TAGConv(D, 6, K=2, **k),
    "EdgeConv": lambda **k: nn.EdgeConv(torch.nn.Linear(4, 6), **k),
    "SAGE": lambda **k: nn.SAGEConv(6, 6, **k),  # PyG itself cannot: its features are a pair
}


@pytest.mark.parametrize("name", DECOMPOSED)
@pytest.mark.parametrize("at", ["start", "later"])
def test_decomposed_layers(name, at):
    def program(wrap):
        layer = wrap(DECOMPOSED[name](**({"decomposed_layers": 2} if at == "start" else {})))
        out = []
        for parts in (2, 1, 3, 1) if name not in ("SAGE", "EdgeConv") else (2,):
            layer.decomposed_layers = parts
            layer.zero_grad()
            x = rand(N, D if name != "EdgeConv" else 4, grad=True)
            out.append(train(layer, x, edges()))
        return out

    same(program, accelerated=None, raises=name in ("SAGE", "EdgeConv"))


# What must go to PyG: how to bring the layer there, and the reason that is counted.
def _explain(layer):
    layer.explain = True
    layer._edge_mask = torch.ones(E)
    layer._loop_mask = torch.ones(E, dtype=torch.bool)


LEFT = {
    "explain": (_explain, "explain is on"),
    "decomposed": (lambda c: setattr(c, "decomposed_layers", 2), "decomposed_layers > 1"),
    "replaced": (
        lambda c: setattr(c, "message", (lambda self, x_j, edge_weight: x_j + 1).__get__(c)),
        "message() was replaced on the instance",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_to_pyg(name):
    change, reason = LEFT[name]
    plain = nn.LGConv()
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    change(plain)
    change(layer)
    x, index = rand(N, D), edges()
    report.reset()
    torch.testing.assert_close(layer(x, index), plain(x, index))
    assert report.snapshot()["pyg.LGConv"].reasons == {reason: 1}


def test_explain_toggled():
    plain = nn.GATConv(D, 5)
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    x, index = rand(N, D), utils.remove_self_loops(edges())[0]
    for value in (True, False, True, None):
        for module in (plain, layer):
            module.explain = value
            module._edge_mask = torch.linspace(-1, 1, index.shape[1])
            module._loop_mask = torch.ones(index.shape[1], dtype=torch.bool)
        report.reset()
        torch.testing.assert_close(layer(x, index), plain(x, index))
        assert bool(report.snapshot()["pyg.GATConv"].accelerated) == (not value)
    pyg_backend.disable()
    assert type(layer) is nn.GATConv
    torch.testing.assert_close(layer(x, index), plain(x, index))


def test_hook_counts_its_reason():
    layer = pyg_backend.accelerate(nn.SAGEConv(D, 5))
    handle = layer.register_message_forward_hook(lambda *a: None)
    report.reset()
    layer(torch.randn(N, D), edges())
    handle.remove()
    layer(torch.randn(N, D), edges())
    site = report.snapshot()["pyg.SAGEConv"]
    assert (site.left, site.accelerated) == (1, 1)
    assert list(site.reasons) == ["message passing hooks are registered"]
