"""Whole models of torch_geometric.nn with the plug-in and without: nn.models and wrappers of layers."""

import copy

import pytest
import torch
import torch.nn.functional as F

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from pyg_compare import D, E, N, backward, edges, grads, rand, same, train
from torch_geometric import nn, utils
from torch_geometric.data import Batch, Data
from torch_geometric.nn import models

from gnnaccel import pyg_backend

DEGREES = torch.bincount(torch.bincount(edges()[1]))
PNA = dict(aggregators=["mean", "min", "max", "std"], scalers=["identity", "amplification"], deg=DEGREES)
EDGE_ATTR = dict(edge_dim=3)


def features(grad=True):
    return rand(N, D, grad=grad)


def batch_vector():
    return torch.arange(N) // (N // 2)


def basic(name, **options):
    """A program that trains one of PyG's BasicGNN models."""

    def program(wrap):
        model = wrap(getattr(models, name)(D, 8, 3, 4, **options))
        more = {"edge_attr": rand(E, 3, grad=True)} if "edge_dim" in options else {}
        return train(model, features(), edges(), **more)

    return program


BASIC = {
    "GCN": basic("GCN"),
    "GCN jk cat": basic("GCN", jk="cat", dropout=0.3),
    "GCN jk max": basic("GCN", jk="max", act="elu", act_first=True, norm="batch"),
    "GCN jk lstm": basic("GCN", jk="lstm", norm="layer_norm"),
    "GraphSAGE": basic("GraphSAGE", norm="graph_norm"),
    "GraphSAGE max": basic("GraphSAGE", aggr="max"),
    "GraphSAGE list": basic("GraphSAGE", aggr=["mean", "max", "std"]),
    "GIN": basic("GIN", train_eps=True),
    "GAT": basic("GAT", heads=4, dropout=0.2),
    "GAT v2": basic("GAT", heads=2, v2=True),
    "GAT edge_dim": basic("GAT", heads=2, **EDGE_ATTR),
    "GAT v2 edge_dim": basic("GAT", heads=2, v2=True, jk="last", **EDGE_ATTR),
    "PNA": basic("PNA", **PNA),
    "PNA edge_dim": basic("PNA", **PNA, **EDGE_ATTR),
    "EdgeCNN": basic("EdgeCNN"),
    "EdgeCNN mean": basic("EdgeCNN", aggr="mean"),
}


@pytest.mark.parametrize("name", BASIC)
def test_basic_gnn(name):
    same(BASIC[name], accelerated=None if "PNA" in name or "list" in name else True)


def test_basic_gnn_on_batches():
    """The batch vector reaches norms that need it, and each batch is a new graph."""

    def program(wrap):
        model = wrap(models.GCN(D, 8, 2, 4, norm="graph_norm"))
        out = []
        for seed in range(3):
            data = Batch.from_data_list([Data(rand(N, D, seed=k), edges(seed=k)) for k in range(seed + 1)])
            more = dict(batch=data.batch, batch_size=data.num_graphs)
            out.append(train(model, data.x, data.edge_index, rand(data.num_edges).abs(), **more))
        return out

    same(program)


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN"])
def test_inference_per_layer(name):
    def program(wrap):
        model = wrap(getattr(models, name)(D, 8, 3, 4, norm="batch")).eval()
        with torch.no_grad():
            x = features(False)
            for layer in range(3):
                x = model.inference_per_layer(layer, x, edges(), batch_size=N)
            return x, model(features(False), edges())

    same(program)


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GAT"])
def test_trimmed_to_layer(name):
    """Hop counts of a sampled subgraph: the later layers see narrowed views of edge_index."""

    def program(wrap):
        nodes, links = [4, 8, N - 12], [30, 50]
        index = torch.cat([edges(12, 4, 30), edges(N, 12, 50, seed=1)], dim=1)
        model = wrap(getattr(models, name)(D, 8, 2, 4))
        more = dict(num_sampled_nodes_per_hop=nodes, num_sampled_edges_per_hop=links)
        trimmed = train(model, features(), index, **more)
        return trimmed, model(features(), index)[:4]

    same(program)


def sequential(wrap):
    model = nn.Sequential(
        "x, index, weight, batch",
        [
            (torch.nn.Dropout(0.2), "x -> x"),
            (nn.GCNConv(D, 8), "x, index, weight -> x1"),
            torch.nn.ReLU(inplace=True),
            (nn.SAGEConv(8, 8), "x1, index -> x2"),
            torch.nn.ReLU(inplace=True),
            (lambda a, b: [a, b], "x1, x2 -> xs"),
            (nn.JumpingKnowledge("cat", 8, 2), "xs -> x"),
            (nn.GATConv(16, 4, heads=2), "x, index -> x"),
            (nn.global_mean_pool, "x, batch -> x"),
        ],
    )
    return train(wrap(model), features(), edges(), rand(E).abs().requires_grad_(), batch_vector())


def label_propagation(wrap):
    y, mask = torch.arange(N) % 3, torch.arange(N) < 10
    model = wrap(models.LabelPropagation(3, 0.9))
    return model(y, edges(), mask), model(y, edges(), mask, edge_weight=rand(E).abs())


def correct_and_smooth(wrap):
    model = wrap(models.CorrectAndSmooth(3, 0.8, 3, 0.7))
    soft, mask = rand(N, 3).softmax(-1), torch.arange(N) < 10
    y = torch.arange(10) % 3
    soft = model.correct(soft, y, mask, edges(), rand(E).abs())
    return soft, model.smooth(soft, y, mask, edges())


class Encoder(torch.nn.Module):
    def __init__(self, outputs=1):
        super().__init__()
        self.conv = nn.GCNConv(D, 8, cached=False)
        self.heads = torch.nn.ModuleList([nn.GCNConv(8, 4) for _ in range(outputs)])

    def forward(self, x, edge_index):
        x = self.conv(x, edge_index).relu()
        out = tuple(head(x, edge_index) for head in self.heads)
        return out[0] if len(out) == 1 else out


def infomax(wrap):
    def corrupt(x, index):
        return x[torch.randperm(N)], index

    model = wrap(models.DeepGraphInfomax(4, Encoder(), lambda z, *_: z.mean(0).sigmoid(), corrupt))
    out = model(features(), edges())
    model.loss(*out).backward()
    return out, grads(model)


def autoencoders(wrap):
    out = []
    for model in (models.GAE(Encoder()), models.VGAE(Encoder(2))):
        model = wrap(model)
        z = model.encode(features(), edges())
        loss = model.recon_loss(z, edges(), edges(seed=3))
        loss = loss + model.kl_loss() if isinstance(model, models.VGAE) else loss
        loss.backward()
        out.append((z, loss, grads(model)))
    for make in (models.ARGA, models.ARGVA):
        model = wrap(make(Encoder(2 if make is models.ARGVA else 1), torch.nn.Linear(4, 1)))
        z = model.encode(features(), edges())
        model.reg_loss(z).backward()
        out.append((z, model.discriminator_loss(z), grads(model)))
    return out


def light_gcn(wrap):
    model = wrap(models.LightGCN(N, 8, num_layers=2))
    out = model(edges(), edges(seed=3)[:, :20], rand(E).abs())
    loss = model.recommendation_loss(out[:10], out[10:], torch.arange(N))
    loss.backward()
    return out, grads(model), model.recommend(edges(), k=3), model.predict_link(edges(), edges(seed=3), prob=True)


def molecule(grad=True):
    """Random positions, their neighbours within a radius, as SchNet's own interaction graph would find them."""
    pos = rand(N, 3, grad=grad)
    dist = (pos.unsqueeze(0) - pos.unsqueeze(1)).norm(dim=-1)
    near = (dist < 1.5) & (batch_vector().unsqueeze(0) == batch_vector().unsqueeze(1)) & ~torch.eye(N, dtype=torch.bool)
    index = near.nonzero().t().contiguous()
    return torch.arange(N) % 5 + 1, pos, index


def schnet(wrap):
    z, pos, _ = molecule()

    def interaction_graph(pos, batch):
        index = molecule(False)[2]
        return index, (pos[index[0]] - pos[index[1]]).norm(dim=-1)

    model = wrap(models.SchNet(8, 8, 2, 6, interaction_graph=interaction_graph))
    energy = model(z, pos, batch_vector())
    (force,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)  # trained through: second order
    (energy.sum() + force.pow(2).sum()).backward()
    return energy, force, grads(model, pos)


def attentive_fp(wrap):
    model = wrap(models.AttentiveFP(D, 8, 3, edge_dim=3, num_layers=2, num_timesteps=2, dropout=0.1))
    return train(model, features(), edges(), rand(E, 3, grad=True), batch_vector())


def rect(wrap):
    model = wrap(models.RECT_L(D, 8, dropout=0.1))
    out = train(model, features(), edges(), rand(E).abs())
    return (
        out,
        model.eval().embed(features(False), edges()),
        model.get_semantic_labels(features(False), torch.arange(N) % 3, torch.arange(N) < 12),
    )


def linkx(wrap):
    model = wrap(models.LINKX(N, D, 8, 4, 2, num_edge_layers=2, num_node_layers=1))
    return train(model, features(), edges(), rand(E, grad=True)), model(None, edges())


def deep_gcn(wrap):
    blocks, out = ("res+", "res", "dense", "plain"), []
    for block in blocks:
        aggr = "softmax" if block == "res" else "add"
        conv = nn.GENConv(8, 8, aggr=aggr, num_layers=2, norm="layer", edge_dim=3)
        layer = nn.DeepGCNLayer(conv, torch.nn.LayerNorm(8), torch.nn.ReLU(), block, dropout=0.1, ckpt_grad=True)
        out.append(train(wrap(layer), rand(N, 8, grad=True), edges(), rand(E, 3, grad=True)))
    return out


def reversible(wrap):
    out = []
    for disable in (False, True):
        model = wrap(nn.GroupAddRev(nn.SAGEConv(4, 4), num_groups=2, disable=disable, num_bwd_passes=1))
        x = rand(N, 8, grad=True)
        h = model(x.clone(), edges())
        value = h.detach().clone()
        backward(h)
        out.append((value, grads(model, x)))
        with torch.no_grad():
            out.append(model.inverse(value.clone(), edges()))
    return out


def graph_unet(wrap):
    model = wrap(models.GraphUNet(D, 8, 4, depth=2, pool_ratios=0.5))
    return train(model, features(), edges(), batch_vector())


def pmlp(wrap):
    model = wrap(models.PMLP(D, 8, 4, 2))
    return train(model, features()), model.eval()(features(False), edges())


def signed(wrap):
    model = wrap(models.SignedGCN(D, 8, 2))
    out = train(model, features(), edges(), edges(seed=3))
    z = model(features(), edges(), edges(seed=3))
    return out, model.discriminate(z, edges()), model.loss(z, edges(), edges(seed=3))


def mask_label(wrap):
    mask = wrap(models.MaskLabel(3, D))
    model = wrap(models.GCN(D, 8, 2, 3))
    x = mask(features(), torch.arange(N) % 3, torch.arange(N) < 12)
    return train(model, x, edges()), grads(mask)


def gpse(wrap):
    """The message passing part of GPSE."""
    model = wrap(models.GPSE(D, 8, D, layers_mp=2, virtual_node=False).mp)
    data = Batch.from_data_list([Data(rand(N, D), edges())])
    out = model(data).x
    backward(out)
    return out, grads(model)


def tgn(wrap):
    size, width = 7, 8
    memory = models.tgn.TGNMemory(
        N, size, width, width, models.tgn.IdentityMessage(size, width, width), models.tgn.LastAggregator()
    )
    conv = wrap(nn.TransformerConv(width, 4, heads=2, dropout=0.1, edge_dim=size))
    z, last = memory(torch.arange(N))
    out = [train(conv, z, edges(), rand(E, size, grad=True))]
    memory.update_state(edges()[0], edges()[1], torch.arange(E), rand(E, size))
    z, last = memory(torch.arange(N))
    return [*out, last, train(conv, z, edges(), rand(E, size, grad=True))]


def meta_layer(wrap):
    class EdgeModel(torch.nn.Module):
        def forward(self, src, dst, edge_attr, u, batch):
            return src - dst + edge_attr

    class NodeModel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.SimpleConv("mean")

        def forward(self, x, edge_index, edge_attr, u, batch):
            return self.conv(x, edge_index) + utils.scatter(edge_attr, edge_index[1], 0, N, "sum")

    return train(wrap(nn.MetaLayer(EdgeModel(), NodeModel())), features(), edges(), rand(E, D, grad=True))


def net(conv):
    """A program for models that mix attention or propagation of their own with layers of PyG."""
    return lambda wrap: train(wrap(conv()), features(), edges(), batch_vector())


MODELS = {
    "Sequential": sequential,
    "CorrectAndSmooth": correct_and_smooth,
    "DeepGraphInfomax": infomax,
    "autoencoders": autoencoders,
    "LightGCN": light_gcn,
    "SchNet": schnet,
    "AttentiveFP": attentive_fp,
    "RECT_L": rect,
    "LINKX": linkx,
    "DeepGCNLayer": deep_gcn,
    "GroupAddRev": reversible,
    "GraphUNet": graph_unet,
    "PMLP": pmlp,
    "SignedGCN": signed,
    "MaskLabel": mask_label,
    "GPSE": gpse,
    "TGN": tgn,
    "MetaLayer": meta_layer,
    "LabelPropagation": label_propagation,
    "Polynormer": net(lambda: models.Polynormer(D, 8, 4, local_layers=2, global_layers=1)),
    "SGFormer": net(lambda: models.SGFormer(D, 8, 4, gnn_num_layers=2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_model(name):
    same(MODELS[name])


MOLECULES = {
    "DimeNet": lambda: models.DimeNet(8, 1, 1, 2, 3, 2, num_output_layers=1),
    "DimeNet++": lambda: models.DimeNetPlusPlus(8, 1, 1, 4, 4, 8, 3, 2, num_output_layers=1),
    "GNNFF": lambda: models.GNNFF(4, 4, 1),
    "ViSNet": lambda: models.ViSNet(hidden_channels=16, num_layers=1, num_heads=2, num_rbf=4, cutoff=1.5),
}


@pytest.mark.parametrize("name", MOLECULES)
@pytest.mark.skipif(not pyg.typing.WITH_PYG_LIB, reason="pyg_lib is not installed: PyG has no radius_graph")
def test_molecule_model(name):
    def program(wrap):
        z, pos, _ = molecule(False)
        return train(wrap(MOLECULES[name]()), z, pos, batch_vector())

    same(program, accelerated=None)  # most of them pass messages without PyG's layers


def test_training_reaches_the_same_loss():
    torch.manual_seed(3)
    x, index, y = rand(N, D), edges(), torch.randint(0, 3, (N,))
    plain = nn.models.GAT(D, 8, 2, 3, heads=2, dropout=0.2)
    losses = []
    for model in (copy.deepcopy(plain), pyg_backend.accelerate(copy.deepcopy(plain))):
        torch.manual_seed(0)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(50):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x, index), y)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < 1e-4
