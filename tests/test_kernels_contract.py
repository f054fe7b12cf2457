"""The two halves of the binary keep one contract: every CUDA entry has a CPU twin with the same parameters."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What a CUDA entry has in place of the thread count and of the CPU's order of the rows, and its scratch memory.
CUDA_ONLY = {"stream", "work", "workspace"}
CPU_ONLY = {"threads", "out_rows"}
# The CPU's coo_to_csr looks at its pairs itself, its neighbor_sample does all steps in one, and its products alone are
# torch's.
ALONE = {"coo_in_order", "sample_seeds", "sample_table", "sample_degrees", "sample_edges", "sample_steps"}
ALONE |= {"segment_matmul", "segment_matmul_weights", "linear", "linear_weights", "add_bias", "column_sums"}


def entries(header: str) -> dict[str, list[tuple[str, str]]]:
    """name -> [(type, parameter name), ...] of each function that a header declares."""
    path = ROOT / header
    if not path.exists():
        pytest.skip(f"{header} is not in this source tree")
    text = re.sub(r"//[^\n]*|#[^\n]*", "", path.read_text())
    found = re.findall(r"\b(?:void|int64_t|cudaError_t|Samples)\s+(\w+)\s*\(([^)]*)\)\s*;", text)
    split = re.compile(r"^(.*?)(\w+)$", re.S)
    return {
        name: [tuple("".join(part.split()) for part in split.match(p.strip()).groups()) for p in arguments.split(",")]
        for name, arguments in found
    }


def test_headers_are_understood():
    names = set(entries("cpp/kernels.h"))
    assert {
        "spmm",
        "sddmm",
        "edge_softmax",
        "edge_softmax_backward",
        "scatter_arg",
        "coo_to_csr",
        "neighbor_sample",
    } <= names


def test_every_cuda_entry_has_a_cpu_twin():
    cpu, cuda = entries("cpp/kernels.h"), entries("cuda/kernels.h")
    assert cuda
    assert set(cuda) >= ALONE
    for name, arguments in cuda.items():
        if name in ALONE:
            continue
        assert name in cpu, f"cuda/kernels.h: {name} has no twin in cpp/kernels.h"
        assert arguments[-1][1] == "stream", f"{name}: the stream comes last"
        shared = [a for a in arguments if a[1] not in CUDA_ONLY]
        assert shared == [a for a in cpu[name] if a[1] not in CPU_ONLY], f"{name}: parameters differ"


@pytest.mark.parametrize("half", ["cpp", "cuda"])
def test_every_entry_is_bound(half):
    text = (ROOT / half / "bindings.cpp").read_text() if (ROOT / half / "bindings.cpp").exists() else ""
    for name in entries(f"{half}/kernels.h"):
        assert f'add("{name}", &{name});' in text, f"{half}/bindings.cpp lacks {name}"
