"""Few messages are left to PyG's own propagate()."""

import copy
import warnings

import pytest
import torch
from torch_geometric import nn

from gnnaccel import pyg_backend, report
from gnnaccel.lower import bounds, choose
from gnnaccel.pyg_backend import propagate

N, E, D = 12, 40, 6


def graph(edges=E, dtype=torch.long):
    return torch.randint(0, N, (2, edges), generator=torch.Generator().manual_seed(1)).to(dtype)


def reasons():
    return {reason for site in report.snapshot().values() for reason in site.reasons}


def features(device):
    x = torch.randn(N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return x.to(device).requires_grad_()


def both(layer, edge_index):
    x = features(edge_index.device)
    out = layer(x, edge_index)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()], allow_unused=True)]


class Mine(nn.ResGatedGraphConv):
    def message(self, k_i, q_j, v_j, edge_attr):
        return (k_i + q_j).tanh() * v_j


# layer, edges, the devices on which they are left to PyG
CASES = {
    "stored": (lambda: nn.CGConv(D), graph(), "cpu cuda"),
    "on the CPU": (lambda: nn.FiLMConv(D, D), graph(), "cpu"),
    "gated sum": (lambda: nn.ResGatedGraphConv(D, D), graph(), ""),
    "mean": (lambda: nn.CGConv(D, aggr="mean"), graph(), "cpu cuda"),
    "many": (lambda: nn.CGConv(D), graph(50 * E), ""),
    "int32": (lambda: nn.CGConv(D), graph(dtype=torch.int32), ""),
    "mine": (lambda: Mine(D, D), graph(), "cuda"),
    "product": (lambda: nn.GINConv(nn.MLP([D, D, D], norm=None)), graph(), ""),
    "attention": (lambda: nn.GATv2Conv(D, D), graph(), ""),
}


@pytest.mark.parametrize("name", CASES)
def test_few_messages(name, device, monkeypatch):
    make, edge_index, where = CASES[name]
    monkeypatch.setattr(bounds, "FEW_MESSAGES", dict.fromkeys(("cpu", "cuda"), E * D))
    plain, edge_index = make().double().to(device), edge_index.to(device)
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    want = both(plain, edge_index.long())
    for _ in range(2):
        report.reset()
        got = both(layer, edge_index)
        assert (propagate.FEW in reasons()) == (device.type in where)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    report.reset()
    both(layer, graph(50 * E).to(device))  # more of them: the layer's messages are reduced by our kernels again
    assert propagate.FEW not in reasons()


def test_order_that_somebody_asked_for(device, monkeypatch):
    monkeypatch.setattr(bounds, "FEW_MESSAGES", dict.fromkeys(("cpu", "cuda"), E * D))
    layer = pyg_backend.accelerate(nn.CGConv(D).double().to(device))
    torch.use_deterministic_algorithms(True)
    report.reset()
    both(layer, graph().to(device))
    assert (propagate.FEW in reasons()) == (device.type == "cpu")


# layer, its call -> left to PyG where its messages are few for others than those that are stored anyway
OTHERS = {
    "own message": (lambda: Mine(D, D), lambda layer, x, e: layer(x, e), True),
    "aggregation": (lambda: nn.SAGEConv(D, D, "std"), lambda layer, x, e: layer(x, e), True),
    "edge update": (lambda: nn.FAConv(D), lambda layer, x, e: layer(x, x, e), True),
    "module in a message": (lambda: nn.EdgeConv(torch.nn.Linear(2 * D, D)), lambda layer, x, e: layer(x, e), True),
    "stacks": (lambda: nn.ARMAConv(D, D // 2, 2), lambda layer, x, e: layer(x, e), False),
    "plain sum": (lambda: nn.GatedGraphConv(D, 2), lambda layer, x, e: layer(x, e), False),
    "attention": (lambda: nn.TransformerConv(D, D, beta=True), lambda layer, x, e: layer(x, e), False),
    "attention of edges": (lambda: nn.TransformerConv(D, D, edge_dim=1), lambda m, x, e: m(x, e, x[e[0], :1]), True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_few_messages_of_others(name, device, monkeypatch):
    make, call, left = OTHERS[name]
    few = (E + N) * D // 2  # twice as many on the CPU where rows are short; FAConv adds loops
    counts = bounds.COUNTS_UPDATED
    monkeypatch.setattr(bounds, "FEW_MESSAGES", {"cpu": counts["cpu"] * few, "cuda": 2 * counts["cuda"] * few})
    plain = make().double().to(device)
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    x = features(device)
    for edge_index, expected in ((graph().to(device), left), (graph(50 * E).to(device), False)):
        found = []
        for each in (plain, layer):
            report.reset()
            out = call(each, x, edge_index)
            found.append([out, *torch.autograd.grad(out.square().sum(), [x, *each.parameters()], allow_unused=True)])
        assert (propagate.FEW in reasons()) == expected
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def perceptron():
    return torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.ReLU(), torch.nn.Linear(D, D))


# layer, its edge features and whether these have gradients, how many numbers each of a message counts by device
SHORT = {
    "gates": (lambda: nn.ResGatedGraphConv(D, D), None, {"cpu": 8}),
    "gates, wider": (lambda: nn.ResGatedGraphConv(D, 3 * D), None, {"cpu": 24}),
    "GINE": (lambda: nn.GINEConv(perceptron()), False, {"cpu": 16, "cuda": 0.5}),
    "GINE, edges with gradients": (lambda: nn.GINEConv(perceptron()), True, {"cpu": 1, "cuda": 0.5}),
    "GINE, a map of edges": (lambda: nn.GINEConv(perceptron(), edge_dim=D), False, {"cpu": 1, "cuda": 0.5}),
    "GEN": (lambda: nn.GENConv(D, D), None, {"cpu": 1, "cuda": 4}),
    "GEN, edges": (lambda: nn.GENConv(D, D), False, {"cpu": 1, "cuda": 4}),
    "LE": (lambda: nn.LEConv(D, D), None, {"cpu": 1}),
}


@pytest.mark.parametrize("name", SHORT)
def test_few_messages_of_forwards_of_ours(name, device, monkeypatch):
    make, graded, counts = SHORT[name]
    plain, edge_index = make().double().to(device), graph().to(device)
    x, more = features(device), ()
    if graded is not None:
        more = (x.detach()[edge_index[0]].requires_grad_(graded),)
    numbers = (
        counts.get(device.type, 1) * E * D / (2 if device.type == "cpu" else 1)
    )  # twice as many where rows are short
    for few, left in ((numbers, True), (numbers - 0.5, False)):
        monkeypatch.setattr(bounds, "FEW_MESSAGES", {device.type: few})
        layer = pyg_backend.accelerate(copy.deepcopy(plain))
        for _ in range(2):
            found = []
            for each in (plain, layer):
                report.reset()
                out = each(x, edge_index, *more)
                leaves = [x, *each.parameters(), *(t for t in more if t.requires_grad)]
                found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
            assert (propagate.FEW in reasons()) == (left and device.type in counts)
            for want, got in zip(*found, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


# layer, whether one like the last call goes to PyG at once
AT_ONCE = {
    "module in a message": (lambda: nn.EdgeConv(torch.nn.Linear(2 * D, D)), True),
    "aggregation": (lambda: nn.SAGEConv(D, D, "std"), True),
    "loops remembered": (lambda: nn.FAConv(D), False),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_calls_alike(name, device, monkeypatch):
    """What is asked for a call is not asked again for one like it, and is for any other."""
    make, expected = AT_ONCE[name]
    plain = make().double().to(device)
    layer, edge_index, asked = pyg_backend.accelerate(copy.deepcopy(plain)), graph().to(device), []
    monkeypatch.setattr(bounds, "FEW_MESSAGES", dict.fromkeys(("cpu", "cuda"), 100 * E * D))
    are_few = propagate.are_few
    monkeypatch.setattr(propagate, "are_few", lambda *given: asked.append(1) or are_few(*given))

    def call(rows=N, edges=edge_index):
        x = features(device)[:rows]
        asked.clear()
        outs = [each(*(x,) * (2 if name == "loops remembered" else 1), edges) for each in (plain, layer)]
        torch.testing.assert_close(outs[1], outs[0], rtol=1e-9, atol=1e-9)
        return bool(asked)

    call()
    assert call() == (not expected)
    if expected:
        report.reset()
        assert not call() and reasons() == {propagate.FEW}
        assert call(N - 1, graph().to(device) % (N - 1)) and call(edges=graph(E - 1).to(device))
        assert call() and not call()
        monkeypatch.setattr(bounds, "FEW_MESSAGES", {})
        assert call() and call()  # many: ours
        monkeypatch.setattr(bounds, "FEW_MESSAGES", dict.fromkeys(("cpu", "cuda"), 100 * E * D))
        call()
        torch.use_deterministic_algorithms(True)
        assert call()


def test_other_calls_in_between(monkeypatch):
    monkeypatch.setattr(bounds, "FEW_MESSAGES", {"cpu": 100 * E * D})
    layer, x = pyg_backend.accelerate(nn.SAGEConv(D, D, "std").double()), features("cpu")
    for dtype in (torch.long, torch.long, torch.int32, torch.int32, torch.long):
        report.reset()
        layer(x, graph(dtype=dtype))
        assert (propagate.FEW in reasons()) == (dtype == torch.long)


def test_calls_alike_but_for_gradients(monkeypatch):
    """Of edges without gradients more messages are few."""
    monkeypatch.setattr(bounds, "FEW_MESSAGES", {"cpu": E * D})
    layer, x, edge_index = (
        pyg_backend.accelerate(nn.GINEConv(perceptron(), edge_dim=D).double()),
        features("cpu"),
        graph(),
    )
    attributes = x.detach()[edge_index[0]]
    for training in (False, True, True, False, False, True):
        report.reset()
        with torch.set_grad_enabled(training):
            layer(x, edge_index, attributes)
        assert (propagate.FEW in reasons()) == training


class Keywords(nn.MessagePassing):
    """Whose arguments have names that are ours elsewhere."""

    def forward(self, x, edge_index, function=2, conv=3, why=5):
        return self.propagate(edge_index, x=x, function=function, conv=conv, why=why)

    def message(self, x_i, x_j, function, conv, why):
        return (x_i * function - x_j * conv).tanh() * why


def test_names_of_arguments(monkeypatch):
    monkeypatch.setattr(bounds, "FEW_MESSAGES", {"cpu": 100 * E * D})
    plain, x = Keywords(), features("cpu")
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    for given in ({}, {"function": 7}, {"function": 7}, {"function": 7, "conv": 1, "why": 2}):
        for _ in range(2):
            torch.testing.assert_close(layer(x, graph(), **given), plain(x, graph(), **given))


def test_reasons_that_come_before(monkeypatch):
    monkeypatch.setattr(bounds, "FEW_MESSAGES", {"cpu": 100 * E * D})
    plain, x, edge_index = nn.EdgeConv(torch.nn.Linear(2 * D, D)).double(), features("cpu"), graph()
    layer = pyg_backend.accelerate(copy.deepcopy(plain))

    def why(call):
        report.reset()
        torch.testing.assert_close(call(layer), call(plain))
        assert propagate.FEW not in reasons()
        return reasons()

    for _ in range(2):
        layer(x, edge_index)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        warnings.filterwarnings(
            "ignore", category=torch.jit.TracerWarning, module="torch_geometric|torch.jit|/tmp|torch_"
        )
        assert why(lambda each: torch.jit.trace(each, (x, edge_index), check_trace=False)(x, edge_index)) == {
            "torch.jit.trace"
        }
    (transform,) = why(lambda each: torch.func.jvp(lambda x: each(x, edge_index), (x,), (x,))[1])
    assert "torch.func" in transform
    for each in (plain, layer):
        each.register_message_forward_hook(lambda module, given, out: out * 2)
    assert why(lambda each: each(x, edge_index)) == {propagate._HOOKED}


KINDS = [("a", "to", "b"), ("b", "from", "a")]
TYPED = {
    "RGAT": (lambda: nn.RGATConv(D, D, 3, heads=2), lambda e, x, t, a: (x, e, t), {"cpu": 2 * D, "cuda": D / 2}),
    "HEAT": (
        lambda: nn.HEATConv(D, D, 3, 3, 4, 2, 2, heads=2),
        lambda e, x, t, a: (x, e, t[:N], t, a),
        {"cpu": 4, "cuda": 0.5},
    ),
    "HGT": (lambda: nn.HGTConv(D, D, (["a", "b"], KINDS), heads=2), None, {"cpu": 16}),
}


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", TYPED)
def test_few_edges_of_several_types(name, many, device, monkeypatch):
    """Of HGTConv where somebody watches a part of it, or all is one op."""
    make, arguments, times = TYPED[name]
    edges, counts = E * (2 if name == "HGT" else 1), times.get(device.type)
    monkeypatch.setattr(bounds, "FEW_MESSAGES", {device.type: edges * D * (counts or 1) - many})
    plain, ends = make().double().to(device), graph().to(device)
    layer, found = pyg_backend.accelerate(copy.deepcopy(plain)), []
    if name == "HGT":
        layer.out_lin.register_forward_hook(lambda *_: None)
    for each in (plain, layer):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(N, D, dtype=torch.float64, generator=generator).to(device).requires_grad_()
        types = torch.randint(0, 3, (E,), generator=generator).to(device)
        attributes = torch.randn(E, 2, dtype=torch.float64, generator=generator).to(device)
        report.reset()
        if arguments is None:
            out = torch.cat(list(each({"a": x, "b": x * 2}, dict.fromkeys(KINDS, ends)).values()))
        else:
            out = each(*arguments(ends, x, types, attributes))
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, *each.parameters()], allow_unused=True)])
    assert (propagate.FEW in reasons()) == (not many and counts is not None)
    torch.testing.assert_close(*[[each for each in part if each is not None] for part in found])


@pytest.mark.parametrize("edges, nodes, few", [(80, 10, False), (40, 10, True), (80, 20, True), (81, 20, False)])
def test_short_rows(edges, nodes, few, monkeypatch):
    """Twice as many messages are few where a node has four edges at most, on the CPU."""
    monkeypatch.setattr(bounds, "FEW_MESSAGES", {"cpu": 320, "cuda": 320})
    assert choose.are_few(device="cpu", edges=edges, nodes=nodes, width=8) == few
    assert choose.are_few(device="cuda", edges=edges, nodes=nodes, width=8) == (edges == 40)
