"""Modules that cannot be captured, or not every call of them: they run as they are, and are counted with the reason."""

import logging
import random

import captured_cases
import pytest
import torch
from captured_cases import (
    DEVICE,
    LAYERS,
    both,
    evaluate,
    problem,
    site,
    train,
    variants,
)
from torch import nn

import gnnaccel
from gnnaccel import report
from gnnaccel.capture import captures_of

device = captured_cases.device  # a fixture for all that is here


def _item(model, h):
    return h * float(h.sum() > -1e9)


def _count(model, h):
    model.extra = (model.extra or 0) + 1
    return h


def _append(model, h):
    model.log.append(1)
    return h


def _keep(model, h):
    model.extra = h.detach()
    return h


def _dice(model, h):
    return h * (1 + 0 * random.random())


def _hooks(model, h):
    h.register_hook(lambda grad: grad * 2)
    return h


def _prints(model, h):
    print("shape", h.shape)
    return h


def _logs(model, h):
    logging.getLogger("of.a.user").warning("here")
    return h


def _reads_grads(model, h):
    grad = model.unused.weight.grad
    return h if grad is None else h * grad.sum()


def _writes(model, h):
    with torch.no_grad():
        model.last.lin_l.weight.clamp_(-1, 1)
    return h


TABLE = torch.ones(8, device=DEVICE, requires_grad=True)


def _foreign(model, h):
    return h * TABLE


def _switches(model, h):
    model.norm.train(not model.norm.training)
    return h


REFUSED = {
    "a value is read": (_item, "waits for the GPU"),
    "a counter": (_count, "it changes module.extra"),
    "a list grows": (_append, "it changes module.log"),
    "a tensor is kept": (_keep, "it changes module.extra"),
    "a random number": (_dice, "on the host"),
    "a hook is set": (_hooks, "register_hook"),
    "it prints": (_prints, "print()"),
    "it logs": (_logs, "of.a.user"),
    "it reads a .grad": (_reads_grads, "it uses grad of a tensor"),
    "a parameter is written": (_writes, "writes into an argument or a parameter"),
    "another's gradient": (_foreign, "neither a parameter of it nor an argument"),
    "a part is switched": (_switches, "training"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_runs_as_it_is(name):
    does, words = REFUSED[name]
    TABLE.grad = None
    env = both(lambda: problem(does=does))
    (reason,) = site().reasons
    assert words in reason and variants(env) == 0 and site().left >= 8 and captures_of(env.model).refused == reason


def _reads_in_evaluation(model, h):
    return h if model.training else h * float(h.sum() > -1e9)


def _reads_for_a_while(model, h):
    return h if model.extra is None else h * float(h.sum() > -1e9)


def test_what_keeps_one_kind_of_calls_leaves_the_others():
    env = both(lambda: problem(does=_reads_in_evaluation), step=lambda env: train(env) + evaluate(env))
    assert variants(env) == 1 and site().accelerated == 11 and site().left == 12

    def between(env, i):
        env.model.extra = 1 if 8 <= i < 14 else None

    report.reset()
    env = both(lambda: problem(does=_reads_for_a_while), between, calls=20)
    assert variants(env) == 1 and site().accelerated == 11 and site().left == 4


def test_hooks_of_parts_that_torch_does_not_know():
    hidden = nn.Identity().to(DEVICE)
    hidden.register_forward_hook(lambda module, args, out: out * 2)
    env = both(lambda: problem(does=lambda model, h: hidden(h)))
    assert "hook" in captures_of(env.model).refused


class Returns(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.conv, self.what = LAYERS["SAGE"](5, 3), what

    def forward(self, x, edge_index):
        return self.what(self, x, self.conv(x, edge_index))


RETURNS = {
    "a parameter": (lambda m, x, h: (h, m.conv.lin_l.weight), "returns a Parameter"),
    "a view of a parameter": (lambda m, x, h: (h, m.conv.lin_l.weight.t()), "shares memory"),
    "a view of an argument": (lambda m, x, h: (h, x[:3]), "shares memory"),
    "two views": (lambda m, x, h: (h, h[:3]), "shares memory"),
    "an object": (lambda m, x, h: (h, m), "something other than tensors"),
    "a number of its own": (lambda m, x, h: (h, len(h)), None),
    "an argument": (lambda m, x, h: (h, x), None),
    "a sparse matrix": (
        lambda m, x, h: (h, torch.eye(3, device=x.device).to_sparse()),
        "waits" if DEVICE == "cuda" else "sparse",
    ),
}


@pytest.mark.parametrize("name", RETURNS)
def test_results(name):
    what, words = RETURNS[name]

    def make():
        env = problem()
        env.model = gnnaccel.accelerate(Returns(what).to(DEVICE))
        return env

    both(make, step=lambda env: env.model(env.data.x, env.data.edge_index)[0])
    reasons = site("Returns").reasons
    assert not reasons if words is None else words in next(iter(reasons)), reasons
