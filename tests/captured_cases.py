"""What tests of captured modules share: a model, its training, and the same with and without a capture."""

from types import SimpleNamespace

import pytest
import recorded
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import nn as pyg_nn

import gnnaccel
from gnnaccel import report
from gnnaccel.capture import attaching, captures_of, guard, modules, obstacles, optimizers, pair

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
OF = {"rtol": 1e-4, "atol": 1e-5} if CUDA else {"rtol": 1e-5, "atol": 1e-6}
OF_HALF = {"rtol": 2e-2, "atol": 2e-2}
SCALE = 1.0  # which forward() reads


@pytest.fixture(autouse=True)
def device(monkeypatch):
    report.reset()
    if not CUDA:
        for module in (attaching, guard, modules, obstacles, optimizers, pair):
            monkeypatch.setattr(module, "Recording", recorded.Recording)


LAYERS = {
    "GCN": lambda *sizes: pyg_nn.GCNConv(*sizes),
    "SAGE": lambda *sizes: pyg_nn.SAGEConv(*sizes),
    "GAT": lambda *sizes: pyg_nn.GATConv(*sizes),
    "GraphConv": lambda *sizes: pyg_nn.GraphConv(*sizes),
}


class Net(nn.Module):
    """Two layers with a norm between them; `does` is what else forward() does."""

    def __init__(self, layer="SAGE", dropout=0.0, does=None):
        super().__init__()
        self.first, self.norm, self.last = LAYERS[layer](5, 8), nn.BatchNorm1d(8), LAYERS[layer](8, 3)
        self.unused = nn.Linear(2, 2)
        self.dropout, self.scale, self.extra, self.does, self.log = dropout, 1.0, None, does, []

    def forward(self, x, edge_index):
        h = F.dropout(self.norm(self.first(x, edge_index)).relu(), self.dropout, self.training)
        if self.does is not None:
            h = self.does(self, h)
        return self.last(h, edge_index) * (self.scale * SCALE)


def problem(layer="SAGE", does=None, dropout=0.0, make=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5)):
    torch.manual_seed(0)
    model = Net(layer, dropout, does).to(DEVICE)
    data = SimpleNamespace(
        x=torch.randn(20, 5, device=DEVICE),
        edge_index=torch.randint(0, 20, (2, 60), device=DEVICE),
        y=torch.randint(0, 3, (20,), device=DEVICE),
        mask=torch.rand(20, device=DEVICE) < 0.6,
    )
    return SimpleNamespace(model=gnnaccel.accelerate(model), data=data, optimizer=make(model.parameters()), norms=[])


def train(env):
    env.model.train()
    env.optimizer.zero_grad()
    out = env.model(env.data.x, env.data.edge_index)
    loss = F.cross_entropy(out[env.data.mask], env.data.y[env.data.mask])
    loss.backward()
    env.optimizer.step()
    return loss


@torch.no_grad()
def evaluate(env):
    env.model.eval()
    return env.model(env.data.x, env.data.edge_index).square().mean()


def capture(env, **options):
    gnnaccel.accelerate(env.model, cuda_graphs=True, **options)
    return env


def both(make_env, between=lambda env, i: None, calls=14, step=train, narrow=False, **options):
    """What `step` gives with the model as it is and captured, and its state afterwards; `between` is called before call
    i. narrow: on CUDA by the digits of bfloat16, as sums come in another order there. Returns the environment of the
    latter."""
    narrow = narrow and CUDA
    found = []
    for wrap in (lambda env: env, lambda env: capture(env, **options)):
        env = wrap(make_env())
        torch.manual_seed(1)
        results = []
        for i in range(calls):
            between(env, i)
            results.append(step(env).detach().clone())
        state = [t.detach().clone() for t in env.model.state_dict().values()]
        grads = [None if p.grad is None else p.grad.clone() for p in env.model.parameters()]
        found.append((torch.stack(results), state, grads, env))
    (want, want_state, want_grads, _), (got, got_state, got_grads, env) = found
    torch.testing.assert_close(got, want, **(OF_HALF if narrow else OF))
    for ours, theirs in zip(got_state + got_grads, want_state + want_grads, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, **(OF_HALF if narrow else {"rtol": 1e-3, "atol": 1e-4}))
    return env


def site(name="Net"):
    return report.snapshot()[f"captured.{name}"]


def variants(env):
    return captures_of(env.model).variants


def in_both(env):
    """Whether the backward of the last capture is one as well."""
    return bool(captures_of(env.model)._pairs[-1]._backwards)


class Of(nn.Module):
    """A module of parts whose forward is `call`(module, *arguments)."""

    def __init__(self, call, **parts):
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.call(self, *args, **kwargs)


def conv(layer="SAGE", *sizes):
    return LAYERS[layer](*(sizes or (5, 3)))
