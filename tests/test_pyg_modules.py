"""Accelerated layers as torch modules: lazy, copied, saved, cast, reparametrised, subclassed, switched on and off."""

import copy
import gc
import io
import os
import pickle
import sys

import forked
import pytest
import torch
from torch.nn.utils import parametrizations, parametrize, prune

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from pyg_compare import LAYERS, D, E, N, assert_equal, edges, rand, same, train
from torch_geometric import nn
from torch_geometric.nn.conv import MessagePassing

import gnnaccel
from gnnaccel import pyg_backend, report
from gnnaccel.pyg_backend import attention, attention_forwards

LAZY = ["GCN", "SAGE", "GraphConv", "GAT", "GATv2", "Transformer", "ResGated"]


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("name", LAZY)
def test_lazy_layer(name, pair):
    """Channels of -1 are set by the first call, under torch.no_grad or not, and by load_state_dict."""

    def program(wrap):
        if pair and name == "GCN":
            return None  # not for two sets of nodes
        more = {"add_self_loops": False} if name.startswith("GAT") and pair else {}
        layer, fresh = (wrap(LAYERS[name]((-1, -1) if pair else -1, **more)) for _ in range(2))
        x = (rand(N, D), rand(N, 4, seed=2)) if pair else rand(N, D)
        with torch.no_grad():
            first = layer(x, edges())
        fresh.load_state_dict(layer.state_dict())
        return first, train(layer, x, edges()), fresh(x, edges()), repr(layer), list(layer.state_dict())

    same(program, accelerated=None if pair and name == "GCN" else True)


def test_copies_of_a_lazy_layer():
    def program(wrap):
        layer = wrap(nn.SAGEConv(-1, 5))
        twin = copy.deepcopy(layer)
        out = layer(rand(N, D), edges()), twin(rand(N, 3), edges())
        return *out, pickle.loads(pickle.dumps(layer))(rand(N, D), edges())

    same(program)


def _torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


def _state_dict(model):
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        torch.nn.init.zeros_(parameter)
    twin.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    return twin


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "pickle 2": lambda m: pickle.loads(pickle.dumps(m, protocol=2)),
    "save": _torch_save,
    "state_dict": _state_dict,
    "deepcopy twice": lambda m: copy.deepcopy(copy.deepcopy(m)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", LAYERS)
def test_copied_after_use(name, how):
    """A copy made between two steps goes on as the original, and does not share its parameters."""

    def program(wrap):
        layer = wrap(LAYERS[name]())
        out = [train(layer, rand(N, D, grad=True), edges())]
        layer.zero_grad()
        twin = COPIES[how](layer)
        out.append(train(twin, rand(N, D, grad=True), edges()))
        return (
            *out,
            layer(rand(N, D), edges()),
            repr(twin),
            type(twin).__name__,
            isinstance(twin, type(layer).__mro__[1]),
        )

    same(program)


@pytest.mark.parametrize("name", LAYERS)
def test_other_dtypes_and_back(name):
    def program(wrap):
        layer, out = wrap(LAYERS[name]()), []
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
            layer.to(dtype)
            layer.zero_grad()
            out.append(train(layer, rand(N, D).to(dtype).requires_grad_(), edges()))
        return out

    same(program, dtype=torch.float32)


@pytest.mark.parametrize("name", ["SAGE", "GraphConv", "GAT", "Transformer"])
def test_int32_edges(name):
    """Against PyG's int64: the gradient of torch 2.13 through an expanded int32 index is wrong on the CPU."""
    plain = LAYERS[name]().double()
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    results = [
        train(model, rand(N, D).double().requires_grad_(), index)
        for model, index in ((layer, edges().int()), (plain, edges()))
    ]
    assert_equal(*results)


@pytest.mark.parametrize("name", LAYERS)
def test_half_on_the_cpu(name):
    """No kernel of ours takes it there: PyG's own result."""

    def program(wrap):
        layer = wrap(LAYERS[name]()).half()
        return layer(rand(N, D).half(), edges())

    same(program, dtype=torch.float32, accelerated=None)


@pytest.mark.parametrize("name", ["GCN", "SAGE", "GAT", "Transformer", "EdgeConv"])
def test_meta_and_shared_memory(name):
    def program(wrap):
        layer = wrap(LAYERS[name]())
        shared = copy.deepcopy(layer).share_memory()
        empty = copy.deepcopy(layer).to("meta")
        shapes = [(k, v.shape, v.device.type) for k, v in empty.state_dict().items()]
        filled = empty.to_empty(device="cpu")
        filled.load_state_dict(layer.state_dict())
        with torch.device("meta"):
            built = wrap(LAYERS[name]())
        return (
            shapes,
            [p.device.type for p in built.parameters()],
            [module(rand(N, D), edges()) for module in (shared, filled)],
        )

    same(program)


@pytest.mark.parametrize("name", ["GCN", "SAGE", "GraphConv"])
def test_run_on_meta_tensors(name):
    """Shapes without values: what works in PyG works, the rest raises the same error."""

    def attempt(wrap):
        layer = wrap(LAYERS[name]()).to("meta")
        out = layer(torch.empty(N, D, device="meta"), edges().to("meta"))
        return out.shape, out.device.type

    try:
        attempt(lambda model: model)
    except Exception:
        same(attempt, raises=True)
    else:
        same(attempt, accelerated=False)


class Halved(torch.nn.Module):
    def forward(self, weight):
        return weight / 2


def _weight_norm(lin):
    torch.nn.utils.weight_norm(lin)


CHANGES = {
    "parametrize": lambda lin: parametrize.register_parametrization(lin, "weight", Halved()),
    "spectral_norm": lambda lin: parametrizations.spectral_norm(lin),
    "old spectral_norm": lambda lin: torch.nn.utils.spectral_norm(lin),
    "weight_norm": lambda lin: parametrizations.weight_norm(lin),
    "old weight_norm": _weight_norm,
    "orthogonal": lambda lin: parametrizations.orthogonal(lin),
    "prune": lambda lin: prune.l1_unstructured(lin, "weight", amount=0.4),
    "forward replaced": lambda lin: setattr(lin, "forward", lambda x: (x @ lin.weight.t()) * 2),
    "weight frozen": lambda lin: lin.weight.requires_grad_(False),
}


def _linears(layer):
    found = [m for m in layer.modules() if isinstance(m, (nn.Linear, torch.nn.Linear))]
    return [m for m in found if m.weight.numel()]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["GCN", "SAGE", "GAT edge", "GATv2 edge", "Transformer edge"])
def test_changed_linear(name, change):
    """Every linear part is changed, lin_edge too, whose weight our rules would like to read."""
    with_edges = name.endswith(" edge")
    name = name.split()[0]

    def program(wrap):
        layer = wrap(LAYERS[name](**({"edge_dim": 3} if with_edges else {})))
        for lin in _linears(layer):
            CHANGES[change](lin)
        out = []
        for _ in range(2):
            layer.zero_grad()
            more = {"edge_attr": rand(E, 3, grad=True)} if with_edges else {}
            out.append(train(layer, rand(N, D, grad=True), edges(), **more))
        return out

    same(program, accelerated=None)


def test_gat_scores_of_nodes(monkeypatch):
    """In one op for both ends, but for vectors of another shape."""
    calls = []
    original = attention_forwards.narrow_gat

    def gat(graph, x, *vectors, **options):
        calls.extend(vector.shape for vector in vectors)
        return original(graph, x, *vectors, **options)

    monkeypatch.setattr(attention_forwards, "narrow_gat", gat)

    def program(wrap):
        layer, x = wrap(nn.GATConv(D, 4, 2)), rand(N, D)
        out = [layer(x, edges())]
        for name in ("att_src", "att_dst"):
            setattr(layer, name, torch.nn.Parameter(rand(N, 2, 4)))  # a vector for each node
        return [*out, layer(x, edges())]

    same(program)
    assert set(calls) == {(1, 2, 4)}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["MX", "SD"])
def test_super_gat_in_one_op(kind, training, monkeypatch):
    """Scores, softmax and sum; not where get_attention() is somebody's own."""
    calls, original = [], attention_forwards.super_gat
    for module, name in ((attention_forwards, "super_gat"), (attention, "super_gat_op")):
        monkeypatch.setattr(module, name, lambda *a, **k: calls.append(1) or original(*a, **k))

    class Own(nn.SuperGATConv):
        def get_attention(self, *args, **kwargs):
            return 2 * super().get_attention(*args, **kwargs)

    def program(layer, wrap):
        conv = wrap(layer(D, 4, 2, attention_type=kind).train(training))
        return train(conv, rand(N, D, grad=True), edges())

    same(lambda wrap: program(nn.SuperGATConv, wrap))
    assert calls
    calls.clear()
    same(lambda wrap: program(Own, wrap), accelerated=None)
    assert not calls


class DoubledGATv2(nn.GATv2Conv):
    def edge_updater(self, edge_index, size=None, **kwargs):
        return 2 * super().edge_updater(edge_index, size=size, **kwargs)


def test_own_edge_updater():
    same(lambda wrap: [wrap(DoubledGATv2(D, 4, 2))(rand(N, D), edges())], accelerated=None)


@pytest.mark.parametrize("layer", [nn.GATConv, nn.GCNConv])
def test_traced_after_a_call(layer):
    """What is remembered of the edges does not become a constant of the trace."""
    conv, x, index = gnnaccel.accelerate(layer(D, 4)), rand(N, D), edges()
    conv(x, index)
    traced = torch.jit.trace(conv, (x, index))
    other = index.flip(0)[:, : E // 2].contiguous()
    torch.testing.assert_close(traced(x, other), conv(x, other))


@pytest.mark.parametrize("layer", [nn.GATConv, nn.TransformerConv, nn.SAGEConv, nn.GCNConv])
def test_forward_replaced_on_the_class(layer, monkeypatch):
    conv = gnnaccel.accelerate(layer(D, 4))
    conv(rand(N, D), edges())
    monkeypatch.setattr(layer, "forward", lambda self, *args: "replaced")
    assert conv(rand(N, D), edges()) == "replaced"


@pytest.mark.parametrize("name", LAYERS)
def test_functional_call(name):
    def program(wrap):
        layer = wrap(LAYERS[name]())
        new = {k: rand(*v.shape, seed=7).requires_grad_() for k, v in layer.named_parameters()}
        out = torch.func.functional_call(layer, new, (rand(N, D), edges()))
        out.sum().backward()
        return out, [v.grad for v in new.values()], layer(rand(N, D), edges())

    same(program)


@pytest.mark.parametrize("name", LAYERS)
def test_toggled_between_steps(name):
    """install() and uninstall() in a program with living layers: every step equals PyG's, classes come back."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    plain = LAYERS[name]().double()
    layer, reference = copy.deepcopy(plain), copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in (layer, reference)]
    switches = [lambda: None, gnnaccel.install, lambda: gnnaccel.accelerate(layer), gnnaccel.install]
    switches += [gnnaccel.uninstall, gnnaccel.uninstall, gnnaccel.install, lambda: gnnaccel.accelerate(layer)]
    accelerated = []
    try:
        for switch in switches:
            switch()
            report.reset()
            results = []
            for model, optimizer in zip((layer, reference), optimizers, strict=True):
                optimizer.zero_grad()
                results.append(train(model, rand(N, D).double(), edges()))
                optimizer.step()
            assert_equal(*results)
            accelerated.append(any(site.accelerated for site in report.snapshot().values()))
    finally:
        gnnaccel.uninstall()
    # Layers that exist already change by accelerate() alone, and uninstall() restores them.
    assert accelerated == [False, False, True, True, False, False, False, True]
    assert type(layer) is type(plain)
    assert vars(layer).keys() == vars(plain).keys()


def test_classes_of_the_flag_do_not_pile_up():
    """Building and dropping many models leaves no class behind."""

    def subclasses():
        gc.collect()
        return len(nn.SAGEConv.__subclasses__())

    before = subclasses()
    pyg_backend.enable()
    try:
        for _ in range(20):
            nn.models.GraphSAGE(D, 8, 2, 3)(torch.randn(N, D), edges())
    finally:
        pyg_backend.disable()
    assert subclasses() <= before + 1


def test_copies_stay_accelerated_and_equal():
    plain = torch.nn.ModuleList([nn.GCNConv(D, D), nn.GATConv(D, 5)])
    model = pyg_backend.accelerate(copy.deepcopy(plain))
    x, index = rand(N, D), edges()
    for twin in (copy.deepcopy(model), torch.nn.ModuleList([copy.copy(m) for m in model])):
        report.reset()
        torch.testing.assert_close(twin[1](twin[0](x, index), index), model[1](model[0](x, index), index))
        assert report.share() == 1
    twin = copy.deepcopy(model)
    assert twin[0].lin.weight.data_ptr() != model[0].lin.weight.data_ptr()
    assert repr(twin) == repr(plain)


def test_state_dict_is_the_frameworks():
    plain = nn.models.GAT(D, 8, 2, 3)
    model = pyg_backend.accelerate(copy.deepcopy(plain))
    model(rand(N, D), edges())
    assert list(model.state_dict()) == list(plain.state_dict())
    fresh = nn.models.GAT(D, 8, 2, 3)
    fresh.load_state_dict(model.state_dict())
    x = rand(N, D)
    torch.testing.assert_close(fresh(x, edges()), model(x, edges()))


@pytest.mark.parametrize("explain", [False, True])
def test_pickle_loads_without_gnnaccel(tmp_path, explain):
    model = pyg_backend.accelerate(nn.models.GCN(D, 8, 2, 3))
    x, index = rand(N, D), edges()
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
    forked.run([sys.executable, "-c", code], dict(os.environ)).check_returncode()
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
