"""What the tests of the command line share: the command in a process of its own, a small graph, a saved table."""

import csv
import functools
import os
import subprocess
import sys
from pathlib import Path

import forked
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
# What doctor and compare hear of a torch without CUDA.
TORCH = {"version": "2.13.0", "cuda": None, "threads": 2, "gpus": [], "cuda_kernels": False, "isa": "avx2"}


def command(*arguments, cwd=None, fresh=True, **environment):
    """`gnnaccel` with these arguments, in a process of its own, or in a fork (forked.py)."""
    env = {key: value for key, value in os.environ.items() if "GNNACCEL" not in key}
    env["PYTHONPATH"] = str(ROOT)
    code = "import sys; from gnnaccel.cli import main; sys.exit(main())"
    words = [sys.executable, "-c", code, *map(str, arguments)]
    run = functools.partial(subprocess.run, capture_output=True, text=True) if fresh else forked.run
    return run(words, env=env | environment, cwd=cwd)


def arrays(num_nodes=40, num_edges=160):
    """A small random graph in the schema of gnnaccel.data."""
    random = np.random.default_rng(0)
    parts = random.permutation(num_nodes) % 3
    return {
        "edge_index": random.integers(0, num_nodes, (2, num_edges)),
        "x": random.random((num_nodes, 8), np.float32),
        "y": np.arange(num_nodes) % 3,
        **{key: parts == part for part, key in enumerate(("train_mask", "val_mask", "test_mask"))},
    }


def table(where):
    """The rows of a saved results.csv, by figure."""
    with open(where / "results.csv", newline="") as file:
        return {row["figure"]: row for row in csv.DictReader(file)}
