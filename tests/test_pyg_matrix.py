"""Every layer of PyG with the plug-in against PyG alone: outputs and all gradients, and how it was run."""

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")
import pyg_cases
import torch_geometric.nn.conv as convs
from pyg_cases import CASES, Inputs
from torch.utils._pytree import tree_map_only
from torch_geometric.nn.conv import MessagePassing

from gnnaccel import pyg_backend, report
from gnnaccel.lazy import blocks, programs
from gnnaccel.lower import bounds

pyg_cases.prepare_pyg()


def leaves(tree):
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return [leaf for item in items for leaf in leaves(item)]


def run(layer, arguments, order=1):
    """Outputs and gradients (of first or second order) of all inputs and parameters, from the same random numbers."""
    arguments = copy.deepcopy(arguments)
    torch.manual_seed(5)
    out = layer(*arguments)
    outputs = [o for o in leaves(out) if o.layout is torch.strided]
    wanted = [t for t in leaves(arguments) if t.requires_grad]
    wanted += [p for p in layer.parameters() if p.requires_grad]
    loss = sum(
        (o * torch.linspace(-1, 2, o.numel(), dtype=o.dtype).to(o.device).view_as(o)).sum()
        for o in outputs
        if o.requires_grad
    )
    if not isinstance(loss, torch.Tensor):
        return outputs, []
    grads = torch.autograd.grad(loss, wanted, allow_unused=True, create_graph=order == 2)
    if order == 2:
        loss = sum(g.square().sum() for g in grads if g is not None and g.requires_grad)
        grads = torch.autograd.grad(loss, wanted, allow_unused=True) if isinstance(loss, torch.Tensor) else grads
    return outputs, [None if g is None else g.detach() for g in grads]


def assert_same(got, expected, tolerance):
    for a, b in zip(got[0] + got[1], expected[0] + expected[1], strict=True):
        if a is None or b is None:
            assert a is None or not a.any()
            assert b is None or not b.any()
        else:
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def moved(tree, device):
    """The same leaves on another device."""
    return tree_map_only(torch.Tensor, lambda x: x.detach().to(device).requires_grad_(x.requires_grad), tree)


def compared(name, inputs, tolerance, order=1, device="cpu"):
    """Compare; returns the accelerated layer and its arguments."""
    case = CASES[name]
    if lacking := pyg_cases.missing(case):
        pytest.skip(f"PyG needs {lacking} for it")
    if inputs.dtype not in case.dtypes:
        pytest.skip(f"PyG does not take {inputs.dtype}")
    if name == "MeshCNNConv" and torch.device(device).type == "cuda":
        pytest.skip("PyG makes its messages on the CPU")
    torch.manual_seed(0)
    plain = case.make().to(device, inputs.dtype)
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    arguments = moved(case.arguments(inputs), device)
    try:
        expected = run(plain, arguments, order)
    except Exception as error:
        if pyg_cases.IS_NEW:
            raise
        pytest.skip(f"this version of PyG does not run it: {error!r}")
    report.reset()
    got = run(layer, arguments, order)
    assert report.snapshot(), "nothing was counted"
    assert_same(got, expected, tolerance)
    return layer, arguments


@pytest.mark.parametrize("name", CASES)
def test_float64(name, device):
    layer, arguments = compared(name, Inputs(), 1e-8, device=device)
    report.reset()
    with pyg_cases.SeenOps(num_edges=160) as seen, torch.no_grad():
        layer(*arguments)
    case, (how, why) = CASES[name], pyg_cases.observed(report.snapshot(), seen.names)
    if device.type == "cuda":  # it stores the messages of so small a graph, which the table of coverage does not go by
        assert (how == "pyg") == (case.runs == "pyg")
        return
    assert how == case.runs
    assert how == "segment" or why == case.why


@pytest.fixture(params=["stored", "in blocks", "in blocks, twice"])
def without_programs(request, monkeypatch):
    """Messages that are no product, as on CUDA: all made at once, as in small graphs, or in blocks of a few edges,
    which a backward pass goes through once, or for sources once more."""
    monkeypatch.setattr(programs, "translated", lambda graph, expression: None)
    if request.param != "stored":
        monkeypatch.setattr(bounds, "STORED_BYTES", {})
        monkeypatch.setattr(bounds, "STORED_COSTLY_BYTES", {})
        monkeypatch.setattr(bounds, "BLOCK_BYTES", {"cpu": 9000, "cuda": 9000})
    if request.param == "in blocks, twice":
        monkeypatch.setattr(blocks, "_may_scatter", lambda graph, sources: False)


MESSAGES = [name for name in CASES if CASES[name].runs in ("message", "blocks") or name.startswith("GATv2")]


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("order", [1, 2])
def test_blocks(name, order, without_programs, device):
    compared(name, Inputs(), 1e-7, order, device)


@pytest.mark.parametrize("name", CASES)
def test_float32(name, device):
    inputs, tolerance = Inputs(dtype=torch.float32, seed=3), 2e-3 if name.startswith("GENConv power") else 2e-4
    compared(name, inputs, tolerance, device=device)


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives_of_every_layer(name):
    compared(name, Inputs(), 1e-7, order=2)


@pytest.mark.parametrize("name", CASES)
def test_without_gradients(name):
    with torch.no_grad():
        compared(name, Inputs(grad=False), 1e-8)


def test_every_layer_is_in_the_table():
    layers = {n for n in convs.__all__ if isinstance(getattr(convs, n), type)}
    layers = {n for n in layers if issubclass(getattr(convs, n), MessagePassing)} - {"MessagePassing"}
    assert {name.split()[0] for name in CASES} == layers


def _shapes(name, wrap):
    """Shapes and dtypes of what a layer gives for tensors without values, or the error."""
    torch.manual_seed(7)
    layer = wrap(CASES[name].make().double()).to("meta")
    for part in layer.modules():
        if hasattr(part, "add_self_loops"):  # which reads the edges
            part.add_self_loops = False
    arguments = moved(CASES[name].arguments(Inputs()), torch.device("meta"))
    try:
        out = layer(*arguments)
        sum(t.sum() for t in leaves(out) if t.is_floating_point()).backward()
    except Exception as error:
        return type(error).__name__
    return [(t.shape, t.dtype, t.device) for t in leaves(out)], {n: p.grad is None for n, p in layer.named_parameters()}


@pytest.mark.parametrize("name", [name for name in CASES if not pyg_cases.missing(CASES[name])])
def test_tensors_without_values(name):
    """Devices that the kernels do not know are PyG's."""
    assert _shapes(name, pyg_backend.accelerate) == _shapes(name, lambda layer: layer)


def _narrow(tree):
    """The same with int32 for indices of edges."""

    def narrow(t):
        return t.int() if t.dtype == torch.int64 and t.dim() == 2 and len(t) == 2 else t

    return tree_map_only(torch.Tensor, narrow, tree)


@pytest.mark.parametrize("name", [name for name in CASES if not pyg_cases.missing(CASES[name])])
def test_int32(name):
    """Outputs and gradients of int64; torch's own are wrong on the CPU, and some layers of PyG refuse it."""
    torch.manual_seed(0)
    if CASES[name].needs == "torch_sparse":
        pytest.skip("torch_sparse takes int64 alone")
    plain, arguments = CASES[name].make().double(), CASES[name].arguments(Inputs())
    want, got = run(plain, arguments), run(pyg_backend.accelerate(plain), _narrow(arguments))
    assert_same(got, want, 1e-8)


@pytest.mark.parametrize("conv", ["GATConv", "GATv2Conv"])
@pytest.mark.parametrize("options", [{"add_self_loops": False}, {"fill_value": 2.0}, {"fill_value": "add"}], ids=str)
def test_int32_attributes(conv, options):
    torch.manual_seed(0)
    g = Inputs()
    layer = pyg_backend.accelerate(getattr(convs, conv)(pyg_cases.D, 4, edge_dim=pyg_cases.EDGE, **options).double())
    arguments = g.x(), g.index, g.attr()
    assert_same(run(layer, _narrow(arguments)), run(layer, arguments), 1e-8)


@pytest.mark.parametrize("nodes", [2, 3])
def test_weights_with_a_row_for_each_edge(nodes, without_programs):
    """Four heads and four edges: a linear map inside message() has a weight of [4, D], which is none of the edges."""
    index = torch.tensor([[0, 0, 1, 1], [nodes - 1, 0, 1, 0]])  # not in the order of the nonzeros
    plain = convs.FeaStConv(33, 8, heads=4, add_self_loops=False).double()
    x = torch.randn(nodes, 33, dtype=torch.float64, requires_grad=True)
    want = run(plain, (x, index))
    assert_same(run(pyg_backend.accelerate(copy.deepcopy(plain)), (x, index)), want, 1e-9)
