"""ops.graph_conv against gnnaccel.ops.reference in float64, forward and backward, with and without each part."""

import itertools

import graphs
import pytest
import torch
from oracle import check, rand
from test_ops import DTYPES, INDEX, graph_on, name_of

from gnnaccel import ops
from gnnaccel.ops import reference


@pytest.mark.parametrize("index", INDEX, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", graphs.NAMES)
def test_graph_conv(device, name, dtype, index):
    for order, shape, given, relu in zip(
        itertools.cycle(graphs.ORDERS),
        [(16,), (33,), (2, 20), (64,), (3, 5), (1,), (260,), (0,)],
        ["wurb", "ur", "rb", "ub", "wr", "wu", "b", "wurb"],
        [True, False, True, False, True, False, True, True],
        strict=False,
    ):
        graph = graph_on(device, name, index, order)
        x = rand(graph.num_cols, *shape, dtype=dtype, device=device)
        weight = rand(graph.nnz, dtype=dtype, device=device) if "w" in given else None
        bias = rand(shape[-1], dtype=dtype, device=device) if "b" in given else None
        scales = [
            rand(n, dtype=torch.float64, device=device) if s in given else None
            for s, n in (("u", graph.num_cols), ("r", graph.num_rows))
        ]
        if dtype != torch.float64:
            scales = [None if s is None else s.float() for s in scales]
        inputs = [t for t in (x, weight, bias) if t is not None]

        def apart(values, weighted=weight is not None, biased=bias is not None):
            values = list(values)
            return values[0], values[1] if weighted else None, values[-1] if biased else None

        def op(*values, graph=graph, scales=scales, relu=relu, apart=apart):
            x, weight, bias = apart(values)
            u, r = scales
            return ops.graph_conv(graph, x, weight, source_scale=u, row_scale=r, bias=bias, relu=relu)

        def expected(*values, graph=graph, scales=scales, relu=relu, apart=apart):
            x, weight, bias = apart(values)
            u, r = (None if s is None else s.double() for s in scales)
            out = reference.graph_conv(graph, x, weight, u, r, bias, False)
            # Where the result is close to 0 its sign, and so the gradient, may differ by rounding.
            return torch.where(op(*(v.to(dtype) for v in values)) > 0, out, 0) if relu else out

        check(op, expected, *inputs)
    graph = graph_on(device, name, index)
    x = torch.full((graph.num_cols, 4), torch.nan, dtype=dtype, device=device)
    out = ops.graph_conv(graph, x, bias=-torch.ones(4, dtype=dtype, device=device), relu=True)
    empty = (graph.indptr.diff() == 0).view(-1, 1).expand_as(out)
    torch.testing.assert_close(out, torch.zeros_like(out).masked_fill(~empty, torch.nan), equal_nan=True)
