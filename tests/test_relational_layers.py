"""Layers of both frameworks with a matrix per relation: when they run on our op, when not, and what they refuse."""

import pytest
import torch
from dgl_compare import dgl
from torch_geometric import nn as pyg_nn

import gnnaccel
from gnnaccel import dgl_backend, report

N, E, R, D = 12, 60, 4, 6


@pytest.fixture(autouse=True)
def _counted():
    torch.manual_seed(0)
    report.reset()
    yield
    dgl_backend.disable()


def edges():
    return torch.randint(0, N, (2, E)), torch.randint(0, R, (E,))


def counted(kind):
    row = report.snapshot().get(kind)
    return 0 if row is None else row.accelerated


def compare(conv, *args):
    """The layer as PyG has it against the accelerated one, with the gradients of its parameters."""
    want = conv(*args)
    want_grads = torch.autograd.grad(want.square().sum(), list(conv.parameters()))
    conv = gnnaccel.accelerate(conv)
    report.reset()
    got = conv(*args)
    got_grads = torch.autograd.grad(got.square().sum(), list(conv.parameters()))
    for pair in ((got, want), *zip(got_grads, want_grads, strict=True)):
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)


_OPTIONS = {
    "plain": {},
    "bases": dict(num_bases=3, aggr="add"),
    "blocks": dict(num_blocks=2, is_sorted=True),
    "bare": dict(root_weight=False, bias=False),
}


@pytest.mark.parametrize("options", _OPTIONS)
@pytest.mark.parametrize("name", ["RGCNConv", "FastRGCNConv"])
def test_pyg(name, options):
    index, types = edges()
    layer, options = getattr(pyg_nn, name), _OPTIONS[options]
    compare(layer(D, 4, R + 1, **options), torch.randn(N, D), index, types)
    assert counted(name) + counted(f"pyg.{name}") == 1
    if "num_blocks" not in options:
        compare(layer(N, 4, R, **options), None, index, types)
        compare(layer(20, 4, R, **options), torch.randint(0, 20, (N,)), index, types)
    index[1] %= 5
    compare(layer((D, D), 4, R, **options), (torch.randn(N, D), torch.randn(5, D)), index, types)
    compare(layer(D, 4, R, flow="target_to_source", **options), torch.randn(N, D), index, types)
    compare(layer(D, 4, R, **options), torch.randn(N, D), index[:, :0], types[:0])


class Doubled(pyg_nn.RGCNConv):
    def message(self, x_j, edge_type_ptr):
        return 2 * x_j


@pytest.mark.parametrize("change", ["message", "hook", "two ways to add"])
def test_pyg_layers_that_are_somebodys_own(change):
    index, types = edges()
    conv = (Doubled if change == "message" else pyg_nn.RGCNConv)(
        D, 4, R, aggr=["sum", "max"][:1] if change == "two ways to add" else "mean"
    )
    seen = []
    if change == "hook":
        conv.register_message_forward_hook(lambda *args: seen.append(1))
    compare(conv, torch.randn(N, D), index, types)
    assert not seen or len(seen) == 2 * R


@pytest.mark.parametrize("bad", [-1, R])
def test_relations_out_of_range(bad):
    index, types = edges()
    types[7] = bad
    conv = gnnaccel.accelerate(pyg_nn.RGCNConv(D, 4, R, num_blocks=2))
    assert conv(torch.randn(N, D), index, types).shape == (N, 4)  # PyG leaves the edge out
    if bad == R:
        conv = gnnaccel.accelerate(pyg_nn.FastRGCNConv(D, 4, R, aggr="add"))
        with pytest.raises(IndexError, match=f"got {bad} at edge 7"):
            conv(torch.randn(N, D), index, types)
    dgl_backend.enable()
    conv = dgl.nn.RelGraphConv(D, 4, R)
    given = dgl.graph((index[0], index[1]), num_nodes=N), torch.randn(N, D), types
    if bad == R:
        with pytest.raises(IndexError, match=f"index {bad} is out of bounds"):
            conv(*given)
    else:  # as DGL alone reads it: the last relation
        types = types.clone()
        types[7] = R - 1
        torch.testing.assert_close(conv(*given), conv(*given[:2], types))


@pytest.mark.parametrize(
    "case", ["norm", "norm of the graph", "int32 types", "block", "hook", "subclass", "activation"]
)
def test_dgl(case):
    index, types = edges()
    g, x, norm = dgl.graph((index[0], index[1]), num_nodes=N), torch.randn(N, D), None
    conv = dgl.nn.RelGraphConv(D, 4, R, "basis", 2)
    if case == "norm":
        norm = torch.rand(E, 1)
    elif case == "norm of the graph":
        g.edata["norm"] = torch.rand(E, 1)
    elif case == "int32 types":
        types = types.int()
    elif case == "block":
        destinations = torch.arange(N // 2, N)
        g = dgl.to_block(dgl.in_subgraph(g, destinations), destinations)
        types, x = types[: g.num_edges()], torch.randn(g.num_src_nodes(), D)
    elif case == "hook":
        seen = []
        conv.linear_r.register_forward_hook(lambda *args: seen.append(1))
    elif case == "subclass":

        class Own(dgl.nn.RelGraphConv):
            def message(self, edges):
                return {"m": 2 * super().message(edges)["m"]}

        conv = Own(D, 4, R, "basis", 2)
    elif case == "activation":
        conv = dgl.nn.RelGraphConv(D, 4, R, "bdd", 2, activation=torch.relu, layer_norm=True, bias=False)
    want = conv(g, x, types.long(), norm)  # DGL itself crashes on others
    want_grads = torch.autograd.grad(want.square().sum(), list(conv.parameters()))
    dgl_backend.enable()
    report.reset()
    got = conv(g, x, types, norm)
    got_grads = torch.autograd.grad(got.square().sum(), list(conv.parameters()))
    for pair in ((got, want), *zip(got_grads, want_grads, strict=True)):
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)
    assert counted("dgl.RelGraphConv") == (case not in ("hook", "subclass"))
    assert case != "hook" or len(seen) == 2
