"""Inner names of DGL, taken away one by one: scripts that run without gnnaccel run with it, and only what needs the
name is DGL's own again."""

import json
import os
import subprocess
import sys

import pytest
from dgl_compare import dgl_backend

from gnnaccel.dgl_backend import touch

# Of each name a process of its own imports a DGL in whose source it has another name, trains without gnnaccel and with
# it, and prints what came of it. Where DGL cannot be renamed, as its C++ knows the name, gnnaccel does not find it.
PROGRAM = '''
import importlib.machinery, json, logging, os, re, sys, traceback
import networkx, numpy, pandas, psutil, requests, scipy.sparse, tqdm
import torch, torch._dynamo, torch.distributed, torch.fx, torch.utils.data
torch.set_num_threads(1)
import gnnaccel
import gnnaccel.lazy.programs, gnnaccel.lazy.tensor, gnnaccel.planning  # here once, not in each process
from gnnaccel import dgl_backend, engine, ops, report, sampling


class Renaming(importlib.machinery.SourceFileLoader):
    change = None

    def get_code(self, fullname):
        source = self.get_source(fullname)
        other = Renaming.change(fullname, source)
        return super().get_code(fullname) if other == source else compile(other, self.path, "exec", dont_inherit=True)


class Finder:
    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname.split(".")[0] != "dgl" and fullname != "gnnaccel.dgl_backend.touch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = Renaming(spec.loader.name, spec.loader.path)
        return spec


def train():
    """Losses of training, whole and on blocks."""
    import dgl
    from dgl import function as fn
    from dgl.nn import GATConv, GraphConv, HeteroGraphConv, SAGEConv

    class Own(torch.nn.Module):
        def __init__(self, ins, outs):
            super().__init__()
            self.lin = torch.nn.Linear(ins, outs)

        def forward(self, g, x):
            with g.local_scope():
                g.ndata["h"] = self.lin(x)
                g.update_all(lambda edges: {"m": torch.sigmoid(edges.dst["h"]) * edges.src["h"]}, fn.mean("m", "a"))
                g.update_all(fn.copy_u("h", "m"), lambda nodes: {"b": nodes.mailbox["m"].mean(1)})
                return g.ndata["a"] + g.ndata["b"]

    torch.manual_seed(0)
    ends = torch.randint(300, (2, 20000))
    g = dgl.add_self_loop(dgl.graph((ends[0], ends[1]), num_nodes=300))
    x, y, found = torch.randn(300, 8), torch.randint(4, (300,)), []
    makers = {
        "GraphConv": lambda ins, outs: GraphConv(ins, outs),
        "GATConv": lambda ins, outs: GATConv(ins, outs, 1),
        "SAGEConv": lambda ins, outs: SAGEConv(ins, outs, "mean"),
        "Own": Own,
    }
    for name, make in makers.items():
        torch.manual_seed(1)
        layers = torch.nn.ModuleList([make(8, 16), make(16, 4)])
        for _ in range(2):
            h = x
            for layer in layers:
                h = layer(g, h).relu().flatten(1)
            loss = torch.nn.functional.cross_entropy(h, y)
            with torch.no_grad():
                for weight, grad in zip(layers.parameters(), torch.autograd.grad(loss, [*layers.parameters()])):
                    weight -= 0.1 * grad
        found.append(loss.item())
        if name == "SAGEConv":
            g.ndata["x"] = x
            sampler = dgl.dataloading.NeighborSampler([-1, -1], prefetch_node_feats=["x"])
            loader = dgl.dataloading.DataLoader(g, torch.arange(300), sampler, batch_size=100, num_workers=0)
            for nodes, seeds, blocks in loader:
                h = blocks[0].srcdata["x"]
                for layer, block in zip(layers, blocks):
                    h = layer(block, h)
                found.append(h.sum().item())
    hetero = dgl.heterograph({("a", "on", "b"): (ends[0], ends[1]), ("b", "of", "b"): (ends[1], ends[0])})
    for kind in "ab":
        hetero.nodes[kind].data["h"] = x
    for _ in range(2):
        hetero.multi_update_all({name: (fn.copy_u("h", "m"), fn.sum("m", "o")) for name in ("on", "of")}, "sum")
    found.append(hetero.nodes["b"].data["o"].norm().item())
    torch.manual_seed(2)
    conv = HeteroGraphConv({name: SAGEConv(8, 4, "mean") for name in ("on", "of")}, "sum")
    for _ in range(2):
        out = conv(hetero, {kind: x for kind in "ab"})["b"]
    found.append(out.norm().item())
    return found


def attempt(path, rename, accelerate):
    """Losses without the name `path`, and what gnnaccel counted and said, as a dictionary."""
    name = path.split(":")[1].split(".")[-1]
    word = re.compile(rf"(?<![a-zA-Z0-9_]){name}(?![a-zA-Z0-9_])")

    def change(module, source):
        if module == "gnnaccel.dgl_backend.touch":
            at = "def _place(path: str) -> tuple[Any, str]:"
            assert at in source
            denied = at + f"\\n    if path == {path!r}:\\n        raise AttributeError"
            return source if rename else source.replace(at, denied)
        return word.sub(name + "_of_old", source) if rename else source

    Renaming.change = staticmethod(change)
    sys.meta_path.insert(0, Finder)
    dgl_backend.shim()
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("gnnaccel").addHandler(handler)
    try:
        if accelerate:
            gnnaccel.install()
        losses = train()
        if dgl_backend.is_enabled():
            dgl_backend.disable()
            dgl_backend.enable()
    except Exception:
        return {"error": traceback.format_exc()}
    sites = report.snapshot()
    return {
        "losses": losses,
        "accelerated": sorted(k for k in sites if sites[k].accelerated),
        "left": {k: sorted(sites[k].reasons) for k in sites if sites[k].reasons},
        "missing": sys.modules["gnnaccel.dgl_backend.touch"].MISSING if accelerate else {},
        "said": said,
    }


def forked(*args):
    read, write = os.pipe()
    if not os.fork():
        try:
            sys.stderr = open(os.devnull, "w")
            os.write(write, json.dumps(attempt(*args)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as answer:
        found = json.loads(answer.read() or '{"error": "it crashed"}')
    os.wait()
    return found


def tell(path, found, renamed):
    print(json.dumps([path, found | {"alone": alone["losses"], "renamed": renamed}]), flush=True)


alone, others = forked("dgl:nothing", False, False), []
assert "error" not in alone, alone
for path, can_rename in json.loads(sys.argv[1]):
    found = forked(path, True, True) if can_rename else {}
    if path in found.get("missing", ()) or ("error" in found and "error" not in forked(path, True, False)):
        tell(path, found, True)
    else:
        others.append(path)  # DGL needs it
dgl_backend.shim()
import dgl
for path in others:
    tell(path, forked(path, False, True), False)
'''
# What is counted in training -> where ours stands that is counted so.
KINDS = {
    "dgl.GraphConv": "dgl.nn.pytorch:GraphConv.forward",
    "dgl.GATConv": "dgl.nn.pytorch:GATConv.forward",
    "dgl.HeteroGraphConv": "dgl.nn.pytorch:HeteroGraphConv.forward",
    "dgl.multi_update_all": "dgl:DGLGraph.multi_update_all",
    "dgl.message function": "dgl.core:invoke_edge_udf",
    "dgl.reduce function": "dgl.core:message_passing",
    "dgl.NeighborSampler": "dgl.dataloading:NeighborSampler.sample_blocks",
}


def is_of_objects(path):
    """True for an attribute that a class itself has not."""
    try:
        return path.startswith("dgl.frame:Column.") or not hasattr(*touch._place(path))
    except AttributeError:
        return True


def names():
    """(name, whether DGL is imported with another) of all that are looked for. Attributes of objects once, whosever,
    and those alone that are private: others have words for names, which stand for more than one thing."""
    touch.look()
    paths = {path for one in touch.PATCHES for path in one.paths if one.when != "bridge"}
    found = {}
    for path in sorted(touch.NAMES | paths):
        name = path.rpartition(".")[2]
        if not is_of_objects(path):
            found[path] = path, "." not in path.partition(":")[2] and "_CAPI_" not in path
        elif name.startswith("_") or name in ("deferred_dtype", "has_explicit_bias", "share_weights"):
            found[name] = path, True
    return [*found.values()]


def outcomes(paths):
    command = [sys.executable, "-c", PROGRAM, json.dumps(paths)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GNNACCEL")}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr
    return dict(map(json.loads, run.stdout.splitlines()))


def complaint(path, outcome):
    """What is wrong with an outcome, or None."""
    if "error" in outcome:
        return outcome["error"]
    if not outcome["missing"].get(path) or sum(path in words for words in outcome["said"]) != 1:
        return f"said: {outcome['said']}"
    if any("not replaced" in words for words in outcome["missing"].values()):
        return f"an error: {outcome['missing']}"
    if outcome["losses"] != pytest.approx(outcome["alone"], 1e-3):
        return f"losses: {outcome['losses']}, alone {outcome['alone']}"
    if not outcome["renamed"] and is_of_objects(path):
        return "it was there"
    found = {*outcome["accelerated"]}
    if path in touch.NEEDED:
        return f"accelerated: {found}" if found else None
    gone = {p for one in touch.PATCHES for p in one.paths if outcome["missing"].keys() & {one.paths[0], *one.needs}}
    wanted = {kind for kind, patched in KINDS.items() if patched not in gone}
    if path.endswith(":GSpMM"):  # whose first call makes what multi_update_all reads
        wanted.discard("dgl.multi_update_all")
    ours = found & KINDS.keys()
    return None if ours == wanted and any(kind.startswith("dgl.g") for kind in found) else f"accelerated: {found}"


def test_names_of_dgl(request):
    """All of them with --all; else every third, as neighbours in their order are mostly of one object."""
    paths = names()[:: 1 if request.config.getoption("--all") else 3]
    found = outcomes(paths)
    wrong = {path: said for path, outcome in found.items() if (said := complaint(path, outcome)) is not None}
    assert not wrong, "\n".join(f"without {path}: {said}" for path, said in wrong.items())
    assert sum(outcome["renamed"] for outcome in found.values()) > len(paths) / 3


def test_this_dgl_has_all():
    dgl_backend.enable()
    dgl_backend.disable()
    assert not touch.MISSING
