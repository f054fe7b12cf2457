"""Messages that users write, and what their code may do around them: as PyG alone, whatever runs them."""

import copy

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("torch_geometric")

from reached import by_design
from torch_geometric import nn
from torch_geometric.nn import MessagePassing

from gnnaccel import pyg_backend, report
from gnnaccel.lazy import blocks
from gnnaccel.lower import bounds

N, E, D = 40, 300, 20
INDEX = torch.randint(0, N, (2, E), generator=torch.Generator().manual_seed(0))


class Layer(MessagePassing):
    def __init__(self, function, aggr="sum"):
        super().__init__(aggr=aggr)
        self.function = function
        self.lin, self.joined = torch.nn.Linear(D, D), torch.nn.Linear(2 * D, D)
        self.low = torch.nn.Parameter(torch.tensor(0.1))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return self.function(self, x_i, x_j)


def far(self, x_i, x_j):
    wide = (x_i + x_j).double() * 50
    return (wide.exp() / (1 + wide.exp())).float()


MESSAGES = {
    "to int and back": lambda self, x_i, x_j: ((x_i - x_j) * 3).to(torch.int64).to(x_j.dtype) * x_j,
    "to bool and back": lambda self, x_i, x_j: (x_i - x_j).relu().to(torch.bool).to(x_j.dtype) * x_j,
    "to half and back": lambda self, x_i, x_j: (x_i * x_j).to(torch.float16).sum(-1)[:, None].float() * x_j,
    "wider in between": far,
    "what rounding takes": lambda self, x_i, x_j: ((x_i + x_j) - (x_i + x_j).bfloat16().float()).detach() * x_j,
    "a bound that is trained": lambda self, x_i, x_j: (x_i + x_j).clamp(min=self.low) * x_j,
    "no bound": lambda self, x_i, x_j: (x_i + x_j).clamp(min=float("-inf"), max=1.0) * x_j,
    "map of a difference": lambda self, x_i, x_j: self.lin(x_j - x_i).relu(),
    "map of both ends": lambda self, x_i, x_j: self.joined(torch.cat([x_i, x_j - x_i], -1)).relu(),
    "map of one end twice": lambda self, x_i, x_j: self.joined(torch.cat([x_j, x_i + x_j], -1)).relu(),
    "map of a map": lambda self, x_i, x_j: self.lin(self.joined(torch.cat([x_i, x_j], -1)).relu()),
    "root of what is not negative": lambda self, x_i, x_j: torch.sqrt(torch.relu(x_i - x_j)),
    "kinks": lambda self, x_i, x_j: F.logsigmoid((x_i + x_j).relu()) + F.hardtanh(x_i + x_j),
    "a bias for each edge": lambda self, x_i, x_j: F.linear(x_i + x_j, self.lin.weight, None) + x_i,
}


# name -> why PyG makes the messages; of a cast of what needs no gradient it need not
ROWS = {"a bound that is trained": r"clamp\(\) takes one row"}
ROWS_FOR_GRADIENTS = {**ROWS, **dict.fromkeys(("to int and back", "to bool and back"), r"\bto\(\) takes one row")}


@pytest.mark.reached
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("aggr", ["sum", "max"])
@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name, aggr, stored, monkeypatch):
    if not stored:
        monkeypatch.setattr(bounds, "STORED_BYTES", {})
        monkeypatch.setattr(bounds, "STORED_COSTLY_BYTES", {})
    torch.manual_seed(0)
    plain = Layer(MESSAGES[name], aggr)
    ours = pyg_backend.accelerate(copy.deepcopy(plain))
    for offset in (0.0, 10.0):
        x = torch.randn(N, D) + offset
        found = []
        for layer in (plain, ours):
            with by_design(ROWS.get(name)), torch.no_grad():
                still = layer(x, INDEX)
            given = x.clone().requires_grad_()
            with by_design(ROWS_FOR_GRADIENTS.get(name)):
                out = layer(given, INDEX)
            wanted = [t for t in (given, *layer.parameters()) if out.requires_grad]
            options = {"allow_unused": True, "materialize_grads": True}
            found.append([still, out, *(torch.autograd.grad(out.sum(), wanted, **options) if wanted else ())])
        for want, got in zip(*found, strict=True):
            scale = want[want.isfinite()].abs().max().item() if want.isfinite().any() else 1.0
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * max(scale, 0.1), equal_nan=True)


@pytest.mark.reached
def test_a_map_of_a_difference_keeps_its_digits():
    plain, x = Layer(MESSAGES["map of a difference"]), torch.randn(N, D) + 1e4
    ours = pyg_backend.accelerate(copy.deepcopy(plain))
    want = plain.double()(x.double(), INDEX)
    torch.testing.assert_close(ours(x, INDEX).double(), want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


@pytest.mark.reached
@pytest.mark.parametrize("name", ["map of both ends", "map of one end twice"])
def test_a_map_of_an_end_that_occurs_twice(name, monkeypatch):
    """Is one map of it; the errors to float64, of gradients too, are no larger than PyG's own."""
    monkeypatch.setattr(bounds, "STORED_BYTES", {})
    monkeypatch.setattr(bounds, "STORED_COSTLY_BYTES", {})
    torch.manual_seed(0)
    layer, data = Layer(MESSAGES[name], "sum"), torch.randn(N, D) + 3
    seed = torch.randn(N, D)

    def run(layer, x):
        x = x.clone().requires_grad_()
        out = layer(x, INDEX)
        grads = torch.autograd.grad(out, [x, layer.joined.weight, layer.joined.bias], seed.to(x.dtype))
        return [out.detach(), *grads]

    exact = run(copy.deepcopy(layer).double(), data.double())
    for plain, ours, want in zip(
        run(layer, data), run(pyg_backend.accelerate(copy.deepcopy(layer)), data), exact, strict=True
    ):
        bound = 3 * (plain - want).abs().max() + 1e-6 * want.abs().max()
        assert (ours - want).abs().max() <= bound
    wide = run(pyg_backend.accelerate(copy.deepcopy(layer)).double(), data.double())
    torch.testing.assert_close(wide, exact)


def test_a_bound_that_changes():
    ours = pyg_backend.accelerate(Layer(MESSAGES["a bound that is trained"]))
    x = torch.randn(N, D)
    before = ours(x, INDEX)
    ours.low.data.fill_(2.0)
    assert not torch.equal(ours(x, INDEX), before)


def test_backward_hooks_on_modules():
    """They put an autograd function around a module, which would take a lazy feature for an ordinary one."""
    plain = nn.EdgeConv(torch.nn.Linear(2 * D, D))
    ours, seen = pyg_backend.accelerate(copy.deepcopy(plain)), []
    x = torch.randn(N, D, requires_grad=True)
    torch.testing.assert_close(ours(x, INDEX), plain(x, INDEX))
    handle = ours.nn.register_full_backward_hook(lambda module, into, out: seen.append(module))
    ours(x, INDEX).sum().backward()
    handle.remove()
    assert seen == [ours.nn]
    handle = torch.nn.modules.module.register_module_full_backward_hook(lambda module, into, out: seen.append(module))
    ours(x, INDEX).sum().backward()
    handle.remove()
    assert ours.nn in seen[1:]


@pytest.mark.reached
def test_many_gradients_in_one():
    layers = [nn.EdgeConv(torch.nn.Linear(2 * D, D)), nn.ResGatedGraphConv(D, D)]
    for plain in layers:
        x, seeds = torch.randn(N, D, requires_grad=True), torch.randn(3, N, D)
        found = []
        for layer in (plain, pyg_backend.accelerate(copy.deepcopy(plain))):
            found.append(torch.autograd.grad(layer(x, INDEX), x, seeds, is_grads_batched=True)[0])
        torch.testing.assert_close(*found)


@pytest.mark.reached
def test_more_nodes_than_edges():
    """Maps of nodes would be more work than maps of edges."""
    plain = nn.EdgeConv(torch.nn.Linear(2 * D, D), aggr="sum")
    x, few = torch.randn(4 * N, D), INDEX[:, :N]
    report.reset()
    ours = pyg_backend.accelerate(copy.deepcopy(plain))
    with torch.profiler.profile() as seen, torch.no_grad():
        torch.testing.assert_close(ours(x, few), plain(x, few))
    shapes = [event.name for event in seen.events()]
    assert not any("message_walk" in name for name in shapes)


@pytest.mark.reached
@pytest.mark.parametrize("frozen", ["nothing", "weight", "bias", "x"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_last_map_is_not_made_again(frozen, bias, monkeypatch):
    """The backward pass of a maximum of it reads what it was made of, and who the greatest are."""
    monkeypatch.setattr(bounds, "STORED_BYTES", {})
    monkeypatch.setattr(bounds, "STORED_COSTLY_BYTES", {})
    torch.manual_seed(0)
    mlp = torch.nn.Sequential(torch.nn.Linear(2 * D, D), torch.nn.ReLU(), torch.nn.Linear(D, 7, bias=bias)).double()
    if frozen in ("weight", "bias") and getattr(mlp[2], frozen) is not None:
        getattr(mlp[2], frozen).requires_grad_(False)
    plain, x = nn.EdgeConv(mlp), torch.randn(N, D, dtype=torch.float64)
    made, found = [], []
    for layer in (plain, pyg_backend.accelerate(copy.deepcopy(plain))):
        given = x.clone().requires_grad_(frozen != "x")
        wanted = [t for t in (given, *layer.parameters()) if t.requires_grad]
        out = layer(given, INDEX)
        evaluate = blocks._evaluate
        monkeypatch.setattr(blocks, "_evaluate", lambda *given: made.append(given))
        found.append((out, torch.autograd.grad(out.square().sum(), wanted)))
        monkeypatch.setattr(blocks, "_evaluate", evaluate)
    torch.testing.assert_close(*found)
    assert not made


@pytest.mark.parametrize("shape", [(7,), (1,), (1, 7), (10, 7)])
def test_a_last_map_of_any_bias(shape):
    """One of a row for each edge has a gradient of its own for each."""
    linear, slots = torch.nn.functional.linear, tuple(blocks.Slot(i) for i in range(3))
    program = blocks.Program(blocks.Step(linear, slots, {}), "ece")
    values = [torch.randn(size, dtype=torch.float64).requires_grad_() for size in ((10, D), (7, D), shape)]
    grad = torch.randn(10, 7, dtype=torch.float64)
    wanted = torch.autograd.grad(linear(*values), values, grad)
    torch.testing.assert_close(torch.autograd.grad(blocks._unread(program, values), values, grad), wanted)
