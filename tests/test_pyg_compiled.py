"""Compiled PyG layers on our ops: PyG's results and gradients, of the edges as they are when the program runs."""

import copy

import pytest
import torch

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from pyg_compare import D, E, N, assert_equal, backward, edges, grads, rand
from torch.nn import Linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn
from torch_geometric.nn import models

from gnnaccel import _operators, ops, pyg_backend, report
from gnnaccel.graph import build
from gnnaccel.graph.csr import Graph
from gnnaccel.ops._described import Described
from gnnaccel.pyg_backend import compiled_forwards
from gnnaccel.pyg_backend.graph import of_described

_operators.define_twins()
OPS = torch.ops.gnnaccel


@pytest.fixture(autouse=True)
def _in_float64():
    torch.compiler.reset()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(5)
    report.reset()
    yield
    torch.set_default_dtype(torch.float32)
    torch.compiler.reset()


@pytest.fixture
def sorts(monkeypatch):
    """Appended to by each graph that is made of edges."""
    made = []
    for name in ("edges_to_csr", "edges_to_looped_csr"):
        function = getattr(build, name)
        monkeypatch.setattr(build, name, lambda *args, f=function: (made.append(1), f(*args))[1])
    return made


def pair_of(make):
    plain = make().double()
    return plain, pyg_backend.accelerate(copy.deepcopy(plain))


def step(model, call, inputs):
    """A forward and backward on copies of the features: outputs and all gradients."""
    model.zero_grad()
    flat = [t for value in inputs for t in (value if isinstance(value, tuple) else (value,))]
    leaves = {id(t): t.detach().clone().requires_grad_() for t in flat if t.is_floating_point()}

    def given(value):
        return tuple(map(given, value)) if isinstance(value, tuple) else leaves.get(id(value), value)

    out = call(*map(given, inputs))
    backward(out)
    return out.detach(), grads(model), [leaf.grad for leaf in leaves.values()]


def agree(plain, model, run, *inputs):
    assert_equal(step(model, run, inputs), step(plain, plain, inputs))


def compiled(model, **options):
    return torch.compile(model, fullgraph=True, **{"backend": "aot_eager"} | options)


def counts():
    return {(site.accelerated > 0, site.left > 0) for site in report.snapshot().values()}


WEIGHT, FEATURES = rand(E, seed=3).double().abs() + 0.1, rand(E, D, seed=4).double()
PAIR = rand(N, D, seed=6).double(), rand(N - 5, D, seed=7).double()
BETWEEN = edges(N, N - 5)
# layer -> maker, what it is called with beside x and edge_index
LAYERS = {
    "GCN": (lambda: nn.GCNConv(D, 5), ()),
    "GCN weight": (lambda: nn.GCNConv(D, 5), (WEIGHT,)),
    "GCN improved": (lambda: nn.GCNConv(D, 5, improved=True, bias=False), (WEIGHT,)),
    "GCN improved, no weight": (lambda: nn.GCNConv(D, 5, improved=True), ()),
    "GCN no loops": (lambda: nn.GCNConv(D, 5, add_self_loops=False), ()),
    "GCN no loops, weight": (lambda: nn.GCNConv(D, 5, add_self_loops=False), (WEIGHT,)),
    "GCN no norm": (lambda: nn.GCNConv(D, 5, normalize=False), (WEIGHT,)),
    "GCN turned": (lambda: nn.GCNConv(D, 5, flow="target_to_source"), (WEIGHT,)),
    "SAGE": (lambda: nn.SAGEConv(D, 5), ()),
    "SAGE turned": (lambda: nn.SAGEConv(D, 5, flow="target_to_source"), ()),
    "SAGE sum": (lambda: nn.SAGEConv(D, 5, aggr="sum", project=True), ()),
    "SAGE max": (lambda: nn.SAGEConv(D, 5, aggr="max"), ()),
    "SAGE min": (lambda: nn.SAGEConv(D, 5, aggr="min"), ()),
    "GraphConv": (lambda: nn.GraphConv(D, 5), ()),
    "GraphConv weight": (lambda: nn.GraphConv(D, 5), (WEIGHT,)),
    "GraphConv mean": (lambda: nn.GraphConv(D, 5, aggr="mean"), (WEIGHT,)),
    "GraphConv max": (lambda: nn.GraphConv(D, 5, aggr="max"), (WEIGHT,)),
    "GIN": (lambda: nn.GINConv(Linear(D, 5), eps=0.3), ()),
    "GIN eps": (lambda: nn.GINConv(Linear(D, 5), train_eps=True), ()),
    "GINE": (lambda: nn.GINEConv(Linear(D, 5), eps=0.3), (FEATURES,)),
    "GINE lin": (lambda: nn.GINEConv(Linear(D, 5), edge_dim=D), (FEATURES,)),
    "GAT": (lambda: nn.GATConv(D, 4, heads=2), ()),
    "GAT mean": (lambda: nn.GATConv(D, 5, heads=3, concat=False, residual=True), ()),
    "GAT no loops": (lambda: nn.GATConv(D, 4, heads=2, add_self_loops=False, bias=False), ()),
    "GATv2": (lambda: nn.GATv2Conv(D, 4, heads=2), ()),
    "GATv2 shared": (lambda: nn.GATv2Conv(D, 5, heads=2, share_weights=True, residual=True), ()),
    "Transformer": (lambda: nn.TransformerConv(D, 4, heads=2), ()),
    "Transformer beta": (lambda: nn.TransformerConv(D, 5, heads=2, concat=False, beta=True), ()),
    "AGNN": (lambda: nn.AGNNConv(), ()),
    "SG": (lambda: nn.SGConv(D, 5, K=2), ()),
    "TAG": (lambda: nn.TAGConv(D, 5, K=2), ()),
    "APPNP": (lambda: nn.APPNP(3, 0.2), ()),
    "LG": (lambda: nn.LGConv(normalize=False), (WEIGHT,)),
    "LG norm": (lambda: nn.LGConv(), ()),
    "GatedGraph": (lambda: nn.GatedGraphConv(D, 2), (WEIGHT,)),
    "MF": (lambda: nn.MFConv(D, 5), ()),
    "SSG no loops": (lambda: nn.SSGConv(D, 5, alpha=0.1, add_self_loops=False), ()),
    "Simple": (lambda: nn.SimpleConv(aggr="mean"), (WEIGHT,)),
}
BIPARTITE = {
    "SAGE": lambda: nn.SAGEConv((D, D), 5),
    "SAGE max": lambda: nn.SAGEConv((D, D), 5, aggr="max"),
    "GraphConv": lambda: nn.GraphConv((D, D), 5),
    "GIN": lambda: nn.GINConv(Linear(D, 5)),
    "GATv2": lambda: nn.GATv2Conv((D, D), 4, heads=2, add_self_loops=False),
    "Transformer": lambda: nn.TransformerConv((D, D), 4, heads=2),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", LAYERS)
def test_compiled_layer(name, backend, sorts):
    make, rest = LAYERS[name]
    plain, model = pair_of(make)
    run, x, index = compiled(model, backend=backend), rand(N, D), edges()
    agree(plain, model, run, x, index, *rest)
    assert counts() == {(True, False)}
    made = len(sorts)
    agree(plain, model, run, x, index, *rest)
    assert len(sorts) == made == 1  # found again, forward and backward


@pytest.mark.parametrize("name", BIPARTITE)
def test_bipartite(name):
    plain, model = pair_of(BIPARTITE[name])
    agree(plain, model, compiled(model), PAIR, BETWEEN)
    assert counts() == {(True, False)}


class Wider(nn.TransformerConv):
    """Values of other sizes than queries, or one key for all heads: its message() is PyG's."""

    def __init__(self, width=4, keys=2):
        super().__init__(D, 4, heads=2)
        self.keys, self.lin_value = keys, Linear(D, 2 * width)

    def forward(self, x, edge_index):
        query, key, value = (lin(x).view(N, 2, -1) for lin in (self.lin_query, self.lin_key, self.lin_value))
        return self.propagate(edge_index, query=query, key=key[:, : self.keys], value=value, edge_attr=None)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (nn.AGNNConv, torch.float32),
        (lambda: nn.AGNNConv(requires_grad=False), torch.float32),
        (lambda: Wider(width=6), torch.float64),
        (lambda: Wider(keys=1), torch.float64),
    ],
)
def test_what_attention_has_no_kernel_for(make, dtype):
    """A parameter of another dtype than the features, heads of several sizes."""
    plain, model = pair_of(make)
    agree(plain, model, torch.compile(model, backend="aot_eager"), rand(N, D).to(dtype), edges())


@pytest.mark.parametrize("made_again", [False, True])
@pytest.mark.parametrize("name", ["GATv2", "GATv2 shared"])
def test_projections_are_made_again(name, made_again, monkeypatch):
    """Of large graphs on CUDA: the backward pass keeps none."""
    monkeypatch.setattr(compiled_forwards, "_are_made_again", lambda *_: made_again)
    make, rest = LAYERS[name]
    plain, model = pair_of(make)
    run, x, index = compiled(model, backend="aot_eager_decomp_partition"), rand(N, D), edges()
    agree(plain, model, run, x, index, *rest)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(tuple(t.shape)), t)[1], lambda t: t):
        run(x.clone().requires_grad_(), index)
    projection = (N, model.heads, model.out_channels)
    # Where the softmax is one op with the sum, it keeps the result as well.
    assert kept.count(projection) == (1 if made_again else 2 + (not model.share_weights))


@pytest.mark.parametrize("name", ["GCN", "GCN weight", "SAGE max", "GATv2"])
def test_edges_are_those_of_the_call(name):
    """Written into, replaced, of other sizes: no program holds on to a structure."""
    make, rest = LAYERS[name]
    plain, model = pair_of(make)
    run, x, index = compiled(model), rand(N, D), edges()
    agree(plain, model, run, x, index, *rest)
    with torch._dynamo.config.patch(error_on_recompile=True):
        index[0] = index[0].flip(0)
        agree(plain, model, run, x, index, *rest)
        index.data = edges(seed=8)
        agree(plain, model, run, x, index, *rest)
        agree(plain, model, run, x, edges(seed=9), *rest)
    torch.compiler.reset()
    run = compiled(model, dynamic=True)
    for recompiles, (n, e) in enumerate([(N, E), (N + 7, E + 31), (N - 5, E - 40)]):
        with torch._dynamo.config.patch(error_on_recompile=recompiles > 0):
            agree(plain, model, run, rand(n, D), edges(n, n, e), *(rand(e).abs() + 0.1 for _ in rest))


def test_marked_dynamic():
    plain, model = pair_of(lambda: models.GAT(D, 8, 2, 3, heads=2))
    run = compiled(model)
    for n, e in ((N, E), (N + 7, E + 31)):
        x, index = rand(n, D), edges(n, n, e)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(index, 1)
        with torch._dynamo.config.patch(error_on_recompile=n != N):
            assert_equal(run(x, index), plain(x, index))


def test_views_and_int32():
    plain, model = pair_of(lambda: models.GraphSAGE(D, 8, 2, 3))
    run, x, whole = compiled(model), rand(N, D), edges(count=2 * E)
    agree(plain, model, run, x, whole[:, ::2])
    agree(plain, model, run, x, whole.t().contiguous().t())
    assert_equal(run(x, whole.int()), plain(x, whole))
    assert counts() == {(True, False)}


@pytest.mark.parametrize("name", ["GCN", "APPNP"])
def test_cached(name):
    """Norms that a layer has kept are used, as PyG has it; a compiled call keeps none, and takes the edges it gets."""
    makers = {"GCN": lambda: nn.GCNConv(D, 5, cached=True), "APPNP": lambda: nn.APPNP(2, 0.1, cached=True)}
    plain, model = pair_of(makers[name])
    run, x = compiled(model), rand(N, D)
    for seed in (0, 3):
        agree(plain, model, run, x, edges(seed=seed))
        plain._cached_edge_index = None
    assert model._cached_edge_index is None and counts() == {(True, False)}
    for net in (plain, model):
        net(x, edges())
    agree(plain, model, run, x, edges(seed=3))
    assert counts() == {(True, False)}


def make_inside(x, index, model):
    return model(x, index.flip(0))


def make_two_inside(x, index, model):
    return model(model(x, index.flip(0).contiguous()), index.roll(3, 1))


def write_before(x, index, model):
    index[0, :20] = 0
    return model(x, index)


def write_behind(x, index, model):
    out = model(x, index)
    index.add_(1).remainder_(N)
    return out


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("function", [make_inside, make_two_inside, write_before, write_behind])
def test_edges_that_the_program_makes(function, backend):
    """Left to PyG, or noticed by the next call."""
    plain, model = pair_of(lambda: models.GraphSAGE(D, D, 1, D))
    run, x = compiled(function, backend=backend), rand(N, D)
    ours, theirs = edges(), edges()
    with torch.no_grad():
        for _ in range(3):
            assert_equal(run(x, ours, model), function(x, theirs, plain))
    assert_equal(ours, theirs)
    assert counts() == {(function is write_behind, function is not write_behind)}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_written_before_the_backward(backend):
    _, model = pair_of(lambda: nn.SAGEConv(D, 5))
    index = edges()
    out = compiled(model, backend=backend)(rand(N, D, grad=True), index)
    index[0, :9] = 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_bad_index():
    _, model = pair_of(lambda: nn.SAGEConv(D, 5))
    index = edges()
    index[0, 3] = N
    with pytest.raises(ValueError, match=f"got {N} at position 3"):
        compiled(model)(rand(N, D), index)


def test_module_holds_the_edges():
    class Net(torch.nn.Module):
        def __init__(self, conv):
            super().__init__()
            self.conv = conv
            self.register_buffer("index", edges())

        def forward(self, x):
            return self.conv(x, self.index)

    plain, model = pair_of(lambda: nn.GCNConv(D, 5))
    plain, model = Net(plain), Net(model)
    run = compiled(model)
    agree(plain, model, run, rand(N, D))
    for net in (plain, model):
        net.index[1, :30] = 4
    agree(plain, model, run, rand(N, D))
    assert counts() == {(True, False)}


def test_checkpoint():
    plain, model = pair_of(lambda: nn.GATConv(D, 4, heads=2))
    run = compiled(lambda x, index: checkpoint(model, x, index, use_reentrant=False))
    agree(plain, model, run, rand(N, D), edges())
    assert counts() == {(True, False)}


@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv, nn.TransformerConv])
def test_dropout(make):
    """Of equal features each result is what dropout has left of the weights, whose sum is 1."""
    layer = make(D, 4, heads=2, dropout=0.4, **({"root_weight": False} if make is nn.TransformerConv else {}))
    plain, model = pair_of(lambda: layer)
    run, x, index = compiled(model), torch.ones(400, D), edges(400, 400, 4000)
    torch.manual_seed(1)
    first = run(x, index)
    torch.manual_seed(1)
    assert_equal(run(x, index), first)
    assert not torch.allclose(run(x, index), first)
    plain.eval(), model.eval()
    whole = run(x, index)
    assert_equal(whole, plain(x, index))
    reached = whole.abs().sum(1) > 0
    parts = (first / whole)[reached]
    assert abs(parts.mean() - 1) < 0.05 and parts.std() > 0.1
    model.train()
    near = 1e-6 * rand(N, D, seed=8)  # the gradient is that of the weights that were dropped
    leaf, index = rand(N, D, grad=True), edges()

    def loss(x):
        torch.manual_seed(2)
        return run(x, index).square().sum()

    loss(leaf).backward()
    torch.testing.assert_close((leaf.grad * near).sum(), (loss(leaf + near) - loss(leaf - near)).detach() / 2)


def user_layer():
    class Mine(nn.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_i, x_j):
            return torch.tanh(x_i - x_j)

    return Mine(aggr="mean")


def with_message(layer):
    layer.message = lambda x_j: 2 * x_j
    return layer


LEFT = {
    "own message": user_layer,
    "edge features": lambda: nn.GATConv(D, 4, edge_dim=3),
    "several aggregations": lambda: nn.SAGEConv(D, 5, aggr=["mean", "max"]),
    "replaced on the instance": lambda: with_message(nn.SAGEConv(D, 5)),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_to_pyg(name):
    plain, model = pair_of(LEFT[name])
    rest = (rand(E, 3),) if name == "edge features" else ()
    agree(plain, model, compiled(model), rand(N, D), edges(), *rest)
    assert counts() == {(False, True)}


def test_autocast_is_left_to_pyg():
    plain, model = pair_of(lambda: nn.SAGEConv(D, 5))
    plain, model = plain.float(), model.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(compiled(model)(rand(N, D).float(), edges()), plain(rand(N, D).float(), edges()))
    assert counts() == {(False, True)}


def test_inference_mode():
    plain, model = pair_of(lambda: models.GCN(D, 8, 2, 3))
    run = compiled(model)
    with torch.inference_mode():
        assert_equal(run(rand(N, D), edges()), plain(rand(N, D), edges()))
    agree(plain, model, run, rand(N, D), edges())


@pytest.mark.parametrize("name", ["GIN", "GAT"])
def test_inductor(name):
    plain, model = pair_of(
        {"GIN": lambda: models.GIN(D, 8, 2, 3), "GAT": lambda: models.GAT(D, 8, 2, 3, heads=2)}[name]
    )
    run, x, index = compiled(model, backend="inductor"), rand(N, D), edges()
    for _ in range(2):
        agree(plain, model, run, x, index)
    index[1] = index[1].flip(0)
    agree(plain, model, run, x, index)
    assert counts() == {(True, False)}


def test_under_the_flag():
    pyg_backend.enable()
    try:
        model = models.GCN(D, 8, 2, 3)
        run = compiled(model)
        assert_equal(run(rand(N, D), edges()), model(rand(N, D), edges()))
        assert report.snapshot()["pyg.GCNConv"].left == 0
        pyg_backend.disable()  # the layers change class: the program is compiled anew, of PyG's code
        report.reset()
        assert_equal(run(rand(N, D), edges()), model(rand(N, D), edges()))
        assert not report.snapshot()
    finally:
        pyg_backend.disable()


def twin_cases():
    index, between = edges(), edges(N, N - 5)
    square, wide = Described(index, N, N), Described(between, N, N - 5)
    one = Described(index, N, N, "one")
    x, heads = rand(N, D, grad=True), rand(N, 2, 3, grad=True)
    scores, scale = rand(N, 2, grad=True), rand(N).abs()
    yield "degrees", wide, ()
    yield "spmm", wide, (x, rand(E, 1, grad=True), "mul", "mean", 0.0)
    yield "spmm", wide.transposed(), (rand(N - 5, D, grad=True), None, "copy_lhs", "sum", 0.0)
    yield "spmm_max_min", wide, (x, rand(E, 1, grad=True), "mul", "max", 0.0, False)
    yield "sddmm", wide, (x, rand(N - 5, D, grad=True), "dot", "u", "v")
    yield "graph_conv", one, (x, None, scale, scale, rand(D, grad=True), False)
    yield "attention", one, (heads, scores, scores.detach(), None, None, 0.0, 0.2, True)
    yield "dot_attention", one, (heads, heads, heads, None, rand(E + N, 2), None, 0.0, 0.5)
    yield "gatv2_scores", square, (heads, heads, rand(2, 3, grad=True), 0.2)
    yield "own_sum", square, (x, rand(1, grad=True))
    yield "relu_sum", wide, (x, rand(E, D, grad=True))


@pytest.mark.parametrize("case", range(11))
def test_opcheck(case):
    name, described, args = list(twin_cases())[case]
    op = getattr(OPS, f"{name}_of_edges").default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, (*described.flat(), *args), test_utils=checks)
    assert not hasattr(torch.Tag, "cudagraph_unsafe") or torch.Tag.cudagraph_unsafe in op.tags


class _Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names = {*getattr(self, "names", ()), func.name()}
        return func(*args, **(kwargs or {}))


def test_calls_of_ops():
    """They go past the dispatcher, but where it has something to do: gradients, modes, other tensors, names."""
    op, given, x = OPS.spmm_of_edges.default, Described(edges(), N, N).flat(), rand(N, D)
    rest = (None, "copy_lhs", "sum", 0.0)
    want = op(*given, x, *rest)
    with torch.no_grad():
        assert_equal(op(*given, x, *rest), want)
        assert_equal(op(*given, x, rhs=None, message="copy_lhs", reduce="sum", empty_value=0.0), want)
        assert not op(*given, rand(N, D, grad=True), *rest).requires_grad
        with _Seen() as seen:
            assert_equal(op(*given, x, *rest), want)
        assert "gnnaccel::spmm_of_edges" in seen.names
        with torch.profiler.profile() as profile:
            op(*given, x, *rest)
        assert "gnnaccel::spmm_of_edges" in {event.name for event in profile.events()}
        assert op(given[0].to("meta"), given[1], x.to("meta"), *rest).device.type == "meta"
        with pytest.raises((RuntimeError, TypeError)):
            op(*given, x)
    assert op(*given, rand(N, D, grad=True), *rest).requires_grad
    assert_equal(torch.func.vmap(lambda x: op(*given, x, *rest))(torch.stack([x, x]))[1], want)


@pytest.mark.parametrize("flipped", [False, True])
def test_loops_keep_their_numbers(flipped):
    """Edge E + v is the loop of node v, also where loops among the edges are left out."""
    index = edges()
    graph, weight = of_described(index, N, N, "one", flipped), rand(E + N)
    kept = (index[0] != index[1]).nonzero().view(-1)
    ids = torch.cat([kept, torch.arange(E, E + N)])
    ends = torch.cat([index[:, kept], torch.arange(N).expand(2, N)], 1)
    src, dst = (ends[1], ends[0]) if flipped else ends
    out = torch.zeros(N).index_add(0, dst, weight[ids] * rand(N)[src])
    given = Described(index, N, N, "one", flipped).flat()
    assert_equal(OPS.spmm_of_edges(*given, rand(N, 1), weight.view(-1, 1), "mul", "sum", 0.0)[:, 0], out)
    assert graph is of_described(index, N, N, "one", flipped) and graph.nnz == len(ids)


def test_second_derivatives_of_ops_on_edges():
    """Of ops whose formulas run outside of a compiled program, as torch.compile's eager backend has them."""
    index = edges()
    graph = Graph.from_coo(index[1], index[0], num_rows=N, num_cols=N)
    described = Described(index, N, N).flat()
    x, heads = rand(N, 3, grad=True), rand(N, 1, 3, grad=True)
    cases = [
        (lambda x: OPS.own_sum_of_edges(*described, x, rand(1)), x),
        (lambda x: OPS.relu_sum_of_edges(*described, x, rand(E, 3)), x),
        (lambda x: OPS.gatv2_scores_of_edges(*described, x, x, rand(1, 3), 0.2), heads),
    ]
    for function, leaf in cases:
        assert torch.autograd.gradgradcheck(lambda x, f=function: f(x).square(), leaf, fast_mode=True)
    assert_equal(OPS.spmm_of_edges(*described, x, None, "copy_lhs", "sum", 0.0), ops.spmm(graph, x))


def _hook(layer):
    layer.register_forward_hook(lambda module, args, out: out * 2)


def _own_message(layer):
    layer.message = lambda x_j: 3 * x_j


def _load(layer):
    layer.load_state_dict({key: value * 0.5 for key, value in layer.state_dict().items()})


def _aggregate(layer):
    layer.aggr_module = nn.aggr.MaxAggregation()


def _address(layer):
    layer.lin_r.weight.data = layer.lin_r.weight.data * 0.5


CHANGES = {
    "nothing": lambda layer: None,
    "a hook": _hook,
    "its message": _own_message,
    "its aggregation": _aggregate,
    "a state loaded": _load,
    "a parameter's memory": _address,
    "a parameter frozen": lambda layer: layer.lin_l.weight.requires_grad_(False),
    "a linear map": lambda layer: setattr(layer, "lin_l", Linear(D, 5)),
    "normalize": lambda layer: setattr(layer, "normalize", True),
    "flow": lambda layer: setattr(layer, "flow", "target_to_source"),
    "dtype": lambda layer: layer.float(),
    "evaluation": lambda layer: layer.eval(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_layer_that_changes_after_compiling(name):
    """The next call sees it, as PyG's compiled layer does."""
    plain, model = pair_of(lambda: nn.SAGEConv(D, 5))
    run = compiled(model, backend="aot_eager")
    agree(plain, model, run, rand(N, D), edges())
    for layer in (plain, model):
        torch.manual_seed(3)
        CHANGES[name](layer)
    agree(plain, model, run, rand(N, D).to(model.lin_r.weight.dtype), edges())


def test_modes_after_compiling():
    """Grad mode, inference mode and autocast are asked at each call."""
    plain, model = pair_of(lambda: models.GAT(D, 8, 2, 3, heads=2))
    plain, model, x, index = plain.float(), model.float(), rand(N, D).float(), edges()
    run = compiled(model, backend="aot_eager")
    agree(plain, model, run, x, index)
    for mode in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)):
        with mode(), torch.no_grad():
            torch.testing.assert_close(run(x, index).float(), plain(x, index).float(), rtol=2e-2, atol=2e-2)
        agree(plain, model, run, x, index)
