"""What autocast casts: with the plug-in not more values than with PyG alone, and training as before."""

import pytest
import torch

pytest.importorskip("torch_geometric")
import pyg_cases
from pyg_cases import CASES, Inputs
from pyg_compare import N, edges, rand, tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric import nn

from gnnaccel import pyg_backend

pyg_cases.prepare_pyg()


class Casts(TorchDispatchMode):
    """Counts the values that are cast from one floating-point dtype to another."""

    def __init__(self):
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].is_floating_point() and out.is_floating_point():
            self.values += out.numel() * (out.dtype != args[0].dtype)
        return out


def cast_values(layer, arguments) -> int:
    """Of the second call, forward and backward."""

    def call():
        with torch.autocast("cpu", torch.bfloat16):
            out = [o for o in tensors(layer(*arguments)) if o.requires_grad]
        sum(o.float().sum() for o in out).backward()

    call()
    with Casts() as casts:
        call()
    return casts.values


# A tenth more at most: of layers of few nodes, where casts of what belongs to nodes are no small part.
_MOST = 1.12


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layers_that_cast(name):
    case = CASES[name]
    if pyg_cases.missing(case):
        pytest.skip(f"PyG needs {case.needs} for it")
    given = Inputs(num_nodes=60, num_edges=900, dtype=torch.float32)
    torch.manual_seed(0)
    layer = case.make()
    try:
        want = cast_values(layer, case.arguments(given))
    except (RuntimeError, IndexError):
        pytest.skip("PyG's own code does not run under autocast, or with as many nodes")
    got = cast_values(pyg_backend.accelerate(layer), case.arguments(given))
    assert got <= _MOST * want, f"{got} values, PyG alone {want}"


MAKERS = {
    "GAT": lambda: nn.GATConv(6, 4, heads=2),
    "GAT mean": lambda: nn.GATConv(6, 4, heads=2, concat=False, residual=True),
    "GATv2": lambda: nn.GATv2Conv(6, 4, heads=2),
    "Transformer": lambda: nn.TransformerConv(6, 4, heads=2),
    "GCN": lambda: nn.GCNConv(6, 4),
    "SAGE": lambda: nn.SAGEConv(6, 4),
    "GIN": lambda: nn.GINConv(nn.MLP([6, 8, 4])),
}


@pytest.mark.parametrize("name", MAKERS)
def test_scaled_gradients(name):
    """GradScaler: what it multiplies the loss by is divided out of the gradients, and no step is left out."""
    found = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        layer = MAKERS[name]()
        layer = pyg_backend.accelerate(layer) if accelerated else layer
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(rand(N, 6), edges())
        scaler.scale(out.float().square().mean()).backward()
        scaler.unscale_(optimizer)
        grads = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 1024.0
        found.append((out.dtype, out.detach(), *grads, *(p.detach().clone() for p in layer.parameters())))
    (want_dtype, *want), (dtype, *got) = found
    assert dtype == want_dtype and len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=2e-2)


@pytest.mark.parametrize("make", [MAKERS["GAT"], MAKERS["GATv2"], MAKERS["Transformer"]])
def test_no_casts_of_edges(make):
    """A thousand edges more are no value more to cast."""
    layer = pyg_backend.accelerate(make())
    values = [cast_values(layer, (rand(N, 6, grad=True), edges(count=count))) for count in (400, 1400)]
    if isinstance(layer, nn.TransformerConv):  # on the CPU of ops in 16 bits, but for a sum of a backward
        assert values[1] - values[0] <= 1000 * layer.heads
    else:
        assert values[0] == values[1]
