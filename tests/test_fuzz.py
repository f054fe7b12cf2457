"""A bounded run of each fuzz target: the same cases each time. `make fuzz` tries others for as long as it is given."""

import pytest
import torch
from fuzz import TARGETS
from fuzz.run import counted, run_case

CHUNKS = 10  # tests of a target, so that a failure leaves the others' cases to run
# DGL's modules skip by themselves.
NEEDS = {"arrays": ("scipy", "torch_geometric"), "layers": ("torch_geometric",), "messages": ("torch_geometric",)}


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("target", TARGETS)
def test_cases(target, chunk):
    for module in NEEDS.get(target, ()):
        pytest.importorskip(module)
    torch.set_num_threads(1)
    size = TARGETS[target] // CHUNKS
    with counted(target) as reached:
        for seed in range(chunk * size, (chunk + 1) * size):
            try:
                with reached.case() as case:
                    case.expected = run_case(target, seed)
            except Exception as error:
                raise AssertionError(f"python tests/fuzz/run.py --only {target} --case {seed}: {error}") from error
