"""What a message may do to lifted features: look at them in any mode, write in place by any spelling, keep them."""

import functools
import operator

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("torch_geometric")
from pyg_compare import D, E, N, edges, rand, same, train
from reached import by_design
from torch.nn.functional import dropout
from torch_geometric import EdgeIndex, nn
from torch_geometric.nn import aggr
from torch_geometric.nn.conv import MessagePassing

from gnnaccel import pyg_backend, report
from gnnaccel.in_place import of_calls
from gnnaccel.pyg_backend import trust as pyg_trust

WIDE = 20  # a message of so many features is not stored unless somebody asks for its rows


class Base(MessagePassing):
    """Its message() is one of the functions below."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.act, self.dropout = F.relu, 0.4

    def forward(self, x, edge_index, ea):
        return self.propagate(edge_index, x=x, ea=ea)


@torch.no_grad()
def size_of(x):
    return x.abs().mean()


def statistic(self, x_j, ea):
    with torch.no_grad():
        k = x_j.std()
    return x_j / k


def decorated(self, x_j, ea):
    return x_j / size_of(x_j + 0)


def inference(self, x_j, ea):
    with torch.inference_mode():
        k = float(x_j.std())
    return x_j / k


def enabled(self, x_j, ea):
    with torch.no_grad():
        y = x_j * 2
        with torch.enable_grad():
            z = x_j * y
    return z


def cast(self, x_j, ea):
    with torch.no_grad():
        y = x_j.to(x_j.dtype).flatten(1).contiguous()
    return y * 2


@pytest.mark.reached
@pytest.mark.parametrize("look", [statistic, decorated, inference, enabled, cast], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["sum", "max"])
def test_looked_at_in_another_mode(look, kind):
    """Rows that were gathered under one grad mode serve no other: the gradient is that of when they were lifted."""
    with by_design(r"(std|mean)\(\) takes one row" if look in (statistic, decorated, inference) else None):
        same(lambda wrap: train(_layer(look, wrap, kind), rand(N, WIDE, grad=True), edges(), rand(E, WIDE)))


def _layer(message, wrap, kind="sum"):
    message.__name__ = "message"  # PyG looks for it by this name
    return wrap(type("Layer", (Base,), {"message": message})(kind))


SEMI = {
    "softmax": lambda: aggr.SoftmaxAggregation(semi_grad=True),
    "learnt": lambda: aggr.SoftmaxAggregation(semi_grad=True, t=0.7),
    "several": lambda: aggr.MultiAggregation([aggr.SoftmaxAggregation(semi_grad=True), "sum", "std"]),
}


@pytest.mark.reached
@pytest.mark.parametrize("name", SEMI)
def test_aggregation_with_no_grad_inside(name):
    same(lambda wrap: train(wrap(nn.SAGEConv(WIDE, 4, aggr=SEMI[name]())), rand(N, WIDE, grad=True), edges()))


def by_argument(self, x_j, ea):
    y = x_j * ea
    return y + F.relu(ea, True)


def by_out(self, x_j, ea):
    y = x_j * ea
    torch.mul(ea, 2, out=ea)
    return y + ea


def by_dunder(self, x_j, ea):
    y = x_j * ea
    ea.__imul__(2)
    return y + ea


def by_operator(self, x_j, ea):
    y = x_j * ea
    operator.iadd(ea, 1)
    return y + ea


def by_getattr(self, x_j, ea):
    y = x_j * ea
    getattr(ea, "mul_")(2)  # noqa: B009
    return y + ea


def by_caller(self, x_j, ea):
    y = x_j * ea
    operator.methodcaller("mul_", 2)(ea)
    return y + ea


def by_attribute(self, x_j, ea):
    y = x_j * ea
    return y + self.act(ea, True)


def by_partial(self, x_j, ea):
    y = x_j * ea
    functools.partial(torch.Tensor.mul_, ea)(2)
    return y + ea


WRITES = {"mul": torch.Tensor.mul_}


def by_table(self, x_j, ea):
    y = x_j * ea
    WRITES["mul"](ea, 2)
    return y + ea


def by_module(self, x_j, ea):
    y = x_j * ea
    return y + torch.nn.ReLU(True)(ea)


def by_data(self, x_j, ea):
    y = x_j * ea
    ea.data = ea * 2
    return y + ea


SPELLINGS = [by_argument, by_out, by_dunder, by_operator, by_getattr, by_caller, by_attribute, by_partial, by_table]
SPELLINGS += [by_module, by_data]


@pytest.mark.parametrize("write", SPELLINGS, ids=lambda f: f.__name__)
def test_written_in_place(write):
    def program(wrap):
        x, ea = rand(N, WIDE), rand(E, WIDE)
        return _layer(write, wrap)(x, edges(), ea), ea

    same(program, kinds={"pyg.Layer segment"})


def test_a_write_that_is_not_recognised():
    """Through something that looks harmless: an error, not a wrong result."""
    held = []

    class Innocent(torch.nn.Identity):
        def forward(self, x):
            held[0].mul_(2)
            return x

    Innocent.__module__ = "torch.nn.modules.linear"

    class Layer(Base):
        def __init__(self):
            super().__init__()
            self.part = Innocent()

        def message(self, x_j, ea):
            y = x_j * ea
            held.append(ea)
            return self.part(y) + y

    with pytest.raises(RuntimeError, match=r"shape \(110, 20\) was written into after a message had been made"):
        pyg_backend.accelerate(Layer())(rand(N, WIDE), edges(), rand(E, WIDE))


@pytest.mark.parametrize("keep", [lambda x: x, lambda x: x.detach(), lambda x: x[:, 2:5], lambda x: x * 2 + 1])
def test_kept_message(keep):
    """What a layer keeps of a message is of the moment it was kept at, whatever becomes of the nodes."""

    class Layer(Base):
        def message(self, x_j, ea):
            self.kept = keep(x_j)
            return x_j

        def update(self, inputs):
            return inputs + self.kept.mean()

    def program(wrap):
        layer, x = wrap(Layer()), rand(N, WIDE, grad=True)
        shown = train(layer, x, edges(), None)
        with torch.no_grad():
            x.zero_()
        return shown, layer.kept * 1

    same(program, accelerated=None)


def test_features_die_with_their_call():
    """Nothing but what somebody keeps is gathered at the end of a call, so all else must be gone by then."""
    layer = pyg_backend.accelerate(nn.ResGatedGraphConv(WIDE, WIDE))
    report.reset()
    layer(rand(N, WIDE, grad=True), edges())
    (site,) = report.snapshot().values()
    assert not site.reasons


def test_pygs_own_layers_are_trusted():
    """So are a user's usual spellings, whose messages are not to be stored."""

    class Usual(Base):
        def __init__(self):
            super().__init__(node_dim=0)
            self.lin = torch.nn.Linear(WIDE, WIDE)

        def message(self, x_i, x_j, ea):
            gate = torch.sigmoid(self.lin(x_i) + F.dropout(F.relu(x_j), p=self.dropout, training=self.training))
            return self.act(gate * x_j) * ea

    layer = pyg_backend.accelerate(Usual())
    report.reset()
    layer.eval()(rand(N, WIDE), edges(), rand(E, 1))
    assert set(report.snapshot()) == {"pyg.Usual"}


class Imported(Base):
    def message(self, x_j):
        return dropout(x_j, self.dropout, self.training)


class InPlace(Base):
    def message(self, x_j):
        return dropout(x_j, self.dropout, self.training, True)


class Held(Base):
    def message(self, x_j):
        return self.act(x_j, self.dropout, self.training, True)


def test_a_number_that_has_the_name_of_a_function():
    """self.dropout is what it is, beside a dropout() of torch's that is called by itself."""
    assert pyg_trust.distrust(Imported()) is None
    assert "dropout() to write in place" in pyg_trust.distrust(InPlace())
    layer = Held()
    layer.act = dropout
    assert "act() to write in place" in pyg_trust.distrust(layer)


CALLS = [
    (lambda self, x: F.relu(F.relu(x * 2 + 1)), True),
    (lambda self, x: F.dropout(x, 0.5, self.training), True),
    (lambda self, x: F.dropout(x, self.dropout, self.training, self.flag), False),
    (lambda self, x: [F.elu(y, 1.0) for y in x], True),
    (lambda self, x: [F.elu(y, 1.0, self.flag) for y in x], False),
    (lambda self, x: (F.relu, x), False),
    (lambda self, x: F.relu(x if x.sum() > 0 else -x), False),  # not understood
    (lambda self, x: self.relu(x, self.flag), True),  # looked at where the attribute is known
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_arguments_that_say_in_place(number):
    function, harmless = CALLS[number]
    assert (of_calls([function.__code__], []) is None) == harmless


@pytest.mark.parametrize("change", ["explain", "decomposed_layers"])
def test_pygs_own_propagate_is_shown(change):
    """PyG tells its general propagate() from generated ones by the module it says it is of."""

    def program(wrap):
        layer, shown = wrap(nn.GCNConv(D, 4)), []
        for value in (2, 1, 2):
            setattr(layer, change, value if change == "decomposed_layers" else value == 2)
            shown.append(layer.propagate.__module__.endswith("message_passing"))
            if change != "explain" or value == 1:
                shown.append(layer(rand(N, D), edges()))
        return shown

    same(program, accelerated=None)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_kept_feature_is_an_ordinary_tensor(mode, tmp_path):
    """Once the call is over: copied, saved and traced as any other."""

    class Layer(Base):
        def message(self, x_j, ea):
            self.kept = x_j * 2
            return self.kept

    layer, x, weight = pyg_backend.accelerate(Layer()), rand(N, WIDE, grad=True), rand(E, WIDE)
    with mode():
        layer(x, edges(), None)
    expected = (x * 2)[edges()[0]]
    assert type(layer.kept) is torch.Tensor and layer.kept.requires_grad == (mode is torch.enable_grad)
    torch.testing.assert_close(layer.kept.detach(), expected.detach())
    torch.save(layer.kept, tmp_path / "kept.pt")
    torch.testing.assert_close(torch.load(tmp_path / "kept.pt"), expected.detach())
    assert layer.kept.detach().numpy().shape == (E, WIDE)
    if mode is torch.enable_grad:
        torch.testing.assert_close(
            *[torch.autograd.grad((kept * weight).sum(), x)[0] for kept in (layer.kept, expected)]
        )
    if mode is torch.no_grad:
        traced = torch.jit.trace(lambda kept: kept + 1, (layer.kept,))
        torch.testing.assert_close(traced(layer.kept), layer.kept + 1)


def test_an_edge_index_in_inference_mode():
    """Self-loops of an EdgeIndex are made anew there: PyG cannot take one apart that was made outside."""

    def program(wrap):
        layer = wrap(nn.SimpleConv(aggr="sum", combine_root="self_loop"))
        index = EdgeIndex(edges(), sparse_size=(N, N))
        with torch.inference_mode():
            return layer(rand(N, D), index), layer(rand(N, D), index)

    same(program, accelerated=None)
