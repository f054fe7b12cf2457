"""Tiles and SpMM by them on a GPU: the CPU's translation, float64 results, gradients, what is not finite, TF32."""

import pytest
import torch
from cuda_cases import DEVICE, INDEX, build, check, mixed, rand

from gnnaccel import ops
from gnnaccel.graph.translate import translate
from gnnaccel.ops import reference

GRAPHS = {
    "mixed": mixed,
    "long rows": lambda index: build([0, 4000, 1, 0, 33, 64, 65, 2500, 7, 0], 90, index, False),  # windows in pieces
    "one window": lambda index: build([3] * 16, 5, index),
    "17 rows": lambda index: build([40] * 17, 3000, index),
    "no edges": lambda index: build([0, 0, 0], 4, index),
}
FIELDS = ("edge_columns", "window_ptr", "columns", "bits", "block_ptr", "edges")


@pytest.fixture(autouse=True)
def poisoned():
    """Outputs and workspaces are filled with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize("height,width", [(16, 8), (16, 16), (1, 8)])
def test_translation_is_that_of_the_cpu(height, width, index):
    for name, make in GRAPHS.items():
        graph = make(index)
        ours, theirs = translate(graph, height, width), translate(graph.to("cpu"), height, width)
        for field in FIELDS:
            assert torch.equal(getattr(ours, field).cpu(), getattr(theirs, field)), f"{name} {field}"


@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_spmm(weighted, reduce, index):
    for make in GRAPHS.values():
        graph = make(index)
        for features in ((1,), (16,), (20,), (32,), (64,), (2, 50), (200,)):
            given = [rand(graph.num_cols, *features), *([rand(graph.nnz)] if weighted else [])]

            def tiled(x, w=None, g=graph):
                return ops.spmm(g, x, w, reduce=reduce, method="tiled")

            def definition(x, w=None, g=graph):
                w = None if w is None else w.view(-1, *(1,) * (x.dim() - 1))
                return reference.spmm(g, x, w, "copy_lhs" if w is None else "mul", reduce)

            check(tiled, definition, *given)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_what_is_not_finite_stays_in_its_rows(value):
    graph = mixed()
    x, weight = rand(graph.num_cols, 40), rand(graph.nnz)
    x[7, 3], x[11] = value, value
    for w in (None, weight):
        out = ops.spmm(graph, x, w, method="tiled")
        want = reference.spmm(graph, x, None if w is None else w.view(-1, 1), "copy_lhs" if w is None else "mul", "sum")
        assert torch.equal(out.isfinite(), want.isfinite()) and not want.isfinite().all()
        torch.testing.assert_close(out[want.isfinite()], want[want.isfinite()], rtol=1e-4, atol=1e-4)


def test_tf32_where_torch_may_use_it():
    graph = build([64] * 40, 3000)
    x = rand(graph.num_cols, 64)
    exact = reference.spmm(graph, x.double(), None, "copy_lhs", "sum")
    errors = {}
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            errors[precision] = float((ops.spmm(graph, x, method="tiled") - exact).abs().max() / exact.abs().max())
    finally:
        torch.set_float32_matmul_precision(before)
    assert errors["highest"] < 2e-6 and 1e-5 < errors["high"] < 2e-3


def test_the_same_bits_on_every_run():
    graph = GRAPHS["long rows"](torch.int32)
    x, weight = rand(graph.num_cols, 64), rand(graph.nnz)
    first = ops.spmm(graph, x, weight, method="tiled")
    assert all(torch.equal(first, ops.spmm(graph, x, weight, method="tiled")) for _ in range(3))
    assert first.device.type == DEVICE.type
