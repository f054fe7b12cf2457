"""Layers that a short forward serves, changed in ways that it does not know: results and gradients are PyG's."""

import sys
import types

import pytest
import torch

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from pyg_compare import LAYERS, D, E, N, edges, rand, same, tensors, train
from torch.utils._pytree import tree_map_only
from torch_geometric import nn
from torch_geometric.nn.conv import MessagePassing

from gnnaccel.pyg_backend import joined_forwards
from gnnaccel.pyg_backend.graph import from_edge_index

MORE = {
    "GCN without bias": lambda: nn.GCNConv(D, 5, bias=False),
    "GCN cached": lambda: nn.GCNConv(D, 5, cached=True),
    "GIN linear": lambda: nn.GINConv(torch.nn.Linear(D, 5)),
    "GIN eps": lambda: nn.GINConv(torch.nn.Linear(D, 5), eps=0.3),
    "GIN trained eps": lambda: nn.GINConv(torch.nn.Linear(D, 5), eps=0.3, train_eps=True),
    "SG": lambda: nn.SGConv(D, 5, K=2),
    "SG cached": lambda: nn.SGConv(D, 5, K=2, cached=True),
    "TAG": lambda: nn.TAGConv(D, 5, K=2),
    "TAG plain": lambda: nn.TAGConv(D, 5, K=1, normalize=False, bias=False),
    "APPNP": lambda: nn.APPNP(2, 0.2),
    "APPNP cached": lambda: nn.APPNP(2, 0.2, cached=True),
    "APPNP without loops": lambda: nn.APPNP(1, 0.2, add_self_loops=False),
    "SSG": lambda: nn.SSGConv(D, 5, 0.3, K=2),
    "SSG cached": lambda: nn.SSGConv(D, 5, 0.3, K=2, cached=True),
    "LG": lambda: nn.LGConv(),
    "LG plain": lambda: nn.LGConv(normalize=False),
    "MixHop": lambda: nn.MixHopConv(D, 5, powers=[0, 2]),
    "MixHop without bias": lambda: nn.MixHopConv(D, 5, bias=False, add_self_loops=False),
    "ARMA": lambda: nn.ARMAConv(D, 5, num_stacks=2, num_layers=2),
    "ARMA shared": lambda: nn.ARMAConv(D, 5, 1, 3, shared_weights=True, act=None, bias=False),
    "Simple": lambda: nn.SimpleConv("mean"),
    "Simple with loops": lambda: nn.SimpleConv(combine_root="self_loop"),
    "GatedGraph": lambda: nn.GatedGraphConv(D + 1, 2),
    "GatedGraph max": lambda: nn.GatedGraphConv(D, 1, aggr="max"),
    "AGNN": lambda: nn.AGNNConv(),
    "AGNN fixed": lambda: nn.AGNNConv(requires_grad=False, add_self_loops=False),
}
SHORT = {name: make for name, make in LAYERS.items() if name != "EdgeConv"} | MORE


def changed(name, change, **options):
    """Two steps of the layer as it is made, and two once it was changed, which find what the first have left."""

    def program(wrap):
        layer, index = wrap(SHORT[name]()), edges()
        out = [train(layer, rand(N, D, grad=True), index) for _ in range(2)]
        change(layer)
        out += [train(layer, rand(N, D, grad=True), index) for _ in range(2)]
        # What went through float32 has its rounding.
        return [t.dtype for t in tensors(out)], tree_map_only(torch.Tensor, rounded, out)

    def rounded(t):
        return t.float() if options.get("dtype") == torch.float32 else t

    same(program, **options)


def _doubled(self, edge_index, **kwargs):
    return 2 * type(self).propagate(self, edge_index, **kwargs)


@pytest.mark.parametrize("name", SHORT)
def test_propagate_replaced_on_the_layer(name):
    changed(name, lambda layer: setattr(layer, "propagate", types.MethodType(_doubled, layer)))


@pytest.mark.parametrize("name", SHORT)
def test_explained_once(name):
    """PyG binds propagate() to the layer then."""

    def change(layer):
        layer.explain = True
        layer.explain = False

    changed(name, change)


class Cast(torch.nn.Module):
    """A linear layer that gives another dtype than it takes, as quantised and low-rank ones do."""

    def __init__(self, lin, dtype):
        super().__init__()
        self.lin, self.dtype = lin, dtype
        self.weight, self.bias = lin.weight, lin.bias  # PyG's layers look at them

    def forward(self, x):
        return self.lin(x).to(self.dtype)


def _cast(layer, dtype, most):
    linear = [(k, m) for k, m in layer.named_children() if isinstance(m, (nn.Linear, torch.nn.Linear))]
    for name, lin in linear[:most]:
        setattr(layer, name, Cast(lin, dtype))


@pytest.mark.parametrize("most", [1, 9])
@pytest.mark.parametrize("name", SHORT)
def test_linear_maps_to_another_dtype(name, most):
    """The first of the layer's maps, or all of them."""
    changed(name, lambda layer: _cast(layer, torch.float64, most), dtype=torch.float32)


def _maps(layer):
    return [m for m in layer.modules() if isinstance(m, (nn.Linear, torch.nn.Linear))]


def _doubles(*args):
    return 2 * args[-1]


def _with_forward(lin):
    own = lin.forward
    lin.forward = lambda x: 2 * own(x)


WATCHED = {
    "forward hook": lambda lin: lin.register_forward_hook(_doubles),
    "pre-hook": lambda lin: lin.register_forward_pre_hook(lambda _, given: 2 * given[0]),
    "backward hook": lambda lin: lin.register_full_backward_hook(
        lambda _, given, __: tuple(None if g is None else 2 * g for g in given)
    ),
    "forward of its own": _with_forward,
    "a weight that is no parameter": lambda lin: torch.nn.utils.parametrizations.weight_norm(lin),
    "a subclass": lambda lin: setattr(
        lin, "__class__", type("Own", (type(lin),), {"forward": lambda s, x: 2 * x @ s.weight.t()})
    ),
}


@pytest.mark.parametrize("how", WATCHED)
@pytest.mark.parametrize("name", SHORT)
def test_linear_maps_that_somebody_watches(name, how):
    changed(name, lambda layer: [WATCHED[how](lin) for lin in _maps(layer)])


@pytest.mark.parametrize("name", SHORT)
def test_hooks_on_all_modules(name):
    def program(wrap):
        layer, index = wrap(SHORT[name]()), edges()
        before, seen = layer(rand(N, D), index), []
        handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
        try:
            after = layer(rand(N, D), index)
        finally:
            handle.remove()
        return before, after, seen.count(nn.Linear)

    same(program, accelerated=None)


@pytest.mark.parametrize("name", ["GCN", "SAGE", "GraphConv"])
def test_forward_of_all_linear_maps_replaced(name, monkeypatch):
    own = nn.Linear.forward

    def program(wrap):
        layer, index = wrap(SHORT[name]()), edges()
        before = layer(rand(N, D), index)
        with monkeypatch.context() as patch:
            patch.setattr(nn.Linear, "forward", lambda self, x: 2 * own(self, x))
            return before, layer(rand(N, D), index)

    same(program)


@pytest.mark.parametrize("name", ["GAT", "GATv2"])
def test_attention_vectors_of_another_dtype(name):
    def change(layer):
        for key, value in list(layer._parameters.items()):
            if key.startswith("att") and value is not None:
                setattr(layer, key, torch.nn.Parameter(value.detach().double()))

    changed(name, change, dtype=torch.float32)


def test_features_of_two_dtypes():
    def program(wrap):
        layer = wrap(nn.ResGatedGraphConv(D, 5))
        layer.lin_key.double(), layer.lin_skip.double()
        pair = rand(N, D, grad=True), rand(N, D, seed=2).double().requires_grad_()
        out = train(layer, pair, edges())
        return [t.dtype for t in tensors(out)], tree_map_only(torch.Tensor, torch.Tensor.float, out)

    same(program, dtype=torch.float32)


@pytest.mark.parametrize("shape", [(), (1,), (1, 5), (N, 5), (2, 1, 5)])
@pytest.mark.parametrize("name", ["GCN", "GCN cached"])
def test_bias_of_another_shape(name, shape):
    changed(name, lambda layer: setattr(layer, "bias", torch.nn.Parameter(rand(*shape, 1).squeeze(-1))))


def test_bias_that_does_not_fit():
    def program(wrap):
        layer = wrap(nn.GCNConv(D, 5))
        layer.bias = torch.nn.Parameter(rand(3))
        return layer(rand(N, D), edges())

    same(program, raises=True)


@pytest.mark.parametrize("name", SHORT)
def test_replica(name):
    """What torch.nn.DataParallel makes for each GPU: a copy whose parameters are attributes."""

    def program(wrap):
        layer = wrap(SHORT[name]())
        replicas = {module: module._replicate_for_data_parallel() for module in layer.modules()}
        for module, replica in replicas.items():
            for key, parameter in module._parameters.items():
                if parameter is None:
                    replica._parameters[key] = None
                else:
                    setattr(replica, key, parameter * 1)
            for key, child in module._modules.items():
                replica._modules[key] = None if child is None else replicas[child]
        out = replicas[layer](rand(N, D, grad=True), edges())
        out.square().sum().backward()
        return out, [p.grad for p in layer.parameters()]

    same(program)


@pytest.mark.parametrize("name", ["GAT", "GATv2", "Transformer"])
def test_node_dim_of_the_heads(name):
    """-2 means the nodes of [N, channels], but not of the [N, heads, channels] that these layers send."""

    def program(wrap):
        layer = wrap(SHORT[name]())
        layer.node_dim = -2
        return layer(rand(N, D), edges())

    same(program, raises=True)


def _reset(layer):
    layer.initial_eps = 0.4
    layer.reset_parameters()


EPS = {
    "written into": lambda layer: layer.eps.fill_(0.7),
    "written past autograd": lambda layer: layer.eps.data.fill_(0.7),
    "reset": _reset,
    "loaded": lambda layer: layer.load_state_dict({**layer.state_dict(), "eps": torch.full((1,), 0.7)}),
    "of every feature": lambda layer: setattr(layer, "eps", rand(D)),
    "of another dimension": lambda layer: setattr(layer, "eps", torch.ones(1, 1, 1)),
    "minus one": lambda layer: layer.eps.fill_(-1),
    "an integer": lambda layer: setattr(layer, "eps", torch.ones(1, dtype=torch.int64)),
}


@pytest.mark.parametrize("change", EPS)
@pytest.mark.parametrize("name", ["GIN linear", "GIN eps"])
def test_eps_of_gin(name, change):
    changed(name, EPS[change])


HELPERS = [("GCN", "gcn_norm"), *((name, f"{w}_self_loops") for name in ("GAT", "GATv2") for w in ("add", "remove"))]


@pytest.mark.parametrize(("name", "helper"), HELPERS)
def test_helper_replaced_in_the_layers_module(name, helper, monkeypatch):
    module = sys.modules[type(SHORT[name]()).__module__]
    original = getattr(module, helper)

    def replaced(edge_index, *args, **kwargs):
        return original(edge_index[:, : E // 2], *args, **kwargs)

    def program(wrap):
        layer, index = wrap(SHORT[name]()), edges()
        before = layer(rand(N, D), index)
        with monkeypatch.context() as patch:
            patch.setattr(module, helper, replaced)
            return before, layer(rand(N, D), index)

    same(program)


def _plain(layer):
    return getattr(type(layer), "_gnnaccel_plain", type(layer))  # under enable()


PRIVATE = {
    "_index_select": lambda layer: {"_index_select": lambda self, *args: 2 * layer._index_select(self, *args)},
    "_lift": lambda layer: {"_lift": lambda self, *args: 2 * layer._lift(self, *args)},
    "_check_input": lambda layer: {"_check_input": lambda self, index, size: layer._check_input(self, index, (N, N))},
}


@pytest.mark.parametrize("method", PRIVATE)
@pytest.mark.parametrize("name", [name for name in SHORT if name != "GCN cached"])
def test_own_way_to_bring_features_to_the_edges(name, method):
    def program(wrap):
        layer = SHORT[name]()
        plain = _plain(layer)
        layer.__class__ = type("Own", (plain,), PRIVATE[method](plain))
        return train(wrap(layer), rand(N, D, grad=True), edges())

    same(program, accelerated=None)


@pytest.mark.parametrize("name", SHORT)
def test_against_the_flow_without_a_propagate_of_its_own(name):
    """PyG cannot read the code of this class, and so writes none for it."""

    def program(wrap):
        layer = SHORT[name]()
        parent = _plain(layer)
        members = {"propagate": MessagePassing.propagate, "edge_updater": MessagePassing.edge_updater}
        members["_orig_propagate"] = members["_jinja_propagate"] = MessagePassing.propagate
        layer.__class__ = type("Unread", (parent,), members)
        layer.flow = "target_to_source"
        return train(wrap(layer), rand(N, D, grad=True), edges())

    same(program, accelerated=None)


def test_eps_that_is_learned(monkeypatch):
    """GENConv's is a number; somebody may have made it a parameter."""
    # Also where the short forward is that of CUDA alone.
    monkeypatch.setattr(joined_forwards, "_graph", lambda guard, conv, x, index: from_edge_index(index, N, N))

    def program(wrap):
        layer, index = nn.GENConv(D, D, aggr="add"), edges()
        del layer.eps
        layer.eps = torch.nn.Parameter(torch.tensor(0.1))
        return train(wrap(layer), rand(N, D, grad=True), index)

    same(program)


INITIAL = {
    "GCN2": lambda: nn.GCN2Conv(D, 0.2, theta=0.5, layer=2),
    "GCN2 of two weights": lambda: nn.GCN2Conv(D, 0.2, shared_weights=False, add_self_loops=False),
    "GCN2 cached": lambda: nn.GCN2Conv(D, 0.2, cached=True),
    "GCN2 plain": lambda: nn.GCN2Conv(D, 0.2, normalize=False),
}
CALLS = {
    "alike": lambda layer, x, own: layer(x, x, edges()),
    "more rows": lambda layer, x, own: layer(x, torch.cat([own, own]), edges()),
    "one row": lambda layer, x, own: layer(x, own[:1], edges()),
    "another dtype": lambda layer, x, own: layer(x, own.bfloat16(), edges()),
    "weights": lambda layer, x, own: layer(x, own, edges(), rand(E).abs()),
    "one edges object": lambda layer, x, own: [layer(x, own, index) for index in [edges()] * 3],
    "a replaced weight": lambda layer, x, own: [setattr(layer.weight1, "data", own[:D] * 2), layer(x, own, edges())][1],
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", INITIAL)
def test_initial_features_beside_sums(name, call):
    if (name, call) == ("GCN2 of two weights", "another dtype"):
        pytest.skip("PyG multiplies matrices of two dtypes there")

    def program(wrap):
        torch.manual_seed(0)
        layer, x, own = wrap(INITIAL[name]()), rand(N, D, grad=True), rand(N, D).requires_grad_()
        out = CALLS[call](layer, x, own)
        sum(t.square().sum() for t in tensors(out)).backward()
        return out, x.grad, own.grad, [p.grad for p in layer.parameters()]

    same(program)
