"""Programs as ranks of torch.distributed: each a process of its own, none without a timeout."""

import os
import socket
import subprocess
import sys

import torch
from command_line import ROOT

from gnnaccel import distributed

TESTS = ROOT / "tests"


def random_graph(num_nodes=60, num_edges=400, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_nodes, (2, num_edges), generator=generator)


def ranks(count, *arguments, timeout=240, script=TESTS / "part_ranks.py", **environment):
    """Run a program as `count` ranks without torchrun, whose agent ends all when one ends: [(exit code, output)]."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = {key: value for key, value in os.environ.items() if "GNNACCEL" not in key}
    kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    kept |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)} | environment
    words = [sys.executable, "-W", "ignore", str(script), *map(str, arguments)]
    started = [
        subprocess.Popen(
            words,
            env=kept | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        return [(process.communicate(timeout=timeout)[0], process.returncode)[::-1] for process in started]
    finally:
        for process in started:
            process.kill()


def agree(results):
    for code, output in results:
        assert code == 0, output


def cut_small(folder):
    """The small graph of part_ranks.py in one, two and three parts, in folders of these names."""
    import part_ranks

    for parts in (1, 2, 3):
        distributed.partition(part_ranks.small_graph(), parts, folder / str(parts))
    return folder
