"""User-defined message and reduce functions of DGL on lazy features: as DGL alone, and what is not made on the way."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from dgl_compare import both as compare_both
from dgl_compare import build, dgl, graph, outcome, rand, ring
from torch import nn

from gnnaccel import dgl_backend, report
from gnnaccel.lower import bounds

import dgl.function as fn  # isort: skip  (after the shim)

pytestmark = pytest.mark.usefixtures("dgl_restored")
GRAPHS = ("int64", "int32", "bipartite", "block", "batched", "zero in-degree")
WIDE = 24


def both(name, run, width=WIDE, module=None, tolerance=1e-10):
    """What is counted of `run(graph)`, or run(module, graph), with h and z of sources and destinations, and w and e of
    edges; its results and gradients must be those of DGL alone."""
    g = build(name) if isinstance(name, str) else name
    inputs = [rand(g.num_src_nodes(), width), rand(g.num_dst_nodes(), width, seed=2)]
    inputs += [rand(g.num_edges(), 1, seed=3), rand(g.num_edges(), width, seed=4)]

    def call(*given):
        *first, h, z, w, e = given
        with g.local_scope():
            g.srcdata["h"], g.dstdata["z"], g.edata["w"], g.edata["e"] = h, z, w, e
            return run(*first, g)

    want, got, counted = compare_both(call, inputs, module)
    assert isinstance(want, dict), f"DGL alone fails: {want}"
    assert isinstance(got, dict), got
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}")
    assert got.keys() == want.keys()
    return counted


def reasons(counted, kind) -> str:
    """Why a kind of call was left, "" if none was; a kind that was never counted is an error."""
    return "; ".join(counted[f"dgl.{kind} function"].reasons)


MESSAGES = {
    "relu(u + v) w": lambda edges: {"m": torch.relu(edges.src["h"] + edges.dst["z"]) * edges.data["w"]},
    "GINE": lambda edges: {"m": F.relu(edges.src["h"] + edges.data["e"])},
    "copy": lambda edges: {"m": edges.src["h"]},
    "copy of the destination": lambda edges: {"m": edges.dst["z"]},
    "weighted": lambda edges: {"m": edges.src["h"] * edges.data["w"]},
    "gate": lambda edges: {"m": torch.sigmoid(edges.src["h"] * edges.dst["z"]) * edges.src["h"]},
    "heads": lambda edges: {"m": edges.src["h"].view(-1, 4, 6) * edges.data["w"].unsqueeze(-1)},
    "one number": lambda edges: {"m": (edges.src["h"] - edges.dst["z"]).pow(2).sum(-1)},
    "a dot": lambda edges: {"m": (edges.src["h"] * edges.dst["z"]).sum(-1, keepdim=True)},
    "rsub": lambda edges: {"m": 1 - edges.src["h"]},
    "several": lambda edges: {"other": edges.dst["z"] * 2, "m": edges.src["h"] / (1 + edges.data["w"] ** 2)},
}


@pytest.mark.reached
@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_messages_reduced_by_built_in_functions(name, reduce):
    def run(g):
        g.update_all(MESSAGES[name], getattr(fn, reduce)("m", "o"))
        return g.dstdata["o"]

    for where in GRAPHS if reduce in ("sum", "max") else GRAPHS[:1]:
        assert not reasons(both(where, run), "message")


@pytest.mark.reached
@pytest.mark.parametrize("name", MESSAGES)
def test_apply_edges_stores_what_dgl_stores(name):
    def run(g):
        g.apply_edges(MESSAGES[name])
        assert type(g.edata["m"]) is torch.Tensor
        return dict(g.edata)

    for where in GRAPHS:
        assert not reasons(both(where, run), "message")


def test_what_an_edge_batch_has():
    seen = []

    def message(edges):
        src, dst, ids = edges.edges()
        seen.append((src, dst, ids, len(edges), edges.batch_size(), edges.canonical_etype, len(edges.src)))
        seen.append((sorted(edges.src), sorted(edges.src.keys()), "h" in edges.src, "x" in edges.dst, list(edges.data)))
        seen.append((edges.src["h"].shape, edges.dst["k"], sorted(k for k, _ in edges.src.items())))
        seen.append((edges.src.get("x"), edges.src["h"] is edges.src["h"], edges.src.schemes["h"].shape))
        return {"m": edges.src["h"]}

    g = graph(20, 50)
    g.ndata["h"], g.ndata["k"] = rand(20, WIDE), torch.arange(20)
    g.edata["w"] = rand(50, 1)
    for enable in (dgl_backend.disable, dgl_backend.enable):
        enable()
        g.update_all(message, fn.sum("m", "o"))
        g.ndata.pop("o")
    half = len(seen) // 2
    for got, want in zip(seen[half:], seen[:half], strict=True):
        assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(got, want, strict=True))
    assert report.snapshot()["dgl.message function"].accelerated == 1  # list.append() is looked through
    assert "dtype torch.int64" in reasons(report.snapshot(), "message")  # of k


class Layer(nn.Module):
    """A user's layer, whose message and reduce functions are its methods."""

    def __init__(self):
        super().__init__()
        self.lin, self.out, self.scale = nn.Linear(2 * WIDE, WIDE), nn.Linear(WIDE, 3), 0.5
        self.mlp = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ELU())
        self.own = Gate()

    def message(self, edges):
        return {"m": self.act(self.lin(torch.cat([edges.src["h"], edges.dst["z"]], -1))) * self.scale}

    def act(self, x):
        return F.leaky_relu(x, 0.1)

    def reduce(self, nodes):
        return {"o": self.out(nodes.mailbox["m"].mean(1) + nodes.data["z"])}

    def forward(self, g):
        g.update_all(self.message, self.reduce)
        return g.dstdata["o"]


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(rand(WIDE, seed=9))

    def forward(self, x):
        return torch.sigmoid(x) * self.weight


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, edges):
        return {"m": edges.src["h"] * self.factor}


def _branching(edges):
    if "w" in edges.data and edges.src["h"].shape[1] > 3:
        print("weighted")
        return {"m": edges.src["h"] * edges.data["w"]}
    return {"m": edges.src["h"]}


def _by_partial(factor, edges):
    return {"m": edges.src["h"] * factor}


def test_functions_wherever_they_stand(capsys):
    factor = 3.0

    def closure(edges):
        return {"m": edges.src["h"] * factor + edges.dst["z"]}

    given = {
        "closure": closure,
        "partial": functools.partial(_by_partial, 2.0),
        "object": Scaled(1.5),
        "branches": _branching,
        "nested": lambda edges: {"m": max([edges.src["h"] * k for k in (1.0, 2.0)], key=lambda x: 0)},
    }
    for name, message in given.items():

        def run(g, message=message):
            g.update_all(message, fn.sum("m", "o"))
            return g.dstdata["o"]

        assert not reasons(both("int64", run), "message"), name
    assert capsys.readouterr().out == "weighted\n" * 2  # once without the plug-in, once with it


@pytest.mark.parametrize(
    "message",
    [
        lambda self, edges: {"m": self.own(edges.src["h"])},
        lambda self, edges: {"m": F.relu(self.mlp(edges.src["h"]) + edges.dst["z"])},
        lambda self, edges: {"m": self.act(self.mlp[0](edges.src["h"]))},
    ],
)
def test_modules_in_closures_and_their_submodules(message):
    def run(self, g):
        g.update_all(lambda edges: message(self, edges), fn.sum("m", "o"))
        return g.dstdata["o"]

    assert not reasons(both("int64", run, module=Layer().double()), "message")


def test_methods_of_a_layer():
    for where in ("int64", "bipartite", "zero in-degree"):
        counted = both(where, lambda layer, g: layer(g), module=Layer().double())
        assert not reasons(counted, "message") and not reasons(counted, "reduce")


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class Hooked(nn.Linear):
    def __init__(self):
        super().__init__(WIDE, WIDE)
        self.register_forward_hook(lambda module, args, out: _Square.apply(out))


def _writing(edges):
    out = edges.src["h"] * 1
    out[:, 0] = 0
    return {"m": out}


hooked = Hooked().double()
UNTRUSTED = {
    "in place": (lambda edges: {"m": (edges.src["h"] * 1).add_(1)}, "writes in place"),
    "by subscript": (_writing, "writes in place"),
    "own autograd": (lambda edges: {"m": _Square.apply(edges.src["h"])}, "cannot be looked through"),
    "data of a tensor": (lambda edges: {"m": edges.src["h"] * edges.src["h"].detach().numpy().mean()}, "numpy"),
    "hooks": (lambda edges: {"m": hooked(edges.src["h"])}, "has hooks"),
    "a feature of integers": (lambda edges: {"m": edges.src["n"].double() * 2}, "dtype torch.int64"),
    "edges alone": (lambda edges: {"m": edges.data["e"] * 2}, "reads no node features"),
}


@pytest.mark.parametrize("name", UNTRUSTED)
def test_what_is_left_to_dgl_says_why(name):
    message, why = UNTRUSTED[name]

    def run(g):
        g.srcdata["n"] = torch.arange(g.num_src_nodes())[:, None].repeat(1, WIDE)
        g.update_all(message, fn.sum("m", "o"))
        g.apply_edges(message)
        return g.dstdata["o"], g.edata["m"]

    counted = both("int64", run)
    assert why in reasons(counted, "message")
    assert counted["dgl.message function"].left == 2


def test_wide_rows_that_a_function_needs_are_named():
    def run(g):
        g.update_all(lambda edges: {"m": edges.src["h"].cumsum(0)}, fn.sum("m", "o"))
        return g.dstdata["o"]

    assert reasons(both("int64", run), "message") == "cumsum() takes one row per edge"


def test_other_calls_that_are_dgls():
    def run(g):
        g.apply_edges(lambda edges: {"m": edges.src["h"] * 2}, edges=torch.arange(0, g.num_edges(), 2))
        part = g.edata["m"]
        g.send_and_recv(torch.arange(0, g.num_edges(), 3), MESSAGES["relu(u + v) w"], fn.sum("m", "o"))
        g.pull(torch.arange(0, g.num_dst_nodes(), 2), MESSAGES["GINE"], fn.max("m", "p"))
        return part, g.dstdata["o"], g.dstdata["p"]

    counted = both("int64", run)
    assert reasons(counted, "message") == "some of the edges alone"
    assert counted["dgl.message function"].accelerated == 2  # on the graphs of send_and_recv() and pull()


def test_a_pulled_node_without_edges_has_what_a_maximum_starts_from():
    def run(g):
        g.pull(torch.arange(g.num_dst_nodes()), MESSAGES["gate"], fn.max("m", "p"))
        return g.dstdata["p"]

    both("zero in-degree", run)


def test_an_apply_function_sees_the_result_and_all_features():
    def run(g):
        g.update_all(
            MESSAGES["GINE"], fn.max("m", "o"), lambda nodes: {"o": nodes.data["o"].clamp(min=-9) + nodes.data["z"]}
        )
        return g.dstdata["o"]

    for where in ("int64", "block", "zero in-degree"):
        assert not reasons(both(where, run), "message")


def _errors(call):
    with pytest.raises(Exception) as error:
        call()
    return type(error.value), str(error.value)


@pytest.mark.parametrize(
    "message",
    [
        lambda edges: {"m": edges.src["missing"]},
        lambda edges: {"other": edges.src["h"]},
        lambda edges: edges.src["h"],
        lambda edges: {"m": edges.src["h"] + edges.data["three"]},
        lambda edges: {"m": edges.src["h"][:-1]},
        lambda edges: {"m": 1 / 0},
        lambda edges: {"m": edges.src["h"] @ edges.src["h"]},
    ],
)
def test_errors_are_those_of_dgl(message):
    g = graph(loops=True)
    g.ndata["h"], g.edata["three"] = rand(40, 5), rand(g.num_edges(), 3)
    for call in (lambda: g.update_all(message, fn.sum("m", "o")), lambda: g.apply_edges(message)):
        found = []
        for enable in (dgl_backend.disable, dgl_backend.enable):
            enable()
            try:
                call()
            except Exception as error:
                found.append((type(error), str(error).partition("Stack trace")[0]))  # which has addresses
            else:
                found.append(None)
        assert found[0] == found[1]


def test_a_kept_feature_holds_what_it_held():
    g, kept = graph(loops=True), []

    def message(edges):
        kept.append(edges)
        kept.append(edges.src["h"])
        return {"m": edges.src["h"] * 2}

    dgl_backend.enable()
    x = rand(40, WIDE)
    g.ndata["h"] = x.clone()
    g.update_all(message, fn.sum("m", "o"))
    assert type(kept[1]) is torch.Tensor
    g.ndata["h"].zero_()
    torch.testing.assert_close(kept[1] + 0, x[g.edges()[0]])
    assert type(kept[0].src["h"]) is torch.Tensor  # read after the call, it is what DGL gathers then
    assert not kept[0].src["h"].any()


def test_second_derivatives_of_messages_and_mailboxes():
    g, x = graph(loops=True), rand(40, WIDE)

    def run(h):
        with g.local_scope():
            g.ndata["h"] = h
            g.update_all(lambda edges: {"m": torch.sigmoid(edges.src["h"] * edges.dst["h"])}, fn.sum("m", "o"))
            g.update_all(fn.copy_u("o", "m"), lambda nodes: {"p": (nodes.mailbox["m"] ** 2).mean(1)})
            return g.ndata["p"]

    found = []
    for enable in (dgl_backend.disable, dgl_backend.enable):
        enable()
        h = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(run(h).pow(2).sum(), h, create_graph=True)
        found.append((first.detach(), torch.autograd.grad(first.sin().sum(), h)[0]))
    torch.testing.assert_close(found[1], found[0])


def test_modes_of_dgl_messages():
    """No gradients, inference mode, forward-mode and functorch (DGL's own classes word their error)."""
    g, x = graph(loops=True), rand(40, WIDE)

    def run(h):
        with g.local_scope():
            g.ndata["h"] = h
            g.update_all(lambda edges: {"m": torch.tanh(edges.src["h"] + edges.dst["h"])}, fn.sum("m", "o"))
            return g.ndata["o"]

    dgl_backend.disable()
    want = run(x)
    dgl_backend.enable()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            torch.testing.assert_close(run(x), want)
    site = report.snapshot()["dgl.message function"]
    assert site.accelerated == 2 and not site.left
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda h: run(h).sum())(x)
    assert "torch.func" in reasons(report.snapshot(), "message")


class _Wide(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes ops that make a tensor of more numbers than half of one message per edge."""

    def __init__(self, numbers):
        super().__init__()
        self.most, self.found = numbers // 2, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.numel() > self.most and x.is_floating_point():
                self.found.append(str(func))
        return out


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "mailbox", "softmax", "std"])
def test_no_message_per_edge_is_made(reduce):
    g = graph(30, 3000)
    by_mailbox = {
        "mailbox": lambda nodes: {"o": nodes.mailbox["m"].sum(1)},
        "std": lambda nodes: {"o": (nodes.mailbox["m"] * nodes.mailbox["m"]).mean(1) - nodes.mailbox["m"].mean(1) ** 2},
        "softmax": lambda nodes: {"o": (torch.softmax(nodes.mailbox["s"], 1) * nodes.mailbox["m"]).sum(1)},
    }
    reducer = by_mailbox.get(reduce) or getattr(fn, reduce)("m", "o")

    def message(edges):
        score = (edges.src["h"] * edges.dst["h"]).sum(-1, keepdim=True)
        return {"m": torch.relu(edges.src["h"] + edges.dst["h"]) * edges.data["w"], "s": score}

    dgl_backend.enable()
    x, w = rand(30, 64).requires_grad_(), rand(3000, 1).requires_grad_()
    g.ndata["h"], g.edata["w"] = x, w
    stored = bounds.STORED_BYTES, bounds.STORED_COSTLY_BYTES
    bounds.STORED_BYTES = bounds.STORED_COSTLY_BYTES = {}
    try:
        with _Wide(3000 * 64) as wide:
            g.update_all(message, reducer)
            torch.autograd.grad(g.ndata["o"].sum(), [x, w])
    finally:
        bounds.STORED_BYTES, bounds.STORED_COSTLY_BYTES = stored
    assert not wide.found
    assert not reasons(report.snapshot(), "message")


def test_few_messages_are_dgls(monkeypatch):
    monkeypatch.setattr(bounds, "FEW_MESSAGES", {"cpu": 340 * 4})
    g = graph(loops=True)
    g.ndata["h"] = rand(40, 4)
    dgl_backend.enable()
    for _ in range(2):
        g.update_all(lambda edges: {"m": edges.src["h"] * 2}, fn.sum("m", "o"))
    assert reasons(report.snapshot(), "message").startswith("few messages")
    g.update_all(lambda edges: {"m": edges.src["h"] * 2}, lambda nodes: {"o": nodes.mailbox["m"].sum(1)})
    assert report.snapshot()["dgl.reduce function"].accelerated == 1
    g.ndata["wider"] = rand(40, 5)
    g.update_all(lambda edges: {"m": edges.src["h"] * 2}, fn.sum("m", "o"))
    assert (report.snapshot()["dgl.message function"].accelerated, report.snapshot()["dgl.message function"].left) == (
        2,
        2,
    )


def test_several_edge_types():
    g = ring()

    def run(h):
        with g.local_scope():
            for t in g.ntypes:
                g.nodes[t].data["h"] = h[: g.num_nodes(t)]
            pair = (lambda e: {"m": torch.relu(e.src["h"] - e.dst["h"])}, fn.max("m", "o"))
            g.multi_update_all(dict.fromkeys(g.canonical_etypes, pair), "sum")
            first = {t: g.nodes[t].data["o"] for t in g.ntypes}
            own = (lambda e: {"m": e.src["h"] * 2}, lambda n: {"o": n.mailbox["m"].max(1).values + n.data["h"]})
            g.multi_update_all(dict.fromkeys(g.canonical_etypes, own), "mean")
            g.update_all(*own, etype="plays")
            g.apply_edges(lambda e: {"s": e.src["h"] * e.dst["h"]}, etype="plays")
            return first, {t: g.nodes[t].data["o"] for t in g.ntypes}, g.edges["plays"].data["s"]

    want, got, counted = compare_both(run, [rand(4, WIDE)])
    torch.testing.assert_close(got, want)
    assert not reasons(counted, "message") and not reasons(counted, "reduce")
    with pytest.raises(dgl.DGLError, match="not yet supported"):
        dgl_backend.enable()
        g.apply_edges(lambda e: {"s": e.src["h"]})


def test_a_graph_without_edges_warns_as_in_dgl():
    g = dgl.graph(([], []), num_nodes=3)
    g.ndata["h"] = rand(3, 2)
    dgl_backend.enable()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        g.update_all(lambda edges: {"m": edges.src["h"] * 2}, fn.sum("m", "o"))
    assert any("does not contain valid edges" in str(w.message) for w in caught)
    assert reasons(report.snapshot(), "message") == "a graph without edges"


def test_nan_is_what_dgl_makes_of_it():
    g = graph(loops=True)
    x = rand(40, WIDE)
    x[3, 2] = float("nan")

    def run(h):
        with g.local_scope():
            g.ndata["h"] = h
            g.update_all(lambda edges: {"m": edges.src["h"].exp() + edges.dst["h"] * 0.5}, fn.max("m", "o"))
            return g.ndata["o"]

    want, got, _ = compare_both(run, [x], grad=False)
    torch.testing.assert_close(got, want, equal_nan=True)


def test_outcome_of_float32_and_bfloat16():
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        g, x = build("int64"), rand(build("int64").num_nodes(), WIDE, dtype=dtype)

        def run(h, g=g):
            with g.local_scope():
                g.ndata["h"] = h
                g.update_all(lambda edges: {"m": torch.tanh(edges.src["h"] + edges.dst["h"])}, fn.mean("m", "o"))
                return g.ndata["o"]

        want, got, _ = compare_both(run, [x])
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * 4)
        assert outcome(run, [x], grad=False)["output 0"].dtype == dtype


def test_a_column_that_is_yet_to_be_gathered():
    """A subgraph's features are gathered from the whole graph's when they are read, and not before."""

    def run(g):
        part = dgl.node_subgraph(g, torch.arange(0, g.num_nodes(), 2))
        part.update_all(MESSAGES["relu(u + v) w"], lambda nodes: {"o": nodes.mailbox["m"].sum(1) + nodes.data["z"]})
        if report.snapshot():  # with the plug-in
            assert part._node_frames[0]._columns["k"].index is not None
        return part.ndata["o"]

    def call(g):
        g.ndata["k"] = rand(g.num_nodes(), 3)
        return run(g)

    assert not reasons(both("int64", call), "message")


def test_autocast_on_the_cpu_is_that_of_torch_alone():
    def run(layer, g):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            g.update_all(layer.message, fn.sum("m", "o"))
            return g.dstdata["o"]

    g, layer = build("int64"), Layer()
    h, z = rand(40, WIDE, dtype=torch.float32), rand(40, WIDE, seed=2, dtype=torch.float32)
    found = []
    for enable in (dgl_backend.disable, dgl_backend.enable):
        enable()
        with g.local_scope():
            g.ndata["h"], g.ndata["z"] = h, z
            found.append(run(layer, g).detach())
    assert found[0].dtype == found[1].dtype
    torch.testing.assert_close(found[1], found[0], rtol=3e-2, atol=3e-1)
