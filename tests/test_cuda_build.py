"""What can be said of the CUDA half without a GPU."""

import pytest
from test_kernels_contract import ALONE

from gnnaccel import _C, _library


def test_every_cuda_entry_has_a_cpu_twin():
    if not _library.has_cuda_kernels():
        pytest.skip("this build has no CUDA half")
    entries = {name.removesuffix("_cuda") for name in dir(_C) if name.endswith("_cuda")}
    assert {"spmm", "sddmm", "edge_softmax", "edge_softmax_backward", "scatter_arg"} <= entries
    assert all(callable(getattr(_C, name)) for name in entries - ALONE)
