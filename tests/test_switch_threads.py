"""install() and uninstall() while another thread trains: a call that runs finishes on the side where it began."""

import sys
import threading

import pytest
import torch

pytest.importorskip("torch_geometric")
from torch_geometric import nn

import gnnaccel
from gnnaccel import pyg_backend

CALLS = 150
N, E, D = 24, 90, 8


def pyg_model():
    torch.manual_seed(0)
    return torch.nn.ModuleList(
        [nn.GATConv(D, 4, 2), nn.GATv2Conv(D, 4, 2), nn.TransformerConv(D, 4, 2), nn.GCNConv(D, D), nn.SAGEConv(D, D)]
    ).double()


def edge_index():
    return torch.randint(0, N, (2, E), generator=torch.Generator().manual_seed(1))


def trained(layers, *graph):
    """Output and gradients of all layers in turn, each of which keeps the width."""
    x = torch.linspace(-1, 1, N * D, dtype=torch.float64).view(N, D).requires_grad_()
    out = x
    for layer in layers:
        out = layer(*graph, out).flatten(1) if graph and not isinstance(graph[0], torch.Tensor) else layer(out, *graph)
    for parameter in layers.parameters():
        parameter.grad = None
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layers.parameters())]


def while_toggled(toggle, program, want):
    """Run `program` over and over while `toggle` runs in another thread."""
    stop, failed = threading.Event(), []

    def turn():
        try:
            while not stop.is_set():
                toggle()
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads take turns in the middle of calls
    thread = threading.Thread(target=turn)
    thread.start()
    try:
        for _ in range(CALLS):
            torch.testing.assert_close(program(), want)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not failed


def test_pyg_layers():
    index = edge_index()
    layers = pyg_model()
    want = trained(layers, index)

    def toggle():
        gnnaccel.install()
        pyg_backend.accelerate(layers)
        gnnaccel.uninstall()

    try:
        while_toggled(toggle, lambda: trained(layers, index), want)
    finally:
        gnnaccel.uninstall()
    assert all("_gnnaccel_plain" not in vars(type(layer)) for layer in layers)
    torch.testing.assert_close(trained(layers, index), want)


def test_dgl_layers():
    gnnaccel.install(compat_only=True)
    dgl = pytest.importorskip("dgl")
    from dgl.nn import AGNNConv, GATConv, GATv2Conv, GraphConv

    gnnaccel.uninstall()
    graph = dgl.add_self_loop(dgl.graph(tuple(edge_index()), num_nodes=N))
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([GATConv(D, 4, 2), GATv2Conv(D, 4, 2), GraphConv(D, D), AGNNConv()]).double()
    want = trained(layers, graph)

    def toggle():
        gnnaccel.install()
        gnnaccel.uninstall()

    try:
        while_toggled(toggle, lambda: trained(layers, graph), want)
    finally:
        gnnaccel.uninstall()
    torch.testing.assert_close(trained(layers, graph), want)
