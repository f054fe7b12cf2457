"""What is added to a sum in the kernel that takes it, for calls that are ready: a row's own source, and a bias in the
results of float32 that 16-bit features have; and sums of columns."""

from __future__ import annotations

import pytest
import torch
from cuda_cases import DEVICE, DTYPES, INDEX, assert_close, build, rand
from test_cuda_lists import OF_SUMS, fixed, poisoned  # noqa: F401

from gnnaccel import _library as lib
from gnnaccel.lower import bounds
from gnnaccel.ops import _bias, ready_call, reference
from gnnaccel.ops._arrays import arrays_of, epilogue_of

DEGREES = {
    "mixed": [0, 0, 5, 1, 300, 0, 128, 129, 2, 700, *[3] * 20, 0, 127, 9, 0],
    "no edges": [0, 0, 0],
    "read often": [0, 4000, 1, 33, 900, 7, 0],
}
WIDTHS = [1, 3, 4, 8, 33, 40, 41, 64, 100, 256]
NARROW = [dtype for dtype in DTYPES if dtype.itemsize == 2]


@pytest.fixture(params=OF_SUMS, ids=str)
def graphs(request):
    return lambda index: {
        name: fixed(build(degrees, len(degrees), index), request.param) for name, degrees in DEGREES.items()
    }


def kernel(graph, x, epilogue=()):
    return ready_call.Kernel(
        arrays_of(graph, False, x, sums=True), x, lib.MESSAGES["copy_lhs"], lib.REDUCES["sum"], epilogue
    )


@pytest.mark.parametrize("index", INDEX, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_its_own_source(graphs, dtype, index):
    for name, graph in graphs(index).items():
        for width in WIDTHS:
            x = rand(graph.num_cols, width, dtype=dtype)
            factor = torch.tensor([-1.3], dtype=lib.accumulator(x), device=DEVICE)
            got = kernel(graph, x)(x, factor=factor)
            own = factor.double() * x.double()
            want = reference.spmm(graph, x.double(), None, "copy_lhs", "sum") + own
            size = reference.spmm(graph, x.double().abs(), None, "copy_lhs", "sum") + own.abs()
            assert_close(got, want, dtype, f"{name} {width}", size)


@pytest.mark.parametrize("index", INDEX, ids=str)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_results_of_float32(graphs, dtype, index):
    """As exact as if the features had been of it."""
    for name, graph in graphs(index).items():
        for width in (8, 40, 64, 256):
            x, bias = rand(graph.num_cols, width, dtype=dtype), rand(width)
            scales = {"source_scale": rand(graph.num_cols), "row_scale": rand(graph.num_rows)}
            assert ready_call.takes_wide(x, bias)
            got = kernel(graph, x, epilogue_of(**scales))(x, bias, wide=True)
            exact = [None, *[t.double() for t in (*scales.values(), bias)], False]
            want = reference.graph_conv(graph, x.double(), *exact)
            size = reference.graph_conv(
                graph, x.double().abs(), *[t if t is None or t is False else t.abs() for t in exact]
            )
            assert got.dtype == torch.float32
            assert_close(got, want, torch.float32, f"{name} {width}", size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 3), (700, 64), (70_000, 4), (513, 100), (40, 3000), (0, 8), (1, 1), (2100, 2, 9)]
)
def test_column_sums(shape, dtype, monkeypatch):
    monkeypatch.setattr(bounds, "BIAS_BYTES", 0)
    x = rand(*shape, dtype=dtype)
    with torch.no_grad():
        for of in (dtype, lib.accumulator(x)):
            got = _bias.column_sums(x, of)
            assert got.dtype == of and got.shape == x.shape[1:]
            assert_close(got, x.double().sum(0), of, str(shape), x.double().abs().sum(0))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (700, 64), (3000, 40), (5, 3000), (0, 8), (9, 7)])
def test_a_bias_of_float32_and_its_gradient(shape, dtype, monkeypatch):
    monkeypatch.setattr(bounds, "BIAS_BYTES", 0)
    x, bias = rand(*shape, dtype=dtype), rand(shape[1])
    with torch.no_grad():
        assert_close(_bias.biased(x, bias), x.double() + bias.double(), torch.float32)
        grad = rand(*shape)
        rounded, sums = _bias.rounded_and_sums(grad, dtype)
        assert torch.equal(rounded, grad.to(dtype))
        assert_close(sums, grad.double().sum(0), torch.float32, str(shape), grad.double().abs().sum(0))
