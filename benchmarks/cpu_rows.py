"""What cpu_layers.py measures: one row per op or layer, each as the framework alone and as run by gnnaccel.

Frameworks are imported only when one of their rows is built, so either half works without the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Step = Callable[[], tuple[Tensor, tuple[Tensor, ...]]]


@dataclass(frozen=True)
class Case:
    """One graph with its edge features; every row gets the same."""

    name: str
    edge_index: Tensor  # int64 [2, E], sources first
    num_nodes: int
    width: int

    def features(self, *shape: int) -> Tensor:
        """Normal numbers, the same on every call, that ask for a gradient."""
        rng = torch.Generator().manual_seed(7)
        return torch.randn(*shape, generator=rng).requires_grad_()

    @property
    def x(self) -> Tensor:
        return self.features(self.num_nodes, self.width)

    @property
    def distinct(self) -> Tensor:
        """Like x, with no two equal numbers: of equal ones a max may choose either, and frameworks differ."""
        count = self.num_nodes * self.width
        values = torch.randperm(count, generator=torch.Generator().manual_seed(7)).to(torch.float32)
        return (values * 2 - count).view(self.num_nodes, self.width).requires_grad_()

    @property
    def grad_out(self) -> Tensor:
        rng = torch.Generator().manual_seed(8)
        return torch.randn(self.num_nodes, self.width, generator=rng)


@dataclass(frozen=True)
class Side:
    """How one side is run: `switch` untimed before each `step`, which returns (output, gradients)."""

    switch: Callable[[], None]
    step: Step


@dataclass(frozen=True)
class Row:
    """One line of the table. `target` is the wanted ratio of times; None: for information."""

    framework: str
    name: str
    target: float | None
    build: Callable[[Case], tuple[Side, Side]]  # (alone, ours)
    attention: bool = False  # its extra peak memory is measured too

    @property
    def key(self) -> str:
        return f"{self.framework}: {self.name}"


def step_of(forward: Callable[[], Tensor], inputs: list[Tensor], grad_out: Tensor) -> Step:
    def step():
        out = forward()
        return out.detach(), torch.autograd.grad(out, inputs, grad_out)

    return step


# ---- DGL: the same call on both sides, with the plug-in switched off and on ----


def dgl_graph(case: Case):
    from gnnaccel import dgl_backend

    dgl_backend.shim()
    import dgl

    dgl.utils.set_num_threads(torch.get_num_threads())
    graph = dgl.graph((case.edge_index[0], case.edge_index[1]), num_nodes=case.num_nodes)
    graph.create_formats_()  # DGL's own preparation, untimed as ours is
    return dgl, graph


def dgl_sides(step: Step) -> tuple[Side, Side]:
    from gnnaccel import dgl_backend

    return Side(dgl_backend.disable, step), Side(dgl_backend.enable, step)


def _dgl_op(name: str, weighted: bool = False, distinct: bool = False) -> Callable[[Case], tuple[Side, Side]]:
    def build(case: Case):
        dgl, graph = dgl_graph(case)
        x, weight = case.distinct if distinct else case.x, case.features(case.edge_index.shape[1], 1)
        inputs = [x, weight] if weighted else [x]
        # DGL alone sends what comes back to a row without edges, infinite in a max, to node 0.
        grad_out = case.grad_out * (graph.in_degrees() > 0).unsqueeze(1) if distinct else case.grad_out
        # Looked up at each call: enable() replaces the function in its module.
        return dgl_sides(step_of(lambda: getattr(dgl.ops, name)(graph, *inputs), inputs, grad_out))

    return build


def _dgl_softmax(case: Case):
    dgl, graph = dgl_graph(case)
    x, scores = case.x, case.features(case.edge_index.shape[1], 1)

    def forward():
        return dgl.ops.u_mul_e_sum(graph, x, dgl.ops.edge_softmax(graph, scores))

    return dgl_sides(step_of(forward, [x, scores], case.grad_out))


def _dgl_layer(name: str, **options) -> Callable[[Case], tuple[Side, Side]]:
    def build(case: Case):
        _, graph = dgl_graph(case)
        import dgl.nn

        torch.manual_seed(0)
        layer = getattr(dgl.nn, name)(case.width, allow_zero_in_degree=True, **options)
        x = case.x
        return dgl_sides(step_of(lambda: layer(graph, x).flatten(1), [x, *layer.parameters()], case.grad_out))

    return build


# ---- PyG: the plain layer, and a copy of it that was accelerated ----


def _pyg_layer(name: str, csr: bool = False, **options) -> Callable[[Case], tuple[Side, Side]]:
    def build(case: Case):
        from torch_geometric import nn as layers

        from gnnaccel import pyg_backend

        torch.manual_seed(0)
        if name == "GINConv":
            layer = layers.GINConv(torch.nn.Linear(case.width, case.width), **options)
        else:
            layer = getattr(layers, name)(case.width, **options)
        sides = []
        for conv in (layer, pyg_backend.accelerate(copy.deepcopy(layer))):
            # A structure of its own for each, so that neither finds what the other has cached on it.
            edges = _adj_t(case) if csr else case.edge_index.clone()
            sides.append(Side(_nothing, _layer_step(conv, edges, case)))
        return sides[0], sides[1]

    return build


def _nothing() -> None:
    pass


def _layer_step(conv: torch.nn.Module, edges: Tensor, case: Case) -> Step:
    x = case.x
    return step_of(lambda: conv(x, edges), [x, *conv.parameters()], case.grad_out)


def _adj_t(case: Case) -> Tensor:
    """torch.sparse CSR with destinations as rows."""
    from torch_geometric.utils import to_torch_csr_tensor

    return to_torch_csr_tensor(case.edge_index.flip(0), size=(case.num_nodes, case.num_nodes))


def rows(width: int) -> list[Row]:
    """Every row, for layers that are `width` wide (a multiple of four, for the layers with four heads)."""
    head = width // 4
    return [
        Row("DGL", "copy_u_sum", 1.6, _dgl_op("copy_u_sum")),
        Row("DGL", "copy_u_mean", 1.6, _dgl_op("copy_u_mean")),
        Row("DGL", "u_mul_e_sum", 12, _dgl_op("u_mul_e_sum", weighted=True)),
        Row("DGL", "copy_u_max", 2.5, _dgl_op("copy_u_max", distinct=True)),
        Row("DGL", "edge_softmax + u_mul_e_sum", 8, _dgl_softmax, attention=True),
        Row("DGL", f"GATv2Conv 4x{head}", None, _dgl_layer("GATv2Conv", out_feats=head, num_heads=4)),
        Row("DGL", f"GATConv 4x{head}", 8, _dgl_layer("GATConv", out_feats=head, num_heads=4), attention=True),
        Row("DGL", "GraphConv", None, _dgl_layer("GraphConv", out_feats=width)),
        Row("PyG", "GCNConv", 15, _pyg_layer("GCNConv", out_channels=width)),
        # How much of GCNConv's ratio is PyG normalising at every call, which cached=True spares it.
        Row("PyG", "GCNConv cached=True", None, _pyg_layer("GCNConv", out_channels=width, cached=True)),
        Row("PyG", "SAGEConv mean", 8, _pyg_layer("SAGEConv", out_channels=width)),
        Row("PyG", "GINConv", 10, _pyg_layer("GINConv")),
        Row("PyG", f"GATConv 1x{width}", 10, _pyg_layer("GATConv", out_channels=width), attention=True),
        Row("PyG", f"GATConv 4x{head}", 10, _pyg_layer("GATConv", out_channels=head, heads=4), attention=True),
        Row("PyG", f"GATv2Conv 4x{head}", None, _pyg_layer("GATv2Conv", out_channels=head, heads=4)),
        Row("PyG", f"TransformerConv 1x{width}", 12, _pyg_layer("TransformerConv", out_channels=width), attention=True),
        Row("PyG CSR", "GCNConv", 3, _pyg_layer("GCNConv", csr=True, out_channels=width)),
        Row("PyG CSR", "SAGEConv mean", 2, _pyg_layer("SAGEConv", csr=True, out_channels=width)),
        Row("PyG CSR", "GINConv", 2.5, _pyg_layer("GINConv", csr=True)),
    ]
