"""Models whose result on a sampled batch is sliced at once, written as scripts are that would see which rows there are:
numbers, gradients and errors are those of a result that is not sliced at once."""

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

pyg = pytest.importorskip("torch_geometric")
from reached import by_design  # noqa: E402
from test_pyg_sliced import Twice  # noqa: E402
from torch_geometric.data import Data  # noqa: E402
from torch_geometric.loader import NeighborLoader  # noqa: E402
from torch_geometric.nn import GATConv, GraphSAGE, SAGEConv  # noqa: E402

from gnnaccel import in_place, pyg_backend  # noqa: E402
from gnnaccel.lower import bounds  # noqa: E402
from gnnaccel.pyg_backend import sliced  # noqa: E402

IN, WIDTH, OUT, SEEDS = 6, 8, 4, 8


@pytest.fixture(autouse=True)
def steps(monkeypatch):
    """Layers that were asked for rows, and how many."""
    monkeypatch.setattr(bounds, "SAMPLED_PRODUCTS", 0)
    seen, compute = [], sliced._Layer.compute
    monkeypatch.setattr(sliced._Layer, "compute", lambda self, *given: seen.append(given[0]) or compute(self, *given))
    pyg_backend.enable()
    yield seen
    pyg_backend.disable()


@pytest.fixture
def batch():
    torch.manual_seed(1)
    data = Data(x=torch.rand(300, IN, dtype=torch.float64), edge_index=torch.randint(300, (2, 1200)))
    return next(iter(NeighborLoader(data, [3, 2, 2], batch_size=SEEDS)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(SAGEConv(*ends) for ends in ((IN, WIDTH), (WIDTH, WIDTH), (WIDTH, OUT)))

    def rest(self, x, edge_index):
        return self.convs[2](self.convs[1](x, edge_index), edge_index)


class Block(nn.Module):
    def forward(self, x):
        return Twice.apply(x)


block = Block()


class WithoutGradient(Net):
    """Written in place, where autograd does not see it."""

    def forward(self, x, edge_index):
        x = self.convs[0](x, edge_index)
        with torch.no_grad():
            x.relu_()
        return self.rest(x, edge_index)


class NumpysNames(Net):
    def forward(self, x, edge_index):
        x = self.convs[0](x, edge_index)
        x = torch.cat([x, x.tanh()], axis=1)
        x = F.linear(input=x, weight=torch.ones(WIDTH, 2 * WIDTH, dtype=x.dtype))
        return torch.log_softmax(input=self.rest(x, edge_index), dim=1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(IN, WIDTH)

    def encode(self, x, edge_index):
        return Twice.apply(self.conv(x, edge_index))


class OtherMethod(Net):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()

    def forward(self, x, edge_index):
        return self.rest(self.encoder.encode(x, edge_index), edge_index)


class InAList(Net):
    def __init__(self):
        super().__init__()
        self.blocks = [Block()]

    def forward(self, x, edge_index):
        return self.rest(self.blocks[0](self.convs[0](x, edge_index)), edge_index)


class Global(Net):
    def forward(self, x, edge_index):
        return self.rest(block(self.convs[0](x, edge_index)), edge_index)


class Held(Net):
    """A function in an attribute leads to another in an attribute."""

    def __init__(self):
        super().__init__()
        self.first = lambda x: self.second(x)
        self.second = Twice.apply

    def forward(self, x, edge_index):
        return self.rest(self.first(self.convs[0](x, edge_index)), edge_index)


class Loads(Net):
    def forward(self, x, edge_index):
        x = self.convs[0](x, edge_index)
        self.convs[0].load_state_dict(self.convs[0].state_dict())
        return self.rest(x, edge_index)


class Trains(Net):
    def __init__(self):
        super().__init__()
        self.conv = GATConv(IN, WIDTH, dropout=0.5).train(False)

    def forward(self, x, edge_index):
        x = self.conv.train(False)(x, edge_index)
        self.conv.train()
        return self.rest(x, edge_index)


class Catches(Net):
    def forward(self, x, edge_index):
        x = self.convs[0](x, edge_index)
        try:
            x = F.leaky_relu(x, "steep")
        except TypeError:
            x = x + 1
        return self.rest(x, edge_index)


class Retains(Net):
    def forward(self, x, edge_index):
        x = self.convs[0](x, edge_index)
        x.retain_grad()
        self.kept = [x]
        return self.rest(x, edge_index)


class Keeps(Net):
    """In an attribute, which says so; in a list, which does not."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x, edge_index):
        x = self.convs[0](x, edge_index).relu()
        self.kept.append(x)
        return self.rest(x, edge_index)


class Nested(Net):
    def forward(self, x, edge_index):
        for conv in self.convs[:2]:
            x = F.relu(conv(x, edge_index))
        return F.leaky_relu(self.convs[2](x, edge_index), 0.1)


MODELS = {
    "calls in calls": Nested,
    "in place, without a gradient": WithoutGradient,
    "names of arguments": NumpysNames,
    "another method of a part": OtherMethod,
    "a module in a list": InAList,
    "a global module": Global,
    "functions in attributes": Held,
    "parameters loaded behind a call": Loads,
    "switched behind a call": Trains,
    "an error caught": Catches,
    "gradient retained": Retains,
    "kept in a list": Keeps,
    "an activation of one's own": lambda: GraphSAGE(IN, WIDTH, 3, OUT, act=Twice.apply),
}


def seeds_of(model, batch, at_once):
    if at_once:
        return model(batch.x, batch.edge_index)[: batch.batch_size]
    out = model(batch.x, batch.edge_index)
    return out[: batch.batch_size]


# name -> why its layers compute all rows, or those before one of its statements
ALL_ROWS = {
    "in place, without a gradient": r"relu_\(\)",
    "names of arguments": r"cat\(\)",
    "another method of a part": "it calls 'Twice'",
    "a module in a list": "'blocks', a module that is no part of it",
    "a global module": "'block', a module that is no part of it",
    "functions in attributes": "it calls 'Twice'",
    "parameters loaded behind a call": r"calls load_state_dict\(\)",
    "switched behind a call": r"calls train\(\)",
    "an error caught": r"leaky_relu\(\)",
    "gradient retained": r"forward\(\) sets attributes",
    "kept in a list": "somebody keeps the results of a layer",
    "an activation of one's own": "it calls 'Twice'",
}


@pytest.mark.reached(kinds="first rows")
@pytest.mark.parametrize("name", MODELS)
def test_scripts(name, batch, steps):
    torch.manual_seed(2)
    model = MODELS[name]().double()
    seeds_of(model, batch, False)  # by which its class becomes known
    results = []
    for at_once in (False, True):
        model.zero_grad()
        kept = vars(model).get("kept", [])
        kept.clear()
        torch.manual_seed(3)
        with by_design(ALL_ROWS.get(name)):
            out = seeds_of(model, batch, at_once)
        kept = vars(model).get("kept", [])
        of_kept = torch.autograd.grad(out.square().sum(), kept, retain_graph=True) if kept else ()
        hooked = []
        for value in kept:
            value.register_hook(hooked.append)
        out.square().sum().backward()
        retained = [value.grad for value in kept if value.retains_grad]
        results.append((out.detach(), of_kept, hooked, retained, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0])
    assert name != "kept in a list" or len(results[1][2]) == 1
    assert name in ALL_ROWS or SEEDS in steps


def test_calls_in_calls_are_seen_through(batch):
    assert sliced.distrust(Nested()) is None

    def written(self, x, edge_index):
        return F.leaky_relu(self.convs[0](x, edge_index), 0.1, True)

    assert "in place" in in_place.of_calls([written.__code__], [])


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(IN, WIDTH)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index).relu()


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.conv = Inner(), SAGEConv(WIDTH, OUT)

    def forward(self, x, edge_index):
        return self.conv(self.inner(x, edge_index), edge_index)


class Leaves(fx.Tracer):
    def is_leaf_module(self, module, name):
        return True


def test_torch_fx_sees_the_calls_of_modules(batch):
    model = Outer().double()
    wanted = [str(node.target) for node in Leaves().trace(model).nodes]
    seeds_of(model, batch, True)
    assert "__call__" in vars(Inner)
    assert [str(node.target) for node in Leaves().trace(model).nodes] == wanted
