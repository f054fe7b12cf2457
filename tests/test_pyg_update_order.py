"""`accelerate(model, reorder_linear=True)`: which comes first, the linear map or the sum; results stay PyG's."""

import copy

import pytest
import torch
from torch_geometric.nn import GCN, GCNConv, GraphConv, SAGEConv

import gnnaccel
from gnnaccel.ops import linear_sums

NODES, EDGES = 40, 200


def edges():
    torch.manual_seed(1)
    index = torch.randint(NODES, (2, EDGES))
    index[1][index[1] == 7] = 8  # a node without in-edges
    return index


# Layer, whether its input needs a gradient, whether its parts are turned.
CASES = {
    "GCN to more, first layer": (lambda: GCNConv(4, 16), False, True),
    "GCN to more": (lambda: GCNConv(4, 16), True, True),
    "GCN to twice as many, first layer": (lambda: GCNConv(8, 5), False, True),
    "GCN to fewer": (lambda: GCNConv(16, 4), True, False),
    "GCN to as many": (lambda: GCNConv(8, 8), True, False),
    "GCN without norm": (lambda: GCNConv(4, 16, normalize=False, bias=False), True, True),
    "GCN cached": (lambda: GCNConv(4, 16, cached=True), True, True),
    "SAGE to fewer": (lambda: SAGEConv(16, 4), True, True),
    "SAGE to fewer, first layer": (lambda: SAGEConv(16, 4), False, True),
    "SAGE to half, first layer": (lambda: SAGEConv(16, 8), False, False),
    "SAGE to more": (lambda: SAGEConv(4, 16), True, False),
    "SAGE sum, no bias, no root": (lambda: SAGEConv(16, 4, aggr="sum", bias=False, root_weight=False), True, True),
    "SAGE normalized": (lambda: SAGEConv(16, 4, normalize=True), True, True),
    "SAGE max": (lambda: SAGEConv(16, 4, aggr="max"), True, False),
    "SAGE projected": (lambda: SAGEConv(16, 4, project=True), True, False),
    "Graph to fewer": (lambda: GraphConv(16, 4), True, True),
    "Graph mean": (lambda: GraphConv(16, 4, aggr="mean"), True, True),
    "Graph max": (lambda: GraphConv(16, 4, aggr="max"), True, False),
}


def watched(conv, monkeypatch):
    """The widths that its propagate(), or the op that its short forward calls in its place, is given from now on."""
    widths, original, spmm = [], type(conv).propagate, gnnaccel.ops.spmm
    inside = []

    def propagate(self, *args, **kwargs):
        x = kwargs["x"]
        widths.append((x if isinstance(x, torch.Tensor) else x[0]).shape[1])
        inside.append(True)
        out = original(self, *args, **kwargs)
        inside.pop()
        return out

    def op(graph, x, *args, **kwargs):
        if not inside:
            widths.append(x.shape[1])
        return spmm(graph, x, *args, **kwargs)

    def sum_mapped(graph, x, *args):
        widths.append(x.shape[1])
        return mapped(graph, x, *args)

    mapped = linear_sums.sum_mapped
    monkeypatch.setattr(linear_sums, "sum_mapped", sum_mapped)
    monkeypatch.setattr(type(conv), "propagate", propagate)
    monkeypatch.setattr(gnnaccel.ops, "spmm", op)
    return widths


def results(conv, x, *args):
    x = x.clone().requires_grad_(x.requires_grad)
    out = conv(x, *args)
    wanted = [p for p in (x, *conv.parameters()) if p.requires_grad]
    return [out, *torch.autograd.grad((out * torch.arange(1.0, 1 + out.shape[1])).square().sum(), wanted)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("weighted", [False, True])
def test_same_results(name, weighted, monkeypatch):
    make, needs_grad, turned = CASES[name]
    plain = make().double()
    if weighted and not isinstance(plain, (GCNConv, GraphConv)):
        pytest.skip("takes no weights")
    ours = gnnaccel.accelerate(copy.deepcopy(plain), reorder_linear=True)
    width = plain.in_channels if isinstance(plain.in_channels, int) else plain.in_channels[0]
    x = torch.randn(NODES, width, dtype=torch.float64, requires_grad=needs_grad)
    args = (edges(), torch.rand(EDGES, dtype=torch.float64)) if weighted else (edges(),)
    widths = watched(ours, monkeypatch)
    for _ in range(2):
        for got, want in zip(results(ours, x, *args), results(plain, x, *args), strict=True):
            torch.testing.assert_close(got, want)
    first = plain.out_channels if isinstance(plain, GCNConv) else width
    other = width if isinstance(plain, GCNConv) else plain.out_channels
    assert set(widths) == {other if turned else first}


@pytest.mark.parametrize("make", [lambda: SAGEConv(-1, 4), lambda: GraphConv(-1, 4), lambda: GCNConv(-1, 32)])
def test_width_found_in_the_first_call(make, monkeypatch):
    ours = gnnaccel.accelerate(make(), reorder_linear=True)
    widths = watched(ours, monkeypatch)
    x = torch.randn(NODES, 16, requires_grad=True)
    first = ours(x, edges())
    torch.testing.assert_close(ours(x, edges()), first)
    assert len(set(widths)) == 2 and widths[1] == min(widths)


def test_two_sets_of_nodes(monkeypatch):
    plain = SAGEConv((16, 5), 4).double()
    ours = gnnaccel.accelerate(copy.deepcopy(plain), reorder_linear=True)
    widths = watched(ours, monkeypatch)
    x = (torch.randn(NODES, 16, dtype=torch.float64, requires_grad=True), torch.randn(9, 5, dtype=torch.float64))
    index = torch.stack([torch.randint(NODES, (60,)), torch.randint(9, (60,))])
    torch.testing.assert_close(ours(x, index), plain(x, index))
    torch.testing.assert_close(ours((x[0], None), index, size=(NODES, 9)), plain((x[0], None), index, size=(NODES, 9)))
    assert set(widths) == {4}


def test_inference_counts_one_pass(monkeypatch):
    ours = gnnaccel.accelerate(SAGEConv(16, 12), reorder_linear=True)
    widths = watched(ours, monkeypatch)
    x = torch.randn(NODES, 16)
    ours(x, edges())  # forward and backward of 12, or forward alone of 16
    with torch.no_grad():
        ours(x, edges())
    assert widths == [16, 12]


@pytest.mark.parametrize(
    "why", ["not asked", "hook", "message hook", "own message", "autocast", "sparse", "frozen copy"]
)
def test_left_alone(why, monkeypatch):
    class Own(SAGEConv):
        def message(self, x_j):
            return x_j.relu()

    plain = (Own if why == "own message" else SAGEConv)(16, 4)
    ours = gnnaccel.accelerate(copy.deepcopy(plain), reorder_linear=why != "not asked")
    widths = watched(ours, monkeypatch)
    seen = []
    if why == "hook":
        ours.lin_l.register_forward_hook(lambda *args: seen.append(args[1][0].shape))
    if why == "message hook":
        ours.register_propagate_forward_pre_hook(lambda conv, inputs: None)
    x, index = torch.randn(NODES, 16, requires_grad=True), edges()
    if why == "sparse":
        index = torch.sparse_coo_tensor(index.flip(0), torch.ones(EDGES), (NODES, NODES)).coalesce().to_sparse_csr()
    if why == "frozen copy":  # of which nobody said that it may
        ours = gnnaccel.accelerate(SAGEConv(16, 4))
    with torch.autocast("cpu", enabled=why == "autocast"):
        got = ours(x, index)
    if why not in ("autocast", "frozen copy"):
        torch.testing.assert_close(got, plain(x, index))
    assert set(widths) == {16} and (why != "hook" or seen == [(NODES, 16)])


@pytest.mark.parametrize("x", [None, (torch.ones(3, 16),) * 3, [torch.ones(NODES, 16)] * 2, torch.ones(NODES, 5)])
def test_wrong_input_is_pygs_to_refuse(x):
    for make in (lambda: SAGEConv(16, 4), lambda: GraphConv(16, 4), lambda: GCNConv(4, 16)):
        errors = []
        for conv in (make(), gnnaccel.accelerate(make(), reorder_linear=True)):
            try:
                errors.append(conv(x, edges()).shape)
            except Exception as error:
                errors.append(type(error))
        assert errors[0] == errors[1]


def test_copies_may_as_well_and_checkpoints_do_not_know(monkeypatch):
    model = gnnaccel.accelerate(GCN(4, 16, 2), reorder_linear=True)
    other = copy.deepcopy(model)
    assert list(other.state_dict()) == list(GCN(4, 16, 2).state_dict())
    widths = watched(other.convs[0], monkeypatch)
    x = torch.randn(NODES, 4)
    torch.testing.assert_close(other(x, edges()), model(x, edges()))
    assert set(widths) == {4, 16}


def test_the_old_name_of_the_option_is_taken_and_said(monkeypatch):
    with pytest.warns(FutureWarning, match="update_order= is reorder_linear= now"):
        ours = gnnaccel.accelerate(SAGEConv(16, 4), update_order=True)
    widths = watched(ours, monkeypatch)
    ours(torch.randn(NODES, 16), edges())
    assert set(widths) == {4}
