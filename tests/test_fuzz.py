"""A bounded run of each fuzz target: the same cases each time. `make fuzz` tries others for as long as it is given."""

import pytest
import torch
from fuzz import TARGETS
from fuzz.run import run_case

# target -> cases; together they take a minute on one core.
CASES = {"ops": 2000}
CHUNKS = 10  # tests of a target, so that a failure leaves the others' cases to run


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("target", CASES)
def test_cases(target, chunk):
    torch.set_num_threads(1)
    size = CASES[target] // CHUNKS
    for seed in range(chunk * size, (chunk + 1) * size):
        try:
            run_case(target, seed)
        except Exception as error:
            raise AssertionError(f"python tests/fuzz/run.py --only {target} --case {seed}: {error}") from error


def test_every_target_is_run():
    assert set(CASES) | {"arrays"} == set(TARGETS)  # test_graph_hostile.py has the cases of arrays
