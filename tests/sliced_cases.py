"""Models for test_pyg_sliced.py: of whose result on a sampled batch the first rows are taken."""

import torch
import torch_geometric as pyg
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, GraphConv, SAGEConv

IN, OUT = 6, 4


class Net(nn.Module):
    """As scripts have it: layers, and something between them."""

    def __init__(self, layer=SAGEConv, width=8, **options):
        super().__init__()
        self.convs = nn.ModuleList(layer(*ends, **options) for ends in ((IN, width), (width, width), (width, OUT)))
        self.norm = nn.Identity()

    def forward(self, x, edge_index):
        for i, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            if i < len(self.convs) - 1:
                x = self.norm(F.relu(x))
        return x


def with_norm(norm, **options):
    net = Net(**options)
    net.norm = norm
    return net


class Reddit(Net):
    def forward(self, x, edge_index):
        for i, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            if i < len(self.convs) - 1:
                x = x.relu_()
                x = F.dropout(x, p=0.5, training=self.training)
        return x


class LookedAt(Net):
    """A result that somebody looks at before it goes on: the noise of a dropout is drawn once all the same."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def forward(self, x, edge_index):
        x = self.convs[0](x, edge_index)
        seen = self.look(x)
        x = F.dropout(x, 0.5, self.training) if seen is not None else x
        return self.convs[2](self.convs[1](x, edge_index), edge_index)


class Skips(Net):
    def forward(self, x, edge_index):
        first = self.convs[0](x, edge_index).relu()
        second = self.convs[1](first, edge_index) * 0.5 + first
        return F.log_softmax(self.convs[2](torch.tanh(second), edge_index), dim=1)


class Written(Net):
    """relu_() of what another step has read before: that keeps what it was given."""

    def forward(self, x, edge_index):
        first = self.convs[0](x, edge_index)
        doubled = first * 2
        second = first.relu_()
        return self.convs[2](self.convs[1](doubled + second + first, edge_index), edge_index)


class Viewed(Net):
    """relu_() of a part of what other steps have read, and of what they read later."""

    def forward(self, x, edge_index):
        first = self.convs[0](x, edge_index)
        doubled = first * 2
        part = first[:, :4]
        tripled = first * 3
        part.relu_()
        return self.convs[2](self.convs[1](doubled + tripled + first, edge_index), edge_index)


class Input(Net):
    def forward(self, x, edge_index):
        x = x - 0.5
        first = self.convs[0](x, edge_index)
        x.relu_()
        return self.convs[2](self.convs[1](first, edge_index), edge_index) + x[:, :OUT]


class Keeps(Net):
    kept = None

    def forward(self, x, edge_index):
        self.kept = self.convs[0](x, edge_index)
        return self.convs[2](self.convs[1](self.kept.relu(), edge_index), edge_index)


class Mean(Net):
    def forward(self, x, edge_index):
        x = self.convs[0](x, edge_index)
        x = x - x.mean(0)
        return self.convs[2](self.convs[1](x, edge_index), edge_index)


class Weighted(Net):
    def forward(self, x, edge_index):
        weight = torch.ones(edge_index.shape[1], device=x.device, dtype=x.dtype)
        x = self.convs[0](x, edge_index, weight)
        return self.convs[2](self.convs[1](x, edge_index), edge_index)


class Ends(Net):
    def forward(self, x, edge_index):
        x = self.convs[0](x, edge_index)
        x = self.convs[1]((x, x), edge_index)
        return self.convs[2](x, edge_index)


class Pooled(Net):
    def forward(self, x, edge_index):
        x = self.convs[0](x, edge_index)
        nodes = torch.arange(x.shape[0], device=x.device) % 3
        x = x + pyg.nn.global_mean_pool(x, nodes)[nodes] + pyg.nn.global_max_pool(x, nodes)[nodes]
        x = x + pyg.utils.scatter(x, nodes, reduce="sum")[nodes]
        return self.convs[2](self.convs[1](x, edge_index), edge_index)


class Switches(Net):
    def forward(self, x, edge_index):
        x = self.convs[0](x, edge_index)
        self.convs[0].normalize = False
        return self.convs[2](self.convs[1](x, edge_index), edge_index)


class Frozen(Net):
    def forward(self, x, edge_index):
        with torch.no_grad():
            x = self.convs[0](x, edge_index)
        return self.convs[2](self.convs[1](x, edge_index), edge_index)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Opaque(Net):
    def forward(self, x, edge_index):
        x = Twice.apply(self.convs[0](x, edge_index))
        return self.convs[2](self.convs[1](x, edge_index), edge_index)


class Pair(Net):
    def forward(self, x, edge_index):
        x = self.convs[0](x, edge_index)
        return [x, self.convs[1](x, edge_index)]


def sage(**options):
    return pyg.nn.GraphSAGE(IN, 8, 3, OUT, **options)


def gat(**options):
    return pyg.nn.GAT(IN, 8, 3, OUT, heads=2, **options)


def of_map(size, width):
    return GINConv(nn.Linear(size, width), eps=0.3, train_eps=True)


def of_norms(size, width):
    return GINConv(nn.Sequential(nn.Linear(size, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, width)))


MODELS = {  # how to make it; True if rows are left out by all layers, False by none, None by some
    "GraphSAGE": (sage, True),
    "GraphSAGE with dropout": (lambda: sage(dropout=0.5), True),
    "GraphSAGE with layer norm": (lambda: sage(norm="layer_norm", norm_kwargs={"mode": "node"}), True),
    "GraphSAGE with a norm of all": (lambda: sage(norm="layer_norm"), None),
    "GraphSAGE with batch norm": (lambda: sage(norm="batch_norm"), None),
    "GraphSAGE with graph norm": (lambda: sage(norm="graph_norm"), None),
    "GraphSAGE with batch norm, evaluating": (lambda: sage(norm="batch_norm").eval(), True),
    "GraphSAGE with jumps": (lambda: sage(jk="cat"), True),
    "GraphSAGE with maxima of jumps": (lambda: sage(jk="max"), False),
    "GraphSAGE, normalized": (lambda: sage(normalize=True), True),
    "GraphSAGE of maxima": (lambda: sage(aggr="max"), True),
    "GraphSAGE, projected": (lambda: sage(project=True), False),
    "GraphSAGE without roots": (lambda: sage(root_weight=False), True),
    "GraphSAGE, other activation": (lambda: sage(act="leaky_relu", act_kwargs={"negative_slope": 0.1}), True),
    "GAT": (gat, True),
    "GAT with dropout": (lambda: gat(dropout=0.5), False),
    "GAT with dropout, evaluating": (lambda: gat(dropout=0.5).eval(), True),
    "GATv2": (lambda: gat(v2=True), True),
    "GCN": (lambda: pyg.nn.GCN(IN, 8, 3, OUT), True),
    "GCN without loops": (lambda: pyg.nn.GCN(IN, 8, 3, OUT, add_self_loops=False), True),
    "GCN, improved": (lambda: pyg.nn.GCN(IN, 8, 3, OUT, improved=True), False),
    "GCN without a norm": (lambda: pyg.nn.GCN(IN, 8, 3, OUT, normalize=False), False),
    "GCN without biases": (lambda: pyg.nn.GCN(IN, 8, 3, OUT, bias=False), True),
    "GIN": (lambda: pyg.nn.GIN(IN, 8, 3, OUT), True),
    "GIN, trained eps": (lambda: pyg.nn.GIN(IN, 8, 3, OUT, train_eps=True), True),
    "GIN with batch norm": (lambda: pyg.nn.GIN(IN, 8, 3, OUT, norm="batch_norm"), False),
    "a script's, of GINConv": (lambda: Net(of_map), True),
    "a script's, of GINConv and norms": (lambda: Net(of_norms), False),
    "a script's, of GINConv and norms, evaluating": (lambda: Net(of_norms).eval(), True),
    "a script's": (Net, True),
    "a script's, of GraphConv": (lambda: Net(GraphConv), True),
    "a script's, of GATConv": (lambda: Net(GATConv, concat=False), True),
    "a script's, of GATv2Conv": (lambda: Net(GATv2Conv, share_weights=True), True),
    "a script's, of GCNConv": (lambda: Net(GCNConv), True),
    "a script's, with batch norm": (lambda: with_norm(nn.BatchNorm1d(8)), None),
    "a script's, with layer norm": (lambda: with_norm(nn.LayerNorm(8)), True),
    "a script's, with a map": (lambda: with_norm(nn.Linear(8, 8)), True),
    "a script's, with a module unknown": (lambda: with_norm(nn.InstanceNorm1d(8)), False),
    "relu_() and dropout": (Reddit, True),
    "looked at, then dropout": (lambda: LookedAt(lambda h: h.mean()), None),
    "a slice of it, then dropout": (lambda: LookedAt(lambda h: h[:3]), None),
    "metadata, then dropout": (lambda: LookedAt(lambda h: h.is_leaf), None),
    "skips": (Skips, True),
    "written into": (Written, True),
    "written into by a view": (Viewed, None),
    "kept": (Keeps, False),
    "a mean of all": (Mean, None),
    "weights": (lambda: Weighted(GraphConv), None),
    "without gradients": (Frozen, True),
    "ends apart": (Ends, None),
    "pooled": (Pooled, None),
    "a layer switched behind its call": (Switches, False),
    "an autograd function": (Opaque, False),
}
