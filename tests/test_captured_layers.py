"""gnnaccel.captured of steps with layers of PyG and of users: the same as the step as it is."""

import functools

import captured_steps
import pytest
import torch
import torch.nn.functional as F
from captured_steps import CUDA, DEVICE, both, problem, site
from torch import nn

import gnnaccel
from gnnaccel import report

device = captured_steps.device  # a fixture for all that is here


def _accelerated(make_model):
    """`problem` with a graph, and an accelerated model on it."""
    env = problem()
    torch.manual_seed(4)
    env.model = gnnaccel.accelerate(make_model().to(DEVICE))
    # Not Adam, which makes of what rounding leaves of a gradient of zero a step of the learning rate.
    env.optimizer = torch.optim.SGD(env.model.parameters(), lr=0.1)
    env.edge_index = torch.randint(0, 20, (2, 60)).to(DEVICE)
    return env


GAIN = 1.0


@pytest.mark.parametrize("kind", ["subclass", "own message", "own layer"])
def test_layers_of_users(kind, monkeypatch):
    """Of their own classes, accelerated: captured, and looked through as what the user wrote."""
    pyg = pytest.importorskip("torch_geometric").nn

    class Sub(pyg.SAGEConv):
        pass

    class OwnMessage(pyg.SAGEConv):
        def message(self, x_j):
            return torch.tanh(x_j) * GAIN

    class Own(pyg.MessagePassing):
        def __init__(self, i, o):
            super().__init__(aggr="sum")
            self.lin, self.gate = nn.Linear(i, o), nn.Linear(i, o)

        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=self.lin(x), g=self.gate(x))

        def message(self, x_j, g_i, g_j):
            return torch.sigmoid(g_i + g_j) * x_j * GAIN

    make_layer = {"subclass": Sub, "own message": OwnMessage, "own layer": Own}[kind]

    make = functools.partial(_accelerated, lambda: nn.ModuleList([make_layer(5, 3)]))

    def make_step(env):
        def train():
            env.optimizer.zero_grad()
            loss = F.cross_entropy(env.model[0](env.data.x, env.edge_index), env.data.y)
            loss.backward()
            env.optimizer.step()
            return loss

        return train

    def between(env, i):
        monkeypatch.setitem(globals(), "GAIN", 1.0 if i < 7 else 3.0)

    both(make, between, 12, make_step)
    assert site().accelerated >= 4, site()


PYG = ["GCNConv", "SAGEConv", "GINConv", "GATConv", "GATv2Conv", "TransformerConv", "ResGatedGraphConv"]


@pytest.mark.parametrize("name", PYG)
def test_layers_of_pyg(name):
    """Under watch, which looks at every function of torch's, and (CUDA) captured; the graph is another in the end."""
    pyg = pytest.importorskip("torch_geometric").nn

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            make = getattr(pyg, name)
            wrap = (lambda i, o: make(nn.Linear(i, o))) if name == "GINConv" else make
            self.convs = nn.ModuleList([wrap(5, 8), wrap(8, 3)])

        def forward(self, x, edge_index):
            return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)

    make = functools.partial(_accelerated, Layers)

    def make_step(env):
        def train():
            env.optimizer.zero_grad()
            out = env.model(env.data.x, env.edge_index)
            loss = F.cross_entropy(out[env.data.mask], env.data.y[env.data.mask])
            loss.backward()
            env.optimizer.step()
            return loss

        return train

    def between(env, i):
        if i == 8:
            env.edge_index[0, :30] = 1
        elif i == 16:
            env.edge_index = env.edge_index[:, :40].clone()

    if CUDA:
        step = both(make, between, calls=24, make_step=make_step)
        assert step.variants == 3 and site().accelerated == 15, site()
    else:  # our calls pass the dispatcher by, so that the stand-in cannot replay them
        both(make, calls=3, make_step=make_step)
    counted = report.snapshot()
    assert not any(site.left for kind, site in counted.items() if CUDA or kind.startswith("pyg.")), counted
