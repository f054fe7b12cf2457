"""What is done around a sum in the kernel that takes it, or in one of its own, beside torch's ways.

    python benchmarks/finished_sums.py --csv out.csv

Device time, medians of calls in turns, microseconds.

- columns: sums of the columns of a matrix, the gradient of a bias: torch's, and ops/_bias.py.
- own: GIN's sum with (1 + eps) times a row's own source, on random graphs of a mean degree, along a list: the sum with
  torch's addcmul_ behind it, and as one kernel (ops/ready.py decides between these by the degree).
- wide: GCN's sum of 16-bit features with a bias in float32: rounded with torch's add behind it, and as one kernel.
"""

from __future__ import annotations

import argparse

import torch
from timing import median_ms, provenance, save_table

import gnnaccel
from gnnaccel import _library as lib
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops import _bias, ready_call
from gnnaccel.ops._arrays import arrays_of, epilogue_of

COLUMNS = ("what", "rows", "width", "dtype", "degree", "theirs_us", "ours_us", "ratio")
MATRICES = ((1_000, 64), (4_000, 64), (10_000, 64), (100_000, 16), (100_000, 64), (169_343, 192), (1_000_000, 256))
DEGREES, ROWS, WIDTHS = (2, 8, 16, 24, 32, 64), 100_000, (16, 64, 256)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def cases(device: str):
    """(what, rows, width, dtype, degree, their function, ours)"""
    for (rows, width), (name, dtype) in ((m, d) for m in MATRICES for d in DTYPES.items()):
        x = torch.randn(rows, width, device=device).to(dtype)
        yield "columns", rows, width, name, None, lambda x=x: x.sum(0), lambda x=x: _bias.column_sums(x)
    for degree in DEGREES:
        ends = torch.randint(ROWS, (2, ROWS * degree), device=device)
        graph = Graph.from_coo(*ends, num_rows=ROWS, num_cols=ROWS)
        gnnaccel.prepare(graph, transposed=False)
        for width, (name, dtype) in ((w, d) for w in WIDTHS for d in DTYPES.items()):
            x = torch.randn(ROWS, width, device=device).to(dtype)
            codes = lib.MESSAGES["copy_lhs"], lib.REDUCES["sum"]
            kernel = ready_call.Kernel(arrays_of(graph, False, x, sums=True), x, *codes, ())
            factor, bias = torch.ones(1, device=device), torch.randn(width, device=device)
            after = lambda x=x, kernel=kernel, factor=factor: kernel(x).addcmul_(x, factor.view(()))  # noqa: E731
            inside = lambda x=x, kernel=kernel, factor=factor: kernel(x, factor=factor)  # noqa: E731
            yield "own", ROWS, width, name, degree, after, inside
            if dtype.itemsize == 2:
                scale = torch.rand(ROWS, device=device)
                epilogue = epilogue_of(source_scale=scale, row_scale=scale)
                scaled = ready_call.Kernel(arrays_of(graph, False, x, sums=True), x, *codes, epilogue)
                after = lambda x=x, scaled=scaled, bias=bias: torch.add(scaled(x), bias)  # noqa: E731
                inside = lambda x=x, scaled=scaled, bias=bias: scaled(x, bias, wide=True)  # noqa: E731
                yield "wide", ROWS, width, name, degree, after, inside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", metavar="OUT", help="also write the figures there")
    parser.add_argument("--commit", help="named in the table's head; by default what git says")
    options = parser.parse_args()
    bounds.BIAS_BYTES = 0  # also where torch's are taken
    rows = []
    with torch.no_grad():
        for *case, theirs, ours in cases("cuda"):
            torch.testing.assert_close(ours().float(), theirs().float(), rtol=2e-2, atol=2e-1)
            times = [took * 1e3 for took in median_ms([theirs, ours])]
            rows.append([*("" if c is None else c for c in case), *(f"{t:.1f}" for t in times)])
            rows[-1].append(f"{times[0] / times[1]:.2f}")
            print(*rows[-1], flush=True)
    if options.csv:
        save_table(options.csv, provenance(options.commit), COLUMNS, rows)


if __name__ == "__main__":
    main()
