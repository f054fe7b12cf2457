"""Sampled training as PyG's and DGL's users write it for several GPUs, unmodified, under the flag."""

import re

import pytest
from rank_runs import TESTS, agree, ranks


def test_unmodified_sampled_script_under_the_flag(tmp_path):
    """DistributedDataParallel and NeighborLoader: what PyG's users run today, with our samplers and kernels."""
    pytest.importorskip("torch_geometric")
    results = ranks(2, tmp_path, script=TESTS / "sampled_ranks.py", GNNACCEL="1", GNNACCEL_PROFILE="1")
    agree(results)
    for _, output in results:
        assert "parameters agree" in output and re.search(r"pyg\.SAGEConv", output), output
