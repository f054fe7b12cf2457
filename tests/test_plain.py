"""Modules that gather and scatter with torch alone, against the same modules without gnnaccel, in float64."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gnnaccel
from gnnaccel import kept, report
from gnnaccel.lower import bounds

NODES, EDGES, WIDTH = 40, 300, 20


class Layer(nn.Module):
    """What the layers below share: a linear map of nodes, one of edges."""

    def __init__(self):
        super().__init__()
        self.node, self.edge = nn.Linear(WIDTH, WIDTH), nn.Linear(6, WIDTH)


class Sum(Layer):
    def forward(self, x, edges, e):
        h = self.node(x)
        return torch.zeros_like(h).index_add_(0, edges[1], torch.relu(h[edges[0]] + self.edge(e)))


class ToRowZero(Layer):
    """Destinations in the first row, an index expanded to the messages."""

    def forward(self, x, edges, e):
        to, of = edges
        m = x.index_select(0, of) * self.edge(e).tanh()
        return x.new_zeros(x.shape).scatter_add_(0, to.unsqueeze(-1).expand_as(m), m)


class OutOfPlace(Layer):
    def forward(self, x, edges, e):
        of, to = edges.unbind()
        return torch.index_add(x, 0, to, torch.sigmoid(x[to] + x[of]) * self.edge(e))


class Residual(Layer):
    """Messages are added to what they are made of."""

    def forward(self, x, edges, e):
        h = self.node(x)
        m = h[edges[0]] * torch.sigmoid(h[edges[1]])
        h = h.clone().index_add_(0, edges[1], m)
        return h.index_add(0, edges[1], m)


class Greatest(Layer):
    def forward(self, x, edges, e):
        m = self.node(x)[edges[0]] - self.edge(e)
        index = edges[1].view(-1, 1).expand(m.shape)
        return torch.ones_like(x).scatter_reduce_(0, index, m, "amax", include_self=False)


class Mean(Layer):
    def forward(self, x, edges, e):
        m = torch.relu(self.node(x)[edges[0]] + self.edge(e))
        return x.scatter_reduce(0, edges[1].view(-1, 1).expand_as(m), m, "mean", include_self=False)


def total(m: Tensor, index: Tensor, nodes: int) -> Tensor:
    out = torch.zeros(nodes, *m.shape[1:], dtype=m.dtype, device=m.device)
    return out.index_add_(0, index, m)


@torch.jit.script
def scripted_total(m: Tensor, index: Tensor, nodes: int) -> Tensor:
    shape = list(m.shape)
    shape[0] = nodes
    return torch.zeros(shape, dtype=m.dtype, device=m.device).index_add(0, index, m)


def through(m: Tensor, index: Tensor, nodes: int) -> Tensor:
    return scripted_total(m, index, nodes)


class Scripted(Layer):
    """A sum in a function of torch.jit's, behind one of Python's."""

    def forward(self, x, edges, e):
        m = self.node(x)[edges[0]] * self.edge(e)
        return through(m, edges[1], len(x)) + scripted_total(m.relu(), edges[1], len(x))


class Helpers(Layer):
    """A sum in a function of the user's, and a softmax by hand."""

    def forward(self, x, edges, e):
        of, to = edges[0], edges[1]
        score = torch.exp((self.node(x)[to] * torch.tanh(x[of] + self.edge(e))).clamp(-3, 3))
        return total(score * x[of], to, len(x)) / (total(score, to, len(x)) + 1e-6)


class Written(Layer):
    """What messages are made of is written into before they are reduced."""

    def forward(self, x, edges, e):
        h = self.node(x)
        m = torch.relu(h[edges[0]] + h[edges[1]])
        h.mul_(2)
        kept = h[edges[0]]
        h[:3] = 0
        h += 1
        F.relu(h, True)
        return total(m, edges[1], len(x)) + total(kept, edges[1], len(x)) + h


class WrittenLater(Layer):
    """The same once they are reduced: torch saved the gathered rows alone."""

    def forward(self, x, edges, e):
        h = self.node(x)
        out = total(h[edges[0]] * torch.tanh(h[edges[1]]), edges[1], len(x))
        return out + h.mul_(2)


class BothEnds(Layer):
    def forward(self, x, edges, e):
        m = torch.relu(self.node(x)[edges[0]] + self.edge(e))
        return total(m, edges[1], len(x)) - total(m, edges[0], len(x))


class Pairs(Layer):
    """Edges [E, 2]."""

    def forward(self, x, edges, e):
        pairs = edges.t().contiguous()
        m = torch.relu(self.node(x)[pairs[:, 0]] + self.edge(e))
        return total(m, pairs[:, 1], len(x))


class TwoTensors(Layer):
    """Each end a tensor of its own, and several layers that have the same."""

    def forward(self, x, edges, e):
        of, to = edges[0].clone(), edges[1].clone()
        for _ in range(3):
            m = torch.relu(self.node(x)[of] - x[to] + self.edge(e))
            x = x + torch.zeros_like(x).scatter_add_(0, to[:, None].expand_as(m), m)
        return x


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(2 * WIDTH + 6, WIDTH)

    def forward(self, ends):
        return F.silu(self.map(ends))


class Nested(Layer):
    """A module of the user's sees rows of edges."""

    def __init__(self):
        super().__init__()
        self.mlp, self.last = Own(), None

    def forward(self, x, edges, e):
        m = self.mlp(torch.cat([x[edges[0]], x[edges[1]], e], -1))
        self.last = x[edges[0]] * 2
        if (self.last > 0).any():
            m = m + self.last
        return total(m, edges[1], len(x))


class EdgeRows(Layer):
    def forward(self, x, edges, e):
        m = torch.relu(self.node(x)[edges[0]] + self.edge(e))
        return total(m, edges[1], len(x)), m


class Stack(nn.Module):
    """Two layers in a module that scatters itself, some of it without a gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Sum(), Nested()

    def forward(self, x, edges, e):
        h = self.second(self.first(x, edges, e).relu(), edges, e)
        with torch.no_grad():
            weight = total(h[edges[0]] * h[edges[1]], edges[1], len(x))
        return h + weight + total(h[edges[0]] * h[edges[1]], edges[1], len(x))


LAYERS = {
    kind.__name__: kind
    for kind in (
        *(
            Sum,
            ToRowZero,
            OutOfPlace,
            Residual,
            Greatest,
            Mean,
            *(Helpers, Scripted),
            Written,
            WrittenLater,
            BothEnds,
            Pairs,
            TwoTensors,
            Nested,
            EdgeRows,
        ),
        Stack,
    )
}


def inputs(device: torch.device, dtype=torch.float64, nodes=NODES):
    torch.manual_seed(1)
    edges = torch.stack([torch.randint(nodes, (EDGES,)), torch.randint(nodes // 2, (EDGES,))]).to(device)
    x, e = torch.randn(nodes, WIDTH, dtype=dtype, device=device), torch.randn(EDGES, 6, dtype=dtype, device=device)
    return x.requires_grad_(), edges, e.requires_grad_()


def results(layer: nn.Module, x: Tensor, edges: Tensor, e: Tensor) -> list:
    out = layer(x, edges, e)
    outs = out if isinstance(out, tuple) else (out,)
    loss = sum((each * torch.linspace(-1, 1, each.numel()).view_as(each).to(each)).sum() for each in outs)
    wanted = [x, e, *layer.parameters()]
    return [*(each.detach() for each in outs), *torch.autograd.grad(loss, wanted, allow_unused=True)]


def compare(plain: nn.Module, given: tuple, calls: int = 4):
    layer = gnnaccel.accelerate(copy.deepcopy(plain))
    want = results(plain, *given)
    report.reset()
    for _ in range(calls):
        for mine, theirs in zip(results(layer, *given), want, strict=True):
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                assert type(mine) is Tensor
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    return layer


@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients_are_those_of_torch(device, name):
    torch.manual_seed(0)
    plain = LAYERS[name]().to(device).double()
    layer = compare(plain, inputs(device))
    site = report.snapshot()[f"torch.{name}"]
    assert (site.accelerated >= 2) != name.startswith("Written"), site.reasons
    if hasattr(layer, "last"):
        assert type(layer.last) is Tensor


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_scatter_of_pyg(device, reduce):
    utils = pytest.importorskip("torch_geometric.utils")

    class Scatter(Layer):
        def forward(self, x, edges, e):
            m = torch.relu(self.node(x)[edges[0]] + self.edge(e))
            return utils.scatter(m, edges[1], 0, len(x), reduce)

    compare(Scatter().to(device).double(), inputs(device))
    assert report.snapshot()["torch.Scatter"].accelerated == 3


def test_attention_by_the_softmax_of_pyg(device):
    utils = pytest.importorskip("torch_geometric.utils")

    class Attention(Layer):
        def forward(self, x, edges, e):
            of, to = edges
            q, k = self.node(x).view(-1, 4, 5), self.edge(e).view(-1, 4, 5)
            weights = utils.softmax((q[to] * (q[of] + k)).sum(-1), to, num_nodes=len(x))
            return utils.scatter((q[of] + k) * weights.unsqueeze(-1), to, 0, len(x), "sum").flatten(1)

    compare(Attention().to(device).double(), inputs(device))
    assert report.snapshot()["torch.Attention"].accelerated == 3


def test_second_derivatives(device):
    torch.manual_seed(0)
    plain, given = Sum().to(device).double(), inputs(device)
    found = []
    for layer in (plain, gnnaccel.accelerate(copy.deepcopy(plain))):
        out = layer(*given)
        (first,) = torch.autograd.grad(out.square().sum(), given[0], create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [given[0], *layer.parameters()]))
    for want, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["Sum", "TwoTensors"])
@pytest.mark.parametrize("seen", [False, True])
def test_checkpoints(name, seen):
    """What is recomputed goes the way that it went."""
    torch.manual_seed(0)
    plain, (x, edges, e) = LAYERS[name]().double(), inputs(torch.device("cpu"))
    layer = gnnaccel.accelerate(copy.deepcopy(plain))
    for _ in range(2 * seen):
        layer(x, edges, e)
    want = torch.autograd.grad(plain(x, edges, e).square().sum(), [x, e, *plain.parameters()])
    for _ in range(3):
        out = torch.utils.checkpoint.checkpoint(layer, x, edges, e, use_reentrant=False)
        found = torch.autograd.grad(out.square().sum(), [x, e, *layer.parameters()])
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


class WrittenColumn(Layer):
    def forward(self, x, edges, e):
        m = self.node(x)[edges[0]]
        column, turned = m[:, 0], m.view(-1, 2, WIDTH // 2).transpose(0, 1)
        column.mul_(2)
        turned[0].add_(1)
        return total(m, edges[1], len(x))


class WrittenParts(Layer):
    def forward(self, x, edges, e):
        m = self.node(x)[edges[0]]
        a, b = m[:, :10] * 1, m[:, 10:]
        m[:5].zero_()
        return total(torch.cat([a, b], -1), edges[1], len(x))


class Doubling(nn.Module):
    def forward(self, m, edges, nodes):
        m.mul_(2)
        return total(m, edges[1], nodes)


class WrittenInside(Layer):
    """By a module that is accelerated itself."""

    def __init__(self):
        super().__init__()
        self.inner = Doubling()

    def forward(self, x, edges, e):
        m = self.node(x)[edges[0]]
        a = m[:, :10]
        return self.inner(m, edges, len(x)) + total(torch.cat([a, a], -1), edges[1], len(x))


class Adding(nn.Module):
    def forward(self, h, edges, m):
        return h.index_add_(0, edges[1], m)


class ScatteredInside(Layer):
    def __init__(self):
        super().__init__()
        self.inner = Adding()

    def forward(self, x, edges, e):
        h = self.node(x)
        m = h[edges[0]]
        out = total(m * h[edges[1]], edges[1], len(x))
        self.inner(h, edges, self.edge(e))
        return total(m.relu(), edges[1], len(x)) + out + h


@pytest.mark.parametrize("kind", [WrittenColumn, WrittenParts, WrittenInside, ScatteredInside])
def test_writes_into_what_is_not_there_yet(kind):
    torch.manual_seed(0)
    compare(kind().double(), inputs(torch.device("cpu")))


class WrittenIfTold(Layer):
    told = False

    def forward(self, x, edges, e, argument=False):
        m = self.node(x)[edges[0]]
        seen = m.view(-1, 2, WIDTH // 2)
        if argument or self.told:
            seen.mul_(2)
        return total(m * self.edge(e), edges[1], len(x))


def test_a_branch_that_no_call_has_taken():
    torch.manual_seed(0)
    plain, given = WrittenIfTold().double(), inputs(torch.device("cpu"))
    layer = gnnaccel.accelerate(copy.deepcopy(plain))
    for told, argument in ((0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (0, 0)):
        plain.told = layer.told = bool(told)
        for each in (True, False):
            torch.testing.assert_close(layer(*given, bool(argument)), plain(*given, bool(argument)), msg=str(each))


class Products(nn.Module):
    def forward(self, x, edges, e):
        return total(x[edges[0]] * x[edges[1]], edges[1], len(x))


def test_what_the_caller_writes_into_before_the_backward_pass():
    plain, (x, edges, e) = Products(), inputs(torch.device("cpu"))
    layer = gnnaccel.accelerate(Products())

    class Net(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            h = x * 1
            h += self.layer(h, edges, e)
            return h

    for _ in range(3):
        found = [torch.autograd.grad(Net(each)(x).square().sum(), x)[0] for each in (layer, plain)]
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def activation(m: Tensor) -> Tensor:
    return m.relu()


class Activated(Layer):
    def forward(self, x, edges, e):
        return total(activation(x[edges[0]]), edges[1], len(x)) + x


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


def test_a_global_that_is_replaced_between_calls(monkeypatch):
    plain, given = Activated().double(), inputs(torch.device("cpu"))
    layer = compare(plain, given)
    monkeypatch.setitem(globals(), "activation", Square.apply)
    for mine, theirs in zip(results(layer, *given), results(plain, *given), strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs)


COUNT = 0


class Counting(Layer):
    def forward(self, x, edges, e):
        global COUNT
        COUNT += 1
        return scripted_total(x[edges[0]].relu(), edges[1], len(x)) * COUNT


def test_a_global_that_is_written(monkeypatch):
    layer, given = gnnaccel.accelerate(Counting().double()), inputs(torch.device("cpu"))
    outs = [layer(*given) for _ in range(4)]
    monkeypatch.setitem(globals(), "COUNT", 0)
    torch.testing.assert_close(outs[3], outs[0] * 4)


def test_edges_of_any_strides():
    plain, (x, _, _) = Residual().double(), inputs(torch.device("cpu"))
    layer = gnnaccel.accelerate(copy.deepcopy(plain))
    one = torch.arange(NODES)
    wide = torch.randint(NODES, (4, 2 * EDGES))
    for edges in (one.expand(2, NODES), one.expand(2, NODES).clone(), wide[1:3], wide[::2, ::2], wide[:2].int()):
        for _ in range(2):
            torch.testing.assert_close(layer(x, edges, None), plain(x, edges, None))


def test_what_belongs_to_a_class_goes_with_it():
    def made() -> weakref.ref:
        class Local(Sum):
            pass

        layer = gnnaccel.accelerate(Local().double())
        for _ in range(3):
            layer(*inputs(torch.device("cpu")))
        return weakref.ref(Local)

    kind = made()
    for _ in range(2):
        gc.collect()
    assert kind() is None


class OwnWeight(Sum):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x, edges, e):
        return super().forward(x @ self.weight, edges, e)


class Rebuilt(Sum):
    def __reduce__(self):
        return Rebuilt, ()


class Hashed(Sum):
    def __init__(self):
        super().__init__()
        self.key = 3

    def __hash__(self):
        return hash(self.key)

    def __eq__(self, other):
        return self.key == other.key


@pytest.mark.parametrize("kind", [OwnWeight, Rebuilt, Hashed])
def test_classes_of_every_kind(kind):
    given = inputs(torch.device("cpu"))
    gnnaccel.plain.enable()
    try:
        layer = kind().double()
        if kind is OwnWeight:
            torch.nn.utils.parametrizations.weight_norm(layer)
        for _ in range(3):
            want = layer(*given)
        assert copy.deepcopy(layer).double()(*given).shape == want.shape
    finally:
        gnnaccel.plain.disable()


class WithOwnFunction(Layer):
    def forward(self, x, edges, e):
        return total(Square.apply(self.node(x)[edges[0]]), edges[1], len(x))


class WithData(Layer):
    def forward(self, x, edges, e):
        m = self.node(x)[edges[0]]
        x.data.mul_(1)
        return total(m, edges[1], len(x))


class TwoKindsOfNodes(Layer):
    def forward(self, x, edges, e):
        return total(self.node(x)[edges[0]], edges[1], NODES // 2)


@pytest.mark.parametrize("kind", [WithOwnFunction, WithData, TwoKindsOfNodes])
def test_what_is_left_to_torch(kind):
    compare(kind().double(), inputs(torch.device("cpu")))
    site = report.snapshot()[f"torch.{kind.__name__}"]
    assert site.left and site.reasons


def test_what_does_not_scatter_keeps_its_class():
    model = nn.Sequential(Own(), nn.Linear(2, 2))
    assert [type(part) for part in gnnaccel.accelerate(model)] == [Own, nn.Linear]


def test_few_messages_are_torchs(monkeypatch):
    monkeypatch.setattr(bounds, "FEW_MESSAGES", {"cpu": 10**9, "cuda": 10**9})
    compare(Sum().double(), inputs(torch.device("cpu")))
    assert report.snapshot()["torch.Sum"].reasons == {"few messages, which torch's own code makes the quicker": 4}


def test_modules_are_accelerated_as_they_are_built():
    gnnaccel.plain.enable()
    try:
        model = Stack()
        assert type(model) is Stack  # as its code sees it
        nn.Identity()(torch.zeros(1))  # the next call of any module
        assert {type(part) for part in (model, model.first, model.second)}.isdisjoint({Stack, Sum, Nested})
        assert type(model.second.mlp) is Own
        loaded = pickle.loads(pickle.dumps(model))
        nn.Identity()(torch.zeros(1))
        assert all(type(part) is not Sum for part in loaded.modules())
    finally:
        gnnaccel.plain.disable()
    assert type(Sum()) is Sum and type(model) is Stack and type(model.first) is Sum


SCRIPT = """
import sys, torch

class Layer(torch.nn.Module):
    def forward(self, x, edges):
        return torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]].relu())

layer, x, edges = Layer(), torch.randn(100, 64), torch.randint(100, (2, 50_000))
for _ in range(3):
    out = layer(x, edges)
print(type(layer) is Layer, "torch_geometric" in sys.modules, "gnnaccel.plain" in sys.modules)
"""


@pytest.mark.parametrize("flag", ["1", "0"])
def test_the_flag_in_a_program_without_a_framework(flag, tmp_path):
    started = (Path(__file__).parent.parent / "gnnaccel.pth").read_text(encoding="utf-8")  # if it is not installed here
    (tmp_path / "train.py").write_text(f"{started}\n{SCRIPT}")
    env = os.environ | {"GNNACCEL": flag, "GNNACCEL_PROFILE": "1"}
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    on = flag == "1"
    assert done.stdout.split() == [str(not on), "False", str(on)]
    assert ("torch.Layer" in done.stderr and "66.7% of 3 calls" in done.stderr) == on, done.stderr


def test_layers_of_pyg_stay_pygs():
    """Under the flag a layer of PyG's is accelerated as one, whatever its own code scatters."""
    nn = pytest.importorskip("torch_geometric.nn")

    class Conv(nn.MessagePassing):
        def forward(self, x, edges):
            return self.propagate(edges, x=x) + total(x[edges[0]], edges[1], len(x))

    gnnaccel.install()
    try:
        layer = Conv()
        x, edges, _ = inputs(torch.device("cpu"))
        layer(x, edges)
        assert "pyg.Conv" in report.snapshot() and "torch.Conv" not in report.snapshot()
    finally:
        gnnaccel.uninstall()


def test_a_hook_sees_rows():
    layer, given = gnnaccel.accelerate(Nested().double()), inputs(torch.device("cpu"))
    seen = []
    layer.mlp.register_forward_hook(lambda module, args, out: seen.append((type(args[0]), type(out))))
    layer(*given)
    assert seen == [(Tensor, Tensor)]


def test_wrong_indices_are_torchs_errors():
    x, edges, e = inputs(torch.device("cpu"))
    edges[0, 3] = NODES
    layer = gnnaccel.accelerate(Sum().double())
    with pytest.raises(IndexError, match="out of"):
        layer(x, edges, e)
    edges[0, 3] = -1
    torch.testing.assert_close(layer(x, edges, e), copy.deepcopy(layer)(x, edges.remainder(NODES), e))


def test_edges_that_change():
    plain, (x, edges, e) = Sum().double(), inputs(torch.device("cpu"))
    layer = gnnaccel.accelerate(copy.deepcopy(plain))
    for _ in range(2):
        torch.testing.assert_close(layer(x, edges, e), plain(x, edges, e))
        edges[1] = edges[1].flip(0)


class Again(Layer):
    """Helpers, a module of the user's, a number and a tensor that are attributes."""

    def __init__(self):
        super().__init__()
        self.mlp, self.scale, self.shift = Own(), 0.5, torch.rand(WIDTH).double()

    def mixed(self, h, edges, e):
        return self.mlp(torch.cat([h[edges[0]], h[edges[1]], e], -1)) * self.scale

    def forward(self, x, edges, e, *, flipped=False):
        m = self.mixed(self.node(x), edges, e) + (-self.shift if flipped else self.shift)
        return scripted_total(m, edges[1], len(x)) + x


def no_code(*args, **kwargs):
    raise AssertionError("forward() was run")


def changed_number(layer, edges):
    layer.scale = 2.0


def changed_tensor(layer, edges):
    layer.shift = layer.shift + 1


def changed_in_place(layer, edges):
    layer.shift.mul_(2)
    with torch.no_grad():
        layer.mlp.map.weight.mul_(0.5)


def changed_edges(layer, edges):
    edges[1] = edges[1].flip(0)


def changed_part(layer, edges):
    layer.mlp = nn.Sequential(nn.Linear(2 * WIDTH + 6, WIDTH)).double()
    nn.init.ones_(layer.mlp[0].weight)
    nn.init.zeros_(layer.mlp[0].bias)


def changed_mode(layer, edges):
    layer.eval()


@pytest.mark.parametrize(
    "change", [changed_number, changed_tensor, changed_in_place, changed_edges, changed_part, changed_mode]
)
def test_calls_that_are_made_again(change, monkeypatch):
    plain, (x, edges, e) = Again().double(), inputs(torch.device("cpu"))
    layer = compare(plain, (x, edges, e))
    made = kept._calls[layer].values()
    assert any(isinstance(call, kept.Kept) and call.used for call in made)
    monkeypatch.setattr(Again.mixed, "__code__", no_code.__code__)
    layer(x, edges, e)
    with pytest.raises(AssertionError, match="was run"):
        layer(x, edges, e, flipped=True)
    monkeypatch.undo()
    for each in (plain, layer):
        change(each, edges if each is layer else edges.clone())
    for _ in range(3):
        for mine, theirs in zip(results(layer, x, edges, e), results(plain, x, edges, e), strict=True):
            if theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
        x = (x.detach() * 1.1).requires_grad_()
    torch.testing.assert_close(layer(x, edges, e, flipped=True), plain(x, edges, e, flipped=True))


class Nearest(Layer):
    """Edges that are made of features."""

    def forward(self, x, edges, e):
        of = (x[:, None] - x).square().sum(-1).topk(3, largest=False).indices
        to = torch.arange(len(x)).repeat_interleave(3)
        m = self.node(x)[of.flatten()] - x[to]
        return total(m, to, len(x))


def test_edges_that_are_made_in_the_call():
    plain, layer = Nearest().double(), gnnaccel.accelerate(Nearest().double())
    layer.load_state_dict(plain.state_dict())
    outs = []  # whose derivatives hold graphs of earlier calls
    for seed in range(6):
        x = torch.randn(NODES, WIDTH, generator=torch.manual_seed(seed)).double().requires_grad_()
        outs.append(layer(x, None, None))
        torch.testing.assert_close(outs[-1], plain(x, None, None))


def test_copies_pickles_and_the_way_back():
    layer, given = gnnaccel.accelerate(Sum().double()), inputs(torch.device("cpu"))
    want = layer(*given)
    assert layer.__class__ is not Sum and layer.__class__.__name__ == "Sum"
    stored = pickle.dumps(layer)
    assert b"gnnaccel" not in stored
    assert type(pickle.loads(stored)) is Sum
    for other in (copy.copy(layer), copy.deepcopy(layer)):
        assert type(other) is type(layer)
        torch.testing.assert_close(other(*given), want)
    torch.save(layer.state_dict(), io.BytesIO())
    gnnaccel.plain.disable()
    assert type(layer) is Sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(device, dtype):
    torch.manual_seed(0)
    plain, given = Sum().to(device).double(), inputs(device)
    low = [t.detach().to(dtype) if t.is_floating_point() else t for t in given]
    out = gnnaccel.accelerate(copy.deepcopy(plain).to(dtype))(*low)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(out.double(), plain(*given), rtol=tolerance, atol=tolerance)


def test_under_autocast(device):
    torch.manual_seed(0)
    plain, given = Sum().to(device), [t.float() if t.is_floating_point() else t for t in inputs(device)]
    layer = gnnaccel.accelerate(copy.deepcopy(plain))
    with torch.autocast(device.type, torch.bfloat16):
        want, out = plain(*given), layer(*given)
    assert out.dtype == want.dtype
    torch.testing.assert_close(out, want, rtol=5e-2, atol=5e-2)
