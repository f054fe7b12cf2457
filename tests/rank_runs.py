"""Programs as ranks of torch.distributed: each a process of its own, none without a timeout."""

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from command_line import ROOT

from gnnaccel import distributed

TESTS = ROOT / "tests"


def random_graph(num_nodes=60, num_edges=400, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_nodes, (2, num_edges), generator=generator)


@functools.cache
def _server():
    """The process that ranks are forks of; it ends with this one, which has its input."""
    words = [sys.executable, "-W", "ignore", str(TESTS / "rank_server.py")]
    kept = {key: value for key, value in os.environ.items() if "GNNACCEL" not in key}
    kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, env=kept, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _forked(words, environments, timeout):
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(len(environments))]
        jobs = [(words, environment, str(output)) for environment, output in zip(environments, outputs, strict=True)]
        print(json.dumps({"ranks": jobs, "timeout_s": timeout}), file=server.stdin, flush=True)
        codes, texts = json.loads(server.stdout.readline()), [output.read_text() for output in outputs]
    if codes is None:
        raise TimeoutError(f"{words} after {timeout} s: {texts}")
    return list(zip(codes, texts, strict=True))


def ranks(count, *arguments, timeout=240, script=TESTS / "part_ranks.py", fresh=False, **environment):
    """Run a program as `count` ranks without torchrun, whose agent ends all when one ends: [(exit code, output)].

    Those that need no variables of their own, which imports may look at, and no GPU are forks of one process. These do
    not take their imports apart when they end, as `fresh` processes do.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    meeting |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    each = [meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    words = [str(script), *map(str, arguments)]
    if not (fresh or environment or "cuda" in arguments):
        return _forked(words, each, timeout)
    kept = {key: value for key, value in os.environ.items() if "GNNACCEL" not in key}
    kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
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
