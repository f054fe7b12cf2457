"""Relational and heterogeneous layers on CUDA against definitions, and against the frameworks on the CPU."""

import copy
import importlib
import importlib.util

import graphs
import pytest
import test_han_layers
import test_hgt_layers
import torch
from cuda_cases import DEVICE, EMULATED
from oracle import rand
from test_relational import KINDS, factors, layer, pair, types_of

import gnnaccel
from gnnaccel import dgl_backend, ops, report
from gnnaccel.lower import bounds
from gnnaccel.ops import _relations, han_layers, hgt_layers

segment_matmul = importlib.import_module("gnnaccel.ops.segment_matmul")  # not the function of that name
HAS_DGL = importlib.util.find_spec("dgl") is not None and not EMULATED
of_pyg = pytest.mark.skipif(bool(EMULATED), reason="PyG's edges are sorted by kernels of the CPU")
if HAS_DGL:
    from dgl_compare import dgl


def on_cuda(value):
    if isinstance(value, dict):
        return {k: on_cuda(v) for k, v in value.items()}
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("least_rows", [1, 16384])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["no_edges", "duplicates", "tall", "wide", "power_law"])
def test_op(name, kind, dtype, tolerance, least_rows, monkeypatch):
    monkeypatch.setattr(bounds, "RELATION_CHUNK", least_rows)
    graph = graphs.make(name)
    types, reduce = types_of(graph), KINDS[kind][3]
    given = factors(graph, kind, dtype)
    exact = [t.double().requires_grad_() for t in given.values()]
    want = pair(graph, types, given, reduce)[1](*exact)
    leaves = [t.to(DEVICE).requires_grad_() for t in given.values()]
    got = pair(graph.to(DEVICE), types.to(DEVICE), given, reduce)[0](*leaves)
    upstream = rand(*want.shape)
    pairs = zip(
        (got, *torch.autograd.grad(got, leaves, upstream.to(DEVICE, dtype))),
        (want, *torch.autograd.grad(want, exact, upstream)),
        strict=True,
    )
    for ours, theirs in pairs:
        scale = theirs.abs().max().clamp(min=1) if theirs.numel() else 1
        torch.testing.assert_close(ours.cpu().double() / scale, theirs / scale, rtol=0, atol=tolerance)


def on_cuda_as(dtype):
    """What moves leaves, alone and in lists and tuples; the same one twice is one there too."""
    seen = {}

    def move(value):
        if isinstance(value, torch.Tensor):
            if id(value) not in seen:
                seen[id(value)] = value.detach().to(DEVICE, dtype).requires_grad_()
            return seen[id(value)]
        if isinstance(value, list):
            return [move(each) for each in value]
        return type(value)(*map(move, value)) if isinstance(value, tuple) else value

    return move


def close(got, want, tolerance):
    for ours, theirs in zip(got, want, strict=True):
        scale = theirs.abs().max().clamp(min=1) if theirs.numel() else 1
        torch.testing.assert_close(ours.cpu().double() / scale, theirs / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("heads, width", [(2, 3), (2, 4)])
@pytest.mark.parametrize("name", test_hgt_layers.CASES)
def test_hgt_layers_on_cuda(name, heads, width, dtype, tolerance):
    (plan, *arguments), leaves, described = test_hgt_layers.case(name, "each its own", heads, width)
    want = test_hgt_layers.definition((plan, *arguments), described)
    grads = [rand(*out.shape) for out in want]
    expected = test_hgt_layers.gradients(want, leaves, grads)
    types, results, index = described
    move, sizes = on_cuda_as(dtype), [tuple(x.shape) for x in arguments[0].x]
    ends = [each[:3] for each in types]
    alone = set(range(len(sizes))) - set(results) - {source for source, _, _ in ends}
    plan = hgt_layers.planned([each.to(DEVICE) for each in index], ends, sizes, [*results, *sorted(alone)])
    for _ in range(2):
        got = hgt_layers.hgt_layer(plan, *map(move, arguments))
        close(got, want, tolerance)
        upstream = [grad.to(DEVICE, dtype) for grad in grads]
        close(test_hgt_layers.gradients(got, move(leaves), upstream), expected, tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("name", test_han_layers.CASES)
def test_han_layers_on_cuda(name, scaled, dtype, tolerance):
    _, maps, leaves, described = test_han_layers.case(name, 2, 4)
    index, ends, scale = described
    want = test_han_layers.definition(maps, described, scaled)
    grads = [rand(*out.shape) for out in want]
    expected = test_hgt_layers.gradients(want, leaves, grads)
    plan = han_layers.planned([each.to(DEVICE) for each in index], ends, [len(x) for x in maps.x])
    move = on_cuda_as(dtype)
    scale = scale.to(DEVICE, dtype)[plan.order] if scaled else None
    for _ in range(2):
        got = han_layers.han_attention(plan, move(maps), scale, 0.2)
        close(got, want, tolerance)
        upstream = [grad.to(DEVICE, dtype) for grad in grads]
        close(test_hgt_layers.gradients(got, move(leaves), upstream), expected, tolerance)


@pytest.mark.parametrize("products", ["one launch", "torch's"])
@pytest.mark.parametrize("longest", [3, 100])
@pytest.mark.parametrize("ends", ["sources", "destinations"])
@pytest.mark.parametrize("kind", ["plain", "mean", "one_basis_mean", "blocks_mean", "block_bases"])
def test_layer_with_own_features(kind, ends, longest, products, monkeypatch):
    """Rows by source and by destination, added up where they are read or stored, as there are long ones or not."""
    monkeypatch.setattr(segment_matmul, "_pays", lambda *_: products == "one launch")
    few, many = torch.arange(300) // longest, torch.arange(300) * 7 % 300
    types = torch.arange(300) // longest % 5
    types[types == 2] = 0
    rows, cols = (many, few) if ends == "sources" else (few, many)
    graph = gnnaccel.Graph.from_coo(rows, cols, num_rows=300, num_cols=300)
    found = _relations.relations_of("test", graph, types, 5)
    assert found.by_source == (ends == "sources") and found.chunks[0].short == (longest == 3)
    call, definition, given = layer(graph, types, kind, True)
    leaves, exact = ([t.to(device).requires_grad_() for t in given] for device in (DEVICE, "cpu"))
    got, want = call(*leaves), definition(*exact)
    torch.testing.assert_close(got.cpu(), want)
    grads = torch.autograd.grad(got.square().sum(), leaves)
    for ours, theirs in zip(grads, torch.autograd.grad(want.square().sum(), exact), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
    with torch.no_grad():
        torch.testing.assert_close(call(*leaves).cpu(), want)


def compare(call, module, inputs, calls=3):
    """call(module, inputs) on the CPU without gnnaccel, and `calls` times on CUDA with: outputs and all gradients."""

    def run(module, inputs):
        outs = call(module, inputs)
        leaves = [x for x in inputs.values() if x.requires_grad] + list(module.parameters())
        loss = sum((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)).sum()
                   for out in outs)  # fmt: skip
        return [*outs, *torch.autograd.grad(loss, leaves, allow_unused=True)]

    want = run(module, inputs)
    there = gnnaccel.accelerate(copy.deepcopy(module)).to(DEVICE)
    inputs = {k: v.detach().to(DEVICE).requires_grad_(v.requires_grad) for k, v in inputs.items()}
    for _ in range(calls):
        for ours, theirs in zip(run(there, inputs), want, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-7, atol=1e-8)


N, E, R = 50, 400, 4
TYPES = [("a", "goes", "b"), ("b", "back", "a"), ("a", "self", "a"), ("b", "also", "b"), ("a", "more", "b")]
WITHIN = [("a", f"r{i}", "a") for i in range(5)]


def random_edges(seed, count=E):
    return torch.randint(0, N, (2, count), generator=torch.Generator().manual_seed(seed))


@of_pyg
@pytest.mark.parametrize("options", [{}, {"num_bases": 3}, {"num_blocks": 2}, {"aggr": "max"}])
@pytest.mark.parametrize("name", ["RGCNConv", "FastRGCNConv"])
def test_pyg(name, options):
    nn = pytest.importorskip("torch_geometric").nn
    if name == "FastRGCNConv":
        options = {**options, "aggr": "add"}  # it takes no max
    index, types = random_edges(0), torch.randint(0, R, (E,), generator=torch.Generator().manual_seed(1))
    there = (index.to(DEVICE), types.to(DEVICE))

    def call(module, inputs):
        return [module(inputs["x"], *(there if inputs["x"].is_cuda else (index, types)))]

    report.reset()
    compare(call, getattr(nn, name)(6, 4, R, **options).double(), {"x": rand(N, 6).requires_grad_()})
    assert any(site.accelerated for site in report.snapshot().values())


@of_pyg
@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("name", ["SAGEConv", "GraphConv", "GCNConv"])
def test_pyg_hetero_conv(name, aggr):
    nn = pytest.importorskip("torch_geometric").nn
    kinds = WITHIN if name == "GCNConv" else TYPES
    edges = {t: random_edges(i, E if i else 0) for i, t in enumerate(kinds)}
    there = on_cuda(edges)
    more = {"add_self_loops": False} if name == "GCNConv" else {}
    torch.manual_seed(0)
    convs = {t: getattr(nn, name)(6 if name == "GCNConv" else (6, 6), 4, **more) for t in kinds}
    module = nn.HeteroConv(convs, aggr=aggr).double()

    def call(module, inputs):
        return list(module(inputs, there if inputs["a"].is_cuda else edges).values())

    report.reset()
    compare(call, module, {k: rand(N, 6).requires_grad_() for k in ("a" if kinds is WITHIN else "ab")}, calls=7)
    assert report.snapshot()["pyg.HeteroConv"].accelerated


@pytest.fixture
def plugged():
    dgl_backend.enable()
    yield
    dgl_backend.disable()


def dgl_pair(make):
    dgl_backend.disable()
    g = make()
    dgl_backend.enable()
    return g, g.to(DEVICE)


@pytest.mark.skipif(not HAS_DGL, reason="no DGL")
@pytest.mark.parametrize("regularizer", ["basis", "bdd", None])
def test_dgl_rel_graph_conv(regularizer, plugged):
    index, types = random_edges(0), torch.randint(0, R, (E,), generator=torch.Generator().manual_seed(1))
    g, there = dgl_pair(lambda: dgl.graph((index[0], index[1]), num_nodes=N))
    conv = dgl.nn.RelGraphConv(6, 4, R, regularizer, 2 if regularizer else None).double()
    on_there = types.to(DEVICE)

    def call(module, inputs):
        cuda = inputs["x"].is_cuda
        (dgl_backend.enable if cuda else dgl_backend.disable)()
        return [module(there if cuda else g, inputs["x"], on_there if cuda else types)]

    compare(call, conv, {"x": rand(N, 6).requires_grad_()})


@pytest.mark.skipif(not HAS_DGL, reason="no DGL")
@pytest.mark.parametrize("name", ["GraphConv", "SAGEConv", "sum", "mean", "max", "weighted"])
def test_dgl_hetero(name, plugged):
    fn = dgl.function
    edges = {t: tuple(random_edges(i)) for i, t in enumerate(TYPES)}
    g, there = dgl_pair(lambda: dgl.heterograph(edges, num_nodes_dict={"a": N, "b": N}))
    torch.manual_seed(0)
    make = {"GraphConv": lambda: dgl.nn.GraphConv(6, 4), "SAGEConv": lambda: dgl.nn.SAGEConv(6, 4, "mean")}
    if name in make:
        module = dgl.nn.HeteroGraphConv({t[1]: make[name]() for t in TYPES}, "sum").double()
    else:
        module = torch.nn.Identity()
    weights = {f"w{i}": rand(E, 1).requires_grad_() for i in range(len(TYPES))} if name == "weighted" else {}

    def call(module, inputs):
        cuda = inputs["a"].is_cuda
        (dgl_backend.enable if cuda else dgl_backend.disable)()
        graph = there if cuda else g
        if name in make:
            return list(module(graph, {k: inputs[k] for k in "ab"}).values())
        with graph.local_scope():
            for k in "ab":
                graph.nodes[k].data["h"] = inputs[k]
            for i, t in enumerate(graph.canonical_etypes if weights else ()):
                graph.edges[t].data["w"] = inputs[f"w{i}"]
            message = fn.u_mul_e("h", "w", "m") if weights else fn.copy_u("h", "m")
            reduce = getattr(fn, "sum" if weights else name)("m", "o")
            graph.multi_update_all(dict.fromkeys(graph.canonical_etypes, (message, reduce)), "sum")
            return [graph.nodes[k].data["o"] for k in "ab"]

    compare(call, module, {**{k: rand(N, 6).requires_grad_() for k in "ab"}, **weights}, calls=4)


def test_segment_and_grouped_matmul():
    x, weight = rand(30, 6), rand(3, 6, 4)
    ptr = torch.tensor([0, 5, 5, 30])
    torch.testing.assert_close(
        ops.segment_matmul(x.to(DEVICE), ptr.to(DEVICE), weight.to(DEVICE)).cpu(), ops.segment_matmul(x, ptr, weight)
    )
    inputs, others = [rand(n, 6) for n in (3, 0, 7)], [rand(6, d) for d in (2, 4, 3)]
    got = ops.grouped_matmul([t.to(DEVICE) for t in inputs], [t.to(DEVICE) for t in others])
    for ours, a, b in zip(got, inputs, others, strict=True):
        torch.testing.assert_close(ours.cpu(), a @ b)


@pytest.mark.parametrize("segments", [3, 200])
@pytest.mark.parametrize("blocks", [1, 2])
def test_segment_matmul_with_gradients(segments, blocks):
    """By one launch and by a product for each segment, of offsets on either device."""
    ptr = torch.randint(0, 5001, (segments - 1,)).sort()[0]
    ptr = torch.cat([torch.tensor([0]), ptr, torch.tensor([5000])])
    x, weight = rand(5000, 12), rand(segments, 12, 8) if blocks == 1 else rand(segments, blocks, 6, 4)

    def run(x, ptr, weight):
        leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
        out = ops.segment_matmul(leaves[0], ptr, leaves[1])
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    want = run(x, ptr, weight)
    for there in (ptr, ptr.to(DEVICE)):
        for ours, theirs in zip(run(x.to(DEVICE), there, weight.to(DEVICE)), want, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs)


@pytest.mark.parametrize("empty", [False, True])
def test_segment_matmul_by_torch(empty, monkeypatch):
    """Of bfloat16, by torch's grouped product where it has one: values and gradients as of a product for each."""
    monkeypatch.setattr(segment_matmul, "_weights_pay", lambda *_: True)
    sizes = torch.randint(1, 200, (20,), generator=torch.Generator().manual_seed(1))
    sizes[[0, 7, 19]] *= not empty
    ptr = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    x, weight, grad = (rand(*shape).bfloat16() for shape in ((int(ptr[-1]), 16), (20, 16, 24), (int(ptr[-1]), 24)))

    def run(device, ptr):
        leaves = [t.to(device).requires_grad_() for t in (x, weight)]
        out = ops.segment_matmul(leaves[0], ptr, leaves[1])
        return [out, *torch.autograd.grad(out, leaves, grad.to(device))]

    if torch.cuda.get_device_capability()[0] in bounds.GROUPED_CAPABILITIES:
        there = x.to(DEVICE)
        assert segment_matmul._grouped(there, ptr, weight.to(DEVICE)) is not None
        assert segment_matmul._weights_grouped(there, ptr, grad.to(DEVICE)) is not None
    want = run("cpu", ptr)
    for each in (ptr, ptr.to(DEVICE)):
        for ours, theirs in zip(run(DEVICE, each), want, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(not HAS_DGL, reason="needs DGL")
@pytest.mark.parametrize("regularizer", [None, "basis", "bdd"])
def test_dgl_typed_linear(regularizer):
    types = torch.randint(0, R, (N,), generator=torch.Generator().manual_seed(2))
    lin = dgl.nn.TypedLinear(6, 4, R, regularizer, 2 if regularizer else None).double()
    want = [lin(rand_x := rand(N, 6), types)]
    want += torch.autograd.grad(want[0].square().sum(), list(lin.parameters()))
    dgl_backend.enable()
    try:
        lin = lin.to(DEVICE)
        got = [lin(rand_x.to(DEVICE), types.to(DEVICE))]
        got += torch.autograd.grad(got[0].square().sum(), list(lin.parameters()))
        lengths = torch.bincount(types, minlength=R)
        weight, order = rand(R, 6, 4), types.argsort(stable=True)
        products = [
            dgl.ops.segment_mm(rand_x[order].to(DEVICE), weight.to(DEVICE), lengths),
            dgl.ops.gather_mm(rand_x.to(DEVICE), weight.to(DEVICE), idx_b=types.to(DEVICE))[order.to(DEVICE)],
        ]
    finally:
        dgl_backend.disable()
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
    for product in products:
        torch.testing.assert_close(product.cpu(), (rand_x.unsqueeze(1) @ weight[types]).squeeze(1)[order])


@of_pyg
@pytest.mark.parametrize("is_sorted", [False, True])
def test_pyg_hetero_linear(is_sorted):
    nn = pytest.importorskip("torch_geometric").nn
    types = torch.randint(0, R, (N,), generator=torch.Generator().manual_seed(2))
    types = types.sort()[0] if is_sorted else types
    there = types.to(DEVICE)

    def call(module, inputs):
        return [module(inputs["x"], there if inputs["x"].is_cuda else types)]

    report.reset()
    compare(call, nn.HeteroLinear(6, 4, R, is_sorted=is_sorted).double(), {"x": rand(N, 6).requires_grad_()})
    assert report.snapshot()["pyg.HeteroLinear"].accelerated
