"""Autocast: PyG's dtypes and values, whatever it widens on the device, with messages stored and made in blocks."""

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")
import pyg_cases
import torch.nn.functional as F
from pyg_cases import CASES, Inputs
from pyg_compare import D, N, edges, rand, same, tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch_geometric import nn, utils
from torch_geometric.nn.conv import MessagePassing

from gnnaccel import _library
from gnnaccel.lazy import reduce
from gnnaccel.lower import bounds
from gnnaccel.pyg_backend import accelerate

pyg_cases.prepare_pyg()

WIDENED = "exp expm1 log log1p reciprocal rsqrt softplus sum sum.dim_IntList pow.Tensor_Scalar softmax.int"


def _widening(name):
    """An op of aten as autocast runs it on CUDA: in float32."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def widened(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return op(*tree_map_only(torch.Tensor, lambda x: x.float(), args), **kwargs)

    return widened


@pytest.fixture(params=["cpu", "cpu, widening as CUDA", "cuda"])
def place(request, monkeypatch):
    """The devices; the CPU also with what autocast widens on CUDA and leaves alone on the CPU."""
    if request.param == "cuda":
        if not (torch.cuda.is_available() and _library.has_cuda_kernels()):
            pytest.skip("no CUDA GPU here, or no kernels for it in this build")
        return "cuda"
    if request.param == "cpu":
        return "cpu"
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    for name in WIDENED.split():
        library.impl(name, _widening(name), "AutocastCPU")
    reduce._exponent_dtype.cache_clear()
    request.addfinalizer(reduce._exponent_dtype.cache_clear)
    request.addfinalizer(library._destroy)
    return "cpu"


@pytest.fixture(params=["stored", "in blocks"])
def sizes(request, monkeypatch):
    """Messages all made at once, or in blocks of a few edges."""
    if request.param == "in blocks":
        monkeypatch.setattr(bounds, "STORED_BYTES", {})
        monkeypatch.setattr(bounds, "STORED_COSTLY_BYTES", {})
        monkeypatch.setattr(bounds, "BLOCK_BYTES", {"cpu": 900, "cuda": 900})


class Layer(MessagePassing):
    """Its message is a function of a lifted feature of both ends, and of a weight matrix; notes the dtype of it."""

    def __init__(self, function, aggr="sum"):
        super().__init__(aggr=aggr)
        self.function = function
        self.lin = torch.nn.Linear(D, 20)
        self.weight = torch.nn.Parameter(rand(20, 3))

    def forward(self, x, edge_index):
        h = self.lin(x)  # bfloat16 under autocast
        return self.propagate(edge_index, h=h)

    def message(self, h_i, h_j, index, size_i):
        out = self.function(h_i, h_j, self.weight, index, size_i)
        self.seen = out.dtype
        return out


def _inside(i, j, *_):
    with torch.autocast(i.device.type, enabled=False):
        return (i + j).exp()


MESSAGES = {
    "exp": lambda i, j, *_: (i + j).exp(),
    "exp of one end": lambda i, j, *_: j.exp(),
    "log1p": lambda i, j, *_: torch.log1p((i * j).abs()),
    "power": lambda i, j, *_: (i - j) ** 2,
    "reciprocal": lambda i, j, *_: 1 / ((i * j).abs() + 1),
    "reciprocal of one end": lambda i, j, *_: 1 / (j.abs() + 1),
    "softplus": lambda i, j, *_: F.softplus(i + j),
    "relu": lambda i, j, *_: F.relu(i + j),
    "gate": lambda i, j, *_: torch.sigmoid(i + j) * j,
    "cast": lambda i, j, *_: (i + j).float().exp().bfloat16(),
    "sum": lambda i, j, *_: (i + j).sum(-1, keepdim=True),
    "wide sum": lambda i, j, *_: (i + j).view(-1, 20, 1).sum(-1),
    "dot": lambda i, j, *_: (i * j).sum(-1, keepdim=True),
    "sum of exponentials": lambda i, j, *_: (i + j).exp().sum(-1, keepdim=True) * j,
    "linear": lambda i, j, w, *_: F.linear(i + j, w.t()),
    "linear of one end": lambda i, j, w, *_: F.linear(j, w.t()),
    "matmul": lambda i, j, w, *_: (i + j).relu() @ w,
    "softmax": lambda i, j, w, index, size: utils.softmax((i + j).mean(-1, keepdim=True), index, None, size) * j,
    "wide softmax": lambda i, j, w, index, size: utils.softmax(i + j, index, None, size) * j,
    "without autocast": _inside,
}


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("aggr", ["sum", "max"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_messages(name, aggr, place, sizes):
    def program(wrap):
        layer, x = wrap(Layer(MESSAGES[name], aggr)).to(place), rand(N, D).to(place).requires_grad_()
        with torch.autocast(place, torch.bfloat16):
            out = layer(x, edges().to(place))
        out.float().square().mean().backward()
        # What autocast rounds is compared to bfloat16's digits.
        grads = [x.grad, layer.lin.weight.grad] if aggr == "sum" else []  # a rounded maximum has another winner
        return layer.seen, out.dtype, out.bfloat16(), [g.bfloat16() for g in grads]

    same(program, dtype=torch.float32)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layers_under_autocast(name, place, sizes):
    case = CASES[name]
    if pyg_cases.missing(case):
        pytest.skip(f"PyG needs {case.needs} for it")
    if name == "MeshCNNConv" and place == "cuda":
        pytest.skip("PyG makes its messages on the CPU")

    def program(wrap):
        torch.manual_seed(0)
        layer = wrap(case.make()).to(place).eval()
        arguments = tree_map_only(torch.Tensor, lambda x: x.to(place), case.arguments(Inputs(dtype=torch.float32)))
        with torch.autocast(place, torch.bfloat16):
            out = layer(*arguments)
        return [(o.dtype, o.bfloat16()) for o in tensors(out) if o.is_floating_point()]

    try:
        program(lambda layer: layer)
    except RuntimeError:  # PyG's own code mixes dtypes that torch does not
        same(program, dtype=torch.float32, raises=True)
    else:
        same(program, dtype=torch.float32, accelerated=None)


@pytest.mark.parametrize("concat", [True, False])
def test_shown_attention(concat, place):
    """The attention weights that a layer returns have the dtype of PyG's softmax."""

    def program(wrap):
        found = []
        for make in (nn.GATConv, nn.GATv2Conv, nn.TransformerConv):
            layer = wrap(make(D, 5, heads=2, concat=concat, bias=False)).to(place)
            with torch.autocast(place, torch.bfloat16):
                out = layer(rand(N, D).to(place), edges().to(place))
                shown, (_, alpha) = layer(rand(N, D).to(place), edges().to(place), return_attention_weights=True)
            found += [(o.dtype, o.bfloat16()) for o in (out, shown, alpha)]
        return found

    same(program, dtype=torch.float32)


class _Products(TorchDispatchMode):
    """Notes how many rows are multiplied by a matrix."""

    def __init__(self):
        super().__init__()
        self.rows = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear):
            self.rows.add(args[func.overloadpacket is torch.ops.aten.addmm].shape[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["CGConv", "PNAConv"])
def test_products_are_of_nodes(name, dtype):
    """Linear maps of joined ends are maps of nodes under autocast on the CPU too, whatever the features' dtype."""
    make = {
        "CGConv": lambda: nn.CGConv(D),
        "PNAConv": lambda: nn.PNAConv(D, 5, ["mean", "std"], ["identity"], torch.tensor([1, 2])),
    }[name]

    def program(wrap):
        torch.manual_seed(0)
        layer = wrap(make())
        x = rand(N, D).to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), _Products() as products:
            out = layer(x, edges())
        out.float().square().mean().backward()
        found.append(products.rows)
        return out.dtype, out.bfloat16(), x.grad.bfloat16()

    found: list[set] = []
    same(program, dtype=torch.float32)
    plain, *ours = found
    assert edges().shape[1] in plain and all(rows and max(rows) <= N for rows in ours)


# Rounded scores may come to lie beyond the kink at zero, where gradients jump: a small jump.
FLAT = {"negative_slope": 0.9}
TRAINED = {
    "GCN": lambda: nn.GCNConv(D, 8),
    "GCN, cached": lambda: nn.GCNConv(D, 8, cached=True),
    "SAGE": lambda: nn.SAGEConv(D, 8),
    "GraphConv": lambda: nn.GraphConv(D, 8),
    "GIN": lambda: nn.GINConv(torch.nn.Linear(D, 8), eps=0.3),
    "GIN of an MLP": lambda: nn.GINConv(nn.MLP([D, 8, 8], act="tanh", norm=None), train_eps=True),
    "GIN of a sequence": lambda: nn.GINConv(torch.nn.Sequential(torch.nn.Linear(D, 8), torch.nn.Tanh())),
    "GIN of no map": lambda: nn.GINConv(torch.nn.ELU()),
    "GAT": lambda: nn.GATConv(D, 4, heads=2, **FLAT),
    "GAT without a bias": lambda: nn.GATConv(D, 4, heads=2, bias=False, **FLAT),
    "GAT, averaged": lambda: nn.GATConv(D, 4, heads=2, concat=False, **FLAT),
    "GAT, residual": lambda: nn.GATConv(D, 4, heads=2, residual=True, **FLAT),
    "GATv2": lambda: nn.GATv2Conv(D, 4, heads=2, **FLAT),
    "GATv2 of one map, averaged": lambda: nn.GATv2Conv(D, 4, heads=2, concat=False, share_weights=True, **FLAT),
    "SuperGAT": lambda: nn.SuperGATConv(D, 4, heads=2, **FLAT).eval(),
    "SuperGAT of inner products": lambda: nn.SuperGATConv(D, 4, heads=2, attention_type="SD", **FLAT).eval(),
    "Transformer": lambda: nn.TransformerConv(D, 4, heads=2),
}


@pytest.mark.parametrize("given_dtype", ["float32", "narrow"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.only(where=lambda place, dtype: place == "cuda" or dtype != torch.float16)  # sums take none on the CPU
def test_gradients_that_a_scaler_has_multiplied(name, dtype, given_dtype, place):
    """As near to float64 as PyG's own, or within the digits of the narrow dtype; a gradient of one number, which is one
    draw of its error, in the mean of many."""
    torch.manual_seed(0)
    plain = TRAINED[name]().to(place)
    layers = [plain, accelerate(copy.deepcopy(plain)), copy.deepcopy(plain).double()]
    x, ends = rand(N, D).float().to(place), edges().to(place)
    x = x.to(dtype) if given_dtype == "narrow" else x  # as a map before leaves it

    def results():
        upstream = None
        for layer in layers:
            exact = layer is layers[-1]
            scaler = torch.amp.GradScaler(place, init_scale=1.0 if exact else 256.0)
            given = (x.double() if exact else x).clone().requires_grad_()
            layer.zero_grad()
            with torch.autocast(place, dtype, enabled=not exact):
                out = layer(given, ends)
            upstream = torch.randn(out.shape).to(place) if upstream is None else upstream
            scaler.scale((out * upstream.to(out.dtype)).sum()).backward()
            grads = [given.grad, *(p.grad for p in layer.parameters())]
            yield [out.detach(), *(g / scaler.get_scale() for g in grads)]

    draws = []
    for _ in range(64 if any(p.numel() == 1 for p in plain.parameters()) else 1):
        of_draw = []
        for theirs, ours, exact in zip(*results(), strict=True):
            assert ours.dtype == theirs.dtype
            of_draw.append([float(t.abs().max()) for t in (ours.double() - exact, theirs.double() - exact, exact)])
        draws.append(of_draw)
    draws = torch.tensor(draws)
    found = draws[0]
    for i, parameter in enumerate(plain.parameters(), 2):  # behind the result and the gradient of x
        found[i] = draws[:, i].mean(0) if parameter.numel() == 1 else found[i]
    for of_ours, of_theirs, size in found.tolist():
        assert of_ours <= max(1.5 * of_theirs, 8 * torch.finfo(dtype).eps * size)


@pytest.mark.parametrize("name", TRAINED)
def test_a_backward_pass_within_autocast(name, place):
    """Of a forward pass without: the gradients are of float32, in whatever dtype autocast would multiply."""
    torch.manual_seed(0)
    layer, x, ends = accelerate(TRAINED[name]().to(place)), rand(N, D).float().to(place).requires_grad_(), edges()
    given = [x, *layer.parameters()]
    for _ in range(5):  # a graph's calls become ready
        out = layer(x, ends.to(place)).square().sum()
        wants = torch.autograd.grad(out, given, retain_graph=True)
        with torch.autocast(place, torch.bfloat16):
            grads = torch.autograd.grad(out, given)
        for ours, want in zip(grads, wants, strict=True):
            torch.testing.assert_close(ours, want, rtol=0, atol=5e-2 * float(want.abs().max() + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_transformer_under_autocast_to_float16_on_the_cpu(dtype):
    def program(wrap):
        torch.manual_seed(0)
        layer, x = wrap(nn.TransformerConv(D, 4, heads=2)), rand(N, D).to(dtype)
        with torch.autocast("cpu", torch.float16):
            return layer(x, edges())

    same(program, dtype=torch.float16, accelerated=False)
