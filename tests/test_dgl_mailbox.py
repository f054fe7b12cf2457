"""User-defined reduce functions: those that reduce the mailbox of each node run as that, others DGL's way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dgl_compare import build, dgl, graph, rand
from reached import by_design
from test_dgl_messages import WIDE, both, reasons
from torch import nn

from gnnaccel import dgl_backend, report

import dgl.function as fn  # isort: skip  (after the shim)

pytestmark = pytest.mark.usefixtures("dgl_restored")
GRAPHS = ("int64", "bipartite", "block", "zero in-degree")


def _message(edges):
    score = (edges.src["h"] * edges.dst["z"]).sum(-1)
    return {"m": torch.tanh(edges.src["h"] - edges.dst["z"]), "s": score, "c": edges.src["h"]}


def _unpacked(nodes):
    values, _ = torch.max(nodes.mailbox["m"], 1)
    return {"o": values}


def _two_results(nodes):
    return {"o": nodes.mailbox["m"].sum(1), "p": F.relu(nodes.data["z"]) * 2, "q": nodes.mailbox["s"].mean(1)}


def _attention(nodes):
    alpha = F.softmax(F.leaky_relu(nodes.mailbox["s"]), dim=1).unsqueeze(-1)
    return {"o": torch.sum(alpha * nodes.mailbox["c"], dim=1)}


def _heads(nodes):
    alpha = torch.softmax(nodes.mailbox["s"].unsqueeze(-1), 1)
    return {"o": (alpha.unsqueeze(-1) * nodes.mailbox["c"].unsqueeze(2)).sum(1)}


def _deviation(nodes):
    mean = nodes.mailbox["m"].mean(1, keepdim=True)
    return {"o": ((nodes.mailbox["m"] - mean) ** 2).mean(1)}


def _by_degree(nodes):
    degree = nodes.mailbox["m"].shape[1]
    return {"o": nodes.mailbox["m"].sum(1) / (degree + 1) ** 0.5 * np.log(degree + 1)}


REDUCES = {
    "sum": lambda nodes: {"o": nodes.mailbox["m"].sum(1)},
    "sum, by dim": lambda nodes: {"o": torch.sum(nodes.mailbox["m"], dim=1)},
    "sum, by axis": lambda nodes: {"o": nodes.mailbox["m"].sum(axis=1)},
    "sum, from the end": lambda nodes: {"o": nodes.mailbox["m"].sum(-2)},
    "sum of numbers": lambda nodes: {"o": nodes.mailbox["s"].sum(-1)},
    "sum, kept": lambda nodes: {"o": nodes.mailbox["m"].sum(1, keepdim=True).squeeze(1)},
    "mean": lambda nodes: {"o": torch.mean(nodes.mailbox["m"], 1)},
    "max, by index": lambda nodes: {"o": nodes.mailbox["m"].max(1)[0]},
    "max, by name": lambda nodes: {"o": nodes.mailbox["m"].max(dim=1).values},
    "max, unpacked": _unpacked,
    "min": lambda nodes: {"o": torch.min(nodes.mailbox["m"], dim=1)[0]},
    "amax and amin": lambda nodes: {"o": nodes.mailbox["m"].amax(1) - torch.amin(nodes.mailbox["m"], dim=1)},
    "of copies": lambda nodes: {"o": nodes.mailbox["c"].mean(1)},
    "beside node data": lambda nodes: {"o": nodes.data["z"] * 0.5 + nodes.mailbox["m"].sum(1)},
    "concatenated": lambda nodes: {"o": torch.cat([nodes.data["z"], nodes.mailbox["m"].mean(dim=1)], dim=-1)},
    "of each message": lambda nodes: {"o": torch.sigmoid(nodes.mailbox["m"] * 2).sum(1)},
    "part of each": lambda nodes: {"o": nodes.mailbox["m"][:, :, :3].sum(1)},
    "over features first": lambda nodes: {"o": nodes.mailbox["m"].sum(-1).max(1)[0]},
    "beside the node": lambda nodes: {"o": (nodes.mailbox["m"] - nodes.data["z"].unsqueeze(1)).relu().sum(1)},
    "two results": _two_results,
    "attention": _attention,
    "attention of heads": _heads,
    "deviation": _deviation,
    "rsub": lambda nodes: {"o": 1 - nodes.mailbox["m"].sum(1)},
    "data alone": lambda nodes: {"o": nodes.data["z"] + 1},
}


@pytest.mark.reached
@pytest.mark.parametrize("name", REDUCES)
def test_reductions_of_the_mailbox(name):
    def run(g):
        g.update_all(_message, REDUCES[name])
        return {key: g.dstdata[key] for key in "opq" if key in g.dstdata}

    for where in GRAPHS:
        with by_design(r"__getitem__\(\) takes one row" if name == "part of each" else None, some=True):
            counted = both(where, run)
        assert not reasons(counted, "reduce")
        assert counted["dgl.reduce function"].accelerated == 1


@pytest.mark.reached
@pytest.mark.parametrize("message", ["copy_u", "copy_e", "u_add_v", "u_mul_e", "v_sub_u", "u_dot_v", "e_div_v"])
def test_built_in_messages_in_a_mailbox(message):
    fields = {"u": "h", "v": "z", "e": "e"}
    parts = message.split("_")
    used = [fields[parts[1]]] if parts[0] == "copy" else [fields[parts[0]], fields[parts[2]]]

    def run(g):
        g.update_all(getattr(fn, message)(*used, "m"), lambda nodes: {"o": nodes.mailbox["m"].mean(1)})
        return g.dstdata["o"]

    for where in GRAPHS:
        assert not reasons(both(where, run), "reduce")


def test_messages_that_dgl_makes_are_reduced_all_the_same():
    def run(g):
        g.update_all(lambda edges: {"m": (edges.src["h"] * 1).mul_(2)}, lambda nodes: {"o": nodes.mailbox["m"].sum(1)})
        return g.dstdata["o"]

    counted = both("int64", run)
    assert "writes in place" in reasons(counted, "message")
    assert not reasons(counted, "reduce")


def _in_a_loop(nodes):
    out = nodes.mailbox["m"][:, 0]
    for k in range(1, nodes.mailbox["m"].shape[1]):
        out = out * 0.5 + nodes.mailbox["m"][:, k]
    return {"o": out}


def _branching(nodes):
    if nodes.mailbox["m"].shape[1] > 4:
        return {"o": nodes.mailbox["m"].sum(1)}
    return {"o": nodes.mailbox["m"].mean(1)}


def _which(nodes):
    values, where = nodes.mailbox["m"].max(1)
    return {"o": values, "p": where.double()}


LEFT = {
    "sort": (lambda nodes: {"o": nodes.mailbox["m"].sort(1)[0][:, 0]}, "sort() of a mailbox"),
    "median": (lambda nodes: {"o": nodes.mailbox["m"].median(1)[0]}, "median() of a mailbox"),
    "prod": (lambda nodes: {"o": nodes.mailbox["m"].prod(1)}, "prod() of a mailbox"),
    "where the maximum is": (_which, "where in the mailbox"),
    "a loop": (_in_a_loop, "__getitem__() of a mailbox"),
    "a branch": (_branching, "branches on the number of messages"),
    "of all nodes": (lambda nodes: {"o": nodes.mailbox["m"].sum(1) - nodes.data["z"].mean(0)}, "nodes together"),
    "of everything": (lambda nodes: {"o": nodes.mailbox["m"].sum(1) / nodes.mailbox["m"].max()}, "max() of a mailbox"),
    "node ids": (lambda nodes: {"o": nodes.mailbox["m"].sum(1) + nodes.nodes()[:, None]}, "which nodes"),
    "how many nodes": (lambda nodes: {"o": nodes.mailbox["m"].sum(1) + torch.ones(len(nodes), 1)}, "how many nodes"),
    "integers": (lambda nodes: {"o": nodes.mailbox["m"].sum(1) + nodes.data["n"].double().mean()}, "of torch.int64"),
    "in place": (lambda nodes: {"o": nodes.mailbox["m"].sum(1).mul_(2)}, "writes in place"),
    "a branch on values": (
        lambda nodes: {"o": nodes.data["z"] if nodes.mailbox["m"].sum(1).sum() > 0 else -nodes.data["z"]},
        "nodes together",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_dgl_says_why(name):
    function, why = LEFT[name]

    def run(g):
        g.dstdata["n"] = torch.arange(g.num_dst_nodes())
        g.update_all(_message, function)
        return {key: g.dstdata[key] for key in "op" if key in g.dstdata}

    for where in ("int64", "zero in-degree"):
        counted = both(where, run)
        assert why in reasons(counted, "reduce")
        assert counted["dgl.reduce function"].left == 1


def test_a_number_of_messages_that_is_reckoned_with():
    """NumPy cannot be looked through, but in DGL's own layers; torch alone can."""

    def run(g):
        g.update_all(_message, _by_degree)
        return g.dstdata["o"]

    assert "numpy" in reasons(both("int64", run), "reduce")

    def by_torch(nodes):
        degree = nodes.mailbox["m"].size(1)
        return {"o": nodes.mailbox["m"].sum(1) / (degree + 1) ** 0.5 + nodes.data["z"] * (2 / degree)}

    def run_torch(g):
        g.update_all(_message, by_torch)
        return g.dstdata["o"]

    for where in GRAPHS:
        assert not reasons(both(where, run_torch), "reduce")


def test_a_number_of_messages_keeps_the_dtype_of_messages():
    g, found = graph(loops=True), []
    g.ndata["h"] = rand(40, 3, dtype=torch.float32)
    for enable in (dgl_backend.disable, dgl_backend.enable):
        enable()
        g.update_all(
            fn.copy_u("h", "m"), lambda nodes: {"o": (nodes.mailbox["m"] * nodes.mailbox["m"].shape[1]).sum(1)}
        )
        found.append(g.ndata["o"])
    torch.testing.assert_close(found[1], found[0])
    assert report.snapshot()["dgl.reduce function"].accelerated == 1


def test_a_function_that_is_refused_is_tried_once():
    calls = []

    def median(nodes):
        calls.append(1)
        return {"o": nodes.mailbox["m"].median(1)[0]}

    g = graph(loops=True)
    g.ndata["h"], buckets = rand(40, 3), len(graph(loops=True).in_degrees().unique())
    dgl_backend.enable()
    for _ in range(2):
        g.update_all(fn.copy_u("h", "m"), median)
    assert len(calls) == 1 + 2 * buckets
    assert report.snapshot()["dgl.reduce function"].left == 2


def test_random_numbers_are_those_of_dgl():
    def noisy(nodes):
        return {"o": F.dropout(nodes.data["z"], 0.5) + nodes.mailbox["m"].median(1)[0]}

    def run(g):
        g.update_all(_message, noisy)
        return g.dstdata["o"], torch.rand(3)

    assert reasons(both("int64", run), "reduce")


class Tower(nn.Module):
    def __init__(self, reduction):
        super().__init__()
        self.reduction, self.out = reduction, nn.Linear(WIDE, 3)

    def reduce(self, nodes):
        found = {"sum": torch.sum(nodes.mailbox["m"], 1)} if self.reduction == "sum" else {}
        found = found or {"first": nodes.mailbox["m"][:, 0]}
        return {"o": self.out(found[self.reduction])}

    def forward(self, g):
        g.update_all(_message, self.reduce)
        return g.dstdata["o"]


def test_methods_are_refused_by_object():
    for reduction, why in (("first", "of a mailbox"), ("sum", "")):
        counted = both("int64", lambda tower, g: tower(g), module=Tower(reduction).double())
        assert why in reasons(counted, "reduce") and bool(why) == bool(reasons(counted, "reduce"))


@pytest.mark.parametrize(
    "function",
    [
        lambda nodes: {"o": nodes.mailbox["missing"].sum(1)},
        lambda nodes: {"o": nodes.data["missing"]},
        lambda nodes: {"o": nodes.mailbox["m"].sum(1) + torch.ones(7)},
        lambda nodes: {"o": nodes.mailbox["m"]},
        lambda nodes: nodes.mailbox["m"].sum(1),
        lambda nodes: {"o": math.log(-1)},
    ],
)
def test_errors_are_those_of_dgl(function):
    g, found = graph(loops=True), []
    g.ndata["h"] = rand(40, 5)
    for enable in (dgl_backend.disable, dgl_backend.enable):
        enable()
        with pytest.raises(Exception) as error:
            g.update_all(fn.copy_u("h", "m"), function)
        found.append((error.type, str(error.value)))
    assert found[0] == found[1]


def test_an_initializer_fills_nodes_without_messages():
    g = build("zero in-degree")

    def run(h):
        with g.local_scope():
            g.ndata["h"] = h
            g.set_n_initializer(dgl.init.zero_initializer)
            g.set_n_initializer(lambda shape, dtype, ctx, ids: torch.full(shape, 7.0, dtype=dtype), "o")
            g.update_all(fn.copy_u("h", "m"), lambda nodes: {"o": nodes.mailbox["m"].sum(1)})
            return g.ndata["o"]

    dgl_backend.disable()
    want = run(rand(30, 3))
    dgl_backend.enable()
    torch.testing.assert_close(run(rand(30, 3)), want)
    assert (want == 7).any()


def test_integers_and_float_sums_of_one_graph():
    g = graph(loops=True)
    g.ndata["n"], g.ndata["h"] = torch.arange(40)[:, None], rand(40, 3)
    dgl_backend.enable()
    total = lambda nodes: {"o": nodes.mailbox["m"].sum(1)}  # noqa: E731
    g.update_all(lambda edges: {"m": edges.src["n"]}, total)
    assert g.ndata["o"].dtype == torch.int64
    g.update_all(fn.copy_u("h", "m"), total)
    site = report.snapshot()["dgl.reduce function"]
    assert (site.accelerated, site.left) == (1, 1)
