"""Private names of torch and names of PyG, taken away one by one: scripts that run without gnnaccel run with it."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("torch_geometric")

# Of each name a process of its own takes it away, trains without gnnaccel and with it, and prints what came of it.
PROGRAM = '''
import builtins, importlib, json, os, sys, traceback
import torch
torch.set_num_threads(1)
import torch_geometric
from torch_geometric import nn
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
import torch._dynamo
HASATTR = hasattr


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


def train(loads=False):
    """Losses of training, whole and on batches where that can be without gnnaccel, and a gradient of torch.func."""
    torch.manual_seed(0)
    data = Data(x=torch.randn(300, 8), edge_index=torch.randint(300, (2, 20000)), y=torch.randint(4, (300,)))
    found = [float(sum(torch.utils.data.DataLoader(range(4))))]
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
        if layer is nn.SAGEConv and loads:
            for batch in NeighborLoader(data, [4, 4], batch_size=100):
                model(batch.x, batch.edge_index)[: batch.batch_size].sum().backward()
    return found


def taken(path):
    """Take the name `path` away: what puts it back. Attributes of instances, after "()", and what cannot be deleted
    are hidden from those who ask by getattr() and hasattr()."""
    holder, name = path.rsplit(".", 1)
    parts = holder.split(".")
    for k in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:k]))
            break
        except ImportError:
            continue
    try:
        for part in parts[k:]:
            owner = getattr(owner, part)
        if not any(hasattr(owner, each) for each in name.split()):  # this version has it not
            return lambda: None
        kept = getattr(owner, name)
        delattr(owner, name)
        if not hasattr(owner, name):  # some are made when they are asked for
            return lambda: setattr(owner, name, kept)
    except (AttributeError, TypeError):
        pass
    names, ask = name.split(), builtins.getattr

    def hiding(owner, asked, *default):
        if asked not in names:
            return ask(owner, asked, *default)
        if default:
            return default[0]
        raise AttributeError(asked)

    has = builtins.hasattr
    builtins.getattr = hiding
    builtins.hasattr = lambda owner, asked: asked not in names and has(owner, asked)

    def put_back():
        builtins.getattr, builtins.hasattr = ask, has

    return put_back


def look():
    """Have gnnaccel look for its names."""
    import gnnaccel.touch
    import gnnaccel.pyg_backend.touch


def attempt(path):
    """What a run without the name `path` came to, as a dictionary. A name without which torch or PyG do not run, or
    that is hidden, is put back when gnnaccel has looked for it."""
    put_back = taken(path)
    is_hidden = builtins.hasattr is not HASATTR
    try:
        alone = None if is_hidden else train()
    except Exception:
        alone = None
    if alone is None:
        try:
            look()
        except ImportError as error:
            if "cannot run" in str(error):
                return {"close": True, "accelerated": [], "missing": []}
            raise
        finally:
            put_back()
        alone = WHOLE
    import gnnaccel
    gnnaccel.install()
    from gnnaccel import report
    try:
        ours = train(loads="gnnaccel.pyg_backend.samplers" in sys.modules)
    except Exception:
        return {"error": traceback.format_exc()}
    close = all(abs(a - b) <= 1e-4 * max(1, abs(a)) for a, b in zip(alone, ours))
    sites = report.snapshot()
    missing = [*getattr(sys.modules.get("gnnaccel.touch"), "MISSING", ())]
    missing += getattr(sys.modules.get("gnnaccel.pyg_backend.touch"), "MISSING", ())
    return {"close": close, "accelerated": sorted(k for k in sites if sites[k].accelerated), "missing": sorted(missing)}


WHOLE = train()  # what is not done for each of them: modules that torch loads when it needs them
torch.library.define("warm::up", "(Tensor x) -> Tensor")
torch.library.register_fake("warm::up")(lambda x: x)
for path in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if not os.fork():
        try:
            sys.stderr = open(os.devnull, "w")
            os.write(write, json.dumps(attempt(path)).encode())
        except BaseException:
            os.write(write, json.dumps({"error": traceback.format_exc()}).encode())
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
    "torch_geometric.nn.conv.MessagePassing._index_select",
    "torch_geometric.nn.conv.MessagePassing._lift",
    "torch_geometric.nn.conv.MessagePassing._check_input",
    "torch_geometric.data.collate.collate",
    "torch_geometric.data.collate._collate",
    "torch_geometric.data.Data()._store",
    "torch_geometric.data.storage.GlobalStorage()._mapping",
    "torch_geometric.nn.conv.MessagePassing()._user_args",
    "torch_geometric.nn.conv.MessagePassing()._edge_user_args",
    "torch_geometric.nn.conv.MessagePassing()._explain",
    "torch_geometric.nn.conv.MessagePassing()._message_forward_hooks",
]
LEFT = {
    "torch_geometric.nn.conv.MessagePassing()._explain",
    "torch_geometric.nn.conv.MessagePassing()._message_forward_hooks",
}
"""Without these no layer can be told to be as it was made."""
LAYERS = {"pyg.GCNConv", "pyg.GATConv", "pyg.SAGEConv"}


def outcomes(paths):
    command = [sys.executable, "-c", PROGRAM, json.dumps(paths)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # else autograd's threads are there, which fork refuses
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr
    return dict(map(json.loads, run.stdout.splitlines()))


def check(found, needed=()):
    """Nothing raises, losses are those without gnnaccel, and layers are accelerated, but where a name is `needed` or
    among those without which they are LEFT."""
    for path, outcome in found.items():
        assert "error" not in outcome, f"without {path}:\n{outcome['error']}"
        assert outcome["close"], path
        accelerated = set(outcome["accelerated"])
        if path in needed:
            assert not accelerated, (path, outcome)
        elif path in LEFT:
            assert accelerated.isdisjoint(LAYERS), (path, outcome)
        else:
            assert accelerated >= LAYERS, (path, outcome)


def test_names_of_torch(request):
    """All of them with --all; else every third, as neighbours in their order are mostly of one object."""
    import gnnaccel.pyg_backend  # noqa: F401 (which looks for more of them)
    from gnnaccel import touch

    found = outcomes(sorted(touch.NAMES)[:: 1 if request.config.getoption("--all") else 3])
    needed = {f"torch.{name}" for name in touch.NEEDED}
    check(found, needed)
    for path in set(found) - needed:
        assert path in found[path]["missing"], path


def test_names_of_pyg():
    check(outcomes(PYGS))


def test_what_lacks_an_attribute():
    """Accessors of what no example tells: nothing that PyG or torch would have kept there."""
    from gnnaccel import touch as torchs
    from gnnaccel.pyg_backend import touch

    bare = torch.nn.Module()
    assert None not in (touch.kept_x(bare), touch.kept_h(bare), touch.kept_edges(bare))
    assert touch.types_of_edges(bare) is None and not torchs.is_replica(bare)
    assert torchs.saved(bare, "dim") is torchs.UNTOLD and torchs.shape_of(bare) != torchs.shape_of(bare)
    assert torchs.batches_of(bare) is None and torchs.codegen_of(bare) is None
    assert torchs.backward_class(bare) is None
