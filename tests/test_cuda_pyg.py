"""The PyG plug-in on CUDA against plain PyG on CUDA: layers, a short training, a side stream."""

import copy

import pytest
import torch

from gnnaccel import _library, pyg_backend, report

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU here", allow_module_level=True)
if not _library.has_cuda_kernels():
    pytest.skip("this build has no CUDA half", allow_module_level=True)
nn = pytest.importorskip("torch_geometric").nn

nn.SAGEConv(1, 1)  # the first instance decides what PyG generates for the class

NODES, EDGES, WIDTH = 500, 6000, 16

LAYERS = {
    "GCNConv": lambda: nn.GCNConv(WIDTH, 8),
    "SAGEConv mean": lambda: nn.SAGEConv(WIDTH, 8),
    "SAGEConv max": lambda: nn.SAGEConv(WIDTH, 8, aggr="max"),
    "SAGEConv sum": lambda: nn.SAGEConv(WIDTH, 8, aggr="sum"),
    "GINConv": lambda: nn.GINConv(torch.nn.Linear(WIDTH, 8)),
    "GINEConv": lambda: nn.GINEConv(torch.nn.Linear(WIDTH, 8), edge_dim=3),
    "GraphConv": lambda: nn.GraphConv(WIDTH, 8),
    "GATConv": lambda: nn.GATConv(WIDTH, 8, heads=3),
    "GATConv dropout": lambda: nn.GATConv(WIDTH, 8, heads=2, dropout=0.5),
    "GATv2Conv": lambda: nn.GATv2Conv(WIDTH, 8, heads=2),
    "TransformerConv": lambda: nn.TransformerConv(WIDTH, 8, heads=2),
    "AGNNConv": lambda: nn.AGNNConv(),
    "ResGatedGraphConv": lambda: nn.ResGatedGraphConv(WIDTH, 8),
    "ResGatedGraphConv bare": lambda: nn.ResGatedGraphConv(WIDTH, 8, root_weight=False, bias=False),
    "LEConv": lambda: nn.LEConv(WIDTH, 8),
    "FiLMConv": lambda: nn.FiLMConv(WIDTH, 8),
    "GENConv sum": lambda: nn.GENConv(WIDTH, WIDTH, aggr="add", norm=None),
    "GENConv softmax": lambda: nn.GENConv(WIDTH, WIDTH, norm=None),
    "GENConv learned": lambda: nn.GENConv(WIDTH, WIDTH, learn_t=True, norm=None),
    "EdgeConv": lambda: nn.EdgeConv(torch.nn.Linear(2 * WIDTH, 8)),
}


def problem(dtype):
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, NODES, (2, EDGES), generator=generator)
    index[1, :2000] = 7  # a hub
    x = torch.randn(NODES, WIDTH, generator=generator, dtype=dtype)
    return x.cuda().requires_grad_(), index.cuda()


def outcome(layer, x, index):
    torch.manual_seed(3)
    edges = (torch.linspace(-1, 1, 3 * EDGES).view(EDGES, 3).to(x),) if isinstance(layer, nn.GINEConv) else ()
    out = layer(x, index, *edges)
    return out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()], allow_unused=True)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-3)])
@pytest.mark.parametrize("name", LAYERS)
def test_pyg_layers_on_cuda(name, dtype, tolerance):
    torch.manual_seed(1)
    plain = LAYERS[name]().to("cuda", dtype)
    x, index = problem(dtype)
    ours = pyg_backend.accelerate(copy.deepcopy(plain))
    report.reset()
    got, want = outcome(ours, x, index), outcome(plain, x, index)
    counted = report.snapshot()
    assert counted and (name == "EdgeConv" or not any(site.left for site in counted.values()))
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            scale = b.abs().max().clamp(min=1)
            torch.testing.assert_close(a / scale, b / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "SAGEConv max"])
def test_a_side_stream_gives_the_same(name):
    torch.manual_seed(1)
    layer = pyg_backend.accelerate(LAYERS[name]().to("cuda", torch.float64))
    x, index = problem(torch.float64)
    want = outcome(layer, x, index)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = outcome(layer, x, index.clone())
    torch.cuda.current_stream().wait_stream(stream)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("conv", [nn.GCNConv, nn.SAGEConv, nn.GATConv])
def test_training_follows_the_same_losses(conv):
    """In float64: the atomics of PyG's sums come in any order, and 50 steps in float32 make 5e-4 of that."""
    x, index = problem(torch.float64)
    label = torch.randint(0, 4, (NODES,), generator=torch.Generator().manual_seed(5)).cuda()

    def losses(accelerated):
        torch.manual_seed(2)
        model = nn.Sequential("x, e", [(conv(WIDTH, 16), "x, e -> x"), torch.nn.ReLU(), (conv(16, 4), "x, e -> x")])
        model = (pyg_backend.accelerate(model) if accelerated else model).to("cuda", torch.float64)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        found = []
        for _ in range(50):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x.detach(), index), label)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return torch.tensor(found, dtype=torch.float64)

    torch.testing.assert_close(losses(True), losses(False), rtol=0, atol=1e-9)
