"""Captured modules and autograd: gradients that are added up, scaled, taken late, twice or of each other, results and
inputs of all kinds, dropout, copies and checkpoints: as without a capture."""

import copy
import io
import pickle
from types import SimpleNamespace

import captured_cases
import pytest
import torch
import torch.nn.functional as F
from captured_cases import (
    DEVICE,
    LAYERS,
    OF,
    Net,
    Of,
    both,
    capture,
    evaluate,
    in_both,
    problem,
    site,
    train,
    variants,
)
from torch import nn
from torch_geometric import nn as pyg_nn

import gnnaccel
from gnnaccel.capture import captures_of

device = captured_cases.device  # a fixture for all that is here


def _accumulate(env):
    env.calls = getattr(env, "calls", 0) + 1
    loss = F.cross_entropy(env.model(env.data.x, env.data.edge_index), env.data.y)
    (loss / 4).backward()
    if env.calls % 4 == 0:
        nn.utils.clip_grad_norm_(env.model.parameters(), 0.1)
        env.optimizer.step()
        env.optimizer.zero_grad(set_to_none=env.to_none)
    return loss


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_accumulated_and_clipped(to_none):
    def make():
        env = problem()
        env.to_none = to_none
        return env

    env = both(make, step=_accumulate, calls=30)
    assert site().accelerated == 27 and in_both(env)


def test_gradients_last():
    env = capture(problem())
    kept = []
    for _ in range(10):
        train(env)
        grad = env.model.last.lin_l.weight.grad
        kept.append((grad, grad.clone()))
        env.optimizer.zero_grad(set_to_none=True)
    assert in_both(env) and all(torch.equal(grad, value) for grad, value in kept)
    assert len({grad.data_ptr() for grad, _ in kept}) == 10


def test_scaled_losses():
    def step(env):
        env.optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(env.model(env.data.x, env.data.edge_index).float(), env.data.y)
        env.scaler.scale(loss).backward()
        env.scaler.step(env.optimizer)
        env.scaler.update()
        return loss

    def make():
        env = problem()
        env.scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0, growth_interval=3)
        return env

    assert in_both(both(make, step=step, narrow=True)) and site().accelerated == 11


def test_results_last():
    env, own = capture(problem()), capture(problem(), copy_outputs=False)
    kept = [train(env) and env.model(env.data.x, env.data.edge_index) for _ in range(10)]
    values = [x.detach().clone() for x in kept]
    train(env)
    assert all(torch.equal(x, value) for x, value in zip(kept, values, strict=True))
    own.model.eval()
    with torch.no_grad():
        shared = [own.model(own.data.x * i, own.data.edge_index) for i in range(10)]
    assert torch.equal(shared[-1], shared[-2]) and not torch.equal(shared[0], shared[-1])


def _pairs(env):
    """Two forwards before one backward."""
    env.optimizer.zero_grad()
    one = env.model(env.data.x, env.data.edge_index)
    other = env.model(env.data.x, env.data.edge_index)
    loss = (one * other.detach().sigmoid()).square().mean() + F.cross_entropy(other, env.data.y)
    loss.backward()
    env.optimizer.step()
    return loss


def test_forwards_before_a_backward():
    env = both(problem, step=_pairs, calls=14)
    (reason,) = site().reasons
    assert variants(env) == 2 and "waits for its backward" in reason and site().left <= 4

    def step(env):  # the first one's backward comes last
        outs = [env.model(env.data.x * i, env.data.edge_index) for i in range(4)]
        grads = [torch.autograd.grad(out.square().mean(), env.model.first.lin_l.weight)[0] for out in outs]
        return torch.stack(grads)

    assert variants(both(problem, step=step, calls=10)) == 4


def test_a_second_capture_that_fails(monkeypatch):
    env, tried = capture(problem()), []
    for _ in range(8):
        train(env)

    def fails(*args):
        tried.append(args)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(captured_cases.modules, "Pair", fails)
    for _ in range(20):
        _pairs(env)
    assert len(tried) == 2 and variants(env) == 1 and site().accelerated == 5 + 20


def test_early_exits():
    def step(env):
        env.out = env.model(env.data.x, env.data.edge_index)  # while the one before is there, without a backward
        return env.out if len(env.norms) % 3 else train(env).expand_as(env.out)

    env = both(problem, lambda env, i: env.norms.append(i), step=step, calls=24)
    assert site().accelerated > 20 and variants(env) == 2


def test_backward_twice():
    def step(env):
        env.optimizer.zero_grad()
        out = env.model(env.data.x, env.data.edge_index)
        F.cross_entropy(out, env.data.y).backward(retain_graph=True)
        out.square().mean().backward()
        env.optimizer.step()
        return out

    env = both(problem, step=step)
    assert site().accelerated == 11 and in_both(env)
    env.optimizer.zero_grad()
    out = env.model(env.data.x, env.data.edge_index).sum()
    out.backward(retain_graph=True)
    again = env.model(env.data.x, env.data.edge_index)  # must not overwrite what is kept
    want = [p.grad.clone() for p in env.model.last.parameters()]
    env.optimizer.zero_grad()
    out.backward()
    torch.testing.assert_close([p.grad for p in env.model.last.parameters()], want, **OF)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()
    again.sum().backward()


@pytest.mark.parametrize("from_the_start", [True, False])
def test_gradients_of_gradients(from_the_start):
    def step(env):
        env.calls = getattr(env, "calls", 0) + 1
        env.optimizer.zero_grad()
        weight = env.model.first.lin_l.weight
        loss = env.model(env.data.x, env.data.edge_index).square().mean()
        if from_the_start or env.calls == 10:
            loss = loss + torch.autograd.grad(loss, weight, create_graph=True)[0].square().sum()
        loss.backward()
        env.optimizer.step()
        return loss

    if from_the_start:
        both(problem, step=step)
        (reason,) = site().reasons
        assert "create_graph" in reason and site().accelerated == 0
    else:
        with pytest.raises(RuntimeError, match=r"Net: was captured .*create_graph"):
            both(problem, step=step)


@pytest.mark.parametrize("kind", ["leaf", "moving", "moving leaf"])
def test_gradients_to_inputs(kind):
    def step(env):
        env.optimizer.zero_grad()
        if kind == "moving leaf":
            env.data.x = env.data.x.detach().clone().requires_grad_()
        x = env.data.x * 2 if kind == "moving" else env.data.x
        env.model(x, env.data.edge_index).square().mean().backward()
        env.optimizer.step()
        grad = env.data.x.grad.clone()
        env.data.x.grad = None
        return grad

    def make():
        env = problem()
        env.data.x.requires_grad_()
        return env

    env = both(make, step=step)
    assert site().accelerated == 11 and in_both(env)


def test_new_features_at_each_call():
    def between(env, i):
        env.data.x = torch.full((20, 5), 0.1 * i, device=DEVICE) + env.data.x.roll(1, 0)

    env = both(problem, between)
    assert variants(env) == 1 and site().accelerated == 11

    def widths(env, i):
        env.data.x = torch.ones(20 + i % 3, 5, device=DEVICE) * i
        env.data.y, env.data.mask = (torch.ones(20 + i % 3, device=DEVICE, dtype=t) for t in (torch.long, torch.bool))

    assert variants(both(problem, widths, calls=30)) == 3 and site().accelerated > 20


def test_arguments_by_name_and_in_containers():
    class Wide(Net):
        def forward(self, inputs, *, edge_index, scale=1.0, gain=None):
            out = super().forward(inputs["x"], edge_index) * scale
            return {"out": out if gain is None else out * gain, "scale": scale, "inputs": inputs["x"]}

    def make():
        env = problem()
        env.model = gnnaccel.accelerate(Wide().to(DEVICE))
        return env

    def step(env):
        env.calls = getattr(env, "calls", 0) + 1
        found = env.model({"x": env.data.x}, edge_index=env.data.edge_index, scale=1.0 + env.calls // 8)
        assert found["inputs"] is env.data.x and found["scale"] == 1.0 + env.calls // 8
        return found["out"]

    assert variants(both(make, step=step)) == 2


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = LAYERS["SAGE"](5, 3), LAYERS["SAGE"](5, 3)

    def forward(self, x, edge_index):
        one = self.one(x, edge_index)
        return one, self.other(x, edge_index), one.argmax(1), one


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_some_results_are_used(used):
    """Parameters that do not reach the loss have no gradient, as without a capture."""

    def make():
        env = problem()
        env.model = gnnaccel.accelerate(Halves().to(DEVICE))
        env.optimizer = torch.optim.SGD(env.model.parameters(), lr=0.1, weight_decay=0.1)
        return env

    def step(env):
        outs = env.model(env.data.x, env.data.edge_index)
        assert not outs[2].requires_grad and outs[3] is outs[0]
        env.optimizer.zero_grad()
        loss = sum(outs[k].square().mean() for k in used)
        loss.backward()
        env.optimizer.step()
        return loss

    env = both(make, step=step)
    assert site("Halves").accelerated == 11 and in_both(env)


def test_writes_between_forward_and_backward():
    env = capture(problem())
    for _ in range(10):
        train(env)
    for name, write in {"parameter": env.model.last.lin_l.weight, "features": env.data.x}.items():
        loss = env.model(env.data.x, env.data.edge_index).sum()
        with torch.no_grad():
            write.mul_(1.0)
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()
        assert name
    with torch.no_grad():
        env.model.last.lin_l.bias.mul_(1.0)
    train(env)


def test_dropout_draws_new_numbers():
    env = capture(problem(dropout=0.5))
    outs = [env.model(env.data.x, env.data.edge_index).sum().item() for _ in range(12)]
    assert site().accelerated == 9 and len(set(outs)) == 12


def test_a_backward_sees_what_its_forward_has_dropped():
    model = Of(lambda m, x, e: F.dropout(m.conv(x, e), 0.5), conv=pyg_nn.GraphConv(5, 3, bias=False)).to(DEVICE)
    env = problem()
    env.model = gnnaccel.accelerate(model)
    capture(env)
    for _ in range(12):
        x = env.data.x.clone().requires_grad_()
        out = env.model(x, env.data.edge_index).sum()
        out.backward()
        torch.testing.assert_close((x * x.grad).sum(), out, **OF)  # linear in x
    assert site("Of").accelerated == 9 and in_both(env)


def test_copies_and_checkpoints(tmp_path):
    env = capture(problem())
    keys = set(env.model.state_dict())
    for _ in range(8):
        train(env)
    assert set(env.model.state_dict()) == keys
    twin, shallow = copy.deepcopy(env.model), copy.copy(env.model)
    torch.save(env.model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    pickled = pickle.loads(pickle.dumps(env.model))
    buffer = io.BytesIO()
    torch.save(env.model.state_dict(), buffer)
    want = evaluate(env)
    for other in (twin, again, pickled, shallow):
        assert captures_of(other) is None
        torch.testing.assert_close(evaluate(SimpleNamespace(model=other, data=env.data)), want, **OF)
    with torch.no_grad():
        twin.scale, twin.last.lin_l.weight[:] = 2.0, 0
    torch.testing.assert_close(evaluate(env), want, **OF)
    vars(twin).update(vars(env.model) | {"scale": 3.0})  # all its attributes, as replicas have them
    torch.testing.assert_close(evaluate(SimpleNamespace(model=twin, data=env.data)), want * 9, **OF)
