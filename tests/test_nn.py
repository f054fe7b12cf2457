"""gnnaccel.nn against the frameworks' layers with the same parameters, in float64: results and gradients."""

import sys

import pytest
import torch
from test_attention import random_graph
from torch_geometric.nn import AGNNConv as PygAGNN
from torch_geometric.nn import GATConv as PygGAT

from gnnaccel import nn
from gnnaccel.ops import reference


def edges_of(graph):
    """The edge_index of a graph, in edge-id order."""
    index = torch.empty(2, graph.nnz, dtype=torch.long)
    index[:, reference.edges_of(graph)] = torch.stack([graph.indices.long(), reference.rows_of(graph.indptr)])
    return index


def compare(graph, ours, theirs, inputs, *, pairs):
    """Same result and gradients, of inputs and of `pairs` of parameters."""
    got = ours(graph, *(t.requires_grad_() for t in inputs))
    grad = torch.randn_like(got)
    got = (got, *torch.autograd.grad(got, [*inputs, *(a for a, _ in pairs)], grad))
    want = theirs(*inputs)
    want = (want, *torch.autograd.grad(want, [*inputs, *(b for _, b in pairs)], grad))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.reshape(b.shape), b, rtol=1e-9, atol=1e-9)


def compare_attention(graph, ours, theirs, inputs, index):
    """The gradients of the vectors that make the scores; those of the edges' map show in the edge features'."""
    grads = []
    for out, vectors in (
        (ours(graph, *inputs), [ours.attention]),
        (theirs(inputs[0], index, *inputs[1:]), [theirs.att_src, theirs.att_dst]),
    ):
        grads.append(torch.cat(torch.autograd.grad(out.sin().sum(), vectors)))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("heads,concat,edge_feats,bias", [(1, True, 0, True), (3, True, 0, False), (2, False, 5, True)])
def test_gat(heads, concat, edge_feats, bias):
    graph = random_graph(30, 30, 300, 0)
    ours = nn.GATConv(6, 4, heads, concat=concat, edge_feats=edge_feats, bias=bias).double()
    theirs = PygGAT(6, 4, heads, concat, add_self_loops=False, edge_dim=edge_feats or None, bias=bias).double()
    state = {"lin.weight": ours.linear.weight, "att_src": ours.attention[:1], "att_dst": ours.attention[1:]}
    state |= {"bias": ours.bias} if bias else {}
    if edge_feats:  # ours is the product of these two
        folded = torch.einsum("hc,hcd->hd", theirs.att_edge[0], theirs.lin_edge.weight.view(heads, 4, edge_feats))
        ours.linear_edge.weight.data.copy_(folded)
        state |= {"att_edge": theirs.att_edge, "lin_edge.weight": theirs.lin_edge.weight}
    theirs.load_state_dict({name: value.detach() for name, value in state.items()})
    inputs = [torch.randn(30, 6, dtype=torch.float64)]
    if edge_feats:
        inputs.append(torch.randn(graph.nnz, edge_feats, dtype=torch.float64))
    pairs = [(ours.linear.weight, theirs.lin.weight)] + ([(ours.bias, theirs.bias)] if bias else [])
    index = edges_of(graph)
    compare_attention(graph, ours, theirs, inputs, index)
    compare(graph, ours, lambda x, *e: theirs(x, index, *e), inputs, pairs=pairs)
    out, weights = ours(graph, *inputs, return_attention=True)
    want, (_, alpha) = theirs(inputs[0], index, *inputs[1:], return_attention_weights=True)
    torch.testing.assert_close((out, weights), (want, alpha))


def test_gat_of_two_sides_and_dropout():
    graph = random_graph(8, 30, 200, 1)
    conv = nn.GATConv((6, 3), 4, 2, dropout=0.5).double()
    x = torch.randn(30, 6, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    torch.manual_seed(0)
    first, other = conv(graph, x), conv(graph, x)
    torch.manual_seed(0)
    assert torch.equal(first, conv(graph, x)) and not torch.equal(first, other)
    _, weights = conv(graph, x, return_attention=True)
    assert 0.3 < float((weights == 0).double().mean()) < 0.7
    mean = sum(conv(graph, x).detach() for _ in range(2000)) / 2000
    conv.eval()
    torch.testing.assert_close(mean, conv(graph, x).detach(), rtol=0, atol=0.15)
    theirs = PygGAT((6, 3), 4, 2, add_self_loops=False).double()
    state = {"lin_src.weight": conv.linear.weight, "lin_dst.weight": conv.linear_target.weight, "bias": conv.bias}
    state |= {"att_src": conv.attention[:1], "att_dst": conv.attention[1:]}
    theirs.load_state_dict({name: value.detach() for name, value in state.items()})
    torch.testing.assert_close(conv(graph, x), theirs(x, edges_of(graph)))


def test_blocks_take_their_first_sources_as_destinations():
    graph = random_graph(8, 30, 200, 1)
    x = torch.randn(30, 6)
    for conv in (nn.GATConv(6, 4, 2), nn.AGNNConv()):
        torch.testing.assert_close(conv(graph, x), conv(graph, (x, x[:8])))


@pytest.mark.parametrize("learn", [True, False])
def test_agnn(learn):
    graph = random_graph(30, 30, 300, 2)
    ours = nn.AGNNConv(0.7, learn).double()
    theirs = PygAGNN(learn, add_self_loops=False).double()
    theirs.beta.data.copy_(ours.beta.detach())
    index = edges_of(graph)
    pairs = [(ours.beta, theirs.beta)] if learn else []
    compare(graph, ours, lambda x: theirs(x, index), [torch.randn(30, 5, dtype=torch.float64)], pairs=pairs)
    assert len(list(ours.parameters())) == learn and "beta" in ours.state_dict()


def test_autocast_of_own_layers():
    graph, x = random_graph(30, 30, 300, 2), torch.randn(30, 6)
    for conv in (nn.GATConv(6, 4, 2), nn.AGNNConv()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = conv(graph, x)
        torch.testing.assert_close(out.float(), conv(graph, x), rtol=0, atol=0.1)


def test_bad_arguments_of_own_layers():
    graph = random_graph(30, 30, 300, 2)
    x = torch.randn(30, 6)
    with pytest.raises(ValueError, match="edge_feats"):
        nn.GATConv(6, 4)(graph, x, torch.randn(300, 2))
    with pytest.raises(ValueError, match="edge_feats"):
        nn.GATConv(6, 4, edge_feats=2)(graph, x)
    with pytest.raises(ValueError, match="300 rows"):
        nn.GATConv(6, 4, edge_feats=2)(graph, x, torch.randn(1, 2))
    with pytest.raises(ValueError, match="pair"):
        nn.GATConv((6, 6), 4)(graph, x)


@pytest.mark.parametrize(
    "make", [nn.AGNNConv, lambda **o: nn.GCNConv(6, 4, relu=True, **o), lambda **o: nn.GCNConv(6, 9, **o)]
)
def test_by_tiles(make, monkeypatch):
    graph = random_graph(30, 30, 300, 2)
    x = torch.randn(30, 6, dtype=torch.float64, requires_grad=True)
    one, other = make().double(), make(kernel="tiled").double()
    other.load_state_dict(one.state_dict())
    gone = []
    for op in ("spmm", "sddmm"):
        module = sys.modules[f"gnnaccel.ops.{op}"]
        tiled = getattr(module, f"{op}_tiled")
        monkeypatch.setattr(
            module, f"{op}_tiled", lambda *a, op=op, tiled=tiled, **o: gone.append(op) or tiled(*a, **o)
        )
    results = []
    for layer in (one, other):
        out = layer(graph, x)
        results.append((out, *torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))))
    torch.testing.assert_close(*results)
    assert gone == (["sddmm", "spmm"] if make is nn.AGNNConv else ["spmm"])
    with pytest.raises(ValueError, match="kernel: expected one of"):
        make(kernel="fast")


def dense_gcn(graph, conv, x, weight):
    """The layer by a dense matrix."""
    rows, edges = reference.rows_of(graph.indptr), reference.edges_of(graph)
    matrix = torch.zeros(graph.num_rows, graph.num_cols, dtype=x.dtype)
    ones = torch.ones(graph.nnz, dtype=x.dtype)
    matrix = matrix.index_put((rows, graph.indices.long()), ones if weight is None else weight[edges], accumulate=True)
    counts = torch.zeros_like(matrix).index_put((rows, graph.indices.long()), ones, accumulate=True)
    left, right = (counts.sum(dim).clamp(min=1).rsqrt() for dim in (1, 0))
    out = (left[:, None] * matrix * right) @ conv.linear(x)
    out = out if conv.bias is None else out + conv.bias
    return out.relu() if conv.relu else out


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"relu": True}])
@pytest.mark.parametrize("sizes", [(6, 4), (4, 6)])
def test_gcn(sizes, options, weighted):
    graph = random_graph(8, 30, 200, 1)
    conv = nn.GCNConv(*sizes, **options).double()
    if conv.bias is not None:
        torch.nn.init.normal_(conv.bias)
    x = torch.randn(30, sizes[0], dtype=torch.float64, requires_grad=True)
    weight = torch.rand(graph.nnz, dtype=torch.float64, requires_grad=True) if weighted else None
    wanted = [x, *conv.parameters(), *([weight] if weighted else [])]
    results = []
    for out in (conv(graph, x, weight), dense_gcn(graph, conv, x, weight)):
        results.append((out, *torch.autograd.grad(out.square().sum(), wanted)))
    torch.testing.assert_close(*results)
