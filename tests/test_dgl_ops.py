"""DGL's functions beyond the matrix: dtypes, sparse formats, layouts of features, wrong arguments."""

import pytest
import torch
from dgl_compare import assert_same, both, build, compare, dgl, distinct, graph, outcome, rand

from gnnaccel import dgl_backend, report

pytestmark = pytest.mark.usefixtures("dgl_restored")

DTYPES = [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 0.05)]


@pytest.mark.parametrize("dtype,tolerance", DTYPES)
@pytest.mark.parametrize("name", [f"copy_{t}_{r}" for t in "ue" for r in ("sum", "mean", "max", "min")])
def test_dtypes(name, dtype, tolerance):
    g = graph()
    rows = 40 if name.startswith("copy_u") else 300
    values = distinct if name.endswith(("max", "min")) else rand
    for shape in ((7,), (2, 3), ()):
        compare(lambda x: getattr(dgl.ops, name)(g, x), [values(rows, *shape, dtype=dtype)], tolerance=tolerance)


@pytest.mark.parametrize("dtype,tolerance", DTYPES[1:])
def test_dtypes_of_weighted_sums_and_softmax(dtype, tolerance):
    g, x, w = graph(), rand(40, 2, 4, dtype=dtype), rand(300, 2, 1, dtype=dtype)
    compare(lambda x, w: dgl.ops.u_mul_e_sum(g, x, w), [x, w], tolerance=tolerance)
    compare(lambda x: dgl.ops.u_dot_v(g, x, x), [x], tolerance=tolerance)
    compare(lambda w: dgl.ops.edge_softmax(g, w), [w], tolerance=tolerance)


@pytest.mark.parametrize("formats", ["csc", "csr", "coo", ["csr", "csc"]])
def test_any_sparse_format(formats):
    g, x, w = graph(), rand(40, 3), rand(300, 1)
    dgl_backend.disable()
    expected = outcome(lambda x, w: dgl.ops.u_mul_e_sum(g, x, w), [x, w])
    dgl_backend.enable()  # on any format, while DGL alone refuses some of the passes on a single one
    got = outcome(lambda x, w: dgl.ops.u_mul_e_sum(g.formats(formats), x, w), [x, w])
    assert_same(got, expected, 1e-10)


def test_features_of_any_layout():
    g = graph()
    x, w = rand(4, 3, 40).permute(2, 1, 0), rand(300, 8)[:, ::2].unsqueeze(1)
    compare(lambda: dgl.ops.u_mul_e_sum(g, x, w))
    compare(lambda: dgl.ops.u_add_v(g, x, x))
    compare(lambda: dgl.ops.edge_softmax(g, w))
    compare(lambda x: dgl.ops.copy_u_max(g, x.expand(40, 6)), [rand(40, 1)])


def test_inference_mode_then_training():
    g, x = graph(), rand(40, 3)
    dgl_backend.enable()
    with torch.inference_mode():
        dgl.ops.copy_u_sum(g, x)
    compare(lambda x: dgl.ops.copy_u_sum(g, x), [x])


G, X, W = graph(), rand(40, 4), rand(300, 4)
HALF = X.half()
WRONG = {
    "message": lambda: dgl.ops.gspmm(G, "pow", "sum", X, W),
    "message dot": lambda: dgl.ops.gspmm(G, "dot", "sum", X, W),
    "reduce": lambda: dgl.ops.gspmm(G, "mul", "prod", X, W),
    "operator": lambda: dgl.ops.gsddmm(G, "pow", X, X),
    "target": lambda: dgl.ops.gsddmm(G, "add", X, X, "x", "v"),
    "no source features": lambda: dgl.ops.gspmm(G, "copy_lhs", "sum", None, None),
    "no edge features": lambda: dgl.ops.gspmm(G, "mul", "sum", X, None),
    "numpy": lambda: dgl.ops.copy_u_sum(G, X.numpy()),
    "list": lambda: dgl.ops.copy_u_mean(G, [1, 2]),
    "sparse": lambda: dgl.ops.copy_u_sum(G, X.to_sparse()),
    "scalar": lambda: dgl.ops.copy_u_sum(G, torch.tensor(1.0)),
    "integers": lambda: dgl.ops.copy_u_sum(G, torch.ones(40, 2).int()),
    "half": lambda: dgl.ops.copy_u_sum(G, HALF),
    "half on edges": lambda: dgl.ops.u_dot_v(G, HALF, HALF),
    "half in a softmax": lambda: dgl.ops.edge_softmax(G, W.half()),
    "half in a segment": lambda: dgl.ops.segment_reduce(torch.tensor([10, 30]), HALF),
    "lengths of segments": lambda: dgl.ops.segment_reduce(torch.tensor([10.0, 30.0]), X),
    "reduction of segments": lambda: dgl.ops.segment_reduce(torch.tensor([10, 30]), X, "prod"),
    "dtypes": lambda: dgl.ops.u_mul_e_sum(G, X, W.float()),
    "too few rows": lambda: dgl.ops.copy_u_sum(G, X[:39]),
    "too many rows": lambda: dgl.ops.u_mul_e_sum(G, X, rand(301, 4)),
    "shapes": lambda: dgl.ops.u_mul_e_sum(G, X, W[:, :3]),
    "shapes of a dot": lambda: dgl.ops.u_dot_e(G, X, W[:, :3]),
    "shapes of several dimensions": lambda: dgl.ops.u_add_e(G, X, rand(300, 3, 2)),
    "edge ids": lambda: dgl.ops.edge_softmax(G, W[:2], eids=torch.tensor([5000, 1])),
    "no scores of an edge type": lambda: dgl.ops.edge_softmax(build("ring"), {}),
    "mean over edge types": lambda: dgl.ops.copy_u_mean(build("ring"), [X[:n] for n in (3, 2, 4)]),
    "half over edge types": lambda: dgl.ops.copy_u_sum(build("ring"), [HALF[:n] for n in (3, 2, 4)]),
}


def _message(error) -> str:
    """Without the time that DGL's C++ puts in front."""
    name, text = error
    return f"{name}: {text.rpartition('/opt/dgl')[2]}"


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_raise_the_same_error(name):
    want, got, _ = both(WRONG[name], grad=False)
    assert isinstance(want, tuple), f"DGL alone accepts it: {want}"
    assert isinstance(got, tuple), f"{got} where DGL alone raises {want}"
    assert _message(got) == _message(want)


def test_what_dgl_does_not_look_at_is_an_error():
    """DGL alone reads and writes past the end of its arrays in these."""
    dgl_backend.enable()
    ring = build("ring")
    nodes, scores = [rand(n, 2) for n in (3, 2, 4)], {e: rand(ring.num_edges(e), 2) for e in ring.canonical_etypes}
    for wrong in (W[:299], torch.tensor(1.0), rand(301)):
        with pytest.raises(dgl.DGLError, match="one score per edge"):
            dgl.ops.edge_softmax(G, wrong)
    with pytest.raises(dgl.DGLError, match="one row per node"):
        dgl.ops.copy_u_sum(ring, [nodes[0][:1], None, nodes[2]])
    with pytest.raises(dgl.DGLError, match="one row per node"):
        dgl.ops.edge_softmax(ring, {e: s[:1] for e, s in scores.items()})
    with pytest.raises(dgl.DGLError, match="data types"):
        dgl.ops.u_add_v(ring, nodes, [x.float() for x in nodes])
    with pytest.raises(ValueError, match="offsets"):
        dgl.ops.segment_reduce(torch.tensor([3, 4]), rand(5, 2))


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extrema_skip_nan_as_dgl_does(reduce, dtype):
    g, x = graph(num_edges=120), distinct(40, 5, dtype=dtype)
    x[3], x[7, 2] = float("nan"), float("nan")
    lengths = torch.tensor([3, 1, 20, 16])
    for call in (
        lambda x: getattr(dgl.ops, f"copy_u_{reduce}")(g, x),
        lambda x: dgl.ops.segment_reduce(lengths, x, reduce),
    ):
        expected = outcome(call, [x])
        dgl_backend.enable()
        report.reset()
        got = outcome(call, [x])
        assert {r for site in report.snapshot().values() for r in site.reasons} == {
            "a maximum or minimum of values with NaN"
        }
        dgl_backend.disable()
        assert got.keys() == expected.keys()
        for key, value in got.items():
            assert torch.equal(value.nan_to_num(), expected[key].nan_to_num())
