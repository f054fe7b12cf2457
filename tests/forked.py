"""Python programs without the seconds that imports take: forks of a process that has imported what they need."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

# What PyG and DGL import beside themselves. They and gnnaccel are as new to each program as to a process of its own,
# and so is what the flag does to their import.
PLAIN = ("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.utils.data", "scipy.sparse", "pandas", "networkx")
PLAIN += ("requests", "psutil", "tqdm", "fsspec", "aiohttp", "jinja2")


@functools.cache
def _server(modules):
    """The process that programs are forks of; it ends with this one, which has its input."""
    words = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("fork_server.py"))]
    words += [name for name in modules if find_spec(name.partition(".")[0])]
    kept = {key: value for key, value in os.environ.items() if "GNNACCEL" not in key}
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parent.parent), kept.get("PYTHONPATH")]))
    kept |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, env=kept, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_all(commands, environments, cwd=None, timeout=300, modules=PLAIN, together=False):
    """As many processes side by side, on CPUs: a subprocess.CompletedProcess of each.

    Parameters
    ----------
    commands : list of lists
        As subprocess takes them; the first word is sys.executable, options of Python are -W, -c and -m alone.
    environments : list of dicts
        All variables of each. What torch reads when it is imported has been read, but for OMP_NUM_THREADS.
    together : bool
        What they write to stderr stands in stdout, in order.
    """
    server, programs = _server(modules), []
    with tempfile.TemporaryDirectory() as folder:
        for number, (command, environment) in enumerate(zip(commands, environments, strict=True)):
            python, *words = map(str, command)
            assert python == sys.executable
            out = f"{folder}/out{number}"
            files = {"out": out, "err": out if together else f"{folder}/err{number}"}
            programs.append({"words": words, "environment": environment, "folder": str(cwd or os.getcwd())} | files)
        print(json.dumps({"programs": programs, "timeout_s": timeout}), file=server.stdin, flush=True)
        codes = json.loads(server.stdout.readline())
        texts = [[Path(program[name]).read_text(errors="replace") for name in ("out", "err")] for program in programs]
    if codes is None:
        raise TimeoutError(f"{commands} after {timeout} s: {texts}")
    return [subprocess.CompletedProcess(*done) for done in zip(commands, codes, *zip(*texts, strict=True), strict=True)]


def run(args, env, cwd=None, timeout=300):
    """One process, as subprocess.run has it with what it prints captured as text."""
    (done,) = run_all([args], [env], cwd, timeout)
    return done
