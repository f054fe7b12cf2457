"""HeteroData's own layers, HGTConv and HANConv: graphs and models that are changed, checkpoints, memory."""

import gc
import pickle
import weakref

import pytest
import torch

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from hetero_cases import COUNTS, RELATIONS, WIDTHS, data, train
from pyg_compare import grads, same
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn

from gnnaccel import pyg_backend, report


def native(make, widths=None):
    def program(wrap):
        graph = data(widths)
        model = wrap(make(graph))
        model(graph.x_dict, graph.edge_index_dict)
        out = train(model, graph)
        twin = pickle.loads(pickle.dumps(model))
        return out, twin(graph.x_dict, graph.edge_index_dict)

    return program


class Projected(torch.nn.Module):
    """A layer behind PyG's linear map per node type. (PyG's Sequential puts the last one's forward() on its class.)"""

    def __init__(self, graph):
        super().__init__()
        self.lin = nn.HeteroDictLinear(-1, 8, list(COUNTS))
        self.conv = nn.HGTConv(8, 8, graph.metadata())

    def forward(self, x, e):
        return self.conv(self.lin(x), e)


NATIVE = {
    "HGT": native(lambda g: nn.HGTConv(-1, 8, g.metadata(), heads=2)),
    "HGT fixed": native(lambda g: nn.HGTConv(WIDTHS, 8, g.metadata())),
    "HAN": native(lambda g: nn.HANConv(-1, 8, g.metadata(), heads=2)),
    "HAN dropout": native(lambda g: nn.HANConv(WIDTHS, 8, g.metadata(), dropout=0.3)),
    "HeteroDictLinear": native(Projected),
}


@pytest.mark.parametrize("name", NATIVE)
def test_native_model(name):
    same(NATIVE[name], accelerated=None)


class OwnAttention(nn.HGTConv):
    def message(self, k_j, q_i, v_j, edge_attr, index, ptr, size_i):
        return 2 * super().message(k_j, q_i, v_j, edge_attr, index, ptr, size_i)


class OwnSources(nn.HGTConv):
    def _construct_src_node_feat(self, k_dict, v_dict, edge_index_dict):
        k, v, offset = super()._construct_src_node_feat(k_dict, v_dict, edge_index_dict)
        return k, 2 * v, offset


def _double(module, args, out):
    return {key: 2 * value for key, value in out.items()} if isinstance(out, dict) else 2 * out


def _frozen(model, graph):
    model.k_rel.weight.requires_grad_(False)
    model.kqv_lin.lins["paper"].weight.requires_grad_(False)


def _without(*relations, edges_only=()):
    def change(model, graph):
        for relation in relations:
            del graph[relation]
        for relation in edges_only:
            graph[relation].edge_index = torch.empty(2, 0, dtype=torch.long)

    return change


# What is changed of a HGTConv or its graph after its first call, and whether no call is taken together then.
HGT = {
    "nothing": (lambda model, graph: None, False),
    "without relations": (_without(RELATIONS[0], RELATIONS[3]), False),
    "without edges": (_without(edges_only=RELATIONS[1:2]), False),
    "without any edges": (_without(edges_only=RELATIONS), False),
    "a type alone": (_without(*RELATIONS[3:]), False),
    "frozen": (_frozen, False),
    "hooked": (lambda model, graph: model.kqv_lin.register_forward_hook(_double), True),
    "hooked inside": (lambda model, graph: model.out_lin.lins["paper"].register_forward_hook(_double), True),
    "hooked relations": (lambda model, graph: model.v_rel.register_forward_hook(_double), True),
    "message hook": (lambda model, graph: model.register_message_forward_hook(lambda *args: 2 * args[-1]), True),
}


CLASSES = {"HGTConv": nn.HGTConv, "own attention": OwnAttention, "own sources": OwnSources}
HGT_CASES = [("HGTConv", name) for name in HGT] + [(name, "nothing") for name in CLASSES if name != "HGTConv"]


@pytest.mark.parametrize("widths", [None, 8])
@pytest.mark.parametrize("kind, name", HGT_CASES)
def test_hgt(kind, name, widths):
    """On edges that it has had, on others, and on edges written into."""
    (change, left), cls = HGT[name], CLASSES[kind]

    def program(wrap):
        graph = data(widths)
        model = wrap(cls(-1, 8, graph.metadata(), heads=2))
        model(graph.x_dict, graph.edge_index_dict)
        change(model, graph)
        out = [train(model, graph) for _ in range(2)]
        if graph.edge_index_dict[graph.edge_types[0]].numel():
            graph[graph.edge_types[0]].edge_index[1, :30] = 0
        out.append(train(model, graph))
        with torch.no_grad():
            return out, model(graph.x_dict, graph.edge_index_dict), list(model.state_dict())

    same(program, accelerated=None)
    graph = data(widths)
    model = pyg_backend.accelerate(cls(-1, 8, graph.metadata(), heads=2))
    model(graph.x_dict, graph.edge_index_dict)
    change(model, graph)
    report.reset()
    train(model, graph)
    sites = report.snapshot()
    together = sites.keys() == {"pyg.HGTConv"} and not sites["pyg.HGTConv"].left
    assert together == (not left and cls is nn.HGTConv)


def test_hgt_second_derivatives_and_a_batch_of_some_edge_types():
    def program(wrap):
        graph = data(8)
        model = wrap(nn.HGTConv(8, 8, graph.metadata(), heads=2))
        out = model(graph.x_dict, graph.edge_index_dict)
        x = list(graph.x_dict.values())
        first = torch.autograd.grad(sum(each.sin().sum() for each in out.values()), x, create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), [*x, *model.parameters()])
        with torch.no_grad():
            return first, second, model(graph.x_dict, dict(list(graph.edge_index_dict.items())[1:3]))

    same(program)


def test_hgt_results_may_be_written_into_and_some_left_alone():
    def program(wrap):
        graph, found = data(8), []
        model = wrap(nn.HGTConv(8, 8, graph.metadata(), heads=2))
        for name in COUNTS:
            out = model(graph.x_dict, graph.edge_index_dict)
            out[name].mul_(2).add_(1)
            found.append(grads_of(out[name].square().sum(), model, graph))
        return found

    def grads_of(loss, model, graph):
        given = [*graph.x_dict.values(), *model.parameters()]
        return [grad is None for grad in torch.autograd.grad(loss, given, allow_unused=True)]

    same(program)


def test_hgt_keeps_no_graph_of_edges_that_are_gone():
    model = pyg_backend.accelerate(nn.HGTConv(8, 8, data(8).metadata()))
    for _ in range(3):
        graph = data(8)
        train(model, graph)
        kept = [weakref.ref(e) for e in graph.edge_index_dict.values()]
    del graph
    gc.collect()
    assert all(ref() is None for ref in kept)


def _bent(model, graph):
    model.negative_slope = -0.5


def _not_trained(model, graph):
    model.proj["paper"].weight.requires_grad_(False)


HAN = {
    "nothing": (lambda model, graph: None, False),
    "without relations": (_without(RELATIONS[0], RELATIONS[3]), False),
    "without edges": (_without(edges_only=RELATIONS[1:2]), False),
    "without any edges": (_without(edges_only=RELATIONS), True),
    "a type alone": (_without(*RELATIONS[3:]), False),
    "frozen": (_not_trained, True),
    "slope": (_bent, True),
    "hooked map": (lambda model, graph: model.proj["author"].register_forward_hook(_double), True),
    "hooked": (lambda model, graph: model.k_lin.register_forward_hook(_double), False),
}


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("name", HAN)
def test_han(name, dropout):
    """On edges that it has had, on others, and on edges written into."""
    change, left = HAN[name]

    def program(wrap):
        graph = data()
        model = wrap(nn.HANConv(-1, 8, graph.metadata(), heads=2, dropout=dropout))
        model(graph.x_dict, graph.edge_index_dict)
        change(model, graph)
        out = [train(model, graph) for _ in range(2)]
        if graph.edge_index_dict[graph.edge_types[0]].numel():
            graph[graph.edge_types[0]].edge_index[1, :30] = 0
        out.append(train(model, graph))
        model.eval()
        with torch.no_grad():
            return out, model(graph.x_dict, graph.edge_index_dict, True)

    same(program, accelerated=None)
    graph, sites = data(), []
    model = pyg_backend.accelerate(nn.HANConv(-1, 8, graph.metadata(), heads=2, dropout=dropout))
    model(graph.x_dict, graph.edge_index_dict)
    change(model, graph)
    for _ in range(2):
        report.reset()
        train(model, graph)
        sites.append(report.snapshot()["pyg.HANConv"])
    assert all((site.accelerated == 1) != left for site in sites)


def test_han_gradients_of_what_nothing_is_made_of():
    def program(wrap):
        graph, found = data(), []
        model = wrap(nn.HANConv(WIDTHS, 8, graph.metadata(), heads=2))
        given = [*graph.x_dict.values(), *model.parameters()]
        for name in COUNTS:
            out = model(graph.x_dict, graph.edge_index_dict)
            out[name].mul_(2).add_(1)
            found.append(torch.autograd.grad(out[name].square().sum(), given, allow_unused=True))
        return [[grad is None for grad in grads] for grads in found], found

    same(program)


@pytest.mark.parametrize("cls", [nn.HGTConv, nn.HANConv])
@pytest.mark.parametrize("reentrant", [False, True])
def test_hgt_and_han_in_checkpoints(cls, reentrant):
    def program(wrap):
        graph, found = data(8), []
        model = wrap(cls(8, 8, graph.metadata(), heads=2))

        def layer(*x):
            return tuple(model(dict(zip(graph.x_dict, x, strict=True)), graph.edge_index_dict).values())

        for _ in range(2):
            outs = checkpoint(layer, *graph.x_dict.values(), use_reentrant=reentrant)
            model.zero_grad()
            sum(out.square().sum() for out in outs).backward()
            found.append((outs, grads(model, graph.x_dict)))
        return found

    same(program)


@pytest.mark.parametrize("cls", [nn.HGTConv, nn.HANConv])
@pytest.mark.parametrize("on", ["parameters", "features"])
def test_hooks_are_not_called_without_a_gradient(cls, on):
    def program(wrap):
        graph, found = data(8), []
        model = wrap(cls(8, 8, graph.metadata(), heads=2))
        x = {name: each * 2 for name, each in graph.x_dict.items()}
        for each in model.parameters() if on == "parameters" else x.values():
            each.register_hook(lambda grad: grad * 2)
        for name in COUNTS:
            model.zero_grad()
            model(x, graph.edge_index_dict)[name].square().sum().backward(retain_graph=True)
            found.append(grads(model, graph.x_dict))
        return found

    same(program)
