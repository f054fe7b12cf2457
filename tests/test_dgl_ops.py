"""DGL's functions beyond the matrix: dtypes, sparse formats, layouts of features, wrong arguments."""

import pytest
import torch
from dgl_compare import assert_same, compare, dgl, distinct, graph, outcome, rand

from gnnaccel import dgl_backend, report

import dgl.function as fn  # isort: skip  (after the shim)


@pytest.fixture(autouse=True)
def restored():
    report.reset()
    yield
    dgl_backend.disable()


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


def test_wrong_arguments_raise_dgl_errors():
    dgl_backend.enable()
    g = graph()
    with pytest.raises(dgl.DGLError):
        dgl.ops.u_mul_e_sum(g, rand(40, 3), rand(300, 3).float())
    with pytest.raises(dgl.DGLError):
        dgl.ops.copy_u_sum(g, rand(39, 3))
    for shape in ((300, 2), (300, 2, 2)):
        with pytest.raises(dgl.DGLError):
            dgl.ops.u_mul_e_sum(g, rand(40, 3), rand(*shape))
        with pytest.raises(dgl.DGLError):
            dgl.ops.u_dot_e(g, rand(40, 3), rand(*shape))
    with pytest.raises(ValueError, match="offsets"):
        dgl.ops.segment_reduce(torch.tensor([3, 4]), rand(5, 2))


def test_integer_features_are_left_to_dgl():
    g = graph()

    def call():
        with g.local_scope():
            g.ndata["h"] = torch.arange(40)
            g.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"))
            return g.ndata["o"]

    dgl_backend.disable()
    with pytest.raises(dgl.DGLError) as alone:
        call()
    dgl_backend.enable()
    with pytest.raises(dgl.DGLError) as accelerated:
        call()
    assert str(accelerated.value).split("]")[1:2] == str(alone.value).split("]")[1:2]
    assert report.snapshot()["dgl.gspmm copy_lhs.sum"].left == 1
