"""DGL's CPU wheel on CUDA: each case of dgl_cases against DGL alone on the CPU, and what only a device has."""

from __future__ import annotations

import copy
import gc
import importlib
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU here", allow_module_level=True)

from dgl_cases import CASES
from dgl_compare import assert_same, attempt, build, dgl, graph, hetero_graph, rand
from dgl_structure_cases import STRUCTURE, tensors_of, with_data

from gnnaccel import dgl_backend, report
from gnnaccel.dgl_backend import bridge

if not bridge.needed():
    pytest.skip("DGL has its own CUDA", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
# Moments of equal values: what is left of a difference of equal numbers, and its third root.
LOOSE = {"PNAConv with every aggregator": 1e-3, "LapPosEncoder('Transformer')": 1e-5}  # the other in float32
RANDOM = {
    "GNNExplainer",
    "HeteroGNNExplainer",
    "PGExplainer",
    "HeteroPGExplainer",
}  # the devices draw different masks and noise


@pytest.fixture(autouse=True)
def plugged():
    dgl_backend.enable()
    yield
    dgl_backend.disable()


def on_cuda(value):
    if isinstance(value, tuple):
        return tuple(map(on_cuda, value))
    return value.to(DEVICE) if hasattr(value, "to") else value


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    case = CASES[name]

    def call(module, g, *inputs):
        return case.call(g, *inputs) if module is None else case.call(module, g, *inputs)

    for where in case.graphs:
        backward = where not in case.no_backward
        dgl_backend.disable()
        _, inputs, module = case.bind(where)
        if isinstance(module, torch.nn.Module) and not any(isinstance(m, torch.nn.RNNBase) for m in module.modules()):
            module.eval()  # the devices draw different dropouts
        g = build(where)
        want = attempt(partial(call, copy.deepcopy(module), g), inputs, None, backward)
        dgl_backend.enable()
        there = g.to(DEVICE)
        assert there.device == DEVICE and g.device.type == "cpu"
        with DEVICE:  # where cases make tensors themselves
            module = on_cuda(copy.deepcopy(module))
            got = attempt(partial(call, module, there), [on_cuda(x) for x in inputs], None, backward)
        if isinstance(got, dict):
            assert all(v.device == DEVICE for v in got.values()), where
            got = {k: v.cpu() for k, v in got.items()}
            if name in RANDOM:
                got = {k: want[k] for k in got}
        assert_same(got, want, LOOSE.get(name, max(case.tolerance, 1e-9)), f"{name} on {where}")


# Their edges are in order of the destinations on a GPU, and of the sources on the CPU.
INDUCED = ("khop", "node_subgraph", "remove_nodes")


def by_source(g):
    """Tensors of a graph, its edges and their data in an order that does not depend on that of the graph."""
    rows = [*zip(*(x.tolist() for x in (*g.edges(), g.edata["w"])), strict=True)]
    order = torch.tensor(
        [i for _, i in sorted((row, i) for i, row in enumerate(rows))], dtype=torch.long, device=g.device
    )
    assert rows, "there are edges to compare"
    edges = [*g.edges(), *(g.edata[k] for k in sorted(g.edata))]
    return [*(g.ndata[k] for k in sorted(g.ndata)), *(x[order] for x in edges)]


@pytest.mark.parametrize("name", STRUCTURE)
def test_structure(name):
    g = with_data()
    want = STRUCTURE[name](g)
    with DEVICE:
        got = STRUCTURE[name](g.to(DEVICE))
    if isinstance(got, dgl.DGLGraph):
        assert got.device == DEVICE and got.idtype == want.idtype
        assert torch.equal(dgl.ops.copy_u_sum(got, on_cuda(torch.ones(got.num_src_nodes(), 1))).cpu().flatten(),
                           want.in_degrees().float())  # fmt: skip
    tensors = by_source if name in INDUCED else tensors_of
    pairs = list(zip(tensors(got), tensors(want), strict=True))
    assert pairs
    for there, here in pairs:
        assert there.device == DEVICE
        assert torch.equal(there.cpu(), here)


def test_sides_by_side():
    g = graph()
    there = g.to(DEVICE)
    assert there.to(DEVICE) is there and there.cpu().device.type == "cpu"
    assert g.device.type == "cpu" and g.in_degrees().device.type == "cpu" and there.in_degrees().is_cuda
    x = rand(40, 3)
    torch.testing.assert_close(dgl.ops.copy_u_sum(there, x.to(DEVICE)).cpu(), dgl.ops.copy_u_sum(g, x))
    for bad in (lambda: dgl.ops.copy_u_sum(there, x), lambda: dgl.ops.copy_u_sum(g, x.to(DEVICE))):
        with pytest.raises(dgl.DGLError, match="device"):
            bad()
    with pytest.raises(dgl.DGLError, match="device"):
        there.ndata["x"] = x
    with there.local_scope():
        there.ndata["x"] = x.to(DEVICE)
    assert not there.ndata
    degrees = there.in_degrees()
    degrees += 1
    assert torch.equal(there.in_degrees() + 1, degrees)


REFUSED = {
    "integers": lambda g: dgl.ops.copy_u_sum(g, torch.ones(40, 2, dtype=torch.int32, device=DEVICE)),
    "graphbolt": lambda g: importlib.import_module("dgl.graphbolt").ItemSet,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with pytest.raises((dgl.DGLError, ImportError), match="gnnaccel"):
        REFUSED[name](graph().to(DEVICE))


LAYERS = {
    "GraphConv": lambda: dgl.nn.GraphConv(8, 8),
    "SAGEConv mean": lambda: dgl.nn.SAGEConv(8, 8, "mean"),
    "SAGEConv pool": lambda: dgl.nn.SAGEConv(8, 8, "pool"),
    "SAGEConv gcn": lambda: dgl.nn.SAGEConv(8, 8, "gcn"),
    "GATConv": lambda: dgl.nn.GATConv(8, 4, 2),
    "GATv2Conv": lambda: dgl.nn.GATv2Conv(8, 4, 2),
    "GINConv": lambda: dgl.nn.GINConv(torch.nn.Linear(8, 8)),
    "AGNNConv": lambda: dgl.nn.AGNNConv(),
    "TAGConv": lambda: dgl.nn.TAGConv(8, 8),
    "SGConv": lambda: dgl.nn.SGConv(8, 8, k=2),
    "DotGatConv": lambda: dgl.nn.DotGatConv(8, 4, 2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_synchronises(name):
    g = graph(loops=True).to(DEVICE)
    layer, x = LAYERS[name]().to(DEVICE), rand(40, 8, dtype=torch.float32).to(DEVICE).requires_grad_()

    def step():
        layer(g, x).square().sum().backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_zero_in_degrees_are_still_refused():
    layer, g = dgl.nn.GraphConv(8, 8).to(DEVICE), graph(30, 20).to(DEVICE)
    with pytest.raises(dgl.DGLError, match="0-in-degree"):
        layer(g, torch.ones(30, 8, device=DEVICE))
    assert layer._allow_zero_in_degree is False


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
def test_loader(workers, idtype):
    g = graph(400, 6000, idtype=idtype)
    g.ndata["x"], g.ndata["y"] = rand(400, 6, dtype=torch.float32), torch.arange(400)
    sampler = dgl.dataloading.NeighborSampler([4, 3], prefetch_node_feats=["x"], prefetch_labels=["y"])
    loader = dgl.dataloading.DataLoader(
        g, torch.arange(400, dtype=idtype), sampler, device=DEVICE, batch_size=64, shuffle=True, num_workers=workers
    )
    conv = dgl.nn.SAGEConv(6, 5, "mean").to(DEVICE)
    seen = []
    for sources, targets, blocks in loader:
        assert {sources.device, targets.device, *(b.device for b in blocks)} == {DEVICE}
        x = blocks[0].srcdata["x"]
        assert torch.equal(x.cpu(), g.ndata["x"][sources.long().cpu()])
        assert torch.equal(blocks[-1].dstdata["y"].cpu(), targets.long().cpu())
        got = conv(blocks[0], (x, x[: blocks[0].num_dst_nodes()]))
        here = blocks[0].to("cpu")
        want = copy.deepcopy(conv).cpu()(here, (x.cpu(), x.cpu()[: here.num_dst_nodes()]))
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
        got.sum().backward()
        seen.append(targets.cpu())
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(400, dtype=idtype))


def test_hetero_and_messages_of_the_user():
    g = hetero_graph()
    there = g.to(DEVICE)
    conv = dgl.nn.HeteroGraphConv({e: dgl.nn.SAGEConv(3, 2, "mean") for e in g.etypes}).double()
    x = {t: rand(g.num_nodes(t), 3, seed=k) for k, t in enumerate(g.ntypes)}
    want = conv(g, x)
    got = conv.to(DEVICE)(there, {t: v.to(DEVICE) for t, v in x.items()})
    for t, value in want.items():
        torch.testing.assert_close(got[t].cpu(), value)

    def run(g, x):
        g.ndata["x"] = x
        g.apply_edges(lambda edges: {"s": (edges.src["x"] * edges.dst["x"]).sum(-1, keepdim=True)})
        g.update_all(lambda edges: {"m": edges.src["x"] * edges.data["s"]},
                     lambda nodes: {"h": nodes.mailbox["m"].sum(1)})  # fmt: skip
        return g.ndata["h"]

    g = graph(loops=True)
    torch.testing.assert_close(run(g.to(DEVICE), rand(40, 3).to(DEVICE)).cpu(), run(g, rand(40, 3)))


def test_messages_and_mailboxes_that_are_not_made():
    def attend(nodes):
        alpha = torch.softmax(nodes.mailbox["s"], dim=1)
        return {"h": (alpha * nodes.mailbox["m"]).sum(1) + nodes.data["x"], "top": nodes.mailbox["m"].max(1)[0]}

    def message(edges):
        score = (edges.src["x"] * edges.dst["x"]).sum(-1, keepdim=True)
        return {"m": torch.relu(edges.src["x"] + edges.dst["x"]) * edges.data["w"], "s": score}

    def run(g, x, w):
        g.ndata["x"], g.edata["w"] = x, w
        g.update_all(message, attend)
        g.update_all(message, dgl.function.sum("m", "o"))
        out = g.ndata["h"] + g.ndata["top"] + g.ndata["o"]
        return out, *torch.autograd.grad(out.sin().sum(), [x, w])

    g, found = graph(40, 60), []
    for device in ("cpu", DEVICE):
        x, w = (t.to(device).requires_grad_() for t in (rand(40, 24), rand(60, 1)))
        report.reset()
        found.append([t.cpu() for t in run(g.to(device), x, w)])
        assert not any(report.snapshot()[f"dgl.{kind} function"].left for kind in ("message", "reduce"))
    torch.testing.assert_close(found[1], found[0])


def test_memory_goes_with_the_graph():
    g = graph(1000, 100_000)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    there = g.to(DEVICE)
    dgl.ops.copy_u_sum(there, torch.ones(1000, 4, device=DEVICE, requires_grad=True)).sum().backward()
    there.in_degrees()
    assert torch.cuda.memory_allocated() > before
    del there
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_training_like_on_the_cpu():
    g, x = graph(200, 2000, loops=True), rand(200, 8, dtype=torch.float32)
    labels = torch.randint(3, (200,), generator=torch.Generator().manual_seed(2))

    def losses(device):
        torch.manual_seed(4)
        layers = [dgl.nn.GraphConv(8, 16), dgl.nn.SAGEConv(16, 16, "mean"), dgl.nn.GATConv(16, 3, 2)]
        model = torch.nn.ModuleList(layers).to(device)
        optimizer, there = torch.optim.Adam(model.parameters(), 0.01), g.to(device)
        result = []
        for _ in range(50):
            h = model[1](there, model[0](there, x.to(device)).relu()).relu()
            loss = torch.nn.functional.cross_entropy(model[2](there, h).mean(1), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            result.append(float(loss))
        return torch.tensor(result)

    torch.testing.assert_close(losses(DEVICE), losses("cpu"), rtol=1e-3, atol=1e-3)


def test_points():
    from dgl.geometry import farthest_point_sampler

    points = rand(2, 30, 3)
    got = farthest_point_sampler(points.to(DEVICE), 6, start_idx=1)
    assert torch.equal(got.cpu(), farthest_point_sampler(points, 6, start_idx=1))


def test_a_forked_worker_may_use_cuda():
    code = """
import gnnaccel; gnnaccel.install()
import dgl, multiprocessing, torch
def work(): torch.zeros(1, device="cuda")
p = multiprocessing.get_context("fork").Process(target=work); p.start(); p.join(); assert p.exitcode == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus():
    """One device per rank under DistributedDataParallel, and both in one process."""
    program = Path(__file__).with_name("dgl_ranks.py")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert {"rank 0 agrees", "rank 1 agrees"} <= set(done.stdout.splitlines())
