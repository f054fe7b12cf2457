"""Programs as ranks of torch.distributed: each a process of its own, none without a timeout."""

import os
import socket
import subprocess
import sys

import torch
from command_line import ROOT
from forked import PLAIN, run_all

from gnnaccel import distributed

TESTS = ROOT / "tests"


def random_graph(num_nodes=60, num_edges=400, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_nodes, (2, num_edges), generator=generator)


def _forked(words, environments, timeout, modules):
    commands = [[sys.executable, "-W", "ignore", *words]] * len(environments)
    done = run_all(commands, environments, timeout=timeout, modules=modules, together=True)
    return [(one.returncode, one.stdout) for one in done]


def _environment(**more):
    kept = {key: value for key, value in os.environ.items() if "GNNACCEL" not in key}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


def ranks(count, *arguments, timeout=240, script=TESTS / "part_ranks.py", fresh=False, **environment):
    """Run a program as `count` ranks without torchrun, whose agent ends all when one ends: [(exit code, output)].

    But on a GPU they are forks of a process that has imported what they need; where they are given variables, which
    imports of ours look at, of one that has imported torch. These do not take their imports apart when they end, as
    `fresh` processes do.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    meeting |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    each = [meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    words = [str(script), *map(str, arguments)]
    kept = _environment(**environment)
    if not (fresh or "cuda" in arguments):
        return _forked(words, [kept | own for own in each], timeout, PLAIN if environment else ("fault_ranks",))
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", *words],
            env=kept | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for own in each
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
