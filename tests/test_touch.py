"""Private names of torch and names of PyG, taken away one by one: scripts that run without gnnaccel run with it."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch_geometric")

# Of each name a process of its own takes it away, trains without gnnaccel and with it, and prints what came of it.
PROGRAM = '''
import importlib, json, os, sys
import torch
torch.set_num_threads(1)
import torch_geometric
from torch_geometric import nn
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
import torch._dynamo


class Net(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layers = torch.nn.ModuleList([layer(8, 16), layer(16, 4)])

    def forward(self, x, edge_index):
        for layer in self.layers:
            x = torch.nn.functional.dropout(layer(x, edge_index).relu(), 0.2, self.training)
        return x


class Own(nn.MessagePassing):
    def __init__(self, ins, outs):
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(ins, outs)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_i, x_j):
        return torch.sigmoid(x_i) * x_j


def train():
    """Losses of training, whole and on batches where that can be without gnnaccel, and a gradient of torch.func."""
    torch.manual_seed(0)
    data = Data(x=torch.randn(300, 8), edge_index=torch.randint(300, (2, 20000)), y=torch.randint(4, (300,)))
    found = []
    for layer in (nn.GCNConv, nn.GATConv, nn.SAGEConv, Own):
        torch.manual_seed(1)
        model = Net(layer)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(data.x, data.edge_index), data.y)
            loss.backward()
            optimizer.step()
        found.append(loss.item())
        found.append(torch.func.grad(lambda x: model.eval()(x, data.edge_index).sum())(data.x).norm().item())
        if layer is nn.SAGEConv and "gnnaccel.pyg_backend.samplers" in sys.modules:
            for batch in NeighborLoader(data, [4, 4], batch_size=100):
                model(batch.x, batch.edge_index)[: batch.batch_size].sum().backward()
    return found


def attempt(path):
    """What a run without the name `path` came to, as a dictionary."""
    holder, name = path.rsplit(".", 1)
    parts = holder.split(".")
    for k in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:k]))
            break
        except ImportError:
            continue
    for part in parts[k:]:
        owner = getattr(owner, part)
    try:
        delattr(owner, name)
    except (AttributeError, TypeError) as error:
        return {"skipped": f"cannot be taken away: {error}"}
    try:
        alone = train()
    except Exception as error:
        return {"skipped": f"torch and PyG need it: {type(error).__name__}"}
    import gnnaccel
    gnnaccel.install()
    from gnnaccel import report
    try:
        ours = train()
    except Exception as error:
        import traceback
        return {"error": traceback.format_exc()}
    close = all(abs(a - b) <= 1e-4 * max(1, abs(a)) for a, b in zip(alone, ours))
    sites = report.snapshot()
    missing = sorted(getattr(sys.modules.get("gnnaccel.touch"), "MISSING", ()))
    return {"close": close, "accelerated": sorted(k for k in sites if sites[k].accelerated), "missing": missing}


for path in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if not os.fork():
        try:
            sys.stderr = open(os.devnull, "w")
            os.write(write, json.dumps(attempt(path)).encode())
        finally:
            os._exit(0)
    os.close(write)
    print(json.dumps([path, json.loads(open(read).read() or '{"error": "it crashed"}')]), flush=True)
    os.wait()
'''

PYGS = [
    *("torch_geometric.nn.HGTConv", "torch_geometric.nn.GATv2Conv", "torch_geometric.nn.HypergraphConv"),
    *("torch_geometric.utils._trim_to_layer.TrimToLayer", "torch_geometric.sampler.BidirectionalNeighborSampler"),
    *("torch_geometric.nn.SoftmaxAggregation", "torch_geometric.loader.PrefetchLoader", "torch_geometric.Index"),
    "torch_geometric.nn.conv.MessagePassing.edge_update",
    "torch_geometric.nn.conv.MessagePassing._index_select",
    "torch_geometric.nn.conv.MessagePassing._lift",
    "torch_geometric.nn.conv.MessagePassing._check_input",
    "torch_geometric.data.collate.collate",
]
LAYERS = {"pyg.GCNConv", "pyg.GATConv", "pyg.SAGEConv"}


def outcomes(paths):
    command = [sys.executable, "-c", PROGRAM, json.dumps(paths)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    return dict(map(json.loads, run.stdout.splitlines()))


def check(found, needed=()):
    """Nothing raises, losses are those without gnnaccel, and layers are accelerated but where a name is `needed`."""
    for path, outcome in found.items():
        assert "error" not in outcome, f"without {path}:\n{outcome['error']}"
        if "skipped" not in outcome:
            assert outcome["close"], path
            is_on = set(outcome["accelerated"]) >= LAYERS if path not in needed else not outcome["accelerated"]
            assert is_on, (path, outcome)


def test_names_of_torch():
    from gnnaccel import touch

    paths = sorted(touch.NAMES)
    found = outcomes(paths)
    needed = {f"torch.{name}" for name in touch.NEEDED}
    check(found, needed)
    tried = [path for path, outcome in found.items() if "skipped" not in outcome]
    assert len(tried) > len(paths) / 2, found
    for path in set(tried) - needed:
        assert path in found[path]["missing"], path


def test_names_of_pyg():
    found = outcomes(PYGS)
    check(found)
    assert sum("skipped" not in outcome for outcome in found.values()) >= len(PYGS) / 2, found
