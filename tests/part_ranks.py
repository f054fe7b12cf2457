"""Programs for the ranks of test_distributed*.py: ``python part_ranks.py PROGRAM ARGUMENTS``."""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_geometric import nn as pyg
from torch_geometric.data import Data
from torch_geometric.nn.conv import MessagePassing

import gnnaccel
from gnnaccel import data, distributed, nn, ops

MODELS = {"gcn": pyg.GCN, "sage": pyg.GraphSAGE, "gin": pyg.GIN, "gat": pyg.GAT}


def whole(name: str, dtype: torch.dtype) -> Data:
    """A graph as one process has it."""
    found = data.load(name)
    x = torch.from_numpy(found.x).to(dtype)
    arrays = {key: torch.from_numpy(getattr(found, key)) for key in ("edge_index", "y", "train_mask", "test_mask")}
    return Data(x=x / x.abs().sum(1, keepdim=True).clamp(min=1e-9), **arrays)


def model_of(kind: str, num_features: int, num_classes: int, dtype: torch.dtype, norm: str | None = None):
    """A model with its parameters from one seed."""
    torch.manual_seed(0)
    sizes = {"in_channels": num_features, "hidden_channels": 16, "num_layers": 2, "out_channels": num_classes}
    return MODELS[kind](**sizes, norm=norm).to(dtype)


def train(model, graph, mean, epochs: int) -> list[float]:
    """Losses of the first steps."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4), []
    for _ in range(epochs):
        logits = model(graph.x, graph.edge_index)
        loss = mean(F.cross_entropy(logits[graph.train_mask], graph.y[graph.train_mask], reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def training(folder: str, out: str, device: str, dtype: str, epochs: str, *kinds: str) -> None:
    """Losses and results of models, each "KIND" or "KIND-batch_norm"; rank 0 writes them."""
    part, kept = distributed.load(folder, device=device, timeout_s=120), {}
    for kind in kinds:
        name, _, norm = kind.partition("-")
        model = model_of(name, part.num_features, part.num_classes, getattr(torch, dtype), norm or None)
        if part.rank:  # what wrap() is for: others' parameters do not count
            torch.nn.init.zeros_(next(model.parameters()))
        model = distributed.wrap(model.to(part.device), part)
        losses = train(model, part, part.mean, int(epochs))
        model.eval()
        with torch.no_grad():
            logits = part.gather(model(part.x, part.edge_index))
        state = {key: value.cpu() for key, value in model.state_dict().items()}
        kept[kind] = {"losses": losses, "logits": logits, "state": state}
    if part.rank == 0:
        torch.save(kept, out)


class Mine(MessagePassing):
    """A user's layer that takes pairs."""

    def __init__(self):
        super().__init__(aggr="max")
        self.lin = torch.nn.Linear(6, 5)

    def forward(self, x, edge_index):
        if isinstance(x, torch.Tensor):
            x = (x, x)
        return self.lin(x[1])[:, :1] + self.propagate(edge_index, x=(self.lin(x[0]), x[1]))

    def message(self, x_j):
        return x_j.tanh()


class Doubled(pyg.SAGEConv):
    """A user's own message in a layer of PyG's."""

    def message(self, x_j):
        return 2 * x_j.relu()


class DoubledGCN(pyg.GCNConv):
    """The same of one that runs on parts as a whole alone."""

    def message(self, x_j, edge_weight):
        return 2 * edge_weight.view(-1, 1) * x_j


def _mlp():
    return pyg.MLP([6, 7, 5])


LAYERS = {
    "gcn": lambda: pyg.GCNConv(6, 5),
    "gcn weights": lambda: pyg.GCNConv(6, 5, cached=True),
    "gcn no loops": lambda: pyg.GCNConv(6, 5, add_self_loops=False, bias=False),
    "gcn no norm weights": lambda: pyg.GCNConv(6, 5, normalize=False),
    "sg": lambda: pyg.SGConv(6, 5, K=2),
    "ssg weights": lambda: pyg.SSGConv(6, 5, alpha=0.1, K=2),
    "tag weights": lambda: pyg.TAGConv(6, 5, K=2),
    "appnp": lambda: pyg.APPNP(K=3, alpha=0.2),
    "lg": lambda: pyg.LGConv(),
    "sage": lambda: pyg.SAGEConv(6, 5),
    "sage max": lambda: pyg.SAGEConv(6, 5, aggr="max", normalize=True),
    "sage project": lambda: pyg.SAGEConv(6, 5, aggr=["min", "std"], project=True),
    "graph weights": lambda: pyg.GraphConv(6, 5),
    "gin": lambda: pyg.GINConv(_mlp(), train_eps=True),
    "gine attributes": lambda: pyg.GINEConv(_mlp(), edge_dim=3),
    "gat": lambda: pyg.GATConv(6, 5, heads=2),
    "gat attributes": lambda: pyg.GATConv(6, 5, heads=2, concat=False, edge_dim=3, residual=True),
    "gatv2 attributes": lambda: pyg.GATv2Conv(6, 5, heads=2, edge_dim=3, fill_value="mean"),
    "gatv2": lambda: pyg.GATv2Conv(6, 5, share_weights=True),
    "transformer attributes": lambda: pyg.TransformerConv(6, 5, heads=2, beta=True, edge_dim=3),
    "resgated": lambda: pyg.ResGatedGraphConv(6, 5),
    "gen": lambda: pyg.GENConv(6, 5),
    "general": lambda: pyg.GeneralConv(6, 5, attention=True, heads=2),
    "le weights": lambda: pyg.LEConv(6, 5),
    "mf": lambda: pyg.MFConv(6, 5),
    "film": lambda: pyg.FiLMConv(6, 5),
    "cg attributes": lambda: pyg.CGConv(6, dim=3, batch_norm=True),
    "edge": lambda: pyg.EdgeConv(pyg.MLP([12, 7, 5])),
    "feast": lambda: pyg.FeaStConv(6, 5, heads=2),
    "nn attributes": lambda: pyg.NNConv(6, 5, pyg.MLP([3, 30], norm=None)),
    "simple weights": lambda: pyg.SimpleConv(aggr="mean", combine_root="sum"),
    "wl weights": lambda: pyg.WLConvContinuous(),
    "mine": Mine,
    "doubled": lambda: Doubled(6, 5),
    "jumping": lambda: pyg.GraphSAGE(6, 8, 3, 5, norm="batch_norm", jk="cat"),
    "layer norm": lambda: pyg.GAT(6, 8, 2, 5, heads=2, norm=pyg.LayerNorm(8, mode="node")),
}


def small_graph() -> Data:
    """Directed, with loops, repeated edges, and nodes without any."""
    torch.manual_seed(1)
    edges = torch.randint(0, 50, (2, 260))
    edges = torch.cat([edges, edges[:, :20], torch.arange(6).repeat(2, 1)], 1)
    count = edges.shape[1]
    return Data(
        x=torch.randn(56, 6, dtype=torch.float64),
        edge_index=edges,
        edge_weight=torch.rand(count, dtype=torch.float64),
        edge_attr=torch.randn(count, 3, dtype=torch.float64),
        factor=torch.randn(56, 1, dtype=torch.float64),
        num_nodes=56,
    )


def _call(model, graph, x, name: str):
    extra = {"weights": graph.edge_weight, "attributes": graph.edge_attr}.get(name.split()[-1])
    return model(x, graph.edge_index) if extra is None else model(x, graph.edge_index, extra)


def _same_gradients(name: str, plain, ours) -> None:
    for (key, theirs), mine in zip(plain.named_parameters(), ours.parameters(), strict=True):
        _close(f"{name} {key}", mine.grad, theirs.grad)


def _close(name: str, got, want) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11, msg=lambda message: f"{name}: {message}")


def layers(folder: str) -> None:
    """Each layer on parts against the whole graph, which each rank has too: results, and gradients of all inputs."""
    part, graph = distributed.load(folder, device="cpu", timeout_s=120), small_graph()
    for name, make in LAYERS.items():
        torch.manual_seed(2)
        plain = make().double()
        ours = distributed.wrap(copy.deepcopy(plain), part, pairs=(Mine,))
        x, own = (g.x.clone().requires_grad_() for g in (graph, part))
        want, got = _call(plain, graph, x, name), _call(ours, part, own, name)
        _close(name, got, want[part.own])
        for _ in range(2):  # the second is added
            for out, g, total in ((want, graph, torch.sum), (got, part, part.sum)):
                total(out.tanh() * g.factor).backward()
            want, got = _call(plain, graph, x, name), _call(ours, part, own, name)
        _close(name, own.grad, x.grad[part.own])
        _same_gradients(name, plain, ours)
        # The part's own features, whose halo is kept: nothing of a first layer is sent.
        plain.zero_grad()
        ours.zero_grad()
        want, got = _call(plain, graph, graph.x, name), _call(ours, part, part.x, name)
        _close(name, got, want[part.own])
        if got.requires_grad:
            for out, g, total in ((want, graph, torch.sum), (got, part, part.sum)):
                total(out.tanh() * g.factor).backward()
        _same_gradients(name, plain, ours)
        for (key, theirs), mine in zip(plain.named_buffers(), ours.buffers(), strict=True):
            _close(f"{name} {key}", mine, theirs)
    print("agrees")


NN_LAYERS = {
    "gcn": lambda: nn.GCNConv(6, 5, relu=True),
    "gcn widens": lambda: nn.GCNConv(6, 9),
    "gcn weights": lambda: nn.GCNConv(6, 5),
    "gcn tiled": lambda: nn.GCNConv(6, 5, kernel="tiled"),
    "sage": lambda: nn.SAGEConv(6, 5),
    "sage widens weights": lambda: nn.SAGEConv(6, 9, root=False),
    "gin": lambda: nn.GINConv(torch.nn.Linear(6, 5), learn_eps=True),
    "gat": lambda: nn.GATConv(6, 5, heads=2),
    "gat attributes": lambda: nn.GATConv(6, 5, heads=2, edge_feats=3, concat=False),
    "agnn": nn.AGNNConv,
    "GCN": lambda: nn.GCN(6, 8, 3, norm=True),
    "GraphSAGE": lambda: nn.GraphSAGE(6, 8, 3),
    "GIN": lambda: nn.GIN(6, 8, 3),
}


def nn_layers(folder: str) -> None:
    """Layers of gnnaccel.nn, and an op in a program of its own, on parts against the whole graph."""
    part, whole = distributed.load(folder, device="cpu", timeout_s=120), small_graph()
    sources, destinations = whole.edge_index
    graph = gnnaccel.Graph.from_coo(destinations, sources, num_rows=56, num_cols=56)

    def call(model, graph, x, data, name):
        extra = {"weights": data.edge_weight, "attributes": data.edge_attr}.get(name.split()[-1])
        return model(graph, x) if extra is None else model(graph, x, extra)

    for name, make in NN_LAYERS.items():
        torch.manual_seed(2)
        plain = make().double()
        ours = distributed.wrap(copy.deepcopy(plain), part)
        for kept in (False, True):
            x, own = (d.x if kept else d.x.clone().requires_grad_() for d in (whole, part))
            plain.zero_grad()
            ours.zero_grad()
            want, got = call(plain, graph, x, whole, name), call(ours, part.graph, own, part, name)
            _close(name, got, want[part.own])
            (want.tanh() * whole.factor).sum().backward()
            part.sum(got.tanh() * part.factor).backward()
            _same_gradients(name, plain, ours)
            if not kept:
                _close(name, own.grad, x.grad[part.own])
    # Without wrap(): an op, or a layer, with the rows that exchange() gives.
    x, own = (d.x.clone().requires_grad_() for d in (whole, part))
    layer = nn.GCNConv(6, 5).double()
    for run in (lambda graph, x: ops.spmm(graph, x, reduce="max"), layer):
        want, got = run(graph, x), run(part.graph, part.exchange(own))
        _close("plain", got, want[part.own])
        want.tanh().sum().backward()
        got.tanh().sum().backward()
        _close("plain", own.grad, x.grad[part.own])
    ours = distributed.wrap(nn.GraphSAGE(6, 8, 3).double(), part)
    for said, arguments in (
        ("graph: expected that of the part", (graph, part.x)),
        ("got Tensor", (part.edge_index, part.x)),
        ("rows of this part's nodes, got shape", (part.graph, part.x[:7])),
    ):
        try:
            ours(*arguments)
        except ValueError as error:
            assert said in str(error), error
        else:
            raise AssertionError(said)
    print("agrees")


def details(folder: str) -> None:
    """What the exchange keeps, rounds and counts; what copies and refused calls do."""
    part, graph = distributed.load(folder, device="cpu", timeout_s=120), small_graph()
    every = torch.cat([part.own, part.halo])
    assert torch.equal(part.exchange(part.x), graph.x[every])
    sent = part.exchange.rows_sent
    for _ in range(3):
        assert torch.equal(part.with_halo(part.x), graph.x[every])
    assert part.exchange.rows_sent == sent + part.exchange.send.numel(), "features that do not change are sent once"
    part.x.mul_(2)
    assert torch.equal(part.with_halo(part.x), 2 * graph.x[every]), "but for writes into them"
    assert torch.equal(part.exchange(part.own), every), "integers too"
    assert part.num_edges == part.edge_index.shape[1] and torch.equal(
        every[part.edge_index], graph.edge_index[:, part.edge_ids]
    )
    assert torch.equal(part.edge_attr, graph.edge_attr[part.edge_ids])
    gathered = part.gather(part.factor)
    assert gathered is None if part.rank else torch.equal(gathered, graph.factor)

    rounded = distributed.load(folder, device="cpu", wire=torch.bfloat16)
    x = graph.x.float()[part.own]
    got = rounded.exchange(x)
    assert torch.equal(got[: part.num_nodes], x)
    assert torch.equal(got[part.num_nodes :], graph.x.float()[part.halo].bfloat16().float())

    model = distributed.wrap(pyg.GraphSAGE(6, 4, 2, 3).double(), part)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(part.x, part.edge_index), model(part.x, part.edge_index))
    model.zero_grad()
    loss = part.mean(model(part.x, part.edge_index))
    local = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    for grad, parameter in zip(local, model.parameters(), strict=True):
        total = grad.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(parameter.grad, total)
    for wrong, arguments in (
        ("other edges", (part.x, graph.edge_index)),
        ("rows of this part's nodes", (graph.x, part.edge_index)),
        ("a tuple", ((part.x, part.x), part.edge_index)),
    ):
        try:
            model(*arguments)
        except (ValueError, TypeError, AttributeError) as error:
            assert wrong in str(error), error
        else:
            raise AssertionError(wrong)
    parallel = torch.nn.parallel.DistributedDataParallel(twin)
    try:
        parallel(part.x, part.edge_index)
    except RuntimeError as error:
        assert "DistributedDataParallel" in str(error)
    else:
        raise AssertionError("DistributedDataParallel")
    print("agrees")


def apart(folder: str) -> None:
    """Nothing is sent, and everything goes on."""
    part = distributed.load(folder, device="cpu", timeout_s=60)
    for make in (LAYERS["gcn"], LAYERS["sage"], LAYERS["gat"], LAYERS["gin"], LAYERS["sage max"]):
        model = distributed.wrap(make().double(), part)
        own = part.x.clone().requires_grad_()
        part.mean(model(own, part.edge_index)).backward()
        assert own.grad.isfinite().all() and all(p.grad.isfinite().all() for p in model.parameters())
    assert part.exchange.rows_sent == 0


def refused(folder: str) -> None:
    """Models that wrap() does not take; nothing of them is changed."""
    part = distributed.load(folder, device="cpu", timeout_s=120)
    for said, model in (
        ("ChebConv, whose messages are not known", pyg.ChebConv(6, 5, 2)),
        (
            "convs.0 is a PNAConv",
            pyg.PNA(6, 4, 1, 5, aggregators=["mean"], scalers=["identity"], deg=torch.ones(9).long()),
        ),
        ("Mine, whose messages are not known", torch.nn.Sequential(Mine())),
        ("DoubledGCN, whose messages are not known", DoubledGCN(6, 5)),
        ("target_to_source", pyg.SAGEConv(6, 5, flow="target_to_source")),
        ("GraphNorm, which may read more", torch.nn.ModuleList([pyg.GCNConv(6, 5), pyg.GraphNorm(5)])),
        ("over the whole graph", torch.nn.ModuleList([pyg.GCNConv(6, 5), pyg.LayerNorm(5)])),
        ("BatchNorm2d, not known", torch.nn.ModuleList([pyg.GCNConv(6, 5), torch.nn.BatchNorm2d(5)])),
        ("found none", torch.nn.Linear(6, 5)),
        ("acts.0 is a MaxK, which is not known on parts", nn.GCN(6, 8, 3, maxk=2)),
        ("has no shape yet", pyg.GCNConv(-1, 5)),
    ):
        try:
            distributed.wrap(model, part)
        except (TypeError, ValueError) as error:
            assert said in str(error), (said, str(error))
        else:
            raise AssertionError(said)
        assert not any("forward" in vars(module) for module in model.modules())
    model = distributed.wrap(pyg.GCNConv(6, 5, improved=True).double(), part)
    for said, call in (
        ("wrapped before", lambda: distributed.wrap(model, part)),
        ("improved=True", lambda: model(part.x, part.edge_index)),
        ("expected what gnnaccel.distributed.load gives", lambda: distributed.wrap(model, part.edge_index)),
    ):
        try:
            call()
        except (TypeError, ValueError) as error:
            assert said in str(error), (said, str(error))
        else:
            raise AssertionError(said)
    print("agrees")


def without_features(folder: str) -> None:
    """What a script asks for that the graph was not partitioned with."""
    part = distributed.load(folder, device="cpu", timeout_s=60)
    for ask in (lambda: part.x, lambda: part.num_features, lambda: part.num_node_features):
        try:
            ask()
        except AttributeError as error:
            assert "this part has no 'x': its data are label, which is" in str(error), error
            assert "partition(..., nodes={'x': ...})" in str(error), error
        else:
            raise AssertionError("x")
    print("agrees")


def dgl_graph(folder: str) -> None:
    """A part of a DGLGraph, whose layers are refused in words."""
    gnnaccel.install()
    import dgl

    part = distributed.load(folder, device="cpu", timeout_s=60)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), dgl.nn.GraphConv(4, 5))
    try:
        distributed.wrap(model, part)
    except TypeError as error:
        assert "1 is a GraphConv of DGL's, which takes a DGLGraph, and a part is none" in str(error), error
    else:
        raise AssertionError("GraphConv")
    ours = distributed.wrap(nn.SAGEConv(part.num_features, part.num_classes), part)
    logits = ours(part.graph, part.feat)
    part.mean(F.cross_entropy(logits[part.train_mask], part.label[part.train_mask], reduction="none")).backward()
    gathered = part.gather(part.feat)
    assert (part.num_features, part.num_classes) == (3, 4)
    if part.rank == 0:
        assert torch.equal(gathered, torch.arange(180.0).view(60, 3))
    print("agrees")


def loads(folder: str) -> None:
    """Loads, and nothing else."""
    print(distributed.load(folder, device="cpu", timeout_s=20))


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
    if dist.is_initialized():
        dist.destroy_process_group()
