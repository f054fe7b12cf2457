"""Calls of a user's layers that are made again without running their code give what the code would give."""

import copy
import gc
import weakref
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils import scatter, softmax

from gnnaccel import kept, pyg_backend
from gnnaccel.lower import bounds

N, E, WIDTH = 30, 200, 24
FACTOR = 2.0


def tripled(x):
    return x * 3 * FACTOR


class Layer(MessagePassing):
    def __init__(self, aggr="add"):
        super().__init__(aggr=aggr)
        self.lin, self.norm = torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)
        self.weight, self.scale, self.bounds = torch.nn.Parameter(torch.rand(WIDTH)), 0.5, (0.1, 3.0)
        self.shift = torch.rand(WIDTH)

    def forward(self, x, edge_index, w):
        return self.propagate(edge_index, x=x, w=w)


class Gated(Layer):
    def message(self, x_i, x_j, w):
        return torch.sigmoid(x_i + x_j * self.scale) * (x_j + w) * self.weight


class Mapped(Layer):
    def message(self, x_i, x_j):
        return self.norm(F.relu(self.lin(torch.cat([x_i, x_j], -1)[:, ::2])))


class Chained(Layer):
    def __init__(self):
        super().__init__()
        self.maps = torch.nn.Sequential(self.lin, torch.nn.ReLU())

    def message(self, x_i, x_j):
        return self.maps(torch.sigmoid(x_i) * x_j)


class Property(Layer):
    @property
    def factor(self):
        return torch.full((WIDTH,), self.scale)

    def message(self, x_j):
        return torch.exp(x_j * self.factor)


class Default(Layer):
    def message(self, x_j, seen=[]):  # noqa: B006
        seen.append(1)
        return torch.exp(x_j)


class Dropped(Layer):
    def message(self, x_j, w, index, ptr, size_i):
        alpha = softmax(w, index, ptr, size_i)
        return F.dropout(alpha, 0.4, training=self.training) * tripled(x_j)


class Two(Layer):
    def message(self, x_i, x_j):
        gate = torch.sigmoid(x_i - x_j)
        return gate * x_j, gate

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        a, b = (scatter(x, index, 0, dim_size, "sum") for x in inputs)
        return a / (b + 1e-6)


class Branches(Layer):
    def message(self, x_i, x_j):
        out = x_i * x_j if self.scale > 0 else x_j
        return out.clamp(self.bounds[0], self.bounds[1]) + self.shift if x_j.size(-1) > 3 else out

    def update(self, out, x):
        return out + x


class Several(Layer):
    def __init__(self):
        super().__init__(["mean", "max", "std"])

    def message(self, x_i, x_j):
        return torch.relu(x_i + x_j)


class Greatest(Layer):
    def __init__(self):
        super().__init__("max")

    def message(self, x_i, x_j, index, ptr, size_i):
        x = x_j.view(-1, 4, 6)
        alpha = softmax((x * x_i.view(-1, 4, 6)).sum(-1), index, ptr, size_i)
        return (x * alpha.unsqueeze(-1)).flatten(1)


class Distances(Layer):
    """Of self-loops too, where a norm is 0."""

    def message(self, x_i, x_j):
        return x_j * (x_i - x_j).norm(dim=-1, keepdim=True) + F.normalize(x_i + 2 * x_j, dim=-1)


class Twice(Layer):
    """Two results that somebody may write into, or differentiate one by one."""

    def message(self, x_j):
        return torch.exp(x_j)

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return tuple(scatter(inputs, index, 0, dim_size, "sum") for _ in range(2))


class Draws(Layer):
    def message(self, x_j):
        return x_j.exp() * 0.1

    def update(self, out):
        torch.rand(3)  # of which nobody reads anything
        return F.rrelu(out - 2, training=True) - F.rrelu(out - 2, training=True)


class Named(Layer):
    def message(self, x_j):
        return torch.exp(x_j)

    def update(self, out):
        return torch.max(out, dim=-1)


class Asks(Layer):
    def message(self, x_j):
        return torch.exp(x_j) if hasattr(self, "extra") else torch.sigmoid(x_j)


class Keeps(Layer):
    """Weights that somebody differentiates by."""

    def message(self, x_i, x_j, index, ptr, size_i):
        self.alpha = softmax((x_i * x_j).sum(-1, keepdim=True), index, ptr, size_i)
        return self.alpha * x_j


class Reads(Layer):
    def message(self, x_j):
        return x_j * float(x_j.max())


class Sets(Layer):
    def message(self, x_j):
        self.seen = x_j
        return x_j * self.scale + 1


class Counts(Layer):
    calls: ClassVar[list] = []

    def message(self, x_j):
        self.calls.append(1)
        return torch.exp(x_j)


KEPT = (Greatest, Distances, Gated, Mapped, Chained, Dropped, Two, Branches, Several)


def pair(cls):
    torch.manual_seed(0)
    plain = cls()
    ours = pyg_backend.accelerate(copy.deepcopy(plain))
    edges = torch.randint(0, N, (2, E))
    edges[:, :9] = torch.arange(9)
    return plain, ours, edges


def results(layer, edges, seed, grad=True):
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(N, WIDTH, generator=made).requires_grad_()
    w = torch.randn(E, 1, generator=made).requires_grad_()
    torch.manual_seed(seed)
    layer.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(grad):
        out = layer(x, edges, w)
    if not grad:
        return [out]
    out.square().sum().backward()
    return [out.detach(), x.grad, w.grad, *(p.grad for p in layer.parameters())]


def compare(plain, ours, edges, seed, grad=True):
    for got, want in zip(results(ours, edges, seed, grad), results(plain, edges, seed, grad), strict=True):
        if want is None or got is None:
            assert (want is None or not want.any()) and (got is None or not got.any())
        else:
            torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


def kept_of(layer):
    return [found for found in kept._calls.get(layer, {}).values() if isinstance(found, kept.Kept)]


@pytest.mark.parametrize("waits", [0, 17])
@pytest.mark.parametrize("cls", KEPT)
def test_calls_made_again(cls, waits, monkeypatch):
    monkeypatch.setattr(bounds, "WAITS_WITH_ROWS", {"cpu": waits, "cuda": 0})
    plain, ours, edges = pair(cls)
    for seed in range(5):
        compare(plain, ours, edges, seed)
    assert len(kept_of(ours)) == 1
    compare(plain, ours, torch.randint(0, N, (2, E)), 7)  # other edges
    compare(plain, ours, edges, 8, grad=False)
    compare(plain.eval(), ours.eval(), edges, 9)


def no_code(self, *args):
    raise AssertionError("message() was run")


def test_code_is_not_run_again():
    plain, ours, edges = pair(Two)
    for seed in range(3):
        compare(plain, ours, edges, seed)
    code, Two.message.__code__ = Two.message.__code__, no_code.__code__
    try:
        assert torch.isfinite(results(ours, edges, 3)[0]).all()
    finally:
        Two.message.__code__ = code


def replaced_parameter(layer):
    layer.weight = torch.nn.Parameter(torch.full((WIDTH,), 3.0))


def written_parameter(layer):
    layer.weight.data.mul_(2)


def replaced_map(layer):
    torch.manual_seed(5)
    layer.lin = torch.nn.Linear(WIDTH, WIDTH)


def hooked_map(layer):
    layer.lin.register_forward_hook(lambda module, args, out: out * 2)


def smaller_tensor(layer):
    layer.shift.data = torch.full((1,), 2.0)


def other_eps(layer):
    layer.norm.eps = 10.0


def other_part(layer):
    layer.maps[1] = torch.nn.Tanh()


def frozen(layer):
    layer.weight.requires_grad_(False)
    layer.lin.requires_grad_(False)


CHANGES = {
    "number": (Gated, lambda layer: setattr(layer, "scale", -1.5)),
    "branch": (Branches, lambda layer: setattr(layer, "scale", -1.5)),
    "tuple": (Branches, lambda layer: setattr(layer, "bounds", (-0.2, 0.2))),
    "tensor": (Branches, lambda layer: setattr(layer, "shift", torch.ones(WIDTH))),
    "parameter": (Gated, replaced_parameter),
    "parameter in place": (Gated, written_parameter),
    "map": (Mapped, replaced_map),
    "hook": (Mapped, hooked_map),
    "size of a tensor": (Branches, smaller_tensor),
    "option of a module": (Mapped, other_eps),
    "module in a module": (Chained, other_part),
    "frozen": (Gated, frozen),
    "evaluation": (Dropped, lambda layer: layer.eval()),
    "message of the object": (Gated, lambda layer: setattr(layer, "message", lambda x_i, x_j, w: 2 * x_j)),
    "edges to sources": (Gated, lambda layer: setattr(layer, "flow", "target_to_source")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_read_is_compared(name):
    cls, change = CHANGES[name]
    plain, ours, edges = pair(cls)
    for seed in range(3):
        compare(plain, ours, edges, seed)
    assert kept_of(ours)
    for layer in (plain, ours):
        change(layer)
    for seed in range(3, 7):
        compare(plain, ours, edges, seed)


def test_globals_and_methods_of_the_class_are_compared(monkeypatch):
    plain, ours, edges = pair(Dropped)
    for seed in range(3):
        compare(plain, ours, edges, seed)
    assert kept_of(ours)
    monkeypatch.setitem(globals(), "FACTOR", -1.0)
    compare(plain, ours, edges, 3)
    monkeypatch.setitem(globals(), "tripled", lambda x: x - 1)
    compare(plain, ours, edges, 4)
    monkeypatch.setattr(Dropped, "message", lambda self, x_j, w, index, ptr, size_i: x_j.exp())
    compare(plain, ours, edges, 5)


def test_edges_that_are_written_into():
    plain, ours, edges = pair(Gated)
    for seed in range(4):
        compare(plain, ours, edges, seed)
    edges[0] = torch.randint(0, N, (E,))
    for seed in range(4, 8):
        compare(plain, ours, edges, seed)


def test_features_that_are_one_tensor():
    class Ends(Layer):
        def forward(self, x, edge_index, w):
            return self.propagate(edge_index, x=x, y=w)

        def message(self, x_j, y_i):
            return torch.sigmoid(x_j) * y_i + x_j

    plain, ours, edges = pair(Ends)
    for seed in range(6):
        x = torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(seed))
        y = x if seed < 3 else x.flip(0)
        torch.testing.assert_close(ours(x, edges, y), plain(x, edges, y))


@pytest.mark.parametrize("cls", [Reads, Sets, Counts, Property, Default, Asks])
def test_calls_that_code_must_make(cls):
    plain, ours, edges = pair(cls)
    Counts.calls.clear()
    for seed in range(5):
        compare(plain, ours, edges, seed)
    assert not kept_of(ours)
    assert cls is not Counts or len(Counts.calls) == 10


def test_autocast_is_compared():
    plain, ours, edges = pair(Mapped)
    for seed in range(4):
        compare(plain, ours, edges, seed)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        x = torch.randn(N, WIDTH)
        for _ in range(4):
            assert ours(x, edges, None).dtype == plain(x, edges, None).dtype


def test_layers_are_freed():
    _, ours, edges = pair(Gated)
    for seed in range(4):
        results(ours, edges, seed)
    known = weakref.ref(ours)
    del ours
    gc.collect()
    assert known() is None


def test_results_are_apart():
    _, ours, edges = pair(Twice)
    for _ in range(5):
        x = torch.randn(N, WIDTH, requires_grad=True)
        one, other = ours(x, edges, None)
        before = other.detach().clone()
        one.detach().mul_(2)
        torch.testing.assert_close(other, before)


@pytest.mark.parametrize("cls", [Draws, Named])
def test_results_of_each_call(cls):
    plain, ours, edges = pair(cls)
    for seed in range(6):
        x, found = torch.randn(N, WIDTH), []
        for layer in (ours, plain):
            torch.manual_seed(seed)
            out = layer(x, edges, None)
            found.append((*(out if isinstance(out, tuple) else (out,)), torch.rand(2)))
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_an_argument_that_is_an_attribute_too():
    class Own(Layer):
        def message(self, x_j, w):
            return torch.exp(x_j * w) * self.shift

    plain, ours, edges = pair(Own)
    x = torch.randn(N, WIDTH) * 0.1
    for number in range(6):
        for_ours, for_plain = (layer.shift if number < 4 else torch.ones(WIDTH) for layer in (ours, plain))
        torch.testing.assert_close(
            ours.propagate(edges, x=x, w=for_ours), plain.propagate(edges, x=x, w=for_plain), rtol=1e-4, atol=1e-5
        )


def test_calls_on_graphs_that_are_gone():
    """What a recording holds beside its graph, here a tensor that was an attribute, goes when another one is made."""
    _, ours, edges = pair(Branches)
    shift = weakref.ref(ours.shift)
    for _ in range(3):
        results(ours, edges, 0)
    assert len(kept_of(ours)) == 1
    ours.shift = torch.rand(WIDTH)
    del edges
    gc.collect()
    results(ours, torch.randint(0, N, (2, E)), 0)
    assert not kept_of(ours) and shift() is None


@pytest.mark.parametrize("waits", [0, 17])
def test_weights_that_are_kept(waits, monkeypatch):
    monkeypatch.setattr(bounds, "WAITS_WITH_ROWS", {"cpu": waits, "cuda": 0})
    plain, ours, edges = pair(Keeps)
    x = torch.randn(N, WIDTH) * 0.3
    for _ in range(4):
        found = []
        for layer in (ours, plain):
            out = layer(x.clone().requires_grad_(), edges, None)
            found.append(torch.autograd.grad(out.square().sum(), layer.alpha)[0])
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
