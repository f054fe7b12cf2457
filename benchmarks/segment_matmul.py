"""ops.segment_matmul on CUDA: one launch for all segments, against a product of torch's for each, and torch's own
grouped product where it has one.

    python benchmarks/segment_matmul.py --csv benchmarks/results/segment_matmul_MACHINE.csv

--rows rows in 5 to 200 segments, even or skewed (sizes as 1 / rank, the largest of 200 has a sixth of the rows). For
each, the product and both gradients: milliseconds, the least of --repeat calls, the host's part included. torch_ms:
torch._grouped_mm, the product alone. picked: what the op does by itself. error: largest difference from the loop over
the largest result.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from timing import provenance, save_table, shown

from gnnaccel import ops

COLUMNS = ("dtype", "segments", "sizes", "inner", "outer", "loop_ms", "kernel_ms", "picked_ms", "picked",
           "loop_backward_ms", "kernel_backward_ms", "picked_backward_ms", "torch_ms", "error")  # fmt: skip
SEGMENTS = (5, 20, 50, 200)
WIDTHS = ((64, 64), (16, 64), (128, 128), (256, 256))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
module = sys.modules["gnnaccel.ops.segment_matmul"]  # not the function of that name


def offsets(rows: int, segments: int, skewed: bool) -> torch.Tensor:
    share = 1 / torch.arange(1, segments + 1) if skewed else torch.ones(segments)
    sizes = (share / share.sum() * rows).long()
    sizes[0] += rows - sizes.sum()
    return torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])


def least(call, repeat: int) -> float:
    call()
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return min(times)


def forced(one_launch: bool | None, call):
    """call() with the kernel (True), the loop (False), or what the op picks."""
    kept = module._pays, module._takes_grouped
    if one_launch is not None:
        module._pays, module._takes_grouped = lambda *_: one_launch, lambda *_: False
    try:
        return call()
    finally:
        module._pays, module._takes_grouped = kept


def measure(rows: int, segments: int, skewed: bool, inner: int, outer: int, dtype: str, repeat: int) -> dict:
    ptr = offsets(rows, segments, skewed)
    x = torch.randn(rows, inner, device="cuda", dtype=DTYPES[dtype], requires_grad=True)
    weight = torch.randn(segments, inner, outer, device="cuda", dtype=DTYPES[dtype], requires_grad=True)
    grad = torch.randn(rows, outer, device="cuda", dtype=DTYPES[dtype])

    def forward():
        with torch.no_grad():
            return ops.segment_matmul(x, ptr, weight, check=False)

    def both():
        return torch.autograd.grad(ops.segment_matmul(x, ptr, weight, check=False), (x, weight), grad)

    found: dict = dict(dtype=dtype, segments=segments, sizes="skewed" if skewed else "even", inner=inner, outer=outer)
    results = {}
    for name, which in (("loop", False), ("kernel", True)):
        forward_ms = forced(which, lambda: least(forward, repeat))
        found[f"{name}_ms"] = forward_ms
        found[f"{name}_backward_ms"] = forced(which, lambda: least(both, repeat)) - forward_ms
        results[name] = forced(which, lambda: (forward(), *both()))
    found["picked_ms"] = least(forward, repeat)
    found["picked_backward_ms"] = least(both, repeat) - found["picked_ms"]
    found["picked"] = "kernel" if module._pays(segments, rows * inner * outer, x.dtype) else "loop"
    if module._takes_grouped(x, ptr, inner, outer, grad):
        found["picked"] = "torch"
    results["picked"] = forward(), *both()
    pairs = [(a, b) for side in ("kernel", "picked") for a, b in zip(results[side], results["loop"], strict=True)]
    found["error"] = max(float((a.double() - b.double()).abs().max() / b.abs().max()) for a, b in pairs)
    found["torch_ms"] = None
    if hasattr(torch, "_grouped_mm"):
        ends = ptr[1:].to("cuda", torch.int32)
        try:
            found["torch_ms"] = least(lambda: torch._grouped_mm(x.detach(), weight.detach(), offs=ends), repeat)
        except RuntimeError as error:
            print(f"torch._grouped_mm: {str(error).splitlines()[0]}")
    return found


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--commit", help="to name in the table, where git is not at hand")
    parser.add_argument("--csv", metavar="OUT")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    cells, wrong = [], 0
    for dtype in options.dtypes:
        for inner, outer in WIDTHS:
            for segments in SEGMENTS:
                for skewed in (False, True):
                    found = measure(options.rows, segments, skewed, inner, outer, dtype, options.repeat)
                    cells.append(shown(COLUMNS, found))
                    wrong += found["error"] > (1e-5 if dtype == "float32" else 2e-2)
    if options.csv:
        save_table(options.csv, provenance(options.commit), COLUMNS, cells)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
