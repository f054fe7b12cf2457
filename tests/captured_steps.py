"""What tests of captured steps share: a model, its training, and the same with and without a capture. On the CPU with a
stand-in for the CUDA graph (recorded.py), on a GPU with that."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import recorded
import torch
import torch.nn.functional as F
from torch import nn

import gnnaccel
from gnnaccel import report
from gnnaccel.capture import guard, steps, variant

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


@pytest.fixture(autouse=True)
def device(monkeypatch):
    report.reset()
    if not CUDA:
        for module in (guard, steps, variant):
            monkeypatch.setattr(module, "Recording", recorded.Recording)
        for name in ("adam", "adamw", "rmsprop"):
            module = importlib.import_module(f"torch.optim.{name}")
            monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *a, **k: ["cpu"], raising=False)


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.dropout, self.scale, self.extra = dropout, 1.0, None

    def forward(self, x):
        h = F.dropout(self.norm(self.first(x)).relu(), self.dropout, self.training)
        return self.last(h) * self.scale


def problem(make=lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=5e-4), dropout=0.0):
    torch.manual_seed(0)
    model = Net(dropout).to(DEVICE)
    data = SimpleNamespace(
        x=torch.randn(20, 5, device=DEVICE),
        y=torch.randint(0, 3, (20,), device=DEVICE),
        mask=torch.rand(20, device=DEVICE) < 0.6,
    )

    def weigh(loss):
        return loss * weigh.by

    weigh.by = 1.0
    return SimpleNamespace(
        model=model, data=data, optimizer=make(model.parameters()), factor=1.0, names=set(), flags={"one": True},
        array=np.ones(1, dtype=np.float32), weigh=weigh,
    )  # fmt: skip


def training(env):
    def train():
        env.model.train()
        env.optimizer.zero_grad()
        out = env.model(env.data.x)
        loss = env.factor * F.cross_entropy(out[env.data.mask], env.data.y[env.data.mask])
        if hasattr(env, "late"):
            loss = loss * env.late
        loss = env.weigh(loss) * (1 + len(env.names)) * (1.0 if "one" in env.flags else 0.5) * float(env.array[0])
        loss.backward()
        env.optimizer.step()
        return loss

    return train


def both(make_env, between=lambda env, i: None, calls=14, make_step=training, **options):
    """Losses, parameters and buffers of a step as it is and captured; `between` is called before call i."""
    found = []
    for wrap in (lambda step: step, lambda step: gnnaccel.captured(step, **options)):
        env = make_env()
        step = wrap(make_step(env))
        torch.manual_seed(1)
        losses = []
        for i in range(calls):
            between(env, i)
            losses.append(step().detach().clone())
        found.append((torch.stack(losses), [t.detach().clone() for t in env.model.state_dict().values()], step))
    (want, want_state, _), (got, got_state, step) = found
    slack = max(1, calls // 10)
    slack *= 100 if CUDA else 1  # Adam that can be captured takes powers of beta in float32
    torch.testing.assert_close(got, want, rtol=1e-5 * slack, atol=1e-6 * slack)
    for ours, theirs in zip(got_state, want_state, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4 * slack, atol=1e-5 * slack)
    return step


def site():
    return report.snapshot()["captured.train"]


def to_other_memory(env):
    env.model.last.weight.data = env.model.last.weight.data * 0.5
